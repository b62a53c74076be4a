"""A model's configuration read from the metadata of a GGUF file, and checked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine.arch import ARCHITECTURES, NOT_YET
from engine.config import ConvolutionSizes, DeltaSizes, Experts, Heads, ModelConfig, ScanSizes
from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf_file import GGUFFile, shown
from engine.kernels.plan import DELTA_COLUMNS, QUERY_TILE, TAPS
from engine.quant import dequantize
from engine.rope import yarn_magnitude

ROPE_KINDS = ("none", "linear", "yarn", "longrope")

MAX_LAYERS, MAX_WIDTH, MAX_CONTEXT, MAX_EXPERTS = 1024, 1 << 20, 1 << 27, 1024
"""Bounds that no model comes near: a file beyond them is damaged."""


class ConfigReader:
    """Metadata under the architecture's prefix, with errors that name the file and the key."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf
        self.file = gguf.path.name
        name = gguf.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ModelFileError(f"{self.file}: general.architecture is missing, so this is not a language model")
        if name not in ARCHITECTURES:
            why = f" ({NOT_YET[name]})" if name in NOT_YET else ""
            raise UnsupportedModelError(
                f"{self.file}: architecture {shown(name)} is not supported{why}; "
                f"goinfer-chat models --supported lists the {len(ARCHITECTURES)} that are"
            )
        self.arch = ARCHITECTURES[name]

    def _value(self, key: str) -> Any:
        return self.gguf.metadata.get(f"{self.arch.name}.{key}")

    def _bad(self, key: str, why: str) -> ModelFileError:
        return ModelFileError(f"{self.file}: {self.arch.name}.{key} {why}")

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int) -> int:
        """The whole number under a key; one for each layer must be the same for all.

        Raises ModelFileError where it is missing without a default, no such number or out of bounds, and
        UnsupportedModelError where layers differ.
        """
        value = self._value(key)
        if value is None:
            if default is None:
                raise self._bad(key, "is missing")
            return default
        if isinstance(value, (np.ndarray, list)):
            if len(value) == 0 or any(v != value[0] for v in value):
                raise UnsupportedModelError(f"{self.file}: {self.arch.name}.{key} differs from layer to layer")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise self._bad(key, "is not a whole number")
        if not least <= value <= most:
            raise self._bad(key, f"is {value}, which is not between {least} and {most}")
        return int(value)

    def integers(self, key: str, layers: int, default: int | None = None, *, most: int) -> tuple[int, ...]:
        """The whole number of each layer under a key, which may be one for all. Raises ModelFileError."""
        value = self._value(key)
        if not isinstance(value, (np.ndarray, list)):
            return (self.integer(key, default, most=most),) * layers
        if len(value) != layers or any(not isinstance(v, (int, np.integer)) or not 1 <= v <= most for v in value):
            raise self._bad(key, f"is not a number between 1 and {most} for each of {layers} layers")
        return tuple(int(v) for v in value)

    def counts(self, key: str, layers: int, *, most: int) -> tuple[int, ...]:
        """The whole number of each layer under a key, which may be 0. Raises ModelFileError."""
        value = self._value(key)
        if (
            not isinstance(value, (np.ndarray, list))
            or len(value) != layers
            or any(isinstance(v, bool) or not isinstance(v, (int, np.integer)) or not 0 <= v <= most for v in value)
        ):
            raise self._bad(key, f"is not a number between 0 and {most} for each of {layers} layers")
        return tuple(int(v) for v in value)

    def number(self, key: str, default: float | None, *, least: float, most: float) -> float:
        """The finite number under a key. Raises ModelFileError as `integer` does."""
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
        """All of it. Raises ModelFileError for sizes that contradict each other, UnsupportedModelError for others."""
        spare = self.integer("nextn_predict_layers", 0, least=0, most=MAX_LAYERS)
        layers = self.integer("block_count", least=spare + 1, most=MAX_LAYERS) - spare
        hidden = self.integer("embedding_length", most=MAX_WIDTH)
        num_heads = self.integer("attention.head_count", most=MAX_WIDTH)
        ffn_sizes, experts = self._feed_forward(layers)
        embedding = self.gguf.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelFileError(f"{self.file}: tensor token_embd.weight is missing or is not a matrix")
        self._check_sections()
        name = self.gguf.metadata.get("general.name")
        context = self.integer("context_length", 2048, most=MAX_CONTEXT)
        scale = self._rope_scale()
        window = 0
        if self.arch.local_layers:
            window = self.integer("attention.sliding_window", self.arch.window, least=0, most=MAX_CONTEXT)
        local = self._local(layers) if window else (False,) * layers
        if self.arch.chunks and not window:
            raise UnsupportedModelError(f"{self.file}: {self.arch.name} without attention in chunks is not supported")
        convolution = self._convolution(layers, hidden) if self.arch.convolutions else None
        shared = self._num_shared(local)
        heads = self._heads(hidden, num_heads, local, shared)
        full = heads[local.index(False) if False in local else 0]
        given = 0
        if self.arch.layer_embeddings:
            given = self.integer("embedding_length_per_layer_input", 0, least=0, most=MAX_WIDTH)
        self._check_widths(hidden, given, *ffn_sizes, *([experts.ffn_size] if experts else []))
        return ModelConfig(
            # One line, whatever the file says: it stands in lines of figures.
            name=(" ".join(name.split()) if isinstance(name, str) else "") or self.gguf.path.stem,
            arch=self.arch,
            num_layers=layers,
            hidden_size=hidden,
            num_heads=num_heads,
            heads=heads,
            ffn_sizes=ffn_sizes,
            experts=experts,
            vocab_size=embedding.shape[0],
            train_context_size=context,
            **self._scales(layers, hidden, num_heads, heads[0].dim),
            rope_base=self.number("rope.freq_base", 10000.0, least=1.0, most=1e12),
            rope_scale=scale,
            rope_factors=self._rope_factors(full, "rope_freqs", "rope_factors_short"),
            rope_long_factors=self._rope_factors(full, "rope_factors_long"),
            rope_context=self.integer("rope.scaling.original_context_length", context, most=MAX_CONTEXT),
            yarn=self._yarn(),
            score_growth=self._score_growth(),
            rope_magnitude=self._rope_magnitude(scale),
            window=-window if self.arch.chunks else window,
            local=local,
            local_rope_base=self._local_rope_base(),
            num_shared_layers=shared,
            layer_embedding_size=given,
            unsaid_ids=self._unsaid_ids(embedding.shape[0]),
            is_parallel=self.arch.parallel and f"blk.0.{self.arch.ffn_norm}.weight" not in self.gguf.tensors,
            delta=self._delta(layers) if self.arch.delta_layers else None,
            convolution=convolution,
            scan=self._scan(layers) if self.arch.scans else None,
            is_unrotated=self.arch.rotation_said and not self._flag("rope.scaling.finetuned", True),
            num_spare_layers=spare,
        )

    def _num_shared(self, local: tuple[bool, ...]) -> int:
        """How many layers at the end look at keys and values of earlier ones."""
        key = "attention.shared_kv_layers"
        shared = self.integer(key, 0, least=0, most=len(local) - 1) if self.arch.shared_keys else 0
        own = local[: len(local) - shared]
        if any(x not in own for x in local):
            raise self._bad(key, f"is {shared}, and no layer before these sees as much as each of them")
        return shared

    def _heads(self, hidden: int, num_heads: int, local: tuple[bool, ...], shared: int) -> tuple[Heads, ...]:
        """Of each layer. Raises ModelFileError, or UnsupportedModelError for sizes that no backend runs."""
        layers, arch = len(local), self.arch
        dim = self.integer("attention.key_length", hidden // num_heads, most=MAX_WIDTH)
        value_dim = self.integer("attention.value_length", dim, most=MAX_WIDTH)
        rope_dim = self.integer("rope.dimension_count", dim, most=dim)
        sizes = {False: (dim, value_dim, rope_dim)}
        if arch.layer_sizes:
            dim = self.integer("attention.key_length_swa", dim, most=MAX_WIDTH)
            value_dim = self.integer("attention.value_length_swa", dim, most=MAX_WIDTH)
            sizes[True] = dim, value_dim, self.integer("rope.dimension_count_swa", dim, most=dim)
            kv_heads = self.integers("attention.head_count_kv", layers, num_heads, most=MAX_WIDTH)
        elif arch.convolutions or arch.scans:
            # The layers without any are not asked.
            kv_heads = (max(self.counts("attention.head_count_kv", layers, most=MAX_WIDTH)),) * layers
        else:
            kv_heads = (self.integer("attention.head_count_kv", num_heads, most=MAX_WIDTH),) * layers
        found = []
        for n, (is_local, count) in enumerate(zip(local, kv_heads, strict=True)):
            dim, value_dim, rope_dim = sizes.get(is_local, sizes[False])
            tied = arch.normed_values and not is_local and n < layers - shared
            tied = tied and f"blk.{n}.attn_v.weight" not in self.gguf.tensors
            found.append(Heads(num_kv_heads=count, dim=dim, rope_dim=rope_dim, keys_are_values=tied))
            if found[-1] not in found[:-1]:
                self._check_heads(num_heads, found[-1], value_dim)
        for is_local in sizes:
            if len({h.num_kv_heads for h, x in zip(found, local, strict=True) if x == is_local}) > 1:
                raise UnsupportedModelError(
                    f"{self.file}: {arch.name}.attention.head_count_kv differs between layers that see as much"
                )
        return tuple(found)

    def _unsaid_ids(self, vocab_size: int) -> tuple[int, ...]:
        """Such as the marks around an image in a model that also takes images."""
        key = "tokenizer.ggml.suppress_tokens"
        given = self.gguf.metadata.get(key)
        if given is None:
            return ()
        if not isinstance(given, (np.ndarray, list)) or any(
            not isinstance(x, (int, np.integer)) or not 0 <= x < vocab_size for x in given
        ):
            raise ModelFileError(f"{self.file}: {key} is not a list of token ids below {vocab_size}")
        return tuple(int(x) for x in given)

    def _local_rope_base(self) -> float | None:
        given = self.arch.local_rope_base
        return given and self.number("rope.freq_base_swa", given, least=1.0, most=1e12)

    def _feed_forward(self, layers: int) -> tuple[tuple[int, ...], Experts | None]:
        """The size of what every row passes in each layer, or 0, and the experts."""
        arch = self.arch
        least = 1 if arch.experts == "yes" else 0
        count = self.integer("expert_count", None if least else 0, least=least, most=MAX_EXPERTS)
        if count and arch.experts == "no":
            raise UnsupportedModelError(
                f"{self.file}: {arch.name} with experts is not supported; choose a model of {arch.name} without"
            )
        if not count and arch.layer_sizes:
            return self.integers("feed_forward_length", layers, most=MAX_WIDTH), None
        if not count:
            return (self.integer("feed_forward_length", most=MAX_WIDTH),) * layers, None
        size = self.integer("expert_feed_forward_length", 0, least=0, most=MAX_WIDTH)
        if arch.experts_beside:
            size = size or self.integer("expert_feed_forward_length", most=MAX_WIDTH)
            beside = self.integers("feed_forward_length", layers, most=MAX_WIDTH)
            # No key says which layers have experts beside: those that have a router.
            routed = frozenset(n for n in range(layers) if f"blk.{n}.ffn_gate_inp.weight" in self.gguf.tensors)
            return beside, self._experts(count, size, routed)
        # A file in which all layers have experts may leave out the size of a layer that has none.
        common = self.integer("feed_forward_length", size or None, most=MAX_WIDTH)
        mixtures = self._mixtures(layers)
        shared = self._shared_expert(common, mixtures)
        sizes = tuple(shared if n in mixtures else common for n in range(layers))
        return sizes, self._experts(count, size or common, mixtures)

    def _mixtures(self, layers: int) -> frozenset[int]:
        """The layers that have experts."""
        if not self.arch.scattered_experts:
            return frozenset(range(layers))
        first = self.integer("leading_dense_block_count", 0, least=0, most=layers - 1)
        every = self.integer("interleave_moe_layer_step", 1, most=layers)
        return frozenset(n for n in range(first, layers) if (n + 1) % every == 0)

    def _shared_expert(self, common: int, mixtures: frozenset[int]) -> int:
        """The size of what every row passes beside the experts, or 0."""
        arch, key = self.arch, "expert_shared_feed_forward_length"
        if arch.shared_expert == "no" or not mixtures:
            return 0
        if arch.shared_expert == "plain":
            up = self.gguf.tensors.get(f"blk.{min(mixtures)}.ffn_up_shexp.weight")
            return up.shape[0] if up is not None else 0
        return self.integer(key, common if arch.shared_expert == "gated" else 0, least=0, most=MAX_WIDTH)

    def _experts(self, count: int, size: int, mixtures: frozenset[int]) -> Experts:
        arch, kinds = self.arch, {1: False, 2: True}
        chosen = self.integer("expert_used_count", most=count)
        even, normed = arch.shares == "even", arch.normed_experts
        if arch.scattered_experts and arch.shares != "even":
            normed = self._flag("expert_weights_norm", normed)
        if arch.shares == "file":
            kind = self.integer("expert_gating_func", 2, least=0, most=99) or 2
            if kind not in kinds:
                raise UnsupportedModelError(
                    f"{self.file}: {arch.name}.expert_gating_func {kind} is not supported; supported: 1 (softmax), "
                    "2 (sigmoid)"
                )
            even = kinds[kind]
        scale = 1.0 if arch.experts_beside else self.number("expert_weights_scale", 0.0, least=0.0, most=1e6) or 1.0
        return Experts(
            count=count, chosen=chosen, ffn_size=size, scale=scale, layers=mixtures, is_even=even, is_normed=normed
        )

    def _flag(self, key: str, default: bool) -> bool:
        value = self._value(key)
        if value is not None and not isinstance(value, bool):
            raise self._bad(key, "is not true or false")
        return default if value is None else value

    def _without_heads(self, layers: int, what: str) -> frozenset[int]:
        """The layers without KV heads, which are something else."""
        counts = self.counts("attention.head_count_kv", layers, most=MAX_WIDTH)
        found = frozenset(n for n in range(layers) if counts[n] == 0)
        unsupported = ""
        if not found or len(found) == layers:
            unsupported = f"layers of one kind only (some that are {what}, some with attention)"
        elif len(set(counts)) > 2:
            unsupported = "layers with different numbers of KV heads"
        if unsupported:
            raise UnsupportedModelError(f"{self.file}: no backend runs {unsupported}; choose another model")
        return found

    def _scan(self, layers: int) -> ScanSizes:
        """Of the state space layers: those without KV heads."""
        inner, heads = (self.integer(f"ssm.{name}", most=MAX_WIDTH) for name in ("inner_size", "time_step_rank"))
        sizes = ScanSizes(
            layers=self._without_heads(layers, "state space layers"),
            num_heads=heads,
            head_dim=inner // heads,
            num_groups=self.integer("ssm.group_count", most=MAX_WIDTH),
            key_dim=self.integer("ssm.state_size", most=MAX_WIDTH),
            norm_eps=self.number("attention.layer_norm_rms_epsilon", None, least=0.0, most=1.0),
        )
        taps, groups = self.integer("ssm.conv_kernel", most=MAX_WIDTH), sizes.num_groups
        if sizes.values != inner or heads % groups:
            raise ModelFileError(f"{self.file}: {heads} heads in {groups} groups do not make layers of {inner}")
        unsupported = ""
        if taps != TAPS:
            unsupported = f"a convolution over {taps} tokens (only {TAPS})"
        elif sizes.head_dim % DELTA_COLUMNS or sizes.key_dim % 16 or sizes.key_dim > 1024:
            unsupported = (
                f"states of {sizes.key_dim} times {sizes.head_dim} numbers (multiples of 16 up to 1024, and of "
                f"{DELTA_COLUMNS})"
            )
        if unsupported:
            raise UnsupportedModelError(f"{self.file}: no backend runs {unsupported}; choose another model")
        return sizes

    def _convolution(self, layers: int, hidden: int) -> ConvolutionSizes:
        """Of the layers that are short convolutions: those without KV heads."""
        taps = self.integer("shortconv.l_cache", most=MAX_WIDTH)
        sizes = ConvolutionSizes(layers=self._without_heads(layers, "convolutions"), channels=hidden, taps=taps)
        unsupported = ""
        if taps > TAPS:
            unsupported = f"a convolution over {taps} tokens (at most {TAPS})"
        elif self.integer("attention.sliding_window", 0, least=0, most=MAX_CONTEXT):
            unsupported = f"{self.arch.name} with a sliding window"
        if unsupported:
            raise UnsupportedModelError(f"{self.file}: no backend runs {unsupported}; choose another model")
        return sizes

    def _delta(self, layers: int) -> DeltaSizes:
        """Of the layers with a running state: which they are, and their sizes."""
        marks = self._value("attention.recurrent_layers")
        if marks is None:
            every = self.integer("full_attention_interval", 4, most=MAX_LAYERS)
            marks = [(n + 1) % every != 0 for n in range(layers)]
        if not isinstance(marks, (list, np.ndarray)) or len(marks) < layers:
            raise self._bad(
                "attention.recurrent_layers", f"must say for each of {layers} layers whether it keeps a running state"
            )
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
            raise UnsupportedModelError(f"{self.file}: no backend runs {unsupported}; choose another model")
        return sizes

    def _check_heads(self, num_heads: int, heads: Heads, value_dim: int) -> None:
        kv_heads, dim = heads.num_kv_heads, heads.dim
        if num_heads % kv_heads:
            raise ModelFileError(f"{self.file}: {num_heads} query heads cannot share {kv_heads} KV heads evenly")
        unsupported = ""
        if dim != value_dim:
            unsupported = f"keys of {dim} and values of {value_dim}"
        elif not dim or dim % 16 or dim > 512 or heads.rope_dim % 2:
            unsupported = (
                f"a head size of {dim} with {heads.rope_dim} rotated values (multiples of 16 up to 512, and 2)"
            )
        elif num_heads // kv_heads > QUERY_TILE:
            unsupported = f"{num_heads // kv_heads} query heads for each KV head (at most {QUERY_TILE})"
        if unsupported:
            raise UnsupportedModelError(f"{self.file}: no backend runs {unsupported}; choose another model")
        self._check_widths(num_heads * dim)

    def _check_widths(self, *sizes: int) -> None:
        if any(size % 32 for size in sizes):
            named = ", ".join(str(size) for size in dict.fromkeys(sizes))
            raise UnsupportedModelError(
                f"{self.file}: no backend runs layer sizes {named[:100]} (multiples of 32); choose another model"
            )

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
        known = (12.0, 1.4 / math.sqrt(layers), 256 / hidden) if arch.known_scales else (1.0, 1.0, 1.0)
        branch = factor("residual_scale", known[1]) if arch.file_scales else 1.0
        embedding = factor("embedding_scale", known[0]) if arch.file_scales else 1.0
        scale = 1.0 if arch.unscaled_scores else 1 / math.sqrt(hidden / heads if wide else head_dim)
        logits = factor("logit_scale", known[2]) if arch.file_scales or arch.logits_multiplied else 1.0
        return {
            "norm_eps": self.number(eps, None, least=0.0, most=1.0) / branch**2,
            "embedding_factor": math.sqrt(hidden) if arch.scale_embedding else embedding / branch,
            "attention_scale": factor("attention.scale", scale) if arch.file_scales else scale,
            "attention_cap": cap("attn_logit_softcapping", 50.0),
            "logit_factor": logits if arch.logits_multiplied else 1 / logits,
            "logit_cap": factor("final_logit_softcapping", 0.0)
            if arch.logit_cap
            else cap("final_logit_softcapping", 30.0),
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

    def _rope_factors(self, heads: Heads, *names: str) -> tuple[float, ...]:
        """The first of these tensors: Llama 3.1 and later have rope_freqs, Phi 3 has short and long factors."""
        info = next((i for n in names if (i := self.gguf.tensors.get(f"{n}.weight")) is not None), None)
        if info is None:
            return ()
        factors, rope_dim = dequantize(info.type, self.gguf.data(info.name)).reshape(-1), heads.rope_dim
        if len(factors) != rope_dim // 2 or not np.all(np.isfinite(factors)) or not np.all(factors >= 1e-3):
            raise ModelFileError(f"{self.file}: {info.name} must be {rope_dim // 2} positive numbers")
        return tuple(float(f) for f in factors)
