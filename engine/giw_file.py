"""`.giw` files: a model's weights as the kernels want them, so that a later start maps them instead of laying them out.

    offset 0     one page: magic, version, key [64], number of bytes, CRC-32 of them, the model's name [64], CRC-32 of
                 all this
    offset 4096  the weights, as in memory

The key names the model's content, the layout's source and where each matrix lies. A file that does not match in every
respect is not used and is written anew. Files are checked whole when they are opened: 6 to 10 GB a second. They are a
cache: `make_room` removes those that were used least recently, and nothing is lost with any of them.

Programs with the same model share the memory of its file. It lies in large pages where kernel and file system have them
for files (ext4 from Linux 6.16 on, XFS): when it was written in whole ones, or read when it was asked for them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import shutil
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import platformdirs
from numpy.typing import NDArray

from engine.pages import prefer_large

MAGIC, VERSION = b"GIW weights\0", 4
PAGE = 4096
_HEADER = struct.Struct("<12sI64sQI64s")
_STRETCH = 1 << 24
CAP_ENVIRONMENT = "GOINFER_CHAT_WEIGHTS_GB"
DEFAULT_CAP_BYTES = 20 * 10**9
"""All `.giw` files together; GOINFER_CHAT_WEIGHTS_GB sets another cap, 0 keeps none."""
WORTH_KEEPING = 256 << 20
"""Smaller models are laid out in less time than a person notices."""


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """One `.giw` file, for listings."""

    path: Path
    name: str
    """The model file's name when it was laid out."""
    num_bytes: int
    used_at: float
    """Seconds since the epoch."""


def folder() -> Path:
    """Where the files are; it need not exist."""
    return platformdirs.user_cache_path("goinfer-chat") / "weights"


def cap_bytes() -> int:
    """The cap in force."""
    try:
        return int(float(os.environ[CAP_ENVIRONMENT]) * 1e9)
    except (KeyError, ValueError):
        return DEFAULT_CAP_BYTES


def key_of(content_hash: str, places: str) -> bytes:
    """Identity [64] of a model's weights (the content) as this version lays them out (`places`: which matrix where)."""
    layout = (Path(__file__).parent / "kernels" / "formats.py").read_bytes()
    digests = (hashlib.sha256(part).digest() for part in (content_hash.encode(), places.encode() + b"\0" + layout))
    return b"".join(digests)


def path_of(key: bytes) -> Path:
    """One file for each content, so that a new layout replaces the old one."""
    return folder() / f"{key[:32].hex()[:24]}.giw"


def list_kept() -> list[KeptWeights]:
    """All files, the one used last first."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder().glob("*.giw"):
            with contextlib.suppress(OSError):
                info = path.stat()
                with path.open("rb") as file:
                    page = file.read(_HEADER.size)
                name = (
                    _HEADER.unpack(page)[5].rstrip(b"\0").decode(errors="replace") if len(page) == _HEADER.size else ""
                )
                found.append(KeptWeights(path, name, info.st_size, info.st_mtime))
    return sorted(found, key=lambda kept: kept.used_at, reverse=True)


def _checksum(data: NDArray[np.uint8], threads: int) -> int:
    """CRC-32 of the CRC-32s of stretches, which several threads can share."""
    parts = [data[i : i + _STRETCH] for i in range(0, len(data), _STRETCH)]
    with ThreadPoolExecutor(threads) as pool:
        return zlib.crc32(struct.pack(f"<{len(parts)}I", *pool.map(zlib.crc32, parts)))


def _checksum_of_file(file: FileIO, num_bytes: int) -> int:
    """The same of weights in a file, read: mapped they would count as this process's memory."""
    file.seek(PAGE)
    parts = []
    for start in range(0, num_bytes, _STRETCH):
        part, end = 0, min(start + _STRETCH, num_bytes)
        while start < end and (piece := file.read(min(1 << 20, end - start))):
            part, start = zlib.crc32(piece, part), start + len(piece)
        parts.append(part)
    return zlib.crc32(struct.pack(f"<{len(parts)}I", *parts))


def open_kept(key: bytes, num_bytes: int, threads: int, whole: bool = True) -> NDArray[np.uint8] | None:
    """The weights [num_bytes] u8, mapped read-only, or None if there is no file that is whole and belongs to them.

    Unless `whole`, their checksum is not compared: nothing but the first page is read.
    """
    path = path_of(key)
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            if info.st_size != PAGE + num_bytes or (hasattr(os, "getuid") and info.st_uid != os.getuid()):
                return None
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if whole:  # otherwise a step should read what it touches and no more
                prefer_large(mapped)
    except (OSError, ValueError):
        return None
    page = mapped[:PAGE]
    magic, version, found, size, checksum, _ = _HEADER.unpack_from(page)
    (header_checksum,) = struct.unpack_from("<I", page, _HEADER.size)
    right = (magic, version, found, size) == (MAGIC, VERSION, key, num_bytes)
    if not right or header_checksum != zlib.crc32(page[: _HEADER.size]):
        return None
    weights = np.frombuffer(mapped, np.uint8)[PAGE:]
    if whole and _checksum(weights, threads) != checksum:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used now
    return weights


def keep(key: bytes, name: str, weights: NDArray[np.uint8], threads: int) -> None:
    """Write a file, whole or not at all. A disk that is full, slow or read-only only costs the next start its time."""
    path = path_of(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not make_room(PAGE + len(weights)):
            return
        page = _first_page(key, len(weights), _checksum(weights, threads), name)
        with _replacing(path) as file:
            _write_all(file, page)
            # Each stretch ends where one of the file does, so that it is whole pages, also large ones.
            for end in range(_STRETCH - PAGE, len(weights) + _STRETCH, _STRETCH):
                _write_all(file, weights[max(0, end - _STRETCH) : end].data)


def write(
    key: bytes,
    name: str,
    num_bytes: int,
    lay_out: Callable[[Callable[[int, NDArray[np.uint8]], None]], None],
) -> None:
    """Write a file whose weights are never in memory together: `lay_out(put)` calls put(offset, bytes) for each piece.

    It may call it from several threads; what it leaves out is zero. Raises OSError when the file cannot be written,
    ENOSPC also where the cap does not allow it.
    """
    path, lock = path_of(key), threading.Lock()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not make_room(PAGE + num_bytes):
        raise OSError(errno.ENOSPC, "too large for the cap or for half of what is free on the disk")
    with _replacing(path) as file:
        file.truncate(PAGE + num_bytes)

        def put(offset: int, piece: NDArray[np.uint8]) -> None:
            with lock:
                file.seek(PAGE + offset)
                _write_all(file, piece.reshape(-1).data)

        lay_out(put)
        checksum = _checksum_of_file(file, num_bytes)
        file.seek(0)
        _write_all(file, _first_page(key, num_bytes, checksum, name))


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[FileIO]:
    """A new file that takes the name at the end, or goes away when anything fails."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with FileIO(handle, "r+b") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    """A system may write less than it is given, such as 2 GB at once. Raises OSError."""
    left = memoryview(data)
    while len(left):
        left = left[file.write(left) :]


def _first_page(key: bytes, num_bytes: int, checksum: int, name: str) -> bytes:
    header = _HEADER.pack(MAGIC, VERSION, key, num_bytes, checksum, name.encode()[:64])
    return (header + struct.pack("<I", zlib.crc32(header))).ljust(PAGE, b"\0")


def make_room(num_bytes: int) -> bool:
    """Remove what was used least recently until `num_bytes` more fit cap and disk. False if they cannot."""
    for leftover in folder().glob("*.tmp"):
        # Of a process that was killed; a writer that lives finishes within minutes.
        with contextlib.suppress(OSError):
            if leftover.stat().st_mtime < time.time() - 3600:
                leftover.unlink()
    kept = list_kept()
    # Half of what is free stays free.
    room = min(cap_bytes(), sum(k.num_bytes for k in kept) + shutil.disk_usage(folder()).free // 2)
    if num_bytes > room:
        return False
    while kept and sum(k.num_bytes for k in kept) + num_bytes > room:
        with contextlib.suppress(OSError):
            kept.pop().path.unlink()
    return True
