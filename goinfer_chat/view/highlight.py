"""Code with its colours, also while it grows line by line."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from goinfer_chat.view.cells import PLAIN, Line, Run, Style, merged

if TYPE_CHECKING:
    from pygments.lexer import Lexer

WINDOW: Final = 40
"""Lines that are read again with each new one. Behind them reading starts anew, where that is proved to be the same."""

STEP: Final = 5
"""Lines between two tries to find such a place."""

MAX_LINE: Final = 1000
"""A longer line keeps its block plain: some lexers take quadratic time."""

_STYLES: Final = (
    ("Token.Comment", Style("faint", italic=True)),
    ("Token.Keyword.Constant", Style("number")),
    ("Token.Keyword", Style("keyword")),
    ("Token.Operator.Word", Style("keyword")),
    ("Token.Literal.String", Style("string")),
    ("Token.Literal.Number", Style("number")),
    ("Token.Name.Function", Style("name")),
    ("Token.Name.Class", Style("name", bold=True)),
    ("Token.Name.Decorator", Style("name")),
    ("Token.Name.Tag", Style("keyword")),
    ("Token.Name.Attribute", Style("name")),
    ("Token.Generic.Inserted", Style("good")),
    ("Token.Generic.Deleted", Style("bad")),
    ("Token.Generic.Heading", Style("heading")),
)


class Highlighter:
    """One block of code. Its lines may grow in number from call to call; lines before the last one never change."""

    def __init__(self) -> None:
        self._anchor = 0
        """A line at which reading can start as if the block began there."""
        self._next_try = 2 * WINDOW
        """How many lines there must be before another such line is looked for."""
        self._known: tuple[tuple[str, ...], int, list[Line]] | None = None

    def __call__(self, lines: Sequence[str], language: str, start: int) -> list[Line]:
        lexer = _lexer(language)
        if lexer is None or any(len(line) > MAX_LINE for line in lines[start:]):
            return [(Run(line),) for line in lines[start:]]
        if start < self._anchor:  # the screen has another width, and more has to be shown again
            self._anchor, self._next_try, self._known = 0, 2 * WINDOW, None
        while len(lines) > self._next_try and start >= len(lines) - WINDOW // 2:
            self._advance(lexer, lines)
        window = tuple(lines[self._anchor :])
        if self._known is None or self._known[:2] != (window, self._anchor):
            self._known = window, self._anchor, _lexed(lexer, window)
        return self._known[2][start - self._anchor :]

    def _advance(self, lexer: Lexer, lines: Sequence[str]) -> None:
        """Move the anchor to a line from which the rest reads the same as from the old anchor, if there is one."""
        window = lines[self._anchor : self._next_try]
        whole = _lexed(lexer, window)
        for i in range(len(window) - WINDOW, len(window) - WINDOW // 2, STEP):
            if window[i].strip() and _lexed(lexer, window[i:]) == whole[i:]:
                self._anchor += i
                break
        self._next_try += WINDOW


@lru_cache(maxsize=32)
def _lexer(language: str) -> Lexer | None:
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        lexer: Lexer = get_lexer_by_name(language.lower(), stripnl=False, ensurenl=False)
    except (ClassNotFound, ImportError):  # each lexer is a module of its own, read when it is wanted
        return None
    return lexer


@lru_cache(maxsize=256)
def _style(token_type: str) -> Style:
    return next((style for prefix, style in _STYLES if token_type.startswith(prefix)), PLAIN)


def _lexed(lexer: Lexer, lines: Sequence[str]) -> list[Line]:
    plain: list[Line] = [(Run(line),) for line in lines]
    out: list[list[Run]] = [[]]
    try:
        tokens = list(lexer.get_tokens("\n".join(lines)))
    except Exception:  # noqa: BLE001 - hundreds of lexers of others, and text of a model: none may end a turn
        return plain
    for token_type, text in tokens:
        style = _style(str(token_type))
        first, *more = text.split("\n")
        out[-1].append(Run(first, style))
        out += [[Run(part, style)] for part in more]
    if len(out) != len(lines):  # the lexer has dropped or added a line: colours in the wrong place help nobody
        return plain
    return [merged(line) for line in out]
