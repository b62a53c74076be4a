'''Turns from lines of text: the syntax of scripts on standard input, and of the prompt.

A line is a turn. A line of nothing but `"""` opens a turn of several lines, and the next line of nothing but `"""`
closes it; with more quotes, such as `""""`, a line of exactly as many closes it, so any text can stand inside.
A line that starts with `/` is a command, one that starts with `//` is a turn that starts with `/`.
Empty lines between turns are skipped.
'''

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Final

from engine.errors import UsageError


@dataclass(frozen=True, slots=True)
class Turn:
    text: str
    literal: bool = field(default=False, compare=False)
    """Lines of a block, in which nothing is replaced."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A slash command: its name without the slash, and the rest of the line."""

    name: str
    argument: str


Item = Turn | CommandLine

TERMINAL_LINE_BYTES: Final = 4096
"""What a terminal that edits lines itself lets through of one; the rest is lost, so such a line is refused."""


def is_fence(line: str) -> bool:
    return len(line) >= 3 and not line.strip('"')


def read_item(next_line: Callable[[bool], str]) -> Item | None:
    """The next turn or command from `next_line(inside_block)`; None for an empty line or block.

    Raises UsageError when the lines end inside a block, and EOFError, from `next_line`, when they end outside.
    """
    line = next_line(False)
    fence = line.rstrip()
    if is_fence(fence):
        return _block(fence, next_line)
    if not line.strip():
        return None
    if line.startswith("//"):
        return Turn(line[1:])
    if line.startswith("/") and "\n" not in line:
        name, argument, *_ = *line[1:].split(maxsplit=1), "", ""
        return CommandLine(name, argument.strip())
    return Turn(line)


def _block(fence: str, next_line: Callable[[bool], str]) -> Turn | None:
    lines: list[str] = []
    while True:
        try:
            line = next_line(True)
        except EOFError:
            raise UsageError(f"the input ended inside a block; a line of {fence} closes it") from None
        if line.rstrip() == fence:
            break
        lines.append(line)
    text = "\n".join(lines)
    return Turn(text, literal=True) if text.strip() else None


def read_script(file: BinaryIO | None) -> Iterator[Item]:
    """Turns and commands of a script, each as soon as its last line is there.

    Bytes that are no UTF-8 become U+FFFD, a mark at the start of the file is skipped, and CR LF ends a line like LF.
    """
    line_number = 0

    def next_line(_inside_block: bool) -> str:
        nonlocal line_number
        raw = file.readline() if file is not None else b""
        if not raw:
            raise EOFError
        line_number += 1
        if len(raw) >= TERMINAL_LINE_BYTES and file is not None and file.isatty():
            raise UsageError("a terminal cuts lines of this length; redirect a file, or read it with /attach FILE")
        if line_number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        return raw.decode("utf-8", "replace").rstrip("\r\n")

    while True:
        try:
            item = read_item(next_line)
        except EOFError:
            return
        except UsageError as error:
            raise UsageError(f"line {line_number}: {error}") from None
        if item is not None:
            yield item
