"""The blocks that Markdown comes to, and how each is laid out in rows: paragraphs, code, tables, rules.

A block says up to which position its rows are `stable`: no text that follows can change them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from goinfer_chat.view.cells import DIM, Line, Row, Run, Style, cut_line, line_width, merged, padded, plain, wrap

MAX_PROSE_COLUMNS: Final = 100
"""Longer rows of prose are hard to read; code and tables take what the screen has."""

Highlight = Callable[[Sequence[str], str, int], list[Line]]
"""(lines of a block of code, its language, the first line wanted) -> the lines from there on, coloured."""


def _uncoloured(lines: Sequence[str], language: str, start: int) -> list[Line]:
    return [(Run(line),) for line in lines[start:]]


@dataclass(frozen=True, slots=True)
class Flow:
    """Text that wraps: a paragraph, a heading, the text of a list item."""

    runs: Line
    first: Line = ()
    """What its first row begins with, and `rest` what all others do."""
    rest: Line = ()
    gap: bool = False
    """Whether an empty row stands above it."""
    line: int = 0
    """Where its top-level block, or its item of a top-level list, begins in the source: parsing can begin there."""
    may_change: bool = False
    """Whether more text can make something else of it."""

    def rows(self, columns: int, start: int = 0) -> list[Row]:
        """The rows from position `start` on: 0, or the end of an earlier row."""
        if start and start >= sum(len(run.text) for run in self.runs):
            return []
        columns = min(columns, MAX_PROSE_COLUMNS)
        first, rest = (_fitting(prefix, columns) for prefix in (self.first, self.rest))
        inside = columns - max(line_width(first), line_width(rest))
        prefixes = (first if not start else rest, rest)
        rows = wrap(self.runs, inside, start)
        return [Row((*prefixes[min(i, 1)], *row.line), row.end) for i, row in enumerate(rows)]

    @property
    def stable(self) -> int:
        """The position up to which no row changes when more text follows."""
        if self.may_change:
            return 0
        return _settled("".join("x" * len(run.text) if run.style.role == "code" else run.text for run in self.runs))


@dataclass(frozen=True, slots=True)
class Code:
    """Lines as they are, between two rules. Position 1 is behind the first rule, 2 behind the first line.

    A line that is complete is one row, however long: the terminal breaks it and can join it again, so what is copied is
    the code. Behind a prefix, and while it grows, it is broken here.
    """

    lines: tuple[str, ...]
    language: str
    number: int
    """Counted through the reply: what /copy calls it."""
    closed: bool
    prefix: Line = ()
    gap: bool = False
    line: int = 0
    highlight: Highlight = field(default=_uncoloured)

    def rows(self, columns: int, start: int = 0) -> list[Row]:
        prefix = _fitting(self.prefix, columns)
        inside = max(columns - line_width(prefix), 1)
        rows = [] if start else [Row((*prefix, *_rule(inside, f"{self.language or 'code'} [{self.number}]")), 1)]
        first = max(start - 1, 0)
        for i, line in enumerate(self.highlight(self.lines, self.language, first), first):
            whole = 2 + i <= self.stable and not self.prefix
            pieces = [Row(merged(line))] if whole else wrap(line, inside)
            rows += [Row((*prefix, *row.line), 2 + i if row is pieces[-1] else -1) for row in pieces]
        if self.closed and start < 2 + len(self.lines):
            rows.append(Row((*prefix, *_rule(inside, "")), 2 + len(self.lines)))
        return rows

    @property
    def stable(self) -> int:
        """The last line may still grow."""
        return 2 + len(self.lines) if self.closed else len(self.lines)


@dataclass(frozen=True, slots=True)
class Table:
    heads: tuple[Line, ...]
    body: tuple[tuple[Line, ...], ...]
    aligns: tuple[str, ...]
    """`left`, `right` or `center` for each column."""
    prefix: Line = ()
    gap: bool = False
    line: int = 0
    stable: int = 0

    def rows(self, columns: int, start: int = 0) -> list[Row]:
        prefix = _fitting(self.prefix, columns)
        widths = _column_widths([self.heads, *self.body], columns - line_width(prefix))
        lines = (
            list(_grid(self, widths)) if widths else [line for row in self.body for line in self._listed(row, columns)]
        )
        return [Row((*prefix, *line), 1) for line in lines]

    def _listed(self, cells: Sequence[Line], columns: int) -> list[Line]:
        """For a screen that is too narrow: each cell in rows of its own, behind its heading."""
        named = [(Run(f"{plain(head)}: ", Style(bold=True)), *cell) for head, cell in zip(self.heads, cells)]
        return [row.line for line in named for row in wrap(line, max(columns - 2, 1))] + [()]


@dataclass(frozen=True, slots=True)
class Rule:
    prefix: Line = ()
    gap: bool = False
    line: int = 0
    stable: int = 0

    def rows(self, columns: int, start: int = 0) -> list[Row]:
        prefix = _fitting(self.prefix, columns)
        return [Row((*prefix, *_rule(min(columns, MAX_PROSE_COLUMNS) - line_width(prefix), "")), 1)]


MarkdownBlock = Flow | Code | Table | Rule


# -- laying out --------------------------------------------------------------------------------------------------------


def _fitting(prefix: Line, columns: int) -> Line:
    """Deep nesting on a narrow screen: at least half of it is for text."""
    return prefix if line_width(prefix) <= columns // 2 else cut_line(prefix, columns // 2)


def _rule(columns: int, title: str) -> Line:
    text = f"── {title} " if title else ""
    return cut_line((Run(text + "─" * max(columns - len(text), 0), DIM),), columns)


def _column_widths(rows: Sequence[Sequence[Line]], columns: int) -> list[int]:
    """Cells inside each column so that all fit into `columns`; empty when there is no room for a grid."""
    natural = [max(1, *map(line_width, column)) for column in zip(*rows)]
    room = columns - 3 * len(natural) - 1
    if room < 3 * len(natural):
        return []
    widths = list(natural)
    while sum(widths) > room:
        widest = max(widths)
        second = max((width for width in widths if width < widest), default=1)
        many = [i for i, width in enumerate(widths) if width == widest]
        too_many = sum(widths) - room
        for i in many:
            widths[i] = max(second, widest - max(too_many // len(many), 1), 3)
            if sum(widths) <= room:
                break
        if max(widths) == widest == 3:
            return []
    return widths


def _grid(table: Table, widths: Sequence[int]) -> Iterator[Line]:
    def border(left: str, middle: str, right: str) -> Line:
        return (Run(left + middle.join("─" * (width + 2) for width in widths) + right, DIM),)

    def lines(cells: Sequence[Line]) -> Iterator[Line]:
        wrapped = [[row.line for row in wrap(cell, width)] for cell, width in zip(cells, widths)]
        for i in range(max(map(len, wrapped))):
            row: list[Run] = []
            for cell, width, align in zip(wrapped, widths, table.aligns):
                row += [Run("│ ", DIM), *_aligned(cell[i] if i < len(cell) else (), width, align), Run(" ")]
            yield (*row, Run("│", DIM))

    yield border("┌", "┬", "┐")
    yield from lines(table.heads)
    yield border("├", "┼", "┤")
    for cells in table.body:
        yield from lines(cells)
    yield border("└", "┴", "┘")


def _aligned(line: Line, columns: int, align: str) -> Line:
    missing = max(columns - line_width(line), 0)
    before = missing if align == "right" else missing // 2 if align == "center" else 0
    return padded((Run(" " * before), *line), columns)


def _settled(text: str) -> int:
    """How many characters look the same whatever follows: up to a mark that may still find its other end."""
    for i, char in enumerate(text):
        after, before = text[i + 1 : i + 2], text[i - 1 : i] if i else " "
        if char in "*~`" and not after.isspace():
            return i
        if char == "_" and not after.isspace() and not (before.isalnum() and after.isalnum()):
            return i
        if char == "[":
            end = text.find("]", i)
            if end < 0 or text[end + 1 : end + 2] in ("", "(", "[", ":"):
                return i
        if char in "<&!\\|" and not after.isspace() and len(text) - i < 200:
            return i
    return len(text)
