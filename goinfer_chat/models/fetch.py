"""What every source of a model file shares: a folder, a lock, room on the disk, and a checksum at the end.

A file on its way is `FILE.partial` beside its final name. It always holds a prefix of the right content, so any source
can go on where another one stopped, and nothing else needs to be remembered between two tries.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.errors import DownloadError
from goinfer_chat.amounts import size
from goinfer_chat.files import make_folder

Progress = Callable[[int, int], None]
"""Called with (bytes that are here, bytes of the whole), some times a second."""

Say = Callable[[str], None]
"""Called with one line a person should see: a source that failed, waiting for another process."""

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a file must hold, whoever it comes from."""

    num_bytes: int
    sha256: str | None
    """In hex; None where nobody states it."""

    def is_in(self, path: Path) -> bool:
        """Whether the file at `path` is this content. Reads all of it."""
        return bytes_in(path) == self.num_bytes and self.sha256 in (None, sha256(path))


def partial_of(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def bytes_in(path: Path) -> int:
    """The file's length; 0 when there is none."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_space(folder: Path, needed: int) -> None:
    """Raise DownloadError with both numbers when fewer than `needed` bytes are free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"{folder}: {size(needed)} are needed and {size(free)} are free; make room, or name another folder in "
            "GOINFER_CHAT_MODELS"
        )


def finish(target: Path, content: Content) -> None:
    """Give the fetched file its final name if it is the right one; otherwise remove it and raise DownloadError."""
    partial = partial_of(target)
    have = bytes_in(partial)
    if have != content.num_bytes:
        wrong = f"it has {have:,} bytes, not {content.num_bytes:,}"
    elif content.sha256 is not None and (digest := sha256(partial)) != content.sha256:
        wrong = f"its SHA-256 is {digest}, not {content.sha256}"
    else:
        os.replace(partial, target)
        return
    partial.unlink(missing_ok=True)
    raise DownloadError(f"{target.name}: what was fetched is not the right file: {wrong}; it was removed")


@contextmanager
def only_one(target: Path, say: Say) -> Iterator[None]:
    """Hold the lock of one model file, so two processes do not fetch it at once; the second one waits.

    Whoever gets the lock must look again whether the file is there.
    """
    from filelock import FileLock, Timeout

    make_folder(target.parent)
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is fetching {target.name}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
