"""The tables of the rotary embedding, with the same bits on every machine.

NumPy's power, cosine and sine differ in their last bit from one CPU to the next (with AVX-512 it runs other code than
without), and a frequency that differs there turns up in f32 at far positions: 16 of a million entries for 32,768
positions of base 10,000. So frequencies are decimal arithmetic rounded once, and cosine and sine are polynomials of
multiplications and additions, which IEEE 754 defines to the last bit.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Sequence
from math import factorial

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 15
"""Angles taken at once: the dozen arrays of a chunk stay in L2."""
_TERMS = 9
"""Of the Taylor series: the first one left out is below 1e-17 for angles up to pi / 4."""
_HALF_PI = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
"""pi / 2 in three parts; the first two have 33 bits, so that whole multiples are exact (fdlibm, e_rem_pio2.c)."""


_CONTEXT = decimal.Context(prec=40)
_TWO_PI = decimal.Decimal("6.283185307179586476925286766559005768394")


def frequencies(
    base: float,
    dim: int,
    *,
    scale: float = 1.0,
    factors: Sequence[float] = (),
    scaled: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Radians per position [dim / 2] f64: base**(-2 i / dim) / scale / factors[i] (Su et al. 2021, section 3.4).

    `scaled` [dim / 2]: the share of each frequency that is divided by scale; None: all of it.
    """
    number = decimal.Decimal(base)
    powers = [_CONTEXT.power(number, _CONTEXT.divide(-2 * i, dim)) for i in range(dim // 2)]
    plain = np.array([float(p) for p in powers], np.float64)
    out = plain / scale if scaled is None else plain / scale * scaled + plain * (1 - scaled)
    return out / np.array(factors, np.float64) if factors else out


def yarn_shares(base: float, dim: int, context: int, fast: float, slow: float) -> NDArray[np.float64]:
    """Shares [dim / 2] of YaRN for `frequencies`: a ramp from 0 to 1 (Peng et al. 2023, section 3.2).

    It begins at the pair that turns `fast` times in `context` positions and ends at the one that turns `slow` times.
    """

    def pair(turns: float) -> decimal.Decimal:
        ratio = _CONTEXT.divide(decimal.Decimal(context), _CONTEXT.multiply(decimal.Decimal(turns), _TWO_PI))
        twice = _CONTEXT.multiply(2, _CONTEXT.ln(decimal.Decimal(base)))
        return _CONTEXT.divide(_CONTEXT.multiply(dim, _CONTEXT.ln(ratio)), twice)

    low = max(0, math.floor(pair(fast)))
    high = min(dim - 1, math.ceil(pair(slow)))
    return np.clip((np.arange(dim // 2) - low) / max(0.001, high - low), 0.0, 1.0)


def yarn_magnitude(scale: float, multiplier: float) -> float:
    """0.1 multiplier ln(scale) + 1, and 1 where the context is not stretched (Peng et al. 2023, equation 22)."""
    if scale <= 1:
        return 1.0
    return float(1 + _CONTEXT.multiply(decimal.Decimal(0.1 * multiplier), _CONTEXT.ln(decimal.Decimal(scale))))


def temperatures(num_positions: int, context: int, growth: float, first: int = 0) -> NDArray[np.float32]:
    """What scores of the query at each position are multiplied with [num_positions] f32: 1 + growth * ln(1 + n).

    n is how often the position has left the `context` that a model was trained with behind (Mistral 3), the first one
    counting as `first` (Llama 4).
    """
    times = range(1 + (num_positions - 1 + first) // context)
    of_context = [1 + growth * float(_CONTEXT.ln(decimal.Decimal(1 + n))) for n in times]
    return np.repeat(np.array(of_context, np.float32), context)[first : first + num_positions]


def cos_sin(
    num_positions: int, per_position: NDArray[np.float64], magnitude: float = 1.0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines [num_positions, half] f32 of position * per_position [half] in radians, times `magnitude`."""
    cos, sin = (np.empty((num_positions, len(per_position)), np.float32) for _ in range(2))
    rows = max(1, _CHUNK // len(per_position))
    for first in range(0, num_positions, rows):
        positions = np.arange(first, min(first + rows, num_positions), dtype=np.float64)
        some = slice(first, first + len(positions))
        for out, values in zip((cos, sin), _cos_sin(positions[:, None] * per_position)):
            out[some] = values * magnitude
    return cos, sin


def _cos_sin(angles: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of angles >= 0, in f64: turned back by whole quarters to -pi / 4 .. pi / 4, where the series are short."""
    quarters = np.rint(angles * (2 / np.pi))
    r = angles
    for part in _HALF_PI:
        r = r - quarters * part
    square = r * r
    cos, sin = np.zeros_like(r), np.zeros_like(r)
    for n in reversed(range(_TERMS)):
        cos = cos * square + (-1) ** n / factorial(2 * n)
        sin = sin * square + (-1) ** n / factorial(2 * n + 1)
    sin = sin * r
    turned = quarters % 4
    odd, cos_negative, sin_negative = turned % 2 == 1, (turned == 1) | (turned == 2), turned >= 2
    cos, sin = np.where(odd, sin, cos), np.where(odd, cos, sin)
    return np.where(cos_negative, -cos, cos), np.where(sin_negative, -sin, sin)
