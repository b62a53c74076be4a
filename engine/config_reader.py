"""A model's configuration read from the metadata of a GGUF file, and checked."""

from __future__ import annotations

import math

import numpy as np

from engine.config import Experts, Heads, ModelConfig
from engine.config_rope import check_sections, local_rope_base, rope_factors, rope_magnitude, rope_scale, yarn_bounds
from engine.config_states import convolution_sizes, delta_sizes, scan_sizes
from engine.errors import ModelFileError, UnsupportedModelError
from engine.kernels.plan import QUERY_TILE
from engine.metadata_reader import MAX_CONTEXT, MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, MetadataReader


class ConfigReader(MetadataReader):
    """Makes the configuration of the file's model."""

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
        check_sections(self)
        name = self.gguf.metadata.get("general.name")
        context = self.integer("context_length", 2048, most=MAX_CONTEXT)
        scale = rope_scale(self)
        window = 0
        if self.arch.local_layers:
            window = self.integer("attention.sliding_window", self.arch.window, least=0, most=MAX_CONTEXT)
        local = self._local(layers) if window else (False,) * layers
        if self.arch.chunks and not window:
            raise UnsupportedModelError(f"{self.file}: {self.arch.name} without attention in chunks is not supported")
        # Before heads are looked at: which layers have none is checked here.
        convolution = convolution_sizes(self, layers, hidden) if self.arch.convolutions else None
        scan = scan_sizes(self, layers) if self.arch.scans else None
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
            rope_factors=rope_factors(self, full, "rope_freqs", "rope_factors_short"),
            rope_long_factors=rope_factors(self, full, "rope_factors_long"),
            rope_context=self.integer("rope.scaling.original_context_length", context, most=MAX_CONTEXT),
            yarn=yarn_bounds(self),
            score_growth=self._score_growth(),
            rope_magnitude=rope_magnitude(self, scale),
            window=-window if self.arch.chunks else window,
            local=local,
            local_rope_base=local_rope_base(self),
            num_shared_layers=shared,
            layer_embedding_size=given,
            unsaid_ids=self._unsaid_ids(embedding.shape[0]),
            is_parallel=self.arch.parallel and f"blk.0.{self.arch.ffn_norm}.weight" not in self.gguf.tensors,
            delta=delta_sizes(self, layers) if self.arch.delta_layers else None,
            convolution=convolution,
            scan=scan,
            is_unrotated=self.arch.rotation_said and not self.flag("rope.scaling.finetuned", True),
            num_spare_layers=spare,
        )

    def _num_shared(self, local: tuple[bool, ...]) -> int:
        """How many layers at the end look at keys and values of earlier ones."""
        key = "attention.shared_kv_layers"
        shared = self.integer(key, 0, least=0, most=len(local) - 1) if self.arch.shared_keys else 0
        own = local[: len(local) - shared]
        if any(x not in own for x in local):
            raise self.bad(key, f"is {shared}, and no layer before these sees as much as each of them")
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
            normed = self.flag("expert_weights_norm", normed)
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
        self.check_runs(unsupported)
        self._check_widths(num_heads * dim)

    def _check_widths(self, *sizes: int) -> None:
        if any(size % 32 for size in sizes):
            named = ", ".join(str(size) for size in dict.fromkeys(sizes))
            raise UnsupportedModelError(
                f"{self.file}: no backend runs layer sizes {named[:100]} (multiples of 32); choose another model"
            )

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
        given = self.value(key)
        if isinstance(given, (np.ndarray, list)) and every:
            if len(given) != layers or any(x not in (0, 1) for x in given):
                raise self.bad(key, f"is not a yes or no for each of {layers} layers")
            return tuple(bool(x) for x in given)
        if given is not None and every:
            every = self.integer(key, most=MAX_LAYERS)
        return tuple(bool(every) and n % every < every - 1 for n in range(layers))

    def _score_growth(self) -> float:
        key = "attention.temperature_scale"
        return self.number(key, 0.0, least=0.0, most=1e3) if self.arch.temperatures else 0.0
