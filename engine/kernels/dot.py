"""What matrix products are made of: activation rows in memory, and the instructions that multiply integers.

The same integers come out on every machine, whatever its instructions are.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from engine.kernels.formats import WeightFormat
from engine.kernels.ir import I16, I32, VB, VF, VI, KernelBuilder, Value, fill, vector
from engine.kernels.target import Target


@dataclass(frozen=True, slots=True)
class ActivationLayout:
    """One quantized activation row of K values in memory: the bytes, then arrays with one entry for each block.

    span 256: s8[K], f32 scale, i16 sums of 32 values [8 a block], i16 sums of 16 values [16 a block], i32 loudest:
        the largest sum of the magnitudes of 16 values.
    span 32: s8[K], f32 scale, i32 minus the sum, f32 scale * sum.
    span 1: f32[K], nothing else.
    """

    span: int

    @property
    def meta_bytes(self) -> int:
        return {256: 4 + 16 + 32 + 4, 32: 12, 1: 0}[self.span]

    def row_bytes(self, num_values: int) -> int:
        """Rounded up to an odd number of cache lines, which spreads the rows of a tile over the cache's sets."""
        blocks = num_values // self.span
        size = 4 * num_values if self.span == 1 else num_values + blocks * self.meta_bytes
        return (-(-size // 64) | 1) * 64

    def after(self, b: KernelBuilder, num_blocks: Value, per_block: int) -> Value:
        """Offset of the array that starts `per_block` bytes a block behind the values."""
        return b.times(num_blocks, self.span + per_block)


def layout_for(fmt: WeightFormat) -> ActivationLayout:
    return ActivationLayout(1 if fmt.vector is None else fmt.span)


def dot4(b: KernelBuilder, target: Target, signed: bool, acc: Value, weights: Value, activations: Value) -> Value:
    """acc <16 x i32> + in each lane the sum of 4 products of weights (u8, or s8 if `signed`) and activations (s8)."""
    if target.dot == "vnni":
        return b.intrinsic("llvm.x86.avx512.vpdpbusd.512", VI, acc, weights, activations)
    if target.dot == "maddubs":
        return _dot4_avx2(b, signed, acc, weights, activations)
    parts = []
    for o in range(0, 16, 4):
        lanes, quarter = range(o, o + 4), range(4 * o, 4 * o + 16)
        part = b.pick(acc, acc, lanes), b.pick(weights, weights, quarter), b.pick(activations, activations, quarter)
        parts.append(b.intrinsic("llvm.aarch64.neon.sdot.v4i32.v16i8", vector(I32, 4), *part))
    return b.pick(b.pick(parts[0], parts[1], range(8)), b.pick(parts[2], parts[3], range(8)), range(16))


def _dot4_avx2(b: KernelBuilder, signed: bool, acc: Value, weights: Value, activations: Value) -> Value:
    return _add_pairs(b, acc, _pair_sums(b, signed, weights, activations))


def _pair_sums(b: KernelBuilder, signed: bool, weights: Value, activations: Value) -> Value:
    """<32 x i16>: sums of two products. Exact for weights up to 127, and for signed ones as |w| * (sign(w) a)."""
    bytes32, shorts = vector(VB.element, 32), vector(I16, 16)
    parts = []
    for o in (0, 32):
        w = b.pick(weights, weights, range(o, o + 32))
        a = b.pick(activations, activations, range(o, o + 32))
        if signed:
            a = b.intrinsic("llvm.x86.avx2.psign.b", bytes32, a, w)
            w = b.intrinsic("llvm.abs.v32i8", bytes32, w, ir.Constant(ir.IntType(1), 0))
        parts.append(b.intrinsic("llvm.x86.avx2.pmadd.ub.sw", shorts, w, a))
    return b.pick(parts[0], parts[1], range(32))


def _add_pairs(b: KernelBuilder, acc: Value, pairs: Value) -> Value:
    """acc <16 x i32> + in each lane two of <32 x i16>."""
    shorts, ints = vector(I16, 16), vector(I32, 8)
    halves = [b.pick(pairs, pairs, range(o, o + 16)) for o in (0, 16)]
    sums = [b.intrinsic("llvm.x86.avx2.pmadd.wd", ints, half, fill(shorts, 1)) for half in halves]
    return b.add(acc, b.pick(sums[0], sums[1], range(16)))


class Dots:
    """A sum of `dot4` while it is written down, <16 x i32>.

    AVX2 makes a product of two instructions that multiply: one adds pairs of products in 16 bits, the other pairs of
    those in 32. As many sums as 16 bits hold, with weights up to `largest`, are added up in between, where adding is
    cheap: eight for weights of 4 bits.
    """

    def __init__(self, target: Target, signed: bool, largest: int, start: Value) -> None:
        self._target, self._signed, self._sum = target, signed, start
        self._most = max(1, 32767 // (2 * 127 * largest))
        self._pairs: Value = None
        self._count = 0

    def add(self, b: KernelBuilder, weights: Value, activations: Value) -> None:
        if self._target.dot != "maddubs":
            self._sum = dot4(b, self._target, self._signed, self._sum, weights, activations)
            return
        pairs = _pair_sums(b, self._signed, weights, activations)
        self._pairs = b.add(self._pairs, pairs) if self._count else pairs
        self._count += 1
        if self._count == self._most:
            self._take(b)

    def _take(self, b: KernelBuilder) -> None:
        if self._count:
            self._sum, self._count = _add_pairs(b, self._sum, self._pairs), 0

    def total(self, b: KernelBuilder) -> Value:
        self._take(b)
        return self._sum


def pair_products(b: KernelBuilder, target: Target, acc: Value, pairs: Value, activations: Value) -> Value:
    """acc + in each lane the sum of two int16 products. LLVM finds the instruction, but for VNNI's."""
    if target.dot == "vnni":
        return b.intrinsic("llvm.x86.avx512.vpdpwssd.512", VI, acc, pairs, activations)
    wide, shorts = vector(I32, 32), vector(I16, 32)
    product = b.mul(b.sext(b.bitcast(pairs, shorts), wide), b.sext(b.bitcast(activations, shorts), wide))
    even, odd = (b.pick(product, product, range(o, 32, 2)) for o in (0, 1))
    return b.add(acc, b.add(even, odd))


def block_step(
    b: KernelBuilder, total: Value, whole: Value, mins: Value | None, d: Value, second: Value | None,
    scale: Value, scaled_sum: Value | None,
) -> Value:  # fmt: skip
    """total + what one block adds: all float operations of a product.

    whole: the block's sum with its scales, mins: that of the activations with the mins, scale: of the activations,
    scaled_sum: scale * the sum of the activations, where the format adds m to each weight.
    """
    value = b.fmul(d, b.sitofp(whole, VF))
    if mins is not None:
        value = b.fsub(value, b.fmul(second, b.sitofp(mins, VF)))
    x = b.fmadd(value, scale, total)
    return x if scaled_sum is None else b.fmadd(second, scaled_sum, x)
