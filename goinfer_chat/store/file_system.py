"""What the file system under the store does that SQLite cannot tell."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import tempfile
from pathlib import Path
from typing import Final

_COPYING: Final = frozenset({0x9123683E, 0x2FC12FC1, 0xCA451A4E})
"""Linux's `f_type` of btrfs, ZFS and bcachefs."""

HOW_TO_GO_ON: Final = (
    "what was saved before stands; make room and go on "
    "(files there that end in .giw-kv are caches, which may be removed)"
)


def is_full(error: OSError) -> bool:
    """Whether there is no room: for anybody, or for this person."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def copies_on_write(path: Path) -> bool:
    """Whether a change of what a file holds takes new room on the disk.

    There the index of SQLite's log, which is written as memory, kills the process (SIGBUS) where the disk is full.
    """
    if not sys.platform.startswith("linux"):
        return False
    info = (ctypes.c_long * 64)()  # a statfs is smaller, and begins with the type
    if ctypes.CDLL(None).statfs(os.fsencode(path), info):
        return False
    return info[0] & 0xFFFFFFFF in _COPYING


def why_not_written(folder: Path) -> OSError | None:
    """The system's own reason why no file can be made in the folder; None where one can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None
