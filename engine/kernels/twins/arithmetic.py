"""Numbers as compiled code has them: one rounding where it has one, sums in its order, its own exponential."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.kernels.ir import EXP_COEFFICIENTS, EXP_LN2_HIGH, EXP_LN2_LOW, EXP_LOG2E, LANES

Floats = NDArray[np.float32]
Operand = Floats | np.float32
Halves = NDArray[np.float16]
Ints = NDArray[np.integer[Any]]


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


def sum_of(x: Floats, squared: bool) -> Floats:
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
