"""Results that are asked for again: a function of what it is given, the last ones kept within a bound."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Memo(Generic[Key, Value]):
    """Safe to share between threads. Values are shared by all who ask: they must not be changed."""

    def __init__(self, make: Callable[[Key], Value], size_of: Callable[[Key], int], limit: int = 2_000_000) -> None:
        """Keeps values of keys whose sizes together are `limit` at most; those not used for longest go first."""
        self._make, self._size_of, self._limit = make, size_of, limit
        self._kept: dict[Key, Value] = {}  # in the order of use
        self._size = 0
        self._lock = threading.Lock()

    def get(self, key: Key) -> Value:
        with self._lock:
            if key in self._kept:
                value = self._kept[key] = self._kept.pop(key)
                return value
        value = self._make(key)  # others go on meanwhile
        size = self._size_of(key)
        with self._lock:
            if key not in self._kept and size <= self._limit:
                self._kept[key] = value
                self._size += size
                while self._size > self._limit:
                    oldest = next(iter(self._kept))
                    del self._kept[oldest]
                    self._size -= self._size_of(oldest)
        return value

    @property
    def num_kept(self) -> int:
        return len(self._kept)
