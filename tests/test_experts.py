"""Mixtures of experts at their edges: nobody's expert, everybody's expert, ties, one row and hundreds of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forward_runner import running, tokens
from kernel_calls import assert_same_bits
from tiny_models import write_tiny_model

import engine
from engine import model_twin
from engine.api import SamplingParams
from engine.config import ModelConfig
from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf_file import open_gguf
from engine.model import Model
from engine.quant import TensorType

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,
    "ffn_size": 96,
    "expert_ffn_size": 64,
    "num_layers": 2,
}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_one(architecture: Any = "qwen3moe", **settings: Any) -> Path:
        return write_tiny_model(tmp_path / "mixture.gguf", architecture, **{**SIZES, **settings})

    return write_one


def router(*favourites: int, experts: int = 6, hidden: int = 64) -> np.ndarray:
    """A router [experts, hidden] that likes some experts whatever comes in: its other rows are zeros, theirs are not
    smaller for one row than the zeros are, since a row and its negative are both there as pairs of experts."""
    rows = np.zeros((experts, hidden), np.float32)
    direction = np.random.default_rng(8).standard_normal(hidden).astype(np.float32)
    for n, expert in enumerate(favourites):
        rows[expert] = direction if n % 2 == 0 else -direction
    return rows


def assert_is_the_numpy_step_in_any_chunks(path: Path, num_tokens: int = 60) -> None:
    ids = tokens(num_tokens)
    with open_gguf(path) as gguf:
        expected = model_twin.forward(gguf, ids).logits
    for threads, chunk in ((1, num_tokens), (2, num_tokens), (2, 13), (3, 1)):
        with running(path, threads=threads) as runner:
            assert_same_bits(runner.feed(runner.table(), ids, chunk, range(num_tokens)), expected)


def in_all_layers(**tensors: np.ndarray) -> dict[str, np.ndarray]:
    return {f"blk.{n}.{name}.weight": tensor for n in range(2) for name, tensor in tensors.items()}


def test_a_router_that_cannot_tell_experts_apart_sends_all_rows_to_the_first_ones(write: Write) -> None:
    path = write(tensors=in_all_layers(ffn_gate_inp=np.zeros((6, 64), np.float32)))
    assert_is_the_numpy_step_in_any_chunks(path)
    with running(path) as runner:
        runner.step((runner.table(), tokens(20)))
        choices = runner.model.buffers.choices.reshape(-1, 2)[:20]
        assert (choices == [0, 1]).all()


def test_experts_that_nobody_chooses_are_passed_over(write: Write) -> None:
    path = write(experts_used=1, tensors=in_all_layers(ffn_gate_inp=router(2, 5)))
    assert_is_the_numpy_step_in_any_chunks(path)
    with running(path) as runner:
        runner.step((runner.table(), tokens(60)))
        busy = runner.model.buffers.busy_experts
        assert busy[:3].tolist() == [2, 5, -1]


def test_hundreds_of_rows_may_go_through_the_same_experts(write: Write) -> None:
    path = write(tensors=in_all_layers(ffn_gate_inp=np.zeros((6, 64), np.float32)))
    ids, probes = tokens(512), [0, 1, 127, 128, 129, 300, 511]
    with running(path, threads=2) as runner:
        found = [runner.feed(runner.table(), ids, chunk, probes) for chunk in (512, 129, 40)]
    for logits in found[1:]:
        assert_same_bits(logits, found[0])
    assert np.isfinite(found[0]).all()


def test_a_row_is_the_same_whoever_shares_its_experts(write: Write) -> None:
    path = write(experts=4)
    texts = [tokens(30, seed=n) for n in range(4)]
    with running(path, threads=2) as runner:
        alone = [runner.step((runner.table(), ids)) for ids in texts]
        together = runner.step(*((runner.table(), ids) for ids in texts[:2]))
        assert_same_bits(together, np.concatenate(alone[:2]))
        turned = runner.step(*((runner.table(), ids) for ids in texts[::-1][:2]))
        assert_same_bits(turned, np.concatenate([alone[3], alone[2]]))


def test_every_expert_for_every_row(write: Write) -> None:
    assert_is_the_numpy_step_in_any_chunks(write(experts_used=6))


def test_a_single_expert_is_a_dense_layer(write: Write, tmp_path: Path) -> None:
    """Its weight is 1: the same bits as the dense model, whose feed-forward tensors are the expert's."""
    names = {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    rng = np.random.default_rng(1)
    values = {name: (rng.standard_normal(shape) / 9).astype(np.float32) for name, shape in names.items()}
    dense = write_tiny_model(tmp_path / "dense.gguf", "qwen3", **SIZES, tensors=in_all_layers(**values))
    experts = in_all_layers(**{f"{name}_exps": value[None] for name, value in values.items()})
    mixture = write(experts=1, experts_used=1, expert_ffn_size=96, tensors=experts)
    logits = []
    for path in (dense, mixture):
        with running(path) as runner:
            logits.append(runner.step((runner.table(), tokens(40))))
    assert_same_bits(logits[0], logits[1])


def test_gate_and_up_of_all_experts_may_share_a_tensor(write: Write) -> None:
    rng = np.random.default_rng(2)
    gate, up = (rng.standard_normal((6, 64, 64)).astype(np.float32) / 8 for _ in range(2))
    apart = write(tensors=in_all_layers(ffn_gate_exps=gate, ffn_up_exps=up))
    with running(apart) as runner:
        expected = runner.step((runner.table(), tokens(40)))
    both = np.concatenate([gate, up], axis=1)
    without = dict.fromkeys(in_all_layers(ffn_gate_exps=gate, ffn_up_exps=up))
    fused = write(tensors={**without, **in_all_layers(ffn_gate_up_exps=both)})
    assert_is_the_numpy_step_in_any_chunks(fused, 20)
    with running(fused) as runner:
        assert_same_bits(runner.step((runner.table(), tokens(40))), expected)


@pytest.mark.parametrize("kind", list(TensorType))
def test_experts_may_be_of_any_type(kind: TensorType, write: Write) -> None:
    sizes = {"hidden_size": 256, "expert_ffn_size": 256, "num_layers": 1, "experts": 3}
    path = write(**sizes, tensor_types={"*_exps*": kind})
    ids = tokens(12)
    with open_gguf(path) as gguf:
        expected = model_twin.forward(gguf, ids).logits
    with running(path, threads=2) as runner:
        assert_same_bits(runner.step((runner.table(), ids)), expected)


def test_weights_of_experts_are_scaled_where_the_file_says_so(write: Write) -> None:
    path = write(metadata={"qwen3moe.expert_weights_scale": 2.5})
    with open_gguf(path) as gguf:
        config = ModelConfig.from_gguf(gguf)
    assert config.experts is not None
    assert config.experts.scale == 2.5
    assert_is_the_numpy_step_in_any_chunks(path, 20)


def test_guesses_reuse_and_threads_change_no_word_of_a_reply(write: Write) -> None:
    path = write(num_layers=1, seed=3)
    greedy, words = SamplingParams(temperature=0), "one two three one two three one two"
    found = []
    for threads, speculation in ((1, "off"), (2, "ngram")):
        with engine.load(path, threads=threads, speculation=speculation, context_size=512) as loaded:
            first = loaded.chat(words, max_tokens=30, sampling=greedy)
            again = loaded.chat(words, max_tokens=30, sampling=greedy)
            assert again.stats.prefill_reused_tokens
            found += [first.ids, again.ids]
    assert all(ids == found[0] for ids in found)


@pytest.mark.parametrize(
    ("architecture", "metadata", "error", "words"),
    [
        ("qwen3moe", {"qwen3moe.expert_count": None}, ModelFileError, "expert_count is missing"),
        ("qwen3moe", {"qwen3moe.expert_used_count": None}, ModelFileError, "expert_used_count is missing"),
        ("qwen3moe", {"qwen3moe.expert_used_count": 7}, ModelFileError, "is 7, which is not between 1 and 6"),
        ("qwen3moe", {"qwen3moe.expert_used_count": 0}, ModelFileError, "is 0, which is not between 1 and 6"),
        ("qwen3moe", {"qwen3moe.expert_count": 5}, ModelFileError, "the other sizes in the file ask for"),
        ("qwen3moe", {"qwen3moe.expert_feed_forward_length": 32}, ModelFileError, "ask for"),
        ("qwen3moe", {"qwen3moe.expert_feed_forward_length": 40}, UnsupportedModelError, "multiples of 32"),
        ("qwen3", {"qwen3.expert_count": 6}, UnsupportedModelError, "qwen3 with experts is not supported"),
    ],
)
def test_sizes_that_do_not_fit_are_said(
    architecture: str, metadata: dict[str, Any], error: type[Exception], words: str, write: Write
) -> None:
    path = write(architecture, metadata=metadata)
    with open_gguf(path) as gguf, pytest.raises(error, match=words):
        Model.load(gguf)
