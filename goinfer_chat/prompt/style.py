"""How the parts of the prompt look."""

from __future__ import annotations

from typing import Final

from prompt_toolkit.styles import Style

STYLE: Final = Style.from_dict(
    {
        "auto-suggestion": "fg:default dim",
        "bottom-toolbar": "noreverse dim",
        "bottom-toolbar.key": "noreverse nodim bold",
        "bottom-toolbar.text": "noreverse dim",
    }
)
