"""The rotary tables are right to the last bit of f32, and the same whatever instructions the CPU has."""

from __future__ import annotations

import decimal
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.rope import cos_sin, frequencies, temperatures, yarn_magnitude, yarn_shares

ROOT = Path(__file__).parents[1]


def exact_cosine(angle: decimal.Decimal) -> decimal.Decimal:
    """By the Taylor series, in 60 digits."""
    term, total, n = decimal.Decimal(1), decimal.Decimal(1), 0
    while abs(term) > decimal.Decimal("1e-40"):
        n += 2
        term *= -angle * angle / (n * (n - 1))
        total += term
    return total


def test_frequencies_are_rounded_once() -> None:
    with decimal.localcontext(prec=60):
        for base, dim in ((10000.0, 64), (1e6, 128), (500000.0, 48)):
            exact = [decimal.Decimal(base) ** (decimal.Decimal(-2 * i) / dim) for i in range(dim // 2)]
            assert frequencies(base, dim).tolist() == [float(x) for x in exact]


def test_frequencies_are_divided_by_the_scale_and_by_each_factor() -> None:
    plain = frequencies(500000.0, 8)
    assert frequencies(500000.0, 8, scale=8.0).tolist() == (plain / 8).tolist()
    assert frequencies(500000.0, 8, factors=[1, 2, 4, 8]).tolist() == (plain / [1, 2, 4, 8]).tolist()


def test_yarn_scales_slow_pairs_and_leaves_fast_ones() -> None:
    shares = yarn_shares(10000.0, 64, 2048, 32.0, 1.0)
    # Pairs that turn 32 times and once in 2,048 positions: 8.06 and 20.1.
    assert shares[:9].tolist() == [0.0] * 9
    assert shares[21:].tolist() == [1.0] * 11
    assert shares[9:21].tolist() == [(i - 8) / 13 for i in range(9, 21)]
    plain, scaled = frequencies(10000.0, 64), frequencies(10000.0, 64, scale=4.0, scaled=shares)
    np.testing.assert_allclose(plain / scaled, 1 / (1 - shares * 0.75), rtol=1e-14)
    assert yarn_magnitude(0.5, 1.0) == 1.0
    assert yarn_magnitude(8.0, 1.0) == pytest.approx(1.2079441541679836, abs=1e-15)
    cos, sin = cos_sin(50, plain, 1.25)
    np.testing.assert_allclose(np.hypot(cos, sin), 1.25, rtol=1e-6)


def test_tables_are_cosines_and_sines_of_position_times_frequency() -> None:
    per_position = np.array([1.0, 0.75, 0.01, 1e-5])
    cos, sin = cos_sin(70_000, per_position)
    angles = np.arange(70_000)[:, None] * per_position
    # Half a unit in the last place of f32 near 1, and what f64 adds.
    assert np.abs(cos - np.cos(angles)).max() <= 2.0**-25 + 1e-15
    assert np.abs(sin - np.sin(angles)).max() <= 2.0**-25 + 1e-15
    assert cos[0].tolist() == [1, 1, 1, 1]
    assert sin[0].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("position", [3, 20, 50])
def test_a_table_entry_is_the_exact_cosine_rounded(position: int) -> None:
    with decimal.localcontext(prec=60):
        for frequency in (1.0, 0.8659643233600653, 0.03):
            exact = exact_cosine(decimal.Decimal(position * frequency))
            cos, _ = cos_sin(position + 1, np.array([frequency]))
            assert cos[position, 0] == np.float32(float(exact))


def checksum() -> str:
    tables = cos_sin(32768, frequencies(10000.0, 64))
    return hashlib.sha256(b"".join(t.tobytes() for t in tables)).hexdigest()


def test_tables_have_the_same_bits_where_numpy_has_no_wide_instructions() -> None:
    found = np._core._multiarray_umath.__cpu_features__
    wide = [name for name in ("X86_V4", "AVX512_ICL", "AVX512_SPR", "X86_V3", "ASIMDHP", "SVE") if found.get(name)]
    if not wide:
        pytest.skip("NumPy has only its baseline on this CPU")
    code = "import test_rope; print(test_rope.checksum())"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(wide), "PYTHONPATH": path}
    narrow = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert narrow.stdout.strip() == checksum()


def test_scores_grow_with_the_logarithm_of_contexts_left_behind() -> None:
    positions = np.arange(70)
    expected = 1 + 0.3 * np.log(positions // 16 + 1.0)
    np.testing.assert_allclose(temperatures(70, 16, 0.3), expected, rtol=1e-7)
    assert set(temperatures(16, 16, 0.3)) == {1.0}
