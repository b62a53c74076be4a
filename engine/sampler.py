"""Logits to the next token id, the same on every machine.

The order is that of SamplingParams: logit bias, penalties, temperature, top-k, top-p, min-p, one draw. Equal logits are
ordered by id, lowest first. What makes the choice depend on nothing but logits, settings, seed and position:

- Bias and penalties are single f32 operations per element. Everything after is f64: differences, one division, a
  polynomial exponential made of multiplications and additions (`exp_negative`; the C library's differs between
  systems in the last bit), and sums that run through ascending ranks or ids one by one (`cumsum`; NumPy's `sum` adds
  in an order that depends on the CPU's vectors).
- The k largest are found by value and then sorted with their ids: which of several equal logits a partition puts in
  front depends on the CPU.
- The draw is Philox 4x64-10 (Salmon et al. 2011) with the seed as key and the position as counter: one number per
  position, whatever was or was not drawn before. A token that is guessed ahead draws what plain decoding draws there.

Log probabilities use the C library's logarithm once per position. They are for showing, and nothing is chosen by them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.api import SamplingParams
from engine.errors import EngineError

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693147180369123816490  # the first 32 bits of ln 2, so that k * _LN2_HIGH is exact
_LN2_LOW = 1.90821492927058770002e-10
_TAYLOR = tuple(1 / math.factorial(n) for n in range(12, -1, -1))  # |r| <= ln(2)/2: the next term is below 2e-16
_SMALLEST = -700.0  # e^-700 is about the smallest normal f64; less than that can never be drawn


class Sampler:
    """Draws ids for one request. It has no state: `sample` may be called for any position in any order."""

    def __init__(self, params: SamplingParams, seed: int) -> None:
        self.params = params
        self.seed = seed
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.intp)
        with np.errstate(over="ignore"):  # a bias beyond f32 means "always" or "never"
            self._bias = np.array(list(params.logit_bias.values()), dtype=np.float64).astype(np.float32)
        self._penalizes = params.penalty_window > 0 and (
            params.repeat_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )

    def sample(
        self,
        logits: NDArray[np.float32],
        position: int,
        recent: Sequence[int],
        allowed: NDArray[np.intp] | None = None,
    ) -> int:
        """The id at `position`, given the logits [V] f32 (left unchanged) and the ids before it.

        Only the last `penalty_window` ids of `recent` are looked at. `allowed`: ascending ids [A] that it may be; the
        others count for nothing, not even for top-k and top-p. Raises EngineError when nothing can be chosen.
        """
        scores = self._adjust(logits, recent)
        if allowed is not None:
            return int(allowed[self._choose(scores[allowed], position)]) if len(allowed) > 1 else int(allowed[0])
        return self._choose(scores, position)

    def _choose(self, scores: NDArray[np.float32], position: int) -> int:
        best = int(scores.argmax())  # a NaN counts as the largest, so one look at the best sees it
        top = float(scores[best])
        if math.isnan(top) or top == -math.inf:
            raise EngineError(
                f"no token can be chosen at position {position}: "
                + ("a logit is not a number" if math.isnan(top) else "the logit bias bans every token")
            )
        if self.params.temperature == 0 or top == math.inf:
            return best
        return self._draw(scores, top, position)

    def _adjust(self, logits: NDArray[np.float32], recent: Sequence[int]) -> NDArray[np.float32]:
        """Logits after bias and penalties; the same array when there is neither."""
        if not (len(self._bias_ids) or self._penalizes):
            return logits
        scores, params = logits.copy(), self.params
        with np.errstate(over="ignore", invalid="ignore"):
            scores[self._bias_ids] += self._bias
            if self._penalizes and len(recent):
                ids, counts = np.unique(np.array(recent[-params.penalty_window :], np.intp), return_counts=True)
                seen = scores[ids]
                repeat = np.float32(params.repeat_penalty)
                seen = np.where(seen > 0, seen / repeat, seen * repeat)
                seen -= np.float32(params.presence_penalty)
                seen -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
                scores[ids] = seen
        return scores

    def _draw(self, scores: NDArray[np.float32], top: float, position: int) -> int:
        params = self.params
        if params.top_k:
            ids = largest(scores, params.top_k)
            cumulative = np.cumsum(self._weights(scores[ids], top))
            total = cumulative[-1]
        else:
            weights = self._weights(scores, top)
            cumulative = np.cumsum(weights)
            total = cumulative[-1]
            ids = np.arange(len(scores))
            if params.top_p < 1 or params.min_p > 0:
                ids, cumulative = self._rank(scores, weights, total)
        kept = len(ids)
        if params.top_p < 1:
            kept = min(kept, int(np.searchsorted(cumulative, params.top_p * total)) + 1)
        if params.min_p > 0:  # the most likely one weighs exactly 1
            floor = params.min_p
            kept = min(kept, int(np.count_nonzero(self._weights(scores[ids[:kept]], top) >= floor)))
        target = uniform(self.seed, position) * cumulative[kept - 1]
        return int(ids[np.searchsorted(cumulative[:kept], target, side="right")])

    def _rank(
        self, scores: NDArray[np.float32], weights: NDArray[np.float64], total: np.float64
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """As many of the most likely ids as top-p and min-p can keep, best first, and their cumulated weights.

        Sorting a whole vocabulary costs milliseconds and is hardly ever needed.
        """
        params, count = self.params, 256
        while True:
            ids = largest(scores, count)
            ranked = weights[ids]
            cumulative = np.cumsum(ranked)
            enough = (params.top_p < 1 and cumulative[-1] >= params.top_p * total) or ranked[-1] < params.min_p
            if enough or len(ids) < count:
                return ids, cumulative
            count *= 8

    def _weights(self, scores: NDArray[np.float32], top: float) -> NDArray[np.float64]:
        """exp((score - top) / temperature) as f64, for scores [N] f32."""
        distance = scores.astype(np.float64)
        distance -= top
        # Clamped before the division: a temperature near 0 would overflow.
        np.maximum(distance, _SMALLEST * self.params.temperature, out=distance)
        distance /= self.params.temperature
        return exp_negative(distance)


def uniform(seed: int, position: int) -> float:
    """The one random number in [0, 1) of a position."""
    raw = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (raw >> 11) * 2.0**-53


def largest(values: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Ids of the `count` largest of values [V] f32, best first, the lowest id first among equals.

    The values are folded into columns; `count` columns have a maximum of at least the count-th largest maximum, so
    everything that counts is at least that large. This reads the values twice and sorts only a few of them.
    """
    size = len(values)
    count = min(count, size)
    columns = size // 64
    if count <= columns:
        maxima = values[: 64 * columns].reshape(64, columns).max(axis=0)
        bound = np.partition(maxima, columns - count)[columns - count]
    else:
        bound = np.partition(values, size - count)[size - count]
    ids = np.flatnonzero(values >= bound)
    order = np.argsort(-values[ids], kind="stable")
    return ids[order[:count]]


def exp_negative(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """e^x for x <= 0, within 1e-15 of it relatively, and 0 at or below -700: the same bits on every machine.

    Cody and Waite's reduction x = k ln 2 + r, then the Taylor polynomial of e^r. Each step is one rounded operation.
    """
    never = x <= _SMALLEST
    x = np.maximum(x, _SMALLEST)
    k = np.rint(x * _LOG2_E)
    r = x - k * _LN2_HIGH
    r -= k * _LN2_LOW
    power = np.full_like(r, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        power *= r
        power += coefficient
    power = np.ldexp(power, k.astype(np.intc))
    power[never] = 0.0
    return power


def log_probabilities(logits: NDArray[np.float32], chosen: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """Natural-log probability of `chosen` and (id, log probability) of the `count` most likely ids, best first.

    Under the model itself: logits [V] f32 before bias, penalties and temperature.
    """
    ids = largest(logits, count) if count else np.empty(0, np.intp)
    distance = logits.astype(np.float64)
    distance -= float(logits.max())
    log_total = math.log(np.cumsum(exp_negative(distance))[-1])
    return float(distance[chosen]) - log_total, [(int(i), float(distance[i]) - log_total) for i in ids]
