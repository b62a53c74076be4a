"""The folder of `.giw-kv` files: names that stay inside, owner-only permissions, one writer a file, a cap."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineError, UsageError

if sys.platform != "win32":
    import fcntl

SUFFIX = ".giw-kv"
_TEMPORARY = ".tmp"
MAX_NAME = 100
_ASIDE = re.compile(rf".+{re.escape(SUFFIX)}\.[0-9a-f]{{16}}", re.DOTALL)
_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}", re.ASCII)


class KVFileError(EngineError):
    """A conversation's file cannot be used; `reason` is one line for people, the message has the file's name too."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path.name}: {reason}")
        self.path = path
        self.reason = reason


class KVFileLockedError(KVFileError):
    """Another process, or another part of this one, has the file open."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "locked: another goinfer-chat has this conversation open")


@dataclass(frozen=True, slots=True)
class KeptFile:
    """One `.giw-kv` file, for listings."""

    path: Path
    num_bytes: int
    used_at: float
    """Seconds since the epoch."""


def path_of(folder: Path, conversation: str) -> Path:
    """The file of a conversation. Raises UsageError for a name that is not a plain file name."""
    if not _NAME.fullmatch(conversation):
        shown = "".join(c if c.isprintable() else "?" for c in conversation[:MAX_NAME])
        raise UsageError(
            f"{shown!r} cannot name a conversation's file: 1 to {MAX_NAME} letters a-z, digits, '-', '_' and '.', "
            "not with '.' first"
        )
    return folder / (conversation + SUFFIX)


def prepare(folder: Path) -> None:
    """Make the folder, for the owner only; one that others may enter is tightened. Raises UsageError.

    What processes that were killed while they wrote a file anew have left behind is removed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)
        leftovers = list(folder.glob(f"*{SUFFIX}{_TEMPORARY}"))
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            other = next(p for p in (*reversed(folder.parents), folder) if os.path.lexists(p) and not p.is_dir())
            reason = f"{other} is not a folder; choose another place"
        raise UsageError(f"{folder}: conversations cannot be kept there: {reason}") from error
    for leftover in leftovers:
        with contextlib.suppress(KVFileError, OSError):
            _remove(leftover)


def list_kept(folder: Path, *, set_aside: bool = False) -> list[KeptFile]:
    """The files of all conversations, the one used last first; `set_aside`: also those of other models."""
    found = []
    with contextlib.suppress(OSError):
        paths = [*folder.glob(f"*{SUFFIX}")]
        if set_aside:
            paths += [path for path in folder.glob(f"*{SUFFIX}.*") if _ASIDE.fullmatch(path.name)]
        for path in paths:
            with contextlib.suppress(OSError):
                info = path.lstat()
                if stat.S_ISREG(info.st_mode):
                    found.append(KeptFile(path, info.st_size, info.st_mtime))
    return sorted(found, key=lambda kept: kept.used_at, reverse=True)


def make_room(folder: Path, cap_bytes: int, spare: Collection[Path] = ()) -> list[KeptFile]:
    """Remove what was used least recently until the files have at most `cap_bytes`; what was removed.

    Files that are in use, here or in another process, and those of `spare` stay.
    """
    kept = list_kept(folder, set_aside=True)
    total = sum(file.num_bytes for file in kept)
    removed = []
    for file in reversed(kept):
        if total <= cap_bytes:
            break
        with contextlib.suppress(KVFileError, OSError):
            if file.path not in spare:
                _remove(temporary_of(file.path))
                _remove(file.path)
                removed.append(file)
                total -= file.num_bytes
    return removed


def remove(path: Path) -> None:
    """Leave nothing of a conversation's file. Raises KVFileLockedError if it is in use, OSError if that fails."""
    _remove(temporary_of(path))
    _remove(path)
    for aside in list(path.parent.iterdir()):
        if aside.name.startswith(f"{path.name}.") and _ASIDE.fullmatch(aside.name):
            _remove(aside)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()  # the link alone; what it points to is not ours
        return
    descriptor = open_locked(path)
    if descriptor is not None:
        try:
            path.unlink()
        finally:
            os.close(descriptor)


def temporary_of(path: Path) -> Path:
    """Where a file is written anew before it takes its place: one name, so that a crash leaves at most one behind."""
    return path.with_name(path.name + _TEMPORARY)


def aside_of(path: Path, key: str) -> Path:
    """Where a conversation's file lies while another model goes on with it; `key`: of whose it is (`Identity.key`)."""
    return path.with_name(f"{path.name}.{key}")


def create_locked(path: Path) -> int:
    """Descriptor of an empty file that this process alone may write. Raises KVFileLockedError, KVFileError."""
    descriptor = _open_locked(path, os.O_CREAT)
    assert descriptor is not None
    os.ftruncate(descriptor, 0)
    return descriptor


def open_locked(path: Path) -> int | None:
    """Descriptor of an existing file that this process alone may write, None if there is none.

    The lock goes with the descriptor: a process that dies leaves none behind. Raises KVFileLockedError, and KVFileError
    for a symbolic link, what is no regular file, another user's file, or one that may not be opened.
    """
    return _open_locked(path, 0)


def lock(descriptor: int, path: Path) -> None:
    """Take the lock of an open file. Raises KVFileLockedError, OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise KVFileLockedError(path) from None


def unlock(descriptor: int) -> None:
    """Give the lock of an open file back."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file still has this name: it may have been removed or replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def sync_folder(folder: Path) -> None:
    """Make names survive the machine. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_locked(path: Path, flags: int) -> int | None:
    if sys.platform == "win32":
        raise KVFileError(path, "not kept: this system has no locks that end with their process")
    flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    for _ in range(16):
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileNotFoundError:
            if flags & os.O_CREAT:
                raise KVFileError(path, f"{path.parent} is missing") from None
            return None
        except OSError as error:
            raise KVFileError(path, _refusal(path, error)) from error
        locked = False
        try:
            _check_file(path, os.fstat(descriptor))
            lock(descriptor, path)
            os.fchmod(descriptor, 0o600)
            # While it was opened, the one who had the lock may have put another file in its place.
            locked = is_at(descriptor, path)
        except OSError as error:
            raise KVFileError(path, f"cannot be locked: {error.strerror or error}") from error
        finally:
            if not locked:
                os.close(descriptor)
        if locked:
            return descriptor
    raise KVFileLockedError(path)


def _check_file(path: Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise KVFileError(path, _not_regular(path))
    if info.st_uid != os.geteuid():
        raise KVFileError(path, "refused: it belongs to another user")


def _not_regular(path: Path) -> str:
    return f"refused: it is not a regular file; remove {path}"


def _refusal(path: Path, error: OSError) -> str:
    if error.errno in (errno.ELOOP, errno.EMLINK):  # Linux and macOS; FreeBSD
        return f"refused: it is a symbolic link; remove {path}"
    if error.errno == errno.EISDIR:
        return _not_regular(path)
    return f"cannot be opened: {error.strerror or error}"
