"""Running states in `.giw-kv` files: what was saved comes back right, whatever happened to the file since."""

from __future__ import annotations

import hashlib
import random
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from kv_conversations import ODD, SMALL, Conversation, dead_bytes, identity, is_whole, kv_of

from engine import kv_layout
from engine.kv_cache import BLOCK_SIZE, BlockTable, StatePool
from engine.kv_file import MAX_STATES, KVFile
from engine.kv_folder import KVFileError
from engine.kv_layout import KVLayout, pack_header, read_header

LAYOUT = KVLayout(layers=SMALL.layers, state_bytes=48)


def state_of(ids: Sequence[int]) -> np.ndarray:
    """A running state [state_bytes] u8: a function of all ids."""
    digest = hashlib.shake_128(repr(list(ids)).encode()).digest(LAYOUT.state_bytes)
    return np.frombuffer(digest, np.uint8)


class Stateful(Conversation):
    """A conversation of a model with a running state, whose steps a table's segments say."""

    def __init__(self, path: Path, num_slots: int = 12) -> None:
        super().__init__(path, LAYOUT)
        self.pool.states = StatePool(LAYOUT.state_bytes, num_slots, MAX_STATES)
        self.table = BlockTable(self.pool)

    def extend(self, ids: Sequence[int]) -> None:
        """What a forward step does, with K/V and states."""
        said, start = [*self.table.ids, *ids], len(self.table)
        self.table.reserve(len(ids))
        assert self.pool.states is not None
        for segment in self.table.segments():
            self.pool.states.memory[segment.slot] = state_of(said[: start + segment.end])
        for position, values in enumerate(kv_of(said, LAYOUT)[start:], start):
            block = self.pool.memory[self.table.blocks[position // BLOCK_SIZE]]
            block[self._offsets[position % BLOCK_SIZE]] = values
        self.table.append(ids)

    def turn(self, count: int) -> None:
        """Ids that no other position has; a message ends behind them."""
        start = len(self.table)
        self.extend(range(start, start + count))
        self.table.rest()

    @property
    def lengths(self) -> list[int]:
        assert self.table.state is not None
        return [c.length for c in self.table.state.checkpoints]

    def has_right_states(self) -> bool:
        assert self.table.state is not None
        assert self.pool.states is not None
        memory = self.pool.states.memory
        return all(
            np.array_equal(memory[c.slot], state_of(self.table.ids[: c.length])) for c in self.table.state.checkpoints
        )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.giw-kv"


def restored(path: Path, length: int | None = None) -> Stateful:
    """A conversation that a new process gets out of a file."""
    fresh = Stateful(path)
    with KVFile.open(path, fresh.identity) as file:
        file.restore(fresh.table, fresh.pool, len(file.ids) if length is None else length)
    assert fresh.is_right()
    assert fresh.has_right_states()
    return fresh


def test_a_restart_comes_back_to_the_last_state_and_an_undo_to_an_earlier_one(path: Path) -> None:
    told = Stateful(path)
    with KVFile.open(path, told.identity) as file:
        for count in (30, 50, 70):
            told.turn(count)
            file.save(told.table, told.pool)
    again = restored(path)
    assert (len(again.table), again.lengths) == (150, [150])
    for length, reached in ((149, 80), (80, 80), (79, 30), (29, 0)):
        fresh = restored(path, length)
        assert len(fresh.table) == reached
        assert fresh.lengths == [reached][: reached > 0]
    # Undone after the restart, in one file: the earlier state is still there.
    with KVFile.open(path, again.identity) as file:
        again.table.truncate(100)
        assert len(again.table) == 0
        assert file.reach(100) == 80
        assert file.restore(again.table, again.pool, 100) == 80
        again.turn(5)
        file.save(again.table, again.pool)
    assert restored(path).lengths == [85]
    assert restored(path, 84).lengths == [80]


def test_a_state_is_written_once(path: Path) -> None:
    told = Stateful(path)
    with KVFile.open(path, told.identity) as file:
        told.turn(10)
        file.save(told.table, told.pool)
        before = file.num_bytes
        assert file.save(told.table, told.pool).num_bytes == 0
        told.turn(10)
        saved = file.save(told.table, told.pool)
        assert saved.num_bytes == file.num_bytes - before == 2 * 20 + 10 * (4 + LAYOUT.position_bytes) + 48


def test_a_damaged_state_costs_itself_alone(path: Path) -> None:
    told = Stateful(path)
    with KVFile.open(path, told.identity) as file:
        for count in (30, 50):
            told.turn(count)
            file.save(told.table, told.pool)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # in the state at the end
    path.write_bytes(data)
    fresh = Stateful(path)
    with KVFile.open(path, fresh.identity) as file:
        assert file.reach(80) == 80
        assert file.restore(fresh.table, fresh.pool, 80) == 30
        assert file.problem == "the running state at position 80 is damaged"
        assert file.reach(80) == 30
        fresh.turn(7)
        file.save(fresh.table, fresh.pool)
    assert fresh.has_right_states()
    assert restored(path).lengths == [37]


def test_a_file_cut_or_changed_anywhere_gives_right_positions_and_states(path: Path) -> None:
    told = Stateful(path)
    with KVFile.open(path, told.identity) as file:
        for count in (30, 50, 3, 90):
            told.turn(count)
            file.save(told.table, told.pool)
        told.table.truncate(83)
        told.turn(20)
        file.save(told.table, told.pool)
    whole, rng = path.read_bytes(), random.Random(1)
    seen = set()
    for _ in range(120):
        data = bytearray(whole[: rng.randrange(len(whole))] if rng.random() < 0.5 else whole)
        if data and rng.random() < 0.7:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        found = restored(path)
        seen.add(len(found.table))
        assert found.table.ids == told.table.ids[: len(found.table)] or len(data) < len(whole)
    assert seen >= {0, 30, 80, 83, 103}


def test_a_file_that_is_written_anew_keeps_states_that_are_no_longer_in_memory(path: Path) -> None:
    told = Stateful(path)
    with KVFile.open(path, told.identity) as file:
        for count in (30, 50, 40):
            told.turn(count)
            file.save(told.table, told.pool)
    again = restored(path)
    with KVFile.open(path, again.identity) as file:
        for _ in range(60):
            again.turn(1)
            if is_whole(file, file.save(again.table, again.pool)):
                break
        else:
            pytest.fail("it was never written anew")
        kept = len(again.table)
        assert dead_bytes(file) == 0
    assert restored(path).lengths == [kept]
    earlier = restored(path, kept - 1)
    assert 0 < len(earlier.table) < kept


def test_a_disk_without_room_for_a_state_is_said_before_anything_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Stateful(path)
    told.turn(10)
    with KVFile.open(path, told.identity) as file:
        file.save(told.table, told.pool)
        told.turn(1)
        size = path.stat().st_size
        free = 16 * 2**20 + LAYOUT.position_bytes + LAYOUT.state_bytes - 1
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=10**12, free=free))
        with pytest.raises(KVFileError, match="10 of 11 tokens are kept"):
            file.save(told.table, told.pool)
        assert path.stat().st_size == size


def test_a_file_has_the_first_version_that_can_say_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    for layout, version in ((SMALL, 1), (LAYOUT, 2), (ODD, 3), (replace(ODD, state_bytes=48), 3)):
        header = pack_header(identity(layout), bytes(16))
        assert int.from_bytes(header[12:16], "little") == version
        assert read_header(header)[1] == identity(layout)
    other = identity(KVLayout(layers=SMALL.layers, state_bytes=64))
    assert other.mismatch(identity(LAYOUT)) == "its blocks are laid out differently"
    assert (
        identity(replace(ODD, layers=ODD.layers[::-1])).mismatch(identity(ODD)) == "its blocks are laid out differently"
    )
    monkeypatch.setattr(kv_layout, "VERSION", 1)
    with pytest.raises(kv_layout.HeaderError, match="its format is 2, and this program knows 1"):
        read_header(pack_header(identity(LAYOUT), bytes(16)))


@pytest.mark.parametrize("numbers", [b"", b"\0\0\1", b"\0\0\2\0", b"\0\0\1\0\0", bytes(4), b"\0\0\xff\0"])
def test_a_header_that_names_other_layers_than_it_has_is_damaged(numbers: bytes) -> None:
    header = pack_header(identity(ODD), bytes(16))
    assert header[-16:-12] == b"\0\0\1\0"
    size = struct.pack("<I", len(header) - 4 + len(numbers))
    wrong = header[:16] + size + header[20:-16] + numbers + header[-12:-4]
    with pytest.raises(kv_layout.HeaderError, match="its header is damaged"):
        read_header(wrong + struct.pack("<I", zlib.crc32(wrong)))


def test_a_header_of_more_layers_than_a_model_has_is_damaged_and_takes_no_memory() -> None:
    header = pack_header(identity(SMALL), bytes(16))
    wrong = header[:116] + b"\xff" * 4 + header[120:-4]
    with pytest.raises(kv_layout.HeaderError, match="its header is damaged"):
        read_header(wrong + struct.pack("<I", zlib.crc32(wrong)))
