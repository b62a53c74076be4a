"""Files of the person and of the program: read with errors in one line, written whole and for their owner alone."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from engine.errors import UsageError
from goinfer_chat.terminal import true_text

NO_FOLLOW: Final = getattr(os, "O_NOFOLLOW", 0)
LOCK_SECONDS: Final = 5.0
_BINARY: Final = getattr(os, "O_BINARY", 0)


class NoFolderError(NotADirectoryError):
    """`filename` is where a folder is needed, and is not one."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.ENOTDIR, "it is not a folder", str(path))


def reason_of(error: Exception) -> str:
    """Why a file could not be used, for the end of a sentence: what the system says, or that its bytes are not text."""
    if isinstance(error, NoFolderError):
        return f"{true_text(str(error.filename))} is not a folder"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def read_text(path: str | Path, called: str | None = None) -> str:
    """The text of a UTF-8 file that a person named. Raises UsageError.

    `called`: what the message calls it, such as `--chat-template FILE`; its path if left out.
    """
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: bytes that are not text, or a name that no file can have
        raise UsageError(f"{called or true_text(str(path))} cannot be read: {reason_of(error)}") from None


def write_new(path: Path, text: str) -> None:
    """Make a file with this text. Raises UsageError; nothing is ever replaced."""
    shown = true_text(str(path))
    try:
        write_private(path, iter([text.encode("utf-8", "surrogatepass")]), replace=False)
    except FileExistsError:
        raise UsageError(f"{shown} already exists; choose another name") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise UsageError(f"{shown} cannot be written: {reason_of(error)}") from None


def make_folder(folder: Path) -> None:
    """Create `folder` and what is missing above it for its owner alone. Raises OSError, NoFolderError."""
    for part in (*reversed(folder.parents), folder):
        if not part.is_dir():
            try:
                part.mkdir(mode=0o700, exist_ok=True)
            except FileExistsError:
                raise NoFolderError(part) from None


def create_private(path: Path) -> int:
    """A descriptor of a new file that only its owner can read. Raises FileExistsError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_FOLLOW | _BINARY, 0o600)


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Hold the lock of a file that is read, changed and written: of two at once, the second starts from the first's.

    Raises OSError, also where another process holds it for longer than people wait.
    """
    from filelock import FileLock, Timeout

    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it exists and is not a plain file", str(path))
    lock = FileLock(path.with_name(f".{path.name}.lock"), mode=0o600)
    try:
        lock.acquire(timeout=LOCK_SECONDS)
    except Timeout:
        raise OSError(errno.EAGAIN, "another process is writing it; try again", str(path)) from None
    try:
        yield
    finally:
        # While it is held: whoever has just opened the lock's file finds out that it is gone, and makes a new one.
        with suppress(OSError):
            Path(lock.lock_file).unlink()
        lock.release()


def write_private(path: Path, chunks: Iterator[bytes], *, replace: bool = True) -> None:
    """A file with these bytes, whole or not at all; a link in its place is replaced, not followed.

    What is there and is no file, such as a device, is never replaced. Raises FileExistsError with `replace` False, and
    OSError.
    """
    if replace and path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it exists and is not a plain file", str(path))
    temporary = path.parent / f"{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        with os.fdopen(create_private(temporary), "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(temporary, path)
        else:
            _move_new(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _move_new(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
        source.unlink()
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.replace(source, target)


def copy_private(source: Path, target: Path, *, replace: bool = True) -> bool:
    """Copy a plain file; False when there is none. Raises OSError."""
    try:
        descriptor = os.open(source, os.O_RDONLY | NO_FOLLOW | _BINARY)
    except FileNotFoundError:
        return False
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{source} is not a plain file")
        write_private(target, iter(lambda: file.read(1 << 20), b""), replace=replace)
    return True
