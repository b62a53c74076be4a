"""Names of conversations: one short line, safe on a screen and as the name of an exported file."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Container
from typing import Final

from engine.errors import UsageError

MAX_NAME: Final = 80
"""Characters."""
_MAX_DRAWN: Final = 48
_JOINERS: Final = "\u200c\u200d"
_ID: Final = re.compile(r"[0-9a-f]{16}")


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def _is_plain(character: str) -> bool:
    """No control character, line end or surrogate, and no format character, which may turn text around.

    Joiners stay: emoji and many scripts need them.
    """
    return character in _JOINERS or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def check_name(name: str) -> str:
    """The name in normal form (NFC, stripped). Raises UsageError for one that cannot be taken."""
    name = unicodedata.normalize("NFC", name).strip()
    if not name.strip(_JOINERS):
        raise UsageError("the name is empty")
    if len(name) > MAX_NAME:
        raise UsageError(f"the name has {len(name)} characters; at most {MAX_NAME} can be taken")
    if wrong := next((character for character in name if not _is_plain(character)), None):
        raise UsageError(f"the name has the character U+{ord(wrong):04X}, which names must not contain")
    if name.startswith(".") or "/" in name or "\\" in name:
        raise UsageError(f"the name {name!r} looks like a path; names contain no slashes and do not start with a dot")
    if is_id(name):
        raise UsageError(f"the name {name!r} looks like the id of a conversation")
    return name


def name_from(text: str) -> str:
    """A name for a conversation that starts with this message: the first words of its first paragraph, on one line."""
    text = text.strip().partition("\n\n")[0]
    plain = "".join(character if _is_plain(character) and character not in "/\\" else " " for character in text[:999])
    name = " ".join(unicodedata.normalize("NFC", plain).split()).lstrip(".- ")
    name = name if name.strip(_JOINERS) else ""
    if len(name) > _MAX_DRAWN:
        cut = name[:_MAX_DRAWN]
        name = (cut.rpartition(" ")[0] or cut).rstrip(" ,.;:") + "…"
    return name if name and not is_id(name) else "conversation"


def numbered(name: str, taken: Container[str]) -> str:
    """The name, or the first of `name (2)`, `name (3)` ... that is not taken."""
    if name not in taken:
        return name
    base, number = name, 2
    if match := re.fullmatch(r"(.+) \((\d{1,6})\)", name):
        base, number = match[1], int(match[2]) + 1
    while (candidate := f"{base[: MAX_NAME - 10]} ({number})") in taken:
        number += 1
    return candidate
