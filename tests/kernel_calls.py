"""Compiled kernels, called with NumPy arrays: `kernels("avx2").call("softmax", x, low, high, ...)`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import UsageError
from engine.kernels import core
from engine.kernels.build import CompiledKernels
from engine.kernels.dot import ActivationLayout, layout_for
from engine.kernels.formats import FORMATS, lay_out
from engine.kernels.ir import emit_module
from engine.kernels.matmul import matmul_module
from engine.kernels.target import ENVIRONMENT, Target, detect
from engine.kernels.twins import Activations
from engine.quant import TensorType, block_shape

TARGETS = ("best", "avx2")
"""What this CPU runs best, and the least an x86 CPU must have: the same bits are asked of both."""

HALVES = {
    TensorType.Q4_0: (0,),
    TensorType.Q4_1: (0, 2),
    TensorType.Q5_0: (0,),
    TensorType.Q5_1: (0, 2),
    TensorType.Q8_0: (0,),
    TensorType.Q2_K: (80, 82),
    TensorType.Q3_K: (108,),
    TensorType.Q4_K: (0, 2),
    TensorType.Q5_K: (0, 2),
    TensorType.Q6_K: (208,),
    TensorType.IQ4_NL: (0,),
    TensorType.IQ4_XS: (0,),
}
"""Byte offsets of the float16 d, and of m or dmin, in a block."""


def target_named(name: str) -> Target:
    """The target; the test is skipped where this CPU has none of that name, or runs it anyway as its best."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ENVIRONMENT, raising=False)
        best = detect()
        if name == "best":
            return best
        if name == best.name:
            pytest.skip(f"{name} is the best target of this CPU and tested as that")
        patch.setenv(ENVIRONMENT, name)
        try:
            return detect()
        except UsageError as error:
            pytest.skip(str(error))


class Kernels:
    """The kernels of one target. Functions are compiled when they are first called."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._compiled = CompiledKernels(target)

    def call(self, kernel: str, *args: int | np.ndarray) -> None:
        """Call a kernel of the core module; arrays stand for their addresses."""
        self._call(
            "kernels", lambda: emit_module("kernels", core.kernels(self.target), self.target.triple), kernel, args
        )

    def address(self, module: str, function: str) -> int:
        """Of a function of a module that has been called."""
        return self._compiled.address(module, function)

    def call_matmul(self, type: TensorType, function: str, *args: int | np.ndarray) -> None:
        """Call `matmul` or `dequantize_row` of a format."""
        self._call(f"matmul_{type.name}", lambda: matmul_module(FORMATS[type], self.target), function, args)

    def _call(self, module: str, emit: Callable[[], str], function: str, args: tuple[int | np.ndarray, ...]) -> None:
        self._compiled.load({module: emit})
        prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(args))
        prototype(self._compiled.address(module, function))(*(a if isinstance(a, int) else a.ctypes.data for a in args))


@functools.cache
def _kernels_of(target: Target) -> Kernels:
    return Kernels(target)


def kernels(name: str) -> Kernels:
    """The kernels of a target in TARGETS, shared by all tests of a run."""
    return _kernels_of(target_named(name))


# ---------------------------------------------------------------- what kernels read and write
def laid_out(type: TensorType, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Rows of blocks [N, row bytes] as groups [ceil(N / 16), group bytes]."""
    fmt = FORMATS[type]
    groups = np.empty((-(-len(raw) // 16), fmt.group_bytes(raw.shape[1] // fmt.block_bytes)), np.uint8)
    lay_out(fmt, raw, groups)
    return groups


def activation_rows(type: TensorType, x: NDArray[np.float32] | Activations) -> NDArray[np.uint8]:
    """Activation rows in memory, for weights of this type: floats [T, K], or what `twins.quantize` made of them."""
    return row_in_memory(layout_for(FORMATS[type]), x)


def row_in_memory(layout: ActivationLayout, x: NDArray[np.float32] | Activations) -> NDArray[np.uint8]:
    """As `ActivationLayout` describes rows: uint8 [..., row bytes], padded with zeros."""
    if isinstance(x, Activations):
        sums = x.sums(layout.span)
        parts = {
            256: lambda: [x.q, x.scales, x.sums(32).astype(np.int16), x.sums(16).astype(np.int16), x.loudest()],
            32: lambda: [x.q, x.scales, -sums, x.scales * sums.astype(np.float32)],
        }[layout.span]()
        num_values = x.q.shape[-1]
    else:
        parts, num_values = [x], x.shape[-1]
    packed = np.concatenate([np.ascontiguousarray(p).view(np.uint8) for p in parts], axis=-1)
    row = np.zeros((*packed.shape[:-1], layout.row_bytes(num_values)), np.uint8)
    row[..., : packed.shape[-1]] = packed
    return row


def blocks_of_any_bits(
    type: TensorType,
    num_rows: int,
    num_values: int,
    rng: np.random.Generator,
    scales: tuple[float, ...] = (0.01, -0.02),
) -> NDArray[np.uint8]:
    """Weight rows uint8 [num_rows, row bytes] of random bits; d and m are numbers of about the size of `scales`."""
    if type is TensorType.MXFP4:
        blocks = rng.integers(0, 256, (num_rows, num_values // 32, 17), dtype=np.uint8)
        exponents = np.frexp(np.maximum(np.abs(scales), 2.0**-126))[1]
        blocks[..., 0] = 127 + rng.choice(exponents, blocks.shape[:2])
        return blocks.reshape(num_rows, -1)
    if type not in HALVES:
        values = (rng.uniform(-1, 1, (num_rows, num_values)) * rng.choice(scales, (num_rows, 1))).astype(np.float32)
        if type is TensorType.BF16:
            return np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)
        return values.astype(np.float32 if type is TensorType.F32 else np.float16).view(np.uint8)
    span, size = block_shape(type)
    blocks = rng.integers(0, 256, (num_rows, num_values // span, size), dtype=np.uint8)
    for offset in HALVES[type]:
        halves = rng.choice(scales, blocks.shape[:2]) * rng.choice([1.0, 0.71], blocks.shape[:2])
        blocks[..., offset : offset + 2] = halves.astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(num_rows, -1)


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal to the last bit, signs of zeros included."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    bits = np.dtype(f"u{ours.dtype.itemsize}")
    different = np.ascontiguousarray(ours).view(bits) != np.ascontiguousarray(theirs).view(bits)
    if different.any():
        at = tuple(int(i) for i in np.argwhere(different)[0])
        raise AssertionError(f"{different.sum()} of {different.size} differ, first {at}: {ours[at]!r}, {theirs[at]!r}")
