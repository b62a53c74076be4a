"""The pool and its tables against plain lists, with real bytes in the blocks."""

from __future__ import annotations

import contextlib
import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.errors import EngineError, OutOfMemoryError
from engine.kv_cache import BLOCK_SIZE, BlockTable, CacheFullError, KVPool, blocks_for

SLOT_BYTES = 8


def make_pool(num_blocks: int) -> KVPool:
    return KVPool(BLOCK_SIZE * SLOT_BYTES, num_blocks)


def slots(pool: KVPool) -> np.ndarray:
    """The pool as u64 [blocks, 64]: one number for each position."""
    return pool.memory.view(np.uint64)


def write(pool: KVPool, table: BlockTable, values: list[int]) -> None:
    """What a forward step does: reserve, write the K/V, append."""
    table.reserve(len(values))
    for offset, value in enumerate(values):
        position = len(table) + offset
        slots(pool)[table.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = value
    table.append(values)


def read(pool: KVPool, table: BlockTable) -> list[int]:
    return [int(slots(pool)[table.blocks[p // BLOCK_SIZE], p % BLOCK_SIZE]) for p in range(len(table))]


class TablesAgainstLists(RuleBasedStateMachine):
    """Any order of append, truncate, fork and release; each table must read back what was written through it."""

    tables: Bundle[int] = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(24)
        self.real: dict[int, BlockTable] = {}
        self.model: dict[int, list[int]] = {}
        self.next_key = 0
        self.next_value = 1

    def _add(self, table: BlockTable, values: list[int]) -> int:
        key = self.next_key
        self.next_key += 1
        self.real[key], self.model[key] = table, values
        return key

    @rule(target=tables)
    def new(self) -> int:
        return self._add(BlockTable(self.pool), [])

    @rule(key=tables, count=st.integers(0, 200))
    def append(self, key: int, count: int) -> None:
        values = list(range(self.next_value, self.next_value + count))
        self.next_value += count  # never the same value twice, so a write into another's slot is always seen
        before = (list(self.real[key].ids), list(self.real[key].blocks), self.pool.num_free)
        try:
            write(self.pool, self.real[key], values)
        except CacheFullError:
            assert (self.real[key].ids, self.real[key].blocks, self.pool.num_free) == before
        else:
            self.model[key] += values

    @rule(key=tables, extra=st.integers(0, 100))
    def reserve_only(self, key: int, extra: int) -> None:
        with contextlib.suppress(CacheFullError):
            self.real[key].reserve(extra)

    @rule(key=tables, share=st.floats(0, 1))
    def truncate(self, key: int, share: float) -> None:
        length = round(share * len(self.model[key]))
        self.real[key].truncate(length)
        del self.model[key][length:]

    @rule(target=tables, key=tables, share=st.floats(0, 1))
    def fork(self, key: int, share: float) -> int:
        length = round(share * len(self.model[key]))
        return self._add(self.real[key].fork(length), self.model[key][:length])

    @rule(key=consumes(tables))
    def release(self, key: int) -> None:
        self.real.pop(key).release()
        del self.model[key]

    @invariant()
    def every_table_reads_back_what_it_wrote(self) -> None:
        for key, table in self.real.items():
            assert table.ids == self.model[key]
            assert read(self.pool, table) == self.model[key]

    @invariant()
    def every_block_is_free_or_held_as_often_as_it_is_counted(self) -> None:
        held = [block for table in self.real.values() for block in table.blocks]
        for block in range(self.pool.num_blocks):
            assert self.pool.num_holders(block) == held.count(block)
        assert self.pool.num_free == self.pool.num_blocks - len(set(held))

    def teardown(self) -> None:
        for table in self.real.values():
            table.release()
        assert self.pool.num_free == self.pool.num_blocks


TestTablesAgainstLists = TablesAgainstLists.TestCase
TestTablesAgainstLists.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_fork_costs_no_block_until_it_is_written() -> None:
    pool = make_pool(8)
    table = BlockTable(pool)
    write(pool, table, list(range(1, 131)))
    twin = table.fork()
    assert pool.num_free == 5
    assert twin.blocks == table.blocks
    write(pool, twin, [999])
    assert pool.num_free == 4
    assert twin.blocks[:2] == table.blocks[:2]
    assert twin.blocks[2] != table.blocks[2]
    assert read(pool, table) == list(range(1, 131))


def test_the_owner_writing_on_leaves_its_fork_unchanged() -> None:
    pool = make_pool(8)
    table = BlockTable(pool)
    write(pool, table, [1, 2, 3])
    twin = table.fork()
    table.truncate(1)
    write(pool, table, [7, 8, 9])
    assert read(pool, twin) == [1, 2, 3]
    assert read(pool, table) == [1, 7, 8, 9]


def test_a_shared_block_is_written_in_place_once_the_other_holder_let_go() -> None:
    pool = make_pool(1)
    table = BlockTable(pool)
    write(pool, table, [1, 2, 3])
    twin = table.fork()
    with pytest.raises(CacheFullError):
        twin.reserve(1)
    table.release()
    write(pool, twin, [4])
    assert read(pool, twin) == [1, 2, 3, 4]


def test_a_full_pool_is_an_engine_error_that_names_both_numbers() -> None:
    pool = make_pool(2)
    table = BlockTable(pool)
    with pytest.raises(EngineError, match="3 more blocks of 64 positions are needed and 2 are free"):
        table.reserve(129)
    assert pool.num_free == 2
    assert table.blocks == []


def test_releasing_a_free_block_and_appending_unreserved_are_our_own_mistakes() -> None:
    pool = make_pool(2)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(block)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(block)
    table = BlockTable(pool)
    with pytest.raises(AssertionError, match="append without reserve"):
        table.append([1])
    table.reserve(2)
    table.append([1])
    twin = table.fork()
    with pytest.raises(AssertionError, match="append into a shared block"):
        table.append([2])
    assert len(twin) == 1


def test_truncate_gives_back_reserved_room() -> None:
    pool = make_pool(4)
    table = BlockTable(pool)
    table.reserve(200)
    assert pool.num_free == 0
    table.append([5])
    table.truncate(len(table))
    assert pool.num_free == 3
    assert table.ids == [5]


@pytest.mark.parametrize(("positions", "blocks"), [(0, 0), (1, 1), (64, 1), (65, 2), (128, 2)])
def test_blocks_for_rounds_up(positions: int, blocks: int) -> None:
    assert blocks_for(positions) == blocks


def test_the_memory_is_zero_and_page_aligned() -> None:
    pool = make_pool(64)
    assert not pool.memory.any()
    assert pool.memory.ctypes.data % mmap.PAGESIZE == 0
    assert pool.memory.flags.writeable
    assert pool.memory.flags.c_contiguous


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_a_large_pool_commits_only_what_is_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    pool = KVPool(2**20, 512)
    assert resident() - before < 16 * 2**20
    pool.memory[:32] = 1
    assert resident() - before > 30 * 2**20


@pytest.mark.skipif(sys.maxsize < 2**32, reason="needs a 64-bit address space")
def test_address_space_that_cannot_be_had_is_an_out_of_memory_error() -> None:
    with pytest.raises(OutOfMemoryError, match="MiB of address space"):
        KVPool(2**40, 2**14)


def test_appending_nothing_asks_for_no_room_of_its_own() -> None:
    pool = KVPool(64, 4)
    table = BlockTable(pool)
    write(pool, table, [7])
    fork = table.fork()
    fork.append([])
    assert (fork.ids, fork.blocks) == (table.ids, table.blocks)
