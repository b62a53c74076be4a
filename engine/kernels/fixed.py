"""Attention over K and V in f16, as products of 16-bit integers.

A CPU multiplies twice as many pairs of 16-bit integers as of floats in an instruction, and sums of integers are exact:
it does not matter in what order they are made. So what meets in a product of attention becomes fixed-point numbers:

    what is cached   a key or value of a head at one position: 13 bits and a sign, its largest number is 8,191
    what meets it    a query, or the weights of a block's values: up to 15 bits and a sign, as large as its largest
                     number (32,640) and the sum of its numbers (261,120) allow

so that a sum of products stays below 8,191 * 2**18 < 2**31, whatever the numbers. Each has one scale, which depends on
what a row may see and nothing else: cached numbers have theirs for each position, and those of values are multiplied
into the weights. What rounding costs is about what f16 has cost already: a 2**-14 of the largest number against 2**-12
of each. f32 and q8_0 stay floats (`attention.py`).

For any number of queries (rows x heads) that share a KV head, a block of 64 positions at a time:
    fix_query    q -> integers and a scale               fix_keys      keys -> integers and scales
    scores       q . k                                   scale_values  the scales that values will have
    fix_weights  weights * scales -> integers, a scale   fix_values    values -> integers
    weigh        the state += weights . v

What is read next is prefetched meanwhile, spread over all that is done with a block: one half while it becomes
integers, the other while it is multiplied.
"""

from __future__ import annotations

from llvmlite import ir

from engine.kernels.attention import BLOCK, PART, STATE, fetched
from engine.kernels.dot import pair_products
from engine.kernels.ir import F16, F32, I16, I32, I64, VF, VI, VS, Kernel, KernelBuilder, Value, fill, vector
from engine.kernels.target import Target

CACHED_LIMIT = 8191
"""Largest magnitude of a key or value."""
SUM_LIMIT = (1 << 18) - 1024
"""Sum of magnitudes of a query, or of a block's weights: 1,024 are left for what rounding adds to 2,048 of them."""
PEAKS = 8
"""How often the largest of them goes into the sum at least, so that it fits 16 bits."""

TINY = 2.0**-100
"""What has no number as large as this counts as zeros: SUM_LIMIT / it would leave f32's range."""

_MAGIC = 1.5 * 2.0**23
"""A float this large has ones as its last place: adding it rounds to an integer, which the low bits then hold."""


def _rounded(b: KernelBuilder, x: Value, factor: Value) -> Value:
    """Lanes <16 x i32> whose lower halves are the integers nearest to x * factor, ties to even, rounded once."""
    return b.bitcast(b.fmadd(x, factor, fill(VF, _MAGIC)), VI)


def _pairs(b: KernelBuilder, first: Value, second: Value) -> Value:
    """The lower halves of two <16 x i32>, side by side in each lane."""
    return b.or_(b.and_(first, fill(VI, 0xFFFF)), b.shl(second, fill(VI, 16)))


def _factor(b: KernelBuilder, limit: float, top: Value) -> Value:
    """limit / top, or 0 where top is below TINY: lanes <16 x f32>."""
    empty = b.fcmp_ordered("<", top, fill(VF, TINY))
    return b.select(empty, fill(VF, 0.0), b.fdiv(fill(VF, limit), b.select(empty, fill(VF, 1.0), top)))


def fix_query(b: KernelBuilder, x: Value, dim: Value) -> None:
    """q [dim] f32 in place -> integers i16 [dim], and behind them their scale f32."""
    x = b.pointer(x)
    vectors = b.sdiv(dim, I64(16))
    top, total = b.variable(fill(VF, 0.0)), b.variable(fill(VF, 0.0))
    with b.loop(vectors) as i:
        size = b.magnitude(b.read(VF, x, b.times(i, 64)))
        b.store(b.larger(size, b.get(top, VF)), top)
        b.store(b.fadd(b.get(total, VF), size), total)
    unit = _unit(b, b.get(top, VF), b.get(total, VF))
    factor = _factor(b, SUM_LIMIT, b.splat(unit))
    with b.loop(vectors) as i:
        levels = _rounded(b, b.read(VF, x, b.times(i, 64)), factor)
        b.write(b.trunc(levels, vector(I16, 16)), x, b.times(i, 32))
    b.write(b.fdiv(unit, F32(SUM_LIMIT)), x, b.times(dim, 2))


def _unit(b: KernelBuilder, tops: Value, sums: Value) -> Value:
    """What becomes SUM_LIMIT: the sum of magnitudes, or PEAKS times the largest if that is more."""
    return b.larger(b.fmul(b.tree(tops, b.larger), F32(PEAKS)), b.tree(sums, b.fadd))


def _magnitudes(b: KernelBuilder, base: Value, *offsets: Value | int) -> Value:
    """32 f16 without their signs, as integers: these have the same order."""
    return b.and_(b.read(VS, base, *offsets), fill(VS, 0x7FFF))


def _larger_int(b: KernelBuilder, x: Value, y: Value) -> Value:
    return b.select(b.icmp_signed(">", x, y), x, y)


def fix_keys(b: KernelBuilder, source: Value, target: Value, scales: Value, dim: Value, following: Value) -> None:
    """Keys f16 [dim][64] -> integers i16 [dim / 2][64][2], and the scales f32 [64] of the positions.

    `following` is the f16 block that is read next, here and in `scores`.
    """
    source, target, scales, following = (b.pointer(p) for p in (source, target, scales, following))
    tops = b.variables(4, fill(VS, 0))
    with b.loop(b.sdiv(dim, I64(2))) as pair:
        for n, slot in enumerate(tops):  # two rows, so that the sums of positions do not wait for each other
            size = _magnitudes(b, source, b.times(pair, 4 * BLOCK), 64 * n)
            b.store(_larger_int(b, size, b.get(slot, VS)), slot)
    factors = []
    for half in range(2):
        top = _larger_int(b, b.get(tops[half], VS), b.get(tops[half + 2], VS))
        floats = b.fpext(b.bitcast(top, vector(F16, 32)), vector(F32, 32))
        for quarter in range(2):
            some = b.pick(floats, floats, range(16 * quarter, 16 * quarter + 16))
            b.write(b.fdiv(some, fill(VF, CACHED_LIMIT)), scales, 64 * (2 * half + quarter))
            factors.append(_factor(b, CACHED_LIMIT, some))
    with b.loop(b.sdiv(dim, I64(2))) as pair:
        for c, factor in enumerate(factors):
            if c % 2 == 0:
                b.prefetch(b.at(following, b.times(pair, 2 * BLOCK), 32 * c))
            first, second = (
                _rounded(b, b.halves(source, b.times(pair, 4 * BLOCK), 2 * BLOCK * row, 32 * c), factor)
                for row in range(2)
            )
            b.write(_pairs(b, first, second), target, b.times(pair, 4 * BLOCK), 64 * c)


def scale_values(b: KernelBuilder, source: Value, positions: Value, scales: Value, factors: Value, dim: Value) -> None:
    """Scales f32 [64] of the values f16 [64][dim], and what the values are multiplied with, f32 [64].

    Both are 0 from `positions` on, where a block may hold anything.
    """
    source, scales, factors = b.pointer(source), b.pointer(scales), b.pointer(factors)
    lanes, end = ir.Constant(VI, list(range(16))), b.splat(b.trunc(positions, I32))
    with b.loop(BLOCK // 16) as some:
        tops = []
        for n in range(16):
            position = b.sum(b.times(some, 16), n)
            tops.append(_top(b, b.at(source, b.times(b.times(position, dim), 2)), dim))
        top = b.tree_of_each(tops, lambda x, y: _larger_int(b, x, y))
        number = b.add(lanes, b.splat(b.trunc(b.times(some, 16), I32)))
        top = b.select(b.icmp_signed("<", number, end), top, fill(VI, 0))
        floats = b.fpext(b.bitcast(b.trunc(top, vector(I16, 16)), vector(F16, 16)), VF)
        b.write(b.fdiv(floats, fill(VF, CACHED_LIMIT)), scales, b.times(some, 64))
        b.write(_factor(b, CACHED_LIMIT, floats), factors, b.times(some, 64))


def _top(b: KernelBuilder, values: Value, dim: Value) -> Value:
    """<16 x i32> whose largest lane is the largest magnitude, as the bits of an f16, of `dim` f16."""
    slot = b.variable(fill(VI, 0))

    def some(width: int, first: Value) -> None:
        place = b.times(first, 32)
        if width == 2:
            size = b.bitcast(_magnitudes(b, values, place), VI)
            top = _larger_int(b, b.and_(size, fill(VI, 0xFFFF)), b.lshr(size, fill(VI, 16)))
        else:
            shorts = vector(I16, 16)
            top = b.zext(b.and_(b.read(shorts, values, place), fill(shorts, 0x7FFF)), VI)
        b.store(_larger_int(b, top, b.get(slot, VI)), slot)

    b.greedy(b.sdiv(dim, I64(16)), (2, 1), some)
    return b.get(slot, VI)


def scores(target: Target) -> Kernel:
    """out[i][0..63] = query i . 64 keys, for `count` queries given by their addresses; out rows are PART floats apart.

    Queries as `fix_query` leaves them, keys as `fix_keys` does. The first queries ask for what follows.
    """

    def emit(
        b: KernelBuilder, queries: Value, count: Value, keys: Value, scales: Value, out: Value, dim: Value,
        following: Value,
    ) -> None:  # fmt: skip
        queries, keys, scales, out, following = (b.pointer(p) for p in (queries, keys, scales, out, following))

        def body(num: int, first: Value) -> None:
            q = [b.pointer(b.read(I64, queries, b.times(b.sum(first, t), 8))) for t in range(num)]
            sums = [b.variables(4, fill(VI, 0)) for _ in range(num)]
            ahead = b.at(fetched(b, following, keys, first), b.times(dim, BLOCK))
            with b.loop(b.sdiv(dim, I64(2))) as pair:
                row = [b.read(VI, keys, b.times(pair, 4 * BLOCK), 64 * c) for c in range(4)]
                for line in (0, 64):
                    b.prefetch(b.at(ahead, b.times(pair, 2 * BLOCK), line))
                for query, slots in zip(q, sums, strict=True):
                    x = b.broadcast(I32, query, b.times(pair, 4))
                    for key, slot in zip(row, slots, strict=True):
                        b.store(pair_products(b, target, b.get(slot, VI), key, x), slot)
            of_keys = [b.read(VF, scales, 64 * c) for c in range(4)]
            for t, (query, slots) in enumerate(zip(q, sums, strict=True)):
                of_query = b.broadcast(F32, query, b.times(dim, 2))
                for c, (slot, of_key) in enumerate(zip(slots, of_keys, strict=True)):
                    score = b.fmul(b.fmul(b.sitofp(b.get(slot, VI), VF), of_key), of_query)
                    b.write(score, out, b.times(b.sum(first, t), 4 * PART), 64 * c)

        b.greedy(count, target.query_tiles, body)

    return emit


def fix_weights(b: KernelBuilder, weights: Value, count: Value, block: Value, of_values: Value, scales: Value) -> None:
    """Weights [i] f32 of a block times the scales of its values, in place -> integers i16 [64], and scales f32 [i].

    Rows of weights are PART floats apart. A block's integers lie at half the distance of its floats from the row's
    start, so blocks must be taken in ascending order.
    """
    weights, of_values, scales = b.pointer(weights), b.pointer(of_values), b.pointer(scales)
    factors = [b.read(VF, of_values, 64 * c) for c in range(4)]

    def scaled(row: Value) -> list[Value]:
        return [b.fmul(b.read(VF, row, b.times(block, 4 * BLOCK), 64 * c), x) for c, x in enumerate(factors)]

    def body(num: int, first: Value) -> None:
        """Sixteen rows share the adding up of lanes and a division; the weights are made twice, which costs less."""
        rows = [b.at(weights, b.times(b.sum(first, t), 4 * PART)) for t in range(num)]
        tops, sums = [], []
        for row in rows:
            w = scaled(row)
            tops.append(b.larger(b.larger(w[0], w[1]), b.larger(w[2], w[3])))
            sums.append(b.fadd(b.fadd(w[0], w[1]), b.fadd(w[2], w[3])))
        place = b.at(scales, b.times(first, 4))
        if num == 1:
            unit = _unit(b, tops[0], sums[0])
            b.write(b.fdiv(unit, F32(SUM_LIMIT)), place)
            spread = [_factor(b, SUM_LIMIT, b.splat(unit))]
        else:
            peaks, totals = b.tree_of_each(tops, b.larger), b.tree_of_each(sums, b.fadd)
            units = b.larger(b.fmul(peaks, fill(VF, PEAKS)), totals)
            b.write(b.fdiv(units, fill(VF, SUM_LIMIT)), place)
            found = b.scratch(VF)
            b.write(_factor(b, SUM_LIMIT, units), found)
            spread = [b.broadcast(F32, found, 4 * t) for t in range(num)]
        for row, factor in zip(rows, spread, strict=True):
            for c in range(4 if num > 1 else 0):
                b.prefetch(b.at(row, b.times(block, 4 * BLOCK), num * 4 * PART + 64 * c))
            w = [b.bitcast(_rounded(b, x, factor), VS) for x in scaled(row)]
            for c in range(0, 4, 2):  # the lower halves of two vectors
                b.write(b.pick(w[c], w[c + 1], range(0, 64, 2)), row, b.times(block, 2 * BLOCK), 32 * c)

    b.greedy(count, (16, 1), body)


def fix_values(
    b: KernelBuilder, source: Value, factors: Value, target: Value, pairs: Value, dim: Value, following: Value
) -> None:
    """Values f16 [2 * pairs][dim] -> integers i16 [pairs][dim][2].

    `following` is the f16 block that is read next, here and in `weigh`.
    """
    source, factors, target, following = (b.pointer(p) for p in (source, factors, target, following))
    with b.loop(pairs) as pair:
        both = [b.broadcast(F32, factors, b.times(pair, 8), 4 * n) for n in range(2)]
        start = b.times(b.times(pair, dim), 4)
        ahead = b.at(following, b.times(b.times(pair, dim), 2))

        def columns(width: int, vector: Value) -> None:
            for i in range(width):
                if i % 2 == 0:
                    b.prefetch(b.at(ahead, b.times(vector, 32), 32 * i))
                at = b.times(vector, 32), 32 * i
                rows = (b.halves(source, start, b.times(b.times(dim, 2), n), *at) for n in range(2))
                first, second = (_rounded(b, row, factor) for row, factor in zip(rows, both, strict=True))
                b.write(_pairs(b, first, second), target, start, b.times(vector, 64), 64 * i)

        b.greedy(b.sdiv(dim, I64(16)), (4, 1), columns)


def weigh(target: Target) -> Kernel:
    """The values of state i += scale i * weights[i][0 .. 2 pairs) . values [2 pairs][dim].

    Weights and scales as `fix_weights` leaves them, from the block's first on; values as `fix_values` does. The first
    queries ask for what follows.
    """

    def emit(
        b: KernelBuilder, weights: Value, scales: Value, count: Value, values: Value, pairs: Value, states: Value,
        dim: Value, following: Value,
    ) -> None:  # fmt: skip
        pointers = weights, scales, values, states, following
        weights, scales, values, states, following = (b.pointer(p) for p in pointers)

        def body(num: int, first: Value) -> None:
            numbers = [b.sum(first, t) for t in range(num)]
            state = [b.pointer(b.read(I64, states, b.times(n, 8))) for n in numbers]
            weight = [b.at(weights, b.times(n, 4 * PART)) for n in numbers]
            rest = b.at(fetched(b, following, values, first), b.times(dim, BLOCK))

            def columns(width: int, start: Value) -> None:
                at = b.times(start, 64)
                ahead = b.at(rest, b.times(start, BLOCK * 16))
                sums = [b.variables(width, fill(VI, 0)) for _ in state]
                with b.loop(pairs) as pair:
                    row = b.at(values, b.times(b.times(pair, dim), 4), at)
                    v = [b.read(VI, row, 64 * c) for c in range(width)]
                    for line in range(width // 2):
                        b.prefetch(b.at(ahead, b.times(pair, 32 * width), 64 * line))
                    for w, slots in zip(weight, sums, strict=True):
                        x = b.broadcast(I32, w, b.times(pair, 4))
                        for c, slot in enumerate(slots):
                            b.store(pair_products(b, target, b.get(slot, VI), v[c], x), slot)
                for s, n, slots in zip(state, numbers, sums, strict=True):
                    scale = b.broadcast(F32, scales, b.times(n, 4))
                    for c, slot in enumerate(slots):
                        place = b.at(s, at, 4 * STATE + 64 * c)
                        b.write(b.fmadd(b.sitofp(b.get(slot, VI), VF), scale, b.read(VF, place)), place)

            b.greedy(b.sdiv(dim, I64(16)), (4, 1), columns)

        b.greedy(count, target.query_tiles, body)

    return emit


def kernels(target: Target) -> dict[str, Kernel]:
    """By the names the walk calls them."""
    return {
        "fix_query": fix_query,
        "fix_keys": fix_keys,
        "scores_fixed": scores(target),
        "scale_values": scale_values,
        "fix_weights": fix_weights,
        "fix_values": fix_values,
        "weigh_fixed": weigh(target),
    }
