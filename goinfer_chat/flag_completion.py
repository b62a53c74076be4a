"""What a shell offers behind a flag or a command: `goinfer-chat --install-completion`, then Tab."""

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


Offer = Callable[[str], list[str]]
"""What Typer asks: the words that may stand where this is the start of one."""


def completions(setting: Setting) -> Offer | None:
    """None where files are the right offer, or nothing is known."""
    choices = (lambda: list(setting.choices)) if setting.choices else _SOURCES.get(setting.flag)
    return None if choices is None else offer_of(choices)


def offer_of(choices: Callable[[], list[str]]) -> Offer:
    def offer(incomplete: str) -> list[str]:
        try:
            return [choice for choice in choices() if choice.startswith(incomplete) and _PLAIN.fullmatch(choice)]
        except (GoinferError, OSError):  # a shell that completes shows no errors
            return []

    return offer


def models() -> list[str]:
    from goinfer_chat.models import catalogue

    return [model.name for model in catalogue.list_models()]


def sessions() -> list[str]:
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
    "model": models,
    "draft": models,
    "resume": sessions,
    "profile": _profiles,
}
