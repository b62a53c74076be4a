"""Kernels for arm64: all compile here, whatever this CPU is; where qemu runs programs of arm64, bits are compared."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from arm64 import ARM64, BASE, GCC, QEMU, compiled, needs_qemu
from kernel_calls import activation_rows, assert_same_bits, blocks_of_any_bits, laid_out, row_in_memory

from engine.kernels import core, twins
from engine.kernels.dot import ActivationLayout
from engine.kernels.formats import FORMATS
from engine.kernels.ir import emit_module
from engine.kernels.matmul import matmul_module
from engine.kernels.probe import probe_module
from engine.quant import TensorType

ROW_COUNTS = (1, 2, 3, 9)

PROGRAM = """
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
typedef long long I;
void KERNEL(I, I, I, I, I, I, I, I, I, I);
int main(int argc, char **argv) {
    I base = atoll(argv[2]), size = atoll(argv[3]), a[10] = {0};
    char *memory = mmap((void *)base, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    FILE *f = fopen(argv[1], "r+b");
    if (memory != (char *)base || !f || fread(memory, 1, size, f) != size) return 2;
    for (int i = 4; i < argc; i++) a[i - 4] = atoll(argv[i]);
    KERNEL(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]);
    rewind(f);
    return fwrite(memory, 1, size, f) != size || fclose(f);
}
"""
"""Calls one kernel on memory that is a file. Arguments that a kernel does not have are in places it does not read."""


def core_text() -> str:
    return emit_module("kernels", core.kernels(ARM64), ARM64.triple)


def called(assembly: str) -> set[str]:
    """Functions outside the module that its code needs."""
    return set(re.findall(r"^\tbl\t(\w+)", assembly, re.MULTILINE))


@pytest.mark.parametrize("type", FORMATS, ids=lambda type: type.name)
def test_products_of_every_type_compile_to_dot_products_of_arm64(type: TensorType) -> None:
    assembly, code = compiled(matmul_module(FORMATS[type], ARM64))
    assert code[:4] == b"\x7fELF"
    floats = FORMATS[type].vector is None
    assert bool(re.search(r"\tsdot\tv\d+\.4s, v\d+\.16b, v\d+\.16b", assembly)) is not floats
    if floats:
        assert re.search(r"\tfmla\tv", assembly)
    assert called(assembly) <= {"memset"}


def test_all_other_kernels_compile_for_arm64() -> None:
    for text in (core_text(), probe_module(ARM64)):
        assembly, code = compiled(text)
        assert code[:4] == b"\x7fELF"
        assert called(assembly) <= {"memset"}


# ---------------------------------------------------------------- run, where that is possible
class Emulated:
    """The functions of one module, each call in a process of its own under qemu."""

    def __init__(self, folder: Path, text: str) -> None:
        self._folder = folder
        (folder / "kernels.o").write_bytes(compiled(text, 2)[1])
        (folder / "main.c").write_text(PROGRAM)

    def call(self, function: str, *args: int | np.ndarray) -> None:
        self._call(function, (), args)

    def call_behind(self, rows: np.ndarray, function: str, *args: int | np.ndarray) -> None:
        """With `rows` at BASE, for kernels that are given addresses of rows."""
        self._call(function, (rows,), args)

    def _call(self, function: str, before: tuple[np.ndarray, ...], args: Sequence[int | np.ndarray]) -> None:
        program, image, memory = self._folder / function, self._folder / "image", bytearray()
        args = (*before, *args)
        if not program.exists():
            sources = (self._folder / "main.c", self._folder / "kernels.o")
            subprocess.run([GCC, "-static", "-O1", f"-DKERNEL={function}", *sources, "-o", program], check=True)
        numbers = []
        for a in args:
            if isinstance(a, np.ndarray):
                assert a.flags.c_contiguous
                memory.extend(bytes(-len(memory) % 64))
                numbers.append(BASE + len(memory))
                memory.extend(a.tobytes())
            else:
                numbers.append(a)
        image.write_bytes(memory)
        command = [QEMU, "-cpu", "max", program, image, BASE, len(memory), *numbers[len(before) :]]
        subprocess.run([str(c) for c in command], check=True, timeout=60)
        after = image.read_bytes()
        for a, n in zip(args, numbers, strict=True):
            if isinstance(a, np.ndarray):
                a[...] = np.frombuffer(after, a.dtype, a.size, n - BASE).reshape(a.shape)


@pytest.mark.slow
@needs_qemu
@pytest.mark.parametrize("type", FORMATS, ids=lambda type: type.name)
def test_products_on_arm64_have_the_bits_of_the_twin(type: TensorType, tmp_path: Path) -> None:
    rng, fmt = np.random.default_rng(int(type)), FORMATS[type]
    emulated = Emulated(tmp_path, matmul_module(fmt, ARM64))
    for num_blocks in (2, 3):
        raw = blocks_of_any_bits(type, 35, num_blocks * fmt.span, rng)
        x = rng.standard_normal((max(ROW_COUNTS), num_blocks * fmt.span)).astype(np.float32)
        span, groups = twins.activation_span(type), laid_out(type, raw)
        activations = activation_rows(type, x if span == 1 else twins.quantize(x, span))
        expected = twins.matmul(type, raw, x)
        for rows in ROW_COUNTS:
            out = np.full((rows, 16 * len(groups)), np.float32(-7))
            emulated.call(
                "matmul", groups, groups.strides[0], len(groups), activations, activations.strides[0],
                out, out.strides[0], num_blocks, 0, rows,
            )  # fmt: skip
            assert_same_bits(out[:, : len(raw)], expected[:rows])


@pytest.mark.slow
@needs_qemu
def test_softmax_on_arm64_has_the_bits_of_the_twin(tmp_path: Path) -> None:
    x = np.random.default_rng(4).standard_normal((3, 512)).astype(np.float32) * 5
    weights, peaks, totals = twins.softmax(x[:, :448].copy(), 3, 400)
    states = np.ones((3, 16 + 64), np.float32)
    places = BASE + np.arange(3) * states.strides[0]
    Emulated(tmp_path, core_text()).call_behind(states, "softmax", x, 3, 3, 400, places, 64)
    assert_same_bits(x[:, :448], weights)
    assert_same_bits(states[:, :2], np.stack([peaks, totals], axis=1))
    assert not states[:, 16:].any()


@pytest.mark.slow
@needs_qemu
def test_norms_and_quantized_activations_on_arm64_have_the_bits_of_the_twins(tmp_path: Path) -> None:
    rng, emulated = np.random.default_rng(3), Emulated(tmp_path, core_text())
    x, weight = (rng.standard_normal(768).astype(np.float32) for _ in range(2))
    inverse = np.zeros(1, np.float32)
    emulated.call("inverse_rms", x, 768, np.array([1e-5], np.float32), inverse)
    assert_same_bits(inverse[0], twins.inverse_rms(x, 1e-5))
    for span in (256, 32):
        layout = ActivationLayout(span)
        row, blocks = np.zeros(layout.row_bytes(768), np.uint8), 768 // span
        emulated.call(f"norm_{span}", x, weight, inverse, row, 0, blocks, blocks, 0, 0)
        assert_same_bits(row, row_in_memory(layout, twins.quantize(twins.normed(x, weight, 1e-5), span)))
        emulated.call(f"silu_{span}", x, weight, inverse, row, 0, blocks, blocks, 0, 0)
        assert_same_bits(row, row_in_memory(layout, twins.quantize(twins.silu(x, weight), span)))


@pytest.mark.slow
@needs_qemu
def test_attention_in_integers_on_arm64_has_the_bits_of_the_twin(tmp_path: Path) -> None:
    rng, emulated, dim = np.random.default_rng(5), Emulated(tmp_path, core_text()), 80
    q = rng.standard_normal((3, dim)).astype(np.float32)
    x = rng.standard_normal((64, dim)).astype(np.float16)
    scales, factors = np.zeros((2, 64), np.float32)
    keys, values = np.zeros((dim // 2, 64, 2), np.int16), np.zeros((32, dim, 2), np.int16)
    expected, rows = twins.fixed_scores(q, x), q.copy()
    for row in rows:
        emulated.call("fix_query", row, dim)
    stored = np.ascontiguousarray(x.T)
    emulated.call("fix_keys", stored, keys, scales, dim, stored)
    out = np.zeros((3, 512), np.float32)
    places = BASE + np.arange(3) * rows.strides[0]
    emulated.call_behind(rows, "scores_fixed", places, 3, keys, scales, out, dim, stored)
    assert_same_bits(out[:, :64], expected)
    weights, states = np.zeros((3, 512), np.float32), np.zeros((3, 16 + dim), np.float32)
    of_weights = np.zeros(16, np.float32)
    weights[:, :61] = rng.uniform(0, 1, (3, 61))
    expected = twins.fixed_weigh(weights[:, :61].copy(), x[:61], np.zeros((3, dim), np.float32))
    places = BASE + np.arange(3) * states.strides[0]
    emulated.call("scale_values", x, 61, scales, factors, dim)
    emulated.call("fix_values", x, factors, values, 31, dim, x)
    emulated.call("fix_weights", weights, 3, 0, scales, of_weights)
    emulated.call_behind(states, "weigh_fixed", weights, of_weights, 3, values, 31, places, dim, x)
    assert_same_bits(states[:, 16:], expected)
