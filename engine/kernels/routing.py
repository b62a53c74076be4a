"""Which experts a row passes, and how much of each is taken."""

from __future__ import annotations

import math

from llvmlite import ir

from engine.kernels.ir import F32, I32, I64, LANES, VF, VI, KernelBuilder, Value, fill

MOST_EXPERTS = 1024
LARGEST = 1.0e38
"""Products of a router beyond this, and what is no number, count as this (or its negative)."""


def choose(
    b: KernelBuilder, logits: Value, experts: Value, chosen: Value, of_chosen: Value, scale: Value, ids: Value,
    weights: Value,
) -> None:  # fmt: skip
    """ids i32 [chosen]: the experts with the largest of the f32 logits [experts], the largest first; of equal ones the
    lower number. weights f32 [chosen] = e**logit / sum * scale (the address of an f32).

    The sum is that of the chosen experts if `of_chosen`, else of all: lane i takes experts i, i + 16 and so on, the
    lanes are reduced by `tree`. The logits are overwritten, up to a multiple of 16.
    """
    logits, ids, weights = (b.pointer(p) for p in (logits, ids, weights))
    left = b.scratch(ir.ArrayType(VF, MOST_EXPERTS // LANES))
    vectors = b.sdiv(b.sum(experts, LANES - 1), I64(LANES))
    count, gone = b.splat(b.trunc(experts, I32)), fill(VF, -math.inf)
    first_numbers = ir.Constant(VI, list(range(LANES)))

    def numbers(v: Value) -> Value:
        """The experts of a vector."""
        return b.add(first_numbers, b.splat(b.trunc(b.times(v, LANES), I32)))

    with b.loop(vectors) as v:
        x = b.read(VF, logits, b.times(v, 64))
        x = b.select(b.fcmp_ordered(">", x, fill(VF, -LARGEST)), x, fill(VF, -LARGEST))
        x = b.select(b.fcmp_ordered("<", x, fill(VF, LARGEST)), x, fill(VF, LARGEST))
        x = b.select(b.icmp_signed("<", numbers(v), count), x, gone)
        b.write(x, logits, b.times(v, 64))
        b.write(x, left, b.times(v, 64))

    with b.loop(chosen) as j:
        tops, bests = b.variable(gone), b.variable(fill(VI, MOST_EXPERTS))
        with b.loop(vectors) as v:
            b.store(b.larger(b.read(VF, left, b.times(v, 64)), b.get(tops, VF)), tops)
        top = b.splat(b.tree(b.get(tops, VF), b.larger))
        with b.loop(vectors) as v:
            equal = b.fcmp_ordered("==", b.read(VF, left, b.times(v, 64)), top)
            number = b.select(equal, numbers(v), fill(VI, MOST_EXPERTS))
            b.store(b.smaller(number, b.get(bests, VI)), bests)
        best = b.tree(b.get(bests, VI), b.smaller)
        b.write(best, ids, b.times(j, 4))
        b.write(F32(-math.inf), left, b.times(b.sext(best, I64), 4))

    peak = b.broadcast(F32, logits, b.times(b.sext(b.read(I32, ids), I64), 4))
    only_chosen = b.splat(b.icmp_signed("!=", of_chosen, I64(0)))
    sums = b.variable(fill(VF, 0.0))
    with b.loop(vectors) as v:
        share = b.exp(b.fsub(b.read(VF, logits, b.times(v, 64)), peak), positive=False)
        b.write(share, logits, b.times(v, 64))
        waits = b.fcmp_ordered(">", b.read(VF, left, b.times(v, 64)), gone)
        counts = b.and_(b.icmp_signed("<", numbers(v), count), b.not_(b.and_(only_chosen, waits)))
        b.store(b.fadd(b.get(sums, VF), b.select(counts, share, fill(VF, 0.0))), sums)
    total, factor = b.tree(b.get(sums, VF), b.fadd), b.read(F32, b.pointer(scale))
    with b.loop(chosen) as j:
        share = b.read(F32, logits, b.times(b.sext(b.read(I32, ids, b.times(j, 4)), I64), 4))
        b.write(b.fmul(b.fdiv(share, total), factor), weights, b.times(j, 4))


def scale_choices(b: KernelBuilder, weights: Value, ids: Value, scales: Value, chosen: Value) -> None:
    """weights f32 [chosen] *= the scales f32 [experts] of the experts ids i32 [chosen]."""
    weights, ids, scales = (b.pointer(p) for p in (weights, ids, scales))
    with b.loop(chosen) as j:
        at = b.times(j, 4)
        scale = b.read(F32, scales, b.times(b.sext(b.read(I32, ids, at), I64), 4))
        b.write(b.fmul(b.read(F32, weights, at), scale), weights, at)
