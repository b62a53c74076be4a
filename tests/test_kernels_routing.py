"""Which experts a row passes, against the NumPy twin bit for bit; and ties, which have one answer."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_calls import TARGETS, assert_same_bits, kernels

from engine.kernels import twins
from engine.kernels.routing import LEAST_SUM, MOST_EXPERTS
from engine.metadata_reader import MAX_EXPERTS

every_target = pytest.mark.parametrize("target", TARGETS)
SIZES = [(1, 1), (2, 1), (8, 2), (15, 15), (16, 3), (17, 17), (60, 4), (128, 8), (MOST_EXPERTS, 10)]
"""Experts, and how many are chosen."""


def chosen_by(target: str, logits: np.ndarray, used: int, of_chosen: bool, scale: float) -> tuple[np.ndarray, ...]:
    """Experts and weights [T, used] by the kernel, which gets what lies behind the last expert as NaN."""
    ids, weights = np.zeros((len(logits), used), np.int32), np.zeros((len(logits), used), np.float32)
    padded = np.pad(logits, [(0, 0), (0, -logits.shape[1] % 16)], constant_values=np.nan)
    for row, of_ids, of_weights in zip(padded, ids, weights, strict=True):
        factor = np.array([scale], np.float32)
        kernels(target).call("choose", row, logits.shape[1], used, int(of_chosen), factor, of_ids, of_weights)
    return ids, weights


def test_no_file_has_more_experts_than_the_kernel_has_room_for() -> None:
    assert MAX_EXPERTS <= MOST_EXPERTS


@every_target
@pytest.mark.parametrize(("experts", "used"), SIZES)
def test_choices_and_weights_have_the_bits_of_the_twin(target: str, experts: int, used: int) -> None:
    rng = np.random.default_rng(experts)
    logits = (rng.standard_normal((6, experts)) * np.array([[0.0, 1e-3, 1, 5, 40, 1e30]]).T).astype(np.float32)
    logits[3] = np.rint(logits[3])  # many ties
    for of_chosen, scale in ((True, 1.0), (False, 1.0), (True, 2.5)):
        ids, weights = chosen_by(target, logits, used, of_chosen, scale)
        expected_ids, expected_weights = twins.choose(logits, used, of_chosen, scale)
        assert ids.tolist() == expected_ids.tolist()
        assert_same_bits(weights, expected_weights)
        if of_chosen or used == experts:
            np.testing.assert_allclose(weights.sum(axis=1), scale, rtol=1e-5)
        else:
            assert (weights.sum(axis=1) <= scale * 1.00001).all()


def chosen_with_bias(
    target: str, logits: np.ndarray, used: int, even: bool, of_chosen: bool, scale: float, bias: np.ndarray | None
) -> tuple[np.ndarray, ...]:
    ids, weights = np.zeros((len(logits), used), np.int32), np.zeros((len(logits), used), np.float32)
    padded = np.pad(logits, [(0, 0), (0, -logits.shape[1] % 16)], constant_values=np.nan)
    more = 0 if bias is None else np.pad(bias, (0, -len(bias) % 16), constant_values=np.nan)
    for row, of_ids, of_weights in zip(padded, ids, weights, strict=True):
        sizes, factor = (logits.shape[1], used, int(even), int(of_chosen)), np.array([scale], np.float32)
        kernels(target).call("choose_biased", row, *sizes, factor, more, of_ids, of_weights)
    return ids, weights


@every_target
@pytest.mark.parametrize(("experts", "used"), SIZES)
@pytest.mark.parametrize("even", [True, False])
def test_choices_by_shares_and_a_bias_have_the_bits_of_the_twin(
    target: str, even: bool, experts: int, used: int
) -> None:
    rng = np.random.default_rng(experts)
    logits = (rng.standard_normal((6, experts)) * np.array([[0.0, 1e-3, 1, 5, 40, 1e30]]).T).astype(np.float32)
    biases = (None, np.zeros(experts), rng.standard_normal(experts), np.full(experts, np.nan))
    for bias in (None if bias is None else bias.astype(np.float32) for bias in biases):
        for of_chosen, scale in ((True, 1.0), (False, 2.5)):
            ids, weights = chosen_with_bias(target, logits, used, even, of_chosen, scale, bias)
            expected_ids, expected_weights = twins.choose_biased(logits, used, even, of_chosen, scale, bias)
            assert ids.tolist() == expected_ids.tolist()
            assert_same_bits(weights, expected_weights)


@every_target
def test_a_bias_says_which_experts_are_chosen_and_not_how_much_of_them_is_taken(target: str) -> None:
    logits, bias = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32), np.array([0, 0, 0, 9], np.float32)
    alone = 1 / (1 + np.exp(-logits[0]))
    ids, weights = chosen_with_bias(target, logits, 2, True, False, 1.0, bias)
    assert ids.tolist() == [[3, 0]]
    np.testing.assert_allclose(weights[0], alone[[3, 0]], rtol=1e-6)
    weights = chosen_with_bias(target, logits, 2, True, True, 2.0, bias)[1]
    np.testing.assert_allclose(weights[0], 2 * alone[[3, 0]] / alone[[3, 0]].sum(), rtol=1e-6)
    soft = np.exp(logits[0]) / np.exp(logits[0]).sum()
    weights = chosen_with_bias(target, logits, 2, False, False, 1.0, bias)[1]
    np.testing.assert_allclose(weights[0], soft[[3, 0]], rtol=1e-6)


@every_target
def test_shares_of_nearly_nothing_stay_so(target: str) -> None:
    logits = np.full((1, 20), -80, np.float32)
    weights = chosen_with_bias(target, logits, 3, True, True, 1.0, np.zeros(20, np.float32))[1]
    np.testing.assert_allclose(weights, np.exp(-80) / LEAST_SUM, rtol=1e-5)


@every_target
def test_weights_are_multiplied_with_the_scale_of_their_expert(target: str) -> None:
    rng = np.random.default_rng(1)
    weights, scales = rng.standard_normal(7, np.float32), rng.standard_normal(20, np.float32)
    ids, expected = np.array([19, 0, 3, 7, 18, 1, 2], np.int32), weights.copy()
    kernels(target).call("scale_choices", weights, ids, scales, 7)
    assert_same_bits(weights, expected * scales[ids])


@every_target
def test_of_equal_experts_the_lower_number_wins(target: str) -> None:
    logits = np.zeros((1, 40), np.float32)
    assert chosen_by(target, logits, 5, True, 1.0)[0].tolist() == [[0, 1, 2, 3, 4]]
    logits[0, [3, 17, 33]] = 1
    assert chosen_by(target, logits, 4, True, 1.0)[0].tolist() == [[3, 17, 33, 0]]
    logits[0, 0] = -0.0  # equal to 0
    assert chosen_by(target, logits, 5, True, 1.0)[0].tolist() == [[3, 17, 33, 0, 1]]


@every_target
def test_whatever_a_router_gives_different_experts_that_exist_are_chosen(target: str) -> None:
    nan, inf = np.float32(np.nan), np.float32(np.inf)
    for row in ([nan] * 20, [-inf] * 20, [inf] * 20, [nan, inf, -inf, 0.0] * 5):
        logits = np.array([row], np.float32)
        for used in (1, 7, 20):
            ids, weights = chosen_with_bias(target, logits, used, True, True, 1.0, logits[0])
            assert sorted(set(ids[0])) == sorted(ids[0])
            assert 0 <= ids.min() <= ids.max() < 20
            assert np.isfinite(weights).all()
            ids, weights = chosen_by(target, logits, used, True, 1.0)
            expected_ids, expected_weights = twins.choose(logits, used, True)
            assert sorted(set(ids[0])) == sorted(ids[0])
            assert 0 <= ids.min() <= ids.max() < 20
            assert ids.tolist() == expected_ids.tolist()
            assert_same_bits(weights, expected_weights)
            assert np.isfinite(weights).all()


@every_target
def test_outputs_are_added_with_a_weight_or_a_sigmoid_like_the_twin(target: str) -> None:
    rng, call = np.random.default_rng(3), kernels(target).call
    for n in (16, 48, 256):
        y, out = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
        for factor in (0.0, 0.3, -7.0, 200.0, -200.0):
            k = np.array([factor], np.float32)
            expected = twins.fma32(y, k, out)
            call("add_scaled", y, k, out, n)
            assert_same_bits(out, expected)
            expected = twins.fma32(y, twins.sigmoid(k), out)
            call("add_gated", y, k, out, n)
            assert_same_bits(out, expected)
