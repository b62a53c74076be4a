"""Files that go into a message: `@notes.md`, `@main.py#10-40`, or what a command printed.

A file is part of the message's text, in a fence of its own; control tokens in it are words like any others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from engine.errors import UsageError
from goinfer_chat.fences import fenced
from goinfer_chat.files import reason_of
from goinfer_chat.terminal import true_text

MAX_BYTES: Final = 1_000_000
MAX_LISTED: Final = 200
_MENTION: Final = re.compile(r'(?<!\S)(\\?)@(?:"([^"\n]+)"|([^\s"]+?))(#\d{1,18}(?:-\d{0,18})?)?(?=[.,;:!?)]*(?:\s|$))')
_LINES: Final = re.compile(r"#(\d{1,18})(?:-(\d{0,18}))?\Z")


@dataclass(frozen=True, slots=True)
class Attachment:
    """What goes into a message, and what it is called there."""

    name: str
    content: str

    @property
    def num_lines(self) -> int:
        """As files and `#10-40` count them: the end of the last line is not in `content`, and an empty line is one."""
        return self.content.count("\n") + 1 if self.content else 0

    @property
    def text(self) -> str:
        """The name, and the content in a fence that nothing in it closes."""
        return f"{self.name}:\n{fenced(self.content)}"


def with_attachments(text: str, attachments: Sequence[Attachment]) -> str:
    """The message a model gets: the words first, as `store.typed` knows."""
    return "\n\n".join([text, *(attachment.text for attachment in attachments)])


def read_attachment(reference: str, folder: Path | None = None) -> Attachment:
    """`FILE` or `FILE#FIRST-LAST`, lines counted from 1; `FILE#10` is one line and `FILE#10-` all from there on.

    Raises UsageError for what is not there, no text, or too long.
    """
    path, lines = _split(reference, folder)
    name = true_text(reference.partition("#")[0]) if lines is not None else true_text(reference)
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
            raise UsageError(f"{name} is a folder" if path.is_dir() else f"{name} is not a plain file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1) if lines is None else _read_lines(file, lines)
    except (OSError, ValueError) as error:
        raise UsageError(f"{name} cannot be read: {reason_of(error)}") from None
    if len(raw) > MAX_BYTES:
        advice = f"take some lines of it: {name}#1-200" if lines is None else "take fewer lines"
        raise UsageError(f"{name} has more than {MAX_BYTES:,} bytes; {advice}")
    if b"\0" in raw:
        raise UsageError(f"{name} is not text")
    try:
        content = raw.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not UTF-8 text") from None
    if lines is None:
        return Attachment(name, content)
    first, last = lines
    if not raw:
        raise UsageError(f"{name} has no line {first:,}")
    end = min(last, first + content.count("\n")) if last is not None else first + content.count("\n")
    return Attachment(f"{name}, line {first:,}" if end == first else f"{name}, lines {first:,} to {end:,}", content)


def _split(reference: str, folder: Path | None) -> tuple[Path, tuple[int, int | None] | None]:
    """The path and the lines. A file whose own name ends like a range of lines is taken as it is."""
    whole = _path(reference, folder)
    match = _LINES.search(reference)
    if match is None or _exists(whole):
        return whole, None
    first = int(match[1])
    last = first if match[2] is None else int(match[2]) if match[2] else None
    if first < 1 or (last is not None and last < first):
        raise UsageError(f"{true_text(reference)}: lines are counted from 1, the first one first")
    return _path(reference[: match.start()], folder), (first, last)


def _path(reference: str, folder: Path | None) -> Path:
    path = Path(reference)
    with suppress(RuntimeError):  # nobody knows where ~ is
        path = path.expanduser()
    return (folder or Path()) / path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _read_lines(file: BinaryIO, lines: tuple[int, int | None]) -> bytes:
    first, last = lines
    kept = bytearray()
    for number, line in enumerate(file, 1):
        if last is not None and number > last:
            break
        if number >= first:
            kept += line
            if len(kept) > MAX_BYTES:
                break
    return bytes(kept)


# -- mentions ----------------------------------------------------------------------------------------------------------


def mentioned(text: str, pasted: Sequence[str] = (), folder: Path | None = None) -> tuple[str, list[Attachment]]:
    """What a person typed, and the files it mentions after `@`. Raises UsageError for one that cannot be read.

    A word after `@` that names no file stays a word, unless it looks like a path. An @ behind a backslash mentions
    nothing, and neither does one inside a text of several lines that was pasted (`pasted`).
    """
    literal = [(match.start(), match.end()) for piece in pasted for match in re.finditer(re.escape(piece), text)]
    attachments: dict[str, Attachment] = {}
    parts, done = [], 0
    for match in _MENTION.finditer(text):
        if any(start <= match.start() < end for start, end in literal):
            continue
        reference = (match[2] or match[3]) + (match[4] or "")
        is_file = _exists(_without_lines(reference, folder))
        if not is_file and not _looks_like_a_path(reference):
            continue
        if match[1]:
            parts += [text[done : match.start()], match[0][1:]]
            done = match.end()
            continue
        if not is_file:
            raise UsageError(f"there is no file {true_text(reference)}; \\@ begins a word that is not a file")
        attachments.setdefault(reference, read_attachment(reference, folder))
    return "".join([*parts, text[done:]]), list(attachments.values())


def _without_lines(reference: str, folder: Path | None) -> Path:
    whole = _path(reference, folder)
    return whole if _exists(whole) else _path(_LINES.sub("", reference), folder)


def _looks_like_a_path(reference: str) -> bool:
    return "/" in reference or reference.startswith("~") or _LINES.search(reference) is not None or "." in reference[1:]


# -- completion --------------------------------------------------------------------------------------------------------


def matching_files(typed: str, folder: Path | None = None) -> list[str]:
    """Files and folders whose path begins as typed, folders with a slash behind; hidden ones after a dot.

    Names with control characters are left out: they could not be shown as they are.
    """
    head, slash, begun = typed.rpartition("/")
    where = _path(head + slash, folder)
    found = []
    try:
        with os.scandir(where) as entries:
            for entry in entries:
                name = entry.name
                if not name.startswith(begun) or (name.startswith(".") and not begun) or not name.isprintable():
                    continue
                found.append(f"{head}{slash}{name}" + ("/" if entry.is_dir() else ""))
                if len(found) > MAX_LISTED * 10:
                    break
    except (OSError, ValueError):
        return []
    return sorted(found)[:MAX_LISTED]
