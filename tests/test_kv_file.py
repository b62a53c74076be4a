"""Conversations on disk: nothing that was saved is lost, and nothing that is wrong is ever used.

K/V are functions of the ids (`kv_conversations`), so whatever comes out of a file can be checked by itself.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_conversations import ODD, SMALL, Conversation, dead_bytes, identity, is_whole, restored
from tiny_models import write_tiny_model

from engine import kv_records
from engine.api import KVType
from engine.config import ModelConfig
from engine.gguf_file import open_gguf
from engine.kv_cache import BLOCK_SIZE, BlockTable, CacheFullError, KVPool
from engine.kv_file import RESERVE_BYTES, Identity, KVFile, KVFileError, KVFileLockedError, KVLayout
from engine.kv_layout import NUMERICS_VERSION
from engine.model import Batch, LoadOptions, Model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "work.giw-kv"


# ---------------------------------------------------------------------- any life of a conversation
class FilesAgainstLists(RuleBasedStateMachine):
    """Turns, undo, branches, forks and restarts in any order; what was saved comes back, with the K/V of its ids."""

    @initialize(layout=st.sampled_from([SMALL, ODD]))
    def start(self, layout: KVLayout) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.layout = layout
        self.path = Path(self.folder.name) / "work.giw-kv"
        self.next_id = 0
        self.saved: list[int] = []
        self.problem: str | None = "file missing"
        self.new_process()

    def new_process(self) -> None:
        self.conversation = Conversation(self.path, self.layout)
        self.file = KVFile.open(self.path, self.conversation.identity)
        assert self.file.ids == self.saved
        assert self.file.problem == self.problem

    @property
    def table(self) -> BlockTable:
        return self.conversation.table

    @rule(count=st.integers(1, 150))
    def turn(self, count: int) -> None:
        count = min(count, 600 - len(self.table))
        self.conversation.add(range(self.next_id, self.next_id + count))
        self.next_id += count

    @rule(share=st.floats(0, 1))
    def undo(self, share: float) -> None:
        self.table.truncate(int(share * len(self.table)))

    @rule(count=st.integers(1, 100))
    def say_again_what_was_undone(self, count: int) -> None:
        if self.table.ids == self.saved[: len(self.table)]:
            self.conversation.add(self.saved[len(self.table) :][:count])

    @rule(sync=st.booleans())
    def save(self, sync: bool) -> None:
        num_new = len(self.table) - common(self.saved, self.table.ids)
        saved = self.file.save(self.table, self.conversation.pool, sync=sync)
        self.saved = list(self.table.ids)
        self.problem = None if self.path.exists() else "file missing"
        assert saved.num_positions == len(self.saved)
        if not is_whole(self.file, saved):
            per_position = self.layout.position_bytes + 4
            assert saved.num_bytes <= num_new * per_position + (num_new // BLOCK_SIZE + 2) * 20 + 20
        assert self.file.num_bytes == (self.path.stat().st_size if self.path.exists() else 0)
        assert dead_bytes(self.file) * 2 <= self.file.num_bytes

    @rule(share=st.floats(0, 1), warm=st.floats(0, 1))
    def restart(self, share: float, warm: float) -> None:
        """A new process restores some of it, on top of a start it has from elsewhere."""
        self.file.close()
        self.new_process()
        length = int(share * len(self.saved))
        start = int(warm * length)
        self.conversation.add(self.saved[:start])
        other = self.table.fork()
        assert self.file.restore(self.table, self.conversation.pool, length) == length - start
        assert self.table.ids == self.saved[:length]
        assert self.table.blocks[: start // BLOCK_SIZE] == other.blocks[: start // BLOCK_SIZE]
        assert self.conversation.is_right()
        other.release()

    @rule()
    def everything_from_disk(self) -> None:
        self.file.close()
        ids, problem = restored(self.path, self.layout)
        assert ids == self.saved
        assert problem == self.problem
        self.file = KVFile.open(self.path, self.conversation.identity)

    @precondition(lambda self: self.path.exists() and self.problem is None)
    @rule(count=st.integers(1, BLOCK_SIZE), share=st.floats(0.01, 0.99))
    def crash_leaves_part_of_a_record(self, count: int, share: float) -> None:
        start = len(self.saved)
        count = min(count, BLOCK_SIZE - start % BLOCK_SIZE)
        data = self.path.read_bytes()
        check = records(data, self.layout)[-1].check if len(data) > header_bytes(data) else header_check(data)
        kv, ids = bytes(count * self.layout.position_bytes), np.arange(count, dtype="<u4").tobytes()
        head = struct.pack("<4I", 0x2B2B2B2B, start, count, zlib.crc32(kv))
        record = head + struct.pack("<I", zlib.crc32(ids, zlib.crc32(head, check))) + ids + kv
        self.leave(record[: max(1, int(share * len(record)))], "unfinished", ", as after a kill")

    @precondition(lambda self: self.path.exists() and self.problem is None)
    @rule(junk=st.binary(min_size=1, max_size=400))
    def something_else_writes_behind_it(self, junk: bytes) -> None:
        self.leave(b"?" + junk, "damaged")

    def leave(self, behind: bytes, how: str, why: str = "") -> None:
        with self.path.open("ab") as file:
            file.write(behind)
        count = len(self.saved)
        used = f"the {count} before it are used" if count else "nothing of it is used"
        self.problem = f"{how} from position {count} on{why}; {used}"

    @invariant()
    def nobody_else_gets_the_file(self) -> None:
        if self.path.exists():
            with pytest.raises(KVFileLockedError):
                KVFile.open(self.path, self.conversation.identity)

    def teardown(self) -> None:
        if hasattr(self, "file"):
            self.file.close()
            self.folder.cleanup()


TestFilesAgainstLists = FilesAgainstLists.TestCase
TestFilesAgainstLists.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


def common(known: Sequence[int], wanted: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(known, wanted)) if a != b), min(len(known), len(wanted)))


# ---------------------------------------------------------------------- damage
class Record(NamedTuple):
    is_cut: bool
    start: int
    ids: list[int]
    offset: int
    data: int
    """Where the K/V begin."""
    end: int
    check: int


def header_check(data: bytes) -> int:
    return zlib.crc32(data[: header_bytes(data) - 4])


def header_bytes(data: bytes) -> int:
    return int.from_bytes(data[16:20], "little")


def records(data: bytes, layout: KVLayout = SMALL) -> list[Record]:
    """Those of a file that is whole, read as docs/giw-kv.md has it."""
    found = []
    offset = header_bytes(data)
    check = header_check(data)
    while offset < len(data):
        kind, start, count, data_checksum, expected = struct.unpack_from("<5I", data, offset)
        first = offset + 20 + 4 * count
        end = first + count * layout.position_bytes
        check = zlib.crc32(data[offset + 20 : first], zlib.crc32(data[offset : offset + 16], check))
        assert check == expected
        assert kind in (0x2B2B2B2B, 0x2D2D2D2D)
        assert data_checksum == zlib.crc32(data[first:end])
        ids = list(struct.unpack_from(f"<{count}I", data, offset + 20))
        found.append(Record(kind == 0x2D2D2D2D, start, ids, offset, first, end, check))
        offset = end
    return found


def replay(some: Sequence[Record]) -> list[tuple[int, Record]]:
    """Of each position that is left: its id and the record it lies in."""
    held: list[tuple[int, Record]] = []
    for record in some:
        if record.is_cut:
            del held[record.start :]
        else:
            assert len(held) == record.start
            held += [(token, record) for token in record.ids]
    return held


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file with turns, an undo, and branches that leave one record half and another wholly dead."""
    path = tmp_path_factory.mktemp("whole") / "work.giw-kv"
    conversation = Conversation(path)
    with KVFile.open(path, conversation.identity) as file:
        for length, count in ((0, 40), (40, 24), (64, 9), (73, 5), (70, 0), (70, 58), (128, 2)):
            conversation.table.truncate(length)
            conversation.add_some(count)
            file.save(conversation.table, conversation.pool)
        assert 0 < dead_bytes(file) < file.num_bytes / 2
    return path.read_bytes()


def save_again(path: Path, ids: Sequence[int]) -> None:
    """The conversation goes on from its words, and its file is whole again."""
    conversation = Conversation(path)
    conversation.add(ids)
    conversation.save().close()
    assert restored(path) == (list(ids), None)


def test_a_file_cut_at_any_byte_gives_what_its_whole_records_say(path: Path, whole: bytes) -> None:
    all_records = records(whole)
    ends = {header_bytes(whole), *(record.end for record in all_records)}
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        ids, problem = restored(path)
        assert ids == [token for token, _ in replay([r for r in all_records if r.end <= size])], size
        assert (problem is None) == (size in ends), size
        if size > min(ends) and problem is not None:
            assert problem.startswith(f"unfinished from position {len(ids)} on, as after a kill; "), size
        if size % 11 == 0:
            save_again(path, range(130))


def test_any_byte_flipped_is_noticed_and_never_used(path: Path, whole: bytes) -> None:
    all_records = records(whole)
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        hit = next((r for r in all_records if r.offset <= place < r.end), None)
        held: list[tuple[int, Record]] = []
        if hit is not None:
            held = replay([r for r in all_records if place >= hit.data or r.end <= place])
        good = next((i for i, (_, record) in enumerate(held) if record is hit), len(held))
        ids, problem = restored(path)
        assert ids == [token for token, _ in held[:good]], place
        of_no_use = hit is not None and place >= hit.data and good == len(held)  # dead K/V are never read
        assert (problem is None) == of_no_use, place
        if place % 11 == 0:
            save_again(path, range(130))


@pytest.mark.parametrize("layout", [SMALL, ODD])
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_make_a_file_that_lies(path: Path, layout: KVLayout, whole: bytes, data: st.DataObject) -> None:
    """Pieces of a good file in any order, twice, with junk between: what is used is right (`restored` looks)."""
    pieces = st.one_of(
        st.binary(max_size=40),
        st.integers(0, 400).map(bytes),
        st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole))).map(lambda p: whole[min(p) : max(p)]),
        st.sampled_from([whole[: header_bytes(whole)], *(whole[r.offset : r.end] for r in records(whole))]),
    )
    path.write_bytes(b"".join(data.draw(st.lists(pieces, max_size=8))))
    ids, _ = restored(path, layout)
    assert len(ids) <= 130


def test_records_whose_checksums_are_right_and_numbers_are_not_are_refused(path: Path, whole: bytes) -> None:
    header = whole[: header_bytes(whole)]
    add, cut, size, check = 0x2B2B2B2B, 0x2D2D2D2D, SMALL.position_bytes, zlib.crc32(header[:-4])

    def taken_in(kind: int, start: int, count: int, num_ids: int, num_bytes: int, check: int) -> int:
        ids, data = bytes(4 * num_ids), bytes(num_bytes)
        record = struct.pack("<4I", kind, start, count, zlib.crc32(data))
        record += struct.pack("<I", zlib.crc32(ids, zlib.crc32(record, check)))
        path.write_bytes(header + record + ids + data)
        with KVFile.open(path, identity()) as file:
            how = "damaged" if num_bytes != 3 * size - 1 else "unfinished"
            assert file.ids or str(file.problem).startswith(f"{how} from position 0 on")
            return len(file.ids)

    assert taken_in(add, 0, 3, 3, 3 * size, check) == 3
    assert taken_in(add, 1, 3, 3, 3 * size, check) == 0
    assert taken_in(add, 0, 0, 0, 0, check) == 0
    assert taken_in(add, 0, 65, 65, 65 * size, check) == 0
    assert taken_in(add, 0, 2**32 - 1, 64, 64 * size, check) == 0
    assert taken_in(add, 2**32 - 1, 2, 2, 2 * size, check) == 0
    assert taken_in(add, 0, 3, 3, 3 * size - 1, check) == 0
    assert taken_in(add, 0, 3, 3, 3 * size, check ^ 1) == 0
    assert taken_in(cut, 1, 0, 0, 0, check) == 0
    assert taken_in(cut, 0, 1, 1, size, check) == 0
    assert taken_in(7, 0, 3, 3, 3 * size, check) == 0


def test_a_record_of_another_file_with_the_same_words_does_not_fit(tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        conversation = Conversation(tmp_path / f"{name}.giw-kv")
        conversation.add_some(30)
        conversation.save().close()
        files.append(conversation.path.read_bytes())
    cut = header_bytes(files[0])
    (tmp_path / "a.giw-kv").write_bytes(files[0][:cut] + files[1][cut:])
    assert restored(tmp_path / "a.giw-kv") == ([], "damaged from position 0 on; nothing of it is used")


def test_junk_behind_a_good_file_costs_nothing_and_is_gone_after_the_next_save(path: Path, whole: bytes) -> None:
    path.write_bytes(whole + np.random.default_rng(0).bytes(1 << 20))
    ids, problem = restored(path)
    assert len(ids) == 130
    assert problem == "damaged from position 130 on; the 130 before it are used"
    save_again(path, ids)
    assert path.stat().st_size == len(whole)


def test_a_damaged_block_leaves_nothing_in_the_pool_and_is_cut_off_by_the_next_save(path: Path) -> None:
    conversation = Conversation(path)
    conversation.add_some(200)
    conversation.save().close()
    data = bytearray(path.read_bytes())
    second = records(bytes(data))[1]
    data[second.data + 5] ^= 1
    path.write_bytes(data)
    fresh = Conversation(path)
    with KVFile.open(path, fresh.identity) as file:
        assert (len(file.ids), file.problem) == (200, None)
        assert file.restore(fresh.table, fresh.pool, 150) == 64
        assert (len(file.ids), file.problem) == (64, "damaged from position 64 on; the 64 before it are used")
        damaged = np.frombuffer(data[second.data : second.end], np.uint8)
        assert not (fresh.pool.memory == damaged).all(axis=1).any()
        fresh.add(range(5000, 5200))
        assert not is_whole(file, file.save(fresh.table, fresh.pool))
        assert dead_bytes(file) > 0
    assert restored(path) == (fresh.table.ids, None)


def test_a_save_looks_at_what_nobody_restored_before_it_counts_it_as_saved(path: Path) -> None:
    conversation = Conversation(path)
    conversation.add_some(200)
    conversation.save().close()
    data = bytearray(path.read_bytes())
    data[records(bytes(data))[1].data] ^= 1
    path.write_bytes(data)
    with KVFile.open(path, conversation.identity) as file:
        assert file.save(conversation.table, conversation.pool).num_bytes > 100 * SMALL.position_bytes
        assert file.problem == "damaged from position 64 on; the 64 before it are used"
    assert restored(path) == (list(range(200)), None)


# ---------------------------------------------------------------------- whose file it is
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": b"x" * 32}, "made with another model"),
        ({"architecture": "qwen2"}, "made with architecture qwen2, and this is llama"),
        ({"rope": b"x" * 32}, "made with other RoPE settings"),
        ({"kv_type": "q8_0"}, "made with another KV type, q8_0, and f16 is in use"),
        ({"layout": KVLayout(layers=(((2, 1), (1, 4)),))}, "its blocks are laid out differently"),
        ({"layout": ODD}, "its blocks are laid out differently"),
        ({"numerics_version": 7}, f"made with version 7 of the numerics, and this is {NUMERICS_VERSION}"),
    ],
)
def test_kv_of_something_else_is_refused_with_the_reason_and_kept_until_the_next_save(
    path: Path, change: dict[str, Any], reason: str
) -> None:
    other = Conversation(path, change.get("layout", SMALL))
    other.identity = identity(**{"layout": SMALL, **change})
    other.add_some(100)
    other.save().close()
    before = path.read_bytes()
    assert restored(path) == ([], reason)
    assert path.read_bytes() == before
    save_again(path, range(50))


def test_a_newer_version_is_refused_whatever_it_looks_like_and_kept_until_the_next_save(path: Path) -> None:
    newer = b"GIW kv cache" + struct.pack("<I", 4) + b"anything may be different here"
    path.write_bytes(newer)
    assert restored(path) == ([], "written by a newer version: its format is 4, and this program knows 3")
    assert path.read_bytes() == newer
    save_again(path, range(50))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it is empty"),
        (b"GIW k", "its header is cut short"),
        (b"GIW kv cache\1\0\0\0", "its header is cut short"),
        (b"%PDF-1.7 and so on, for longer than a header is", "it is not a .giw-kv file"),
        (bytes(5000), "it is not a .giw-kv file"),
        (b"GIW kv cache" + bytes(500), "its header is damaged"),
        (b"GIW kv cache\1\0\0\0\xff\xff\xff\xff" + bytes(500), "its header is damaged"),
        (b"GIW kv cache\1\0\0\0\x00\x04\0\0" + bytes(500), "its header is cut short"),
        (b"GIW kv cache\1\0\0\0\x00\x01\0\0" + bytes(500), "its header is damaged"),
    ],
)
def test_what_has_no_header_is_refused_and_replaced_by_the_next_save(path: Path, data: bytes, reason: str) -> None:
    path.write_bytes(data)
    assert restored(path) == ([], reason)
    save_again(path, range(50))


def test_the_identity_names_the_rotation_and_the_place_of_every_number(tmp_path: Path) -> None:
    def of(name: str, **settings: Any) -> Identity:
        with open_gguf(write_tiny_model(tmp_path / f"{name}.gguf", **settings)) as gguf:
            return Identity.of(ModelConfig.from_gguf(gguf), gguf.content_hash())

    llama = of("llama")
    assert of("the same") == llama
    assert llama.layout == KVLayout(layers=(((128, 2), (2, 128)),) * 2)
    base = replace(of("base", rope_base=50000.0), model=llama.model)
    factors = replace(of("factors", rope_factors=np.geomspace(1, 8, 32).tolist()), model=llama.model)
    assert base.mismatch(llama) == factors.mismatch(llama) == "made with other RoPE settings"
    assert of("other", seed=1).mismatch(llama) == "made with another model"


# ---------------------------------------------------------------------- what a save writes
def test_a_turn_writes_only_what_it_added(path: Path) -> None:
    layout = KVLayout(layers=(((256, 2), (2, 256)),) * 28)
    conversation = Conversation(path, layout, num_blocks=20)
    conversation.table.reserve(64 * 16)
    with KVFile.open(path, conversation.identity) as file:
        for turn in range(12):
            conversation.table.append(range(1000 * turn, 1000 * turn + 80))
            saved = file.save(conversation.table, conversation.pool)
            assert saved.num_bytes - 80 * layout.position_bytes < 700
            assert is_whole(file, saved) == (turn == 0)
        assert file.save(conversation.table, conversation.pool, sync=True).num_bytes == 0
        before = path.read_bytes()
        conversation.table.truncate(900)
        assert file.save(conversation.table, conversation.pool).num_bytes == 20
        assert path.read_bytes()[:-20] == before


def test_a_file_is_written_anew_when_half_of_it_is_dead_and_only_then(path: Path) -> None:
    conversation = Conversation(path)
    conversation.add_some(256)
    sizes, rewrites = [], []
    with KVFile.open(path, conversation.identity) as file:
        for retry in range(12):
            conversation.table.truncate(200)
            conversation.add(range(10_000 * (retry + 1), 10_000 * (retry + 1) + 56))
            rewrites.append(is_whole(file, file.save(conversation.table, conversation.pool)))
            sizes.append(path.stat().st_size)
    assert rewrites == [True] + 4 * [False] + [True] + 4 * [False] + [True] + [False]
    assert max(sizes) < 2 * sizes[0]
    assert sizes[5] == sizes[0]
    assert restored(path) == (conversation.table.ids, None)


def test_many_small_turns_do_not_make_a_file_slow_to_read(path: Path) -> None:
    conversation = Conversation(path)
    with KVFile.open(path, conversation.identity) as file:
        for _ in range(300):
            conversation.add_some(1)
            file.save(conversation.table, conversation.pool)
    assert len(records(path.read_bytes())) <= 8 * 6
    assert restored(path) == (list(range(300)), None)


def test_a_system_that_writes_a_few_bytes_at_a_time_writes_the_same_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev

    def a_few(descriptor: int, views: Sequence[Any], offset: int) -> int:
        return real(descriptor, [b"".join(views)[:7]], offset)

    conversation = Conversation(path)
    conversation.add_some(70)
    monkeypatch.setattr(os, "pwritev", a_few)
    with conversation.save() as file:
        conversation.add_some(70)
        assert not is_whole(file, file.save(conversation.table, conversation.pool))
    assert restored(path) == (list(range(140)), None)


def test_the_order_in_which_records_are_read_does_not_matter(
    path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Backwards:
        def __init__(self, num_threads: int) -> None:
            pass

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def map(self, call: Callable[[Any], bool], pieces: Sequence[Any]) -> list[bool]:
            return [call(piece) for piece in reversed(pieces)][::-1]

    conversation = Conversation(path)
    conversation.add_some(64)
    with conversation.save() as file:  # two records of one block, the first of which was longer once
        conversation.table.truncate(40)
        conversation.add(range(500, 524))
        assert not is_whole(file, file.save(conversation.table, conversation.pool))
    monkeypatch.setattr(kv_records, "ThreadPoolExecutor", Backwards)
    assert restored(path) == (conversation.table.ids, None)
    path.write_bytes(whole)
    assert len(restored(path)[0]) == 130


def test_an_empty_conversation_makes_no_file(path: Path) -> None:
    conversation = Conversation(path)
    with KVFile.open(path, conversation.identity) as file:
        assert file.save(conversation.table, conversation.pool).num_bytes == 0
        assert not path.exists()
        assert (file.ids, file.num_bytes, dead_bytes(file)) == ([], 0, 0)


def test_restoring_into_a_full_pool_changes_nothing(path: Path) -> None:
    conversation = Conversation(path)
    conversation.add_some(200)
    conversation.save().close()
    small = Conversation(path, num_blocks=3)
    with KVFile.open(path, small.identity) as file:
        with pytest.raises(CacheFullError):
            file.restore(small.table, small.pool, 200)
        assert (len(small.table), small.pool.num_free, len(file.ids)) == (0, 3, 200)
        assert file.restore(small.table, small.pool, 192) == 192
        assert small.is_right()


def test_a_start_that_another_conversation_holds_is_shared_and_the_rest_comes_from_the_file(path: Path) -> None:
    conversation = Conversation(path)
    conversation.add_some(250)
    conversation.save().close()
    warm = Conversation(path)
    warm.add_some(100)
    table = warm.table.fork()
    with KVFile.open(path, warm.identity) as file:
        assert file.restore(table, warm.pool, 250) == 150
    assert table.blocks[0] == warm.table.blocks[0]
    assert table.blocks[1] != warm.table.blocks[1]  # partly filled there: its own here
    assert warm.is_right()
    warm.table = table
    assert warm.is_right()


# ---------------------------------------------------------------------- with a real model
@pytest.mark.parametrize(
    ("architecture", "kv_type"),
    [("qwen2", "f16"), ("gemma3", "f16"), ("gemma3", "q8_0"), ("qwen2", "f32"), ("gemma4", "f16"), ("gemma4", "q8_0")],
)
def test_a_restored_conversation_goes_on_with_the_same_bits(
    tmp_path: Path, path: Path, architecture: Literal["qwen2", "gemma3", "gemma4"], kv_type: KVType
) -> None:
    ids = np.random.default_rng(1).integers(5, 200, 230).tolist()
    with open_gguf(write_tiny_model(tmp_path / "model.gguf", architecture, head_dim=80, num_layers=3)) as gguf:
        model = Model.load(gguf, LoadOptions(threads=1, max_rows=64, max_positions=256, kv_type=kv_type))
        try:
            mine = Identity.of(model.config, gguf.content_hash(), kv_type)
            assert mine.layout.block_bytes == model.kv_block_bytes
            pool = KVPool(model.kv_block_bytes, 8)
            table = BlockTable(pool)
            with KVFile.open(path, mine) as file:
                run(model, pool, table, ids[:150])
                for turn in (ids[150:161], ids[161:200]):
                    file.save(table, pool)
                    run(model, pool, table, turn)
                table.truncate(180)
                file.save(table, pool)
            never_stopped = run(model, pool, table, ids[180:])
            other = KVPool(model.kv_block_bytes, 8)
            other.memory[:] = 1  # finite, and not what is looked for
            resumed = BlockTable(other)
            with KVFile.open(path, mine) as file:
                assert file.restore(resumed, other, 180) == 180
            assert np.array_equal(run(model, other, resumed, ids[180:]), never_stopped)
        finally:
            model.close()


def run(model: Model, pool: KVPool, table: BlockTable, ids: Sequence[int]) -> np.ndarray:
    """Evaluate ids on top of a table; logits [V] f32 of the last."""
    model.bind_pool(pool)
    logits = np.empty(0)
    for start in range(0, len(ids), 64):
        part = list(ids[start : start + 64])
        table.reserve(len(part))
        positions = np.arange(len(table), len(table) + len(part), dtype=np.int32)
        rows, want = np.zeros(len(part), np.int32), np.array([len(part) - 1], np.int32)
        batch = Batch(np.array(part, np.int32), positions, np.array([table.blocks], np.int32), rows, want)
        logits = model.forward(batch)[0].copy()
        table.append(part)
    return logits


def test_a_cache_does_not_take_the_last_of_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(path)
    conversation.add_some(100)
    with conversation.save() as file:
        before = path.read_bytes()
        conversation.add_some(50)
        total, needed = 10**9, 50 * conversation.pool.block_bytes // 64
        room = needed + RESERVE_BYTES
        usage = type(shutil.disk_usage(path.parent))
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(total, total - room + 1, room - 1))
        with pytest.raises(
            KVFileError, match="not saved: the disk is nearly full, and the rest is for words; 100 of 150"
        ):
            file.save(conversation.table, conversation.pool)
        assert path.read_bytes() == before
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(total, total - room, room))
        file.save(conversation.table, conversation.pool)
    assert restored(path) == (list(range(150)), None)


def test_contexts_with_other_rope_factors_have_other_identities(tmp_path: Path) -> None:
    """Phi 3 turns positions otherwise in a context beyond the one it was trained with (512 here)."""
    path = write_tiny_model(tmp_path / "phi.gguf", "phi3", rope_factors=np.geomspace(1, 8, 32).tolist())
    with open_gguf(path) as gguf:
        config, content = ModelConfig.from_gguf(gguf), gguf.content_hash()
    short, other_short, long = (Identity.of(config.for_context(n), content) for n in (256, 512, 513))
    assert short == other_short
    assert short.key != long.key
