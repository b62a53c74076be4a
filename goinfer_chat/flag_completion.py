"""What a shell offers behind a flag: `goinfer-chat --install-completion`, then Tab."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Final

from engine.errors import GoinferError
from goinfer_chat.settings import Setting

_PLAIN: Final = re.compile(r"\w[\w./+@-]*")
"""Other words are not offered: bash puts them unquoted on the line, where blanks part them and `$(...)` would run, and
Typer has zsh evaluate what is offered. A name may come with an imported file."""


def completions(setting: Setting) -> Callable[[str], list[str]] | None:
    """The function that Typer asks; None where files are the right offer, or nothing is known."""
    choices = (lambda: list(setting.choices)) if setting.choices else _SOURCES.get(setting.flag)
    if choices is None:
        return None

    def offer(incomplete: str) -> list[str]:
        try:
            return [choice for choice in choices() if choice.startswith(incomplete) and _PLAIN.fullmatch(choice)]
        except (GoinferError, OSError):  # a shell that completes shows no errors
            return []

    return offer


def _models() -> list[str]:
    from goinfer_chat.models import catalogue

    return [model.name for model in catalogue.list_models()]


def _sessions() -> list[str]:
    from goinfer_chat.listing import name_of
    from goinfer_chat.resolving import resolve
    from goinfer_chat.store import Store, session_folder

    folder = session_folder(resolve({}, os.environ).session_dir)
    if not folder.is_dir():
        return []
    with Store(folder) as store:
        return [name_of(conversation) for conversation in store.recent(100)]


def _profiles() -> list[str]:
    from goinfer_chat.settings_file import PROFILES, VARIABLE, read_tables, settings_path

    path = settings_path(os.environ.get(VARIABLE) or None)
    tables = read_tables(path, must_be_there=False) if path is not None else None
    return list((tables or {}).get(PROFILES, {}))


_SOURCES: Final[dict[str, Callable[[], list[str]]]] = {
    "model": _models,
    "draft": _models,
    "resume": _sessions,
    "profile": _profiles,
}
