"""What happens to the values of a row: norms, activation functions, rotation."""

from __future__ import annotations

import numpy as np

from engine.kernels.rows import CLIP, CLIPPED_SLOPE, GELU_CUBIC, GELU_LINEAR
from engine.kernels.twins.arithmetic import Floats, exp, fma32, larger, sum_of


def _mean(x: Floats, squared: bool) -> Floats:
    """[...] f32 of x or x^2 [..., n]."""
    return sum_of(x, squared) / np.float32(x.shape[-1])


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
