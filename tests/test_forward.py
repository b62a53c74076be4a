"""The numerics contract: a row's result depends on its own inputs and on what is before it, and on nothing else.

Every comparison is of bits. Chunks, threads, other conversations in the step, forks, what a block held before and the
instructions the kernels are compiled for must not show; and the compiled step is the one `model_twin` writes in NumPy.
"""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_calls import assert_same_bits, target_named
from tiny_gemma4 import Gemma4
from tiny_models import write_tiny_model

from engine import model_twin
from engine.api import KVType
from engine.arch import ARCHITECTURES
from engine.buffers import MAX_WANTED
from engine.errors import UnsupportedModelError
from engine.generate import Rows
from engine.gguf_file import open_gguf
from engine.kernels import twins
from engine.kernels.plan import QUERY_TILE
from engine.kernels.target import ENVIRONMENT
from engine.kv_cache import BLOCK_SIZE, BlockTable, KVPool
from engine.model import LoadOptions, Model
from engine.quant import TensorType
from engine.step import to_batch

ROOT = Path(__file__).parents[1]

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_size": 96,
    "num_layers": 1,
}
# Sizes that are no round numbers; between them the models have every layout of activations, some at once.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "architecture": "llama",
        "hidden_size": 96,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 48,
        "ffn_size": 352,
        "rope_factors": np.geomspace(1, 8, 24).tolist(),
        "tensor_types": {"*ffn_down*": TensorType.Q4_1, "token_embd*": TensorType.Q5_1},
    },
    "llama, floats": {
        "architecture": "llama",
        "hidden_size": 64,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 32,
        "ffn_size": 2080,
        "num_layers": 1,
        "tied": False,
        "tensor_types": {"*ffn_*": TensorType.F16, "*attn_v*": TensorType.BF16, "*": TensorType.F32},
    },
    "qwen2": {
        "architecture": "qwen2",
        "num_heads": 14,
        "num_kv_heads": 2,
        "head_dim": 64,
        "hidden_size": 768,
        "ffn_size": 768,
        "num_layers": 1,
        "tensor_types": {
            "*attn_output*": TensorType.Q5_0,
            "*attn_v*": TensorType.Q6_K,
            "*attn_k*": TensorType.F16,
            "*ffn_down*": TensorType.Q6_K,
            "token_embd*": TensorType.Q8_0,
            "*": TensorType.Q4_K,
        },
    },
    "qwen3": {
        "architecture": "qwen3",
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 80,
        "hidden_size": 256,
        "ffn_size": 512,
        "tied": False,
        "tensor_types": {
            "*attn_output*": TensorType.Q4_0,
            "*ffn_gate*": TensorType.IQ4_XS,
            "*ffn_up*": TensorType.Q3_K,
            "*ffn_down*": TensorType.Q2_K,
            "output*": TensorType.IQ4_NL,
            "*": TensorType.Q5_K,
        },
    },
    # Seven layers: the sixth sees everything, the others a window.
    "gemma3": {
        "architecture": "gemma3",
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 32,
        "ffn_size": 96,
        "num_layers": 7,
        "sliding_window": 41,
        "rope_base": 1e6,
    },
    "gemma2": {
        "architecture": "gemma2",
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "ffn_size": 96,
        "num_layers": 3,
        "sliding_window": 41,
    },
    # Heads of two sizes, three layers that look at keys and values of others, an embedding for each layer.
    "gemma4": {
        "architecture": "gemma4",
        "hidden_size": 96,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 80,
        "ffn_size": 160,
        "num_layers": 6,
        "sliding_window": 41,
        "rope_base": 1e6,
        "rope_factors": [1.0] * 12 + [1e30] * 28,
        "gemma4": Gemma4(local_dim=48, local_kv_heads=1, shared=3, embedding=32),
        "tensor_types": {"per_layer_token*": TensorType.Q5_1, "*inp_gate*": TensorType.F16, "*": TensorType.Q8_0},
    },
    # Of larger ones: values made as keys are where everything is seen, and fewer of them there.
    "gemma4, larger": {
        "architecture": "gemma4",
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 64,
        "ffn_size": 96,
        "num_layers": 3,
        "sliding_window": 41,
        "gemma4": Gemma4(local_dim=32, local_kv_heads=2, keys_are_values=True),
    },
    "gemma4, experts": {
        "architecture": "gemma4",
        "hidden_size": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "ffn_size": 96,
        "num_layers": 3,
        "experts": 7,
        "experts_used": 3,
        "expert_ffn_size": 160,
        "sliding_window": 41,
        "gemma4": Gemma4(local_dim=48, local_kv_heads=4, keys_are_values=True),
    },
    "granite": {
        "architecture": "granite",
        "hidden_size": 96,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 160,
        "metadata": {"granite.rope.scaling.type": "linear", "granite.rope.scaling.factor": 4.0},
    },
    # Four layers: the last one is not rotated.
    "smollm3": {
        "architecture": "smollm3",
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 16,
        "ffn_size": 96,
        "num_layers": 4,
        "metadata": {"smollm3.rope.scaling.type": "yarn", "smollm3.rope.scaling.factor": 8.0},
    },
    # Five layers with YaRN: the fourth sees everything, the others a window without it.
    "olmo2": {
        "architecture": "olmo2",
        "hidden_size": 96,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 160,
        "num_layers": 5,
        "sliding_window": 41,
        "tied": False,
        "metadata": {
            "olmo2.rope.scaling.type": "yarn",
            "olmo2.rope.scaling.factor": 8.0,
            "olmo2.rope.scaling.original_context_length": 256,
            "olmo2.rope.scaling.attn_factor": 1.1,
        },
    },
    # A third of each head stays as it is; the context asks for the long factors.
    "phi3": {
        "architecture": "phi3",
        "hidden_size": 192,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 48,
        "ffn_size": 160,
        "rope_factors": np.geomspace(1, 8, 16).tolist(),
        "metadata": {"phi3.rope.dimension_count": 32},
    },
    "starcoder2": {
        "architecture": "starcoder2",
        "hidden_size": 96,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 352,
        "tensor_types": {"*attn_output*": TensorType.F16, "*ffn_down*": TensorType.Q4_1},
    },
    # Branches side by side, a norm with weights of its own for each head, ten pairs of a head rotated.
    "stablelm": {
        "architecture": "stablelm",
        "hidden_size": 160,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 80,
        "ffn_size": 96,
        "num_layers": 3,
        "tied": False,
        "metadata": {"stablelm.rope.dimension_count": 20},
        "tensors": {
            f"blk.{layer}.{name}": array
            for layer in range(3)
            for name, array in {
                "ffn_norm.weight": None,
                "ffn_norm.bias": None,
                "attn_q_norm.weight": np.linspace(0.5, 1.5, 160).reshape(2, 80),
                "attn_k_norm.weight": np.linspace(1.5, 0.5, 80).reshape(1, 80),
            }.items()
        },
    },
    # Biases at every matrix, the head included, and a vocabulary that fills no whole vector.
    "phi2": {
        "architecture": "phi2",
        "hidden_size": 256,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 64,
        "ffn_size": 512,
        "tied": False,
        "tensor_types": TensorType.Q4_K,
    },
    # Five layers: the fourth sees everything and is not rotated.
    "cohere2": {
        "architecture": "cohere2",
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 96,
        "num_layers": 5,
        "sliding_window": 41,
    },
    "nemotron": {
        "architecture": "nemotron",
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 96,
        "tied": False,
    },
    # Sinks, biases of experts, a window in every other layer.
    "gpt-oss": {
        "architecture": "gpt-oss",
        "hidden_size": 96,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 16,
        "expert_ffn_size": 160,
        "num_layers": 3,
        "experts": 7,
        "experts_used": 3,
        "sliding_window": 41,
        "tied": False,
        "tensor_types": {"*_exps*": TensorType.MXFP4},
        "tensors": {
            f"blk.{layer}.ffn_{name}_exps.bias": sign * np.linspace(-9, 9, 7 * 160).reshape(7, 160)
            for layer in range(3)
            for name, sign in (("gate", 1), ("up", -1))
        },
    },
    "hunyuan-dense": {
        "architecture": "hunyuan-dense",
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "ffn_size": 96,
        "num_layers": 1,
    },
    "mistral3": {
        "architecture": "mistral3",
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 96,
        "num_layers": 1,
    },
    "exaone4": {
        "architecture": "exaone4",
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 96,
        "num_layers": 5,
        "sliding_window": 41,
    },
    # Four layers: the third has attention. Six value heads for two key heads are no whole group of 16.
    "qwen35": {
        "architecture": "qwen35",
        "hidden_size": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "ffn_size": 160,
        "num_layers": 4,
        "delta": (2, 6, 32),
        "tensor_types": {"*ssm_alpha*": TensorType.F32, "*attn_gate*": TensorType.Q4_1, "*": TensorType.Q8_0},
    },
    # Neighbouring value heads share a key head, and the last layer has attention.
    "qwen3next": {
        "architecture": "qwen3next",
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 32,
        "ffn_size": 96,
        "num_layers": 3,
        "delta": (2, 4, 64),
        "experts_used": 3,
        "tensor_types": {"*attn_q.*": TensorType.Q4_0, "*": TensorType.Q8_0},
    },
    # Four of 20 experts, a shared one with a factor, and activations in every layout.
    "qwen2moe": {
        "architecture": "qwen2moe",
        "hidden_size": 256,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "ffn_size": 160,
        "experts": 20,
        "experts_used": 4,
        "expert_ffn_size": 96,
        "tensor_types": {
            "*ffn_gate_exps*": TensorType.Q4_K,
            "*ffn_up_exps*": TensorType.Q5_0,
            "*ffn_down_exps*": TensorType.F16,
            "*ffn_gate_shexp*": TensorType.Q6_K,
        },
    },
    "qwen3moe": {
        "architecture": "qwen3moe",
        "hidden_size": 256,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 64,
        "ffn_size": 512,
        "expert_ffn_size": 256,
        "experts": 17,
        "experts_used": 3,
        "tensor_types": {"*ffn_down_exps*": TensorType.Q6_K, "*": TensorType.Q4_K},
    },
    # Mixtral: an expert in two, and outputs that are no whole strip.
    "mixtral": {
        "architecture": "llama",
        "hidden_size": 288,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 48,
        "ffn_size": 160,
        "experts": 4,
        "tensor_types": {"*_exps*": TensorType.Q4_0},
    },
    # All experts for every row, and a shared one.
    "granitemoe": {
        "architecture": "granitemoe",
        "hidden_size": 96,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 64,
        "experts": 5,
        "experts_used": 5,
        "shared_ffn_size": 96,
    },
    "olmoe": {
        "architecture": "olmoe",
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 16,
        "ffn_size": 96,
        "experts": 8,
        "tied": False,
        "tensor_types": {"*ffn_up_exps*": TensorType.F32},
    },
    # Layers of one kind that others have too, each kind in its own mix: one of them is enough.
    "command-r": {"architecture": "command-r", **SMALL},
    "gemma": {"architecture": "gemma", **SMALL, "tensor_types": {"*attn_q*": TensorType.F16}},
    # One matrix for gate and up.
    "glm4": {
        "architecture": "glm4",
        **SMALL,
        "tied": False,
        "tensor_types": {"*ffn_up*": TensorType.Q4_0},
        "metadata": {"glm4.rope.dimension_count": 8},
    },
    # And one for q, k and v, with a bias.
    "chatglm": {
        "architecture": "chatglm",
        **SMALL,
        "tied": False,
        "tensor_types": {"*attn_qkv*": TensorType.Q5_1},
        "metadata": {"chatglm.rope.dimension_count": 8},
    },
    "exaone": {"architecture": "exaone", **SMALL, "rope_factors": np.geomspace(1, 8, 8).tolist()},
    "seed_oss": {"architecture": "seed_oss", **SMALL, "tied": False},
    "internlm2": {"architecture": "internlm2", **SMALL, "tied": False},
    "arcee": {"architecture": "arcee", **SMALL, "tensor_types": {"*ffn_up*": TensorType.F32}},
    "ernie4_5": {"architecture": "ernie4_5", **SMALL, "head_dim": 48},
    "qwen2vl": {"architecture": "qwen2vl", **SMALL},
    "qwen3vl": {"architecture": "qwen3vl", **SMALL},
    # One layer with a running state and one with attention, both with experts and a shared one.
    "qwen35moe": {
        "architecture": "qwen35moe",
        **SMALL,
        "num_layers": 3,
        "head_dim": 32,
        "expert_ffn_size": 64,
        "delta": (1, 3, 32),
        "tied": False,
    },
}
every_model = pytest.mark.parametrize("name", MODELS)
# Head sizes of 48 and 80 end in a run of 16 numbers in q8_0.
OTHER_TYPES: list[tuple[str, KVType]] = [("llama", "q8_0"), ("qwen3", "q8_0"), ("gemma3", "q8_0"), ("llama", "f32")]
OTHER_TYPES += [("gemma4", "q8_0"), ("gemma4", "f32")]
every_model_and_type = pytest.mark.parametrize(("name", "kv_type"), [*((name, "f16") for name in MODELS), *OTHER_TYPES])


# ---------------------------------------------------------------- running steps
@dataclass
class Runner:
    """A model with a pool of its own."""

    model: Model
    pool: KVPool

    def table(self) -> BlockTable:
        return BlockTable(self.pool)

    def step(self, *parts: tuple[BlockTable, Sequence[int]], want: Sequence[int] | None = None) -> np.ndarray:
        """Append ids to conversations in one step; logits [W, V] of the wanted rows, all by default."""
        for table, ids in parts:
            table.reserve(len(ids))
        logits = self.forward(*parts, want=want)
        for table, ids in parts:
            table.append([int(i) for i in ids])
        return logits

    def forward(self, *parts: tuple[BlockTable, Sequence[int]], want: Sequence[int] | None = None) -> np.ndarray:
        """The step alone, on tables that have room and get no ids."""
        wanted = np.array(range(sum(len(ids) for _, ids in parts)) if want is None else want, np.int32)
        batch = replace(to_batch([Rows(table, [int(i) for i in ids], 0) for table, ids in parts]), want=wanted)
        return self.model.forward(batch).copy()

    def feed(self, table: BlockTable, ids: Sequence[int], chunk: int, probes: Sequence[int] = ()) -> np.ndarray:
        """Append ids in chunks; logits of the positions in `probes`, and of the last one."""
        found = []
        for first in range(0, len(ids), chunk):
            some = ids[first : first + chunk]
            wanted = [i for i in range(len(some)) if len(table) + i in probes or first + i == len(ids) - 1]
            found.append(self.step((table, some), want=wanted))
        return np.concatenate(found)

    def state(self, table: BlockTable) -> np.ndarray:
        """Running states [layers with such, layer_bytes / 4] f32 of a conversation, which rests from here on."""
        assert self.pool.states is not None
        assert table.state is not None
        table.rest()
        slot = table.state.checkpoints[-1].slot
        assert self.model.config.delta is not None
        return self.pool.states.memory[slot].view(np.float32).reshape(len(self.model.config.delta.layers), -1)

    def cache(self, table: BlockTable) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Of each layer that has some, keys and values [S, G, D] of a conversation; q8_0 as what it stands for."""
        c, kv_type, found = self.model.config, self.model.kv_type, ([], [])
        number = {"f16": np.float16, "f32": np.float32, "q8_0": np.int8}[kv_type]
        memory, start = self.pool.memory[table.blocks], 0

        def positions(kind: Any, heads: int, width: int, is_key: bool) -> np.ndarray:
            """[S, G, width] of what comes next in the blocks: numbers or scales."""
            nonlocal start
            end = start + heads * width * BLOCK_SIZE * np.dtype(kind).itemsize
            shape = (width, BLOCK_SIZE) if is_key else (BLOCK_SIZE, width)
            part = np.ascontiguousarray(memory[:, start:end]).view(kind).reshape(-1, heads, *shape)
            start = end
            return (part.swapaxes(-1, -2) if is_key else part).swapaxes(1, 2).reshape(-1, heads, width)[: len(table)]

        for n in c.attention_layers:
            heads, dim = c.heads[n].num_kv_heads, c.heads[n].dim
            for is_key, layers in zip((True, False), found, strict=True):
                cached = positions(number, heads, dim, is_key)
                if kv_type == "q8_0":
                    cached = twins.from_q8_0(cached, positions(np.float16, heads, -(-dim // 32), is_key))
                layers.append(cached)
        assert start == memory.shape[1]
        return found


@contextmanager
def running(
    path: Path,
    *,
    threads: int = 1,
    positions: int = 1024,
    blocks: int = 64,
    kv_type: KVType = "f16",
    from_disk: bool = False,
) -> Iterator[Runner]:
    with open_gguf(path) as gguf:
        model = Model.load(
            gguf, LoadOptions(threads=threads, max_positions=positions, kv_type=kv_type, from_disk=from_disk)
        )
        try:
            pool = model.new_pool(blocks, 24, 6)
            yield Runner(model, pool)
        finally:
            model.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of one of MODELS, written once."""
    folder = tmp_path_factory.mktemp("models")

    def path_of(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.exists() else write_tiny_model(path, **MODELS[name])

    return path_of


def tokens(count: int, vocab: int = 300, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, count)


def assert_same_cache(runner: Runner, table: BlockTable, expected: tuple[Sequence[np.ndarray], ...]) -> None:
    for ours, theirs in zip(chain(*runner.cache(table)), chain(*expected), strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("llama", "blk.0.ffn_gate.bias"),
        ("llama", "blk.1.attn_norm.bias"),
        ("olmo2", "blk.1.attn_q.bias"),
        ("phi3", "blk.0.attn_qkv.scale"),
    ],
)
def test_a_tensor_that_a_step_would_pass_over_is_refused(architecture: Any, name: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "more.gguf", architecture, tensors={name: np.ones(16, np.float32)})
    with open_gguf(path) as gguf, pytest.raises(UnsupportedModelError, match=f"tensor {name} is of a form of"):
        Model.load(gguf)


def test_every_architecture_is_here() -> None:
    assert {model["architecture"] for model in MODELS.values()} == set(ARCHITECTURES)


# ---------------------------------------------------------------- against NumPy
@every_model_and_type
def test_the_compiled_step_has_the_bits_of_the_numpy_step(
    name: str, kv_type: KVType, tiny: Callable[[str], Path]
) -> None:
    ids = tokens(70)  # beyond a block, and beyond the window
    with open_gguf(tiny(name)) as gguf:
        expected = model_twin.forward(gguf, ids, kv_type)
    assert np.isfinite(expected.logits).all()
    assert expected.logits.std() > 0.1
    for threads in (1, 2):
        with running(tiny(name), threads=threads, kv_type=kv_type) as runner:
            table = runner.table()
            logits = [runner.step((table, ids[first : first + 35])) for first in (0, 35)]
            assert_same_bits(np.concatenate(logits), expected.logits)
            assert_same_cache(runner, table, (expected.keys, expected.values))
            if table.state is not None:
                assert_same_bits(runner.state(table), expected.states)


@pytest.mark.parametrize("window", [0, 100, 600])
def test_parts_of_512_positions_have_the_bits_of_the_numpy_step(window: int, tmp_path: Path) -> None:
    """Contexts and windows that cross multiples of 512."""
    sizes = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "ffn_size": 32, "num_layers": 2}
    path = write_tiny_model(tmp_path / "long.gguf", "gemma3", sliding_window=window, **sizes)
    ids = tokens(1100)
    with open_gguf(path) as gguf:
        expected = model_twin.forward(gguf, ids)
    probes = [0, 99, 100, 511, 512, 513, 610, 611, 612, 1023, 1024, 1098]
    with running(path, threads=2, positions=1101) as runner:
        table = runner.table()
        assert_same_bits(runner.feed(table, ids, 512, probes), expected.logits[[*probes, 1099]])
        assert_same_cache(runner, table, (expected.keys, expected.values))


def test_as_many_query_heads_as_a_tile_holds_can_share_a_kv_head_and_no_more(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_kv_heads": 1, "head_dim": 16, "ffn_size": 32, "num_layers": 1}
    ids = tokens(13)
    path = write_tiny_model(tmp_path / "many.gguf", num_heads=QUERY_TILE, **sizes)
    with open_gguf(path) as gguf:
        expected = model_twin.forward(gguf, ids)
    with running(path, threads=2) as runner:
        assert_same_bits(runner.step((runner.table(), ids)), expected.logits)
    more = write_tiny_model(tmp_path / "more.gguf", num_heads=QUERY_TILE + 2, **sizes)
    with open_gguf(more) as gguf, pytest.raises(UnsupportedModelError, match=f"{QUERY_TILE + 2} query heads"):
        Model.load(gguf)


# ---------------------------------------------------------------- chunks and threads
LENGTH = 600
PROBES = [*range(0, LENGTH, 40), 63, 64, 511, 512, 513]


@every_model_and_type
def test_chunks_and_threads_do_not_show(name: str, kv_type: KVType, tiny: Callable[[str], Path]) -> None:
    ids = tokens(LENGTH)
    expected = None
    # Threads wait for each other long where other work shares the CPUs: most single rows are left to one thread, and
    # to two those before and after position 512.
    for threads, chunks, late in (
        (1, (512, 64, 7, 2, 1), 0),
        (2, (512, 64, 7), 0),
        (2, (2, 1), 490),
        (3, (512, 64), 0),
    ):
        with running(tiny(name), threads=threads, kv_type=kv_type) as runner:
            for chunk in chunks:
                table = runner.table()
                logits = [runner.feed(table, ids[:late], 512, PROBES)[:-1]] if late else []
                logits.append(runner.feed(table, ids[late:], chunk, PROBES))
                found = np.concatenate(logits), runner.cache(table)
                expected = expected or found
                assert_same_bits(found[0], expected[0])
                assert_same_cache(runner, table, expected[1])
                table.release()


@every_model
def test_rows_that_are_not_wanted_do_not_show(name: str, tiny: Callable[[str], Path]) -> None:
    ids = tokens(50)
    with running(tiny(name), threads=2) as runner:
        everything = runner.step((runner.table(), ids))
        for want in ([], [0], [49], [3, 4, 31], range(1, 50, 2), range(MAX_WANTED)[:40]):
            table = runner.table()
            assert_same_bits(runner.step((table, ids), want=want), everything[list(want)])
            # The cache is whole all the same: the next token's logits say so.
            assert_same_bits(runner.step((table, ids[:1])), runner.feed(runner.table(), [*ids, ids[0]], 51))


def test_only_the_last_row_of_a_chunk_that_crosses_a_part_is_wanted(tiny: Callable[[str], Path]) -> None:
    """Wanted rows move to the front in the last layer, and bring their own share of attention with them."""
    ids = tokens(700)
    with running(tiny("llama"), threads=2) as runner:
        expected = runner.feed(runner.table(), ids, 64)
        table = runner.table()
        runner.step((table, ids[:250]), want=[])
        assert_same_bits(runner.step((table, ids[250:]), want=[449]), expected)


def test_a_thread_that_falls_behind_does_nothing_to_the_next_step(tiny: Callable[[str], Path]) -> None:
    """It still has a finished step's number when the context already holds the rows of a larger one."""
    with running(tiny("llama"), threads=2) as runner:
        model, buffers = runner.model, runner.model.buffers
        table = runner.table()
        runner.step((table, tokens(1)))
        expected = runner.step((table.fork(), tokens(64, seed=1)))
        number = int(buffers.generation[0])
        runner.step((table.fork(), tokens(1, seed=2)))
        context = model._context[0]
        whole = int(context["num_operations"])
        context["num_rows"] = 64
        context["num_operations"] = 1  # the embedding: enough to see, and it touches nothing but x
        buffers.x.fill(7)
        assert model._workers._step(model._context.ctypes.data, 1, number) == number + 1
        assert np.all(buffers.x == 7)
        context["num_operations"] = whole
        assert_same_bits(runner.step((table.fork(), tokens(64, seed=1))), expected)


def test_more_threads_than_cpus_do_not_show_in_steps_of_any_size(tiny: Callable[[str], Path]) -> None:
    rng = np.random.default_rng(5)
    sizes = rng.choice([1, 1, 1, 2, 3, 8, 33, 64], 150).tolist()
    found = []
    for threads in (1, 2, 4, 16):
        with running(tiny("llama"), threads=threads) as runner:
            table, logits = runner.table(), []
            for n, size in enumerate(sizes):
                if len(table) > 200:
                    table.truncate(10)
                logits.append(runner.step((table, tokens(size, seed=n))))
            found.append((np.concatenate(logits), runner.cache(table)))
    for logits, cache in found[1:]:
        assert_same_bits(logits, found[0][0])
        for ours, theirs in zip(chain(*cache), chain(*found[0][1]), strict=True):
            assert_same_bits(ours, theirs)


# ---------------------------------------------------------------- other conversations
@every_model
def test_conversations_that_share_a_step_do_not_show(name: str, tiny: Callable[[str], Path]) -> None:
    texts = [tokens(150, seed=1), tokens(70, seed=2), tokens(40, seed=3)]
    # (conversation, new rows) of each step: prompts beside single tokens, in any order.
    steps = [
        [(0, 50), (1, 3)],
        [(1, 1), (0, 1)],
        [(0, 39), (2, 1), (1, 1)],
        [(2, 10), (1, 50)],
        [(1, 1), (0, 1), (2, 1)],
    ]
    steps += [[(1, 14), (0, 19), (2, 28)], [(0, 40)]]
    with running(tiny(name), threads=2) as runner:
        alone = []
        for ids in texts:
            table = runner.table()
            alone.append((runner.feed(table, ids, 64, range(200)), runner.cache(table)))
        tables = [runner.table() for _ in texts]
        for step in steps:
            rows = [(n, len(tables[n]) + i) for n, count in step for i in range(count)]
            wanted = [row for row, (_, position) in enumerate(rows) if position % 3 != 1]
            parts = [(tables[n], texts[n][len(tables[n]) : len(tables[n]) + count]) for n, count in step]
            logits = runner.step(*parts, want=wanted)
            assert_same_bits(logits, np.array([alone[n][0][position] for n, position in (rows[w] for w in wanted)]))
        for table, ids, (_, cache) in zip(tables, texts, alone):
            assert len(table) == len(ids)
            assert_same_cache(runner, table, cache)


@every_model
def test_a_forked_conversation_goes_on_as_if_it_had_never_been_another(name: str, tiny: Callable[[str], Path]) -> None:
    start, one, other = tokens(100, seed=1), tokens(40, seed=2), tokens(40, seed=3)
    with running(tiny(name), threads=2) as runner:
        expected = [runner.feed(runner.table(), [*start, *ids], 512, range(100, 140)) for ids in (one, other)]
        table = runner.table()
        runner.feed(table, start, 33)
        table.rest()
        fork = table.fork()
        # In one step, in the block that both began with.
        both = runner.step((table, one[:20]), (fork, other[:20]))
        ours = np.concatenate([both[:20], runner.feed(table, one[20:], 7, range(140))])
        theirs = np.concatenate([both[20:], runner.feed(fork, other[20:], 1, range(140))])
        assert_same_bits(ours, expected[0])
        assert_same_bits(theirs, expected[1])
        # Undone to the middle of a shared block, and said otherwise.
        table.truncate(100)
        assert_same_bits(runner.feed(table, other, 11, range(140)), expected[1])


@every_model_and_type
def test_what_a_block_held_before_does_not_show(name: str, kv_type: KVType, tiny: Callable[[str], Path]) -> None:
    ids = tokens(90)
    with running(tiny(name), threads=2, blocks=3, kv_type=kv_type) as runner:
        table = runner.table()
        clean = runner.feed(table, ids, 37, range(64, 90))
        table.release()
        runner.pool.memory[:] = 0xFF  # NaN wherever one looks
        for chunk in (37, 1, 90):
            table = runner.table()
            assert_same_bits(runner.feed(table, ids, chunk, range(64, 90)), clean)
            table.release()


def test_a_model_that_is_closed_and_freed_leaves_another_alone(tiny: Callable[[str], Path]) -> None:
    ids = tokens(20)
    with running(tiny("llama"), threads=2) as runner:
        before = runner.step((runner.table(), ids))
        for name in ("qwen3", "llama"):
            with running(tiny(name), threads=2) as other:
                other.step((other.table(), ids))
        del other
        gc.collect()
        assert_same_bits(runner.step((runner.table(), ids)), before)


# ---------------------------------------------------------------- other instructions
def checksum(folder: str) -> str:
    """Of logits and caches of all MODELS in a folder, in mixed chunks and with two threads."""
    digest = hashlib.sha256()
    for name, kv_type in [*((name, "f16") for name in MODELS), *OTHER_TYPES]:
        with running(Path(folder) / f"{name}.gguf", threads=2, kv_type=kv_type) as runner:
            table = runner.table()
            for chunk in (90, 1, 5):
                digest.update(runner.feed(table, tokens(91, seed=chunk), chunk, range(0, 300, 3)).tobytes())
            for part in chain(*runner.cache(table)):
                digest.update(part.tobytes())
    return digest.hexdigest()


def test_kernels_compiled_without_avx512_give_the_same_bits(tiny: Callable[[str], Path]) -> None:
    lesser = target_named("avx2").name
    folder = {str(tiny(name).parent) for name in MODELS}.pop()
    environment = {
        **os.environ,
        ENVIRONMENT: lesser,
        # NumPy goes without as well: tables and scales must not depend on it either.
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "PYTHONWARNINGS": "ignore",  # of features that this CPU lacks anyway
    }
    code = f"import test_forward; print(test_forward.checksum({folder!r}))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == checksum(folder)


# ---------------------------------------------------------------- a real model
@pytest.mark.parametrize("name", ["smollm2-135m"])
def test_a_real_model_keeps_the_contract(name: str, model_path: Callable[[str], Path]) -> None:
    ids, probes = tokens(160, 10_000), range(0, 160, 9)
    expected = None
    for threads, chunks in ((2, (160, 64, 7)), (1, (101, 1))):
        with running(model_path(name), threads=threads) as runner:
            for chunk in chunks:
                table = runner.table()
                found = runner.feed(table, ids, chunk, probes), runner.cache(table)
                expected = expected or found
                assert_same_bits(found[0], expected[0])
                assert_same_cache(runner, table, expected[1])


def test_a_real_model_has_the_bits_of_the_numpy_step(model_path: Callable[[str], Path]) -> None:
    path, ids = model_path("smollm2-135m"), tokens(3, 10_000)
    with open_gguf(path) as gguf:
        expected = model_twin.forward(gguf, ids)
    with running(path, threads=2) as runner:
        assert_same_bits(runner.step((runner.table(), ids)), expected.logits)
