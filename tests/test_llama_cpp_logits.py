"""Each architecture computes what llama.cpp computes: logits of tiny models beside goldens of llama.cpp.

Goldens are in data/logits. To make them again (the files themselves are not kept, they are random):
`python tests/test_llama_cpp_logits.py FOLDER`, `PEER/bin/python tests/write_llama_cpp_logits.py FOLDER`, and copy
FOLDER/*.json. All is f32 here, so what is left is the order of sums, and GELU, which llama.cpp reads from a table of
f16 numbers.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forward_runner import running, tokens
from tiny_gemma4 import Gemma4, expert_shapes
from tiny_models import ARCHITECTURES, write_tiny_model

from engine import arch
from engine.quant import TensorType

GOLDENS = Path(__file__).parent / "data" / "logits"
PROBES = (0, 1, 20, 33, 60, 69)
LONG_PROBES = (69, 8191, 8192, 8193, 8299)
VOCABULARY_STEP = 5
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_size": 96,
    "num_layers": 4,
    "tensor_types": TensorType.F32,
}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 64}
FACTORS = np.geomspace(1, 8, 8).tolist()
LAYERED = {"num_kv_heads": 1, "head_dim": 64, "rope_base": 1e5, "rope_factors": [1.0] * 8 + [1e30] * 24}
DEEP = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 32}


def with_keys(architecture: str, keys: dict[str, Any], **settings: Any) -> dict[str, Any]:
    metadata = {f"{architecture}.{key}": value for key, value in keys.items()}
    return {"architecture": architecture, "metadata": metadata, **settings}


# One by the name of each architecture, and what files of it may have beside.
CASES: dict[str, dict[str, Any]] = {
    **{name: {"architecture": name} for name in ARCHITECTURES},
    "gemma3": {"architecture": "gemma3", "num_layers": 7, "rope_base": 1e6},
    "gemma3-local-base": with_keys("gemma3", {"rope.freq_base_swa": 500.0}, num_layers=7, rope_base=1e6),
    # By the number of layers llama.cpp tells the models that scale scores by another size than the head's.
    "gemma3-wide": {"architecture": "gemma3", **DEEP, "num_layers": 62},
    "gemma2-wide": {"architecture": "gemma2", **DEEP, "num_layers": 46},
    "gemma4": with_keys("gemma4", {}, **LAYERED, num_layers=6, gemma4=Gemma4(local_kv_heads=1, shared=3, embedding=32)),
    "gemma4-larger": {
        "architecture": "gemma4",
        **LAYERED,
        "gemma4": Gemma4(keys_are_values=True),
        "metadata": {"tokenizer.ggml.suppress_tokens": [6, 8, 301]},  # none of which is looked at
    },
    "gemma4-experts": with_keys(
        "gemma4", {}, **LAYERED, experts=6, expert_ffn_size=64, gemma4=Gemma4(keys_are_values=True)
    ),
    "gemma4-some-experts": with_keys(
        "gemma4",
        {},
        **LAYERED,
        experts=6,
        expert_ffn_size=64,
        gemma4=Gemma4(keys_are_values=True),
        tensors=dict.fromkeys(f"blk.{n}.{name}" for n in (1, 2) for name in expert_shapes(64, 6, 64)),
    ),
    # So large that it shows how branches are scaled.
    "granite-epsilon": with_keys("granite", {"attention.layer_norm_rms_epsilon": 0.05}),
    "llama-linear-old": with_keys("llama", {"rope.scale_linear": 4.0}),
    "olmo2": {"architecture": "olmo2", "tied": False},
    "olmo2-windows-yarn": with_keys(
        "olmo2", {**YARN, "rope.scaling.attn_factor": 1.1}, tied=False, num_layers=5, sliding_window=32
    ),
    "phi3": {"architecture": "phi3", "rope_factors": FACTORS, "context_size": 512},
    "phi3-long": {"architecture": "phi3", "rope_factors": FACTORS},
    "phi3-partial": with_keys("phi3", {"rope.dimension_count": 16}, head_dim=48, hidden_size=192),
    "starcoder2": {"architecture": "starcoder2"},
    "stablelm": with_keys("stablelm", {"rope.dimension_count": 8}, tied=False),
    "stablelm-parallel": with_keys(
        "stablelm",
        {"use_parallel_residual": True, "rope.dimension_count": 8},
        tied=False,
        tensors={
            f"blk.{layer}.{name}": array
            for layer in range(4)
            for name, array in {
                "ffn_norm.weight": None,
                "ffn_norm.bias": None,
                "attn_q_norm.weight": np.linspace(0.5, 1.5, 64).reshape(4, 16),
                "attn_k_norm.weight": np.linspace(1.5, 0.5, 32).reshape(2, 16),
            }.items()
        },
    ),
    "phi2": with_keys("phi2", {"rope.dimension_count": 12}, tied=False, num_kv_heads=4),
    "nemotron": with_keys("nemotron", {"rope.dimension_count": 8}, tied=False),
    "glm4": with_keys("glm4", {"rope.dimension_count": 8}, tied=False),
    "glm4moe": with_keys("glm4moe", {"rope.dimension_count": 8}, tied=False, expert_ffn_size=64),
    "glm4moe-soft": with_keys(
        "glm4moe", {"expert_gating_func": 1, "expert_weights_norm": False}, tied=False, expert_ffn_size=64
    ),
    "lfm2moe": {"architecture": "lfm2moe", "expert_ffn_size": 64, "experts": 9},
    "llama4": {"architecture": "llama4", "expert_ffn_size": 64, "rope_factors": FACTORS, "num_layers": 5},
    # Beyond the first chunk, which llama.cpp ends at 8192 whatever a file says.
    "llama4-chunks": {
        "architecture": "llama4",
        "context_size": 8448,
        "hidden_size": 32,
        "num_heads": 2,
        "num_kv_heads": 1,
        "ffn_size": 32,
        "expert_ffn_size": 32,
    },
    "granitehybrid-experts": with_keys(
        "granitehybrid", {"rope.scaling.finetuned": True}, experts=6, shared_ffn_size=32, num_layers=6
    ),
    "granite-unrotated": with_keys("granite", {"rope.scaling.finetuned": False}),
    "minicpm-old": with_keys("minicpm", dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"))),
    "ernie4_5-moe": {"architecture": "ernie4_5-moe", "expert_ffn_size": 64},
    "hunyuan-moe": {"architecture": "hunyuan-moe", "tied": False},
    "bailingmoe": {"architecture": "bailingmoe", "tied": False, "expert_ffn_size": 64},
    "bailingmoe2": {"architecture": "bailingmoe2", "tied": False, "expert_ffn_size": 64},
    "dots1": {"architecture": "dots1", "tied": False, "num_kv_heads": 4, "expert_ffn_size": 64},
    "minimax-m2": with_keys("minimax-m2", {"rope.dimension_count": 8}, tied=False),
    "mellum": {"architecture": "mellum", "expert_ffn_size": 64, "tied": False},
    "mellum-windows-yarn": with_keys("mellum", YARN, expert_ffn_size=64, tied=False, num_layers=5, sliding_window=32),
    "exaone-moe": {"architecture": "exaone-moe", "expert_ffn_size": 64, "num_layers": 5, "tied": False},
    "qwen3vlmoe": {"architecture": "qwen3vlmoe", "expert_ffn_size": 64},
    "chatglm": with_keys("chatglm", {"rope.dimension_count": 8}, tied=False),
    "exaone": with_keys("exaone", {"rope.dimension_count": 16}, rope_factors=FACTORS),
    # llama.cpp looks for windows in a model of 64 layers only.
    "exaone4-windows": {
        "architecture": "exaone4",
        "sliding_window": 32,
        "num_layers": 64,
        "hidden_size": 32,
        "num_heads": 2,
        "num_kv_heads": 1,
        "ffn_size": 32,
    },
    "internlm2": {"architecture": "internlm2", "tied": False},
    "mistral3": with_keys(
        "mistral3",
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 16.0,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
            "rope.scaling.yarn_log_multiplier": 1.0,
        },
    ),
    # Biases so large that gates and what they multiply are clipped.
    "gpt-oss": with_keys(
        "gpt-oss",
        {**YARN, "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
        tied=False,
        expert_ffn_size=64,
        tensors={
            f"blk.{layer}.ffn_{name}_exps.bias": sign * np.linspace(-9, 9, 6 * 64).reshape(6, 64)
            for layer in range(4)
            for name, sign in (("gate", 1), ("up", -1))
        },
    ),
    "llama-linear": with_keys("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "llama-factors": {"architecture": "llama", "rope_factors": FACTORS},
    "mixtral": {"architecture": "llama", "experts": 8},
    "qwen2moe": {"architecture": "qwen2moe", "tied": False, "expert_ffn_size": 64, "experts_used": 4},
    "qwen3moe": {"architecture": "qwen3moe", "expert_ffn_size": 64, "experts": 9},
    "olmoe": {"architecture": "olmoe", "tied": False, "num_kv_heads": 4},
    "granitemoe-shared": {"architecture": "granitemoe", "shared_ffn_size": 64},
    "qwen2-yarn": with_keys("qwen2", YARN, head_dim=32, hidden_size=128),
    "qwen35": {"architecture": "qwen35", "head_dim": 32},
    "qwen35moe": {"architecture": "qwen35moe", "head_dim": 32, "tied": False, "expert_ffn_size": 64},
    "qwen3next": {"architecture": "qwen3next", "head_dim": 32, "delta": (2, 6, 32), "experts_used": 3},
    "qwen35-many": {"architecture": "qwen35", "head_dim": 32, "num_layers": 6, "delta": (1, 5, 64), "tied": False},
}


def write(folder: Path, name: str) -> Path:
    settings = {**SIZES, "context_size": 1024, **CASES[name]}
    # A name with "phi3" makes llama.cpp look for tokens of that model.
    metadata = {"general.name": "Tiny", **settings.pop("metadata", {})}
    return write_tiny_model(folder / f"{name}.gguf", metadata=metadata, **settings)


def context_size(name: str) -> int:
    return int(CASES[name].get("context_size", 1024))


def ids_and_probes(name: str) -> tuple[np.ndarray, tuple[int, ...]]:
    return (tokens(8300), LONG_PROBES) if context_size(name) > 8192 else (tokens(70), PROBES)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def bound_of(name: str) -> float:
    """Share of the spread of logits. Measured: up to 1e-5, with GELU 1.3e-3 (46 layers: 2.5e-3), with sections 8e-5, at
    position 8,000, where an angle in f32 is off by 5e-4, 1.4e-4."""
    spec = arch.ARCHITECTURES[CASES[name]["architecture"]]
    if spec.activation == "gelu":
        return 4e-3 if CASES[name].get("num_layers", 4) > 40 else 2e-3
    # There llama.cpp multiplies f32 angles from pair to pair.
    return 2e-4 if spec.rope_sections or context_size(name) > 8192 else 5e-5


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    path, golden = write(tmp_path, name), json.loads((GOLDENS / f"{name}.json").read_text())
    assert sha256(path) == golden["sha256"], "the random model is another one than the goldens are of"
    expected = np.array(golden["logits"])
    ids, probes = ids_and_probes(name)
    with running(path, positions=context_size(name), kv_type="f32", blocks=-(-len(ids) // 64)) as runner:
        found = runner.feed(runner.table(), ids, 512, probes)[:, ::VOCABULARY_STEP]
    assert expected.std() > 0.3
    assert np.abs(found - expected).max() < bound_of(name) * expected.std()


def test_every_architecture_has_goldens() -> None:
    assert {CASES[name]["architecture"] for name in CASES} == set(arch.ARCHITECTURES)


if __name__ == "__main__":
    for case in CASES:
        target = Path(sys.argv[1])
        file = write(target, case)
        ids, probes = ids_and_probes(case)
        asked = {
            "file": file.name,
            "sha256": sha256(file),
            "ids": ids.tolist(),
            "probes": probes,
            "vocabulary_step": VOCABULARY_STEP,
            "context_size": context_size(case),
        }
        file.with_suffix(".case").write_text(json.dumps(asked))
