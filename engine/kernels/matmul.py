"""Matrix products of quantized weights with quantized activations, a tile at a time.

A tile is one or two groups of 16 weight rows times a few activation rows. Its inner loop is nothing but integer work:
64 weight bytes (four consecutive k of 16 rows) meet four activation bytes broadcast to all lanes in one dot-product
instruction. The sum of a block is exact in int32, so neither the tile's height nor the machine's instructions can
change it; then each block makes one float step, in ascending order. `twins.matmul` says the same in NumPy.

An activation row is quantized to signed bytes with a scale for each block (`ActivationLayout`); weights that the file
keeps as floats meet float activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.kernels.formats import Group, Sub, WeightFormat, block_scales
from engine.kernels.ir import (
    F32,
    I16,
    I32,
    I64,
    VB,
    VF,
    VI,
    Int,
    Kernel,
    KernelBuilder,
    Value,
    emit_module,
    fill,
    ir,
    vector,
)
from engine.kernels.target import Target
from engine.quant import TensorType

PREFETCH_BYTES = 8192
"""How far ahead of the weight stream few-row tiles prefetch: one-row products went from 37 to 50 GB/s with it."""


@dataclass(frozen=True, slots=True)
class ActivationLayout:
    """One quantized activation row of K values in memory: the bytes, then arrays with one entry for each block.

    span 256: s8[K], f32 scale, i16 sums of 32 values [8 a block], i16 sums of 16 values [16 a block].
    span 32: s8[K], f32 scale, i32 minus the sum, f32 scale * sum.
    span 1: f32[K], nothing else.
    """

    span: int

    @property
    def meta_bytes(self) -> int:
        return {256: 4 + 16 + 32, 32: 12, 1: 0}[self.span]

    def row_bytes(self, num_values: int) -> int:
        """Rounded up to an odd number of cache lines, which spreads the rows of a tile over the cache's sets."""
        if self.span == 1:
            size = 4 * num_values
        else:
            size = num_values + num_values // self.span * self.meta_bytes
        return (-(-size // 64) | 1) * 64

    def after(self, b: KernelBuilder, num_blocks: Value, per_block: int) -> Value:
        """Offset of the array that starts `per_block` bytes a block behind the values."""
        return b.times(num_blocks, self.span + per_block)


def layout_for(fmt: WeightFormat) -> ActivationLayout:
    return ActivationLayout(1 if fmt.sub_block is None else fmt.span)


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
    """maddubs sums pairs in int16: exact for weights up to 127, and for signed ones as |w| * (sign(w) a)."""
    bytes32, shorts, ints = vector(VB.element, 32), vector(I16, 16), vector(I32, 8)
    parts = []
    for o in (0, 32):
        w = b.pick(weights, weights, range(o, o + 32))
        a = b.pick(activations, activations, range(o, o + 32))
        if signed:
            a = b.intrinsic("llvm.x86.avx2.psign.b", bytes32, a, w)
            w = b.intrinsic("llvm.abs.v32i8", bytes32, w, ir.Constant(ir.IntType(1), 0))
        pairs = b.intrinsic("llvm.x86.avx2.pmadd.ub.sw", shorts, w, a)
        parts.append(b.intrinsic("llvm.x86.avx2.pmadd.wd", ints, pairs, fill(shorts, 1)))
    return b.add(acc, b.pick(parts[0], parts[1], range(16)))


def _pair_products(b: KernelBuilder, acc: Value, pairs: Value, activations: Value) -> Value:
    """acc + in each lane the sum of two int16 products; LLVM makes one instruction of it (vpdpwssd, vpmaddwd)."""
    wide, shorts = vector(I32, 32), vector(I16, 32)
    product = b.mul(b.sext(b.bitcast(pairs, shorts), wide), b.sext(b.bitcast(activations, shorts), wide))
    even, odd = (b.pick(product, product, range(o, 32, 2)) for o in (0, 1))
    return b.add(acc, b.add(even, odd))


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile generator of one format on one target."""

    fmt: WeightFormat
    target: Target

    @property
    def layout(self) -> ActivationLayout:
        return layout_for(self.fmt)

    @property
    def signed(self) -> bool:
        return self.fmt.wide and self.target.signed_bytes

    @property
    def bias(self) -> int:
        return 0 if self.signed else self.fmt.bias

    def emit(
        self,
        b: KernelBuilder,
        groups: Sequence[Value],
        next_group: Int,
        rows: Sequence[Value],
        blocks: Value,
        fetch: bool,
    ) -> list[list[Value]]:
        """Slots with the float sums [group][row] of <16 x f32>. `fetch`: prefetch weights, also of the next group."""
        if self.fmt.sub_block is None:
            return self._emit_floats(b, groups, next_group, rows, blocks, fetch)
        fmt = self.fmt
        scratch = [b.scratch(ir.ArrayType(VI, 4)) for _ in groups]
        totals = [b.variables(len(rows), fill(VF, 0.0)) for _ in groups]
        meta_start = b.times(blocks, fmt.words_bytes)
        with b.loop(blocks) as s:
            at = []
            for w, memory in zip(groups, scratch, strict=True):
                words = b.at(w, b.times(s, fmt.words_bytes))
                meta = b.at(w, meta_start, b.times(s, fmt.meta_bytes))
                if fetch:
                    for offset in range(0, fmt.meta_bytes, 64):
                        b.prefetch(b.at(meta, next_group, offset))
                at.append(Group(words, meta, memory, self.target))
                fmt.prepare(b, at[-1])
            sums = [b.variables(len(rows), fill(VI, 0)) for _ in groups]
            with b.loop(fmt.num_subs // fmt.unroll) as i:
                for part in range(fmt.unroll):
                    self._sub_block(b, at, rows, blocks, s, Sub(i, fmt.unroll, part), sums, fetch)
            for g, slots, total in zip(at, sums, totals, strict=True):
                self._float_step(b, g, rows, blocks, s, slots, total)
        return totals

    def _sub_block(
        self, b: KernelBuilder, groups: list[Group], rows: Sequence[Value], blocks: Value, s: Value, sub: Sub,
        sums: list[list[Value]], fetch: bool,
    ) -> None:  # fmt: skip
        """sums += scale of the sub-block * its dot products."""
        fmt, num_rows = self.fmt, len(rows)
        # With few rows the dot product's latency shows: independent sums hide it.
        chains = 1 if num_rows * len(groups) >= 4 else 4 // (num_rows * len(groups))
        k = b.times(sub.index(b), fmt.sub_size)
        if fetch:
            stride = fmt.words_bytes // fmt.num_subs
            for g in groups:
                for offset in range(0, stride, 64):
                    b.prefetch(b.at(g.words, b.times(sub.index(b), stride), offset + PREFETCH_BYTES))
        weights = [fmt.sub_block(b, g, sub) for g in groups] if fmt.sub_block else []
        if self.signed:
            weights = [[b.xor(w, fill(VB, -128)) for w in of_group] for of_group in weights]
        none = fill(VI, 0)
        start = [self._start(b, a, blocks, s) for a in rows]
        acc = [[[first] + [none] * (chains - 1) for first in start] for _ in groups]
        for q in range(fmt.sub_size // 4):
            for t, a in enumerate(rows):
                quad = b.bitcast(b.broadcast(I32, a, b.times(s, fmt.span), k, 4 * q), VB)
                for n in range(len(groups)):
                    c = q % chains
                    acc[n][t][c] = dot4(b, self.target, self.signed, acc[n][t][c], weights[n][q], quad)
        for n, g in enumerate(groups):
            scale = fmt.scale(b, g, sub) if fmt.scale else None
            for t in range(num_rows):
                x = acc[n][t][0]
                for extra in acc[n][t][1:]:
                    x = b.add(x, extra)
                if scale is not None:
                    x = b.mul(x, scale)
                b.store(b.add(b.get(sums[n][t], VI), x), sums[n][t])

    def _start(self, b: KernelBuilder, a: Value, blocks: Value, s: Value) -> Value:
        """Where a block's sum begins: for a simple format at -bias * the sum of its activations."""
        if self.fmt.span != 32 or not self.bias:
            return fill(VI, 0)
        minus_sum = b.broadcast(I32, a, self.layout.after(b, blocks, 4), b.times(s, 4))
        return b.shl(minus_sum, fill(VI, self.bias.bit_length() - 1))

    def _float_step(
        self, b: KernelBuilder, g: Group, rows: Sequence[Value], blocks: Value, s: Value,
        sums: list[Value], totals: list[Value],
    ) -> None:  # fmt: skip
        """totals = fma(d * (sum - bias * activations) - dmin * mins, activation scale, totals)."""
        fmt, layout = self.fmt, self.layout
        d, second = block_scales(b, fmt, g.meta)
        pairs = self._pairs(b, g)
        pair_bytes = 16 if fmt.sub_size == 32 else 32
        pairs_at = 4 if fmt.sub_size == 32 else 20
        for a, slot, total in zip(rows, sums, totals, strict=True):
            whole = b.get(slot, VI)
            offset = 0.0
            if fmt.span == 256 and pairs:
                corrections = fill(VI, 0)
                for p, pair in enumerate(pairs):
                    both = b.broadcast(I32, a, layout.after(b, blocks, pairs_at), b.times(s, pair_bytes), 4 * p)
                    corrections = _pair_products(b, corrections, pair, both)
                if fmt.minimum is None:
                    whole = b.sub(whole, b.mul(corrections, fill(VI, self.bias)))
                else:
                    offset = b.fmul(second, b.sitofp(corrections, VF))
            value = b.fmul(d, b.sitofp(whole, VF))
            if fmt.minimum is not None:
                value = b.fsub(value, offset)
            scale = b.broadcast(F32, a, layout.after(b, blocks, 0), b.times(s, 4))
            x = b.fmadd(value, scale, b.get(total, VF))
            if fmt.span == 32 and second is not None:
                scaled_sum = b.broadcast(F32, a, layout.after(b, blocks, 8), b.times(s, 4))
                x = b.fmadd(second, scaled_sum, x)
            b.store(x, total)

    def _pairs(self, b: KernelBuilder, g: Group) -> list[Value]:
        """What is multiplied with the activations' sums: mins, or scales where all weights share a bias; two a lane."""
        fmt = self.fmt
        factor = fmt.minimum if fmt.minimum is not None else (fmt.scale if self.bias else None)
        if factor is None:
            return []
        pairs = []
        for i in range(0, fmt.num_subs, 2):
            low, high = (factor(b, g, fmt.fixed(n)) for n in (i, i + 1))
            pairs.append(b.or_(b.and_(low, fill(VI, 0xFFFF)), b.shl(high, fill(VI, 16))))
        return pairs

    def _emit_floats(
        self,
        b: KernelBuilder,
        groups: Sequence[Value],
        next_group: Int,
        rows: Sequence[Value],
        blocks: Value,
        fetch: bool,
    ) -> list[list[Value]]:
        """Float weights: even and odd k are summed apart in ascending order, then together."""
        fmt = self.fmt
        size = fmt.words_bytes // fmt.span
        halves = [[b.variables(2, fill(VF, 0.0)) for _ in rows] for _ in groups]
        with b.loop(b.times(blocks, fmt.span // 2)) as pair:
            for n, w in enumerate(groups):
                at = b.at(w, b.times(pair, 2 * size))
                if fetch:
                    b.prefetch(b.at(at, PREFETCH_BYTES))
                for parity in (0, 1):
                    weights = self._float_weights(b, at, parity * size)
                    for a, slots in zip(rows, halves[n], strict=True):
                        x = b.broadcast(F32, a, b.times(pair, 8), 4 * parity)
                        b.store(b.fmadd(weights, x, b.get(slots[parity], VF)), slots[parity])
        for of_group in halves:
            for even, odd in of_group:
                b.store(b.fadd(b.get(even, VF), b.get(odd, VF)), even)
        return [[slots[0] for slots in of_group] for of_group in halves]

    def _float_weights(self, b: KernelBuilder, base: Value, offset: int) -> Value:
        return float_weights(b, self.fmt.type, base, offset)


def float_weights(b: KernelBuilder, kind: TensorType, base: Value, *offset: Int) -> Value:
    """16 weights that the file keeps as F32, F16 or BF16."""
    if kind == TensorType.F32:
        return b.read(VF, base, *offset)
    if kind == TensorType.F16:
        return b.halves(base, *offset)
    high = b.zext(b.read(vector(I16, 16), base, *offset), VI)
    return b.bitcast(b.shl(high, fill(VI, 16)), VF)


def matmul(fmt: WeightFormat, target: Target) -> Kernel:
    """out [rows, groups * 16] f32 = (or +=, if `add`) activations [rows, K] times the groups' weights.

    Parameters: address of the first group, bytes of a group, number of groups, address of the first activation row,
    bytes of an activation row, address of the output, bytes of an output row, blocks in K, add, number of rows.
    """
    tile = Tile(fmt, target)
    tall = target.tile_rows[0]
    wide = target.dot == "vnni"  # two groups of eight rows need 32 registers

    def emit(
        b: KernelBuilder, w: Value, group_bytes: Value, groups: Value, a: Value, lda: Value, out: Value, ldo: Value,
        blocks: Value, add: Value, rows: Value,
    ) -> None:  # fmt: skip
        w, a, out = (b.pointer(p) for p in (w, a, out))

        def body(num_groups: int, num_rows: int, group: Value, row: Value, fetch: bool) -> None:
            numbers = [b.sum(group, n) for n in range(num_groups)]
            weights = [b.at(w, b.times(n, group_bytes)) for n in numbers]
            activations = [b.at(a, b.times(b.sum(row, t), lda)) for t in range(num_rows)]
            ahead = b.times(group_bytes, num_groups)
            totals = tile.emit(b, weights, ahead, activations, blocks, fetch)
            for n, slots in zip(numbers, totals, strict=True):
                for t, slot in enumerate(slots):
                    place = b.at(out, b.times(b.sum(row, t), ldo), b.times(n, 64))
                    with b.if_else(b.icmp_signed("!=", add, I64(0))) as (yes, no):
                        with yes:
                            b.write(b.fadd(b.read(VF, place), b.get(slot, VF)), place)
                        with no:
                            b.write(b.get(slot, VF), place)

        def all_rows(num_groups: int, group: Value, start: Int, sizes: Sequence[int], fetch: bool) -> None:
            b.greedy(rows, sizes, lambda size, first: body(num_groups, size, group, first, fetch), start)

        with b.if_else(b.icmp_signed(">=", rows, I64(tall))) as (many, few):
            with many:
                whole = b.times(b.sdiv(rows, I64(tall)), tall)

                def strip(size: int, group: Value) -> None:
                    # The first tile brings the weights in; the tiles after it find them in L1.
                    body(size, tall, group, I64(0), True)
                    with b.loop(b.sdiv(whole, I64(tall)), 1) as r:
                        body(size, tall, group, b.times(r, tall), False)
                    for n in range(size):
                        all_rows(1, b.sum(group, n), whole, target.tile_rows[1:], False)

                b.greedy(groups, (1,), strip)
            with few, b.loop(groups) as g:
                all_rows(1, g, 0, target.tile_rows[1:], True)

    return emit


def dequantize_row(fmt: WeightFormat, target: Target) -> Kernel:
    """out [K] f32 = one weight row, with the float steps of quant.dequantize. Parameters: group, lane, blocks, out."""

    def emit(b: KernelBuilder, w: Value, lane: Value, blocks: Value, out: Value) -> None:
        w, out, lane = b.pointer(w), b.pointer(out), b.trunc(lane, I32)
        if fmt.sub_block is None:
            with b.loop(b.times(blocks, fmt.span)) as k:
                weights = float_weights(b, fmt.type, w, b.times(k, fmt.words_bytes // fmt.span))
                b.write(b.extract_element(weights, lane), out, b.times(k, 4))
            return
        scratch = b.scratch(ir.ArrayType(VI, 4))
        with b.loop(blocks) as s:
            words = b.at(w, b.times(s, fmt.words_bytes))
            meta = b.at(w, b.times(blocks, fmt.words_bytes), b.times(s, fmt.meta_bytes))
            g = Group(words, meta, scratch, target)
            fmt.prepare(b, g)
            d, second = block_scales(b, fmt, meta)
            with b.loop(fmt.num_subs // fmt.unroll) as i:
                for part in range(fmt.unroll):
                    sub = Sub(i, fmt.unroll, part)
                    step, least = d, None
                    if fmt.scale is not None:
                        step = b.fmul(d, b.sitofp(fmt.scale(b, g, sub), VF))
                    if fmt.minimum is not None:
                        least = b.fmul(second, b.sitofp(fmt.minimum(b, g, sub), VF))
                    k = b.sum(b.times(s, fmt.span), b.times(sub.index(b), fmt.sub_size))
                    for q, quad in enumerate(fmt.sub_block(b, g, sub)):
                        for j in range(4):
                            byte = b.and_(b.lshr(b.bitcast(quad, VI), fill(VI, 8 * j)), fill(VI, 255))
                            value = b.fmul(step, b.sitofp(b.sub(byte, fill(VI, fmt.bias)), VF))
                            if least is not None:
                                value = b.fsub(value, least)
                            elif second is not None:
                                value = b.fadd(value, second)
                            b.write(b.extract_element(value, lane), out, b.times(b.sum(k, 4 * q + j), 4))

    return emit


def matmul_module(fmt: WeightFormat, target: Target) -> str:
    """IR of the module with a format's `matmul` and `dequantize_row`."""
    functions = {"matmul": matmul(fmt, target), "dequantize_row": dequantize_row(fmt, target)}
    return emit_module(f"matmul_{fmt.type.name}", functions, target.triple)
