"""Attention over the KV cache, one block of 64 positions at a time: softmax, and products in floats.

K and V in f16, the usual ones, are multiplied as integers (`fixed.py`); the products here are for f32 and q8_0.

A conversation's softmax is computed in parts of 512 positions, cut at multiples of 512 whatever the prompt, the chunk
or the number of threads; a part leaves a state (largest score, sum, weighted values) and states are merged in
ascending order. So a row's result depends on its own position and on the keys and values before it, nothing else.

For any number of queries (rows x heads) that share a KV head:
    scores   q . k for 64 positions        softmax  a part's scores -> weights and empty states
    weigh    the state += weights . v      merge    fold the next part into states       finish   divide by the sum
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from engine.kernels.ir import F32, I32, I64, VF, Kernel, KernelBuilder, Value, fill, vector
from engine.kernels.target import Target

BLOCK = 64
"""Positions of a KV block."""
PART = 512
"""Positions of a softmax part: fixed, since it shapes the sums."""
STATE = 16
"""Floats before the weighted values of a state: the largest score, the sum, and room for scales (`fixed.py`)."""

INFINITY = float("inf")


def fetched(b: KernelBuilder, following: Value, here: Value, first: Value) -> Value:
    """What a tile of queries prefetches: the first what follows, the others what is there already."""
    return b.select(b.icmp_signed("==", first, I64(0)), following, here)


def scores(tiles: Sequence[int]) -> Kernel:
    """out[i][0..63] = query i . 64 keys, for `count` queries given by their addresses; out rows are PART floats apart.

    Keys are f32 [dim][64]. Each sum runs over dim in ascending order. `following` is the block that is read next. Its
    first 16 KB are prefetched while the first queries are multiplied.
    """

    def emit(
        b: KernelBuilder, queries: Value, count: Value, keys: Value, out: Value, dim: Value, following: Value
    ) -> None:
        queries, keys, out, following = (b.pointer(p) for p in (queries, keys, out, following))

        def body(num: int, first: Value) -> None:
            q = [b.pointer(b.read(I64, queries, b.times(b.sum(first, t), 8))) for t in range(num)]
            sums = [b.variables(4, fill(VF, 0.0)) for _ in range(num)]
            ahead = fetched(b, following, keys, first)
            with b.loop(dim) as d:
                for line in (0, 64):
                    b.prefetch(b.at(ahead, b.times(d, 128), line))
                row = [b.read(VF, keys, b.times(d, 4 * BLOCK), 64 * c) for c in range(4)]
                for query, slots in zip(q, sums, strict=True):
                    x = b.broadcast(F32, query, b.times(d, 4))
                    for key, slot in zip(row, slots, strict=True):
                        b.store(b.fmadd(x, key, b.get(slot, VF)), slot)
            for t, slots in enumerate(sums):
                for c, slot in enumerate(slots):
                    b.write(b.get(slot, VF), out, b.times(b.sum(first, t), 4 * PART), 64 * c)

        b.greedy(count, tiles, body)

    return emit


def weigh(tiles: Sequence[int]) -> Kernel:
    """The values of state i += weights[i][0..positions) . values [positions][dim], in ascending positions.

    `following`: as in `scores`.
    """

    def emit(
        b: KernelBuilder, weights: Value, count: Value, values: Value, positions: Value, states: Value, dim: Value,
        following: Value,
    ) -> None:  # fmt: skip
        weights, values, states, following = (b.pointer(p) for p in (weights, values, states, following))

        def body(num: int, first: Value) -> None:
            numbers = [b.sum(first, t) for t in range(num)]
            state = [b.at(b.pointer(b.read(I64, states, b.times(n, 8))), 4 * STATE) for n in numbers]
            weight = [b.at(weights, b.times(n, 4 * PART)) for n in numbers]

            def columns(width: int, vector: Value) -> None:
                at = b.times(vector, 64)
                sums = [[b.variable(b.read(VF, s, at, 64 * c)) for c in range(width)] for s in state]
                ahead = fetched(b, b.at(following, b.times(vector, BLOCK * 32)), values, first)
                with b.loop(positions) as p:
                    for line in range(width // 2):
                        b.prefetch(b.at(ahead, b.times(p, 32 * width), 64 * line))
                    v = [b.read(VF, values, b.times(b.times(p, dim), 4), at, 64 * c) for c in range(width)]
                    for w, slots in zip(weight, sums, strict=True):
                        x = b.broadcast(F32, w, b.times(p, 4))
                        for c, slot in enumerate(slots):
                            b.store(b.fmadd(x, v[c], b.get(slot, VF)), slot)
                for s, slots in zip(state, sums, strict=True):
                    for c, slot in enumerate(slots):
                        b.write(b.get(slot, VF), s, at, 64 * c)

            b.greedy(b.sdiv(dim, I64(16)), (4, 1), columns)

        b.greedy(count, tiles, body)

    return emit


def softmax(target: Target) -> Kernel:
    """Scores low..high of a part -> weights in place, for `count` queries of one row; the states' values are cleared.

    low and high are what the row may see of this part: causality above, a sliding window below. In the rest of the
    blocks where it sees something weights are 0; other blocks are left as they are. Rows of scores are PART floats
    apart.
    """

    def emit(b: KernelBuilder, p: Value, count: Value, low: Value, high: Value, states: Value, dim: Value) -> None:
        p, states = b.pointer(p), b.pointer(states)

        def body(num: int, first: Value) -> None:
            rows = [b.at(p, b.times(b.sum(first, t), 4 * PART)) for t in range(num)]
            of = [b.pointer(b.read(I64, states, b.times(b.sum(first, t), 8))) for t in range(num)]
            _softmax(b, rows, low, high, of, dim, min(BLOCK // 16, target.exponentials // num))

        b.greedy(count, (2, 1), body)

    return emit


def _softmax(
    b: KernelBuilder, rows: list[Value], low: Value, high: Value, states: list[Value], dim: Value, vectors: int
) -> None:
    """Queries side by side, `vectors` of each at a time. Those that come next are prefetched."""
    width = 16 * vectors
    wide = vector(F32, width)
    lanes = ir.Constant(vector(I32, width), list(range(width)))
    low32, high32 = (b.splat(b.trunc(x, I32), width) for x in (low, high))
    # Only at the edges of what the row sees are there lanes to be left out.
    first = b.sdiv(b.add(low, I64(width - 1)), I64(width))
    last = b.larger_int(first, b.sdiv(high, I64(width)))
    begin, end = (b.times(b.sdiv(x, I64(BLOCK)), BLOCK // width) for x in (low, b.sum(high, BLOCK - 1)))
    ranges = ((begin, first, True), (first, last, False), (last, end, True))

    def masked(vs: list[Value], i: Value, other: float) -> list[Value]:
        position = b.add(lanes, b.splat(b.trunc(b.times(i, width), I32), width))
        seen = b.and_(b.icmp_signed(">=", position, low32), b.icmp_signed("<", position, high32))
        return [b.select(seen, v, fill(wide, other)) for v in vs]

    tops, totals = b.variables(len(rows), fill(wide, -INFINITY)), b.variables(len(rows), fill(VF, 0.0))
    for start, stop, edge in ranges:
        with b.loop(stop, start) as i:
            x = [b.read(wide, row, b.times(i, 4 * width)) for row in rows]
            for v, top in zip(masked(x, i, -INFINITY) if edge else x, tops, strict=True):
                b.store(b.larger(v, b.get(top, wide)), top)
    peaks = [b.tree(b.get(top, wide), b.larger) for top in tops]
    for start, stop, edge in ranges:
        with b.loop(stop, start) as i:
            at = b.times(i, 4 * width)
            x = [b.fsub(b.read(wide, row, at), b.splat(peak, width)) for row, peak in zip(rows, peaks, strict=True)]
            e = b.exp_of_each(x, positive=False)
            for v, row, total in zip(masked(e, i, 0.0) if edge else e, rows, totals, strict=True):
                for k in range(0, width if len(rows) > 1 else 0, 16):
                    b.prefetch(b.at(row, at, 4 * PART * len(rows) + 4 * k))
                b.write(v, row, at)
                for k in range(0, width, 16):
                    b.store(b.fadd(b.get(total, VF), b.pick(v, v, range(k, k + 16))), total)
    for state, peak, total in zip(states, peaks, totals, strict=True):
        b.write(peak, state)
        b.write(b.tree(b.get(total, VF), b.fadd), state, 4)
        with b.loop(b.sdiv(dim, I64(16))) as i:
            b.write(fill(VF, 0.0), state, 4 * STATE, b.times(i, 64))


def merge(b: KernelBuilder, states: Value, parts: Value, count: Value, dim: Value) -> None:
    """Fold the states of the next part into `states`, one behind the other (Milakov and Gimelshein 2018)."""
    states, parts = b.pointer(states), b.pointer(parts)
    one = fill(VF, 1.0)
    with b.loop(count) as n:
        start = b.times(n, b.times(b.sum(dim, STATE), 4))
        state, part = b.at(states, start), b.at(parts, start)
        first, second = b.read(F32, state), b.read(F32, part)
        higher = b.fcmp_ordered(">", first, second)
        peak, other = b.select(higher, first, second), b.select(higher, second, first)
        shrunk = b.exp(b.splat(b.fsub(other, peak)), positive=False)  # what has the peak keeps its size
        keep, take = b.select(higher, one, shrunk), b.select(higher, shrunk, one)
        b.write(peak, state)
        total = b.fmadd(take, b.broadcast(F32, part, 4), b.fmul(keep, b.broadcast(F32, state, 4)))
        b.write(b.extract_element(total, I32(0)), state, 4)
        with b.loop(b.sdiv(dim, I64(16))) as i:
            at = b.sum(4 * STATE, b.times(i, 64))
            b.write(b.fmadd(take, b.read(VF, part, at), b.fmul(keep, b.read(VF, state, at))), state, at)


def finish(b: KernelBuilder, state: Value, out: Value, dim: Value) -> None:
    """out [dim] f32 = the state's weighted values divided by its sum."""
    state, out = b.pointer(state), b.pointer(out)
    total = b.broadcast(F32, state, 4)
    with b.loop(b.sdiv(dim, I64(16))) as i:
        b.write(b.fdiv(b.read(VF, state, 4 * STATE, b.times(i, 64)), total), out, b.times(i, 64))
