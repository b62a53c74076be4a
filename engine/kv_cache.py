"""The memory of keys and values: a pool of blocks, and one table of blocks for each conversation.

A block holds the K/V of `BLOCK_SIZE` positions of all layers; how its bytes are laid out is the model's business.
Blocks are counted by reference. A full block never changes, so any number of tables may hold it: a fork costs
nothing and a start that several conversations share is held once. A partly filled block may be shared too; the
table that wants to write into it first takes a copy of its own (copy on write).
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineError, OutOfMemoryError

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

    @property
    def used_bytes(self) -> int:
        return (self.num_blocks - self.num_free) * self.block_bytes

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


def _map_zeros(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros [num_bytes] u8, committed page by page when they are written."""
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            # Python's default for an anonymous mapping is shared, which is tmpfs: no huge pages, and kept by children.
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            mapping = mmap.mmap(-1, num_bytes)
    except OSError as error:
        raise OutOfMemoryError(
            f"the KV cache needs {num_bytes / 2**20:,.0f} MiB of address space, which the system refuses "
            f"({error.strerror or error}); choose a smaller context or fewer kept conversations"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # kernels built without huge pages; small pages work as well
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, dtype=np.uint8)


class BlockTable:
    """One conversation's positions: `ids[p]` is the token whose K/V lie in slot p % 64 of `blocks[p // 64]`.

    `ids` says exactly which positions have K/V. `blocks` may reach further after `reserve`: room for the next step.
    The order is always reserve, let the model write, append.
    """

    def __init__(self, pool: KVPool) -> None:
        self.ids: list[int] = []
        self.blocks: list[int] = []
        self._pool = pool

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks held, whether or not other tables hold them too."""
        return len(self.blocks) * self._pool.block_bytes

    def reserve(self, num_positions: int) -> None:
        """Make room for the next `num_positions` positions, in blocks that no other table holds.

        Raises CacheFullError, before anything is changed.
        """
        if num_positions <= 0:
            return
        pool, length = self._pool, len(self.ids)
        first = length // BLOCK_SIZE
        shared = [i for i in range(first, len(self.blocks)) if pool.num_holders(self.blocks[i]) > 1]
        missing = max(0, blocks_for(length + num_positions) - len(self.blocks))
        if len(shared) + missing > pool.num_free:
            raise CacheFullError(len(shared) + missing, pool.num_free)
        for i in shared:
            own = pool.copy(self.blocks[i])
            pool.release(self.blocks[i])
            self.blocks[i] = own
        self.blocks.extend(pool.allocate() for _ in range(missing))

    def append(self, ids: Sequence[int]) -> None:
        """Record positions the model has just written into the reserved room."""
        if not ids:  # nothing was written, so nothing had to be reserved
            return
        first, length = len(self.ids) // BLOCK_SIZE, len(self.ids) + len(ids)
        touched = self.blocks[first : blocks_for(length)]
        assert blocks_for(length) <= len(self.blocks), "append without reserve"
        assert all(self._pool.num_holders(block) == 1 for block in touched), "append into a shared block"
        self.ids.extend(ids)

    def truncate(self, length: int) -> None:
        """Keep the first `length` positions and no room beyond their last block."""
        assert 0 <= length <= len(self.ids)
        del self.ids[length:]
        for block in self.blocks[blocks_for(length) :]:
            self._pool.release(block)
        del self.blocks[blocks_for(length) :]

    def fork(self, length: int | None = None) -> BlockTable:
        """A table with the same first `length` positions (all by default). Nothing is copied until one is written."""
        length = len(self.ids) if length is None else length
        assert 0 <= length <= len(self.ids)
        twin = BlockTable(self._pool)
        twin.ids = self.ids[:length]
        twin.blocks = self.blocks[: blocks_for(length)]
        for block in twin.blocks:
            self._pool.share(block)
        return twin

    def release(self) -> None:
        """Give every block back; the table is empty and may be used again."""
        self.truncate(0)
