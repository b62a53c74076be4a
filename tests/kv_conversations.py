"""Conversations whose K/V are made of their ids, as the numerics contract has it, and written without `KVLayout`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.kv_cache import BLOCK_SIZE, BlockTable, KVPool
from engine.kv_file import Identity, KVFile, KVLayout, Saved

SMALL = KVLayout(layers=(((1, 2), (1, 4)),))
ODD = KVLayout(layers=(*(((5, 2), (2, 10), (3, 1)),) * 2, ((3, 2), (1, 5), (2, 3)), ((5, 2), (2, 10), (3, 1))))
"""Layers that are not all alike."""


def identity(layout: KVLayout = SMALL, **changes: object) -> Identity:
    values: dict[str, object] = {
        "model": b"m" * 32, "architecture": "llama", "rope": b"r" * 32, "kv_type": "f16", "layout": layout
    }  # fmt: skip
    return Identity(**{**values, **changes})  # type: ignore[arg-type]


def kv_of(ids: Sequence[int], layout: KVLayout) -> np.ndarray:
    """K/V [positions, position_bytes] u8: of each position a function of its id and all before it."""
    found = np.empty((len(ids), layout.position_bytes), np.uint8)
    state = b""
    for position, token in enumerate(ids):
        state = hashlib.blake2b(state + token.to_bytes(4, "little"), digest_size=32).digest()
        found[position] = np.frombuffer(hashlib.shake_128(state).digest(layout.position_bytes), np.uint8)
    return found


def _offsets(layout: KVLayout, slot: int) -> np.ndarray:
    """Where in a block the bytes of a slot lie [position_bytes]."""
    found, start = [], 0
    for parts in layout.layers:
        for rows, width in parts:
            for row in range(rows):
                found += [start + (row * BLOCK_SIZE + slot) * width + byte for byte in range(width)]
            start += rows * BLOCK_SIZE * width
    return np.array(found)


class Conversation:
    """A table in a pool of its own, and the file it is saved to."""

    def __init__(self, path: Path, layout: KVLayout = SMALL, num_blocks: int = 16) -> None:
        self.path = path
        self.identity = identity(layout)
        self.pool = KVPool(layout.block_bytes, num_blocks)
        self.table = BlockTable(self.pool)
        self._offsets = [_offsets(layout, slot) for slot in range(BLOCK_SIZE)]

    def add(self, ids: Sequence[int]) -> None:
        """What a forward step does."""
        start = len(self.table)
        self.table.reserve(len(ids))
        new = kv_of([*self.table.ids, *ids], self.identity.layout)[start:]
        for position, values in enumerate(new, start):
            block = self.pool.memory[self.table.blocks[position // BLOCK_SIZE]]
            block[self._offsets[position % BLOCK_SIZE]] = values
        self.table.append(ids)

    def add_some(self, count: int) -> None:
        """Ids that no other position of this conversation has."""
        start = len(self.table)
        self.add(range(start, start + count))

    def is_right(self) -> bool:
        """Whether every position has the K/V of its ids."""
        expected = kv_of(self.table.ids, self.identity.layout)
        for position, values in enumerate(expected):
            block = self.pool.memory[self.table.blocks[position // BLOCK_SIZE]]
            if not np.array_equal(block[self._offsets[position % BLOCK_SIZE]], values):
                return False
        return True

    def save(self) -> KVFile:
        """Save to a file that is opened for it; the caller may go on with it."""
        file = KVFile.open(self.path, self.identity)
        file.save(self.table, self.pool)
        return file


def restored(path: Path, layout: KVLayout = SMALL) -> tuple[list[int], str | None]:
    """Ids a new process gets out of a file, and what it says about it. Their K/V are right."""
    fresh = Conversation(path, layout)
    with KVFile.open(path, fresh.identity) as file:
        offered = len(file.ids)
        count = file.restore(fresh.table, fresh.pool, offered)
        assert count == len(fresh.table) == len(file.ids)
        assert count == offered or file.problem
        assert fresh.is_right()
        assert fresh.pool.num_free == fresh.pool.num_blocks - len(fresh.table.blocks)
        return fresh.table.ids, file.problem


def dead_bytes(file: KVFile) -> int:
    """Those of `num_bytes` that hold nothing of use."""
    log = file._log
    return log.end - log.bytes_of(len(log.ids), len(log.pieces), len(log.states)) if log else 0


def is_whole(file: KVFile, saved: Saved) -> bool:
    """Whether this last save wrote the whole file: it is new, or had too many dead bytes."""
    return saved.num_bytes == file.num_bytes
