"""Attention kernels against their NumPy twins, bit for bit, on every target of this CPU."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_calls import TARGETS, assert_same_bits, kernels

from engine.kernels import twins
from engine.kernels.attention import BLOCK, PART, STATE

QUERY_COUNTS = (1, 2, 3, 5, 7, 13)
HEAD_SIZES = (16, 48, 64, 80, 112)
UNTOUCHED = np.float32(-7.25)

every_target = pytest.mark.parametrize("target", TARGETS)


def rows_of(rng: np.random.Generator, *shape: int, spread: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * spread).astype(np.float32)


def addresses(rows: np.ndarray) -> np.ndarray:
    """Addresses of the rows, as queries and states are handed to kernels."""
    return np.array([row.ctypes.data for row in rows], np.int64)


def states_of(peak: np.ndarray, total: np.ndarray, values: np.ndarray) -> np.ndarray:
    """States [n, STATE + D] in memory."""
    out = np.full((len(values), STATE + values.shape[1]), UNTOUCHED)
    out[:, 0], out[:, 1], out[:, STATE:] = peak, total, values
    return out


@every_target
def test_scores_have_the_bits_of_the_twin_for_any_number_of_queries(target: str) -> None:
    rng = np.random.default_rng(1)
    for dim in HEAD_SIZES:
        keys = rows_of(rng, BLOCK, dim)
        keys[3] = 0
        queries = rows_of(rng, 2 * max(QUERY_COUNTS), dim)[::2]
        expected = twins.scores(queries, keys)
        stored = np.ascontiguousarray(keys.T)
        for count in QUERY_COUNTS:
            out = np.full((count + 1, PART), UNTOUCHED)
            kernels(target).call("scores_floats", addresses(queries), count, stored, out, dim, stored)
            assert_same_bits(out[:count, :BLOCK], expected[:count])
            assert (out[count] == UNTOUCHED).all()
            assert (out[:, BLOCK:] == UNTOUCHED).all()


@every_target
@pytest.mark.parametrize("positions", [1, 2, 17, 63, 64])
def test_weighted_values_have_the_bits_of_the_twin_for_any_number_of_queries(positions: int, target: str) -> None:
    rng = np.random.default_rng(positions)
    for dim in HEAD_SIZES:
        values = rows_of(rng, BLOCK, dim)
        weights = rng.uniform(0, 1, (max(QUERY_COUNTS), PART)).astype(np.float32)
        weights[:, 1] = 0
        weights[2, :BLOCK] = 0
        start = rows_of(rng, len(weights), dim)
        expected = twins.weigh(weights[:, :positions], values[:positions], start)
        for count in QUERY_COUNTS:
            states = states_of(UNTOUCHED, UNTOUCHED, start[: count + 1])
            kernels(target).call("weigh_floats", weights, count, values, positions, addresses(states), dim, values)
            assert_same_bits(states[:count, STATE:], expected[:count])
            assert (states[:, :STATE] == UNTOUCHED).all()
            assert_same_bits(states[count:, STATE:], start[count : count + 1])


@every_target
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("spread", [0.1, 3.0, 60.0])
def test_softmax_has_the_bits_of_the_twin_for_any_part_of_a_part(spread: float, count: int, target: str) -> None:
    """low > 0 is a sliding window; what is not seen may hold anything."""
    rng = np.random.default_rng(2)
    cases = [(0, 1), (0, 13), (0, 64), (5, 64), (63, 65), (60, 130), (64, 128), (200, 201), (7, 512), (0, 512)]
    for low, high in [*cases, (511, 512)]:
        first, last, dim = low // BLOCK * BLOCK, -(-high // BLOCK) * BLOCK, 48
        x = rows_of(rng, count + 1, PART, spread=spread)
        x[:, low // 2] = 2.5  # a tie for the peak now and then
        x[:, :first], x[:, last:] = np.nan, np.nan  # blocks that the row does not see are never scored
        before = x.copy()
        weights, peaks, totals = twins.softmax(np.nan_to_num(x[:count, :last]), low, high)
        states = states_of(UNTOUCHED, UNTOUCHED, np.full((count + 1, dim), UNTOUCHED))
        kernels(target).call("softmax", x, count, low, high, addresses(states), dim)
        assert_same_bits(x[:count, first:last], weights[:, first:])
        before[:count, first:last] = x[:count, first:last]
        assert_same_bits(x, before)
        assert_same_bits(states[:count, :2], np.stack([peaks, totals], axis=1))
        assert_same_bits(states[:count, STATE:], np.zeros((count, dim), np.float32))
        assert (states[:, 2:STATE] == UNTOUCHED).all()
        assert (states[count] == UNTOUCHED).all()


def test_softmax_weights_only_what_is_seen_and_they_add_up() -> None:
    x = rows_of(np.random.default_rng(3), 6, 128, spread=4.0)
    low, high = np.arange(6), np.array([128, 100, 65, 33, 7, 6])
    weights, _, total = twins.softmax(x, low, high)
    for row, (first, last) in enumerate(zip(low, high)):
        exact = np.exp(x[row, first:last].astype(np.float64) - x[row, first:last].max())
        np.testing.assert_allclose(weights[row, first:last], exact, rtol=1e-6)
        np.testing.assert_allclose(total[row], exact.sum(), rtol=1e-6)
        assert np.count_nonzero(weights[row]) == last - first


@every_target
@pytest.mark.parametrize("distance", [-200.0, -3.0, 0.0, 0.5, 200.0])
def test_merging_and_finishing_have_the_bits_of_the_twin(distance: float, target: str) -> None:
    rng = np.random.default_rng(4)
    for dim in HEAD_SIZES:
        first = twins.State(rows_of(rng, 1), rng.uniform(1, 300, 1).astype(np.float32), rows_of(rng, 1, dim))
        second = twins.State(first.peak + np.float32(distance), np.float32([1.5]), rows_of(rng, 1, dim))
        state, part = (states_of(s.peak, s.total, s.values) for s in (first, second))
        kernels(target).call("merge", state, part, 1, dim)
        merged = twins.merge(first, second)
        assert_same_bits(state, states_of(merged.peak, merged.total, merged.values))
        assert_same_bits(part, states_of(second.peak, second.total, second.values))
        out = np.full(dim + 16, UNTOUCHED)
        kernels(target).call("finish", state, out, dim)
        assert_same_bits(out[:-16], twins.finish(merged)[0])
        assert (out[-16:] == UNTOUCHED).all()


@pytest.mark.parametrize(("kind", "error"), [(np.float32, 2e-6), (np.float16, 5e-4)])
@pytest.mark.parametrize("window", [0, 1, 40, 513, 700])
def test_attention_is_softmax_over_the_positions_a_row_sees(window: int, kind: type, error: float) -> None:
    """In floats, and with integers of 13 bits as f16 is multiplied."""
    rng = np.random.default_rng(5)
    S, H, G, D = 1100, 4, 2, 16
    positions = np.array([0, 1, 63, 64, 511, 512, 530, 1023, 1024, 1099])
    q = rows_of(rng, len(positions), H, D)
    keys, values = (rows_of(rng, S, G, D).astype(kind) for _ in range(2))
    ours = twins.attention(q, keys, values, positions, window)
    for row, position in enumerate(positions):
        seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
        for head in range(H):
            k, v = (x[seen, head * G // H].astype(np.float64) for x in (keys, values))
            x = k @ q[row, head].astype(np.float64)
            weights = np.exp(x - x.max())
            np.testing.assert_allclose(ours[row, head], weights @ v / weights.sum(), rtol=10 * error, atol=error)
