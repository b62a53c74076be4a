"""Matrix products against their NumPy twins, bit for bit, for every tensor type and on every target of this CPU."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_calls import HALVES, TARGETS, activation_rows, assert_same_bits, blocks_of_any_bits, kernels, laid_out

from engine.kernels import formats, twins
from engine.kernels.formats import FORMATS
from engine.kernels.layout import compiled
from engine.kernels.panel import BUNCH, CALM, MAX_ROWS
from engine.kernels.plan import L2_BYTES
from engine.quant import TensorType

ROW_COUNTS = (1, 2, 3, 5, 8, 9, 17)
UNTOUCHED = np.float32(-7.25)

every_type = pytest.mark.parametrize("type", TensorType, ids=lambda type: type.name)
every_target = pytest.mark.parametrize("target", TARGETS)


def random_rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def in_memory(type: TensorType, x: np.ndarray) -> np.ndarray:
    """Activation rows as the kernel reads them."""
    span = twins.activation_span(type)
    return activation_rows(type, x if span == 1 else twins.quantize(x, span))


def multiply(
    target: str, type: TensorType, raw: np.ndarray, x: np.ndarray, *, add_to: np.ndarray | None = None
) -> np.ndarray:
    """[T, N] by the compiled kernel. Checks that it writes whole groups and nothing beyond them."""
    groups, activations = laid_out(type, raw), in_memory(type, x)
    width = 16 * len(groups)
    out = np.full((len(x) + 1, width + 16), UNTOUCHED)
    if add_to is not None:
        out[: len(x), : len(raw)] = add_to
        out[: len(x), len(raw) : width] = 0
    num_blocks = x.shape[1] // FORMATS[type].span
    kernels(target).call_matmul(
        type, "matmul", groups, groups.strides[0], len(groups), activations, activations.strides[0],
        out, out.strides[0], num_blocks, int(add_to is not None), len(x),
    )  # fmt: skip
    assert (out[len(x)] == UNTOUCHED).all()
    assert (out[:, width:] == UNTOUCHED).all()
    assert (out[: len(x), len(raw) : width] == 0).all()
    return out[: len(x), : len(raw)]


# ---------------------------------------------------------------- the twins' own arithmetic
def rounded_once(exact: Fraction) -> float:
    """The f32 nearest to a number, of two equally near ones the even one."""
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    if abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - 23, -149)  # of the last place
    rounded = round(exact / unit) * unit  # of fractions: half to even
    return float(rounded) if abs(rounded) < 2**128 else math.copysign(math.inf, rounded)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Products of about half a unit in the last place of the addend, where rounding twice goes wrong.
small = st.builds(lambda m, e: np.float32(m * 2.0**e), st.integers(2**23, 2**24 - 1), st.integers(-28, -22))
near_one = st.builds(lambda m: np.float32(m * 2.0**-23), st.integers(2**23 - 9, 2**23 + 9))
whole = st.builds(np.float32, st.integers(2**23, 2**24 - 1))
# 1 + 2**-23 + 2**-24 - 2**-70: just below a tie of f32, and a tie once it is rounded to f64.
NEAR_TIE = np.float32(2.0**-24 * (1 + 2.0**-23)), np.float32(1 - 2.0**-23), np.float32(1 + 2.0**-23)


@given(x=floats | small, y=floats | near_one, z=floats | whole)
@example(*NEAR_TIE)
@example(np.float32(2.0**-100), np.float32(2.0**-49), np.float32(-(2.0**-149)))
@example(np.float32(2.0**127), np.float32(2.0), np.float32(-(2.0**104)))
def test_fma_rounds_the_exact_result_once(x: float, y: float, z: float) -> None:
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    assert twins.fma32(np.float32(x), np.float32(y), np.float32(z)) == rounded_once(exact)


def test_fma_is_not_f64_arithmetic_rounded_again() -> None:
    x, y, z = NEAR_TIE
    assert np.float32(np.float64(x) * np.float64(y) + np.float64(z)) == np.float32(1 + 2.0**-22)
    assert twins.fma32(x, y, z) == np.float32(1 + 2.0**-23)


# ---------------------------------------------------------------- matrix products
@every_target
@every_type
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_products_have_the_bits_of_the_twin_for_any_number_of_rows(
    type: TensorType, target: str, num_blocks: int
) -> None:
    rng = np.random.default_rng([int(type), num_blocks])
    num_values = num_blocks * FORMATS[type].span
    raw = blocks_of_any_bits(type, 35, num_values, rng)
    x = random_rows(rng, max(ROW_COUNTS), num_values)
    expected = twins.matmul(type, raw, x)
    for rows in ROW_COUNTS:
        assert_same_bits(multiply(target, type, raw, x[:rows]), expected[:rows])


@every_target
@every_type
@pytest.mark.parametrize("num_blocks", [1, 11])
def test_products_of_many_rows_have_the_bits_of_the_twin(type: TensorType, target: str, num_blocks: int) -> None:
    """Weights are unpacked into panels: of 16, 32 or 48 of them, stretches of K that are full or not, last tiles."""
    rng = np.random.default_rng([int(type), num_blocks, 1])
    num_values = num_blocks * FORMATS[type].span
    raw = blocks_of_any_bits(type, 35, num_values, rng)
    x = random_rows(rng, 41, num_values)
    expected = twins.matmul(type, raw, x)
    for rows, outputs in [(24, 35), (29, 16), (38, 32), (41, 35)]:
        assert_same_bits(multiply(target, type, raw[:outputs], x[:rows]), expected[:rows, :outputs])


def test_rows_beyond_what_passes_a_panel_pass_the_next() -> None:
    rng = np.random.default_rng(6)
    for type in (TensorType.Q4_K, TensorType.Q8_0):
        num_values = 3 * FORMATS[type].span
        raw, x = blocks_of_any_bits(type, 35, num_values, rng), random_rows(rng, MAX_ROWS + 27, num_values)
        before = random_rows(rng, len(x), 35)
        expected = twins.matmul(type, raw, x)
        assert_same_bits(multiply("best", type, raw, x), expected)
        assert_same_bits(multiply("best", type, raw, x, add_to=before), before + expected)


def test_stretches_of_k_that_stay_in_l2_and_bunches_of_groups_follow_each_other() -> None:
    rng = np.random.default_rng(7)
    for type in (TensorType.Q4_K, TensorType.Q6_K, TensorType.Q8_0):
        num_values, outputs = 13 * 256, 16 * (BUNCH + 1) + 3
        raw, x = blocks_of_any_bits(type, outputs, num_values, rng), random_rows(rng, 200, num_values)
        assert len(x) * num_values > L2_BYTES
        before = random_rows(rng, len(x), outputs)
        expected = twins.matmul(type, raw, x)
        assert_same_bits(multiply("best", type, raw, x), expected)
        assert_same_bits(multiply("best", type, raw, x, add_to=before), before + expected)


@every_target
def test_every_number_of_rows_is_cut_into_tiles_that_have_each_once(target: str) -> None:
    rng = np.random.default_rng(8)
    raw, x = blocks_of_any_bits(TensorType.Q4_K, 16, 256, rng), random_rows(rng, 61, 256)
    before, expected = random_rows(rng, 61, 16), twins.matmul(TensorType.Q4_K, raw, x)
    for rows in range(1, 62):
        product = multiply(target, TensorType.Q4_K, raw, x[:rows], add_to=before[:rows])
        assert_same_bits(product, before[:rows] + expected[:rows])


@every_target
@every_type
def test_products_of_extreme_weights_and_activations_have_the_bits_of_the_twin(type: TensorType, target: str) -> None:
    """All ones, all zeros, largest, negative, subnormal and zero scales, against rows at both ends of int8."""
    rng = np.random.default_rng(int(type))
    num_values = 2 * FORMATS[type].span
    raw = np.concatenate(
        [
            blocks_of_any_bits(type, 6, num_values, rng, scales)
            for scales in [(65504.0,), (-65504.0,), (6e-8, -6e-8), (0.0, -0.0), (1.0, -1.0)]
        ]
    )
    if FORMATS[type].vector is not None:
        # The scales of all blocks stay; every other bit of the first three rows of each kind is 1, 0, or the sign.
        blocks = raw.reshape(5, 6, 2, -1)
        for row, byte in enumerate((0xFF, 0x00, 0x80)):
            kept = blocks[:, row].copy()
            blocks[:, row] = byte
            for at in HALVES.get(type, (0,)):  # MXFP4: a scale of one byte
                blocks[:, row, :, at : at + 2] = kept[..., at : at + 2]
    x = np.stack(
        [
            np.zeros(num_values),
            np.full(num_values, 1e18),
            np.full(num_values, -1e18),
            np.where(np.arange(num_values) % 2, 3.0, -3.0),
            np.where(np.arange(num_values) == 5, 1e18, rng.standard_normal(num_values)),
            np.full(num_values, -0.0),
            rng.standard_normal(num_values) * 1e-18,
            np.repeat([1.0, 0.0], num_values // 2),
            rng.standard_normal(num_values) * 1e-30,
        ]
    ).astype(np.float32)
    expected = twins.matmul(type, raw, x)
    assert_same_bits(multiply(target, type, raw, x), expected)
    assert_same_bits(multiply(target, type, raw, np.tile(x, (4, 1))), np.tile(expected, (4, 1)))


@every_target
def test_sums_that_just_fit_16_bits_and_larger_ones_have_the_bits_of_the_twin(target: str) -> None:
    """The largest and the smallest weights against activations of one sign, as loud as a calm block, or louder."""
    for type in (TensorType.Q4_K, TensorType.Q6_K):
        fmt, rng = FORMATS[type], np.random.default_rng(int(type))
        raw = blocks_of_any_bits(type, 48, 512, rng)
        blocks = raw.reshape(3, 16, 2, -1)
        for n, byte in enumerate((0xFF, 0x00)):
            kept = blocks[n].copy()
            blocks[n] = byte
            for at in HALVES[type]:
                blocks[n, ..., at : at + 2] = kept[..., at : at + 2]
            if type is TensorType.Q6_K:  # signed scales
                blocks[n, ..., 192:208] = 0x7F
        rows = []
        for loudest in (CALM, CALM + 1, CALM + 2, CALM + 17, 127 * 16):
            x = np.full((32, 16), loudest // 16)
            x[:, : loudest % 16] += 1
            x[::16] = np.minimum(x[::16], loudest - 127) // 16
            x[::16, 3] = 127  # of each block the largest
            x = x.reshape(512).astype(np.float32)
            assert (twins.quantize(x, 256).loudest() == loudest).all()
            rows += [x, -x]
        expected = twins.matmul(type, raw, np.stack(rows))
        assert fmt.loudest >= CALM
        assert_same_bits(multiply(target, type, raw, np.stack(rows)), expected)
        for row, product in zip(rows, expected, strict=True):
            assert_same_bits(multiply(target, type, raw, np.tile(row, (5, 1))), np.tile(product, (5, 1)))


@every_target
@every_type
def test_products_are_added_to_what_is_there(type: TensorType, target: str) -> None:
    rng = np.random.default_rng(int(type))
    num_values = 2 * FORMATS[type].span
    raw, x = blocks_of_any_bits(type, 19, num_values, rng), random_rows(rng, 11, num_values)
    before = random_rows(rng, 11, 19)
    assert_same_bits(multiply(target, type, raw, x, add_to=before), before + twins.matmul(type, raw, x))


@every_target
@every_type
def test_weights_are_laid_out_as_defined(type: TensorType, target: str) -> None:
    """By compiled code, whole records and half ones, with rows missing in the last group."""
    fmt, rng = FORMATS[type], np.random.default_rng(int(type))
    kernels(target).call_matmul(type, "lay_out", np.zeros(1, np.uint8), 0, 0, 0, np.zeros(1, np.uint8), 0)
    lay_out = compiled(lambda f: kernels(target).address(f"matmul_{f.type.name}", "lay_out"))
    for num_rows, num_blocks in ((16, 1), (35, 3), (64, 4)):
        raw = rng.integers(0, 256, (num_rows, num_blocks * fmt.block_bytes), dtype=np.uint8)
        ours, defined = np.zeros((2, -(-num_rows // 16), fmt.group_bytes(num_blocks)), np.uint8)
        lay_out(fmt, raw, ours)
        formats.lay_out(fmt, raw, defined)
        assert_same_bits(ours, defined)


@every_type
@every_target
def test_a_weight_row_is_dequantized_to_the_bits_of_its_definition(type: TensorType, target: str) -> None:
    rng = np.random.default_rng(int(type))
    span = FORMATS[type].span
    for num_blocks, scales in [(1, (0.01, -3.0)), (3, (65504.0, -6e-8))]:
        raw = blocks_of_any_bits(type, 21, num_blocks * span, rng, scales)
        groups, expected = laid_out(type, raw), twins.dequantize_row(type, raw)
        out = np.full((21, num_blocks * span + 16), UNTOUCHED)
        for row in range(21):
            kernels(target).call_matmul(type, "dequantize_row", groups[row // 16], row % 16, num_blocks, out[row])
        assert_same_bits(out[:, :-16], expected)
        assert (out[:, -16:] == UNTOUCHED).all()


def test_the_twin_is_the_product_of_the_dequantized_weights() -> None:
    """Twin and kernel could share a mistake about a format: both are near the plain f64 product."""
    rng = np.random.default_rng(0)
    for type in TensorType:
        num_values = 4 * FORMATS[type].span
        raw, x = blocks_of_any_bits(type, 8, num_values, rng), random_rows(rng, 4, num_values)
        weights = twins.dequantize_row(type, raw).astype(np.float64)
        span = twins.activation_span(type)
        values = x.astype(np.float64)
        if span > 1:
            quantized = twins.quantize(x, span)
            values = quantized.q * np.repeat(quantized.scales, span, axis=-1).astype(np.float64)
            # Half a step of the largest value of a block.
            assert np.abs(values - x).max() <= 0.51 * np.abs(x).max() / 127
        error = np.abs(twins.matmul(type, raw, x) - values @ weights.T)
        assert (error <= 2e-6 * (np.abs(values) @ np.abs(weights).T)).all(), type.name
