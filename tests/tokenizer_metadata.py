"""What a file says about its tokenizer, for tests: read, changed, looked up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from engine.gguf_file import open_gguf


def read_metadata(path: Path) -> dict[str, Any]:
    """Of a GGUF file, the keys of the tokenizer."""
    with open_gguf(path) as file:
        return {
            key: value.copy() if isinstance(value, np.ndarray) else value
            for key, value in file.metadata.items()
            if key.startswith("tokenizer.")
        }


def ids_of(metadata: dict[str, Any], *texts: str) -> list[int]:
    return [metadata["tokenizer.ggml.tokens"].index(text) for text in texts]


def add_tokens(metadata: dict[str, Any], *tokens: tuple[str, int]) -> dict[str, Any]:
    """The metadata with more tokens, as (text, type), at the end."""
    changed = dict(metadata)
    changed["tokenizer.ggml.tokens"] = metadata["tokenizer.ggml.tokens"] + [text for text, _ in tokens]
    changed["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"] + [kind for _, kind in tokens]
    if "tokenizer.ggml.scores" in metadata:
        changed["tokenizer.ggml.scores"] = metadata["tokenizer.ggml.scores"] + [-1000.0] * len(tokens)
    return changed
