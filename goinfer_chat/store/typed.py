"""What was typed at the prompt, kept across sessions: `typed.jsonl` beside the database, its owner's alone.

One JSON string a line, the newest at the end. A line that cannot be read is skipped: a history is no reason to fail.
Two programs may append at once; one that rewrites the file may cost the other the entry of that moment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from goinfer_chat.files import write_private

FILE: Final = "typed.jsonl"
MAX_ENTRY_BYTES: Final = 100_000
"""A longer text is worth a file of its own, and would make every start slower."""
_BETWEEN_ATTACHMENTS: Final = "\n\n"


def read_typed(folder: Path, limit: int) -> list[str]:
    """The last `limit` entries, the newest last. A file of more than twice as many is cut to them."""
    if limit < 1:
        return []
    try:
        lines = (folder / FILE).read_bytes().splitlines()
    except OSError:
        return []
    entries = [entry for line in lines[-limit:] if (entry := _entry(line)) is not None]
    if len(lines) > 2 * limit:
        with suppress(OSError):
            _write(folder, entries)
    return entries


def append_typed(folder: Path, text: str) -> None:
    """Keep an entry, if the folder is there and can be written to."""
    line = _line(text)
    if len(line) > MAX_ENTRY_BYTES:
        return
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(folder / FILE, flags, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def forget_typed(folder: Path, messages: Collection[str], name: str | None = None) -> None:
    """Drop the entries that became one of these messages, with or without files, and commands with this name in them.

    A conversation's name is made of its first words. Raises OSError.
    """
    try:
        lines = (folder / FILE).read_bytes().splitlines()
    except FileNotFoundError:
        return
    entries = [entry for line in lines if (entry := _entry(line)) is not None]
    left = [
        entry
        for entry in entries
        if not (_became_one_of(entry, messages) or (name and entry.startswith("/") and name in entry))
    ]
    if len(left) < len(entries):
        _write(folder, left)


def _became_one_of(entry: str, messages: Collection[str]) -> bool:
    said = entry.removeprefix("/edit ").strip()
    said = said[1:] if said.startswith("//") else said
    return any(
        message.strip() == said or message.startswith(said + _BETWEEN_ATTACHMENTS) for message in messages if said
    )


def _entry(line: bytes) -> str | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, str) else None


def _line(text: str) -> bytes:
    return json.dumps(text).encode() + b"\n"


def _write(folder: Path, entries: Iterable[str]) -> None:
    write_private(folder / FILE, map(_line, entries))
