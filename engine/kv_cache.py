"""One conversation's keys and values: a table of blocks of the pool.

A block holds the K/V of `BLOCK_SIZE` positions of all layers; how its bytes are laid out is the model's business.
Blocks are counted by reference. A full block never changes, so any number of tables may hold it: a fork costs
nothing and a start that several conversations share is held once. A partly filled block may be shared too; the
table that wants to write into it first takes a copy of its own (copy on write).

A model may have layers with a running state beside (`running_state.py`). Then a table can be cut back, or forked, only
to where a state was kept: what it is asked for is the most that it keeps, and its length says how much it kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.kv_pool import BLOCK_SIZE, CacheFullError, KVPool, StatePool, StatesFullError, blocks_for
from engine.running_state import RunningState, Segment

__all__ = ["BLOCK_SIZE", "BlockTable", "CacheFullError", "KVPool", "StatePool", "StatesFullError", "blocks_for"]


class BlockTable:
    """One conversation's positions: `ids[p]` is the token whose K/V lie in slot p % 64 of `blocks[p // 64]`.

    `ids` says exactly which positions have K/V. `blocks` may reach further after `reserve`: room for the next step.
    The order is always reserve, let the model write, append.
    """

    def __init__(self, pool: KVPool) -> None:
        self.ids: list[int] = []
        self.blocks: list[int] = []
        self.num_known = 0
        """Positions that the table was last asked to keep: more than its length where their state is not kept."""
        self.adopted = False
        """Some of its K/V are another backend's, which a prompt read here would not have given bit for bit."""
        self.state = RunningState(pool.states) if pool.states is not None else None
        self._pool = pool

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks held, whether or not other tables hold them too."""
        return len(self.blocks) * self._pool.block_bytes

    def reserve(self, num_positions: int, num_guessed: int = 0) -> None:
        """Make room for a step of `num_positions` positions, in blocks that no other table holds.

        The last `num_guessed` of them may turn out not to be said: a running state is kept from before them too.
        Raises CacheFullError, before anything is changed.
        """
        if num_positions > 0 and self.state is not None:
            self._room(num_positions)
            self.state.reserve(len(self.ids), num_positions, num_guessed)
        self.make_room(num_positions)

    def make_room(self, num_positions: int) -> None:
        """The blocks of the next `num_positions` positions, as `reserve` gets them, and no step."""
        if num_positions <= 0:
            return
        pool = self._pool
        shared, missing = self._room(num_positions)
        for i in shared:
            own = pool.copy(self.blocks[i])
            pool.release(self.blocks[i])
            self.blocks[i] = own
        self.blocks.extend(pool.allocate() for _ in range(missing))

    def _room(self, num_positions: int) -> tuple[list[int], int]:
        """Which blocks must become this table's own, and how many are missing. Raises CacheFullError."""
        pool, length = self._pool, len(self.ids)
        first = length // BLOCK_SIZE
        shared = [i for i in range(first, len(self.blocks)) if pool.num_holders(self.blocks[i]) > 1]
        missing = max(0, blocks_for(length + num_positions) - len(self.blocks))
        if len(shared) + missing > pool.num_free:
            raise CacheFullError(len(shared) + missing, pool.num_free)
        return shared, missing

    def append(self, ids: Sequence[int]) -> None:
        """Record positions the model has just written into the reserved room."""
        if not ids:  # nothing was written, so nothing had to be reserved
            return
        first, length = len(self.ids) // BLOCK_SIZE, len(self.ids) + len(ids)
        touched = self.blocks[first : blocks_for(length)]
        assert blocks_for(length) <= len(self.blocks), "append without reserve"
        assert all(self._pool.num_holders(block) == 1 for block in touched), "append into a shared block"
        self.ids.extend(ids)
        if self.state is not None:
            self.state.advance(len(self.ids))

    def segments(self) -> list[Segment]:
        """What the step that room was reserved for does with the running state."""
        assert self.state is not None
        return self.state.segments(len(self.ids))

    def mark(self, lengths: Iterable[int]) -> None:
        """Lengths to come that are worth keeping a running state at: messages end there."""
        if self.state is not None:
            self.state.mark(length for length in lengths if length > len(self.ids))

    def rest(self) -> None:
        """Nothing runs on the table for now: where it ends, it can be gone on from, by others too."""
        self.truncate(len(self.ids))
        if self.state is not None:
            self.state.rest(len(self.ids))

    def reach(self, length: int) -> int:
        """How many of the first `length` positions a table that rests would keep, cut back or forked there."""
        return length if self.state is None else self.state.nearest(length)

    def truncate(self, length: int) -> None:
        """Keep the first `length` positions, or as many as the running state allows, and no room beyond them."""
        assert 0 <= length <= len(self.ids)
        self.num_known = length
        if self.state is not None:
            length = self.state.cut(length)
        del self.ids[length:]
        self.adopted = self.adopted and length > 0
        for block in self.blocks[blocks_for(length) :]:
            self._pool.release(block)
        del self.blocks[blocks_for(length) :]

    def fork(self, length: int | None = None) -> BlockTable:
        """A table with the same first `length` positions (all by default), or as many as the running state allows.

        Nothing is copied until one is written.
        """
        length = len(self.ids) if length is None else length
        assert 0 <= length <= len(self.ids)
        twin = BlockTable(self._pool)
        twin.num_known = length
        if self.state is not None and twin.state is not None:
            length = twin.state.share(self.state, length)
        twin.ids = self.ids[:length]
        twin.adopted = self.adopted and length > 0
        twin.blocks = self.blocks[: blocks_for(length)]
        for block in twin.blocks:
            self._pool.share(block)
        return twin

    def release(self) -> None:
        """Give every block back; the table is empty and may be used again."""
        self.truncate(0)


def common_start(known: Sequence[int], wanted: Sequence[int], limit: int | None = None) -> int:
    """How many ids both begin with, of the first `limit` where that is given."""
    shorter = min(len(known), len(wanted))
    limit = shorter if limit is None else min(limit, shorter)
    step = 256  # slices are compared in C; the one that differs is walked
    for start in range(0, limit, step):
        stop = min(start + step, limit)
        if list(known[start:stop]) != list(wanted[start:stop]):
            return next(i for i in range(start, stop) if known[i] != wanted[i])
    return limit
