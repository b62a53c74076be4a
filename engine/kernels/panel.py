"""Matrix products with many activation rows: each weight is taken apart once and then met by all of them.

The tile of `matmul.py` takes 8 rows and unpacks the weights again for the next 8. From 10 to 44 rows on, depending on
the format, it is cheaper to write the unpacked bytes, scales and mins of a stretch of K of two groups into a panel,
which stays in L1, and to run all rows past it:

    for each stretch of K whose activations stay in L2:
        for each pair of groups:
            for each 256 values of K:
                fill the panel: unpack both groups' blocks
                for each 6 rows:
                    for each vector of the panel:      load 64 weight bytes of either group
                        for each row:                  broadcast 4 activation bytes, one dot product with either group
                    scales, and the block's float step
            write (or add) the totals, behind the last stretch

Nothing but loads and dot products is left in the inner loop, and a broadcast serves two groups. That is what it takes:
a core loads two vectors and multiplies two in a cycle, so the tile of one group, with a load for each product and one
for the weights, waits for loads. The float totals wait in memory while the panel is filled anew; a row's blocks are
added in ascending order, as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from engine.kernels.dot import ActivationLayout, block_step, dot4, layout_for, pair_products
from engine.kernels.formats import Group, Sub, WeightFormat, block_scales, pairs_of
from engine.kernels.ir import F32, I32, I64, VB, VF, VI, KernelBuilder, Value, fill
from engine.kernels.plan import L2_BYTES
from engine.kernels.target import Target

GROUPS = (2, 1)
"""Groups that share a panel."""
TILE_ROWS = (6, 4)
"""Rows of a tile: with six, sums and scaled sums fit the registers; four take what is left over of twelve. A tile that
has fewer takes its last row several times and writes the same result as often."""
CHUNK = 256
"""Values of K in a panel: one block of a K-quant, eight of the simple formats."""
MAX_ROWS = 264
"""Rows that pass a panel before the next one is filled."""
BUNCH = 12
"""Groups that are multiplied with one stretch of K after the other. Their totals, 200 KB, lie on the stack."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a group's block lies in a panel: byte offsets of what follows its weight vectors."""

    fmt: WeightFormat

    @property
    def scales(self) -> int:
        """An i32 vector for each sub-block."""
        return 16 * self.fmt.span

    @property
    def mins(self) -> int:
        """A vector of i16 pairs for two sub-blocks."""
        return self.scales + (64 * self.fmt.num_subs if self.fmt.scale else 0)

    @property
    def floats(self) -> int:
        """d, then dmin or m."""
        return self.mins + (32 * self.fmt.num_subs if self.fmt.minimum else 0)

    @property
    def size(self) -> int:
        return self.floats + 64 * (1 + self.fmt.has_second)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The arguments of the kernel that do not change while it runs."""

    group_bytes: Value
    a: Value
    lda: Value
    blocks: Value
    num_rows: Value


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The blocks of K that are in the panel."""

    panel: Value
    first: Value
    count: Value
    begin: Value
    """The first block of the stretch of K that stays in L2."""
    end: Value
    """The first one behind it."""


@dataclass(frozen=True, slots=True)
class _Fetch:
    """What a tile prefetches while it multiplies."""

    asks: Value
    """i1: it does."""
    group: Value


def _ceil(b: KernelBuilder, x: Value, size: Value) -> Value:
    """x / size, rounded up."""
    return b.sdiv(b.sum(x, size, -1), size)


def _even(b: KernelBuilder, x: Value, most: Value, unit: int) -> Value:
    """The size of a part, where x is cut into as few as `most` allows, all as large but for multiples of `unit`."""
    return b.times(_ceil(b, _ceil(b, x, _ceil(b, x, most)), I64(unit)), unit)


def _num_tiles(b: KernelBuilder, rows: Value) -> tuple[Value, Value]:
    """Tall and short tiles for all rows, with at most one row too many where there are six or more."""
    tall, short = TILE_ROWS
    num_tall, left = b.sdiv(rows, I64(tall)), b.srem(rows, I64(tall))
    # Three or four rows over are a short tile. One, two or five take six more with them: two short tiles, or three.
    alone = b.or_(b.icmp_signed("==", left, I64(3)), b.icmp_signed("==", left, I64(4)))
    alone = b.or_(alone, b.icmp_signed("==", left, I64(0)))
    num_tall = b.larger_int(I64(0), b.select(alone, num_tall, b.sum(num_tall, -1)))
    return num_tall, _ceil(b, b.sub(rows, b.times(num_tall, tall)), I64(short))


@dataclass(frozen=True, slots=True)
class Panel:
    """The generator of one format on one target."""

    fmt: WeightFormat
    target: Target

    @property
    def layout(self) -> ActivationLayout:
        return layout_for(self.fmt)

    def emit(
        self, b: KernelBuilder, w: Value, group_bytes: Value, groups: Value, a: Value, lda: Value, out: Value,
        ldo: Value, blocks: Value, add: Value, rows: Value,
    ) -> None:  # fmt: skip
        """The kernel `matmul.matmul` for many rows."""
        panel = b.scratch(ir.ArrayType(VB, GROUPS[0] * self._per_chunk * _Place(self.fmt).size // 64))
        totals = b.scratch(ir.ArrayType(VF, BUNCH * MAX_ROWS))
        share = _even(b, rows, I64(MAX_ROWS), math.lcm(*TILE_ROWS))
        with b.loop(_ceil(b, rows, share)) as strip:
            row = b.mul(strip, share)
            num_rows = b.smaller(b.sub(rows, row), share)
            some = _Rows(group_bytes, b.at(a, b.mul(row, lda)), lda, blocks, num_rows)
            stretch = self._stretch_blocks(b, num_rows, blocks)
            with b.loop(_ceil(b, groups, I64(BUNCH))) as bunch, b.loop(_ceil(b, blocks, stretch)) as n:
                first, begin = b.times(bunch, BUNCH), b.mul(n, stretch)
                num_groups = b.smaller(b.sub(groups, first), I64(BUNCH))
                end = b.smaller(blocks, b.sum(begin, stretch))

                def few_groups(width: int, nth: Value) -> None:
                    group, homes = b.sum(first, nth), b.at(totals, b.times(nth, 64 * MAX_ROWS))
                    start = b.at(w, b.times(group, group_bytes))
                    self._multiply(b, some, width, start, panel, homes, begin, end)
                    with b.if_then(b.icmp_signed("==", end, blocks)):
                        place = b.at(out, b.times(row, ldo), b.times(group, 64))
                        self._write(b, width, homes, place, ldo, add, num_rows)

                b.greedy(num_groups, GROUPS, few_groups)

    @property
    def _per_chunk(self) -> int:
        """Blocks in a panel."""
        return CHUNK // self.fmt.span

    def _stretch_blocks(self, b: KernelBuilder, num_rows: Value, blocks: Value) -> Value:
        """Blocks of K whose activations stay in L2, in whole panels; K is cut evenly."""
        chunk_bytes = self._per_chunk * (self.fmt.span + self.layout.meta_bytes)
        fits = b.larger_int(I64(1), b.sdiv(I64(L2_BYTES // chunk_bytes), num_rows))
        return b.times(_even(b, _ceil(b, blocks, I64(self._per_chunk)), fits, 1), self._per_chunk)

    def _multiply(
        self, b: KernelBuilder, some: _Rows, width: int, groups: Value, panel: Value, totals: Value, begin: Value,
        end: Value,
    ) -> None:  # fmt: skip
        """Totals of all rows += blocks begin .. end of `width` groups."""
        tall, short = TILE_ROWS
        num_tall, num_short = _num_tiles(b, some.num_rows)
        last = b.sum(some.num_rows, -1)
        with b.loop(_ceil(b, b.sub(end, begin), I64(self._per_chunk))) as chunk:
            first = b.sum(begin, b.times(chunk, self._per_chunk))
            count = b.smaller(b.sub(end, first), I64(self._per_chunk))
            self._fill(b, some, width, groups, panel, first, count)
            stretch = _Stretch(panel, first, count, begin, end)
            with b.loop(num_tall) as tile:
                # The first tile asks for what the first group needs next, the second for the second's.
                asks = b.icmp_signed("<", tile, I64(width))
                fetch = _Fetch(asks, b.at(groups, b.times(some.group_bytes, b.smaller(tile, I64(width - 1)))))
                numbers = [b.sum(b.times(tile, tall), t) for t in range(tall)]
                self._tile(b, some, stretch, width, numbers, totals, fetch)
            done = b.times(num_tall, tall)
            with b.loop(num_short) as tile:
                numbers = [b.smaller(b.sum(done, b.times(tile, short), t), last) for t in range(short)]
                self._tile(b, some, stretch, width, numbers, totals, None)

    # ------------------------------------------------------------------ around the products
    def _write(
        self, b: KernelBuilder, width: int, totals: Value, out: Value, ldo: Value, add: Value, rows: Value
    ) -> None:
        adds = b.icmp_signed("!=", add, I64(0))
        with b.loop(rows) as r:
            for g in range(width):
                total, place = b.read(VF, totals, b.times(r, 64 * width), 64 * g), b.at(out, b.times(r, ldo), 64 * g)
                with b.if_else(adds) as (yes, no):
                    with yes:
                        b.write(b.fadd(b.read(VF, place), total), place)
                    with no:
                        b.write(total, place)

    def _fill(
        self, b: KernelBuilder, some: _Rows, width: int, groups: Value, panel: Value, first: Value, count: Value
    ) -> None:
        """Unpack blocks first .. first + count of `width` groups."""
        fmt, place = self.fmt, _Place(self.fmt)
        scratch = b.scratch(ir.ArrayType(VI, 4))
        with b.loop(b.times(count, width)) as n:
            block, g = b.sum(first, b.sdiv(n, I64(width))), b.srem(n, I64(width))
            words, meta = fmt.place(b, b.at(groups, b.times(g, some.group_bytes)), some.blocks, block)
            source, target = Group(words, meta, scratch, self.target), b.at(panel, b.times(n, place.size))
            fmt.prepare(b, source)
            assert fmt.sub_block is not None
            with b.loop(fmt.num_subs // fmt.unroll) as i:
                for part in range(fmt.unroll):
                    sub = Sub(i, fmt.unroll, part)
                    for q, vector in enumerate(fmt.sub_block(b, source, sub)):
                        b.write(vector, target, b.times(sub.index(b), 16 * fmt.sub_size), 64 * q)
                    if fmt.scale is not None:
                        b.write(fmt.scale(b, source, sub), target, b.times(sub.index(b), 64), place.scales)
            if fmt.minimum is not None:
                for p, pair in enumerate(pairs_of(b, source, fmt, fmt.minimum)):
                    b.write(pair, target, place.mins + 64 * p)
            for n_float, value in enumerate(block_scales(b, fmt, meta)):
                if value is not None:
                    b.write(value, target, place.floats + 64 * n_float)

    def _ahead(
        self, b: KernelBuilder, some: _Rows, stretch: _Stretch, width: int, fetch: _Fetch, n: Value
    ) -> tuple[Value, Value]:
        """Words and meta that come where block n of the panel is: later in its group, or in the next groups'."""
        there = b.sum(stretch.first, stretch.count, n)
        beyond = b.icmp_signed(">=", there, stretch.end)
        group = b.at(fetch.group, b.select(beyond, b.times(some.group_bytes, width), I64(0)))
        places = self.fmt.place(b, group, some.blocks, b.select(beyond, b.sum(stretch.begin, n), there))
        # A tile that asks for nothing prefetches what is there already.
        words, meta = (b.select(fetch.asks, place, stretch.panel) for place in places)
        return words, meta

    # ------------------------------------------------------------------ the products
    def _tile(
        self, b: KernelBuilder, some: _Rows, stretch: _Stretch, width: int, numbers: Sequence[Value], totals: Value,
        fetch: _Fetch | None,
    ) -> None:  # fmt: skip
        """Totals of the rows with these numbers += the panel's blocks. `fetch`: what to prefetch meanwhile."""
        fmt, place, panel = self.fmt, _Place(self.fmt), stretch.panel
        rows = [b.at(some.a, b.times(n, some.lda)) for n in numbers]
        homes = [b.at(totals, b.times(n, 64 * width)) for n in numbers]
        # The first stretch begins at zero, whatever is there.
        begun = b.splat(b.icmp_signed("!=", stretch.first, I64(0)))
        zero = fill(VF, 0.0)
        sums = [[b.variable(b.select(begun, b.read(VF, home, 64 * g), zero)) for g in range(width)] for home in homes]
        with b.loop(stretch.count) as n:
            block = b.sum(stretch.first, n)
            areas = [b.at(panel, b.times(b.sum(b.times(n, width), g), place.size)) for g in range(width)]
            whole = [b.variables(width, fill(VI, 0)) for _ in rows]
            words, meta = self._ahead(b, some, stretch, width, fetch, n) if fetch else (None, None)
            share = fmt.words_bytes // fmt.num_subs if fetch else 0
            with b.loop(fmt.num_subs) as sub:
                for line in range(0, share, 64):
                    b.prefetch(b.at(words, b.times(sub, share), line))
                starts = self._starts(b, rows, some.blocks, block, sub)
                self._sub_block(b, areas, rows, block, sub, starts, whole)
            for line in range(0, fmt.meta_bytes if fetch else 0, 64):
                b.prefetch(b.at(meta, line))
            self._float_step(b, some, areas, rows, block, whole, sums)
        for home, row_sums in zip(homes, sums, strict=True):
            for g, total in enumerate(row_sums):
                b.write(b.get(total, VF), home, 64 * g)

    def _starts(self, b: KernelBuilder, rows: Sequence[Value], blocks: Value, block: Value, sub: Value) -> list[Value]:
        """Where the sums of a sub-block begin, for each row: at -bias * the sum of its activations."""
        fmt = self.fmt
        if not fmt.bias:
            return [fill(VI, 0)] * len(rows)
        shift = fmt.bias.bit_length() - 1
        if fmt.num_subs == 1:
            at = self.layout.after(b, blocks, 4), b.times(block, 4)
            return [b.shl(b.broadcast(I32, a, *at), fill(VI, shift)) for a in rows]
        starts = []
        for a in rows:
            # An i16 sum in the upper half of an i32, which begins two bytes before it.
            pair = b.broadcast(I32, a, *self._sums_at(b, blocks, block), b.times(sub, 2), -2)
            upper = b.and_(pair, fill(VI, -(1 << 16)))
            starts.append(b.sub(fill(VI, 0), b.ashr(upper, fill(VI, 16 - shift))))
        return starts

    def _sub_block(
        self, b: KernelBuilder, areas: Sequence[Value], rows: Sequence[Value], block: Value, sub: Value,
        starts: list[Value], whole: list[list[Value]],
    ) -> None:  # fmt: skip
        """whole += scale of the sub-block * its dot products."""
        fmt = self.fmt
        sums = [[start] * len(areas) for start in starts]
        at = b.times(block, fmt.span), b.times(sub, fmt.sub_size)
        for q in range(fmt.sub_size // 4):
            weights = [b.read(VB, area, b.times(sub, 16 * fmt.sub_size), 64 * q) for area in areas]
            for a, of_row in zip(rows, sums, strict=True):
                quad = b.bitcast(b.broadcast(I32, a, *at, 4 * q), VB)
                for g, w in enumerate(weights):
                    of_row[g] = dot4(b, self.target, False, of_row[g], w, quad)
        for g, area in enumerate(areas):
            scale = b.read(VI, area, b.times(sub, 64), _Place(fmt).scales) if fmt.scale else None
            for of_row, slots in zip(sums, whole, strict=True):
                x = of_row[g] if scale is None else b.mul(of_row[g], scale)
                b.store(b.add(b.get(slots[g], VI), x), slots[g])

    def _float_step(
        self, b: KernelBuilder, some: _Rows, areas: Sequence[Value], rows: Sequence[Value], block: Value,
        whole: list[list[Value]], totals: list[list[Value]],
    ) -> None:  # fmt: skip
        """totals += the block's share. Row by row, so that what is loaded of a row serves all groups."""
        fmt, place = self.fmt, _Place(self.fmt)
        d = [b.read(VF, area, place.floats) for area in areas]
        second = [b.read(VF, area, place.floats + 64) if fmt.has_second else None for area in areas]
        num_pairs = fmt.num_subs // 2 if fmt.minimum else 0
        pairs = [[b.read(VI, area, place.mins + 64 * p) for p in range(num_pairs)] for area in areas]
        for a, of_row, of_total in zip(rows, whole, totals, strict=True):
            mins = [fill(VI, 0)] * len(areas)
            for p in range(num_pairs):
                both = b.broadcast(I32, a, *self._sums_at(b, some.blocks, block), 4 * p)
                mins = [pair_products(b, self.target, x, pair[p], both) for x, pair in zip(mins, pairs, strict=True)]
            scale = self._of_block(b, a, some.blocks, block, 0)
            adds = fmt.span == 32 and fmt.has_second
            scaled_sum = self._of_block(b, a, some.blocks, block, 8) if adds else None
            for g, slot in enumerate(of_total):
                minimum = mins[g] if num_pairs else None
                whole_sum = b.get(of_row[g], VI)
                x = block_step(b, b.get(slot, VF), whole_sum, minimum, d[g], second[g], scale, scaled_sum)
                b.store(x, slot)

    def _sums_at(self, b: KernelBuilder, blocks: Value, block: Value) -> tuple[Value, Value]:
        """Where a row of a K-quant has the i16 sums of its sub-blocks."""
        array, size = (4, 16) if self.fmt.sub_size == 32 else (20, 32)
        return self.layout.after(b, blocks, array), b.times(block, size)

    def _of_block(self, b: KernelBuilder, a: Value, blocks: Value, block: Value, array: int) -> Value:
        return b.broadcast(F32, a, self.layout.after(b, blocks, array), b.times(block, 4))
