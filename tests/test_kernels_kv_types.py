"""How keys and values are stored and widened: kernels against their NumPy twins, bit for bit, on every target."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_calls import TARGETS, assert_same_bits, kernels

from engine.kernels import twins
from engine.kernels.kv_types import RUN, runs_of

HEAD_SIZES = (16, 48, 64, 80, 128)
SLOTS = (0, 1, 37, 63)

every_target = pytest.mark.parametrize("target", TARGETS)


def head_of(rng: np.random.Generator, dim: int) -> np.ndarray:
    """Numbers of a head, among them ties, subnormals of f16, what rounds to zero, and what is too large."""
    x = (rng.standard_normal(dim) * 100).astype(np.float32)
    x[:10] = [1 + 2.0**-11, 1 + 3 * 2.0**-11, 6e-8, -3e-8, 2e-8, -0.0, 65519.0, -65520.0, 1e30, -np.inf]
    return x


@every_target
@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_keys_go_to_a_column_and_values_to_a_row_and_are_finite(kv_type: str, target: str) -> None:
    rng, number = np.random.default_rng(6), np.float16 if kv_type == "f16" else np.float32
    for dim in HEAD_SIZES:
        x = head_of(rng, dim)
        for slot in SLOTS:
            keys, values = (np.full(shape, 7.5, number) for shape in ((dim, 64), (64, dim)))
            expected_keys, expected_values = keys.copy(), values.copy()
            expected_keys[:, slot] = expected_values[slot] = twins.kept(x, kv_type)  # type: ignore[arg-type]
            assert np.isfinite(expected_keys).all()
            kernels(target).call(f"store_key_{kv_type}", x, keys[:, slot:], dim)
            kernels(target).call(f"store_value_{kv_type}", x, values[slot], dim)
            assert_same_bits(keys, expected_keys)
            assert_same_bits(values, expected_values)


def test_f16_is_rounded_to_the_largest_finite_number() -> None:
    assert twins.to_half(np.float32([65519.0, -65520.0, 1e30, -np.inf])).tolist() == [65504, -65504, 65504, -65504]


@every_target
def test_numbers_and_scales_of_q8_0_go_to_a_column_of_keys_and_to_a_row_of_values(target: str) -> None:
    rng = np.random.default_rng(7)
    for dim in HEAD_SIZES:
        heads = [head_of(rng, dim), rng.standard_normal(dim).astype(np.float32), np.zeros(dim, np.float32)]
        heads.append(heads[1] * np.float32(1e-6))  # scales that are subnormal, and some that round to zero
        for x, slot in zip(heads, SLOTS):
            shapes = ((dim, 64), (runs_of(dim), 64), (64, dim), (64, runs_of(dim)))
            found = [np.full(s, 7, np.int8 if n % 2 == 0 else np.float16) for n, s in enumerate(shapes)]
            expected = [array.copy() for array in found]
            numbers, scales = twins.to_q8_0(x)
            expected[0][:, slot] = expected[2][slot] = numbers
            expected[1][:, slot] = expected[3][slot] = scales
            keys, key_scales, values, value_scales = found
            kernels(target).call("store_key_q8_0", x, keys[:, slot:], key_scales[:, slot:], dim)
            kernels(target).call("store_value_q8_0", x, values[slot], value_scales[slot], dim)
            for ours, theirs in zip(found, expected):
                assert_same_bits(ours, theirs)


@every_target
def test_q8_0_is_widened_exactly(target: str) -> None:
    rng = np.random.default_rng(8)
    for dim in HEAD_SIZES:
        numbers = rng.integers(-128, 128, (64, dim), dtype=np.int8)
        scales = rng.standard_normal((64, runs_of(dim))).astype(np.float16)
        scales[3] = 0
        scales[5] = 6e-8
        expected = twins.from_q8_0(numbers, scales)
        exact = numbers.astype(np.float64) * np.repeat(scales.astype(np.float64), RUN, axis=1)[:, :dim]
        assert (expected == exact).all()
        for name, layout in (("widen_values_q8_0", np.array), ("widen_keys_q8_0", np.transpose)):
            source, factors = np.ascontiguousarray(layout(numbers)), np.ascontiguousarray(layout(scales))
            out = np.full(64 * dim + 16, np.float32(-7.25))
            kernels(target).call(name, source, factors, out, dim)
            assert_same_bits(out[:-16].reshape(source.shape), np.ascontiguousarray(layout(expected)))
            assert (out[-16:] == -7.25).all()


def test_q8_0_is_within_half_a_step_of_the_largest_number_of_its_run() -> None:
    x = np.random.default_rng(9).standard_normal((500, 80)).astype(np.float32)
    numbers, scales = twins.to_q8_0(x)
    steps = np.repeat(scales.astype(np.float32), RUN, axis=1)[:, :80]
    # Where the scale was rounded down, the largest number is cut to 127 steps: by at most 127 / 2048 of one.
    assert (np.abs(twins.from_q8_0(numbers, scales) - x) <= (0.5 + 127 / 2048) * steps).all()
