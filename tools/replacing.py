"""Files read whole and replaced whole: others see the old content or the new one, nothing between."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tools.errors import ToolError
from tools.root import Place

MAX_BYTES: Final = 10_000_000
"""Of a file that is edited."""


@dataclass(frozen=True, slots=True)
class Content:
    """A file as it was read."""

    content: bytes
    info: os.stat_result

    @property
    def mode(self) -> int:
        return self.info.st_mode & 0o777


def current(place: Place) -> Content | None:
    """What a file holds; None where there is none. Raises ToolError for anything but a plain file, or a huge one."""
    if place.info() is None:
        return None
    with os.fdopen(place.open_file(), "rb") as file:
        info = os.fstat(file.fileno())
        if info.st_size > MAX_BYTES:
            raise ToolError(
                f"{place.path} has {info.st_size:,} bytes, which is too much to edit; {MAX_BYTES:,} is the most"
            )
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ToolError(f"{place.path} has more than {MAX_BYTES:,} bytes, which is too much to edit")
    return Content(content, info)


def put(place: Place, content: bytes, *, mode: int | None, expected: Content | None) -> None:
    """Replace a file, or make one. `mode`: permission bits; None: those of a new file.

    Raises ToolError when the file is not as `expected` any more: somebody else is writing it.
    """
    temporary = f".{place.name[:200]}.{secrets.token_hex(6)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(temporary, flags, 0o666 if mode is None else 0o600, dir_fd=place.folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if expected is not None:
                with suppress(OSError):  # only root may give files away
                    os.fchown(file.fileno(), expected.info.st_uid, expected.info.st_gid)
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        _expect_unchanged(place, expected)
        os.rename(temporary, place.name, src_dir_fd=place.folder, dst_dir_fd=place.folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=place.folder)
        raise


def remove(place: Place) -> None:
    os.unlink(place.name, dir_fd=place.folder)


def _expect_unchanged(place: Place, expected: Content | None) -> None:
    info = place.info()
    if (info is None) != (expected is None):
        raise ToolError(f"{place.path} was {'deleted' if info is None else 'created'} meanwhile; read it again")
    if info is not None and expected is not None and _state(info) != _state(expected.info):
        raise ToolError(f"{place.path} was changed meanwhile; read it again")


def _state(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_ino, info.st_size, info.st_mtime_ns
