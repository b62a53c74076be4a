"""A model's sizes and settings, as its file gives them (`config_reader.py`) for its architecture (`arch.py`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.arch import ArchSpec
from engine.gguf_file import GGUFFile
from engine.kernels.plan import TAPS
from engine.rope import cos_sin, frequencies, temperatures, yarn_shares

UNSAID = -1e30
"""Logit of a token that is not said: finite, so that all that is computed of it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: of many feed-forward layers, each row passes the few that its router chooses."""

    count: int
    chosen: int
    """Experts that a row passes."""
    ffn_size: int
    scale: float
    """What the weights of the chosen ones are multiplied with."""
    layers: frozenset[int]
    """Which have experts."""
    is_even: bool
    """An expert's share is the sigmoid of its own logit, instead of the softmax of all."""
    is_normed: bool
    """The shares of the chosen ones are scaled to a sum of 1."""


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

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Heads, keys and values of the matrices."""
        return self.num_value_heads, self.head_dim, self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionSizes:
    """Of the layers that are short convolutions."""

    layers: frozenset[int]
    """Which they are."""
    channels: int
    taps: int
    """Tokens that they see, the current one included."""

    @property
    def layer_bytes(self) -> int:
        """Of the state of a layer, f32: what it saw last."""
        return 4 * (TAPS - 1) * self.channels


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanSizes:
    """Of the state space layers (Mamba 2)."""

    layers: frozenset[int]
    """Which they are."""
    num_heads: int
    head_dim: int
    """Of a value."""
    num_groups: int
    """Heads of a group share keys and queries."""
    key_dim: int
    norm_eps: float

    @property
    def values(self) -> int:
        """Numbers of all values of a token."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: values, keys and queries."""
        return self.values + 2 * self.num_groups * self.key_dim

    @property
    def rows(self) -> int:
        """Of the matrix that makes a gate for each value, all channels, and a step for each head."""
        return self.values + self.channels + self.num_heads

    @property
    def layer_bytes(self) -> int:
        """Of the state of a layer, f32: what the convolution saw last, and a matrix for each head."""
        return 4 * ((TAPS - 1) * self.channels + self.values * self.key_dim)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Heads, keys and values of the matrices."""
        return self.num_heads, self.key_dim, self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads of a layer's attention, beside how many queries there are."""

    num_kv_heads: int
    dim: int
    rope_dim: int
    """Leading values of a head that are rotated."""
    keys_are_values: bool = False
    """Values are made of what keys are made of."""

    @property
    def keys(self) -> int:
        """Numbers of all keys of a token, and of all its values."""
        return self.num_kv_heads * self.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model's sizes, checked against each other and against the tensors."""

    name: str
    arch: ArchSpec
    num_layers: int
    hidden_size: int
    num_heads: int
    heads: tuple[Heads, ...]
    """Of each layer."""
    ffn_sizes: tuple[int, ...]
    """Of each layer: of what every row passes there, or 0. That may be an expert that every row passes."""
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
    """Positions a row of a local layer sees, itself included; below 0: those from the last multiple of it on; 0: no
    local layers."""
    local: tuple[bool, ...]
    """Which layers see a window only."""
    is_parallel: bool
    """The feed-forward layer takes what attention takes."""
    local_rope_base: float | None = None
    """RoPE base of the layers with a window, where it is not `rope_base`."""
    num_shared_layers: int = 0
    """The last so many layers have no keys and values: `kv_layer` says whose they look at."""
    layer_embedding_size: int = 0
    """Size of the embedding that each token has for each layer; 0 where the model has none."""
    unsaid_ids: tuple[int, ...] = ()
    """Tokens that the model must not say: their logits are UNSAID."""
    delta: DeltaSizes | None = None
    convolution: ConvolutionSizes | None = None
    scan: ScanSizes | None = None
    is_unrotated: bool = False
    """No layer has a rotary embedding."""
    num_spare_layers: int = 0
    """Layers behind the last one that the file has for guessing ahead (multi-token prediction); they are not run."""

    @property
    def architecture(self) -> str:
        return self.arch.name

    @property
    def has_shared_gate(self) -> bool:
        """Whether the shared expert has a factor of its own for each row."""
        return self.arch.shared_expert == "gated" and self.ffn_sizes[0] > 0

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Those that have keys and values of their own."""
        return tuple(n for n in range(self.num_layers - self.num_shared_layers) if not self.has_state(n))

    @property
    def last_remembered(self) -> int:
        """The last layer that leaves something to later tokens: behind it only rows go on that are wanted."""
        return self.num_layers - 1 - self.num_shared_layers

    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values a layer looks at: the last one that has some and sees as much."""
        if layer <= self.last_remembered:
            return layer
        return max(n for n in self.attention_layers if self.is_local(n) == self.is_local(layer))

    @property
    def state_bytes(self) -> int:
        """Of the running state of a conversation; 0: there is none."""
        return len(self.recurrent.layers) * self.recurrent.layer_bytes if self.recurrent else 0

    @property
    def recurrent(self) -> DeltaSizes | ConvolutionSizes | ScanSizes | None:
        """Of the layers with a running state, of which a model has one kind at most."""
        return self.delta or self.convolution or self.scan

    def has_state(self, layer: int) -> bool:
        """Whether this layer has a running state instead of keys and values."""
        return self.recurrent is not None and layer in self.recurrent.layers

    def state_offset(self, layer: int) -> int:
        """Bytes of this layer's state from the start of a conversation's."""
        assert self.recurrent
        return sorted(self.recurrent.layers).index(layer) * self.recurrent.layer_bytes

    def is_local(self, layer: int) -> bool:
        """Whether this layer sees a window only."""
        return self.local[layer]

    def is_rotated(self, layer: int) -> bool:
        """Whether this layer has a rotary embedding."""
        if self.is_unrotated:
            return False
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
        base = (self.local_rope_base if local else None) or self.rope_base
        dim = self.heads[self.local.index(local)].rope_dim
        if local and not self.arch.local_rope_scaling:
            factors = () if self.arch.layer_sizes else self.rope_factors
            return cos_sin(num_positions, frequencies(base, dim, factors=factors))
        scaled = yarn_shares(base, dim, self.rope_context, *self.yarn) if self.yarn else None
        per_position = frequencies(base, dim, scale=self.rope_scale, factors=self.rope_factors, scaled=scaled)
        return cos_sin(num_positions, per_position, self.rope_magnitude)

    def query_scales(self, num_positions: int, layer: int) -> NDArray[np.float32]:
        """What a query of a layer is multiplied with at each position [positions] f32."""
        if self.arch.unrotated_growth and not self.is_rotated(layer):
            grown = temperatures(num_positions, abs(self.window), self.arch.unrotated_growth, 1)
        else:
            grown = temperatures(num_positions, self.rope_context, self.score_growth)
        return grown * np.float32(self.attention_scale)

    def has_unit_heads(self, layer: int) -> bool:
        """Whether q and k of this layer pass a norm without weights."""
        return self.arch.unit_heads and self.is_rotated(layer) and not (self.experts and self.experts.count == 128)

    def scores_grow(self, layer: int) -> bool:
        """Whether `query_scales` differ from position to position."""
        return self.score_growth > 0 or (self.arch.unrotated_growth > 0 and not self.is_rotated(layer))

    @classmethod
    def from_gguf(cls, gguf: GGUFFile) -> ModelConfig:
        """Read and check the configuration. Raises UnsupportedModelError or ModelFileError."""
        from engine.config_reader import ConfigReader  # which makes these

        return ConfigReader(gguf).config()
