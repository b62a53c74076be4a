"""Where tests find models and what llama.cpp said about them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
import pytest


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """`model_path("smollm2-135m")`: the file of a model of the catalogue; the test is skipped where there is none.

    Looked for in the folder that GOINFER_CHAT_MODELS names, else where `goinfer-chat pull` puts models.
    """
    named = os.environ.get("GOINFER_CHAT_MODELS")
    folder = Path(named) if named else platformdirs.user_cache_path("goinfer-chat") / "models"

    def find(name: str) -> Path:
        path = folder / f"{name}.gguf"
        if not path.is_file():
            pytest.skip(f"no {path.name} in {folder}: fetch it with `goinfer-chat pull {name}`")
        return path

    return find


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, Any]]:
    """`golden("smollm2-135m")`: token ids, rendered prompts and greedy replies of llama.cpp for that model."""

    def load(name: str) -> dict[str, Any]:
        text = (Path(__file__).parent / "data" / "goldens" / f"{name}.json").read_text(encoding="utf-8")
        content: dict[str, Any] = json.loads(text)
        return content

    return load
