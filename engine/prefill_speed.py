"""How fast this machine reads prompts with a model, remembered from run to run beside the kept caches.

It serves one purpose: to say what a resume has saved. That is said before the first prompt after a start is read, so
what the run before has measured must be known. A file that is lost or damaged costs nothing else.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path

FILE = "prefill-speed.json"
_MAX_BYTES = 64 * 1024
_LEAST_ROWS = 64
"""Prompt rows that must have been evaluated for their speed to say something about a long prompt."""
_NOTABLE = 0.2
"""A share by which the speed must differ to be written: it is said as "about"."""


class PrefillSpeed:
    """The speed with one model, named by the hash of its content."""

    def __init__(self, folder: Path, model: str) -> None:
        self._path = folder / FILE
        self._model = model
        self.tok_s = self._read().get(model)
        """Tokens per second; None: not known."""

    def learn(self, num_tokens: int, tok_s: float | None) -> None:
        """Take in the speed of a turn that evaluated so many tokens of its prompt."""
        if num_tokens < _LEAST_ROWS or tok_s is None:
            return
        known, self.tok_s = self.tok_s, tok_s
        if known is None or abs(tok_s / known - 1) > _NOTABLE:
            with contextlib.suppress(OSError):
                self._write(self._read() | {self._model: tok_s})

    def _read(self) -> dict[str, float]:
        """What is known of all models; nothing where the file cannot be used."""
        try:
            flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
            with open(os.open(self._path, flags), "rb") as file:
                found = json.loads(file.read(_MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {
            model: float(speed)
            for model, speed in found.items()
            if isinstance(speed, int | float) and math.isfinite(speed) and speed > 0
        }

    def _write(self, speeds: dict[str, float]) -> None:
        temporary = self._path.with_name(FILE + ".tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(temporary, flags, 0o600), "w", encoding="ascii") as file:
            json.dump({model: round(speed, 1) for model, speed in speeds.items()}, file)
        os.replace(temporary, self._path)
