"""A reply in Markdown while it arrives: what is final goes out once, the rest is laid out again and again.

Final are all blocks but the last one; of the last one the rows that no further text can change: finished lines of code,
and rows of a paragraph in which no mark is waiting for its other end. A table is final when it ends, because one more
row can change every width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from goinfer_chat.terminal import sanitize
from goinfer_chat.view.cells import Line, Row, Run, line_width, wrap
from goinfer_chat.view.highlight import Highlighter
from goinfer_chat.view.markdown_blocks import Code, Flow, MarkdownBlock
from goinfer_chat.view.markdown_parser import parse


class ReplyStream(Protocol):
    """A reply that grows: `push` text, then `take` the rows that are final and `live` the others."""

    def push(self, text: str) -> None: ...

    def take(self, columns: int) -> list[Line]:
        """Rows that are final and were not taken before."""
        ...

    def live(self, columns: int) -> list[Line]:
        """The rows that may still change."""
        ...

    def finish(self, columns: int) -> list[Line]:
        """All that is left; what is pushed next begins anew."""
        ...


class RawStream:
    """The text as it is. A finished line is one row, however long: the terminal wraps it, and can join it again."""

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> None:
        self._text += sanitize(text, terminal=True)

    def take(self, columns: int) -> list[Line]:
        *lines, self._text = self._text.split("\n")
        return [(Run(line),) for line in lines]

    def live(self, columns: int) -> list[Line]:
        return [row.line for row in wrap([Run(self._text.expandtabs())], columns)] if self._text else []

    def finish(self, columns: int) -> list[Line]:
        lines = self.take(columns)
        last, self._text = self._text, ""
        return [*lines, (Run(last),)] if last else lines


class MarkdownStream:
    def __init__(self, *, keep_marks: bool = False) -> None:
        """`keep_marks`: see `markdown_parser.parse`."""
        self._keep_marks = keep_marks
        self._source = ""
        """From the start of the last top-level block, or of the last item of a list, on."""
        self._num_done = 0
        """Blocks of `_source` of which every row was taken."""
        self._position = 0
        """Of the next one: its rows up to here were taken."""
        self._gap = False
        """Whether an empty row belongs above the first block of `_source`."""
        self._num_code = 0
        """Blocks of code before `_source`."""
        self._parsed: dict[str, list[MarkdownBlock]] = {}
        self._highlighters: dict[int, Highlighter] = {}

    def push(self, text: str) -> None:
        self._source += text.replace("\r", "")  # which the parser would take for the end of a line, and we would not

    def take(self, columns: int) -> list[Line]:
        complete = self._source[: self._source.rfind("\n") + 1]
        lines = self._rest(_ended(complete, self._blocks(complete)), columns)
        self._forget(complete)
        blocks = self._blocks(self._source)
        if len(blocks) == self._num_done + 1:
            rows = blocks[-1].rows(columns, self._position)
            ready = [i for i, row in enumerate(rows[:-1]) if self._position < row.end <= blocks[-1].stable]
            if ready:
                lines += _shown(blocks[-1], rows[: ready[-1] + 1], self._position)
                self._position = rows[ready[-1]].end
        return lines

    def live(self, columns: int) -> list[Line]:
        lines: list[Line] = []
        position = self._position
        blocks = self._blocks(self._source)
        if blocks and isinstance(blocks[-1], Flow):
            blocks = self._blocks(_as_if_closed(self._source))
        for block in blocks[self._num_done :]:
            lines += _shown(block, block.rows(columns, position), position)
            position = 0
        return [row for line in lines for row in (_broken(line, columns) if line_width(line) > columns else (line,))]

    def finish(self, columns: int) -> list[Line]:
        blocks = self._blocks(self._source)
        lines = self._rest(blocks, columns)
        self._num_code += sum(isinstance(block, Code) for block in blocks)
        self._gap = self._gap or bool(blocks)
        self._source, self._num_done = "", 0
        self._clear()
        return lines

    def _rest(self, blocks: Sequence[MarkdownBlock], columns: int) -> list[Line]:
        """What was not taken of blocks that are complete."""
        lines: list[Line] = []
        for block in blocks[self._num_done :]:
            if isinstance(block, Code) and not block.closed:
                block = replace(block, closed=True)
            lines += _shown(block, block.rows(columns, self._position), self._position)
            self._num_done += 1
            self._position = 0
        return lines

    def _forget(self, complete: str) -> None:
        """Drop the source of top-level blocks that are behind."""
        blocks = self._blocks(complete)
        line = blocks[-1].line if blocks else 0
        behind = [block for block in blocks if block.line < line]
        if not behind or self._num_done < len(behind):
            return
        self._gap = blocks[len(behind)].gap
        self._num_code += sum(isinstance(block, Code) for block in behind)
        self._num_done -= len(behind)
        self._source = "\n".join(self._source.split("\n")[line:])
        self._clear()

    def _clear(self) -> None:
        self._parsed.clear()
        self._highlighters.clear()

    def _blocks(self, source: str) -> list[MarkdownBlock]:
        if source not in self._parsed:
            found = parse(source, keep_marks=self._keep_marks, first_number=self._num_code + 1)
            while len(self._parsed) > 2:  # the complete lines, all of them, and those as if closed
                del self._parsed[next(iter(self._parsed))]
            self._parsed[source] = [self._completed(i, block) for i, block in enumerate(found)]
        return self._parsed[source]

    def _completed(self, i: int, block: MarkdownBlock) -> MarkdownBlock:
        if i == 0 and self._gap:
            block = replace(block, gap=True)
        if isinstance(block, Code):
            block = replace(block, highlight=self._highlighters.setdefault(i, Highlighter()))
        return block


def _broken(line: Line, columns: int) -> list[Line]:
    return [row.line for row in wrap(line, columns)]


def _as_if_closed(source: str) -> str:
    """The text with the other ends of marks that are open, so that its looks do not change when they come."""
    before, blank, last = source.rpartition("\n\n")
    for mark in ("`", "**"):
        if last.count(mark) % 2:
            last = last.removesuffix(mark) if last.endswith(mark) else last.rstrip() + mark
    return before + blank + last


def _ended(source: str, blocks: Sequence[MarkdownBlock]) -> Sequence[MarkdownBlock]:
    """Those that no further line can change: all but the last one, and that too if it ends at the blank line below."""
    if not blocks:
        return blocks
    last = blocks[-1]
    open_ended = not last.closed if isinstance(last, Code) else isinstance(last, Flow) and last.may_change
    is_over = not open_ended and not source[:-1].rpartition("\n")[2].strip()
    return blocks if is_over else blocks[:-1]


def _shown(block: MarkdownBlock, rows: Sequence[Row], position: int) -> list[Line]:
    gap: list[Line] = [()] if block.gap and position == 0 else []
    return [*gap, *(row.line for row in rows)]
