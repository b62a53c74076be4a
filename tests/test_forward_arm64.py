"""Whole steps for arm64, run under qemu: logits and caches have the bits that they have here.

Every comparison is of bits, with a step that this CPU has run on the same tokens; `tests/arm64.py` says how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from arm64 import Build, emulated, needs_qemu
from forward_models import MODELS
from forward_runner import Runner, assert_same_cache, running, tokens
from kernel_calls import assert_same_bits
from tiny_models import write_tiny_model

from engine.api import KVType
from engine.kv_cache import BlockTable

pytestmark = [pytest.mark.slow, needs_qemu]
TYPES: list[tuple[str, KVType]] = [("llama", "q8_0"), ("gemma3", "q8_0"), ("llama", "f32"), ("gemma4", "f32")]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Objects for arm64, kept for all tests."""
    return Build(tmp_path_factory.mktemp("arm64"))


def assert_same_on_arm64(runner: Runner, build: Build, chunks: Sequence[int], vocab: int = 300) -> None:
    def feed(table: BlockTable) -> np.ndarray:
        return np.concatenate([runner.feed(table, tokens(n, vocab, n), n, range(0, 600, 29)) for n in chunks])

    table = runner.table()
    logits, cache = feed(table), runner.cache(table)
    table.release()
    # What is not written there shall not pass for it.
    runner.pool.memory[:] = 0
    runner.model.buffers.logits[:] = 0
    with emulated(runner, build) as workers:
        assert_same_bits(feed(table), logits)
        assert workers.num_steps == len(chunks)
    assert_same_cache(runner, table, cache)


@pytest.mark.parametrize(("name", "kv_type"), [*((name, "f16") for name in MODELS), *TYPES])
def test_a_step_on_arm64_has_the_bits_that_it_has_here(
    name: str, kv_type: KVType, build: Build, tmp_path: Path
) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", **MODELS[name])
    with running(path, threads=2, kv_type=kv_type) as runner:
        assert_same_on_arm64(runner, build, (90, 1, 5))


def test_parts_of_512_positions_have_the_same_bits_on_arm64(build: Build, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", **MODELS["llama"])
    with running(path, threads=3) as runner:
        assert_same_on_arm64(runner, build, (505, 33, 1, 2))


def test_a_real_model_has_the_same_bits_on_arm64(model_path: Callable[[str], Path], build: Build) -> None:
    with running(model_path("smollm2-135m"), threads=2, positions=256, blocks=4) as runner:
        assert_same_on_arm64(runner, build, (9, 1), vocab=10_000)
