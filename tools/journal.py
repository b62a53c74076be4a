"""What files held before tools changed them, so that a turn can be taken back.

A copy is on the disk before the change is. The folder is its owner's alone, and holds one file for each change: a line
of JSON, then the bytes that were there before.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tools.errors import ToolError
from tools.replacing import current, put, remove
from tools.root import Root

MAX_BYTES: Final = 200_000_000
"""Copies in a folder at most; the oldest go."""
_NAME: Final = re.compile(r"(\d{8})-[0-9a-f]{8}\.before")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of one file."""

    root: str
    path: str
    key: str
    """Of the call that made it."""
    existed: bool
    mode: int
    """Permission bits before."""
    after: str
    """SHA-256 of what the tool wrote."""
    made: tuple[str, ...] = ()
    """Folders that were made for it."""


@dataclass(frozen=True, slots=True)
class TakenBack:
    path: str
    problem: str | None = None
    """Why the file was left as it is; None: it is as it was before."""


class Journal:
    """The changes kept in one folder, which is made when there is something to keep."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, change: Change, before: bytes) -> None:
        """Raises ToolError: a change that could not be taken back is not made."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            number = max((number for number, _ in self._files()), default=0) + 1
            path = self.folder / f"{number:08}-{secrets.token_hex(4)}.before"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
            with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
                file.write(json.dumps(asdict(change)).encode() + b"\n" + before)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ToolError(f"the file was not changed, because no copy of it could be kept: {error}") from error
        self._trim()

    def take_back(self, keys: Iterable[str]) -> list[TakenBack]:
        """Put back what the calls under these keys changed, the last change first.

        A file that holds something else than the tool wrote is left alone, and so are changes of it before.
        """
        wanted = set(keys)
        done: dict[tuple[str, str], TakenBack] = {}
        for file, change, before in reversed(self._entries()):
            place = (change.root, change.path)
            if change.key not in wanted or (place in done and done[place].problem):
                continue
            done[place] = TakenBack(change.path, _put_back(change, before))
            if done[place].problem is None:
                file.unlink(missing_ok=True)
        return list(done.values())

    def _files(self) -> list[tuple[int, Path]]:
        with suppress(FileNotFoundError):
            found = [(match, path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
            return sorted((int(match[1]), path) for match, path in found)
        return []

    def _entries(self) -> list[tuple[Path, Change, bytes]]:
        entries = []
        for _, path in self._files():
            with suppress(OSError, ValueError, TypeError, RecursionError):  # one that is damaged costs that one
                line, _, before = path.read_bytes().partition(b"\n")
                values = json.loads(line)
                entries.append((path, Change(**{**values, "made": tuple(values["made"])}), before))
        return entries

    def _trim(self) -> None:
        files = [path for _, path in self._files()]
        sizes = {path: path.stat().st_size for path in files}
        total = sum(sizes.values())
        for path in files[:-1]:
            if total <= MAX_BYTES:
                return
            total -= sizes[path]
            path.unlink(missing_ok=True)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _put_back(change: Change, before: bytes) -> str | None:
    """Why it could not be done; None: it was."""
    try:
        with Root(Path(change.root)) as root, root.place(change.path) as place:
            found = current(place)
            if found is not None and change.existed and found.content == before:
                return None
            if found is None and not change.existed:
                return None
            if found is None or digest(found.content) != change.after:
                return "it was changed since, so it is left as it is"
            if change.existed:
                put(place, before, mode=change.mode, expected=found)
            else:
                remove(place)
        _remove_folders(change.root, change.made)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other files can be taken back
        return str(error)
    return None


def _remove_folders(root: str, made: Sequence[str]) -> None:
    for path in reversed(made):
        with suppress(OSError, ToolError), Root(Path(root)) as opened, opened.place(path) as place:
            os.rmdir(place.name, dir_fd=place.folder)
