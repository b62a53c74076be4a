"""What a model takes in a device's memory, before anything is loaded."""

from __future__ import annotations

import math

from engine.api import KVType
from engine.config import ModelConfig
from engine.gguf_file import GGUFFile
from engine.kv_cache import blocks_for
from engine.kv_layout import KVLayout
from engine.memory import LEAST_CONTEXT, LEAST_STATES
from engine.torch_backend.matrices import Form


def weight_bytes(gguf: GGUFFile, form: Form) -> int:
    if form == "blocks":
        return sum(info.nbytes for info in gguf.tensors.values())
    return sum(math.prod(info.shape) for info in gguf.tensors.values()) * (4 if form == "f32" else 2)


def block_bytes(gguf: GGUFFile, kv_type: KVType) -> int:
    """Raises UnsupportedModelError or ModelFileError."""
    return KVLayout.of(ModelConfig.from_gguf(gguf), kv_type).block_bytes


def least_bytes(gguf: GGUFFile, form: Form, kv_type: KVType) -> int:
    """With a small context. Raises UnsupportedModelError or ModelFileError."""
    states = LEAST_STATES * ModelConfig.from_gguf(gguf).state_bytes
    return weight_bytes(gguf, form) + blocks_for(LEAST_CONTEXT) * block_bytes(gguf, kv_type) + states
