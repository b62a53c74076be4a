"""Kernels of layers with a running state against their NumPy twins, bit for bit, on every target of this CPU."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_calls import TARGETS, assert_same_bits, kernels
from test_kernels_rows import f32, rows_of

from engine.kernels import twins
from engine.kernels.delta import CHANNELS
from engine.kernels.plan import DELTA_COLUMNS, TAPS

EPS = 1e-6

every_target = pytest.mark.parametrize("target", TARGETS)


def test_softplus_is_within_four_units_in_the_last_place() -> None:
    x = np.linspace(-80, 80, 200_001).astype(np.float32)
    exact = np.logaddexp(0, x.astype(np.float64))
    assert (np.abs(twins.softplus(x) - exact) <= 4 * np.spacing(exact.astype(np.float32))).all()


def test_the_twin_of_the_delta_rule_is_the_formula() -> None:
    """In f64, with matrices, and decays that keep something and that keep next to nothing."""
    rng = np.random.default_rng(0)
    q, k = (twins.unit(rows_of(rng, 9, 3, 48), EPS, 1.0) for _ in range(2))
    v, state = rows_of(rng, 9, 3, 32), rows_of(rng, 3, 48, 32)
    decay, beta = rng.uniform(0, 1, (2, 9, 3)).astype(np.float32)
    out, after = twins.delta(q, k, v, decay, beta, state)
    s = state.astype(np.float64)
    for t in range(9):
        for h in range(3):
            s[h] *= decay[t, h]
            s[h] += np.outer(k[t, h], beta[t, h] * (v[t, h] - s[h].T @ k[t, h]))
            np.testing.assert_allclose(out[t, h], s[h].T @ q[t, h], atol=1e-5)
    np.testing.assert_allclose(after, s, atol=1e-5)


@every_target
@pytest.mark.parametrize("biased", [False, True])
def test_a_convolution_has_the_bits_of_the_twin_however_it_is_cut(biased: bool, target: str) -> None:
    rng, call = np.random.default_rng(1), kernels(target).call
    channels, count = 3 * CHANNELS, 11
    x, taps, before = rows_of(rng, count, channels), rows_of(rng, TAPS, channels), rows_of(rng, TAPS - 1, channels)
    bias = rows_of(rng, channels) if biased else None
    expected, after = twins.convolve(x, taps, before, bias)
    for cuts in ([11], [1] * 11, [2, 1, 5, 3]):
        rows, history = x.copy(), before.copy()
        for c in range(0, channels, CHANNELS):
            first = 0
            for size in cuts:
                some = rows[first : first + size, c:]
                places = (taps[:, c:], history[:, c:], history.strides[0])
                if bias is None:
                    call("convolve", some, rows.strides[0], size, *places, 0)
                else:
                    call("convolve_biased", some, rows.strides[0], size, *places, bias[c:])
                first += size
        assert_same_bits(rows, expected)
        assert_same_bits(history, after)


@every_target
def test_a_mix_has_the_bits_of_the_twin_however_it_is_cut(target: str) -> None:
    rng, call = np.random.default_rng(6), kernels(target).call
    channels, count = 3 * CHANNELS, 11
    x, taps, before = rows_of(rng, count, 3 * channels), rows_of(rng, TAPS, channels), rows_of(rng, TAPS - 1, channels)
    expected, after = twins.mix(x, taps, before)
    for cuts in ([11], [1] * 11, [2, 1, 5, 3]):
        rows, history = x.copy(), before.copy()
        for c in range(0, channels, CHANNELS):
            first = 0
            for size in cuts:
                some = rows[first : first + size, c:]
                call("mix", some, rows.strides[0], size, taps[:, c:], history[:, c:], history.strides[0])
                first += size
        assert_same_bits(rows[:, :channels], expected)
        assert_same_bits(rows[:, channels:], x[:, channels:])
        assert_same_bits(history, after)


@every_target
def test_unit_vectors_and_gates_have_the_bits_of_the_twin(target: str) -> None:
    rng, call = np.random.default_rng(2), kernels(target).call
    for n in (16, 48, 128, 176):
        for spread in (1e-12, 1.0, 1e9):
            x = rows_of(rng, n, spread=spread)
            expected = twins.unit(x, EPS, 0.25)
            call("unit_vector", x, f32(EPS), f32(0.25), n)
            assert_same_bits(x, expected)
            x, gate, weight, out = (rows_of(rng, n, spread=3) for _ in range(4))
            call("norm_gated", x, gate, weight, f32(EPS), out, n)
            assert_same_bits(out, twins.norm_gated(x, gate, weight, EPS))
            expected = x * twins.sigmoid(gate)
            call("gate_vector", x, gate, n)
            assert_same_bits(x, expected)
    for spread in (0.1, 3.0, 100.0):
        beta, alpha, bias = (rows_of(rng, 32, spread=spread) for _ in range(3))
        rate = -np.exp(rows_of(rng, 32))
        expected = twins.sigmoid(beta), twins.exp(rate * twins.softplus(alpha + bias))
        call("delta_gates", beta, alpha, bias, rate, 32)
        assert_same_bits(beta, expected[0])
        assert_same_bits(alpha, expected[1])


@every_target
@pytest.mark.parametrize(("keys", "values"), [(32, 32), (48, 64), (128, 96)])
def test_the_delta_rule_has_the_bits_of_the_twin(target: str, keys: int, values: int) -> None:
    rng, call = np.random.default_rng(3), kernels(target).call
    q, k = (twins.unit(rows_of(rng, 5, 2, keys), EPS, 1.0) for _ in range(2))
    v, state = rows_of(rng, 5, 2, values), rows_of(rng, 2, keys, values)
    decay, beta = rng.uniform(0, 1, (2, 5, 2)).astype(np.float32)
    expected, after = twins.delta(q, k, v, decay, beta, state)
    for h in range(2):
        for c in range(0, values, DELTA_COLUMNS):
            columns = state[h, :, c : c + DELTA_COLUMNS].copy()
            for t in range(5):
                args = q[t, h], k[t, h], v[t, h, c:], decay[t, h : h + 1], beta[t, h : h + 1]
                call("delta", columns, *args, keys)
            state[h, :, c : c + DELTA_COLUMNS] = columns
    assert_same_bits(v, expected)
    assert_same_bits(state, after)


@every_target
@pytest.mark.parametrize(("keys", "values"), [(16, 32), (128, 64), (20, 96)])
def test_a_scan_has_the_bits_of_the_twin_and_is_the_recurrence(target: str, keys: int, values: int) -> None:
    rng, call = np.random.default_rng(9), kernels(target).call
    q, k = (rows_of(rng, 7, 2, keys) for _ in range(2))
    v, state = rows_of(rng, 7, 2, values), rows_of(rng, 2, keys, values)
    decay, step = rng.uniform(0, 1, (2, 7, 2)).astype(np.float32)
    skip = rows_of(rng, 2)
    expected, after = twins.scan(q, k, v, decay, step, skip, state)
    s = state.astype(np.float64)
    for t in range(7):
        s = s * decay[t, :, None, None] + k[t][:, :, None] * (step[t, :, None] * v[t])[:, None]
        np.testing.assert_allclose(expected[t], (s * q[t][:, :, None]).sum(1) + skip[:, None] * v[t], atol=1e-4)
    np.testing.assert_allclose(after, s, atol=1e-4)
    for h in range(2):
        for first in range(0, values, DELTA_COLUMNS):
            columns = np.ascontiguousarray(state[h, :, first : first + DELTA_COLUMNS])
            for t in range(7):
                out = np.ascontiguousarray(v[t, h, first : first + DELTA_COLUMNS])
                call("scan", columns, q[t, h], k[t, h], out, decay[t, h:], step[t, h:], skip[h:], keys)
                assert_same_bits(out, expected[t, h, first : first + DELTA_COLUMNS])
            assert_same_bits(columns, after[h, :, first : first + DELTA_COLUMNS])


@every_target
def test_steps_and_gates_of_a_scan_have_the_bits_of_the_twin(target: str) -> None:
    rng, call = np.random.default_rng(10), kernels(target).call
    for n in (16, 48):
        step, decay, bias, rate, out = (rows_of(rng, n, spread=4) for _ in range(5))
        size = twins.softplus(step + bias)
        call("gate_silu", decay, bias, out, n)
        assert_same_bits(out, twins.gate_silu(decay, bias))
        call("scan_gates", step, decay, bias, rate, n)
        assert_same_bits(step, size)
        assert_same_bits(decay, twins.exp(rate * size))
