"""Attention over the KV cache, one block of 64 positions at a time: softmax, and products in floats.

K and V in f16, the usual ones, are multiplied as integers (`fixed.py`); the products here are for f32 and q8_0.

A conversation's softmax is computed in parts of 512 positions, cut at multiples of 512 whatever the prompt, the chunk
or the number of threads; a part leaves a state (largest score, sum, weighted values) and states are merged in
ascending order. So a row's result depends on its own position and on the keys and values before it, nothing else.

For any number of queries (rows x heads) that share a KV head:
    scores   q . k for 64 positions        softmax  a part's scores -> weights and an empty state
    weigh    the state += weights . v      merge    fold the next part into a state      finish   divide by the sum
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from engine.kernels.ir import F32, I32, I64, VF, Kernel, KernelBuilder, Value, fill, vector

BLOCK = 64
"""Positions of a KV block."""
PART = 512
"""Positions of a softmax part: fixed, since it shapes the sums."""
STATE = 16
"""Floats before the weighted values of a state: the largest score, the sum, and room for scales (`fixed.py`)."""

WIDTH = 32
"""Scores that softmax takes at a time: vectors side by side, since one's exponential is a long chain."""

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


def softmax(b: KernelBuilder, p: Value, low: Value, high: Value, padded: Value, state: Value, dim: Value) -> None:
    """Scores low..high of a part -> weights in place, zeros elsewhere up to `padded`; the state's values are cleared.

    low and high are what the row may see of this part: causality above, a sliding window below.
    """
    p, state = b.pointer(p), b.pointer(state)
    wide = vector(F32, WIDTH)
    lanes = ir.Constant(vector(I32, WIDTH), list(range(WIDTH)))
    low32, high32 = (b.splat(b.trunc(x, I32), WIDTH) for x in (low, high))
    # Only at the edges of what the row sees are there lanes to be left out.
    first = b.sdiv(b.add(low, I64(WIDTH - 1)), I64(WIDTH))
    last = b.larger_int(first, b.sdiv(high, I64(WIDTH)))
    ranges = ((I64(0), first, True), (first, last, False), (last, b.sdiv(padded, I64(WIDTH)), True))

    def masked(x: Value, i: Value, other: float) -> Value:
        position = b.add(lanes, b.splat(b.trunc(b.times(i, WIDTH), I32), WIDTH))
        seen = b.and_(b.icmp_signed(">=", position, low32), b.icmp_signed("<", position, high32))
        return b.select(seen, x, fill(wide, other))

    top, total = b.variable(fill(wide, -INFINITY)), b.variable(fill(VF, 0.0))
    for start, end, edge in ranges:
        with b.loop(end, start) as i:
            x = b.read(wide, p, b.times(i, 4 * WIDTH))
            b.store(b.larger(masked(x, i, -INFINITY) if edge else x, b.get(top, wide)), top)
    peak = b.tree(b.get(top, wide), b.larger)
    for start, end, edge in ranges:
        with b.loop(end, start) as i:
            at = b.times(i, 4 * WIDTH)
            e = b.exp(b.fsub(b.read(wide, p, at), b.splat(peak, WIDTH)), positive=False)
            e = masked(e, i, 0.0) if edge else e
            b.write(e, p, at)
            for k in range(0, WIDTH, 16):
                b.store(b.fadd(b.get(total, VF), b.pick(e, e, range(k, k + 16))), total)
    b.write(peak, state)
    b.write(b.tree(b.get(total, VF), b.fadd), state, 4)
    with b.loop(b.sdiv(dim, I64(16))) as i:
        b.write(fill(VF, 0.0), state, 4 * STATE, b.times(i, 64))


def merge(b: KernelBuilder, state: Value, part: Value, dim: Value) -> None:
    """Fold the state of the next part into `state` (online softmax, Milakov and Gimelshein 2018)."""
    state, part = b.pointer(state), b.pointer(part)
    first, second = b.read(F32, state), b.read(F32, part)
    peak = b.larger(first, second)
    keep, take = (b.exp(b.splat(b.fsub(x, peak)), positive=False) for x in (first, second))
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
