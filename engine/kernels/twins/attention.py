"""Keys and values as the cache keeps them, and attention over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.api import KVType
from engine.kernels import fixed
from engine.kernels.attention import BLOCK, PART
from engine.kernels.ir import LANES
from engine.kernels.kv_types import LARGEST_FLOAT, LARGEST_HALF, RUN
from engine.kernels.twins.arithmetic import Floats, Halves, Ints, exp, fma32, larger, tree
from engine.kernels.twins.rows import capped


# ---------------------------------------------------------------- keys and values
def to_half(x: Floats) -> Halves:
    """K and V in f16: rounded half to even, always finite (`kv_types.py`)."""
    return np.clip(x, -np.float32(LARGEST_HALF), np.float32(LARGEST_HALF)).astype(np.float16)


def to_q8_0(x: Floats) -> tuple[NDArray[np.int8], Halves]:
    """K and V x [..., D] in q8_0: numbers [..., D] and scales [..., runs] (`kv_types.py`)."""
    padding = -x.shape[-1] % RUN
    runs = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)]).reshape(*x.shape[:-1], -1, RUN)
    top = np.abs(runs).max(axis=-1) / np.float32(127)
    scales = np.minimum(top, np.float32(LARGEST_HALF)).astype(np.float16)
    divisor = np.where(scales == 0, np.float32(1), scales.astype(np.float32))
    levels = np.clip(np.rint(runs / divisor[..., None]), -127, 127).astype(np.int8)
    return levels.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]], scales


def from_q8_0(q: NDArray[np.int8], scales: Halves) -> Floats:
    """[..., D] f32 of numbers [..., D] and scales [..., runs]."""
    return q.astype(np.float32) * np.repeat(scales.astype(np.float32), RUN, axis=-1)[..., : q.shape[-1]]


def kept(x: Floats, kv_type: KVType) -> Floats | Halves:
    """K or V as attention finds it in the cache."""
    if kv_type == "f16":
        return to_half(x)
    if kv_type == "q8_0":
        return from_q8_0(*to_q8_0(x))
    return np.clip(x, -np.float32(LARGEST_FLOAT), np.float32(LARGEST_FLOAT))


# ---------------------------------------------------------------- attention
@dataclass(frozen=True, slots=True)
class State:
    """An unfinished softmax-weighted sum over some positions."""

    peak: Floats
    """[...]: the largest score."""
    total: Floats
    """[...]: the sum of the weights e**(score - peak)."""
    values: Floats
    """[..., D]: the weighted values."""


def scores(q: Floats, keys: Floats | Halves) -> Floats:
    """[..., S] f32 = q [..., D] . keys [..., S, D], summed over D in ascending order."""
    keys = keys.astype(np.float32)
    out = np.zeros(np.broadcast_shapes(q.shape[:-1], keys.shape[:-2]) + keys.shape[-2:-1], np.float32)
    for d in range(q.shape[-1]):
        out = fma32(q[..., d, None], keys[..., d], out)
    return out


def softmax(x: Floats, low: Ints | int, high: Ints | int) -> tuple[Floats, Floats, Floats]:
    """(weights [..., S], peak [...], total [...]) of scores x [..., S] of which low..high are seen; S % 16 == 0.

    Lane i takes positions i, i + 16 and so on; the lanes are reduced by `tree`. Weights of what is not seen are 0.
    """
    num_vectors, position = x.shape[-1] // LANES, np.arange(x.shape[-1])
    seen = (position >= np.asarray(low)[..., None]) & (position < np.asarray(high)[..., None])
    lanes = np.where(seen, x, -np.float32(np.inf)).reshape(*x.shape[:-1], -1, LANES)
    peak = np.full_like(lanes[..., 0, :], -np.inf)
    for i in range(num_vectors):
        peak = larger(lanes[..., i, :], peak)
    top = tree(peak, larger)
    weights = np.where(seen, exp(x - top[..., None]), np.float32(0))
    lanes = weights.reshape(lanes.shape)
    total = np.zeros_like(peak)
    for i in range(num_vectors):
        total = total + lanes[..., i, :]
    return weights, top, tree(total, np.add)


def weigh(weights: Floats, values: Floats | Halves, start: Floats) -> Floats:
    """[..., D] f32 = start + weights [..., S] . values [..., S, D], position by position in ascending order."""
    for s in range(weights.shape[-1]):
        start = fma32(weights[..., s, None], values[..., s, :].astype(np.float32), start)
    return start


# ---------------------------------------------------------------- the same with 16-bit integers, for K and V in f16
def fixed_points(x: Floats | Halves, limit: int, top: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Integers [..., n] nearest to x [..., n] * (limit / top [...]), ties to even, and their scale [...]."""
    empty = top < np.float32(fixed.TINY)
    factor = np.where(empty, np.float32(0), np.float32(limit) / np.where(empty, np.float32(1), top))
    levels = np.rint(x.astype(np.float64) * factor[..., None])  # f64 holds the product of two f32 exactly
    return levels.astype(np.int64), top / np.float32(limit)


def fixed_cached(x: Floats | Halves) -> tuple[NDArray[np.int64], Floats]:
    """Keys or values x [..., D] as integers and scales [...] (`fixed.fix_keys`, `fixed.fix_values`)."""
    return fixed_points(x, fixed.CACHED_LIMIT, np.abs(x.astype(np.float32)).max(axis=-1))


def fixed_query(q: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Queries [..., D] as integers and scales [...] (`fixed.fix_query`): lanes are added in ascending order."""
    lanes = np.abs(q).reshape(*q.shape[:-1], -1, LANES)
    sums = np.zeros_like(lanes[..., 0, :])
    for i in range(lanes.shape[-2]):
        sums = sums + lanes[..., i, :]
    peak = np.float32(fixed.PEAKS) * lanes.max(axis=(-2, -1))
    return fixed_points(q, fixed.SUM_LIMIT, larger(peak, tree(sums, np.add)))


def fixed_weights(weights: Floats, scales: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Weights [..., B, 64] of values with these scales: integers [..., B, 64] and scales [..., B] of blocks."""
    scaled = weights * scales
    w = scaled.reshape(*scaled.shape[:-1], 4, LANES)
    sums = (w[..., 0, :] + w[..., 1, :]) + (w[..., 2, :] + w[..., 3, :])
    peak = np.float32(fixed.PEAKS) * scaled.max(axis=-1)
    return fixed_points(scaled, fixed.SUM_LIMIT, larger(peak, tree(sums, np.add)))


def fixed_scores(q: Floats, keys: Floats | Halves) -> Floats:
    """[..., S] f32 = q [..., D] . keys [..., S, D] (`fixed.scores`)."""
    (levels, of_query), (cached, of_keys) = fixed_query(q), fixed_cached(keys)
    sums = (cached @ levels[..., None])[..., 0].astype(np.float32)
    return sums * of_keys * of_query[..., None]


def fixed_weigh(weights: Floats, values: Floats | Halves, start: Floats) -> Floats:
    """[..., D] f32 = start + weights [..., S] . values [..., S, D], block by block in ascending order."""
    cached, of_values = fixed_cached(values)
    for first in range(0, weights.shape[-1], BLOCK):
        some = slice(first, first + BLOCK)
        missing = [(0, 0)] * (weights.ndim - 1) + [(0, -weights[..., some].shape[-1] % BLOCK)]
        w, scales = (np.pad(x, missing) for x in np.broadcast_arrays(weights[..., some], of_values[..., some]))
        levels, scale = fixed_weights(w, scales)
        count = cached[..., some, :].shape[-2]
        sums = (levels[..., None, :count] @ cached[..., some, :])[..., 0, :].astype(np.float32)
        start = fma32(sums, scale[..., None], start)
    return start


def merge(state: State, part: State) -> State:
    """Both states' positions in one state (online softmax, Milakov and Gimelshein 2018)."""
    peak = larger(state.peak, part.peak)
    keep, take = exp(state.peak - peak), exp(part.peak - peak)
    total = fma32(take, part.total, keep * state.total)
    values = fma32(take[..., None], part.values, keep[..., None] * state.values)
    return State(peak, total, values)


def finish(state: State) -> Floats:
    """[..., D] f32: the weighted values divided by the sum of the weights."""
    return state.values / state.total[..., None]


def attention(
    q: Floats,
    keys: Floats | Halves,
    values: Floats | Halves,
    positions: Ints,
    window: int = 0,
    cap: float = 0.0,
    sinks: Floats | None = None,
) -> Floats:
    """[T, H, D] f32 of q [T, H, D] at `positions` [T] against keys and values [S, G, D] (`walk.attend`, `walk.merge`).

    A row sees itself and what is before it, or the last `window` of that, or if that is below 0 from its last multiple
    on; H / G heads share keys and values. Scores are capped where there is a cap. `sinks` [H]: a score more for each
    head, of a value of zeros. Softmax runs in parts cut at multiples of 512 positions, merged in ascending order. f16
    is multiplied as integers, f32 as it is.
    """
    dot, add = (fixed_scores, fixed_weigh) if keys.dtype == np.float16 else (scores, weigh)
    T, H, _ = q.shape
    first = np.maximum(0, positions + 1 - window) if window else np.zeros_like(positions)
    if window < 0:
        first = positions // -window * -window
    k = keys.repeat(H // keys.shape[1], axis=1).swapaxes(0, 1)  # [H, S, D]
    v = values.repeat(H // values.shape[1], axis=1).swapaxes(0, 1)
    # Merging a part into the empty state leaves the part as it is: exp(0) is 1, and the rest is multiplied by 0.
    state = State(np.full((T, H), -np.inf, np.float32), np.zeros((T, H), np.float32), np.zeros_like(q))
    for start in range(0, len(keys), PART):
        end = min(start + PART, len(keys))
        some = np.nonzero((first < end) & (positions >= start))[0]
        low = np.maximum(0, first[some] - start)[:, None]
        high = np.minimum(PART, positions[some] + 1 - start)[:, None]
        padding = -(end - start) % LANES
        found = dot(q[some], k[:, start:end])
        x = np.pad(capped(found, cap) if cap else found, [(0, 0), (0, 0), (0, padding)])
        weights, peak, total = softmax(x, low, high)
        part = State(peak, total, add(weights[..., : end - start], v[:, start:end], np.zeros_like(q[some])))
        merged = merge(State(state.peak[some], state.total[some], state.values[some]), part)
        state.peak[some], state.total[some], state.values[some] = merged.peak, merged.total, merged.values
    if sinks is not None:
        state = merge(state, State(np.broadcast_to(sinks, (T, H)), np.ones((T, H), np.float32), np.zeros_like(q)))
    return finish(state)
