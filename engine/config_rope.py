"""How a model rotates queries and keys, read from its file: the scaling of RoPE, its factors, pairs in sections."""

from __future__ import annotations

import numpy as np

from engine.config import Heads
from engine.errors import ModelFileError, UnsupportedModelError
from engine.metadata_reader import MAX_WIDTH, MetadataReader
from engine.quant import dequantize
from engine.rope import yarn_magnitude

ROPE_KINDS = ("none", "linear", "yarn", "longrope")


def rotates_all_pairs(reader: MetadataReader) -> bool:
    """Whether a text's positions reach every rotated pair where pairs have those in an image too (IM-RoPE)."""
    sections = reader.value("rope.dimension_sections")
    if sections is None:
        return True
    if not isinstance(sections, (list, np.ndarray)):
        raise reader.bad("rope.dimension_sections", "is not a list")
    pairs = reader.integer("rope.dimension_count", 0, least=0, most=MAX_WIDTH) // 2
    return len(sections) >= 3 and all(n < 3 * sections[n % 3] for n in range(pairs))


def check_sections(reader: MetadataReader) -> None:
    """Sections say which of several positions rotates a pair. For text the first three are one, and a fourth is not
    supported. Raises UnsupportedModelError for a file with a fourth."""
    key = "rope.dimension_sections"
    given = reader.value(key)
    if not reader.arch.rope_sections or given is None:
        return
    if not isinstance(given, (np.ndarray, list)):
        raise reader.bad(key, "is not a list")
    if any(x != 0 for x in given[3:]):
        raise UnsupportedModelError(
            f"{reader.file}: {reader.arch.name}.{key} has a fourth section, which is not supported"
        )


def _rope_kind(reader: MetadataReader) -> str:
    kind = reader.value("rope.scaling.type")
    if kind is None:
        return "linear"  # old files name only the factor
    if not isinstance(kind, str):
        raise reader.bad("rope.scaling.type", "is not a word")
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"{reader.file}: RoPE scaling {kind[:32]!r} is not supported; supported: {', '.join(ROPE_KINDS)}"
        )
    return kind


def rope_scale(reader: MetadataReader) -> float:
    """How many times the context is stretched; 1.0 where it is not."""
    if _rope_kind(reader) == "none":
        return 1.0
    key = "rope.scaling.factor" if reader.value("rope.scaling.factor") is not None else "rope.scale_linear"
    scale = reader.number(key, 1.0, least=0.0, most=1e6) or 1.0  # 0: none
    return reader.number(key, 1.0, least=1e-3, most=1e6) if scale < 1e-3 else scale


def yarn_bounds(reader: MetadataReader) -> tuple[float, float] | None:
    """YaRN's two bounds, in rotations over the context (Peng et al. 2023, section 3.2); None for other scalings."""
    if _rope_kind(reader) != "yarn":
        return None
    fast, slow = (
        reader.number(f"rope.scaling.yarn_beta_{which}", default, least=1e-3, most=1e6)
        for which, default in (("fast", 32.0), ("slow", 1.0))
    )
    return fast, slow


def rope_magnitude(reader: MetadataReader, scale: float) -> float:
    """YaRN makes cosines and sines larger (Peng et al. 2023, section 3.4); Phi 3's factor is in the file."""
    given = reader.number("rope.scaling.attn_factor", 1.0, least=1e-3, most=1e3)
    if _rope_kind(reader) != "yarn":
        return given
    undone = reader.number("rope.scaling.yarn_log_multiplier", 0.0, least=0.0, most=1e3)
    return given * yarn_magnitude(scale, 1.0) / yarn_magnitude(scale, undone)


def rope_factors(reader: MetadataReader, heads: Heads, *names: str) -> tuple[float, ...]:
    """The first of these tensors: Llama 3.1 and later have rope_freqs, Phi 3 has short and long factors."""
    info = next((i for n in names if (i := reader.gguf.tensors.get(f"{n}.weight")) is not None), None)
    if info is None:
        return ()
    factors, rope_dim = dequantize(info.type, reader.gguf.data(info.name)).reshape(-1), heads.rope_dim
    if len(factors) != rope_dim // 2 or not np.all(np.isfinite(factors)) or not np.all(factors >= 1e-3):
        raise ModelFileError(f"{reader.file}: {info.name} must be {rope_dim // 2} positive numbers")
    return tuple(float(f) for f in factors)


def local_rope_base(reader: MetadataReader) -> float | None:
    """The base in layers with a sliding window; None where it is that of all."""
    given = reader.arch.local_rope_base
    return given and reader.number("rope.freq_base_swa", given, least=1.0, most=1e12)
