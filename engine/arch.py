"""Architectures as data: one row each.

A row says only what cannot be read from the file: how heads are rotated, which norms there are, the activation
function. Sizes, biases and tied embeddings are the file's. docs/adding-a-model.md says how to add a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


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
    chunks: bool = False
    """The layers with a window see what is behind the last multiple of it instead (Llama 4)."""
    unit_heads: bool = False
    """q and k pass a norm without weights behind the rotation, but in models of 128 experts (Llama 4)."""
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
    known_scales: bool = False
    """Where it lacks them they are 12, 1.4 / sqrt(layers), and 256 / hidden size for logits (MiniCPM)."""
    sinks: bool = False
    """Each head has a score that no position has: what it takes of the softmax goes nowhere (Xiao et al. 2023)."""
    temperatures: bool = False
    """Scores may grow with the position (Mistral 3)."""
    unrotated_growth: float = 0.0
    """Scores of layers without rotation grow so with the position (Llama 4)."""
    output_norm: str = "output_norm"
    """What the file calls the last norm."""
    logits_multiplied: bool = False
    """Logits are multiplied with the factor of the file (Command R)."""
    experts: Literal["no", "maybe", "yes"] = "no"
    """Whether feed-forward layers are mixtures of experts; maybe: where the file has `expert_count`."""
    normed_experts: bool = True
    """The weights of a row's chosen experts are scaled to a sum of 1, not those of all experts."""
    shares: Literal["soft", "even", "file"] = "soft"
    """How much of each expert would be taken: by a softmax, or a sigmoid for each; file: as it says. A file may have
    biases that are added when experts are chosen, and only then (Wang et al. 2024, "Auxiliary-Loss-Free Load
    Balancing")."""
    scattered_experts: bool = False
    """Not in the first `leading_dense_block_count` layers, and of the others in every `interleave_moe_layer_step`-th.
    The file may say `normed_experts`."""
    weighted_inputs: bool = False
    """An expert takes a row times its weight, instead of giving an output times that (Llama 4)."""
    shared_expert: Literal["no", "maybe", "gated", "plain"] = "no"
    """An expert that every row passes beside the chosen ones; gated: times a sigmoid of a product with the row; plain:
    as large as its tensors are, where there are some."""
    layer_sizes: bool = False
    """Heads of layers with a window may have another size than those of the others, and feed-forward layers differ from
    layer to layer. RoPE factors are for the layers that see everything."""
    shared_keys: bool = False
    """The last `attention.shared_kv_layers` layers have no keys and values, and look at those of earlier ones."""
    normed_values: bool = False
    """A value passes a norm without weights. Where a layer that sees everything has no matrix for values, they are made
    as keys are."""
    unscaled_scores: bool = False
    """Scores are not divided by the root of the head size."""
    logit_cap: bool = False
    """Logits x become cap * tanh(x / cap) where the file has a cap, and scores stay."""
    layer_embeddings: bool = False
    """Where the file has an embedding of a token for each layer, it gates a third branch there."""
    layer_scales: bool = False
    """Behind a layer the stream is multiplied with a number of the file."""
    experts_beside: bool = False
    """Experts stand beside a feed-forward layer that every row passes, each with norms of its own before and behind,
    and their router takes the stream through a norm of its own. Layers without a router have none."""
    convolutions: bool = False
    """Layers without KV heads are short convolutions instead (LFM 2): they keep a few rows."""
    scans: bool = False
    """Layers without KV heads are state space layers instead (Mamba 2)."""
    rotation_said: bool = False
    """The file may say that no layer has a rotary embedding (`rope.scaling.finetuned`)."""
    delta_layers: bool = False
    """All but every n-th layer keep a running state (the gated delta rule) instead of keys and values, and what
    attention gives is multiplied by the sigmoid of a gate that comes with q."""
    interleaved_deltas: bool = False
    """Neighbouring value heads share a key head, and their factors lie together in one matrix; False: value head h
    has key head h mod the number of those, and each factor its own matrix."""

    @property
    def is_recurrent(self) -> bool:
        """Has layers with a running state, which cannot be cut back as keys and values can."""
        return self.delta_layers or self.convolutions or self.scans

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
            "sliding windows": self.local_layers > 0 and not self.chunks,
            "attention in chunks": self.chunks,
            "attention sinks": self.sinks,
            "soft caps": self.soft_caps,
            "a soft cap on logits": self.logit_cap,
            "heads of two sizes": self.layer_sizes,
            "layers that share keys and values": self.shared_keys,
            "normed values": self.normed_values,
            "embeddings for each layer, where the file has them": self.layer_embeddings,
            "scaled layers": self.layer_scales,
            "layers without rotation": self.unrotated_layers > 0 or self.local_rotation,
            "scaled embeddings": self.scale_embedding,
            "scaled embeddings, branches, scores and logits": self.file_scales,
            "scaled logits": self.logits_multiplied,
            "experts, where the file has them": self.experts == "maybe" and not self.experts_beside,
            "experts beside what all rows pass, where the file has them": self.experts_beside,
            "experts": self.experts == "yes" and not self.scattered_experts,
            "experts in some layers": self.scattered_experts,
            "a shared expert, where the file has one": self.shared_expert in ("maybe", "plain"),
            "a shared expert": self.shared_expert == "gated",
            "scores that grow with the position": self.temperatures or self.unrotated_growth > 0,
            "layers that are short convolutions": self.convolutions,
            "state space layers": self.scans,
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
                name="qwen3vlmoe",
                models="Qwen 3 VL 30B A3B, 235B A22B (text)",
                neox_rope=True,
                rope_sections=True,
                experts="yes",
            ),
            ArchSpec(name="mellum", models="Mellum 2 12B A2.5B", neox_rope=True, local_layers=4, experts="yes"),
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
            ArchSpec(
                name="gemma4",
                models="Gemma 4 (text)",
                neox_rope=True,
                activation="gelu",
                post_norms=True,
                scale_embedding=True,
                local_layers=6,
                local_rope_base=10000.0,
                layer_sizes=True,
                shared_keys=True,
                normed_values=True,
                unscaled_scores=True,
                logit_cap=True,
                layer_embeddings=True,
                layer_scales=True,
                experts="maybe",
                experts_beside=True,
            ),
            ArchSpec(
                name="granite",
                models="Granite 3, 4 Micro",
                neox_rope=False,
                file_scales=True,
                rotation_said=True,
            ),
            ArchSpec(
                name="granitehybrid",
                models="Granite 4 H 350M, 1B, Micro, Tiny, Small",
                neox_rope=False,
                file_scales=True,
                rotation_said=True,
                scans=True,
                experts="maybe",
                shared_expert="maybe",
            ),
            ArchSpec(name="minicpm", models="MiniCPM 1, 2, 4", neox_rope=False, file_scales=True, known_scales=True),
            ArchSpec(
                name="granitemoe",
                models="Granite 3 1B A400M, 3B A800M",
                neox_rope=False,
                file_scales=True,
                rotation_said=True,
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
            ArchSpec(
                name="glm4moe",
                models="GLM 4.5, 4.5 Air, 4.6, 4.7",
                neox_rope=True,
                ffn_norm="post_attention_norm",
                rope_sections=True,
                experts="yes",
                normed_experts=False,
                shares="file",
                scattered_experts=True,
                shared_expert="plain",
            ),
            ArchSpec(
                name="lfm2",
                models="LFM 2, 2.5",
                neox_rope=True,
                output_norm="token_embd_norm",
                convolutions=True,
            ),
            ArchSpec(
                name="lfm2moe",
                models="LFM 2 8B A1B, 2.5 8B A1B",
                neox_rope=True,
                output_norm="token_embd_norm",
                convolutions=True,
                experts="yes",
                shares="file",
                scattered_experts=True,
            ),
            ArchSpec(
                name="llama4",
                models="Llama 4 Scout, Maverick (text)",
                neox_rope=False,
                local_layers=4,
                window=8192,
                chunks=True,
                local_rope_scaling=True,
                local_rotation=True,
                late_head_norms=True,
                unit_heads=True,
                unrotated_growth=0.1,
                experts="yes",
                normed_experts=False,
                shares="even",
                scattered_experts=True,
                weighted_inputs=True,
                shared_expert="plain",
            ),
            ArchSpec(
                name="exaone-moe",
                models="K-EXAONE 236B A23B",
                neox_rope=True,
                local_layers=4,
                local_rope_scaling=True,
                local_rotation=True,
                experts="yes",
                normed_experts=False,
                shares="file",
                scattered_experts=True,
                shared_expert="plain",
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
            ArchSpec(
                name="ernie4_5-moe",
                models="ERNIE 4.5 21B A3B, 300B A47B",
                neox_rope=False,
                experts="yes",
                scattered_experts=True,
                shared_expert="plain",
            ),
            ArchSpec(
                name="hunyuan-moe",
                models="Hunyuan A13B",
                neox_rope=True,
                late_head_norms=True,
                experts="yes",
                shared_expert="plain",
            ),
            ArchSpec(
                name="bailingmoe",
                models="Ling Lite, Plus; Ring Lite",
                neox_rope=False,
                experts="yes",
                normed_experts=False,
                scattered_experts=True,
                shared_expert="plain",
            ),
            ArchSpec(
                name="bailingmoe2",
                models="Ling 2 mini, flash; Ring 2 mini, flash",
                neox_rope=True,
                experts="yes",
                normed_experts=False,
                shares="file",
                scattered_experts=True,
                shared_expert="plain",
            ),
            ArchSpec(
                name="dots1",
                models="dots.llm1",
                neox_rope=True,
                experts="yes",
                normed_experts=False,
                shares="file",
                scattered_experts=True,
                shared_expert="plain",
            ),
            ArchSpec(
                name="minimax-m2",
                models="MiniMax M2, M2.1, M2.5",
                neox_rope=True,
                whole_head_norms=True,
                experts="yes",
                shares="file",
            ),
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
        "gemma3n": "several residual streams, layers that share keys and values, embeddings for each layer",
        "deepseek2": "keys and values that are kept compressed (MLA)",
        "mamba": "state space layers",
        "mamba2": "state space layers",
        "nemotron_h": "state space layers",
        "falcon-h1": "state space layers",
    }
)
"""Architectures that people ask for, and what they have that no operation computes."""
