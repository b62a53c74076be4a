"""Laying out weights for the kernels, compiled: what `formats.lay_out` says, at the speed of memory.

NumPy moves a word at a time, 0.3 GB/s a core; here 16 words of 16 rows become one vector.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from engine.kernels.formats import ROWS, WeightFormat
from engine.kernels.ir import I16, I32, Kernel, KernelBuilder, Value, vector

LayOut = Callable[[WeightFormat, NDArray[np.uint8], NDArray[np.uint8]], None]
"""As `formats.lay_out`: rows of blocks [N, bytes] into groups [ceil(N / 16), bytes]."""


def lay_out_groups(fmt: WeightFormat) -> Kernel:
    """Whole groups of 16 rows, permuted. Parameters: raw, bytes of a row, blocks, groups, out, bytes of a group."""

    def emit(
        b: KernelBuilder, raw: Value, row_bytes: Value, blocks: Value, groups: Value, out: Value, group_bytes: Value
    ) -> None:
        raw, out = b.pointer(raw), b.pointer(out)
        block_bytes = (fmt.words_bytes + fmt.meta_bytes) // ROWS
        with b.loop(groups) as g, b.loop(blocks) as s:
            source = b.at(raw, b.times(b.times(g, ROWS), row_bytes), b.times(s, block_bytes))
            targets = fmt.place(b, b.at(out, b.times(g, group_bytes)), blocks, s)
            for segments, target in zip((fmt.words, fmt.meta), targets, strict=True):
                start = 0
                for offset, size, unit in segments:
                    with b.loop(size // unit) as u:
                        place = b.at(target, b.times(u, ROWS * unit), start)
                        b.write(_side_by_side(b, source, row_bytes, b.sum(b.times(u, unit), offset), unit), place)
                    start += ROWS * size

    return emit


def _side_by_side(b: KernelBuilder, source: Value, row_bytes: Value, at: Value, unit: int) -> Value:
    """The same `unit` bytes of 16 rows."""
    kind = {2: I16, 4: I32}[unit]
    lanes = ir.Constant(vector(kind, ROWS), ir.Undefined)
    for row in range(ROWS):
        lanes = b.insert_element(lanes, b.read(kind, source, b.times(row_bytes, row), at), I32(row))
    return lanes


def compiled(address_of: Callable[[WeightFormat], int]) -> LayOut:
    """`formats.lay_out` by the kernels at these addresses."""
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)  # calls without the GIL

    def lay_out(fmt: WeightFormat, raw: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        rows, row_bytes = raw.shape
        num_blocks = row_bytes // fmt.block_bytes
        if rows % ROWS:
            raw = np.concatenate([raw, np.zeros((-rows % ROWS, row_bytes), np.uint8)])
        if fmt.permute is not None:
            raw = fmt.permute(raw.reshape(-1, num_blocks, fmt.block_bytes)).reshape(len(raw), -1)
        raw = np.ascontiguousarray(raw)
        assert out.flags.c_contiguous
        assert out.shape == (len(raw) // ROWS, fmt.group_bytes(num_blocks))
        kernel = prototype(address_of(fmt))
        kernel(raw.ctypes.data, raw.shape[1], num_blocks, len(out), out.ctypes.data, out.shape[1])

    return lay_out
