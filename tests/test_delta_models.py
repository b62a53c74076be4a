"""Models with layers that keep a running state: what of their files runs, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forward_runner import running, tokens
from kernel_calls import assert_same_bits
from test_running_state import SIZES
from tiny_models import write_tiny_model

from engine.config import ModelConfig
from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf_file import open_gguf
from engine.model import Model

FOUR: dict[str, Any] = {**SIZES, "num_layers": 4}


def write(folder: Path, name: str, keys: dict[str, Any] | None = None, **settings: Any) -> Path:
    metadata = {f"qwen35.{key}": value for key, value in (keys or {}).items()}
    return write_tiny_model(folder / f"{name}.gguf", "qwen35", metadata=metadata, **{**FOUR, **settings})


def test_layers_for_guessing_ahead_are_passed_over(tmp_path: Path) -> None:
    """Files of Qwen 3.5 may have one behind the others, which llama.cpp does not run for text either."""
    plain = write(tmp_path, "plain")
    extra = {"blk.4.nextn.enorm.weight": np.ones(32), "blk.4.attn_norm.weight": np.ones(32)}
    more = write(tmp_path, "more", {"block_count": 5, "nextn_predict_layers": 1}, tensors=extra)
    ids, found = tokens(9), []
    for path in (plain, more):
        with running(path) as runner:
            found.append(runner.step((runner.table(), ids)))
    assert_same_bits(*found)
    other = write(tmp_path, "other", tensors=extra)
    with open_gguf(other) as gguf, pytest.raises(UnsupportedModelError, match=r"tensor blk\.4\.nextn\.enorm\.weight"):
        Model.load(gguf)


def test_the_file_says_which_layers_have_a_running_state(tmp_path: Path) -> None:
    """Every third has attention in these files; with that said layer by layer it is the same model."""
    plain, listed = write(tmp_path, "plain"), [True, True, False, True]
    said = write(tmp_path, "said", {"attention.recurrent_layers": listed, "full_attention_interval": None})
    found = []
    for path in (plain, said):
        with open_gguf(path) as gguf:
            config = ModelConfig.from_gguf(gguf)
            assert config.attention_layers == (2,)
            assert config.delta is not None
            assert config.state_bytes == 3 * config.delta.layer_bytes == 3 * 4 * (3 * 128 + 2 * 32 * 32)
        with running(path) as runner:
            found.append(runner.step((runner.table(), tokens(9))))
    assert_same_bits(*found)


@pytest.mark.parametrize(
    ("keys", "settings", "reason"),
    [
        ({"ssm.conv_kernel": 3}, {}, "a convolution over 3 tokens"),
        ({"ssm.state_size": 48, "ssm.inner_size": 96}, {}, "a state of 48 numbers in a row"),
        ({"ssm.inner_size": 96}, {}, "1 key heads and 2 value heads of 32 do not make layers of 96"),
        ({"full_attention_interval": 1}, {}, "layers of one kind only"),
        ({"full_attention_interval": 9}, {}, "layers of one kind only"),
        ({"attention.recurrent_layers": [True]}, {}, "must say for each of 4 layers"),
        ({"rope.dimension_sections": [8, 0, 0, 0]}, {}, "pairs of a head that have no position in a text"),
        ({"ssm.group_count": None}, {}, "qwen35.ssm.group_count is missing"),
        ({}, {"tensors": {"blk.0.ssm_in.weight": np.ones((64, 32))}}, "an old form of qwen35; download or convert"),
        ({}, {"tensors": {"blk.0.ssm_a": None}}, "tensor blk.0.ssm_a is missing"),
        (
            {},
            {"tensors": {"blk.1.ssm_conv1d.weight": np.ones((128, 3))}},
            "ssm_conv1d.weight is .128, 3., and should",
        ),
        ({}, {"tensors": {"blk.1.ssm_alpha.weight": np.ones((3, 32))}}, "tensor blk.1.ssm_alpha.weight is .3, 32."),
    ],
)
def test_what_does_not_fit_or_is_not_known_is_refused(
    tmp_path: Path, keys: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    path = write(tmp_path, "bad", keys, **settings)
    with open_gguf(path) as gguf, pytest.raises((ModelFileError, UnsupportedModelError), match=reason):
        Model.load(gguf)
