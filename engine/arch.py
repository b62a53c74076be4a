"""Architectures as data: one row each, and the configuration a GGUF file gives it.

A row says only what cannot be read from the file: how heads are rotated, which norms there are, the activation
function. Sizes, biases and tied embeddings are the file's. docs/architecture.md says how to add a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf_file import GGUFFile
from engine.kernels.plan import QUERY_TILE
from engine.quant import dequantize
from engine.rope import cos_sin, frequencies


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchSpec:
    """What a family of models computes, beside the plain pre-norm decoder with a gated feed-forward layer."""

    name: str
    neox_rope: bool
    """Rotate pairs (d, d + half) as in GPT-NeoX; False: pairs (2 d, 2 d + 1)."""
    activation: Literal["silu", "gelu"] = "silu"
    post_norms: bool = False
    """A norm on the output of attention and of the feed-forward layer before it is added (Gemma 2 and 3)."""
    scale_embedding: bool = False
    """Multiply embeddings with sqrt(hidden size)."""
    local_layers: int = 0
    """Every n-th layer sees everything, the others a window of `attention.sliding_window`; 0: no windows."""
    local_rope_base: float | None = None
    """RoPE base of the layers with a window, where it is not the model's."""


ARCHITECTURES: Mapping[str, ArchSpec] = MappingProxyType(
    {
        a.name: a
        for a in (
            ArchSpec(name="llama", neox_rope=False),
            ArchSpec(name="qwen2", neox_rope=True),
            ArchSpec(name="qwen3", neox_rope=True),
            ArchSpec(
                name="gemma3",
                neox_rope=True,
                activation="gelu",
                post_norms=True,
                scale_embedding=True,
                local_layers=6,
                local_rope_base=10000.0,
            ),
        )
    }
)

MAX_LAYERS, MAX_WIDTH, MAX_CONTEXT = 1024, 1 << 20, 1 << 27
"""Bounds that no model comes near: a file beyond them is damaged."""


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
    vocab_size: int
    train_context_size: int
    norm_eps: float
    rope_base: float
    rope_dim: int
    """Leading values of a head that are rotated."""
    rope_scale: float
    """Linear scaling: positions are divided by it."""
    rope_factors: tuple[float, ...]
    """Llama 3: each frequency is divided by its factor. Empty: none."""
    window: int
    """Positions a row of a local layer sees, itself included; 0: no local layers."""

    @property
    def architecture(self) -> str:
        return self.arch.name

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied with: 1 / sqrt(head size), but for the largest Gemma 3 (llama.cpp, gemma3)."""
        if self.arch.name == "gemma3" and self.num_layers == 62:
            return 1 / math.sqrt(self.hidden_size / self.num_heads)
        return 1 / math.sqrt(self.head_dim)

    def is_local(self, layer: int) -> bool:
        """Whether this layer sees a window only."""
        every = self.arch.local_layers
        return bool(self.window and every and layer % every < every - 1)

    def rope_tables(self, num_positions: int, local: bool) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines [positions, rope_dim / 2] f32 by which a local layer, or another, rotates pairs."""
        base, scale = self.rope_base, self.rope_scale
        if local and self.arch.local_rope_base is not None:
            base, scale = self.arch.local_rope_base, 1.0
        per_position = frequencies(base, self.rope_dim, scale=scale, factors=self.rope_factors)
        return cos_sin(num_positions, per_position)

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
            raise UnsupportedModelError(
                f"{self.file}: architecture {shown} is not supported; supported: {', '.join(ARCHITECTURES)}"
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
        layers = self.integer("block_count", most=MAX_LAYERS)
        hidden = self.integer("embedding_length", most=MAX_WIDTH)
        heads = self.integer("attention.head_count", most=MAX_WIDTH)
        kv_heads = self.integer("attention.head_count_kv", heads, most=MAX_WIDTH)
        head_dim = self.integer("attention.key_length", hidden // heads, most=MAX_WIDTH)
        value_dim = self.integer("attention.value_length", head_dim, most=MAX_WIDTH)
        ffn = self.integer("feed_forward_length", most=MAX_WIDTH)
        rope_dim = self.integer("rope.dimension_count", head_dim, most=head_dim)
        embedding = self.gguf.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelFileError(f"{self.file}: tensor token_embd.weight is missing or is no matrix")
        self._check_sizes(hidden, heads, kv_heads, head_dim, value_dim, ffn, rope_dim)
        name = self.gguf.metadata.get("general.name")
        window = 0
        if self.arch.local_layers:
            window = self.integer("attention.sliding_window", 0, least=0, most=MAX_CONTEXT)
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
            vocab_size=embedding.shape[0],
            train_context_size=self.integer("context_length", 2048, most=MAX_CONTEXT),
            norm_eps=self.number("attention.layer_norm_rms_epsilon", None, least=0.0, most=1.0),
            rope_base=self.number("rope.freq_base", 10000.0, least=1.0, most=1e12),
            rope_dim=rope_dim,
            rope_scale=self._rope_scale(),
            rope_factors=self._rope_factors(rope_dim),
            window=window,
        )

    def _check_sizes(
        self, hidden: int, heads: int, kv_heads: int, head_dim: int, value_dim: int, ffn: int, rope_dim: int
    ) -> None:
        if heads % kv_heads:
            raise ModelFileError(f"{self.file}: {heads} query heads cannot share {kv_heads} KV heads evenly")
        unsupported = ""
        if head_dim != value_dim:
            unsupported = f"keys of {head_dim} and values of {value_dim}"
        elif head_dim % 16 or head_dim > 512 or rope_dim % 16:
            unsupported = f"a head size of {head_dim} with {rope_dim} rotated values (multiples of 16 up to 512)"
        elif heads // kv_heads > QUERY_TILE:
            unsupported = f"{heads // kv_heads} query heads for each KV head (at most {QUERY_TILE})"
        elif hidden % 32 or ffn % 32 or heads * head_dim % 32:
            unsupported = f"layer sizes {hidden}, {heads * head_dim} and {ffn} (multiples of 32)"
        if unsupported:
            raise UnsupportedModelError(f"{self.file}: {unsupported}: the cpu backend cannot run it")

    def _rope_scale(self) -> float:
        kind = self._value("rope.scaling.type")
        if kind in (None, "none"):
            # Old files name only the factor.
            return self.number("rope.scale_linear", 1.0, least=1e-3, most=1e6)
        if kind == "linear":
            return self.number("rope.scaling.factor", 1.0, least=1e-3, most=1e6)
        raise UnsupportedModelError(f"{self.file}: RoPE scaling {str(kind)[:32]!r} is not supported; supported: linear")

    def _rope_factors(self, rope_dim: int) -> tuple[float, ...]:
        """Tensor rope_freqs.weight, which files of Llama 3.1 and later carry."""
        info = self.gguf.tensors.get("rope_freqs.weight")
        if info is None:
            return ()
        factors = dequantize(info.type, self.gguf.data(info.name)).reshape(-1)
        if len(factors) != rope_dim // 2 or not np.all(np.isfinite(factors)) or not np.all(factors > 0):
            raise ModelFileError(f"{self.file}: rope_freqs.weight must be {rope_dim // 2} positive numbers")
        return tuple(float(f) for f in factors)
