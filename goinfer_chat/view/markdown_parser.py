"""Markdown to blocks: markdown-it's tokens, in which what is nested comes out flat.

A paragraph in a list in a quote becomes a `Flow` whose rows begin with the bars, the marker and the indentation of what
it is in. So a block that is finished never changes when more text follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from goinfer_chat.terminal import sanitize
from goinfer_chat.view.cells import PLAIN, Line, Run, Style, merged, plain
from goinfer_chat.view.markdown_blocks import Code, Flow, MarkdownBlock, Rule, Table

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark").enable(["table", "strikethrough"])


def parse(source: str, *, keep_marks: bool = False, first_number: int = 1) -> list[MarkdownBlock]:
    """The blocks of a text. `keep_marks`: for a screen without styles, emphasis keeps its stars and code its ticks."""
    return _Flattening(source, keep_marks, first_number).blocks


def code_blocks(source: str) -> list[str]:
    """The exact text of every block of code in a text, in order."""
    return [token.content for token in _parser().parse(source) if token.type in ("fence", "code_block")]


@dataclass
class _Item:
    """A list item that is open: its marker stands before the first block in it only."""

    marker: str
    used: bool = False


class _Flattening:
    def __init__(self, source: str, keep_marks: bool, first_number: int) -> None:
        self.blocks: list[MarkdownBlock] = []
        self._source = source.split("\n")
        self._keep_marks = keep_marks
        self._number = first_number
        self._nest: list[_Item | None] = []
        """What the block is in: an item of a list, or None for a quote."""
        self._lists: list[int | None] = []
        """The number of the next item; None where they are not numbered."""
        self._top = 0
        self._tokens = _parser().parse(source)
        self._walk()

    def _walk(self) -> None:
        heading = 0
        i = 0
        while i < len(self._tokens):
            token = self._tokens[i]
            if token.level == 0 and token.map is not None and token.nesting >= 0:
                self._top = token.map[0]
            match token.type:
                case "bullet_list_open":
                    self._lists.append(None)
                case "ordered_list_open":
                    self._lists.append(int(token.attrs.get("start", 1)))
                case "bullet_list_close" | "ordered_list_close":
                    self._lists.pop()
                case "list_item_open":
                    if token.level == 1 and token.map is not None and self._is_numbered_right(token):
                        self._top = token.map[0]
                    self._nest.append(_Item(self._marker()))
                case "list_item_close":
                    item = self._nest[-1]
                    if item is not None and not item.used:
                        self._add(Flow(()), token)
                    self._nest.pop()
                case "blockquote_open":
                    self._nest.append(None)
                case "blockquote_close":
                    self._nest.pop()
                case "heading_open":
                    heading = int(token.tag[1])
                case "heading_close":
                    heading = 0
                case "inline":
                    self._inline(token, heading)
                case "fence" | "code_block":
                    self._code(token)
                case "html_block":
                    text = sanitize(token.content.rstrip("\n"), terminal=True).expandtabs(4)
                    self._add(Flow((Run(text),), may_change=True), token)
                case "hr":
                    self._add(Rule(), token)
                case "table_open":
                    i = self._table(i)
            i += 1

    def _is_numbered_right(self, item: Token) -> bool:
        """Whether an item of a list is shown the same when the list begins with it."""
        return self._lists[-1] is None or item.info == str(self._lists[-1])

    def _marker(self) -> str:
        number = self._lists[-1]
        if number is None:
            return ("•", "◦", "▪")[min(sum(n is None for n in self._lists), 3) - 1] + " "
        self._lists[-1] = number + 1
        return f"{number}. "

    def _add(self, block: MarkdownBlock, token: Token) -> None:
        first: list[Run] = []
        rest: list[Run] = []
        for item in self._nest:
            if item is None:
                first.append(Run("▌ ", Style("faint")))
                rest.append(first[-1])
                continue
            blank = Run(" " * len(item.marker))
            first.append(blank if item.used else Run(item.marker, Style("heading")))
            rest.append(blank)
            item.used = True
        line = token.map[0] if token.map else self._top
        gap = line > 0 and not self._source[line - 1].strip(" >\t")
        if isinstance(block, Flow):
            block = replace(block, first=merged(first), rest=merged(rest), gap=gap, line=self._top)
        else:
            if first != rest:  # a marker with something else than text behind it stands on a row of its own
                self.blocks.append(Flow((), merged(first), merged(rest), gap, self._top))
                gap = False
            block = replace(block, prefix=merged(rest), gap=gap, line=self._top)
        self.blocks.append(block)

    def _inline(self, token: Token, heading: int) -> None:
        base = Style("heading", bold=True, underline=heading == 1) if heading else PLAIN
        runs = self._runs(token.children or [], base)
        if heading and self._keep_marks:
            runs = (Run("#" * heading + " ", base), *runs)
        text = token.content
        # A line of hyphens that has begun makes a heading of the text above it, until it becomes something else.
        may_change = heading > 0 or "|" in text or (text.startswith("[") and "]:" in text)
        self._add(Flow(runs, may_change=may_change), token)

    def _code(self, token: Token) -> None:
        lines = [sanitize(line, terminal=True).expandtabs(4) for line in token.content.removesuffix("\n").split("\n")]
        if not token.content:
            lines = []
        words = sanitize(token.info, terminal=True).split()
        self._add(Code(tuple(lines), words[0] if words else "", self._number, self._is_closed(token)), token)
        self._number += 1

    def _is_closed(self, token: Token) -> bool:
        if token.type == "code_block" or token.map is None:
            return False
        first, end = token.map
        last = self._source[end - 1].strip(" >\t") if end - 1 > first else ""
        return len(last) >= len(token.markup) and not last.strip(token.markup[:1])

    def _table(self, i: int) -> int:
        """Take in the tokens of a table; returns the index of its last one."""
        opening, aligns = self._tokens[i], list[str]()
        rows: list[list[Line]] = []
        while self._tokens[i].type != "table_close":
            token = self._tokens[i]
            if token.type == "tr_open":
                rows.append([])
            elif token.type in ("th_open", "td_open") and len(rows) == 1:
                aligns.append(str(token.attrs.get("style", "")).rpartition(":")[2] or "left")
            elif token.type == "inline":
                base = Style(bold=True) if len(rows) == 1 else PLAIN
                rows[-1].append(self._runs(token.children or [], base))
            i += 1
        heads, *body = (tuple(row) for row in rows)
        self._add(Table(heads, tuple(body), tuple(aligns)), opening)
        return i

    def _runs(self, children: Sequence[Token], base: Style) -> tuple[Run, ...]:
        """The styled text of a paragraph. Where a style cannot be shown its marks stay."""
        runs: list[Run] = []
        styles = [base]
        links: list[str] = []
        marks = self._keep_marks
        for token in children:
            style = styles[-1]
            match token.type:
                case "strong_open" | "em_open" | "s_open":
                    styles.append(_emphasized(style, token.type))
                    runs += [Run(token.markup)] if marks else []
                case "strong_close" | "em_close" | "s_close":
                    styles.pop()
                    runs += [Run(token.markup)] if marks else []
                case "link_open":
                    links.append(str(token.attrs.get("href", "")))
                    styles.append(style._replace(role="link", underline=True))
                case "link_close":
                    styles.pop()
                    address = links.pop()
                    if address and address != plain(runs)[-len(address) :]:
                        runs.append(_clean(f" ({address})", Style("link")))
                case "code_inline":
                    text = f"`{token.content}`" if marks else token.content
                    runs.append(_clean(text, style._replace(role="code")))
                case "softbreak" | "hardbreak":
                    # Models that end a line mean it: verses, addresses. CommonMark would join the lines.
                    runs.append(Run("\n", style))
                case "image":
                    address = str(token.attrs.get("src", ""))
                    runs.append(_clean(f"{token.content or 'picture'} ({address})", style._replace(role="link")))
                case _:
                    runs.append(_clean(token.content, style))
        return merged(runs)


def _emphasized(style: Style, opening: str) -> Style:
    if opening == "s_open":
        return style._replace(strike=True)
    return style._replace(bold=True) if opening == "strong_open" else style._replace(italic=True)


def _clean(text: str, style: Style) -> Run:
    """Sanitized after parsing: an entity such as &#x202E; becomes a character only there."""
    return Run(sanitize(text, terminal=True).replace("\t", " "), style)
