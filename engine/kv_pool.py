"""Pools of memory in equal parts that several holders share, counted by reference: blocks of keys and values, and slots
of running states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineError, OutOfMemoryError
from engine.pages import REFUSED, private

BLOCK_SIZE = 64
"""Positions in a block."""


def blocks_for(num_positions: int) -> int:
    """Blocks needed for that many positions."""
    return -(-num_positions // BLOCK_SIZE)


class CacheFullError(EngineError):
    """The pool has fewer free blocks than are needed; nothing was changed."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(
            f"the KV cache is full: {needed} more blocks of {BLOCK_SIZE} positions are needed and {free} are free; "
            "forget a conversation, or load the model with a smaller context or fewer kept conversations"
        )
        self.needed = needed
        self.free = free


class KVPool:
    """`num_blocks` blocks of `block_bytes` bytes and how many holders each has.

    `memory` [num_blocks, block_bytes] u8 is a private anonymous mapping: zero until written (so every value in it is
    finite, which masked attention lanes rely on), and a page costs memory only once it has been written. Freed blocks
    are taken again first, so no more is ever committed than was in use at one time.

    Raises OutOfMemoryError when the address space cannot be had.
    """

    def __init__(self, block_bytes: int, num_blocks: int) -> None:
        assert block_bytes > 0
        assert num_blocks > 0
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        self.memory = self._map()
        self.states: StatePool | None = None
        """Of a model with layers that keep a running state instead of keys and values."""
        self._holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    def _map(self) -> NDArray[np.uint8]:
        return _map_zeros(self.block_bytes * self.num_blocks).reshape(self.num_blocks, self.block_bytes)

    def read(self, block: int) -> NDArray[np.uint8]:
        """The bytes of a block [block_bytes] u8, not to be changed."""
        found: NDArray[np.uint8] = self.memory[block]
        return found

    @contextlib.contextmanager
    def editing(self, block: int) -> Iterator[NDArray[np.uint8]]:
        """The bytes of a block [block_bytes] u8, to be changed within."""
        yield self.memory[block]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """A block with one holder, its contents undefined but finite. Raises CacheFullError."""
        if not self._free:
            raise CacheFullError(1, 0)
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder."""
        assert self._holders[block] > 0, f"block {block} is free and cannot be shared"
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """One holder less; the last one frees the block."""
        assert self._holders[block] > 0, f"block {block} is released twice"
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self._free.append(block)

    def num_holders(self, block: int) -> int:
        return self._holders[block]

    def copy(self, block: int) -> int:
        """A new block with the same contents. Raises CacheFullError."""
        twin = self.allocate()
        self._copy(block, twin)
        return twin

    def _copy(self, source: int, target: int) -> None:
        self.memory[target] = self.memory[source]


class StatesFullError(CacheFullError):
    """The pool of states has fewer free slots than are needed; nothing was changed."""

    def __init__(self, needed: int, free: int) -> None:
        EngineError.__init__(
            self,
            f"the memory of running states is full: {needed} more are needed and {free} are free; forget a "
            "conversation, or load the model with fewer kept conversations",
        )
        self.needed = needed
        self.free = free


class StatePool(KVPool):
    """Slots [num_blocks, block_bytes] u8, each for the running state of a conversation after some position.

    `most_checkpoints` is how many states of its past a conversation may keep.
    """

    def __init__(self, state_bytes: int, num_slots: int, most_checkpoints: int) -> None:
        assert most_checkpoints > 0
        super().__init__(state_bytes, num_slots)
        self.most_checkpoints = most_checkpoints


def _map_zeros(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros [num_bytes] u8, committed page by page when they are written."""
    try:
        return private(num_bytes)
    except REFUSED as error:
        raise OutOfMemoryError(
            f"the KV cache needs {num_bytes / 2**20:,.0f} MiB of address space, which the system refuses ({error}); "
            "choose a smaller context or fewer kept conversations"
        ) from error
