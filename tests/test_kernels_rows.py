"""Kernels on single rows against their NumPy twins, bit for bit, on every target of this CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kernel_calls import TARGETS, assert_same_bits, kernels, row_in_memory

from engine.kernels import twins
from engine.kernels.dot import ActivationLayout

LENGTHS = (16, 32, 48, 64, 80, 96, 112, 128, 576)
"""Multiples of 16 with every remainder of 64, which is what sums of squares take at a time."""
EPS = 1e-5

every_target = pytest.mark.parametrize("target", TARGETS)


def rows_of(rng: np.random.Generator, *shape: int, spread: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * spread).astype(np.float32)


def f32(x: float) -> np.ndarray:
    """A float in memory, for kernels that take its address."""
    return np.array([x], np.float32)


# ---------------------------------------------------------------- the exponential
def test_exp_is_within_one_unit_in_the_last_place() -> None:
    x = np.linspace(-87, 88, 300_001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(twins.exp(x) - exact) <= np.spacing(exact.astype(np.float32))).all()
    assert twins.exp(np.float32([0.0, -0.0])).tolist() == [1.0, 1.0]


def test_exp_is_clamped_where_it_would_leave_f32() -> None:
    ends = twins.exp(np.float32([-87, 88]))
    assert_same_bits(twins.exp(np.float32([-np.inf, np.inf])), ends)
    assert_same_bits(twins.exp(np.float32([-1e30, 1e30])), ends)
    assert np.isfinite(ends).all()
    assert ends[0] > np.finfo(np.float32).tiny


# ---------------------------------------------------------------- norms and vectors
@every_target
def test_norms_have_the_bits_of_the_twin_at_every_length(target: str) -> None:
    rng, call = np.random.default_rng(1), kernels(target).call
    for n in LENGTHS:
        for spread in (1e-20, 1e-3, 1.0, 1e15):
            x, weight = rows_of(rng, n, spread=spread), rows_of(rng, n)
            out = f32(0)
            call("inverse_rms", x, n, f32(EPS), out)
            assert_same_bits(out[0], twins.inverse_rms(x, EPS))
            y = rows_of(rng, n)
            expected = y + twins.branch_normed(x, weight, EPS)
            call("add_normed", x, weight, out, y, n)
            assert_same_bits(y, expected)
            expected = twins.normed(x, weight, EPS)
            call("norm_vector", x, weight, f32(EPS), n)
            assert_same_bits(x, expected)
            x = rows_of(rng, n, spread=spread) + np.float32(spread)
            expected = twins.centred(x, weight, None, EPS)
            call("centre_vector", x, weight, f32(EPS), n)
            assert_same_bits(x, expected)


def test_a_norm_gives_unit_mean_square() -> None:
    x = rows_of(np.random.default_rng(2), 5, 176, spread=37.0)
    mean_square = (twins.normed(x, np.ones(176, np.float32), 0.0).astype(np.float64) ** 2).mean(axis=-1)
    np.testing.assert_allclose(mean_square, 1.0, rtol=1e-6)


def test_layer_norm_gives_no_mean_and_unit_variance_then_weights_and_biases() -> None:
    x = rows_of(np.random.default_rng(2), 5, 176, spread=37.0) + np.float32(50)
    weight, bias = np.full(176, 3, np.float32), np.full(176, 0.5, np.float32)
    found = twins.centred(x, weight, bias, 0.0).astype(np.float64)
    np.testing.assert_allclose(found.mean(axis=-1), 0.5, atol=1e-5)
    np.testing.assert_allclose(found.var(axis=-1), 9.0, rtol=1e-5)


@every_target
def test_vectors_are_added_and_scaled_like_the_twin(target: str) -> None:
    rng, call = np.random.default_rng(3), kernels(target).call
    for n in LENGTHS:
        x, y = rows_of(rng, n + 16), rows_of(rng, n)
        expected = np.concatenate([(x[:n] + y) * np.float32(0.3), x[n:]])
        call("add_vector", x, y, n)
        call("scale_vector", x, f32(0.3), n)
        assert_same_bits(x, expected)


@every_target
def test_caps_have_the_bits_of_the_twin_and_are_hyperbolic_tangents(target: str) -> None:
    rng, call = np.random.default_rng(4), kernels(target).call
    for n in LENGTHS:
        for spread in (1e-3, 1.0, 30.0, 1e4):
            x = rows_of(rng, n, spread=spread)
            exact = 30.0 * np.tanh(x.astype(np.float64) / 30.0)
            expected = twins.capped(x, 30.0)
            call("cap_vector", x, f32(30.0), n)
            assert_same_bits(x, expected)
            np.testing.assert_allclose(x, exact, atol=1e-5)


# ---------------------------------------------------------------- quantized activations
Source = tuple[str, Callable[[np.ndarray, np.ndarray], np.ndarray]]
SOURCES: list[Source] = [
    ("plain", lambda x, y: x),
    ("norm", lambda x, y: twins.normed(x, y, EPS)),
    # The biases lie behind the weights.
    ("centred", lambda x, y: twins.centred(x, y[: len(x)], y[len(x) :], EPS)),
    ("silu", twins.silu),
    ("gelu", twins.gelu),
    ("clipped", twins.clipped),
    ("lone_gelu", lambda x, y: twins.lone_gelu(x + y)),
    ("lone_relu2", lambda x, y: twins.lone_relu2(x + y)),
]


def activate(target: str, source: str, span: int, x: np.ndarray, y: np.ndarray, pieces: list[int]) -> np.ndarray:
    """One activation row in memory, quantized in pieces that end at these blocks."""
    row = np.zeros(ActivationLayout(span).row_bytes(len(x)), np.uint8)
    inverse = np.array([twins.inverse_rms(x, EPS), 0], np.float32)
    if source == "centred":
        kernels(target).call("deviation", x, len(x), f32(EPS), inverse)
    num_blocks = len(x) // max(span, 32)
    for first, last in zip([0, *pieces], [*pieces, num_blocks]):
        kernels(target).call(f"{source}_{span}", x, y, inverse, row, first, last - first, num_blocks, 0, 0)
    return row


def expected_row(span: int, values: np.ndarray) -> np.ndarray:
    return row_in_memory(ActivationLayout(span), values if span == 1 else twins.quantize(values, span))


@every_target
@pytest.mark.parametrize("span", [256, 32, 1])
@pytest.mark.parametrize(("source", "twin"), SOURCES, ids=[name for name, _ in SOURCES])
def test_activations_have_the_bits_of_the_twin_in_any_pieces(source: str, twin: Source, span: int, target: str) -> None:
    rng = np.random.default_rng(span)
    for num_blocks, pieces in [(1, []), (2, [1]), (5, [1, 3]), (7, [0, 6])]:
        n = num_blocks * max(span, 32)
        for spread in (1e-3, 1.0, 30.0):
            x, y = rows_of(rng, n, spread=spread), rows_of(rng, 2 * n if source == "centred" else n)
            assert_same_bits(activate(target, source, span, x, y, pieces), expected_row(span, twin(x, y)))


@every_target
@pytest.mark.parametrize("span", [256, 32, 1])
@pytest.mark.parametrize("source", ["silu", "gelu", "clipped"])
def test_a_block_of_many_rows_has_the_bits_that_it_has_of_each_row(source: str, span: int, target: str) -> None:
    """As strips of outputs are: a row has its gates, then its ups, and is a block among others where it goes."""
    rng, n = np.random.default_rng(span), max(span, 32)
    for count in (1, 2, 5):
        strips, out = (
            rows_of(rng, count, 2, n),
            np.zeros((count + 1, ActivationLayout(span).row_bytes(3 * n)), np.uint8),
        )
        gate, up = strips.ctypes.data - 4 * n, strips[:, 1].ctypes.data - 4 * n
        kernels(target).call(f"{source}_{span}", gate, up, 0, out, 1, count, 3, strips.strides[0], out.strides[0])
        for row, (x, y) in zip(out, strips):
            alone = np.zeros_like(row)
            wide = np.zeros((2, 3 * n), np.float32)
            wide[:, n : 2 * n] = x, y
            kernels(target).call(f"{source}_{span}", *wide, 0, alone, 1, 1, 3, 0, 0)
            assert_same_bits(row, alone)
        assert not out[count].any()


EXTREMES = {
    "zeros": np.zeros(256),
    "negative zeros": np.full(256, -0.0),
    "one value": np.where(np.arange(256) == 77, -3.0, 0.0),
    "largest": np.full(256, np.finfo(np.float32).max / 64),
    "both ends": np.where(np.arange(256) % 3, -1e20, 1e20),
    "ties": (np.arange(256) - 127.5) * np.where(np.arange(256) == 255, 127 / 127.5, 1.0),
    "wide range": 10.0 ** np.linspace(-38, 38, 256),
    "tiny": np.where(np.arange(256) % 2, 3e-37, -1e-38),
    "subnormal": np.linspace(-1e-40, 1e-40, 256),
    "smallest": np.where(np.arange(256) == 3, 1.4e-45, 0.0),
}


@every_target
@pytest.mark.parametrize("span", [256, 32])
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_activations_have_the_bits_of_the_twin(name: str, span: int, target: str) -> None:
    x = EXTREMES[name].astype(np.float32)
    assert_same_bits(activate(target, "plain", span, x, x, []), expected_row(span, x))


@every_target
@pytest.mark.parametrize("source", ["silu", "gelu", "clipped"])
def test_gates_far_out_have_the_bits_of_the_twin(source: str, target: str) -> None:
    gate = np.concatenate([np.linspace(-200, 200, 254), [-0.0, 0.0]]).astype(np.float32)
    up = np.where(np.arange(256) % 2, 2.5, -1.0).astype(np.float32)
    twin = dict(SOURCES)[source]
    assert_same_bits(activate(target, source, 1, gate, up, []), expected_row(1, twin(gate, up)))


def test_gates_are_the_functions_they_are_named_for() -> None:
    x = np.linspace(-20, 20, 4001).astype(np.float32)
    one = np.ones_like(x)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(twins.silu(x, one), wide / (1 + np.exp(-wide)), rtol=1e-6, atol=1e-8)
    inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    np.testing.assert_allclose(twins.gelu(x, one), 0.5 * wide * (1 + np.tanh(inner)), rtol=1e-5, atol=1e-6)
    assert_same_bits(twins.lone_gelu(x), twins.gelu(x, one))
    top = np.minimum(wide, 7)
    for up in (-9.0, 0.5, 9.0):
        expected = top / (1 + np.exp(-1.702 * top)) * (np.clip(up, -7, 7) + 1)
        np.testing.assert_allclose(twins.clipped(x, np.full_like(x, up)), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(twins.lone_relu2(x), np.where(wide > 0, wide**2, 0), rtol=1e-6)


# ---------------------------------------------------------------- heads
@every_target
@pytest.mark.parametrize("neox", [True, False])
def test_rotation_has_the_bits_of_the_twin_in_both_orders_of_pairs(neox: bool, target: str) -> None:
    rng = np.random.default_rng(4)
    for half, dim in [(8, 16), (16, 32), (24, 80), (40, 80), (64, 128), (1, 16), (10, 80), (7, 16)]:
        angles = rng.uniform(0, 1000, half)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        x = rows_of(rng, dim)
        expected = twins.rotate(x, cos, sin, neox)
        kernels(target).call("rotate_neox" if neox else "rotate_pairs", x, cos, sin, half)
        assert_same_bits(x, expected)


@pytest.mark.parametrize("neox", [True, False])
def test_rotation_turns_pairs_and_leaves_the_rest(neox: bool) -> None:
    half, x = 8, rows_of(np.random.default_rng(5), 3, 32)
    angle = np.linspace(0, 6, half)
    turned = twins.rotate(x, np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32), neox)
    order = np.arange(16).reshape(2, 8) if neox else np.arange(16).reshape(8, 2).T
    before, after = (a[:, order[0]] + 1j * a[:, order[1]] for a in (x, turned))
    np.testing.assert_allclose(after, before * np.exp(1j * angle), rtol=1e-5, atol=1e-6)
    assert_same_bits(turned[:, 16:], x[:, 16:])
