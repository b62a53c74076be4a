"""Architectures as data: one row each, and the configuration a GGUF file gives it.

A row says only what cannot be read from the file: how heads are rotated, which norms there are, the activation
function. Sizes, biases and tied embeddings are the file's. docs/architecture.md says how to add a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf_file import GGUFFile
from engine.kernels.plan import DELTA_COLUMNS, QUERY_TILE, TAPS
from engine.quant import dequantize
from engine.rope import cos_sin, frequencies, temperatures, yarn_magnitude, yarn_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchSpec:
    """What a family of models computes, beside the plain pre-norm decoder with a gated feed-forward layer."""

    name: str
    models: str
    """Models people know it by."""
    neox_rope: bool
    """Rotate pairs (d, d + half) as in GPT-NeoX; False: pairs (2 d, 2 d + 1)."""
    activation: Literal["silu", "gelu", "relu2", "clipped"] = "silu"
    """relu2: the square of what is above 0 (So et al. 2021); clipped: as gpt-oss has it (`twins.clipped`)."""
    gated: bool = True
    """down(act(gate(x)) * up(x)); False: down(act(up(x))), of GELU or relu2."""
    norm: Literal["rms", "centred"] = "rms"
    """centred: LayerNorm, which takes the mean away first; with a bias where the file has one."""
    pre_norms: bool = True
    """A norm on the input of attention and of the feed-forward layer."""
    post_norms: bool = False
    """A norm on the output of attention and of the feed-forward layer before it is added (Gemma 2 and 3, OLMo 2)."""
    parallel: bool = False
    """Where a file has no norm for the feed-forward layer, that takes what attention takes, and both are added."""
    ffn_norm: str = "ffn_norm"
    """What the file calls the norm on the input of the feed-forward layer."""
    whole_head_norms: bool = False
    """The norms of q and k run over all heads together (OLMo 2), not over each."""
    late_head_norms: bool = False
    """The norms of q and k stand behind the rotation (Hunyuan)."""
    scale_embedding: bool = False
    """Multiply embeddings with sqrt(hidden size)."""
    local_layers: int = 0
    """Every n-th layer sees everything, the others a window of `attention.sliding_window`; 0: no windows."""
    window: int = 0
    """The window where the file does not say."""
    local_rope_base: float | None = None
    """RoPE base of the layers with a window, where it is not the model's."""
    local_rope_scaling: bool = False
    """Whether RoPE scaling is for the layers with a window too."""
    local_rotation: bool = False
    """Where there are layers with a window, only these have a rotary embedding."""
    rope_sections: bool = False
    """Pairs are rotated by one of three positions each, which are the same for text (Wang et al. 2024, "Qwen2-VL")."""
    unrotated_layers: int = 0
    """Every n-th layer has no rotary embedding (Yang et al. 2025, "RoPE to NoPE and back again"); 0: all have."""
    wide_scale_layers: int = 0
    """The model with this many layers scales scores by hidden size / heads instead of the head size."""
    soft_caps: bool = False
    """Scores and logits x become cap * tanh(x / cap), with the caps of the file."""
    file_scales: bool = False
    """The file has factors for embeddings, branches, scores and logits (Granite)."""
    sinks: bool = False
    """Each head has a score that no position has: what it takes of the softmax goes nowhere (Xiao et al. 2023)."""
    temperatures: bool = False
    """Scores may grow with the position (Mistral 3)."""
    logits_multiplied: bool = False
    """Logits are multiplied with the factor of the file (Command R)."""
    experts: Literal["no", "maybe", "yes"] = "no"
    """Whether feed-forward layers are mixtures of experts; maybe: where the file has `expert_count`."""
    normed_experts: bool = True
    """The weights of a row's chosen experts are scaled to a sum of 1, not those of all experts."""
    shared_expert: Literal["no", "maybe", "gated"] = "no"
    """An expert that every row passes beside the chosen ones; gated: times a sigmoid of a product with the row."""
    delta_layers: bool = False
    """All but every n-th layer keep a running state (the gated delta rule) instead of keys and values, and what
    attention gives is multiplied by the sigmoid of a gate that comes with q."""
    interleaved_deltas: bool = False
    """Neighbouring value heads share a key head, and their factors lie together in one matrix; False: value head h
    has key head h mod the number of those, and each factor its own matrix."""

    @property
    def is_recurrent(self) -> bool:
        """Has layers with a running state, which cannot be cut back as keys and values can."""
        return self.delta_layers

    @property
    def traits(self) -> tuple[str, ...]:
        """What is special about it, for people."""
        said = {
            "GELU": self.activation == "gelu",
            "clipped gates": self.activation == "clipped",
            "squared ReLU": self.activation == "relu2",
            "no gate": not self.gated,
            "LayerNorm": self.norm == "centred",
            "norms after branches": self.post_norms,
            "none before": not self.pre_norms,
            "parallel branches": self.parallel,
            "q and k normed whole": self.whole_head_norms,
            "sliding windows": self.local_layers > 0,
            "attention sinks": self.sinks,
            "soft caps": self.soft_caps,
            "layers without rotation": self.unrotated_layers > 0 or self.local_rotation,
            "scaled embeddings": self.scale_embedding,
            "scaled embeddings, branches, scores and logits": self.file_scales,
            "scaled logits": self.logits_multiplied,
            "experts, where the file has them": self.experts == "maybe",
            "experts": self.experts == "yes",
            "a shared expert": self.shared_expert == "gated",
            "scores that grow with the position": self.temperatures,
            "layers with a running state": self.delta_layers,
        }
        return tuple(words for words, is_so in said.items() if is_so)


ARCHITECTURES: Mapping[str, ArchSpec] = MappingProxyType(
    {
        a.name: a
        for a in (
            ArchSpec(
                name="llama",
                models="Llama 2, 3; Mistral 7B, Nemo; Mixtral; SmolLM 1, 2; Yi; Falcon 3",
                neox_rope=False,
                experts="maybe",
            ),
            ArchSpec(name="qwen2", models="Qwen 2, 2.5 (Coder too); DeepSeek R1 Distill Qwen", neox_rope=True),
            ArchSpec(
                name="qwen2moe",
                models="Qwen 1.5 MoE, 2 57B A14B",
                neox_rope=True,
                experts="yes",
                normed_experts=False,
                shared_expert="gated",
            ),
            ArchSpec(name="qwen3", models="Qwen 3", neox_rope=True),
            ArchSpec(name="qwen3moe", models="Qwen 3 30B A3B, Coder 30B A3B, 235B A22B", neox_rope=True, experts="yes"),
            ArchSpec(
                name="gemma3",
                models="Gemma 3 (text)",
                neox_rope=True,
                activation="gelu",
                post_norms=True,
                scale_embedding=True,
                local_layers=6,
                local_rope_base=10000.0,
                wide_scale_layers=62,
            ),
            ArchSpec(
                name="gemma2",
                models="Gemma 2",
                neox_rope=True,
                activation="gelu",
                post_norms=True,
                scale_embedding=True,
                local_layers=2,
                window=4096,
                local_rope_scaling=True,
                wide_scale_layers=46,
                soft_caps=True,
            ),
            ArchSpec(name="granite", models="Granite 3", neox_rope=False, file_scales=True),
            ArchSpec(
                name="granitemoe",
                models="Granite 3 1B A400M, 3B A800M",
                neox_rope=False,
                file_scales=True,
                experts="yes",
                shared_expert="maybe",
            ),
            ArchSpec(name="smollm3", models="SmolLM 3", neox_rope=False, unrotated_layers=4),
            ArchSpec(
                name="olmo2",
                models="OLMo 2, 3",
                neox_rope=True,
                pre_norms=False,
                post_norms=True,
                whole_head_norms=True,
                local_layers=4,
            ),
            ArchSpec(
                name="olmoe", models="OLMoE", neox_rope=True, whole_head_norms=True, experts="yes", normed_experts=False
            ),
            ArchSpec(name="phi3", models="Phi 3, 3.5, 4", neox_rope=True),
            ArchSpec(
                name="starcoder2", models="StarCoder 2", neox_rope=True, norm="centred", gated=False, activation="gelu"
            ),
            ArchSpec(
                name="stablelm", models="StableLM 3B, 2 1.6B, 2 12B", neox_rope=True, norm="centred", parallel=True
            ),
            ArchSpec(
                name="phi2",
                models="Phi 1.5, 2",
                neox_rope=True,
                norm="centred",
                gated=False,
                activation="gelu",
                parallel=True,
            ),
            ArchSpec(
                name="nemotron",
                models="Nemotron Mini, Minitron",
                neox_rope=True,
                norm="centred",
                gated=False,
                activation="relu2",
            ),
            ArchSpec(
                name="command-r",
                models="Command R, R+; Aya 23, Expanse",
                neox_rope=False,
                norm="centred",
                parallel=True,
                logits_multiplied=True,
            ),
            ArchSpec(
                name="cohere2",
                models="Command R7B, Command A",
                neox_rope=False,
                norm="centred",
                parallel=True,
                logits_multiplied=True,
                local_layers=4,
                local_rope_scaling=True,
                local_rotation=True,
            ),
            ArchSpec(name="gemma", models="Gemma, CodeGemma", neox_rope=True, activation="gelu", scale_embedding=True),
            ArchSpec(name="glm4", models="GLM 4 0414", neox_rope=False, post_norms=True),
            ArchSpec(
                name="exaone4",
                models="EXAONE 4",
                neox_rope=True,
                pre_norms=False,
                post_norms=True,
                local_layers=4,
                local_rope_scaling=True,
                local_rotation=True,
            ),
            ArchSpec(name="exaone", models="EXAONE 3, 3.5", neox_rope=True),
            ArchSpec(name="chatglm", models="ChatGLM 3, GLM 4 9B", neox_rope=False),
            ArchSpec(name="seed_oss", models="Seed OSS", neox_rope=True, ffn_norm="post_attention_norm"),
            ArchSpec(
                name="hunyuan-dense", models="Hunyuan 0.5B, 1.8B, 4B, 7B, MT", neox_rope=True, late_head_norms=True
            ),
            ArchSpec(name="internlm2", models="InternLM 2, 2.5", neox_rope=False),
            ArchSpec(name="arcee", models="AFM 4.5B", neox_rope=False, gated=False, activation="relu2"),
            ArchSpec(name="ernie4_5", models="ERNIE 4.5 0.3B", neox_rope=False),
            ArchSpec(name="mistral3", models="Ministral 3", neox_rope=False, temperatures=True),
            ArchSpec(
                name="gpt-oss",
                models="gpt-oss 20B, 120B",
                neox_rope=True,
                activation="clipped",
                ffn_norm="post_attention_norm",
                local_layers=2,
                local_rope_scaling=True,
                sinks=True,
                experts="yes",
            ),
            ArchSpec(name="qwen2vl", models="Qwen 2 VL, 2.5 VL (text)", neox_rope=True, rope_sections=True),
            ArchSpec(name="qwen3vl", models="Qwen 3 VL (text)", neox_rope=True, rope_sections=True),
            ArchSpec(
                name="qwen35",
                models="Qwen 3.5 (text)",
                neox_rope=True,
                ffn_norm="post_attention_norm",
                rope_sections=True,
                delta_layers=True,
            ),
            ArchSpec(
                name="qwen35moe",
                models="Qwen 3.5 with experts (text)",
                neox_rope=True,
                ffn_norm="post_attention_norm",
                rope_sections=True,
                delta_layers=True,
                experts="yes",
                shared_expert="gated",
            ),
            ArchSpec(
                name="qwen3next",
                models="Qwen3 Next",
                neox_rope=True,
                ffn_norm="post_attention_norm",
                delta_layers=True,
                interleaved_deltas=True,
                experts="yes",
                shared_expert="gated",
            ),
        )
    }
)

NOT_YET: Mapping[str, str] = MappingProxyType(
    {
        "gemma4": "heads of two sizes, layers that share keys and values, embeddings for each layer",
        "gemma3n": "several residual streams, layers that share keys and values, embeddings for each layer",
        "llama4": "attention in chunks",
        "deepseek2": "keys and values that are kept compressed (MLA)",
        "lfm2": "layers that are short convolutions",
        "lfm2moe": "layers that are short convolutions",
        "mamba": "state space layers",
        "mamba2": "state space layers",
        "granitehybrid": "state space layers",
        "nemotron_h": "state space layers",
        "falcon-h1": "state space layers",
    }
)
"""Architectures that people ask for, and what they have that no operation computes."""

ROPE_KINDS = ("none", "linear", "yarn", "longrope")

MAX_LAYERS, MAX_WIDTH, MAX_CONTEXT, MAX_EXPERTS = 1024, 1 << 20, 1 << 27, 1024
"""Bounds that no model comes near: a file beyond them is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: of many feed-forward layers, each row passes the few that its router chooses."""

    count: int
    chosen: int
    """Experts that a row passes."""
    ffn_size: int
    scale: float
    """What the weights of the chosen ones are multiplied with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """Of the layers with a running state (Gated DeltaNet)."""

    layers: frozenset[int]
    """Which they are."""
    num_key_heads: int
    num_value_heads: int
    head_dim: int
    """Of a key and of a value."""

    @property
    def keys(self) -> int:
        """Numbers of all keys of a token."""
        return self.num_key_heads * self.head_dim

    @property
    def values(self) -> int:
        return self.num_value_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def layer_bytes(self) -> int:
        """Of the state of a layer, f32: what the convolution saw last, and a matrix for each value head."""
        return 4 * ((TAPS - 1) * self.channels + self.values * self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model's sizes, checked against each other and against the tensors."""

    name: str
    arch: ArchSpec
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Of a layer without experts, or of an expert that every row passes; 0: there is neither."""
    experts: Experts | None
    vocab_size: int
    train_context_size: int
    norm_eps: float
    """Of the residual stream as the engine keeps it: see `embedding_factor`."""
    embedding_factor: float
    """What embeddings are multiplied with. Where a model multiplies each branch with r before it is added (Granite),
    the stream is kept divided by r: this factor is, and `norm_eps` is divided by r^2, which changes nothing else."""
    attention_scale: float
    """What scores are multiplied with."""
    attention_cap: float
    """Scores x become cap * tanh(x / cap); 0: they stay."""
    logit_factor: float
    """What logits are multiplied with: the last norm's weights are."""
    logit_cap: float
    """Logits x become cap * tanh(x / cap); 0: they stay."""
    rope_base: float
    rope_dim: int
    """Leading values of a head that are rotated."""
    rope_scale: float
    """Linear scaling: positions are divided by it."""
    rope_factors: tuple[float, ...]
    """Llama 3 and Phi 3: each frequency is divided by its factor. Empty: none."""
    rope_long_factors: tuple[float, ...]
    """Phi 3: the factors for contexts larger than `rope_context`. Empty: the same for all."""
    rope_context: int
    """Positions that the model was trained with before its context was extended."""
    yarn: tuple[float, float] | None
    """YaRN: the two betas between which scaling fades in (Peng et al. 2023, section 3.2). None: all are scaled."""
    score_growth: float
    """Scores are multiplied with `rope.temperatures` of this; 0: they stay."""
    rope_magnitude: float
    """What cosines and sines are multiplied with."""
    window: int
    """Positions a row of a local layer sees, itself included; 0: no local layers."""
    local: tuple[bool, ...]
    """Which layers see a window only."""
    is_parallel: bool
    """The feed-forward layer takes what attention takes."""
    delta: DeltaSizes | None = None
    num_spare_layers: int = 0
    """Layers behind the last one that the file has for guessing ahead (multi-token prediction); they are not run."""

    @property
    def architecture(self) -> str:
        return self.arch.name

    @property
    def has_shared_gate(self) -> bool:
        """Whether the shared expert has a factor of its own for each row."""
        return self.arch.shared_expert == "gated" and self.ffn_size > 0

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Those that have keys and values."""
        return tuple(n for n in range(self.num_layers) if not self.is_delta(n))

    @property
    def state_bytes(self) -> int:
        """Of the running state of a conversation; 0: there is none."""
        return len(self.delta.layers) * self.delta.layer_bytes if self.delta else 0

    def is_delta(self, layer: int) -> bool:
        """Whether this layer has a running state instead of keys and values."""
        return self.delta is not None and layer in self.delta.layers

    def is_local(self, layer: int) -> bool:
        """Whether this layer sees a window only."""
        return self.local[layer]

    def is_rotated(self, layer: int) -> bool:
        """Whether this layer has a rotary embedding."""
        every = self.arch.unrotated_layers
        if self.arch.local_rotation and self.window:
            return self.is_local(layer)
        return not every or (layer + 1) % every != 0

    def for_context(self, num_positions: int) -> ModelConfig:
        """What a model does that is loaded for a context of this size: Phi 3 has two sets of RoPE factors."""
        if self.rope_long_factors and num_positions > self.rope_context:
            return replace(self, rope_factors=self.rope_long_factors)
        return self

    def rope_tables(self, num_positions: int, local: bool) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines [positions, rope_dim / 2] f32 by which a local layer, or another, rotates pairs."""
        base = (self.arch.local_rope_base if local else None) or self.rope_base
        if local and not self.arch.local_rope_scaling:
            return cos_sin(num_positions, frequencies(base, self.rope_dim, factors=self.rope_factors))
        scaled = yarn_shares(base, self.rope_dim, self.rope_context, *self.yarn) if self.yarn else None
        per_position = frequencies(base, self.rope_dim, scale=self.rope_scale, factors=self.rope_factors, scaled=scaled)
        return cos_sin(num_positions, per_position, self.rope_magnitude)

    def query_scales(self, num_positions: int) -> NDArray[np.float32]:
        """What a query at each position is multiplied with [positions] f32."""
        grown = temperatures(num_positions, self.rope_context, self.score_growth)
        return grown * np.float32(self.attention_scale)

    @classmethod
    def from_gguf(cls, gguf: GGUFFile) -> ModelConfig:
        """Read and check the configuration. Raises UnsupportedModelError or ModelFileError."""
        return _Reader(gguf).config()


class _Reader:
    """Metadata under the architecture's prefix, with errors that name the file and the key."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf
        self.file = gguf.path.name
        name = gguf.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ModelFileError(f"{self.file}: general.architecture is missing, so this is not a language model")
        if name not in ARCHITECTURES:
            shown = "".join(c for c in name if c.isprintable())[:64]
            why = f" ({NOT_YET[name]})" if name in NOT_YET else ""
            raise UnsupportedModelError(
                f"{self.file}: architecture {shown} is not supported{why}; "
                f"goinfer-chat models --supported lists the {len(ARCHITECTURES)} that are"
            )
        self.arch = ARCHITECTURES[name]

    def _value(self, key: str) -> Any:
        return self.gguf.metadata.get(f"{self.arch.name}.{key}")

    def _bad(self, key: str, why: str) -> ModelFileError:
        return ModelFileError(f"{self.file}: {self.arch.name}.{key} {why}")

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int) -> int:
        value = self._value(key)
        if value is None:
            if default is None:
                raise self._bad(key, "is missing")
            return default
        if isinstance(value, (np.ndarray, list)):
            # One entry for each layer: the same in all of them for every architecture here.
            if len(value) == 0 or any(v != value[0] for v in value):
                raise UnsupportedModelError(f"{self.file}: {self.arch.name}.{key} differs from layer to layer")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise self._bad(key, "is not a whole number")
        if not least <= value <= most:
            raise self._bad(key, f"is {value}, which is not between {least} and {most}")
        return int(value)

    def number(self, key: str, default: float | None, *, least: float, most: float) -> float:
        value = self._value(key)
        if value is None:
            if default is None:
                raise self._bad(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._bad(key, "is not a number")
        if not least <= value <= most:  # also false for NaN
            raise self._bad(key, f"is {value}, which is not between {least} and {most}")
        return float(value)

    def config(self) -> ModelConfig:
        spare = self.integer("nextn_predict_layers", 0, least=0, most=MAX_LAYERS) if self.arch.delta_layers else 0
        layers = self.integer("block_count", least=spare + 1, most=MAX_LAYERS) - spare
        hidden = self.integer("embedding_length", most=MAX_WIDTH)
        heads = self.integer("attention.head_count", most=MAX_WIDTH)
        kv_heads = self.integer("attention.head_count_kv", heads, most=MAX_WIDTH)
        head_dim = self.integer("attention.key_length", hidden // heads, most=MAX_WIDTH)
        value_dim = self.integer("attention.value_length", head_dim, most=MAX_WIDTH)
        ffn, experts = self._feed_forward()
        rope_dim = self.integer("rope.dimension_count", head_dim, most=head_dim)
        embedding = self.gguf.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelFileError(f"{self.file}: tensor token_embd.weight is missing or is no matrix")
        self._check_sections()
        ffn_sizes = (ffn, experts.ffn_size) if experts else (ffn,)
        self._check_sizes(hidden, heads, kv_heads, head_dim, value_dim, ffn_sizes, rope_dim)
        name = self.gguf.metadata.get("general.name")
        context = self.integer("context_length", 2048, most=MAX_CONTEXT)
        scale = self._rope_scale()
        window = 0
        if self.arch.local_layers:
            window = self.integer("attention.sliding_window", self.arch.window, least=0, most=MAX_CONTEXT)
        return ModelConfig(
            # One line, whatever the file says: it stands in lines of figures.
            name=(" ".join(name.split()) if isinstance(name, str) else "") or self.gguf.path.stem,
            arch=self.arch,
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_size=ffn,
            experts=experts,
            vocab_size=embedding.shape[0],
            train_context_size=context,
            **self._scales(layers, hidden, heads, head_dim),
            rope_base=self.number("rope.freq_base", 10000.0, least=1.0, most=1e12),
            rope_dim=rope_dim,
            rope_scale=scale,
            rope_factors=self._rope_factors(rope_dim, "rope_freqs", "rope_factors_short"),
            rope_long_factors=self._rope_factors(rope_dim, "rope_factors_long"),
            rope_context=self.integer("rope.scaling.original_context_length", context, most=MAX_CONTEXT),
            yarn=self._yarn(),
            score_growth=self._score_growth(),
            rope_magnitude=self._rope_magnitude(scale),
            window=window,
            local=self._local(layers) if window else (False,) * layers,
            is_parallel=self.arch.parallel and f"blk.0.{self.arch.ffn_norm}.weight" not in self.gguf.tensors,
            delta=self._delta(layers) if self.arch.delta_layers else None,
            num_spare_layers=spare,
        )

    def _feed_forward(self) -> tuple[int, Experts | None]:
        """The size of what every row passes, or 0, and the experts."""
        arch = self.arch
        least = 1 if arch.experts == "yes" else 0
        count = self.integer("expert_count", None if least else 0, least=least, most=MAX_EXPERTS)
        if count and arch.experts == "no":
            raise UnsupportedModelError(f"{self.file}: {arch.name} with experts is not supported")
        if not count:
            return self.integer("feed_forward_length", most=MAX_WIDTH), None
        size = self.integer("expert_feed_forward_length", 0, least=0, most=MAX_WIDTH)
        # A file in which all layers have experts may leave out the size of a layer that has none.
        common = self.integer("feed_forward_length", size or None, most=MAX_WIDTH)
        shared = 0
        if arch.shared_expert != "no":
            default = common if arch.shared_expert == "gated" else 0
            shared = self.integer("expert_shared_feed_forward_length", default, least=0, most=MAX_WIDTH)
        return shared, Experts(
            count=count,
            chosen=self.integer("expert_used_count", most=count),
            ffn_size=size or common,
            scale=self.number("expert_weights_scale", 0.0, least=0.0, most=1e6) or 1.0,
        )

    def _delta(self, layers: int) -> DeltaSizes:
        """Of the layers with a running state: which they are, and their sizes."""
        marks = self._value("attention.recurrent_layers")
        if marks is None:
            every = self.integer("full_attention_interval", 4, most=MAX_LAYERS)
            marks = [(n + 1) % every != 0 for n in range(layers)]
        if not isinstance(marks, (list, np.ndarray)) or len(marks) < layers:
            raise self._bad("attention.recurrent_layers", f"must say of {layers} layers whether they are")
        sizes = DeltaSizes(
            layers=frozenset(n for n in range(layers) if marks[n]),
            num_key_heads=self.integer("ssm.group_count", most=MAX_WIDTH),
            num_value_heads=self.integer("ssm.time_step_rank", most=MAX_WIDTH),
            head_dim=self.integer("ssm.state_size", most=MAX_WIDTH),
        )
        taps, inner = self.integer("ssm.conv_kernel", most=MAX_WIDTH), self.integer("ssm.inner_size", most=MAX_WIDTH)
        if inner != sizes.values or sizes.num_value_heads % sizes.num_key_heads:
            raise ModelFileError(
                f"{self.file}: {sizes.num_key_heads} key heads and {sizes.num_value_heads} value heads of "
                f"{sizes.head_dim} do not make layers of {inner}"
            )
        unsupported = ""
        if not self._rotates_all_pairs():
            unsupported = "pairs of a head that have no position in a text"
        elif taps != TAPS:
            unsupported = f"a convolution over {taps} tokens (only {TAPS})"
        elif sizes.head_dim % DELTA_COLUMNS or sizes.head_dim > 1024:
            unsupported = f"a state of {sizes.head_dim} numbers in a row (multiples of {DELTA_COLUMNS} up to 1024)"
        elif not sizes.layers or len(sizes.layers) == layers:
            unsupported = "layers of one kind only (some with a running state, some with attention)"
        if unsupported:
            raise UnsupportedModelError(f"{self.file}: {unsupported}: the cpu backend cannot run it")
        return sizes

    def _check_sizes(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        ffn_sizes: tuple[int, ...],
        rope_dim: int,
    ) -> None:
        if heads % kv_heads:
            raise ModelFileError(f"{self.file}: {heads} query heads cannot share {kv_heads} KV heads evenly")
        unsupported = ""
        if head_dim != value_dim:
            unsupported = f"keys of {head_dim} and values of {value_dim}"
        elif not head_dim or head_dim % 16 or head_dim > 512 or rope_dim % 2:
            unsupported = f"a head size of {head_dim} with {rope_dim} rotated values (multiples of 16 up to 512, and 2)"
        elif heads // kv_heads > QUERY_TILE:
            unsupported = f"{heads // kv_heads} query heads for each KV head (at most {QUERY_TILE})"
        elif any(size % 32 for size in (hidden, heads * head_dim, *ffn_sizes)):
            sizes = ", ".join(map(str, (hidden, heads * head_dim, *ffn_sizes)))
            unsupported = f"layer sizes {sizes} (multiples of 32)"
        if unsupported:
            raise UnsupportedModelError(f"{self.file}: {unsupported}: the cpu backend cannot run it")

    def _rotates_all_pairs(self) -> bool:
        """Whether a text's positions reach every rotated pair where pairs have those in an image too (IM-RoPE)."""
        sections = self._value("rope.dimension_sections")
        if sections is None:
            return True
        if not isinstance(sections, (list, np.ndarray)):
            raise self._bad("rope.dimension_sections", "is not a list")
        pairs = self.integer("rope.dimension_count", 0, least=0, most=MAX_WIDTH) // 2
        return len(sections) >= 3 and all(n < 3 * sections[n % 3] for n in range(pairs))

    def _scales(self, layers: int, hidden: int, heads: int, head_dim: int) -> dict[str, float]:
        """The factors and caps of a ModelConfig by name."""
        arch = self.arch

        def factor(key: str, default: float) -> float:
            """0 in a file means that there is none."""
            given = self.number(key, 0.0, least=0.0, most=1e6)
            return self.number(key, default, least=1e-6, most=1e6) if given else default

        def cap(key: str, default: float) -> float:
            return self.number(key, default, least=1e-3, most=1e6) if arch.soft_caps else 0.0

        wide = arch.wide_scale_layers == layers
        eps = "attention.layer_norm_rms_epsilon" if arch.norm == "rms" else "attention.layer_norm_epsilon"
        branch = factor("residual_scale", 1.0) if arch.file_scales else 1.0
        embedding = factor("embedding_scale", 1.0) if arch.file_scales else 1.0
        scale = 1 / math.sqrt(hidden / heads if wide else head_dim)
        logits = factor("logit_scale", 1.0) if arch.file_scales or arch.logits_multiplied else 1.0
        return {
            "norm_eps": self.number(eps, None, least=0.0, most=1.0) / branch**2,
            "embedding_factor": math.sqrt(hidden) if arch.scale_embedding else embedding / branch,
            "attention_scale": factor("attention.scale", scale) if arch.file_scales else scale,
            "attention_cap": cap("attn_logit_softcapping", 50.0),
            "logit_factor": logits if arch.logits_multiplied else 1 / logits,
            "logit_cap": cap("final_logit_softcapping", 30.0),
        }

    def _local(self, layers: int) -> tuple[bool, ...]:
        """By the file's pattern, of each layer or its period, or else by the architecture's."""
        key, every = "attention.sliding_window_pattern", self.arch.local_layers
        given = self._value(key)
        if isinstance(given, (np.ndarray, list)) and every:
            if len(given) != layers or any(x not in (0, 1) for x in given):
                raise self._bad(key, f"is not a yes or no for each of {layers} layers")
            return tuple(bool(x) for x in given)
        if given is not None and every:
            every = self.integer(key, most=MAX_LAYERS)
        return tuple(bool(every) and n % every < every - 1 for n in range(layers))

    def _check_sections(self) -> None:
        """Which position rotates a pair is all the same for text, but for the fourth, which is none."""
        key = "rope.dimension_sections"
        given = self._value(key)
        if not self.arch.rope_sections or given is None:
            return
        if not isinstance(given, (np.ndarray, list)):
            raise self._bad(key, "is not a list")
        if any(x != 0 for x in given[3:]):
            raise UnsupportedModelError(
                f"{self.file}: {self.arch.name}.{key} has a fourth section, which is not supported"
            )

    def _rope_kind(self) -> str:
        kind = self._value("rope.scaling.type")
        if kind is None:
            return "linear"  # old files name only the factor
        if not isinstance(kind, str):
            raise self._bad("rope.scaling.type", "is not a word")
        if kind not in ROPE_KINDS:
            raise UnsupportedModelError(
                f"{self.file}: RoPE scaling {kind[:32]!r} is not supported; supported: {', '.join(ROPE_KINDS)}"
            )
        return kind

    def _rope_scale(self) -> float:
        if self._rope_kind() == "none":
            return 1.0
        key = "rope.scaling.factor" if self._value("rope.scaling.factor") is not None else "rope.scale_linear"
        scale = self.number(key, 1.0, least=0.0, most=1e6) or 1.0  # 0: none
        return self.number(key, 1.0, least=1e-3, most=1e6) if scale < 1e-3 else scale

    def _yarn(self) -> tuple[float, float] | None:
        if self._rope_kind() != "yarn":
            return None
        fast, slow = (
            self.number(f"rope.scaling.yarn_beta_{which}", default, least=1e-3, most=1e6)
            for which, default in (("fast", 32.0), ("slow", 1.0))
        )
        return fast, slow

    def _score_growth(self) -> float:
        key = "attention.temperature_scale"
        return self.number(key, 0.0, least=0.0, most=1e3) if self.arch.temperatures else 0.0

    def _rope_magnitude(self, scale: float) -> float:
        """YaRN makes cosines and sines larger (Peng et al. 2023, section 3.4); Phi 3's factor is in the file."""
        given = self.number("rope.scaling.attn_factor", 1.0, least=1e-3, most=1e3)
        if self._rope_kind() != "yarn":
            return given
        undone = self.number("rope.scaling.yarn_log_multiplier", 0.0, least=0.0, most=1e3)
        return given * yarn_magnitude(scale, 1.0) / yarn_magnitude(scale, undone)

    def _rope_factors(self, rope_dim: int, *names: str) -> tuple[float, ...]:
        """The first of these tensors: Llama 3.1 and later have rope_freqs, Phi 3 has short and long factors."""
        info = next((i for n in names if (i := self.gguf.tensors.get(f"{n}.weight")) is not None), None)
        if info is None:
            return ()
        factors = dequantize(info.type, self.gguf.data(info.name)).reshape(-1)
        if len(factors) != rope_dim // 2 or not np.all(np.isfinite(factors)) or not np.all(factors >= 1e-3):
            raise ModelFileError(f"{self.file}: {info.name} must be {rope_dim // 2} positive numbers")
        return tuple(float(f) for f in factors)
