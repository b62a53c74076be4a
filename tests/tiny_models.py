"""Random models of a few layers, as valid GGUF files: `write_tiny_model(path, "qwen3", tensor_types=TensorType.Q4_K)`.

The words make no sense and everything else is real: tensor names and metadata keys as llama.cpp's converter writes
them, a vocabulary that covers every text, a chat template, blocks of any supported type. The same seed gives the
same file.
"""

from __future__ import annotations

import fnmatch
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import gguf
import numpy as np
from numpy.typing import NDArray
from tiny_gemma4 import Gemma4, expert_shapes
from tiny_vocab import bpe_metadata, spm_metadata

from engine.quant import TensorType, block_shape, dequantize

Architecture = Literal[
    "llama", "qwen2", "qwen3", "gemma2", "gemma3", "granite", "smollm3", "olmo2", "phi3",
    "starcoder2", "stablelm", "phi2", "nemotron", "command-r", "cohere2", "gemma", "glm4", "exaone4", "seed_oss",
    "internlm2", "arcee", "ernie4_5", "qwen2vl", "qwen3vl", "mistral3", "qwen2moe", "qwen3moe", "granitemoe", "olmoe",
    "qwen35", "qwen35moe", "qwen3next", "gpt-oss", "exaone", "chatglm", "hunyuan-dense",
    "gemma4", "qwen3vlmoe", "glm4moe", "lfm2", "lfm2moe", "llama4", "ernie4_5-moe", "hunyuan-moe", "bailingmoe",
    "bailingmoe2", "dots1", "minimax-m2", "granitehybrid", "minicpm", "mellum", "exaone-moe",
]  # fmt: skip
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)

_PRE = {
    "llama": "smollm",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2",
    "qwen35moe": "qwen2",
    "qwen3next": "qwen2",
    "qwen3": "qwen2",
    "qwen3moe": "qwen2",
    "qwen35": "qwen2",
}
_PLAIN_SHARED = ("exaone-moe", "glm4moe", "llama4", "ernie4_5-moe", "hunyuan-moe", "bailingmoe", "bailingmoe2", "dots1")
"""Have an expert that every row passes."""
_CHOICE_BIASED = ("exaone-moe", "glm4moe", "lfm2moe", "ernie4_5-moe", "bailingmoe2", "dots1", "minimax-m2")
_MIXTURES = (
    "qwen2moe", "qwen3moe", "qwen3vlmoe", "granitemoe", "olmoe", "qwen35moe", "qwen3next", "gpt-oss", "lfm2moe",
    "minimax-m2", "mellum", *_PLAIN_SHARED,
)  # fmt: skip
"""Always have experts."""
_GATED_SHARED = ("qwen2moe", "qwen35moe", "qwen3next")  # and one that every row passes, times a factor
_GEMMAS = ("gemma", "gemma2", "gemma3", "gemma4")
_SANDWICHED = ("gemma2", "gemma3", "gemma4", "olmo2", "glm4", "exaone4")  # have norms after branches
_CENTRED = ("starcoder2", "stablelm", "phi2", "nemotron", "command-r", "cohere2")  # have LayerNorm
_UNGATED = ("starcoder2", "phi2", "nemotron", "arcee")
_BIASED = ("starcoder2", "phi2")  # have biases everywhere
_QKV_BIASED = ("qwen2", "qwen2moe", "qwen2vl", "stablelm", "glm4", "glm4moe", "seed_oss", "starcoder2", "gpt-oss")
_HEAD_NORMED = (
    "hunyuan-dense",
    "qwen3",
    "qwen3moe",
    "qwen3vl",
    "gemma3",
    "exaone4",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "qwen3vlmoe",
    "glm4moe",
    "lfm2",
    "lfm2moe",
    "hunyuan-moe",
    "bailingmoe2",
    "dots1",
    "mellum",
    "exaone-moe",
)
_CONVOLUTIONS = ("lfm2", "lfm2moe")  # have layers that are short convolutions
_DELTAS = ("qwen35", "qwen35moe", "qwen3next")  # have layers with a running state
_WITH_VOCAB_SIZE = (
    "llama",
    "granite",
    "granitemoe",
    "granitehybrid",
    "minicpm",
    "smollm3",
    "phi3",
    *_CENTRED,
    "internlm2",
    "arcee",
    "ernie4_5",
    "mistral3",
    "llama4",
    "ernie4_5-moe",
    "bailingmoe",
)
# Metadata that only one architecture has. The factors are unlike those of real files, so that each shows.
_EXTRA_KEYS: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    "granite": {"embedding_scale": 3.0, "residual_scale": 0.3, "attention.scale": 0.2, "logit_scale": 0.7},
    "granitemoe": {"embedding_scale": 3.0, "residual_scale": 0.3, "attention.scale": 0.2, "logit_scale": 0.7},
    "phi3": {"rope.scaling.original_context_length": 512, "rope.scaling.attn_factor": 1.2},
    "mistral3": {"attention.temperature_scale": 0.3, "rope.scaling.original_context_length": 16},
    "command-r": {"logit_scale": 0.6},
    "cohere2": {"logit_scale": 0.6},
    "qwen2vl": {"rope.dimension_sections": [2, 3, 3, 0]},
    "qwen3vl": {"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 0},
    "qwen3vlmoe": {"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 0},
    "glm4moe": {
        "leading_dense_block_count": 1,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
    },
    "lfm2": {"shortconv.l_cache": 3},
    "lfm2moe": {"shortconv.l_cache": 3, "leading_dense_block_count": 1, "expert_gating_func": 2},
    "llama4": {"interleave_moe_layer_step": 2},
    "ernie4_5-moe": {"leading_dense_block_count": 1, "interleave_moe_layer_step": 1},
    "bailingmoe": {"leading_dense_block_count": 0, "expert_shared_count": 1, "expert_weights_norm": True},
    "bailingmoe2": {
        "leading_dense_block_count": 1,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
    },
    "dots1": {
        "leading_dense_block_count": 1,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": False,
        "expert_weights_scale": 0.5,
    },
    "minimax-m2": {"expert_gating_func": 2},
    "exaone-moe": {
        "leading_dense_block_count": 1,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
    },
    "minicpm": {"embedding_scale": 3.0, "residual_scale": 0.3, "logit_scale": 0.7},
    "granitehybrid": {
        "embedding_scale": 3.0,
        "residual_scale": 0.3,
        "attention.scale": 0.2,
        "logit_scale": 0.7,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": 4,
        "ssm.group_count": 2,
        "ssm.state_size": 16,
    },
}
_DELTA_INTERVAL = 3
"""Every third layer has attention, unlike in real files, and the last one of four has not."""
# Byte offsets of the float16 scale and minimum in a block, for types that `gguf` cannot quantize.
_SCALE_OFFSETS = {
    TensorType.Q2_K: (80, 82),
    TensorType.Q3_K: (108,),
    TensorType.Q4_K: (0, 2),
    TensorType.Q5_K: (0, 2),
    TensorType.Q6_K: (208,),
    TensorType.IQ4_NL: (0,),
    TensorType.IQ4_XS: (0,),
}
# The minimum, in units of the scale, that centres random integers on zero: the middle of q.
_CENTRE = {TensorType.Q2_K: 1.5, TensorType.Q4_K: 7.5, TensorType.Q5_K: 15.5}


def random_blocks(
    type: TensorType, shape: tuple[int, ...], rng: np.random.Generator, *, std: float = 0.05
) -> NDArray[np.uint8]:
    """Valid blocks [..., row bytes] of weights [..., K] with mean near 0 and about this standard deviation."""
    span, size = block_shape(type)
    assert shape[-1] % span == 0, f"{shape[-1]} values are not whole blocks of {type.name}"
    if type not in _SCALE_OFFSETS:
        values = rng.normal(0.0, std, shape).astype(np.float32)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType(int(type))).view(np.uint8)
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // span, size), dtype=np.uint8)
    spread = rng.uniform(0.5, 1.5, blocks.shape[:-1])

    def set_scales(scale: float) -> None:
        for offset, factor in zip(_SCALE_OFFSETS[type], (1.0, _CENTRE.get(type, 0.0)), strict=False):
            halves = (scale * factor * spread).astype("<f2")[..., None]
            blocks[..., offset : offset + 2] = halves.view(np.uint8)

    set_scales(1.0)
    set_scales(std / float(dequantize(type, blocks).std()))
    return blocks.reshape(*shape[:-1], -1)


def _type_of(name: str, types: TensorType | Mapping[str, TensorType]) -> TensorType:
    if ".ffn_gate_inp" in name:
        return TensorType.F32  # as the converter keeps routers
    if isinstance(types, TensorType):
        return types
    return next((type for pattern, type in types.items() if fnmatch.fnmatchcase(name, pattern)), TensorType.Q8_0)


def _matrices_and_vectors(
    architecture: Architecture,
    *,
    num_layers: int,
    hidden: int,
    q_size: int,
    kv_size: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    tied: bool,
    experts: int,
    expert_ffn: int,
    shared_ffn: int,
    delta: tuple[int, int, int],
    gemma4: Gemma4,
) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape (rows, columns) or (length,), in the order of a converted file."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden)}
    for layer in range(num_layers):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (q_size, hidden),
            "attn_k.weight": (kv_size, hidden),
            "attn_v.weight": (kv_size, hidden),
            "attn_output.weight": (hidden, q_size),
            "ffn_norm.weight": (hidden,),
            "ffn_gate.weight": (ffn, hidden),
            "ffn_up.weight": (ffn, hidden),
            "ffn_down.weight": (hidden, ffn),
        }
        if architecture in _QKV_BIASED:
            block |= {"attn_q.bias": (q_size,), "attn_k.bias": (kv_size,), "attn_v.bias": (kv_size,)}
        if architecture in _HEAD_NORMED:
            block |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
        if architecture in ("olmo2", "olmoe", "minimax-m2"):
            block |= {"attn_q_norm.weight": (q_size,), "attn_k_norm.weight": (kv_size,)}
        if architecture in ("olmo2", "exaone4"):
            del block["attn_norm.weight"], block["ffn_norm.weight"]
        if architecture in _SANDWICHED:
            block |= {"post_attention_norm.weight": (hidden,), "post_ffw_norm.weight": (hidden,)}
        if architecture in ("seed_oss", "gpt-oss", "glm4moe"):
            block["post_attention_norm.weight"] = block.pop("ffn_norm.weight")
        if architecture in ("phi2", "command-r", "cohere2"):
            del block["ffn_norm.weight"]
        if architecture in ("phi2", "phi3", "chatglm", "bailingmoe2"):
            block["attn_qkv.weight"] = (q_size + 2 * kv_size, hidden)
            for name in ("attn_q", "attn_k", "attn_v"):
                del block[f"{name}.weight"]
        if architecture in ("phi3", "glm4", "chatglm"):
            block["ffn_up.weight"] = (2 * ffn, hidden)
        if architecture in ("phi3", "glm4", "chatglm", *_UNGATED):
            del block["ffn_gate.weight"]
        if architecture in _CENTRED and not architecture.startswith("co"):
            block |= {f"{norm}.bias": (hidden,) for norm in ("attn_norm", "ffn_norm") if f"{norm}.weight" in block}
        if architecture in _BIASED:
            block |= {"attn_output.bias": (hidden,), "ffn_up.bias": (ffn,), "ffn_down.bias": (hidden,)}
        if architecture in ("phi2", "chatglm"):
            block["attn_qkv.bias"] = (q_size + 2 * kv_size,)
        if architecture == "gemma4":
            for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
                del block[f"{name}.weight"]
            own = gemma4.block(layer, num_layers, hidden, q_size // head_dim, head_dim, kv_size // head_dim)
            wide = 1 if gemma4.has_keys(layer, num_layers) else 2
            block |= own | {f"ffn_{name}.weight": (wide * ffn, hidden) for name in ("gate", "up")}
            block |= {
                "ffn_down.weight": (hidden, wide * ffn),
                **(expert_shapes(hidden, experts, expert_ffn) if experts else {}),
            }
        elif experts and _has_experts(architecture, layer):
            if architecture in _CHOICE_BIASED:
                block["exp_probs_b.bias"] = (experts,)
            block |= {
                "ffn_gate_inp.weight": (experts, hidden),
                "ffn_gate_exps.weight": (experts, expert_ffn, hidden),
                "ffn_up_exps.weight": (experts, expert_ffn, hidden),
                "ffn_down_exps.weight": (experts, hidden, expert_ffn),
            }
            for name in ("ffn_gate", "ffn_up", "ffn_down"):
                del block[f"{name}.weight"]
                shape = (hidden, shared_ffn) if name == "ffn_down" else (shared_ffn, hidden)
                block |= {f"{name}_shexp.weight": shape} if shared_ffn else {}
            if architecture == "gpt-oss":
                block |= {
                    "attn_sinks.weight": (q_size // head_dim,),
                    "attn_output.bias": (hidden,),
                    "ffn_gate_inp.bias": (experts,),
                    "ffn_gate_exps.bias": (experts, expert_ffn),
                    "ffn_up_exps.bias": (experts, expert_ffn),
                    "ffn_down_exps.bias": (experts, hidden),
                }
            block |= {"ffn_gate_inp_shexp.weight": (hidden,)} if architecture in _GATED_SHARED else {}
        if architecture in _DELTAS:
            block["attn_q.weight"] = (2 * q_size, hidden)
            block["post_attention_norm.weight"] = block.pop("ffn_norm.weight")
        if architecture in _DELTAS and (layer + 1) % _DELTA_INTERVAL:
            attention = [name for name in block if name.startswith("attn_") and name != "attn_norm.weight"]
            block = {name: shape for name, shape in block.items() if name not in attention}
            block |= _delta_shapes(hidden, *delta, interleaved=architecture == "qwen3next")
        if architecture in _CONVOLUTIONS and (layer + 1) % _DELTA_INTERVAL:
            block = {name: shape for name, shape in block.items() if not name.startswith("attn_")} | {
                "attn_norm.weight": (hidden,),
                "shortconv.conv.weight": (hidden, 3),
                "shortconv.in_proj.weight": (3 * hidden, hidden),
                "shortconv.out_proj.weight": (hidden, hidden),
            }
        if architecture == "granitehybrid" and (layer + 1) % _DELTA_INTERVAL:
            block = {name: shape for name, shape in block.items() if not name.startswith("attn_")}
            block |= _scan_shapes(hidden)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    if architecture == "gemma4":
        shapes |= gemma4.others(num_layers, hidden, vocab)
    shapes["token_embd_norm.weight" if architecture in _CONVOLUTIONS else "output_norm.weight"] = (hidden,)
    if architecture in _CENTRED and not architecture.startswith("co"):
        shapes["output_norm.bias"] = (hidden,)
    if architecture == "phi2":
        shapes["output.bias"] = (vocab,)
    if not tied:
        shapes["output.weight"] = (vocab, hidden)
    return shapes


def _scan_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """Of a state space layer with heads of 32 values, two groups of keys of 16 numbers, and twice as many values as the
    stream has."""
    values, keys = 2 * hidden, 2 * 16
    heads, channels = values // 32, values + 2 * keys
    return {
        "attn_norm.weight": (hidden,),
        "ssm_in.weight": (values + channels + heads, hidden),
        "ssm_conv1d.weight": (channels, 4),
        "ssm_conv1d.bias": (channels,),
        "ssm_dt.bias": (heads,),
        "ssm_a": (heads, 1),
        "ssm_d": (heads, 1),
        "ssm_norm.weight": (2, values // 2),
        "ssm_out.weight": (hidden, values),
    }


def _has_experts(architecture: Architecture, layer: int) -> bool:
    keys = _EXTRA_KEYS.get(architecture, {})
    every = keys.get("interleave_moe_layer_step", 1)
    return bool(layer >= keys.get("leading_dense_block_count", 0) and (layer + 1) % every == 0)


def _delta_shapes(
    hidden: int, key_heads: int, value_heads: int, dim: int, interleaved: bool
) -> dict[str, tuple[int, ...]]:
    """Of a layer with a running state, beside norms and the feed-forward layer."""
    channels = (2 * key_heads + value_heads) * dim
    factors = {"ssm_ba": 2 * value_heads} if interleaved else {"ssm_beta": value_heads, "ssm_alpha": value_heads}
    return {
        "attn_qkv.weight": (channels, hidden),
        "attn_gate.weight": (value_heads * dim, hidden),
        "ssm_conv1d.weight": (channels, 4),
        "ssm_dt.bias": (value_heads,),
        "ssm_a": (value_heads,),
        **{f"{name}.weight": (rows, hidden) for name, rows in factors.items()},
        "ssm_norm.weight": (dim,),
        "ssm_out.weight": (hidden, value_heads * dim),
    }


def _write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[TensorType, NDArray[np.uint8]]],
    split_max_tensors: int,
) -> Path:
    writer = gguf.GGUFWriter(path, metadata["general.architecture"], split_max_tensors=split_max_tensors)
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    for key, value in metadata.items():
        if key != "general.architecture":
            writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])
    for name, (tensor_type, raw) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType(int(tensor_type)))
    paths = writer.format_shard_names(path)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return paths[0]


def _vocabulary(
    architecture: Architecture, kind: Literal["bpe", "spm"] | None, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """Its keys, replaced by those of `metadata`."""
    if (kind or ("spm" if architecture in _GEMMAS else "bpe")) == "spm":
        vocabulary = spm_metadata(gemma=architecture in _GEMMAS)
    else:
        vocabulary = bpe_metadata(_PRE.get(architecture, "smollm"))
    return vocabulary | {key: value for key, value in metadata.items() if key.startswith("tokenizer.ggml.")}


def _random_tensor(
    name: str,
    shape: tuple[int, ...],
    architecture: Architecture,
    seed: int,
    tensor_types: TensorType | Mapping[str, TensorType],
) -> tuple[TensorType, NDArray[np.uint8]]:
    """Its type and its bytes. Seeded by name: they do not depend on which other tensors the file has."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith(("ssm_a", "ssm_d")) and len(shape) > 1:
        column = np.linspace(0.3, 1.5, *shape[:1])
        column = -np.geomspace(0.05, 4.0, *shape[:1]) if name.endswith("ssm_a") else column
        return TensorType.F32, column[:, None].astype("<f4").view(np.uint8)
    if len(shape) == 1 or name.endswith((".bias", "ssm_norm.weight")):
        middle = 0.0 if name.endswith((".bias", "shexp.weight")) else 1.0
        vector = rng.normal(middle, 0.1, shape).astype("<f4")
        if architecture == "gemma4" and name.endswith("attn_q_norm.weight"):
            vector *= np.float32(shape[0] ** -0.5)  # since scores are not scaled
        if name.endswith("ssm_a"):
            vector = -np.geomspace(0.05, 4.0, *shape).astype("<f4")  # from long memories to short ones
        return TensorType.F32, vector.view(np.uint8)
    if name.endswith(("ssm_conv1d.weight", "shortconv.conv.weight")):
        return TensorType.F32, rng.normal(0.0, 0.5, shape).astype("<f4").view(np.uint8)
    # Rows of about length 1 keep activations near their size; embeddings twice that, so that logits differ.
    std = (2.0 if name in ("token_embd.weight", "output.weight") else 1.0) / shape[-1] ** 0.5
    tensor_type = _type_of(name, tensor_types)
    return tensor_type, random_blocks(tensor_type, shape, rng, std=std)


def _rope_tensors(
    architecture: Architecture, factors: Sequence[float] | None, head_dim: int
) -> dict[str, NDArray[np.float32] | None]:
    if factors is None:
        return {}
    array = np.array(factors, np.float32)
    if architecture == "phi3":
        return {"rope_factors_long.weight": array, "rope_factors_short.weight": np.sqrt(array)}
    assert len(factors) == head_dim // 2
    return {"rope_freqs.weight": array}


def write_tiny_model(
    path: Path,
    architecture: Architecture = "llama",
    *,
    seed: int = 0,
    num_layers: int = 2,
    hidden_size: int = 256,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    ffn_size: int = 512,
    context_size: int = 2048,
    sliding_window: int | None = None,
    rope_base: float = 10000.0,
    rope_factors: Sequence[float] | None = None,
    tied: bool = True,
    delta: tuple[int, int, int] = (2, 4, 32),
    gemma4: Gemma4 | None = None,
    vocab: Literal["bpe", "spm"] | None = None,
    tensor_types: TensorType | Mapping[str, TensorType] = TensorType.Q8_0,
    tensors: Mapping[str, NDArray[np.float32] | None] | None = None,
    metadata: Mapping[str, Any] | None = None,
    split_max_tensors: int = 0,
    experts: int | None = None,
    experts_used: int = 2,
    expert_ffn_size: int | None = None,
    shared_ffn_size: int | None = None,
) -> Path:
    """Write the model and return its path, of the first shard when `split_max_tensors` makes it a split set.

    `tensor_types`: one type for all matrices, or {fnmatch pattern of names: type}, first match, Q8_0 for the rest.
    Vectors are F32. hidden_size, ffn_size and num_heads * head_dim are whole blocks of the types used (256 values for
    K-quants and IQ4_XS, else 32). `rope_factors`: one for each rotated pair, as Llama 3 has them; phi3 has them for
    long contexts, and their square roots for short ones. `sliding_window`: 32 where there always is one. `vocab`: SPM
    for Gemmas, byte-level BPE for the rest. `delta`: key heads, value heads and head size of a running state.
    `gemma4`: by default embeddings for each layer, every second one sees everything, and the first two have keys.
    `tensors` replaces tensors by F32 ones, or leaves them out (None).
    `experts`: 6 where the architecture has some, and for llama as many as are asked for; `expert_ffn_size` is their
    size, and `shared_ffn_size` that of the shared one: for Qwen's that have one, and for granitemoe where it is given.
    `metadata` adds or replaces keys, or leaves them out (None): a chat template is the key "tokenizer.chat_template".
    """
    vocabulary = _vocabulary(architecture, vocab, metadata or {})
    vocab_size = len(vocabulary["tokenizer.ggml.tokens"])

    experts = (6 if architecture in _MIXTURES else 0) if experts is None else experts
    expert_ffn_size = expert_ffn_size or ffn_size
    if architecture in _PLAIN_SHARED:
        shared_ffn_size = shared_ffn_size or expert_ffn_size
    shared_ffn_size = shared_ffn_size or (ffn_size if architecture in _GATED_SHARED else 0)

    gemma4 = gemma4 or Gemma4(every=2, shared=max(0, num_layers - 2), embedding=32)
    keys: dict[str, Any] = {
        "context_length": context_size,
        "embedding_length": hidden_size,
        "block_count": num_layers,
        "feed_forward_length": ffn_size,
        "attention.head_count": num_heads,
        "attention.head_count_kv": num_kv_heads,
        f"attention.layer_norm_{'' if architecture in _CENTRED else 'rms_'}epsilon": 1e-6,
        "rope.freq_base": rope_base,
    }
    if architecture in _WITH_VOCAB_SIZE:
        keys |= {"vocab_size": vocab_size, "rope.dimension_count": head_dim}
    if (
        architecture in ("qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "gpt-oss", *_GEMMAS, *_DELTAS)
        or head_dim * num_heads != hidden_size
    ):
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if architecture in _DELTAS:
        keys |= {"full_attention_interval": _DELTA_INTERVAL, "rope.dimension_count": head_dim // 2}
        # Of the rotated pairs, every third has the position in time, the others those in an image: one for text.
        if architecture != "qwen3next":
            keys |= {"rope.dimension_sections": [len(range(n, head_dim // 4, 3)) for n in range(3)] + [0]}
        keys |= {"ssm.conv_kernel": 4, "ssm.group_count": delta[0], "ssm.time_step_rank": delta[1]}
        keys |= {"ssm.state_size": delta[2], "ssm.inner_size": delta[1] * delta[2]}
    if sliding_window is None and architecture in ("gemma2", "gemma3", "gemma4", "cohere2", "gpt-oss", "exaone-moe"):
        sliding_window = 32
    if sliding_window is not None:
        keys["attention.sliding_window"] = sliding_window
    if experts:
        keys |= {"expert_count": experts, "expert_used_count": experts_used}
        own = ("qwen2moe", "qwen3moe", "qwen3vlmoe", "gpt-oss", "gemma4", "lfm2moe", "minimax-m2", "mellum")
        if architecture in (*own, *_DELTAS, *_PLAIN_SHARED):
            keys["expert_feed_forward_length"] = expert_ffn_size
        else:
            keys["feed_forward_length"] = expert_ffn_size
        if shared_ffn_size:
            keys["expert_shared_feed_forward_length"] = shared_ffn_size
    if architecture == "granitehybrid":
        keys |= {"ssm.inner_size": 2 * hidden_size, "ssm.time_step_rank": 2 * hidden_size // 32}
    if architecture in (*_CONVOLUTIONS, "granitehybrid"):
        counts = [0 if (n + 1) % _DELTA_INTERVAL else num_kv_heads for n in range(num_layers)]
        keys["attention.head_count_kv"] = counts
    if architecture == "gemma4":
        keys |= gemma4.keys(num_layers, head_dim, num_kv_heads, ffn_size)
    keys |= _EXTRA_KEYS.get(architecture, {})
    values: dict[str, Any] = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": f"Tiny {architecture}",
        **{f"{architecture}.{key}": value for key, value in keys.items()},
        **vocabulary,
        "general.quantization_version": 2,
        **(metadata or {}),
    }

    shapes = _matrices_and_vectors(
        architecture,
        num_layers=num_layers,
        hidden=hidden_size,
        q_size=num_heads * head_dim,
        kv_size=num_kv_heads * head_dim,
        head_dim=head_dim,
        ffn=ffn_size,
        vocab=vocab_size,
        tied=tied,
        experts=experts,
        expert_ffn=expert_ffn_size,
        shared_ffn=shared_ffn_size,
        delta=delta,
        gemma4=gemma4,
    )
    stored = {name: _random_tensor(name, shape, architecture, seed, tensor_types) for name, shape in shapes.items()}
    extra = dict(tensors or {}) | _rope_tensors(architecture, rope_factors, head_dim)
    stored |= {
        name: (TensorType.F32, np.ascontiguousarray(array, "<f4").view(np.uint8))
        for name, array in extra.items()
        if array is not None
    }
    stored = {name: tensor for name, tensor in stored.items() if extra.get(name, ...) is not None}
    return _write(path, {key: value for key, value in values.items() if value is not None}, stored, split_max_tensors)
