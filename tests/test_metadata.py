"""Whatever the metadata of a file says, the model runs or is refused with one line: keys dropped, or of any value."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forward_runner import Runner, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ARCHITECTURES, Architecture, write_tiny_model

from engine.arch import ARCHITECTURES as ARCHITECTURE_ROWS
from engine.arch import NOT_YET
from engine.config import ModelConfig
from engine.errors import GoinferError, UnsupportedModelError
from engine.gguf_file import open_gguf
from engine.model import LoadOptions, Model

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "ffn_size": 32,
    "num_layers": 2,
    "context_size": 64,
}
# Keys that any architecture may have, beside those that its tiny model has.
MORE_KEYS = (
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
    "rope.scale_linear",
    "rope.dimension_count",
    "rope.dimension_sections",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.temperature_scale",
    "logit_scale",
)
ODD_VALUES = st.one_of(
    st.none(),
    st.sampled_from([0, 1, 2, 3, 5, 7, 10, 15, 16, 17, 31, 48, 64, 255, 4096, 1 << 20, (1 << 32) - 1]),
    st.sampled_from([0.0, -1.0, 1e-30, 0.3, 2.0, 1e30, float("inf"), float("-inf"), float("nan")]),
    st.sampled_from(["", "yarn", "linear", "longrope", "none", "dynamic", "\x1b[31m", "x" * 300]),
    st.booleans(),
    st.lists(st.integers(0, 64), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=1, max_size=3),
    st.lists(st.sampled_from([0.5, float("nan")]), min_size=1, max_size=3),
)


def sizes(architecture: Architecture) -> dict[str, Any]:
    """Enough layers for one of each kind."""
    layers = 3 if ARCHITECTURE_ROWS[architecture].shared_keys else 2
    return {**SIZES, "num_layers": 4 if ARCHITECTURE_ROWS[architecture].is_recurrent else layers}


@cache
def keys_of(architecture: Architecture) -> list[str]:
    """The keys under the architecture's name in its tiny model, and those it may have."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_model(Path(folder) / "tiny.gguf", architecture, **sizes(architecture))
        with open_gguf(path) as gguf:
            own = [key for key in gguf.metadata if key.startswith(f"{architecture}.")]
    return list(dict.fromkeys([*own, *(f"{architecture}.{key}" for key in MORE_KEYS)]))


def runs_or_is_refused(path: Path) -> bool:
    """Whether a model runs; if not it was refused as everything is that a file can do wrong."""
    try:
        with open_gguf(path) as gguf:
            model = Model.load(gguf, LoadOptions(threads=1, max_rows=16, max_positions=64))
    except GoinferError as error:
        said = str(error)
        assert said.startswith(path.name), said
        assert said.isprintable(), said
        assert len(said) < 400, said
        return False
    try:
        runner = Runner(model, model.new_pool(4, 3, 2))
        runner.step((runner.table(), tokens(12)))
    finally:
        model.close()
    return True


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Compiled once, outside of any example's time."""
    with tempfile.TemporaryDirectory() as folder:
        assert runs_or_is_refused(write_tiny_model(Path(folder) / "tiny.gguf", **SIZES))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@settings(max_examples=10)
@given(data=st.data())
def test_odd_metadata_runs_or_is_refused_with_one_line(architecture: Architecture, data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.sampled_from(keys_of(architecture)), min_size=1, max_size=3, unique=True))
    metadata = {key: data.draw(ODD_VALUES, key) for key in keys}
    with tempfile.TemporaryDirectory() as folder:
        runs_or_is_refused(
            write_tiny_model(Path(folder) / "odd.gguf", architecture, metadata=metadata, **sizes(architecture))
        )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_size_that_is_missing_or_off_by_one_is_named(architecture: Architecture, tmp_path: Path) -> None:
    # With experts a file may name their size alone.
    ffn = [] if f"{architecture}.expert_feed_forward_length" in keys_of(architecture) else ["feed_forward_length"]
    for key in ("block_count", "embedding_length", "attention.head_count", *ffn):
        path = write_tiny_model(
            tmp_path / "m.gguf", architecture, metadata={f"{architecture}.{key}": None}, **sizes(architecture)
        )
        with open_gguf(path) as gguf, pytest.raises(GoinferError, match=f"{architecture}.{key} is missing"):
            Model.load(gguf)
    for key, value in (("embedding_length", 64), ("attention.head_count", 4), *((name, 64) for name in ffn)):
        path = write_tiny_model(
            tmp_path / "m.gguf", architecture, metadata={f"{architecture}.{key}": value}, **sizes(architecture)
        )
        with open_gguf(path) as gguf, pytest.raises(GoinferError, match=r"m\.gguf"):
            Model.load(gguf)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tensor_that_is_missing_is_named(architecture: Architecture, tmp_path: Path) -> None:
    with open_gguf(write_tiny_model(tmp_path / "whole.gguf", architecture, **sizes(architecture))) as gguf:
        names = [
            n
            for n in gguf.tensors
            if n.startswith(("blk.1.", "blk.3.")) and n.endswith(".weight") and "_norm" not in n and "_scale" not in n
        ]
    assert len(names) >= 4
    if ARCHITECTURE_ROWS[architecture].normed_values:
        names.remove("blk.1.attn_v.weight")  # values are made as keys are then
    for name in names:
        path = write_tiny_model(tmp_path / "less.gguf", architecture, tensors={name: None}, **sizes(architecture))
        with (
            open_gguf(path) as gguf,
            pytest.raises(GoinferError, match=r"less\.gguf: tensor blk\.[13]\.[\w.]+\.weight"),
        ):
            Model.load(gguf)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if ARCHITECTURE_ROWS[name].is_recurrent])
def test_layers_with_a_state_and_none_with_attention_or_the_other_way_are_refused(
    architecture: Architecture, tmp_path: Path
) -> None:
    """Also where a layer's tensors would be there."""
    key, kinds = ("full_attention_interval", [1, 1024])
    if f"{architecture}.{key}" not in keys_of(architecture):
        key, kinds = ("attention.head_count_kv", [[1] * 4, [0] * 4])
    for kind in kinds:
        path = write_tiny_model(
            tmp_path / "m.gguf", architecture, metadata={f"{architecture}.{key}": kind}, **sizes(architecture)
        )
        with open_gguf(path) as gguf, pytest.raises(UnsupportedModelError, match="layers of one kind only"):
            Model.load(gguf)


def test_the_values_are_odd_enough_to_be_refused_and_tame_enough_to_run(tmp_path: Path) -> None:
    odd = {"rope.scaling.type": "dynamic", "rope.freq_base": float("nan"), "attention.head_count": "two"}
    for key, value in odd.items():
        path = write_tiny_model(tmp_path / "odd.gguf", metadata={f"llama.{key}": value}, **SIZES)
        assert not runs_or_is_refused(path), key
    assert runs_or_is_refused(
        write_tiny_model(tmp_path / "tame.gguf", metadata={"llama.rope.scaling.factor": 2.0}, **SIZES)
    )
    assert np.isnan(odd["rope.freq_base"])


@pytest.mark.parametrize(
    ("pattern", "local"),
    [
        (None, [True, True, True, True, True, False, True]),
        (3, [True, True, False, True, True, False, True]),
        ([True, False, False, True, True, False, False], [True, False, False, True, True, False, False]),
    ],
)
def test_a_file_may_say_which_layers_see_a_window(pattern: Any, local: list[bool], tmp_path: Path) -> None:
    keys = {"gemma3.attention.sliding_window_pattern": pattern}
    path = write_tiny_model(tmp_path / "tiny.gguf", "gemma3", **{**SIZES, "num_layers": 7}, metadata=keys)
    with open_gguf(path) as gguf:
        assert [*ModelConfig.from_gguf(gguf).local] == local


def test_an_architecture_that_does_not_run_is_refused_with_what_it_would_take(tmp_path: Path) -> None:
    assert not set(NOT_YET) & set(ARCHITECTURE_ROWS)
    for name, what in [*NOT_YET.items(), ("unheard-of", "")]:
        path = write_tiny_model(tmp_path / "other.gguf", metadata={"general.architecture": name}, **SIZES)
        with open_gguf(path) as gguf, pytest.raises(UnsupportedModelError) as error:
            Model.load(gguf)
        assert f"other.gguf: architecture {name} is not supported" in str(error.value)
        assert f"({what})" in str(error.value) or not what
        assert "models --supported" in str(error.value)
