"""Memory in large pages, where the system has them: a CPU has fewer addresses to translate, and reads faster.

Asking may be refused (a kernel without them, another system); then pages are small, and nothing else changes.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

from engine.errors import OutOfMemoryError

# Python's default for an anonymous mapping is shared, which is tmpfs: no large pages, and kept by children.
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
REFUSED = OSError, ValueError, OverflowError
"""What mapping raises where the address space cannot be had."""


def prefer_large(memory: mmap.mmap) -> None:
    """Ask for large pages. What of a file is in memory when it is asked stays as it is."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)


def private(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros [num_bytes] u8 that start at a page; each page costs memory from when it is written. Raises REFUSED."""
    memory = mmap.mmap(-1, max(num_bytes, 1), **PRIVATE)
    prefer_large(memory)
    return np.frombuffer(memory, np.uint8)[:num_bytes]


def zeroed(num_bytes: int) -> NDArray[np.uint8]:
    """The same for a model's own memory. Raises OutOfMemoryError."""
    try:
        return private(num_bytes)
    except REFUSED as error:
        raise OutOfMemoryError(
            f"{num_bytes / 1e9:.1f} GB of memory cannot be had: {error}; close other programs or choose a smaller model"
        ) from error
