"""Which conversation's cache serves a prompt.

Every kept conversation has a block table, stored under its name. A request names its conversation and gets the table
that already holds the longest start of its prompt:

- its own, cut back to the common start; or, where another conversation's common start is longer,
- a fork of that one, cut to the common start. Full blocks are shared by reference; the tail, a partly used block, is
  copied when it is first written. The other conversation keeps everything it has.

So two conversations that take turns never take each other's cache, a system prompt that all share is held once, and
there is no need to guess which conversation a prompt continues. The least recently used conversation goes first when
there are more than `capacity`, or when the pool is full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.kv_cache import BlockTable, CacheFullError, KVPool, StatesFullError, common_start

Evicted = Callable[[str, BlockTable], None]
"""Called with a conversation's name and its table before the table's blocks are given back."""


class Sessions:
    """The kept conversations of one pool. `capacity` 0 keeps nothing between requests."""

    def __init__(self, pool: KVPool, capacity: int, evicted: Evicted | None = None) -> None:
        assert capacity >= 0
        self.pool = pool
        self._capacity = capacity
        self.evicted = evicted
        self._tables: dict[str, BlockTable] = {}  # least recently used first
        self._running: set[str] = set()

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the conversations with a cache, least recently used first."""
        return tuple(self._tables)

    def begin(self, conversation: str, prompt_ids: Sequence[int]) -> BlockTable:
        """The conversation's table, holding the longest known start of the prompt; its length is what is reused.

        That is at most all but the last token of the prompt: its logits are needed, so it is always evaluated.
        The conversation counts as running, and is not evicted, until `end`.
        """
        assert prompt_ids
        assert conversation not in self._running
        own = self._tables.pop(conversation, None)
        if own is None:
            own = BlockTable(self.pool)
        own = self._with_longest_start(own, prompt_ids, len(prompt_ids) - 1)
        self._tables[conversation] = own
        self._running.add(conversation)
        while len(self._tables) > max(1, self._capacity) and self._evict():
            pass
        return own

    def known_start(self, ids: Sequence[int], limit: int, without: str | None = None) -> int:
        """How many of the first `limit` ids `begin` would find in memory; the conversation `without` does not count."""
        tables = (table for name, table in self._tables.items() if name != without and not table.adopted)
        return max((table.reach(common_start(table.ids, ids, limit)) for table in tables), default=0)

    def preload(self, conversation: str, ids: Sequence[int]) -> BlockTable:
        """A table for a conversation that nobody has asked for yet, so the first to be evicted.

        It holds what others know of the ids already; the caller gives it the rest, or forgets it.
        """
        assert conversation not in self._tables
        assert len(self._tables) < self._capacity
        table = self._with_longest_start(BlockTable(self.pool), ids, len(ids))
        self._tables = {conversation: table, **self._tables}
        return table

    def _with_longest_start(self, own: BlockTable, ids: Sequence[int], limit: int) -> BlockTable:
        """`own`, which is in no list, cut back to its common start with the ids; or a fork with a longer one.

        Where a running state allows less, `num_known` says how long the common start is, and one will be kept there.
        """
        known = common_start(own.ids, ids, limit)
        length, source = own.reach(known), own
        for table in self._tables.values():
            if table.adopted:
                continue  # what another backend computed stays in the conversation that came with it
            start = common_start(table.ids, ids, limit)
            if table.reach(start) > length:
                length, source = table.reach(start), table
            known = max(known, start)
        if source is own:
            own.truncate(length)
        else:
            fork = source.fork(length)
            own.release()
            own = fork
        own.num_known = known
        own.mark([known])
        return own

    def reserve(self, table: BlockTable, num_positions: int) -> None:
        """Make room in a running conversation's table, at the cost of idle conversations where that is needed.

        Raises CacheFullError when nothing is left to evict.
        """
        self._insist(lambda: table.reserve(num_positions))

    def make_room(self, table: BlockTable, num_positions: int) -> None:
        """The same for positions that come from elsewhere, without a step, and with one running state of theirs."""
        self._insist(lambda: table.make_room(num_positions))
        states = self.pool.states
        while states is not None and not states.num_free and (self._thin() or self._evict()):
            pass

    def _insist(self, reserve: Callable[[], None]) -> None:
        while True:
            try:
                return reserve()
            except StatesFullError:
                if not (self._thin() or self._evict()):
                    raise
            except CacheFullError:
                if not self._evict():
                    raise

    def end(self, conversation: str) -> None:
        """The conversation is idle: spare room is given back, its positions are kept for its next turn."""
        self._running.remove(conversation)
        table = self._tables[conversation]
        table.rest()
        if len(self._tables) > self._capacity:
            self._evict()

    def forget(self, conversation: str) -> None:
        """Drop the cache of one conversation, if it has one."""
        assert conversation not in self._running
        table = self._tables.pop(conversation, None)
        if table is not None:
            table.release()

    def _thin(self) -> bool:
        """Give up a state that an idle conversation kept of its past; False when there is none."""
        idle = [table for name, table in self._tables.items() if name not in self._running]
        return any(table.state is not None and table.state.thin() for table in idle)

    def _evict(self) -> bool:
        """Drop the least recently used idle conversation; False when there is none."""
        idle = next((name for name in self._tables if name not in self._running), None)
        if idle is None:
            return False
        table = self._tables.pop(idle)
        if self.evicted is not None:
            self.evicted(idle, table)
        table.release()
        return True
