"""The terms of a search, and the line of a message that shows where it has them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from goinfer_chat.store.rows import storable

SNIPPET: Final = 100
"""Characters of a message that are shown."""
SNIPPET_BEFORE: Final = 30
"""Of these, how many stand before the first term."""


def terms_of(text: str) -> list[str]:
    """Words, and phrases that stand in quotes, in their order."""
    clean = storable(text.replace("\0", " "))
    return [phrase or word for phrase, word in re.findall(r'"([^"]+)"|([^\s"]+)', clean) if (phrase or word).strip()]


def snippet(text: str, terms: Iterable[str]) -> tuple[str, tuple[int, int] | None]:
    """One line of the text around the first term in it, and where that is in the line."""
    matches = [match for term in terms if (match := re.search(re.escape(term), text, re.IGNORECASE))]
    if not matches:
        return _one_line(text[:SNIPPET]), None
    first = min(matches, key=lambda match: match.start())
    start = max(0, first.start() - SNIPPET_BEFORE)
    end = min(len(text), max(first.end(), start + SNIPPET))
    before = ("…" if start else "") + _one_line(text[start : first.start()], keep_end=True)
    inside = _one_line(first[0])
    after = _one_line(text[first.end() : end], keep_end=True) + ("…" if end < len(text) else "")
    return before + inside + after, (len(before), len(before) + len(inside))


def _one_line(text: str, *, keep_end: bool = False) -> str:
    line = re.sub(r"\s+", " ", text)
    return line if keep_end else line.strip()
