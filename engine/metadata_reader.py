"""Values from the metadata of a GGUF file, checked for kind and bounds, with errors that name the file and the key."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.arch import ARCHITECTURES, NOT_YET
from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf_file import GGUFFile, shown

MAX_LAYERS, MAX_WIDTH, MAX_CONTEXT, MAX_EXPERTS = 1024, 1 << 20, 1 << 27, 1024
"""Bounds that no model comes near: a file beyond them is damaged."""


class MetadataReader:
    """The metadata under the prefix of the file's architecture, which must be one that is known."""

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

    def value(self, key: str) -> Any:
        """As the file has it; None where it has none."""
        return self.gguf.metadata.get(f"{self.arch.name}.{key}")

    def bad(self, key: str, why: str) -> ModelFileError:
        """The error about the value of a key."""
        return ModelFileError(f"{self.file}: {self.arch.name}.{key} {why}")

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int) -> int:
        """The whole number under a key; one for each layer must be the same for all.

        Raises ModelFileError where it is missing without a default, no such number or out of bounds, and
        UnsupportedModelError where layers differ.
        """
        value = self.value(key)
        if value is None:
            if default is None:
                raise self.bad(key, "is missing")
            return default
        if isinstance(value, (np.ndarray, list)):
            if len(value) == 0 or any(v != value[0] for v in value):
                raise UnsupportedModelError(f"{self.file}: {self.arch.name}.{key} differs from layer to layer")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise self.bad(key, "is not a whole number")
        if not least <= value <= most:
            raise self.bad(key, f"is {value}, which is not between {least} and {most}")
        return int(value)

    def integers(self, key: str, layers: int, default: int | None = None, *, most: int) -> tuple[int, ...]:
        """The whole number of each layer under a key, which may be one for all. Raises ModelFileError."""
        value = self.value(key)
        if not isinstance(value, (np.ndarray, list)):
            return (self.integer(key, default, most=most),) * layers
        if len(value) != layers or any(not isinstance(v, (int, np.integer)) or not 1 <= v <= most for v in value):
            raise self.bad(key, f"is not a number between 1 and {most} for each of {layers} layers")
        return tuple(int(v) for v in value)

    def counts(self, key: str, layers: int, *, most: int) -> tuple[int, ...]:
        """The whole number of each layer under a key, which may be 0. Raises ModelFileError."""
        value = self.value(key)
        if (
            not isinstance(value, (np.ndarray, list))
            or len(value) != layers
            or any(isinstance(v, bool) or not isinstance(v, (int, np.integer)) or not 0 <= v <= most for v in value)
        ):
            raise self.bad(key, f"is not a number between 0 and {most} for each of {layers} layers")
        return tuple(int(v) for v in value)

    def number(self, key: str, default: float | None, *, least: float, most: float) -> float:
        """The finite number under a key. Raises ModelFileError as `integer` does."""
        value = self.value(key)
        if value is None:
            if default is None:
                raise self.bad(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.bad(key, "is not a number")
        if not least <= value <= most:  # also false for NaN
            raise self.bad(key, f"is {value}, which is not between {least} and {most}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false under a key. Raises ModelFileError."""
        value = self.value(key)
        if value is not None and not isinstance(value, bool):
            raise self.bad(key, "is not true or false")
        return default if value is None else value

    def check_runs(self, unsupported: str) -> None:
        """Raises UnsupportedModelError for what no backend runs; "" stands for nothing of the kind."""
        if unsupported:
            raise UnsupportedModelError(f"{self.file}: no backend runs {unsupported}; choose another model")
