"""How keys and values are stored, and how a block of them becomes f32.

Of a KV head with D numbers and the 64 positions of a block, keys lie [D][64] and values [64][D]. `f32` is what the
model computed, `f16` is that rounded, always finite. `q8_0` has int8, and an f16 scale for each run of 32 numbers that
a head has at one position (16 at the end where D is no multiple of 32): scales of keys lie [runs][64], of values
[64][runs].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from llvmlite import ir

from engine.api import KVType
from engine.kernels.ir import F16, F32, I8, I32, I64, VF, VI, Int, KernelBuilder, Value, fill, vector

RUN = 32
"""Numbers of a head that share a scale in q8_0."""
NUMBER_BYTES: Mapping[KVType, int] = MappingProxyType({"f16": 2, "f32": 4, "q8_0": 1})
LARGEST_HALF = 65504.0
LARGEST_FLOAT = 3.4028234663852886e38

_KEYS = 64
"""Positions of a block: the distance of a position's numbers in keys."""


def runs_of(dim: int) -> int:
    """Scales that a head of `dim` numbers has in q8_0."""
    return -(-dim // RUN)


def _within(b: KernelBuilder, x: Value, limit: float) -> Value:
    """Positions that a row does not see are multiplied by zero, so all that is stored is finite."""
    x = b.select(b.fcmp_ordered(">", x, fill(VF, limit)), fill(VF, limit), x)
    return b.select(b.fcmp_ordered("<", x, fill(VF, -limit)), fill(VF, -limit), x)


def _f16(b: KernelBuilder, x: Value) -> Value:
    return b.fptrunc(_within(b, x, LARGEST_HALF), vector(F16, 16))


def _f32(b: KernelBuilder, x: Value) -> Value:
    return _within(b, x, LARGEST_FLOAT)


def _column(b: KernelBuilder, numbers: Value, size: int, dst: Value, first: Int) -> None:
    """16 numbers of `size` bytes as rows first .. first + 15 of one column of keys."""
    for j in range(16):
        place = b.times(b.sum(first, j), _KEYS * size)
        b.write(b.extract_element(numbers, I32(j)), dst, place)


def _keys(convert: Callable[[KernelBuilder, Value], Value], size: int) -> Callable[..., None]:
    def emit(b: KernelBuilder, x: Value, dst: Value, n: Value) -> None:
        x, dst = b.pointer(x), b.pointer(dst)
        with b.loop(b.sdiv(n, I64(16))) as i:
            _column(b, convert(b, b.read(VF, x, b.times(i, 64))), size, dst, b.times(i, 16))

    return emit


def _values(convert: Callable[[KernelBuilder, Value], Value], size: int) -> Callable[..., None]:
    def emit(b: KernelBuilder, x: Value, dst: Value, n: Value) -> None:
        x, dst = b.pointer(x), b.pointer(dst)
        with b.loop(b.sdiv(n, I64(16))) as i:
            b.write(convert(b, b.read(VF, x, b.times(i, 64))), dst, b.times(i, 16 * size))

    return emit


store_key_f16, store_key_f32 = _keys(_f16, 2), _keys(_f32, 4)
"""n floats into one column of keys [n][64]; dst is the address of its first number."""
store_value_f16, store_value_f32 = _values(_f16, 2), _values(_f32, 4)
"""n floats into one row of values [64][n]."""


def _q8_0(b: KernelBuilder, values: list[Value]) -> tuple[list[Value], Value]:
    """int8 of a run, and its f16 scale: max |x| / 127, rounded before the numbers are divided by it."""
    tops = [b.magnitude(v) for v in values]
    top = b.tree(tops[0] if len(tops) == 1 else b.larger(*tops), b.larger)
    scale = b.fdiv(top, F32(127.0))
    scale = b.select(b.fcmp_ordered("<", scale, F32(LARGEST_HALF)), scale, F32(LARGEST_HALF))
    half = b.fptrunc(scale, F16)
    scale = b.fpext(half, F32)
    # Where the scale rounds to zero, the numbers do too when they are divided by one.
    divisor = b.splat(b.select(b.fcmp_ordered("==", scale, F32(0.0)), F32(1.0), scale))
    levels = [_within(b, b.round_even(b.fdiv(v, divisor)), 127.0) for v in values]
    return [b.trunc(b.fptosi(level, VI), vector(I8, 16)) for level in levels], half


def store_key_q8_0(b: KernelBuilder, x: Value, dst: Value, scales: Value, n: Value) -> None:
    """n floats into one column of keys [n][64], and of their scales [runs][64]."""
    x, dst, scales = (b.pointer(p) for p in (x, dst, scales))

    def run(num_vectors: int, first: Value) -> None:
        numbers, scale = _q8_0(b, [b.read(VF, x, b.times(first, 64), 64 * i) for i in range(num_vectors)])
        for i, some in enumerate(numbers):
            _column(b, some, 1, dst, b.times(b.sum(first, i), 16))
        b.write(scale, scales, b.times(b.sdiv(first, I64(2)), 2 * _KEYS))

    b.greedy(b.sdiv(n, I64(16)), (2, 1), run)


def store_value_q8_0(b: KernelBuilder, x: Value, dst: Value, scales: Value, n: Value) -> None:
    """n floats into one row of values [64][n], and of their scales [64][runs]."""
    x, dst, scales = (b.pointer(p) for p in (x, dst, scales))

    def run(num_vectors: int, first: Value) -> None:
        numbers, scale = _q8_0(b, [b.read(VF, x, b.times(first, 64), 64 * i) for i in range(num_vectors)])
        for i, some in enumerate(numbers):
            b.write(some, dst, b.times(first, 16), 16 * i)
        b.write(scale, scales, b.times(b.sdiv(first, I64(2)), 2))

    b.greedy(b.sdiv(n, I64(16)), (2, 1), run)


def _scaled(b: KernelBuilder, numbers: Value, scale: Value) -> Value:
    """16 int8 as floats; a product of 8 and 11 bits is exact."""
    return b.fmul(b.sitofp(b.sext(numbers, VI), VF), scale)


_BYTES = ir.VectorType(I8, 16)


def widen_keys_q8_0(b: KernelBuilder, source: Value, scales: Value, target: Value, n: Value) -> None:
    """Keys [n][64] and their scales as f32 [n][64]."""
    source, scales, target = (b.pointer(p) for p in (source, scales, target))

    def run(size: int, first: Value) -> None:
        factors = [b.halves(scales, b.times(b.sdiv(first, I64(RUN)), 2 * _KEYS), 32 * c) for c in range(4)]
        with b.loop(size) as i:
            d = b.sum(first, i)
            for c, factor in enumerate(factors):
                numbers = b.read(_BYTES, source, b.times(d, _KEYS), 16 * c)
                b.write(_scaled(b, numbers, factor), target, b.times(d, 4 * _KEYS), 64 * c)

    b.greedy(n, (RUN, 16), run)


def widen_values_q8_0(b: KernelBuilder, source: Value, scales: Value, target: Value, n: Value) -> None:
    """Values [64][n] and their scales as f32 [64][n]."""
    source, scales, target = (b.pointer(p) for p in (source, scales, target))
    runs = b.sdiv(b.sum(n, RUN - 1), I64(RUN))
    with b.loop(_KEYS) as p:

        def run(num_vectors: int, first: Value) -> None:
            at = b.sum(b.times(p, runs), b.sdiv(first, I64(2)))
            factor = b.splat(b.fpext(b.read(F16, scales, b.times(at, 2)), F32))
            for i in range(num_vectors):
                place = b.sum(b.times(p, n), b.times(b.sum(first, i), 16))
                b.write(_scaled(b, b.read(_BYTES, source, place), factor), target, b.times(place, 4))

        b.greedy(b.sdiv(n, I64(16)), (2, 1), run)
