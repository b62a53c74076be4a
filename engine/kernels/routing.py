"""Which experts a row passes, and how much of each is taken."""

from __future__ import annotations

import math
from collections.abc import Callable

from llvmlite import ir

from engine.kernels.ir import F32, I32, I64, LANES, VF, VI, KernelBuilder, Value, fill

MOST_EXPERTS = 1024
LARGEST = 1.0e38
"""Products of a router beyond this, and what is no number, count as this (or its negative)."""
LEAST_SUM = 2.0**-14
"""Shares of experts that come to less are divided by this."""


class _Experts:
    """The experts of a row, 16 in a vector, while those to be chosen are found."""

    def __init__(self, b: KernelBuilder, experts: Value) -> None:
        self._b = b
        self._left = b.scratch(ir.ArrayType(VF, MOST_EXPERTS // LANES))
        self._count, self._gone = b.splat(b.trunc(experts, I32)), fill(VF, -math.inf)
        self._first_numbers = ir.Constant(VI, list(range(LANES)))
        self.vectors = b.sdiv(b.sum(experts, LANES - 1), I64(LANES))

    def _numbers(self, v: Value) -> Value:
        """The experts of a vector."""
        return self._b.add(self._first_numbers, self._b.splat(self._b.trunc(self._b.times(v, LANES), I32)))

    def exist(self, v: Value) -> Value:
        """Which lanes of a vector are experts."""
        return self._b.icmp_signed("<", self._numbers(v), self._count)

    def finite(self, x: Value, v: Value) -> Value:
        """x of a vector of experts between -LARGEST and LARGEST, whatever it is, and -infinity where there is none."""
        b = self._b
        x = b.select(b.fcmp_ordered(">", x, fill(VF, -LARGEST)), x, fill(VF, -LARGEST))
        x = b.select(b.fcmp_ordered("<", x, fill(VF, LARGEST)), x, fill(VF, LARGEST))
        return b.select(self.exist(v), x, self._gone)

    def offer(self, x: Value, v: Value) -> None:
        """By these finite numbers the experts of a vector are compared."""
        self._b.write(x, self._left, self._b.times(v, 64))

    def choose(self, chosen: Value, ids: Value) -> None:
        """The largest first, and of equal ones the lower number."""
        b = self._b
        with b.loop(chosen) as j:
            tops, bests = b.variable(self._gone), b.variable(fill(VI, MOST_EXPERTS))
            with b.loop(self.vectors) as v:
                b.store(b.larger(b.read(VF, self._left, b.times(v, 64)), b.get(tops, VF)), tops)
            top = b.splat(b.tree(b.get(tops, VF), b.larger))
            with b.loop(self.vectors) as v:
                equal = b.fcmp_ordered("==", b.read(VF, self._left, b.times(v, 64)), top)
                number = b.select(equal, self._numbers(v), fill(VI, MOST_EXPERTS))
                b.store(b.smaller(number, b.get(bests, VI)), bests)
            best = b.tree(b.get(bests, VI), b.smaller)
            b.write(best, ids, b.times(j, 4))
            b.write(F32(-math.inf), self._left, b.times(b.sext(best, I64), 4))

    def total(self, shares: Callable[[Value], Value], only_chosen: Value) -> Value:
        """The sum of the shares of a vector, of the chosen experts or of all: lane i takes experts i, i + 16 and so
        on, the lanes are reduced by `tree`."""
        b = self._b
        sums, narrow = b.variable(fill(VF, 0.0)), b.splat(b.icmp_signed("!=", only_chosen, I64(0)))
        with b.loop(self.vectors) as v:
            share = shares(v)
            waits = b.fcmp_ordered(">", b.read(VF, self._left, b.times(v, 64)), self._gone)
            counts = b.and_(self.exist(v), b.not_(b.and_(narrow, waits)))
            b.store(b.fadd(b.get(sums, VF), b.select(counts, share, fill(VF, 0.0))), sums)
        return b.tree(b.get(sums, VF), b.fadd)


def choose(
    b: KernelBuilder, logits: Value, experts: Value, chosen: Value, of_chosen: Value, scale: Value, ids: Value,
    weights: Value,
) -> None:  # fmt: skip
    """ids i32 [chosen]: the experts with the largest of the f32 logits [experts], the largest first; of equal ones the
    lower number. weights f32 [chosen] = e**logit / sum * scale (the address of an f32).

    The sum is that of the chosen experts if `of_chosen`, else of all. The logits are overwritten, up to a multiple of
    16.
    """
    logits, ids, weights = (b.pointer(p) for p in (logits, ids, weights))
    row = _Experts(b, experts)
    with b.loop(row.vectors) as v:
        x = row.finite(b.read(VF, logits, b.times(v, 64)), v)
        b.write(x, logits, b.times(v, 64))
        row.offer(x, v)
    row.choose(chosen, ids)
    peak = b.broadcast(F32, logits, b.times(b.sext(b.read(I32, ids), I64), 4))

    def share(v: Value) -> Value:
        found = b.exp(b.fsub(b.read(VF, logits, b.times(v, 64)), peak), positive=False)
        b.write(found, logits, b.times(v, 64))
        return found

    total, factor = row.total(share, of_chosen), b.read(F32, b.pointer(scale))
    with b.loop(chosen) as j:
        picked = b.read(F32, logits, b.times(b.sext(b.read(I32, ids, b.times(j, 4)), I64), 4))
        b.write(b.fmul(b.fdiv(picked, total), factor), weights, b.times(j, 4))


def choose_biased(
    b: KernelBuilder, logits: Value, experts: Value, chosen: Value, even: Value, of_chosen: Value, scale: Value,
    bias: Value, ids: Value, weights: Value,
) -> None:  # fmt: skip
    """`choose` by shares and a bias [experts] f32, padded to a multiple of 16, or by the logits if its address is 0.

    weights f32 [chosen] = share * scale, and if `of_chosen` divided by the sum of these shares, or by LEAST_SUM. Shares
    are the softmax of the logits, or if `even` each one's sigmoid.
    """
    has_bias = b.icmp_signed("!=", bias, I64(0))
    logits, ids, weights, bias = (b.pointer(p) for p in (logits, ids, weights, bias))
    row, top = _Experts(b, experts), b.variable(fill(VF, -math.inf))
    is_even, one = b.splat(b.icmp_signed("!=", even, I64(0))), fill(VF, 1.0)
    with b.loop(row.vectors) as v:
        x = row.finite(b.read(VF, logits, b.times(v, 64)), v)
        b.store(b.larger(x, b.get(top, VF)), top)
        b.write(x, logits, b.times(v, 64))
        row.offer(x, v)
    peak = b.splat(b.tree(b.get(top, VF), b.larger))

    def grown(v: Value) -> Value:
        return b.exp(b.fsub(b.read(VF, logits, b.times(v, 64)), peak), positive=False)

    whole = b.splat(row.total(grown, I64(0)))
    with b.loop(row.vectors) as v:
        alone = b.fdiv(one, b.fadd(one, b.exp(b.fsub(fill(VF, -0.0), b.read(VF, logits, b.times(v, 64))))))
        share = b.select(is_even, alone, b.fdiv(grown(v), whole))
        b.write(share, logits, b.times(v, 64))
    with b.if_then(has_bias), b.loop(row.vectors) as v:
        at = b.times(v, 64)
        row.offer(row.finite(b.fadd(b.read(VF, logits, at), b.read(VF, bias, at)), v), v)
    row.choose(chosen, ids)
    total = row.total(lambda v: b.read(VF, logits, b.times(v, 64)), I64(1))
    total = b.larger(total, F32(LEAST_SUM))
    divisor = b.select(b.icmp_signed("!=", of_chosen, I64(0)), total, F32(1.0))
    factor = b.read(F32, b.pointer(scale))
    with b.loop(chosen) as j:
        picked = b.read(F32, logits, b.times(b.sext(b.read(I32, ids, b.times(j, 4)), I64), 4))
        b.write(b.fmul(b.fdiv(picked, divisor), factor), weights, b.times(j, 4))


def scale_choices(b: KernelBuilder, weights: Value, ids: Value, scales: Value, chosen: Value) -> None:
    """weights f32 [chosen] *= the scales f32 [experts] of the experts ids i32 [chosen]."""
    weights, ids, scales = (b.pointer(p) for p in (weights, ids, scales))
    with b.loop(chosen) as j:
        at = b.times(j, 4)
        scale = b.read(F32, scales, b.times(b.sext(b.read(I32, ids, at), I64), 4))
        b.write(b.fmul(b.read(F32, weights, at), scale), weights, at)
