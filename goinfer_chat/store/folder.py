"""The folder of the kept conversations and every file in it but the database's own bytes.

    conversations.db        the words (with -wal and -shm while it is open)
    typed.jsonl             what was typed at the prompt (typed.py)
    ID.giw-kv               the KV cache of one conversation
    ID.changes/             what files held before its tools changed them
    ID.lock                 held by the process that goes on with that conversation

All of it is its owner's alone. The name of a file comes from an id that was drawn, never from what a person typed.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import platformdirs

from engine.errors import UsageError
from goinfer_chat.files import create_private, make_folder
from goinfer_chat.store.database import damaged
from goinfer_chat.store.file_system import HOW_TO_GO_ON, is_full
from goinfer_chat.store.names import is_id
from goinfer_chat.store.records import NotWrittenError, StoreError

if TYPE_CHECKING:
    from filelock import FileLock

FOLDER_ENVIRONMENT: Final = "GOINFER_CHAT_SESSION_DIR"
DATABASE: Final = "conversations.db"
LOCK_SUFFIX: Final = ".lock"
_ID_FILE: Final = re.compile(r"([0-9a-f]{16})\..+", re.DOTALL)


def session_folder(chosen: str | None = None) -> Path:
    """What --session-dir says, else its variable, else the system's place for data."""
    chosen = chosen or os.environ.get(FOLDER_ENVIRONMENT)
    return Path(chosen).expanduser() if chosen else platformdirs.user_data_path("goinfer-chat") / "sessions"


def prepare(folder: Path) -> None:
    """Make the folder and an empty database if missing, and let only their owner read them. Raises StoreError."""
    with explained(folder):
        make_folder(folder)
        info = folder.stat()
        if hasattr(os, "getuid") and os.getuid() not in (0, info.st_uid):
            raise StoreError(f"{folder} belongs to another user; choose another folder with --session-dir")
        if info.st_mode & 0o077:
            if not os.path.lexists(folder / DATABASE) and any(folder.iterdir()):
                raise StoreError(
                    f"{folder} is open to other users and holds other files; "
                    "choose a folder of its own with --session-dir"
                )
            folder.chmod(0o700)
        with suppress(FileExistsError):
            os.close(create_private(folder / DATABASE))
        for path in folder.iterdir():
            if path.name.startswith(DATABASE) or _ID_FILE.fullmatch(path.name):
                _tighten(path)


def _tighten(path: Path) -> None:
    # By path: opening and closing the database here would drop the locks that SQLite holds on it in this process.
    with suppress(FileNotFoundError):  # another process closed it meanwhile
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            if mode & 0o077:
                path.chmod(0o600)
        elif path.name.startswith(DATABASE):
            raise StoreError(f"{path} is not a plain file; move it, or choose another folder with --session-dir")


def path_of(folder: Path, id: str, suffix: str) -> Path:
    """The path of a conversation's file. Raises StoreError for an id that was never drawn."""
    if not is_id(id):
        raise damaged(f"{id!r} is not the id of a conversation")
    return folder / f"{id}{suffix}"


def ids_with_files(folder: Path) -> set[str]:
    with explained(folder):
        return {match[1] for path in folder.iterdir() if (match := _ID_FILE.fullmatch(path.name))}


def remove_files(folder: Path, id: str) -> None:
    """Delete every file of a conversation but its lock. Raises StoreError."""
    lock = path_of(folder, id, LOCK_SUFFIX)
    with explained(folder):
        for path in folder.iterdir():
            if not path.name.startswith(f"{id}.") or path == lock:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """The system's errors as StoreError."""
    try:
        yield
    except OSError as error:
        where = os.fsdecode(error.filename or path)
        advice = HOW_TO_GO_ON if is_full(error) else "choose another folder with --session-dir"
        raise NotWrittenError(f"{where}: {error.strerror or error}; {advice}") from error


class Lock:
    """A lock file, so that one process at a time continues a conversation. It ends with its process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: FileLock | None = None

    def acquire(self) -> bool:
        """False when another one holds it. Raises StoreError."""
        from filelock import FileLock, Timeout

        lock = FileLock(self._path, mode=0o600, thread_local=False)
        with explained(self._path):
            try:
                lock.acquire(timeout=0)
            except Timeout:
                return False
        self._lock = lock
        return True

    def release(self) -> None:
        """May be called again."""
        if self._lock is not None:
            # While it is held: whoever has just opened the file finds out that it is gone, and makes a new one.
            with suppress(OSError):
                self._path.unlink()
            self._lock.release()
            self._lock = None


def set_aside(folder: Path) -> list[Path]:
    """Move a database that cannot be used out of the way, with its log; the next start makes a new one.

    Returns where its files are. Raises UsageError when there is none, StoreError when it is in use.
    """
    with explained(folder):
        files = [path for end in ("", "-wal", "-shm") if os.path.lexists(path := folder / f"{DATABASE}{end}")]
        if not files:
            raise UsageError(f"{folder} has no {DATABASE}")
        for path in folder.glob(f"*{LOCK_SUFFIX}"):
            lock = Lock(path)
            if not lock.acquire():
                raise StoreError(f"{folder} is in use by another process; end it first")
            lock.release()
        number = 1
        while os.path.lexists(folder / f"aside-{number}-{DATABASE}"):
            number += 1
        return [path.rename(folder / f"aside-{number}-{path.name}") for path in files]
