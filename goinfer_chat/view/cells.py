"""Text as the cells of a terminal: how wide it is, where it may be cut, and how styled text is wrapped.

Terminals disagree about emoji that are joined, about flags and about variation selectors: one shows an astronaut in two
cells, another in four. Every width here is the largest that a terminal is known to use, so that a row never runs over
the edge; `is_certain` tells where a border must not rely on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from wcwidth import iter_graphemes, wcswidth, wcwidth


class Style(NamedTuple):
    """How a run of text looks: `role` names a colour of the theme, "" is the terminal's own."""

    role: str = ""
    bold: bool = False
    dim: bool = False
    italic: bool = False
    underline: bool = False
    strike: bool = False


PLAIN: Final = Style()
DIM: Final = Style(dim=True)


class Run(NamedTuple):
    text: str
    style: Style = PLAIN


Line = tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the screen, and how much of its text is used up at its end (characters from the start)."""

    line: Line
    end: int = 0


@lru_cache(maxsize=4096)
def _cluster(text: str) -> tuple[int, bool]:
    """The width of what is drawn as one character, and whether every terminal agrees."""
    joined = max(wcswidth(text), 0)
    apart = sum(max(wcwidth(char), 0) for char in text)
    return max(joined, apart), joined == apart


def width(text: str) -> int:
    """Cells of a text without control characters, at most."""
    if text.isascii():
        return len(text)
    return sum(_cluster(cluster)[0] for cluster in iter_graphemes(text))


def is_certain(text: str) -> bool:
    """Whether all terminals give the text the same width. Direction matters too: some draw a row from the right."""
    return text.isascii() or (
        all(_cluster(cluster)[1] for cluster in iter_graphemes(text)) and not any(map(_is_right_to_left, text))
    )


def line_width(line: Iterable[Run]) -> int:
    return sum(width(run.text) for run in line)


def num_pieces(line: Iterable[Run], columns: int) -> int:
    """Rows that a terminal of so many columns breaks a line into."""
    text = plain(line)
    if text.isascii():
        return max(-(-len(text) // columns), 1)
    rows, used = 1, 0
    for cluster in iter_graphemes(text):
        cells = width(cluster)
        rows, used = (rows + 1, cells) if used + cells > columns else (rows, used + cells)
    return rows


def plain(line: Iterable[Run]) -> str:
    return "".join(run.text for run in line)


def cut(text: str, columns: int) -> str:
    """The text in at most so many cells, with a sign where some is missing."""
    return plain(cut_line((Run(text),), columns))


def cut_line(line: Sequence[Run], columns: int) -> Line:
    """The line in at most so many cells, with a sign where some is missing."""
    if line_width(line) <= columns:
        return tuple(line)
    kept: list[Run] = []
    left = columns - 1
    for run in line:
        text = _start(run.text, left)
        kept.append(Run(text, run.style))
        left -= width(text)
        if text != run.text:
            break
    return (*kept, Run("…")) if columns > 0 else ()


def _start(text: str, columns: int) -> str:
    used = length = 0
    for cluster in iter_graphemes(text):
        used += width(cluster)
        if used > columns:
            break
        length += len(cluster)
    return text[:length]


def padded(line: Sequence[Run], columns: int) -> Line:
    """The line with blanks up to so many cells."""
    return (*line, Run(" " * max(columns - line_width(line), 0)))


def wrap(runs: Sequence[Run], columns: int, start: int = 0) -> list[Row]:
    r"""Rows of at most `columns` cells, broken between words and beside wide characters; \n breaks too.

    Only the text from character `start` on is laid out. A word longer than a row is cut between characters. The ends
    count from the start of all the text; blanks at a break belong to the row before it.
    """
    wrapping = _Wrapping(max(columns, 1), start)
    for piece in _pieces(dropped(runs, start)):
        wrapping.add(piece)
    return wrapping.finish()


def dropped(runs: Sequence[Run], count: int) -> list[Run]:
    """What is left of the runs without their first `count` characters."""
    left: list[Run] = []
    for run in runs:
        if count < len(run.text):
            left.append(Run(run.text[max(count, 0) :], run.style))
        count -= len(run.text)
    return left


def merged(runs: Iterable[Run]) -> Line:
    """The same line with neighbours of one style joined."""
    out: list[Run] = []
    for run in runs:
        if out and out[-1].style == run.style:
            out[-1] = Run(out[-1].text + run.text, run.style)
        elif run.text:
            out.append(run)
    return tuple(out)


class _Piece(NamedTuple):
    """What is kept together: blanks, a word, a wide character, or a line break."""

    kind: str
    runs: tuple[Run, ...]
    cells: int
    length: int


def _pieces(runs: Sequence[Run]) -> Iterator[_Piece]:
    kind, parts = "", [Run("")]
    for run in runs:
        for text in iter_graphemes(run.text) if not run.text.isascii() else run.text:
            found = "\n" if text == "\n" else " " if text == " " else "wide" if _is_wide(text) else "word"
            if parts[0].text and (found != kind or found in ("wide", "\n")):
                yield _piece(kind, parts)
                parts = [Run("", run.style)]
            kind = found
            if parts[-1].style == run.style:
                parts[-1] = Run(parts[-1].text + text, run.style)
            elif not parts[-1].text:
                parts[-1] = Run(text, run.style)
            else:
                parts.append(Run(text, run.style))
    if parts[0].text:
        yield _piece(kind, parts)


def _piece(kind: str, parts: list[Run]) -> _Piece:
    return _Piece(kind, tuple(parts), line_width(parts), sum(len(run.text) for run in parts))


def _is_wide(cluster: str) -> bool:
    return not cluster.isascii() and width(cluster) > 1


def _is_right_to_left(char: str) -> bool:
    return "\u0590" <= char <= "\u08ff" or "\ufb1d" <= char <= "\ufdff" or "\ufe70" <= char <= "\ufefc"


class _Wrapping:
    def __init__(self, columns: int, start: int) -> None:
        self._columns = columns
        self._end = start
        self._rows: list[Row] = []
        self._row: list[Run] = []
        self._used = 0
        self._broken = False
        """Whether the row began because the last one was full: blanks at its start are not shown."""

    def add(self, piece: _Piece) -> None:
        if piece.kind == "\n":
            self._end += 1
            self._break(False)
        elif piece.kind == " ":
            if self._broken and not self._row:
                self._end += piece.length
                if self._rows:
                    self._rows[-1] = Row(self._rows[-1].line, self._end)
                return
            self._blanks(piece)
        else:
            if self._used + piece.cells > self._columns and self._used:
                self._break(True)
            self._put(piece)

    def finish(self) -> list[Row]:
        if self._row or not self._rows:
            self._break(False)
        return self._rows

    def _blanks(self, piece: _Piece) -> None:
        """Blanks that do not fit end the row."""
        room = self._columns - self._used
        self._end += piece.length
        if piece.length <= room:
            self._row += piece.runs
            self._used += piece.length
        else:
            self._row.append(Run(" " * room, piece.runs[0].style))
            self._break(True)

    def _put(self, piece: _Piece) -> None:
        if piece.cells <= self._columns:
            self._row += piece.runs
            self._used += piece.cells
            self._end += piece.length
            return
        for run in piece.runs:
            for cluster in iter_graphemes(run.text):
                cells = width(cluster)
                if self._used + cells > self._columns and self._used:
                    self._break(True)
                self._row.append(Run(cluster if cells <= self._columns else "?", run.style))
                self._used += cells
                self._end += len(cluster)

    def _break(self, full: bool) -> None:
        line = merged(self._row)
        if line and full:
            *front, last = line
            line = (*front, Run(last.text.rstrip(" "), last.style)) if last.text.strip(" ") else tuple(front)
        self._rows.append(Row(line, self._end))
        self._row, self._used, self._broken = [], 0, full
