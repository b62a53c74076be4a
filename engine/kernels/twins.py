"""What every kernel computes, in plain NumPy: the definition that compiled code is held to, bit for bit.

Each function says in f32, operation by operation and in the same order, what a kernel of `matmul.py`, `rows.py` or
`attention.py` does; where a kernel has one rounding (`fma32`), so has the twin. What a kernel may choose freely does
not show here: tiles, lanes that are summed as integers, the layout in memory, how work is split. Weights come as the
file's own blocks. Nothing at run time uses this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.api import KVType
from engine.kernels import fixed
from engine.kernels.attention import BLOCK, PART
from engine.kernels.delta import LOG1P_TERMS
from engine.kernels.ir import EXP_COEFFICIENTS, EXP_LN2_HIGH, EXP_LN2_LOW, EXP_LOG2E, LANES
from engine.kernels.kv_types import LARGEST_FLOAT, LARGEST_HALF, RUN
from engine.kernels.plan import TAPS
from engine.kernels.routing import LARGEST, LEAST_SUM
from engine.kernels.rows import CLIP, CLIPPED_SLOPE, GELU_CUBIC, GELU_LINEAR, TINY
from engine.quant import TensorType, block_shape, dequantize, unpack

Floats = NDArray[np.float32]
Operand = Floats | np.float32
Halves = NDArray[np.float16]
Ints = NDArray[np.integer[Any]]


# ---------------------------------------------------------------- arithmetic
@np.errstate(over="ignore", invalid="ignore")
def fma32(x: Operand, y: Operand, z: Operand) -> Floats:
    """x * y + z of f32 arrays whose shapes broadcast, rounded once.

    The product of two f32 is exact in f64, the sum need not be. Rounded to f64 and then to f32 it would be rounded
    twice; but if the first rounding is to odd (an inexact sum gets an odd last bit, so that it never looks like a
    tie), the second gives what one rounding gives (Boldo and Melquiond 2008).
    """
    product, addend = np.multiply(x, y, dtype=np.float64), np.asarray(z, np.float64)
    total = np.asarray(product + addend)
    # What the sum lost is itself an f64 (two-sum, Knuth 1969).
    added = total - product
    lost = (product - (total - added)) + (addend - added)
    bits = total.view(np.int64)
    to_odd = np.isfinite(lost) & (lost != 0) & (bits & 1 == 0)
    away_from_zero = (lost > 0) == (total > 0)
    bits = bits + np.where(to_odd, np.where(away_from_zero, 1, -1), 0)
    return bits.view(np.float64).astype(np.float32)


def larger(x: Floats, y: Floats) -> Floats:
    """x where x > y, else y."""
    return np.where(x > y, x, y)


def tree(x: Floats, combine: Callable[[Floats, Floats], Floats]) -> Floats:
    """Reduce 16 lanes [..., 16] in one fixed shape: halves onto each other, 8, 4, 2, 1."""
    half = LANES // 2
    while half:
        x = combine(x[..., :half], x[..., half : 2 * half])
        half //= 2
    return x[..., 0]


def exp(x: Floats) -> Floats:
    """e**x, clamped to -87..88: x = n ln 2 + r, a polynomial in r, times 2**n by adding n to the exponent."""
    f32 = np.float32
    x = np.where(x < f32(-87), f32(-87), x)
    x = np.where(x > f32(88), f32(88), x)
    n = np.rint(x * f32(EXP_LOG2E))
    r = fma32(n, f32(EXP_LN2_LOW), fma32(n, f32(EXP_LN2_HIGH), x))
    p = np.full_like(r, EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        p = fma32(p, r, f32(coefficient))
    scaled: NDArray[np.int32] = p.view(np.int32) + (n.astype(np.int32) << np.int32(23))
    return scaled.view(np.float32)


# ---------------------------------------------------------------- quantized activations and matrix products
@dataclass(frozen=True, slots=True)
class Activations:
    """Rows of K activations in blocks of `span` that share a scale."""

    q: NDArray[np.int8]
    """[..., K]: -127..127."""
    scales: Floats
    """[..., K / span]."""

    @property
    def span(self) -> int:
        return int(self.q.shape[-1] // self.scales.shape[-1])

    def sums(self, run: int) -> NDArray[np.int32]:
        """Sums of `run` neighbours: int32 [..., K / run]."""
        sums: NDArray[np.int32] = self.q.reshape(*self.q.shape[:-1], -1, run).sum(axis=-1, dtype=np.int32)
        return sums


def quantize(x: Floats, span: int) -> Activations:
    """Symmetric int8 of x [..., K]: scale = max |x| / 127 in each block, rounded half to even (`rows.activate`).

    All are 0 in a block without a value that reaches TINY.
    """
    blocks = x.reshape(*x.shape[:-1], -1, span)
    top = np.abs(blocks).max(axis=-1)
    empty = top < np.float32(TINY)
    factor = np.where(empty, np.float32(0), np.float32(127) / np.where(empty, np.float32(1), top))
    q = np.rint(blocks * factor[..., None]).astype(np.int8)
    return Activations(q.reshape(x.shape), top / np.float32(127))


def activation_span(type: TensorType) -> int:
    """Activations that are quantized together for weights of this type; 1: they stay f32."""
    return block_shape(type)[0]


def matmul(type: TensorType, raw: NDArray[np.uint8], x: Floats) -> Floats:
    """[T, N] f32 = x [T, K] f32, quantized as `quantize` does, times the rows of raw [N, row bytes] (`matmul.matmul`).

    Block by block in ascending order; inside a block everything is an exact integer.
    """
    span = activation_span(type)
    if span == 1:
        return _matmul_floats(dequantize(type, raw), x)
    activations, parts = quantize(x, span), unpack(type, raw)
    run = span // parts.scales.shape[-1]
    weights = parts.q * np.repeat(parts.scales, run, axis=-1).astype(np.float64)  # [N, blocks, span], integers
    values = activations.q.reshape(len(x), -1, span).astype(np.float64)
    sums = activations.sums(run).reshape(len(x), -1, span // run).astype(np.float64)
    total = np.zeros((len(x), len(raw)), np.float32)
    for block, scale in enumerate(activations.scales.T[..., None]):
        d, m = parts.d[:, block], None if parts.m is None else parts.m[:, block]
        # f64 holds these integers (below 2**31) exactly, in whatever order they are added.
        value = d * (values[:, block] @ weights[:, block].T).astype(np.float32)
        if m is not None and parts.mins is not None:
            value = value - m * (sums[:, block] @ parts.mins[:, block].T.astype(np.float64)).astype(np.float32)
        total = fma32(value, scale, total)
        if m is not None and parts.mins is None:
            total = fma32(m, scale * sums[:, block].astype(np.float32), total)
    return total


def _matmul_floats(weights: Floats, x: Floats) -> Floats:
    """Even and odd k are summed apart in ascending order, then together."""
    halves = [np.zeros((len(x), len(weights)), np.float32) for _ in range(2)]
    for k in range(x.shape[-1]):
        halves[k % 2] = fma32(weights[:, k], x[:, k, None], halves[k % 2])
    return halves[0] + halves[1]


def dequantize_row(type: TensorType, raw: NDArray[np.uint8]) -> Floats:
    """[..., K] f32 of raw [..., row bytes] (`matmul.dequantize_row`)."""
    return dequantize(type, raw)


# ---------------------------------------------------------------- rows
def _sum(x: Floats, squared: bool) -> Floats:
    """[...] f32, the sum of x or x^2 [..., n]: vector i of 16 goes to sum i mod 4, ascending."""
    n = x.shape[-1]
    vectors = np.zeros((*x.shape[:-1], -(-n // 64) * 64), np.float32)  # what is missing adds nothing
    vectors[..., :n] = x
    vectors = vectors.reshape(*x.shape[:-1], -1, 4, LANES)
    sums = np.zeros((*x.shape[:-1], 4, LANES), np.float32)
    for i in range(vectors.shape[-3]):
        v = vectors[..., i, :, :]
        sums = fma32(v, v, sums) if squared else v + sums
    s = [sums[..., i, :] for i in range(4)]
    total: Floats = tree((s[0] + s[1]) + (s[2] + s[3]), np.add)
    return total


def _mean(x: Floats, squared: bool) -> Floats:
    """[...] f32 of x or x^2 [..., n]."""
    return _sum(x, squared) / np.float32(x.shape[-1])


def inverse_rms(x: Floats, eps: float) -> Floats:
    """[...] f32 = 1 / sqrt(mean(x^2) + eps) for x [..., n]."""
    inverse: Floats = np.float32(1) / np.sqrt(_mean(x, squared=True) + np.float32(eps))
    return inverse


def centred(x: Floats, weight: Floats, bias: Floats | None, eps: float) -> Floats:
    """(x - mean) / sqrt(variance + eps) * weight + bias for x [..., n]: LayerNorm (Ba et al. 2016)."""
    away = x - _mean(x, squared=False)[..., None]
    scaled = away * inverse_rms(away, eps)[..., None]
    return scaled * weight if bias is None else fma32(scaled, weight, bias)


def normed(x: Floats, weight: Floats, eps: float) -> Floats:
    """x / rms(x) * weight for x [..., n]."""
    return x * inverse_rms(x, eps)[..., None] * weight


def branch_normed(y: Floats, weight: Floats, eps: float) -> Floats:
    """y * (1 / rms(y) * weight) for y [..., n]: what `add_normed` adds to the residual stream."""
    return y * (inverse_rms(y, eps)[..., None] * weight)


def silu(gate: Floats, up: Floats) -> Floats:
    """gate / (1 + exp(-gate)) * up."""
    return gate / (np.float32(1) + exp(-gate)) * up


def gelu(gate: Floats, up: Floats) -> Floats:
    """gate / (1 + exp(-z)) * up with z = linear gate + cubic gate^3."""
    z = fma32(gate * gate * gate, np.float32(GELU_CUBIC), gate * np.float32(GELU_LINEAR))
    return gate / (np.float32(1) + exp(-z)) * up


def clipped(gate: Floats, up: Floats) -> Floats:
    """The gates of gpt-oss: g / (1 + exp(-1.702 g)) * (u + 1) of g = gate, at most 7, and u = up between -7 and 7."""
    top = np.float32(CLIP)
    gate = np.where(gate > top, top, gate)
    up = np.where(up > top, top, up)
    up = np.where(up < -top, -top, up)
    return gate / (np.float32(1) + exp(gate * np.float32(-CLIPPED_SLOPE))) * (up + np.float32(1))


def lone_gelu(x: Floats) -> Floats:
    """gelu(x), where nothing is gated."""
    z = fma32(x * x * x, np.float32(GELU_CUBIC), x * np.float32(GELU_LINEAR))
    return x / (np.float32(1) + exp(-z))


def lone_relu2(x: Floats) -> Floats:
    """The square of what of x is above 0."""
    positive = larger(x, np.zeros_like(x))
    return positive * positive


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x))."""
    return np.float32(1) / (np.float32(1) + exp(-x))


def choose(logits: Floats, chosen: int, of_chosen: bool, scale: float = 1.0) -> tuple[NDArray[np.int64], Floats]:
    """(experts [T, chosen], weights [T, chosen]) of router logits [T, experts]: the largest first, of equal ones the
    lower number; weights are e**logit / the sum of the chosen ones, or of all, * scale."""
    x = _finite(logits)
    experts = np.argsort(-x, axis=-1, kind="stable")[:, :chosen]
    shares = exp(x - np.take_along_axis(x, experts[:, :1], axis=-1))
    picked = np.take_along_axis(shares, experts, axis=-1)
    total = _shared(shares, experts if of_chosen else None)
    return experts, picked / total * np.float32(scale)


def choose_biased(
    logits: Floats, chosen: int, even: bool, of_chosen: bool, scale: float, bias: Floats | None
) -> tuple[NDArray[np.int64], Floats]:
    """`choose` by shares and bias [experts], or by the logits if there is none: shares are the softmax of the logits,
    or if `even` each one's sigmoid."""
    x = _finite(logits)
    grown = exp(x - x.max(axis=-1, keepdims=True))
    shares = sigmoid(x) if even else grown / _shared(grown)
    order = x if bias is None else _finite(shares + bias)
    experts = np.argsort(-order, axis=-1, kind="stable")[:, :chosen]
    picked = np.take_along_axis(shares, experts, axis=-1)
    total = np.maximum(_shared(shares, experts), np.float32(LEAST_SUM)) if of_chosen else np.float32(1)
    return experts, picked / total * np.float32(scale)


def _finite(logits: Floats) -> Floats:
    return np.clip(np.where(np.isnan(logits), -np.float32(LARGEST), logits), -np.float32(LARGEST), np.float32(LARGEST))


def _shared(shares: Floats, experts: NDArray[np.int64] | None = None) -> Floats:
    """[T, 1]: the sum of shares [T, experts], or only of the chosen experts [T, chosen]."""
    counted = np.zeros((len(shares), -(-shares.shape[-1] // LANES) * LANES), np.float32)
    if experts is None:
        counted[:, : shares.shape[-1]] = shares
    else:
        np.put_along_axis(counted, experts, np.take_along_axis(shares, experts, axis=-1), axis=-1)
    lanes = np.zeros((len(shares), LANES), np.float32)
    for vector in counted.reshape(len(shares), -1, LANES).swapaxes(0, 1):
        lanes = lanes + vector
    return tree(lanes, np.add)[:, None]


def capped(x: Floats, cap: float) -> Floats:
    """cap * tanh(x / cap), with tanh(y) = 1 - 2 / (exp(2 y) + 1)."""
    y, one = x / np.float32(cap), np.float32(1)
    return np.float32(cap) * (one - np.float32(2) / (exp(y + y) + one))


def rotate(x: Floats, cos: Floats, sin: Floats, neox: bool) -> Floats:
    """The first 2 * half of x [..., D], in pairs (d, d + half) if neox, else (2 d, 2 d + 1); cos, sin [..., half]."""
    half = cos.shape[-1]
    first, second = (slice(half), slice(half, 2 * half)) if neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    u, v = x[..., first], x[..., second]
    out = x.copy()
    out[..., first], out[..., second] = u * cos - v * sin, u * sin + v * cos
    return out


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


# ---------------------------------------------------------------- layers with a running state
def convolve(x: Floats, taps: Floats, before: Floats) -> tuple[Floats, Floats]:
    """silu of a causal convolution of x [T, C] with taps [TAPS, C] behind rows [TAPS - 1, C]; and the last of these."""
    total, last = _convolution(x, taps, before)
    return total / (np.float32(1) + exp(-total)), last


def mix(x: Floats, taps: Floats, before: Floats) -> tuple[Floats, Floats]:
    """g * convolution(u * v) of x [T, 3 C], which is u, g and v side by side; and the last products."""
    u, g, v = np.split(x, 3, axis=1)
    total, last = _convolution(u * v, taps, before)
    return g * total, last


def _convolution(x: Floats, taps: Floats, before: Floats) -> tuple[Floats, Floats]:
    rows = np.concatenate([before, x])
    total = taps[0] * rows[: len(x)]
    for j in range(1, TAPS):
        total = fma32(taps[j], rows[j : j + len(x)], total)
    return total, rows[len(x) :]


def unit(x: Floats, eps: float, factor: float) -> Floats:
    """x * (factor / sqrt(sum of squares + eps)) for x [..., n]."""
    return x * (np.float32(factor) / np.sqrt(_sum(x, squared=True) + np.float32(eps)))[..., None]


def softplus(x: Floats) -> Floats:
    """log(1 + exp(x)): the larger of x and 0, and log(1 + exp(-|x|)) by a series."""
    u = exp(-np.abs(x))
    s = u / (u + np.float32(2))
    square, total = s * s, np.full_like(s, 1 / (2 * LOG1P_TERMS - 1))
    for k in range(LOG1P_TERMS - 2, -1, -1):
        total = fma32(total, square, np.float32(1 / (2 * k + 1)))
    return larger(x, np.zeros_like(x)) + (s + s) * total


def delta(q: Floats, k: Floats, v: Floats, decay: Floats, beta: Floats, state: Floats) -> tuple[Floats, Floats]:
    """Output [T, H, V] of the gated delta rule, token by token, and the state after it.

    q, k [T, H, K], v [T, H, V], decay, beta [T, H], state [H, K, V]. Sums over K run in four chains, row i in chain
    i mod 4.
    """

    def summed(rows: Floats, weights: Floats) -> Floats:
        """[H, V] = rows [H, K, V] weighted with [H, K]."""
        chains = np.zeros((4, rows.shape[0], rows.shape[2]), np.float32)
        for i in range(rows.shape[1]):
            chains[i % 4] = fma32(rows[:, i], weights[:, i, None], chains[i % 4])
        return (chains[0] + chains[1]) + (chains[2] + chains[3])

    out = np.zeros_like(v)
    for t in range(len(v)):
        factor = decay[t][:, None]
        change = beta[t][:, None] * (v[t] - factor * summed(state, k[t]))
        state = fma32(k[t][:, :, None], change[:, None], state * factor[..., None])
        out[t] = summed(state, q[t])
    return out, state


def norm_gated(x: Floats, gate: Floats, weight: Floats, eps: float) -> Floats:
    """x / rms(x) * weight * silu(gate) for x [..., n]."""
    return normed(x, weight, eps) * (gate / (np.float32(1) + exp(-gate)))
