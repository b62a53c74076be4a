"""Matrix products with several activation rows: what a group's block holds is taken apart once for all of them.

The tile of `matmul.py` takes weights, scales and mins apart anew for its few rows. From 5 to 44 rows on, depending on
the format, it is cheaper to write what can be shared of 256 values of K of two groups into a panel, which stays in L1,
and to run all rows past it:

    for each stretch of K whose activations stay in L2:
        for each pair of groups:
            for each 256 values of K:
                fill the panel: scales, mins and, unless a format is `light`, weights
                for each 4 or 6 rows:
                    for each vector of weights:        of either group
                        for each row:                  broadcast 4 activation bytes, one dot product with either group
                    scales, and the block's float step
            write (or add) the totals, behind the last stretch

Hardly anything but loads and dot products is left in the inner loop, and a broadcast serves two groups. That is what it
takes: a core loads two vectors and multiplies two in a cycle, so a tile of one group, with a load for each product and
one for the weights, waits for loads. What multiplies is scarce: so the sums of two sub-blocks go together through one
product with their scales, in 16 bits. They fit unless activations are unusually even (`ActivationLayout`'s loudest);
where a tile has a block like that, its sums are multiplied one by one in 32 bits: the same integers.

The float totals wait in memory while the panel is filled anew; a row's blocks are added in ascending order, as
everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from engine.kernels.dot import ActivationLayout, block_step, dot4, layout_for, pair_products
from engine.kernels.formats import Group, Sub, WeightFormat, block_scales, pairs_of
from engine.kernels.ir import F32, I32, I64, VB, VF, VI, VS, KernelBuilder, Value, fill
from engine.kernels.plan import L2_BYTES
from engine.kernels.target import Target

GROUPS = 2
"""Groups that share a panel. Where one is left over, it is taken twice."""
CHUNK = 256
"""Values of K in a panel: one block of a K-quant, eight of the simple formats."""
UNIT_ROWS = 12
"""Rows are cut at multiples of this, which every height of a tile divides."""
MAX_ROWS = 264
"""Rows that pass a panel before the next one is filled."""
BUNCH = 12
"""Groups that are multiplied with one stretch of K after the other. Their totals, 200 KB, lie on the stack."""
LOUDEST = 127 * 16
"""No sum of the magnitudes of 16 activations is larger."""
CALM = 1023
"""Few blocks of activations are louder: normally distributed ones have 560, give or take 110. All its bits are ones, so
that numbers combined by `or` are larger if and only if one of them is."""
AHEAD = 4
"""So many blocks ahead a K-quant's weights are prefetched, a simple format's by a panel. Two are too few for 8 rows."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a group's block lies in a panel: byte offsets of what follows its weight vectors."""

    fmt: WeightFormat

    @property
    def scales(self) -> int:
        """A vector of i16 pairs for two sub-blocks."""
        return 0 if self.fmt.light else 16 * self.fmt.span

    @property
    def mins(self) -> int:
        """The same."""
        return self.scales + (32 * self.fmt.num_subs if self.fmt.scale else 0)

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
class _Pair:
    """Two groups."""

    starts: Sequence[Value]
    """Their addresses."""
    count: Value
    """1 where they are the same."""
    totals: Value
    """f32 [rows][GROUPS][16] so far."""


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
class _Block:
    """One block of K of the pair, as a tile meets it."""

    number: Value
    sources: Sequence[Group]
    areas: Sequence[Value]
    """The panel's part for each group."""
    words_ahead: Value
    meta_ahead: Value
    """What is prefetched meanwhile."""


def _ceil(b: KernelBuilder, x: Value, size: Value) -> Value:
    """x / size, rounded up."""
    return b.sdiv(b.sum(x, size, -1), size)


def _even(b: KernelBuilder, x: Value, most: Value, unit: int) -> Value:
    """The size of a part, where x is cut into as few as `most` allows, all as large but for multiples of `unit`."""
    return b.times(_ceil(b, _ceil(b, x, _ceil(b, x, most)), I64(unit)), unit)


def _num_tiles(b: KernelBuilder, heights: tuple[int, int], rows: Value) -> tuple[Value, Value]:
    """Tall and short tiles for all rows, with at most one row too many where there are enough for a tall one."""
    tall, short = heights
    num_tall, left = b.sdiv(rows, I64(tall)), b.srem(rows, I64(tall))
    # What fills a short tile, but for one row, is one. Other rows take those of a tall tile with them.
    alone = b.icmp_signed("==", left, I64(0))
    for enough in (short - 1, short):
        alone = b.or_(alone, b.icmp_signed("==", left, I64(enough)))
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

    @property
    def heights(self) -> tuple[int, int]:
        """Rows of a tile. The sums of two sub-blocks and the scaled sums of 4 rows and 2 groups fit the registers, or
        the sums and totals of 6; what is left over is taken by 3 or 4. A tile that has fewer takes its last row several
        times and writes the same result as often.
        """
        return (4, 3) if self.fmt.scale else (6, 4)

    @property
    def _per_chunk(self) -> int:
        """Blocks in a panel."""
        return CHUNK // self.fmt.span

    def emit(
        self, b: KernelBuilder, w: Value, group_bytes: Value, groups: Value, a: Value, lda: Value, out: Value,
        ldo: Value, blocks: Value, add: Value, rows: Value,
    ) -> None:  # fmt: skip
        """The kernel `matmul.matmul` for several rows."""
        panel = b.scratch(ir.ArrayType(VB, GROUPS * self._per_chunk * _Place(self.fmt).size // 64))
        totals = b.scratch(ir.ArrayType(VF, BUNCH * MAX_ROWS))
        share = _even(b, rows, I64(MAX_ROWS), UNIT_ROWS)
        with b.loop(_ceil(b, rows, share)) as strip:
            row = b.mul(strip, share)
            num_rows = b.smaller(b.sub(rows, row), share)
            some = _Rows(group_bytes, b.at(a, b.mul(row, lda)), lda, blocks, num_rows)
            stretch = self._stretch_blocks(b, num_rows, blocks)
            with b.loop(_ceil(b, groups, I64(BUNCH))) as bunch, b.loop(_ceil(b, blocks, stretch)) as n:
                first, begin = b.times(bunch, BUNCH), b.mul(n, stretch)
                num_groups = b.smaller(b.sub(groups, first), I64(BUNCH))
                end = b.smaller(blocks, b.sum(begin, stretch))
                with b.loop(_ceil(b, num_groups, I64(GROUPS))) as nth:
                    left = b.times(nth, GROUPS)
                    group = b.sum(first, left)
                    pair = self._pair(
                        b, some, w, group, b.sub(num_groups, left), b.at(totals, b.times(left, 64 * MAX_ROWS))
                    )
                    self._multiply(b, some, pair, panel, begin, end)
                    with b.if_then(b.icmp_signed("==", end, blocks)):
                        self._write(b, pair, b.at(out, b.times(row, ldo), b.times(group, 64)), ldo, add, num_rows)

    def _pair(self, b: KernelBuilder, some: _Rows, w: Value, group: Value, left: Value, totals: Value) -> _Pair:
        count, start = b.smaller(left, I64(GROUPS)), b.at(w, b.times(group, some.group_bytes))
        return _Pair([start, b.at(start, b.times(b.sum(count, -1), some.group_bytes))], count, totals)

    def _stretch_blocks(self, b: KernelBuilder, num_rows: Value, blocks: Value) -> Value:
        """Blocks of K whose activations stay in L2, in whole panels; K is cut evenly."""
        chunk_bytes = self._per_chunk * (self.fmt.span + self.layout.meta_bytes)
        fits = b.larger_int(I64(1), b.sdiv(I64(L2_BYTES // chunk_bytes), num_rows))
        return b.times(_even(b, _ceil(b, blocks, I64(self._per_chunk)), fits, 1), self._per_chunk)

    def _multiply(self, b: KernelBuilder, some: _Rows, pair: _Pair, panel: Value, begin: Value, end: Value) -> None:
        """Totals of all rows += blocks begin .. end of the pair."""
        num_tall, num_short = _num_tiles(b, self.heights, some.num_rows)
        last = b.sum(some.num_rows, -1)
        with b.loop(_ceil(b, b.sub(end, begin), I64(self._per_chunk))) as chunk:
            first = b.sum(begin, b.times(chunk, self._per_chunk))
            count = b.smaller(b.sub(end, first), I64(self._per_chunk)) if self._per_chunk > 1 else I64(1)
            stretch = _Stretch(panel, first, count, begin, end)
            self._fill(b, some, pair, stretch)

            tall, short = self.heights
            with b.loop(num_tall) as tile:
                start = b.times(tile, tall)
                base, home = b.at(some.a, b.times(start, some.lda)), b.at(pair.totals, b.times(start, 64 * GROUPS))
                rows = [b.at(base, b.times(some.lda, t)) for t in range(tall)]
                homes = [b.at(home, 64 * GROUPS * t) for t in range(tall)]
                self._tile(b, some, pair, stretch, rows, homes, tile)
            with b.loop(num_short) as tile:
                start = b.sum(b.times(num_tall, tall), b.times(tile, short))
                numbers = [b.smaller(b.sum(start, t), last) for t in range(short)]
                rows = [b.at(some.a, b.times(n, some.lda)) for n in numbers]
                homes = [b.at(pair.totals, b.times(n, 64 * GROUPS)) for n in numbers]
                self._tile(b, some, pair, stretch, rows, homes, b.sum(num_tall, tile))

    # ------------------------------------------------------------------ around the products
    def _write(self, b: KernelBuilder, pair: _Pair, out: Value, ldo: Value, add: Value, rows: Value) -> None:
        # A group that is there twice has its second totals written where nobody reads them.
        twice = b.icmp_signed("<", pair.count, I64(GROUPS))
        unread, nowhere = b.select(twice, b.scratch(VF), b.at(out, 64)), b.select(twice, I64(0), ldo)
        with b.if_else(b.icmp_signed("!=", add, I64(0))) as branches:
            for branch, adds in zip(branches, (True, False), strict=True):
                with branch, b.loop(rows) as r:
                    for g, place in enumerate((b.at(out, b.times(r, ldo)), b.at(unread, b.times(r, nowhere)))):
                        total = b.read(VF, pair.totals, b.times(r, 64 * GROUPS), 64 * g)
                        b.write(b.fadd(b.read(VF, place), total) if adds else total, place)

    def _fill(self, b: KernelBuilder, some: _Rows, pair: _Pair, stretch: _Stretch) -> None:
        """What all rows share of the panel's blocks."""
        fmt, place = self.fmt, _Place(self.fmt)
        scratch = b.scratch(ir.ArrayType(VI, 4))
        with b.loop(b.times(stretch.count, GROUPS)) as n:
            block, g = b.sum(stretch.first, b.sdiv(n, I64(GROUPS))), b.srem(n, I64(GROUPS))
            start = b.select(b.icmp_signed("==", g, I64(0)), *pair.starts)
            words, meta = fmt.place(b, start, some.blocks, block)
            source, target = Group(words, meta, scratch, self.target), b.at(stretch.panel, b.times(n, place.size))
            fmt.prepare(b, source)
            if not fmt.light:
                self._fill_weights(b, source, target)
            for factor, at in ((fmt.scale, place.scales), (fmt.minimum, place.mins)):
                for p, both in enumerate(pairs_of(b, source, fmt, factor) if factor else ()):
                    b.write(both, target, at + 64 * p)
            for n_float, value in enumerate(block_scales(b, fmt, meta)):
                if value is not None:
                    b.write(value, target, place.floats + 64 * n_float)

    def _fill_weights(self, b: KernelBuilder, source: Group, target: Value) -> None:
        """Eight vectors at once: of as many sub-blocks, which lie in the same words, or of the only one."""
        fmt = self.fmt
        assert fmt.vector is not None
        together = min(8, fmt.num_subs)
        places = [(q, part) for q in range(fmt.sub_size // 4) for part in range(together)]
        with b.loop(fmt.num_subs // together) as i:
            for n in range(0, len(places), 8):
                some = places[n : n + 8]
                vectors = [fmt.vector(b, source, Sub(i, together, part), q) for q, part in some]
                for vector, (q, part) in zip(vectors, some, strict=True):
                    at = b.times(i, 16 * fmt.sub_size * together)
                    b.write(vector, target, at, 16 * fmt.sub_size * part + 64 * q)

    # ------------------------------------------------------------------ the products
    def _tile(
        self, b: KernelBuilder, some: _Rows, pair: _Pair, stretch: _Stretch, rows: Sequence[Value],
        homes: Sequence[Value], tile: Value,
    ) -> None:  # fmt: skip
        """Totals of some rows += the panel's blocks."""
        whole = [b.variables(GROUPS, fill(VI, 0)) for _ in rows]
        if self.fmt.scale is not None:
            block = self._block(b, some, pair, stretch, I64(0), tile)
            self._scaled_sums(b, some, block, rows, whole)
            sums = self._totals(b, stretch, homes)
            self._float_step(b, some, block, rows, whole, sums)
        else:
            sums = self._totals(b, stretch, homes)
            with b.loop(stretch.count) as n:
                block = self._block(b, some, pair, stretch, n, tile)
                self._simple_sums(b, some, block, rows, whole)
                self._float_step(b, some, block, rows, whole, sums)
        for home, row_sums in zip(homes, sums, strict=True):
            for g, total in enumerate(row_sums):
                b.write(b.get(total, VF), home, 64 * g)

    def _totals(self, b: KernelBuilder, stretch: _Stretch, homes: Sequence[Value]) -> list[list[Value]]:
        """What the totals are before this stretch. The first one begins at zero, whatever is there."""
        begun = b.splat(b.icmp_signed("!=", stretch.first, I64(0)))
        before = [[b.select(begun, b.read(VF, home, 64 * g), fill(VF, 0.0)) for g in range(GROUPS)] for home in homes]
        return [[b.variable(x) for x in of_row] for of_row in before]

    def _block(self, b: KernelBuilder, some: _Rows, pair: _Pair, stretch: _Stretch, n: Value, tile: Value) -> _Block:
        place, number = _Place(self.fmt), b.sum(stretch.first, n)
        sources = [
            Group(*self.fmt.place(b, start, some.blocks, number), stretch.panel, self.target) for start in pair.starts
        ]
        areas = [b.at(stretch.panel, b.times(b.sum(b.times(n, GROUPS), g), place.size)) for g in range(GROUPS)]
        return _Block(number, sources, areas, *self._ahead(b, some, pair, stretch, n, tile))

    def _ahead(
        self, b: KernelBuilder, some: _Rows, pair: _Pair, stretch: _Stretch, n: Value, tile: Value
    ) -> tuple[Value, Value]:
        """Words and meta that are prefetched, by the first tile for the first group and by the second for the second.

        They come AHEAD after block n of this panel: later in the group, or in the next pair.
        """
        there = b.sum(stretch.first, n, AHEAD if self._per_chunk == 1 else self._per_chunk)
        over = b.sub(there, stretch.end)
        beyond = b.icmp_signed(">=", over, I64(0))
        skip = b.select(beyond, b.times(some.group_bytes, GROUPS), I64(0))
        start = b.select(b.icmp_signed("==", tile, I64(0)), *pair.starts)
        there = b.select(beyond, b.sum(stretch.begin, over), there)
        # The other tiles prefetch what is there already.
        asks = b.icmp_signed("<", tile, I64(GROUPS))
        words, meta = (
            b.select(asks, x, stretch.panel) for x in self.fmt.place(b, b.at(start, skip), some.blocks, there)
        )
        return words, meta

    def _prefetch(self, b: KernelBuilder, block: _Block, share: Value, shares: int, part: int, parts: int) -> None:
        """Part number `part` of `parts` of one of equal shares of the words that are asked for."""
        size = self.fmt.words_bytes // shares
        lines = range(0, size, 64)
        for line in lines[part * len(lines) // parts : (part + 1) * len(lines) // parts]:
            b.prefetch(b.at(block.words_ahead, b.times(share, size), line))

    def _simple_sums(
        self, b: KernelBuilder, some: _Rows, block: _Block, rows: Sequence[Value], whole: list[list[Value]]
    ) -> None:
        """whole = the dot products of a block that has one scale, begun at -bias * the sum of its activations."""
        fmt = self.fmt
        self._prefetch(b, block, I64(0), 1, 0, 1)
        sums = [[fill(VI, 0)] * GROUPS for _ in rows]
        if fmt.bias:
            at = self.layout.after(b, some.blocks, 4), b.times(block.number, 4)
            shift = fill(VI, fmt.bias.bit_length() - 1)
            sums = [[b.shl(b.broadcast(I32, a, *at), shift)] * GROUPS for a in rows]
        for q in range(fmt.sub_size // 4):
            weights = [b.read(VB, area, 64 * q) for area in block.areas]
            self._dots(b, rows, sums, weights, b.times(block.number, fmt.span), 4 * q)
        for of_row, slots in zip(sums, whole, strict=True):
            for x, slot in zip(of_row, slots, strict=True):
                b.store(x, slot)

    def _dots(
        self, b: KernelBuilder, rows: Sequence[Value], sums: list[list[Value]], weights: list[Value], *at: Value | int
    ) -> None:
        """sums += a vector of either group times the four activations at `at` of each row."""
        for a, of_row in zip(rows, sums, strict=True):
            quad = b.bitcast(b.broadcast(I32, a, *at), VB)
            for g, w in enumerate(weights):
                of_row[g] = dot4(b, self.target, False, of_row[g], w, quad)

    def _scaled_sums(
        self, b: KernelBuilder, some: _Rows, block: _Block, rows: Sequence[Value], whole: list[list[Value]]
    ) -> None:
        """whole = the dot products of a block's sub-blocks times their scales."""
        most = self.fmt.loudest
        if most < CALM or most >= LOUDEST:
            self._pairs_of_subs(b, some, block, rows, whole, most >= LOUDEST)
            return
        at = self.layout.after(b, some.blocks, 52), b.times(block.number, 4)
        loud = b.read(I32, rows[0], *at)
        for a in rows[1:]:
            loud = b.or_(loud, b.read(I32, a, *at))
        with b.if_else(b.icmp_unsigned("<=", loud, I32(CALM)), likely=True) as (fits, rare):
            with fits:
                self._pairs_of_subs(b, some, block, rows, whole, True)
            with rare:
                self._pairs_of_subs(b, some, block, rows, whole, False)

    def _pairs_of_subs(
        self, b: KernelBuilder, some: _Rows, block: _Block, rows: Sequence[Value], whole: list[list[Value]], short: bool
    ) -> None:
        """Two sub-blocks at a time, which may lie in the same words. short: their sums fit 16 bits."""
        fmt, place = self.fmt, _Place(self.fmt)
        num_pairs = fmt.num_subs // 2
        with b.loop(num_pairs) as pair:
            sums = [[[fill(VI, 0)] * GROUPS for _ in rows] for _ in range(2)]
            at = b.times(block.number, fmt.span), b.times(pair, 2 * fmt.sub_size)
            for q in range(fmt.sub_size // 4):
                for part in range(2):
                    self._prefetch(b, block, pair, num_pairs, 2 * q + part, fmt.sub_size // 2)
                    weights = self._weights(b, block, pair, part, q)
                    self._dots(b, rows, sums[part], weights, *at, part * fmt.sub_size + 4 * q)
            scales = [b.read(VI, area, b.times(pair, 64), place.scales) for area in block.areas]
            scale = self._scale_short if short else self._scale_long
            for r, a in enumerate(rows):
                of_row = None
                if fmt.bias:
                    of_row = b.broadcast(I32, a, *self._sums_at(b, some.blocks, block.number), b.times(pair, 4))
                for g, slot in enumerate(whole[r]):
                    b.store(scale(b, b.get(slot, VI), sums[0][r][g], sums[1][r][g], of_row, scales[g]), slot)

    def _weights(self, b: KernelBuilder, block: _Block, pair: Value, part: int, q: int) -> list[Value]:
        """Vector q of a sub-block of either group."""
        fmt = self.fmt
        if fmt.light:
            assert fmt.vector is not None
            return [fmt.vector(b, source, Sub(pair, 2, part), q) for source in block.sources]
        size = 16 * fmt.sub_size
        return [b.read(VB, area, b.times(pair, 2 * size), part * size + 64 * q) for area in block.areas]

    def _scale_short(
        self, b: KernelBuilder, whole: Value, first: Value, second: Value, of_row: Value | None, scales: Value
    ) -> Value:
        """whole + both sums times their scales, all in pairs of i16; of_row: the sums of the activations."""
        both = b.bitcast(b.or_(b.and_(first, fill(VI, 0xFFFF)), b.shl(second, fill(VI, 16))), VS)
        if of_row is not None:
            both = b.sub(both, b.shl(b.bitcast(of_row, VS), fill(VS, self.fmt.bias.bit_length() - 1)))
        return pair_products(b, self.target, whole, scales, b.bitcast(both, VI))

    def _scale_long(
        self, b: KernelBuilder, whole: Value, first: Value, second: Value, of_row: Value | None, scales: Value
    ) -> Value:
        """The same, whatever the sums are."""
        half = fill(VI, 16)
        for x, up in ((first, True), (second, False)):
            scale, of_sub = (None if v is None else b.ashr(b.shl(v, half) if up else v, half) for v in (scales, of_row))
            if of_sub is not None:
                x = b.sub(x, b.shl(of_sub, fill(VI, self.fmt.bias.bit_length() - 1)))
            whole = b.add(whole, b.mul(x, scale))
        return whole

    def _float_step(
        self, b: KernelBuilder, some: _Rows, block: _Block, rows: Sequence[Value], whole: list[list[Value]],
        totals: list[list[Value]],
    ) -> None:  # fmt: skip
        """totals += the block's share. Row by row, so that what is loaded of a row serves all groups."""
        fmt, place = self.fmt, _Place(self.fmt)
        for line in range(0, fmt.meta_bytes, 64):
            b.prefetch(b.at(block.meta_ahead, line))
        d = [b.read(VF, area, place.floats) for area in block.areas]
        second = [b.read(VF, area, place.floats + 64) if fmt.has_second else None for area in block.areas]
        num_pairs = fmt.num_subs // 2 if fmt.minimum else 0
        pairs = [[b.read(VI, area, place.mins + 64 * p) for p in range(num_pairs)] for area in block.areas]
        for a, of_row, of_total in zip(rows, whole, totals, strict=True):
            mins = [fill(VI, 0)] * GROUPS
            for p in range(num_pairs):
                both = b.broadcast(I32, a, *self._sums_at(b, some.blocks, block.number), 4 * p)
                mins = [pair_products(b, self.target, x, pair[p], both) for x, pair in zip(mins, pairs, strict=True)]
            scale = self._of_block(b, a, some.blocks, block.number, 0)
            adds = fmt.span == 32 and fmt.has_second
            scaled_sum = self._of_block(b, a, some.blocks, block.number, 8) if adds else None
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
