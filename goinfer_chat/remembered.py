"""What the program remembers from start to start without being told: how large the panel is.

A small JSON file in the user's folder for data, for its owner alone. Nothing depends on it: where it cannot be read or
written, nothing is remembered.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import platformdirs

from goinfer_chat.files import changing, write_private

FILE: Final = "remembered.json"


def recall(name: str) -> str | None:
    value = _read().get(name)
    return value if isinstance(value, str) else None


def remember(name: str, value: str) -> None:
    """In place of what was remembered under that name."""
    with suppress(OSError):
        path = _path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with changing(path):
            write_private(path, iter([json.dumps(_read() | {name: value}).encode()]))


def _read() -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        values = json.loads(_path().read_text(encoding="utf-8"))
        return values if isinstance(values, dict) else {}
    return {}


def _path() -> Path:
    return platformdirs.user_data_path("goinfer-chat") / FILE
