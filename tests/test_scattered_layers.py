"""Models whose layers are of several kinds: experts in some, short convolutions in others, attention in chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forward_runner import running, tokens
from kernel_calls import assert_same_bits
from test_experts import assert_is_the_numpy_step_in_any_chunks
from tiny_models import write_tiny_model

from engine import model_twin
from engine.config import ModelConfig
from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf_file import open_gguf
from engine.model import Model

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "ffn_size": 64,
    "num_layers": 4,
}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_one(architecture: Any, keys: dict[str, Any] | None = None, **settings: Any) -> Path:
        metadata = {f"{architecture}.{key}": value for key, value in (keys or {}).items()}
        return write_tiny_model(tmp_path / "m.gguf", architecture, metadata=metadata, **{**SIZES, **settings})

    return write_one


def config_of(path: Path) -> ModelConfig:
    with open_gguf(path) as gguf:
        return ModelConfig.from_gguf(gguf)


# ---------------------------------------------------------------- experts in some layers
def test_the_file_says_in_which_layers_there_are_experts(write: Write) -> None:
    first = config_of(write("glm4moe", expert_ffn_size=32))
    assert first.experts is not None
    assert [first.has_experts(n) for n in range(4)] == [False, True, True, True]
    assert first.ffn_sizes == (64, 32, 32, 32)
    every = config_of(write("llama4", expert_ffn_size=32))
    assert [every.has_experts(n) for n in range(4)] == [False, True, False, True]
    assert every.ffn_sizes == (64, 32, 64, 32)


def test_a_layer_that_has_other_tensors_than_the_file_says_is_refused(write: Write) -> None:
    """So a mix of layers that no key tells of (`mlp_only_layers` of Qwen's) does not run as something else."""
    more = write("glm4moe", {"leading_dense_block_count": 2})
    with open_gguf(more) as gguf, pytest.raises(ModelFileError, match=r"tensor blk\.1\.ffn_down\.weight is missing"):
        Model.load(gguf)
    dense = {f"blk.1.ffn_{name}_exps.weight": None for name in ("gate", "up", "down")}
    dense |= {f"blk.1.ffn_{name}.weight": np.ones((64, 32), np.float32) for name in ("gate", "up")}
    mixed = write("qwen3moe", tensors={**dense, "blk.1.ffn_down.weight": np.ones((32, 64), np.float32)})
    with open_gguf(mixed) as gguf, pytest.raises(ModelFileError, match=r"tensor blk\.1\.ffn_down_exps\.weight is miss"):
        Model.load(gguf)


@pytest.mark.parametrize(("kind", "even"), [(1, False), (2, True), (0, True), (None, True)])
@pytest.mark.parametrize("normed", [True, False])
def test_the_file_says_what_share_of_an_expert_is_taken(
    kind: int | None, even: bool, normed: bool, write: Write
) -> None:
    path = write("bailingmoe2", {"expert_gating_func": kind, "expert_weights_norm": normed})
    experts = config_of(path).experts
    assert experts is not None
    assert (experts.is_even, experts.is_normed, experts.scale) == (even, normed, 2.5)
    assert_is_the_numpy_step_in_any_chunks(path, 20)


def test_a_choice_without_a_bias_is_by_the_logits(write: Write) -> None:
    path = write("dots1", tensors={f"blk.{n}.exp_probs_b.bias": None for n in range(1, 4)})
    assert_is_the_numpy_step_in_any_chunks(path, 20)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"expert_gating_func": 3}, "expert_gating_func 3 is not supported; supported: 1"),
        ({"expert_weights_norm": 1}, "expert_weights_norm is not true or false"),
        ({"leading_dense_block_count": 4}, "leading_dense_block_count is 4, which is not between 0 and 3"),
        ({"interleave_moe_layer_step": 0}, "interleave_moe_layer_step is 0, which is not between 1 and 4"),
    ],
)
def test_what_is_not_known_of_experts_is_refused(keys: dict[str, Any], words: str, write: Write) -> None:
    with pytest.raises((ModelFileError, UnsupportedModelError), match=words):
        config_of(write("glm4moe", keys))


def test_layers_for_guessing_ahead_are_passed_over(write: Write, tmp_path: Path) -> None:
    plain = write("glm4moe").rename(tmp_path / "plain.gguf")
    extra = {"blk.4.nextn.enorm.weight": np.ones(32), "blk.4.attn_norm.weight": np.ones(32)}
    more, found = write("glm4moe", {"block_count": 5, "nextn_predict_layers": 1}, tensors=extra), []
    for path in (plain, more):
        with running(path) as runner:
            found.append(runner.step((runner.table(), tokens(9))))
    assert_same_bits(*found)


# ---------------------------------------------------------------- short convolutions
def test_layers_without_kv_heads_are_convolutions(write: Write) -> None:
    config = config_of(write("lfm2"))
    assert config.attention_layers == (2,)
    assert config.convolution is not None
    assert config.convolution.layers == {0, 1, 3}
    assert config.state_bytes == 3 * 3 * 32 * 4


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
def test_convolutions_over_up_to_four_tokens_run(taps: int, write: Write) -> None:
    weights = np.random.default_rng(taps).standard_normal((4, 32, taps)).astype(np.float32)
    tensors = {f"blk.{n}.shortconv.conv.weight": weights[n] for n in (0, 1, 3)}
    assert_is_the_numpy_step_in_any_chunks(write("lfm2", {"shortconv.l_cache": taps}, tensors=tensors))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"shortconv.l_cache": 5}, "a convolution over 5 tokens"),
        ({"shortconv.l_cache": None}, "shortconv.l_cache is missing"),
        ({"shortconv.l_cache": 2}, r"shortconv\.conv\.weight is .32, 3., and should be .32, 2."),
        ({"attention.head_count_kv": 1}, "head_count_kv is not a number between 0"),
        ({"attention.head_count_kv": [0, 1]}, "head_count_kv is not a number between 0"),
        ({"attention.head_count_kv": [1, 1, 1, 1]}, "layers of one kind only"),
        ({"attention.head_count_kv": [0, 0, 0, 0]}, "layers of one kind only"),
        ({"attention.head_count_kv": [0, 1, 2, 0]}, "layers with different numbers of KV heads"),
        ({"attention.sliding_window": 32}, "lfm2 with a sliding window"),
    ],
)
def test_what_is_not_known_of_convolutions_is_refused(keys: dict[str, Any], words: str, write: Write) -> None:
    path = write("lfm2", keys)
    with open_gguf(path) as gguf, pytest.raises((ModelFileError, UnsupportedModelError), match=words):
        Model.load(gguf)


# ---------------------------------------------------------------- state space layers
def test_layers_without_kv_heads_are_state_space_layers(write: Write) -> None:
    config = config_of(write("granitehybrid"))
    assert config.attention_layers == (2,)
    assert config.scan is not None
    assert (config.scan.layers, config.scan.channels) == ({0, 1, 3}, 64 + 2 * 32)
    assert config.state_bytes == 3 * 4 * (3 * 128 + 64 * 16)
    assert not any(config.is_rotated(n) for n in range(4))
    assert config_of(write("granitehybrid", {"rope.scaling.finetuned": True})).is_rotated(2)


def test_a_convolution_of_a_state_space_layer_may_have_no_biases(write: Write) -> None:
    tensors = {f"blk.{n}.ssm_conv1d.bias": None for n in (0, 1, 3)}
    assert_is_the_numpy_step_in_any_chunks(write("granitehybrid", tensors=tensors))


def test_norms_within_layers_are_not_those_of_a_stream_that_is_kept_divided(write: Write) -> None:
    """Branches are multiplied by 0.3, so the stream's epsilon is another one."""
    path = write("granitehybrid", {"attention.layer_norm_rms_epsilon": 0.01})
    config = config_of(path)
    assert config.scan is not None
    assert (config.scan.norm_eps, round(config.norm_eps, 6)) == (pytest.approx(0.01), round(0.01 / 0.3**2, 6))
    assert_is_the_numpy_step_in_any_chunks(path, 20)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"ssm.conv_kernel": 3}, "a convolution over 3 tokens"),
        ({"ssm.state_size": 24}, "states of 24 times 32 numbers"),
        ({"ssm.time_step_rank": 4}, "states of 16 times 16 numbers"),
        ({"ssm.time_step_rank": 3}, "3 heads in 2 groups do not make layers of 64"),
        ({"ssm.group_count": None}, "ssm.group_count is missing"),
        ({"attention.head_count_kv": [1, 1, 1, 1]}, "layers of one kind only"),
        ({"ssm.state_size": 32}, r"ssm_in\.weight is .194, 32., and the other sizes"),
        ({"rope.scaling.finetuned": 1}, "rope.scaling.finetuned is not true or false"),
    ],
)
def test_what_is_not_known_of_state_space_layers_is_refused(keys: dict[str, Any], words: str, write: Write) -> None:
    path = write("granitehybrid", keys)
    with open_gguf(path) as gguf, pytest.raises((ModelFileError, UnsupportedModelError), match=words):
        Model.load(gguf)


# ---------------------------------------------------------------- attention in chunks
@pytest.mark.parametrize("chunk", [64, 100, 600])
def test_chunks_have_the_bits_of_the_numpy_step(chunk: int, write: Write) -> None:
    """Also those that cross multiples of 512, where softmax goes on in another part."""
    path = write("llama4", sliding_window=chunk, experts=2, experts_used=1)
    ids = tokens(1100)
    with open_gguf(path) as gguf:
        expected = model_twin.forward(gguf, ids).logits
    probes = [0, 63, 64, 99, 100, 511, 512, 599, 600, 601, 1023, 1024, 1098]
    with running(path, threads=2, positions=1101) as runner:
        for size in (512, 37):
            assert_same_bits(runner.feed(runner.table(), ids, size, probes), expected[[*probes, 1099]])


def test_a_chunk_knows_nothing_of_the_one_before_it_but_by_the_layers_that_see_everything(write: Write) -> None:
    """With three layers there is none of these: what stands before position 32 changes nothing behind it."""
    path = write("llama4", num_layers=3, sliding_window=32)
    one, other = tokens(50), tokens(50)
    other[:32] = tokens(32, seed=1)
    with running(path) as runner:
        found = [runner.step((runner.table(), ids)) for ids in (one, other)]
    assert_same_bits(found[0][32:], found[1][32:])
    assert not np.array_equal(found[0][31], found[1][31])


def test_heads_pass_a_norm_but_in_models_of_128_experts(write: Write) -> None:
    assert [config_of(write("llama4")).has_unit_heads(n) for n in range(4)] == [True, True, True, False]
    many = config_of(write("llama4", experts=128, hidden_size=32, expert_ffn_size=32))
    assert not any(many.has_unit_heads(n) for n in range(4))


def test_scores_grow_chunk_by_chunk_where_nothing_is_rotated(write: Write) -> None:
    config = config_of(write("llama4", sliding_window=8))
    grown = config.query_scales(32, 3) * 4
    np.testing.assert_allclose(grown[[0, 6, 7, 14, 15, 31]], 1 + 0.1 * np.log([1, 1, 2, 2, 3, 5]), rtol=1e-6)
    assert set(config.query_scales(32, 0) * 4) == {1.0}


def test_a_model_without_chunks_is_refused(write: Write) -> None:
    with pytest.raises(UnsupportedModelError, match="llama4 without attention in chunks"):
        config_of(write("llama4", sliding_window=0))
