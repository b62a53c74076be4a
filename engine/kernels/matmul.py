"""Matrix products of quantized weights with quantized activations, a tile at a time.

A tile is a group of 16 weight rows times a few activation rows. Its inner loop is nothing but integer work:
64 weight bytes (four consecutive k of 16 rows) meet four activation bytes broadcast to all lanes in one dot-product
instruction. The sum of a block is exact in int32, so neither the tile's height nor the machine's instructions can
change it; then each block makes one float step, in ascending order. `twins.matmul` says the same in NumPy.

An activation row is quantized to signed bytes with a scale for each block (`ActivationLayout`); weights that the file
keeps as floats meet float activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from llvmlite import ir

from engine.kernels.dot import ActivationLayout, Dots, block_step, layout_for, pair_products
from engine.kernels.formats import Group, Sub, WeightFormat, block_scales, pairs_of
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
    vector,
)
from engine.kernels.layout import lay_out_groups
from engine.kernels.panel import Panel
from engine.kernels.plan import L2_BYTES
from engine.kernels.target import Target
from engine.quant import TensorType

ONCE_BYTES, TWICE_BYTES = (6144,), (8192, 4096)
"""How far ahead of the weight stream a single row asks for each line, once or, in formats that `asks_twice`, twice; the
first is rounded up to whole blocks. Asked once where memory gives 80 GB/s, two threads read Q4_K at 95 % of it with
6 KB, at 92 with 8 and at 86 with 16."""
PREFETCH_BYTES = max(TWICE_BYTES)
"""No tile of this module prefetches much further ahead."""


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

    @property
    def ahead(self) -> tuple[int, ...]:
        """Bytes ahead at which lines are asked for."""
        return TWICE_BYTES if self.fmt.asks_twice else ONCE_BYTES

    def emit(
        self, b: KernelBuilder, group: Value, group_bytes: Value, rows: Sequence[Value], blocks: Value, fetch: bool
    ) -> list[Value]:
        """Slots with the float sums of each row, <16 x f32>. `fetch`: prefetch what follows in the weights' stream."""
        if self.fmt.vector is None:
            return self._emit_floats(b, group, rows, blocks, fetch)
        fmt = self.fmt
        scratch = b.scratch(ir.ArrayType(VI, 4))
        totals = b.variables(len(rows), fill(VF, 0.0))
        with b.loop(blocks) as s:
            words, meta = fmt.place(b, group, blocks, s)
            ahead = self._ahead(b, group, group_bytes, blocks, s) if fetch else None
            block = Group(words, meta, scratch, self.target)
            fmt.prepare(b, block)
            sums = b.variables(len(rows), fill(VI, 0))
            with b.loop(fmt.num_subs // fmt.unroll) as i:
                for part in range(fmt.unroll):
                    self._sub_block(b, block, rows, blocks, s, Sub(i, fmt.unroll, part), sums, ahead)
            self._float_step(b, block, rows, blocks, s, sums, totals, ahead)
        return totals

    def _ahead(
        self, b: KernelBuilder, group: Value, group_bytes: Value, blocks: Value, s: Value
    ) -> tuple[Value, Value]:
        """Words and meta of the block that is asked for, in a later group where this one ends before."""
        num_ahead = I64(-(-self.ahead[0] // self.fmt.words_bytes))
        groups, rest = b.sdiv(num_ahead, blocks), b.add(s, b.srem(num_ahead, blocks))
        beyond = b.icmp_signed(">=", rest, blocks)
        groups = b.select(beyond, b.add(groups, I64(1)), groups)
        there = b.select(beyond, b.sub(rest, blocks), rest)
        return self.fmt.place(b, b.at(group, b.times(groups, group_bytes)), blocks, there)

    def _sub_block(
        self, b: KernelBuilder, g: Group, rows: Sequence[Value], blocks: Value, s: Value, sub: Sub,
        sums: list[Value], ahead: tuple[Value, Value] | None,
    ) -> None:  # fmt: skip
        """sums += scale of the sub-block * its dot products; in between, its share of the words ahead is prefetched."""
        fmt = self.fmt
        # With few rows the dot product's latency shows: independent sums hide it. AVX2's only adds to a sum.
        chains = 1 if self.target.dot == "maddubs" else max(1, 4 // len(rows))
        k = b.times(sub.index(b), fmt.sub_size)
        weights = fmt.vectors(b, g, sub)
        if self.signed:
            weights = [b.xor(w, fill(VB, -128)) for w in weights]
        new = partial(Dots, self.target, self.signed, fmt.largest)
        acc = [[new(self._start(b, a, blocks, s)), *(new(fill(VI, 0)) for _ in range(chains - 1))] for a in rows]
        share = fmt.words_bytes // fmt.num_subs
        lines = [b.at(ahead[0], b.times(sub.index(b), share), at) for at in range(0, share, 64)] if ahead else []
        for q, w in enumerate(weights):
            self._prefetch_share(b, lines, q, len(weights), rows)
            for t, a in enumerate(rows):
                quad = b.bitcast(b.broadcast(I32, a, b.times(s, fmt.span), k, 4 * q), VB)
                acc[t][q % chains].add(b, w, quad)
        scale = fmt.scale(b, g, sub) if fmt.scale else None
        for of_row, slot in zip(acc, sums, strict=True):
            x = of_row[0].total(b)
            for extra in of_row[1:]:
                x = b.add(x, extra.total(b))
            if scale is not None:
                x = b.mul(x, scale)
            b.store(b.add(b.get(slot, VI), x), slot)

    def _prefetch_share(
        self, b: KernelBuilder, lines: list[Value], part: int, parts: int, rows: Sequence[Value]
    ) -> None:
        """Part number `part` of `parts` of the lines."""
        for line in lines[part * len(lines) // parts : (part + 1) * len(lines) // parts]:
            self._prefetch(b, line, rows)

    def _prefetch(self, b: KernelBuilder, line: Value, rows: Sequence[Value]) -> None:
        """What one row reads is not read again soon."""
        b.prefetch(line, stays=len(rows) > 1)
        if len(rows) == 1:
            for again in self.ahead[1:]:
                b.prefetch(b.at(line, again - self.ahead[0]), stays=False)

    def _start(self, b: KernelBuilder, a: Value, blocks: Value, s: Value) -> Value:
        """Where a block's sum begins: for a simple format at -bias * the sum of its activations."""
        if self.fmt.span != 32 or not self.bias:
            return fill(VI, 0)
        minus_sum = b.broadcast(I32, a, self.layout.after(b, blocks, 4), b.times(s, 4))
        return b.shl(minus_sum, fill(VI, self.bias.bit_length() - 1))

    def _float_step(
        self, b: KernelBuilder, g: Group, rows: Sequence[Value], blocks: Value, s: Value,
        sums: list[Value], totals: list[Value], ahead: tuple[Value, Value] | None,
    ) -> None:  # fmt: skip
        """totals = fma(d * (sum - bias * activations) - dmin * mins, activation scale, totals). Prefetches meta."""
        fmt, layout = self.fmt, self.layout
        lines = [b.at(ahead[1], at) for at in range(0, fmt.meta_bytes, 64)] if ahead else []
        d, second = block_scales(b, fmt, g.meta)
        factor = fmt.minimum or (fmt.scale if self.bias else None)
        pairs = pairs_of(b, g, fmt, factor) if factor else []
        pair_bytes, pairs_at = (16, 4) if fmt.sub_size == 32 else (32, 20)
        if not pairs:
            self._prefetch_share(b, lines, 0, 1, rows)
        for n, (a, slot, total) in enumerate(zip(rows, sums, totals, strict=True)):
            whole = b.get(slot, VI)
            corrections = fill(VI, 0)
            for p, pair in enumerate(pairs):
                if n == 0:
                    self._prefetch_share(b, lines, p, len(pairs), rows)
                both = b.broadcast(I32, a, layout.after(b, blocks, pairs_at), b.times(s, pair_bytes), 4 * p)
                corrections = pair_products(b, self.target, corrections, pair, both)
            if pairs and fmt.minimum is None:
                whole = b.sub(whole, b.mul(corrections, fill(VI, self.bias)))
            scaled_sum = None
            if fmt.span == 32 and second is not None:
                scaled_sum = b.broadcast(F32, a, layout.after(b, blocks, 8), b.times(s, 4))
            mins = None if fmt.minimum is None else corrections
            scale = b.broadcast(F32, a, layout.after(b, blocks, 0), b.times(s, 4))
            b.store(block_step(b, b.get(total, VF), whole, mins, d, second, scale, scaled_sum), total)

    def _emit_floats(
        self, b: KernelBuilder, group: Value, rows: Sequence[Value], blocks: Value, fetch: bool
    ) -> list[Value]:
        """Float weights: even and odd k are summed apart in ascending order, then together."""
        fmt = self.fmt
        size = fmt.words_bytes // fmt.span
        halves = [b.variables(2, fill(VF, 0.0)) for _ in rows]
        with b.loop(b.times(blocks, fmt.span // 2)) as pair:
            at = b.at(group, b.times(pair, 2 * size))
            for line in range(0, 2 * size if fetch else 0, 64):
                self._prefetch(b, b.at(at, self.ahead[0] + line), rows)
            for parity in (0, 1):
                weights = float_weights(b, fmt.type, at, parity * size)
                for a, slots in zip(rows, halves, strict=True):
                    x = b.broadcast(F32, a, b.times(pair, 8), 4 * parity)
                    b.store(b.fmadd(weights, x, b.get(slots[parity], VF)), slots[parity])
        for even, odd in halves:
            b.store(b.fadd(b.get(even, VF), b.get(odd, VF)), even)
        return [even for even, _ in halves]


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

    def emit(
        b: KernelBuilder, w: Value, group_bytes: Value, groups: Value, a: Value, lda: Value, out: Value, ldo: Value,
        blocks: Value, add: Value, rows: Value,
    ) -> None:  # fmt: skip
        w, a, out = (b.pointer(p) for p in (w, a, out))

        def body(num_rows: int, group: Value, row: Value, fetch: bool) -> None:
            activations = [b.at(a, b.times(b.sum(row, t), lda)) for t in range(num_rows)]
            totals = tile.emit(b, b.at(w, b.times(group, group_bytes)), group_bytes, activations, blocks, fetch)
            for t, total in enumerate(totals):
                place = b.at(out, b.times(b.sum(row, t), ldo), b.times(group, 64))
                with b.if_else(b.icmp_signed("!=", add, I64(0))) as (yes, no):
                    with yes:
                        b.write(b.fadd(b.read(VF, place), b.get(total, VF)), place)
                    with no:
                        b.write(b.get(total, VF), place)

        def few_rows(group: Value, start: Int, end: Value, fetch: bool) -> None:
            b.greedy(end, target.tile_rows[1:], lambda size, first: body(size, group, first, fetch), start)

        def tiles() -> None:
            with b.if_else(b.icmp_signed(">=", rows, I64(tall))) as (many, few):
                with many:
                    # As many rows as stay in L2 while all groups pass.
                    share = b.times(b.larger_int(I64(1), b.sdiv(I64(L2_BYTES // tall), lda)), tall)
                    with b.loop(b.sdiv(b.sum(rows, share, -1), share)) as strip, b.loop(groups) as g:
                        start = b.mul(strip, share)
                        end = b.smaller(rows, b.sum(start, share))
                        num_tiles = b.sdiv(b.sub(end, start), I64(tall))
                        # The first tile brings the weights in; the tiles after it find them in L1.
                        with b.loop(b.smaller(num_tiles, I64(1))):
                            body(tall, g, start, True)
                        with b.loop(num_tiles, 1) as r:
                            body(tall, g, b.sum(start, b.times(r, tall)), False)
                        few_rows(g, b.sum(start, b.times(num_tiles, tall)), end, False)
                with few, b.loop(groups) as g:
                    few_rows(g, 0, rows, True)

        if not target.has_panels or fmt.vector is None:
            tiles()
            return
        with b.if_else(b.icmp_signed(">=", rows, I64(fmt.panel_rows))) as (enough, less):
            with enough:
                Panel(fmt, target).emit(b, w, group_bytes, groups, a, lda, out, ldo, blocks, add, rows)
            with less:
                tiles()

    return emit


def dequantize_row(fmt: WeightFormat, target: Target) -> Kernel:
    """out [K] f32 = one weight row, with the float steps of quant.dequantize. Parameters: group, lane, blocks, out."""

    def emit(b: KernelBuilder, w: Value, lane: Value, blocks: Value, out: Value) -> None:
        w, out, lane = b.pointer(w), b.pointer(out), b.trunc(lane, I32)
        if fmt.vector is None:
            with b.loop(b.times(blocks, fmt.span)) as k:
                weights = float_weights(b, fmt.type, w, b.times(k, fmt.words_bytes // fmt.span))
                b.write(b.extract_element(weights, lane), out, b.times(k, 4))
            return
        scratch = b.scratch(ir.ArrayType(VI, 4))
        with b.loop(blocks) as s:
            words, meta = fmt.place(b, w, blocks, s)
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
                    for q, quad in enumerate(fmt.vectors(b, g, sub)):
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
    """IR of the module with a format's `matmul`, `dequantize_row` and `lay_out`."""
    functions = {
        "matmul": matmul(fmt, target),
        "dequantize_row": dequantize_row(fmt, target),
        "lay_out": lay_out_groups(fmt),
    }
    return emit_module(f"matmul_{fmt.type.name}", functions, target.triple)
