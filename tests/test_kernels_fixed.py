"""Attention with 16-bit integers: kernels against their NumPy twins, bit for bit, on every target of this CPU."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_calls import TARGETS, assert_same_bits, kernels
from numpy.typing import NDArray

from engine.kernels import fixed, twins
from engine.kernels.attention import BLOCK, PART, STATE

QUERY_COUNTS = (1, 2, 3, 5, 7, 13, 37)
HEAD_SIZES = (16, 48, 64, 80, 112, 256)
UNTOUCHED = np.float32(-7.25)

every_target = pytest.mark.parametrize("target", TARGETS)


def queries_of(rng: np.random.Generator, count: int, dim: int) -> NDArray[np.float32]:
    """Ordinary ones, one of zeros, one with a single large number, and one too small to count."""
    q = rng.standard_normal((count, dim)).astype(np.float32)
    special = np.zeros((3, dim), np.float32)
    special[1, dim // 3], special[2] = -3e4, 1e-36
    q[: min(count, 4)][1:] = special[: max(0, min(count, 4) - 1)]
    return q


def cached_of(rng: np.random.Generator, dim: int) -> NDArray[np.float16]:
    """Keys or values [64, dim] of all sizes that f16 has, zeros and the smallest among them."""
    sizes = 10.0 ** rng.uniform(-6, 4, (BLOCK, 1))
    x = np.clip(rng.standard_normal((BLOCK, dim)) * sizes, -65504, 65504).astype(np.float16)
    x[5], x[6], x[7, 0] = 0, 6e-8, 65504
    return x


def addresses(rows: np.ndarray) -> np.ndarray:
    return np.array([row.ctypes.data for row in rows], np.int64)


def fixed_queries(target: str, q: NDArray[np.float32]) -> NDArray[np.float32]:
    out = q.copy()
    for row in out:
        kernels(target).call("fix_query", row, len(row))
    return out


@every_target
def test_queries_become_the_integers_of_the_twin_in_place(target: str) -> None:
    rng = np.random.default_rng(1)
    for dim in HEAD_SIZES:
        q = queries_of(rng, 9, dim)
        levels, scales = twins.fixed_query(q)
        rows = fixed_queries(target, q)
        assert_same_bits(rows.view(np.int16)[:, :dim], levels.astype(np.int16))
        assert_same_bits(rows[:, dim // 2], scales)
        assert_same_bits(rows[:, dim // 2 + 1 :], q[:, dim // 2 + 1 :])


@every_target
def test_keys_and_values_become_the_integers_of_the_twin(target: str) -> None:
    rng = np.random.default_rng(2)
    for dim in HEAD_SIZES:
        x = cached_of(rng, dim)
        levels, expected = twins.fixed_cached(x)
        scales, factors = np.full((2, BLOCK + 16), UNTOUCHED)
        keys, values = np.zeros((dim // 2, BLOCK, 2), np.int16), np.zeros((BLOCK // 2, dim, 2), np.int16)
        stored = np.ascontiguousarray(x.T)
        kernels(target).call("fix_keys", stored, keys, scales, dim, stored)
        assert_same_bits(keys.transpose(1, 0, 2).reshape(BLOCK, dim), levels.astype(np.int16))
        assert_same_bits(scales[:BLOCK], expected)
        for positions in (1, 31, 64):
            pairs = (positions + 1) // 2
            kernels(target).call("scale_values", x, positions, scales, factors, dim)
            assert_same_bits(scales[:positions], expected[:positions])
            assert not scales[positions:BLOCK].any()
            values[...] = -1
            kernels(target).call("fix_values", x, factors, values, pairs, dim, x)
            found = values.transpose(0, 2, 1).reshape(BLOCK, dim)
            assert_same_bits(found[:positions], levels[:positions].astype(np.int16))
            assert not found[positions : 2 * pairs].any()
            assert (found[2 * pairs :] == -1).all()
        assert (scales[BLOCK:] == UNTOUCHED).all()


@every_target
def test_scores_have_the_bits_of_the_twin_for_any_number_of_queries(target: str) -> None:
    rng = np.random.default_rng(3)
    for dim in HEAD_SIZES:
        q, x = queries_of(rng, max(QUERY_COUNTS), dim), cached_of(rng, dim)
        expected = twins.fixed_scores(q, x)
        rows, stored = fixed_queries(target, q), np.ascontiguousarray(x.T)
        keys, scales = np.zeros((dim // 2, BLOCK, 2), np.int16), np.zeros(BLOCK, np.float32)
        kernels(target).call("fix_keys", stored, keys, scales, dim, stored)
        for count in QUERY_COUNTS:
            out = np.full((count + 1, PART), UNTOUCHED)
            kernels(target).call("scores_fixed", addresses(rows), count, keys, scales, out, dim, stored)
            assert_same_bits(out[:count, :BLOCK], expected[:count])
            assert (out[count] == UNTOUCHED).all()
            assert (out[:, BLOCK:] == UNTOUCHED).all()


@every_target
@pytest.mark.parametrize("positions", [65, 66, 81, 127, 128])
def test_weighted_values_have_the_bits_of_the_twin_for_any_number_of_queries(positions: int, target: str) -> None:
    """Two blocks of a part one after the other, the second up to where a row sees."""
    rng = np.random.default_rng(positions)
    for dim in HEAD_SIZES:
        x = np.concatenate([cached_of(rng, dim), cached_of(rng, dim)])
        weights = rng.uniform(0, 1, (max(QUERY_COUNTS), PART)).astype(np.float32)
        weights[1] *= 1e-30
        weights[2, :BLOCK], weights[:, positions:] = 0, 0
        weights[0] *= rng.uniform(0, 1, PART) ** 40
        start = rng.standard_normal((len(weights) + 1, dim)).astype(np.float32)
        expected = twins.fixed_weigh(weights[:, :positions], x[:positions], start[:-1])
        x[positions:] = np.nan  # what a block holds behind the last position does not matter
        for count in QUERY_COUNTS:
            states, rows = np.full((count + 1, STATE + dim), UNTOUCHED), weights.copy()
            states[:, STATE:] = start[: count + 1]
            places, scales, of_weights = addresses(states), np.zeros((2, BLOCK), np.float32), np.full(40, UNTOUCHED)
            for block, values in enumerate(x.reshape(2, BLOCK, dim)):
                seen = min(BLOCK, positions - BLOCK * block)
                pairs, levels = (seen + 1) // 2, np.zeros((BLOCK // 2, dim, 2), np.int16)
                kernels(target).call("scale_values", values, seen, scales[0], scales[1], dim)
                kernels(target).call("fix_weights", rows, count, block, scales[0], of_weights)
                kernels(target).call("fix_values", values, scales[1], levels, pairs, dim, values)
                of_block = rows[:, 32 * block :]
                kernels(target).call("weigh_fixed", of_block, of_weights, count, levels, pairs, places, dim, values)
            assert_same_bits(states[:count, STATE:], expected[:count])
            assert_same_bits(states[count, STATE:], start[count])
            assert (states[:, :STATE] == UNTOUCHED).all()
            assert (of_weights[count:] == UNTOUCHED).all()


def test_no_sum_of_products_leaves_32_bits() -> None:
    """The worst are all numbers equal, and one that is all: sums of magnitudes stay below 2**18, the cached 2**13."""
    rng = np.random.default_rng(5)
    for dim in (16, 128, 1024, 2000 // 16 * 16):
        for q in (np.ones(dim), np.eye(1, dim)[0], rng.uniform(0.5, 1, dim), rng.standard_normal(dim)):
            levels, _ = twins.fixed_query(np.float32(q)[None])
            cached, _ = twins.fixed_cached(np.float16(q)[None])
            assert abs(levels).max() < 1 << 15
            assert abs(cached).max() <= fixed.CACHED_LIMIT
            assert abs(levels).sum() * fixed.CACHED_LIMIT < 1 << 31


def test_integers_lose_no_more_than_f16_has_lost() -> None:
    """Scores against exact ones of keys in f32: rounding to f16 costs as much as all that comes after it."""
    rng = np.random.default_rng(6)
    q, keys = (rng.standard_normal((400, 128)).astype(np.float32) for _ in range(2))
    exact = q.astype(np.float64) @ keys.T.astype(np.float64)
    halves = keys.astype(np.float16)
    stored = q.astype(np.float64) @ halves.T.astype(np.float64)
    rounding, products = (stored - exact).std(), (twins.fixed_scores(q, halves[None]) - stored).std()
    assert products < rounding
