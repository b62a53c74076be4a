"""Layers that keep a running state: convolutions, the gated delta rule, state spaces."""

from __future__ import annotations

import numpy as np

from engine.kernels.delta import LOG1P_TERMS
from engine.kernels.plan import TAPS
from engine.kernels.twins.arithmetic import Floats, exp, fma32, larger, sum_of
from engine.kernels.twins.rows import normed


def convolve(x: Floats, taps: Floats, before: Floats, bias: Floats | None = None) -> tuple[Floats, Floats]:
    """silu of a causal convolution of x [T, C] with taps [TAPS, C] behind rows [TAPS - 1, C], plus a bias [C] if there
    is one; and the last of these rows."""
    total, last = _convolution(x, taps, before)
    total = total if bias is None else total + bias
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
    return x * (np.float32(factor) / np.sqrt(sum_of(x, squared=True) + np.float32(eps)))[..., None]


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
    out = np.zeros_like(v)
    for t in range(len(v)):
        factor = decay[t][:, None]
        change = beta[t][:, None] * (v[t] - factor * _summed(state, k[t]))
        state = fma32(k[t][:, :, None], change[:, None], state * factor[..., None])
        out[t] = _summed(state, q[t])
    return out, state


def _summed(rows: Floats, weights: Floats) -> Floats:
    """[H, V] = rows [H, K, V] weighted with [H, K]."""
    chains = np.zeros((4, rows.shape[0], rows.shape[2]), np.float32)
    for i in range(rows.shape[1]):
        chains[i % 4] = fma32(rows[:, i], weights[:, i, None], chains[i % 4])
    return (chains[0] + chains[1]) + (chains[2] + chains[3])


def scan(
    q: Floats, k: Floats, v: Floats, decay: Floats, step: Floats, skip: Floats, state: Floats
) -> tuple[Floats, Floats]:
    """Output [T, H, V] of a state space layer, token by token, and the state after it.

    q, k [T, H, K], v [T, H, V], decay, step [T, H], skip [H], state [H, K, V]. Sums over K as in `delta`.
    """
    out = np.zeros_like(v)
    for t in range(len(v)):
        change = step[t, :, None] * v[t]
        state = fma32(k[t, :, :, None], change[:, None], state * decay[t, :, None, None])
        out[t] = fma32(skip[:, None], v[t], _summed(state, q[t]))
    return out, state


def gate_silu(x: Floats, gate: Floats) -> Floats:
    """x * silu(gate)."""
    return x * (gate / (np.float32(1) + exp(-gate)))


def norm_gated(x: Floats, gate: Floats, weight: Floats, eps: float) -> Floats:
    """x / rms(x) * weight * silu(gate) for x [..., n]."""
    return normed(x, weight, eps) * (gate / (np.float32(1) + exp(-gate)))
