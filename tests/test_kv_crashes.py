"""Full disks, deaths and two processes at once: a conversation's file keeps what it said was saved.

K/V are functions of the ids (`kv_conversations`), so whatever comes out of a file can be checked by itself.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from kv_conversations import Conversation, identity, is_whole, restored

from engine.kv_file import KVFile, KVFileError, KVFileLockedError, bring_back
from engine.kv_folder import aside_of

TESTS = Path(__file__).parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "work.giw-kv"


def output_of(script: str, *arguments: str | Path) -> list[int]:
    """Numbers that a program of the tests prints when all it looked at was well."""
    done = subprocess.run([sys.executable, TESTS / script, *arguments], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return [int(number) for number in done.stdout.split()]


# ---------------------------------------------------------------------- full disks and other trouble
def test_a_disk_that_fills_up_at_any_byte_costs_nothing_that_was_saved(tmp_path: Path) -> None:
    failed, total = output_of("kv_full_disk.py", tmp_path)
    assert 0 < failed < total


def test_a_failed_sync_is_reported_and_the_next_save_writes_everything_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = Conversation(path)
    conversation.add_some(100)
    with conversation.save() as file:
        conversation.add_some(10)

        def broken(descriptor: int) -> None:
            raise OSError(errno.EIO, "the disk is broken")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync" if hasattr(os, "fdatasync") else "fsync", broken)
            with pytest.raises(KVFileError, match=r"^work\.giw-kv: not saved: the disk is broken; 0 of 110 tokens"):
                file.save(conversation.table, conversation.pool, sync=True)
        assert is_whole(file, file.save(conversation.table, conversation.pool, sync=True))
    assert restored(path) == (conversation.table.ids, None)


def test_a_full_disk_leaves_the_file_of_another_model_where_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, mine = Conversation(path), Conversation(path)
    other.add_some(100)
    other.save().close()
    before = path.read_bytes()
    mine.identity = identity(model=b"x" * 32)
    mine.add_some(70)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with KVFile.open(path, mine.identity) as file:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(KVFileError, match="No space left on device"):
                file.save(mine.table, mine.pool)
        assert [p.name for p in path.parent.iterdir()] == [path.name]
        assert path.read_bytes() == before
        file.save(mine.table, mine.pool)
    assert aside_of(path, other.identity.key).read_bytes() == before
    bring_back(path, other.identity)
    assert restored(path) == (other.table.ids, None)


@pytest.mark.parametrize("step", [0, 1])
def test_a_process_that_dies_between_two_renames_loses_neither_file(
    step: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, mine = Conversation(path), Conversation(path)
    other.add_some(100)
    other.save().close()
    mine.identity = identity(model=b"x" * 32)
    mine.add_some(70)
    with KVFile.open(path, mine.identity) as file:
        file.save(mine.table, mine.pool)
    renames = []

    def dying(source: Path, target: Path) -> None:
        if len(renames) == step:
            raise KeyboardInterrupt
        renames.append(source)
        source.rename(target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with pytest.raises(KeyboardInterrupt):
            bring_back(path, other.identity)
    for conversation in (other, mine, other):
        bring_back(path, conversation.identity)
        with KVFile.open(path, conversation.identity) as file:
            assert (file.ids, file.problem) == (conversation.table.ids, None)


def test_a_file_that_is_removed_while_it_is_open_is_written_again(path: Path) -> None:
    conversation = Conversation(path)
    conversation.add_some(100)
    with conversation.save() as file:
        path.unlink()
        conversation.add_some(10)
        assert is_whole(file, file.save(conversation.table, conversation.pool))
    assert restored(path) == (list(range(110)), None)


def test_a_file_that_is_cut_while_it_is_open_is_noticed_in_reading_and_writing(path: Path) -> None:
    conversation = Conversation(path)
    conversation.add_some(300)
    conversation.save().close()
    fresh = Conversation(path)
    with KVFile.open(path, fresh.identity) as file:
        os.truncate(path, path.stat().st_size - 1)
        assert file.restore(fresh.table, fresh.pool, 300) == 256
        assert fresh.is_right()
        fresh.add_some(10)
        assert is_whole(file, file.save(fresh.table, fresh.pool))
    assert restored(path) == (fresh.table.ids, None)


def test_a_folder_that_is_gone_is_one_clear_error(path: Path) -> None:
    conversation = Conversation(path.parent / "gone" / "work.giw-kv")
    conversation.add_some(3)
    with pytest.raises(KVFileError, match="gone is missing"):
        conversation.save()


# ---------------------------------------------------------------------- killed
def test_a_process_killed_at_any_call_that_writes_loses_nothing_it_had_saved(tmp_path: Path) -> None:
    (deaths,) = output_of("kv_crash.py", tmp_path, "calls")
    assert deaths > 40


def test_a_process_killed_at_any_moment_loses_nothing_it_had_saved(tmp_path: Path) -> None:
    (deaths,) = output_of("kv_crash.py", tmp_path, "times", "30")
    assert deaths > 20


# ---------------------------------------------------------------------- two at once
def test_the_second_process_is_told_and_a_killed_one_leaves_no_lock(path: Path) -> None:
    conversation = Conversation(path)
    conversation.add_some(100)
    conversation.save().close()
    code = """
import sys, time
from kv_conversations import KVFile, Path, identity
file = KVFile.open(Path(sys.argv[1]), identity())
print("open", flush=True)
time.sleep(60)
"""
    other = subprocess.Popen(
        [sys.executable, "-c", code, path],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(KVFileLockedError, match="locked: another goinfer-chat has this conversation open"):
            KVFile.open(path, conversation.identity)
    finally:
        other.kill()
        other.communicate()
    assert restored(path) == (list(range(100)), None)


def test_of_two_that_begin_a_file_at_once_the_first_keeps_it(path: Path) -> None:
    first, second = Conversation(path), Conversation(path)
    first.add_some(70)
    second.add(range(500, 530))
    with KVFile.open(path, first.identity) as one, KVFile.open(path, second.identity) as two:
        one.save(first.table, first.pool)
        with pytest.raises(KVFileLockedError):
            two.save(second.table, second.pool)
        first.add_some(5)
        assert not is_whole(one, one.save(first.table, first.pool))
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert restored(path) == (first.table.ids, None)


def test_a_file_that_another_replaced_is_not_taken_back(path: Path) -> None:
    first, second = Conversation(path), Conversation(path)
    first.add_some(70)
    second.add(range(500, 530))
    with first.save() as one:
        path.unlink()
        with second.save():
            first.add_some(5)
            with pytest.raises(KVFileLockedError):
                one.save(first.table, first.pool)
        one.save(first.table, first.pool)  # the other has let go of it
    assert restored(path) == (first.table.ids, None)


def test_a_file_stays_locked_while_it_is_replaced(path: Path) -> None:
    conversation = Conversation(path)
    conversation.add_some(200)
    with conversation.save() as file:
        conversation.table.truncate(20)
        assert is_whole(file, file.save(conversation.table, conversation.pool))
        with pytest.raises(KVFileLockedError):
            KVFile.open(path, conversation.identity)


def test_a_file_that_is_replaced_between_opening_and_locking_is_not_the_one_that_is_used(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = Conversation(path), Conversation(path.with_name("new.giw-kv"))
    old.add_some(70)
    new.add(range(500, 530))
    old.save().close()
    new.save().close()
    real, replaced = fcntl.flock, []

    def flock(descriptor: int, how: int) -> None:
        if not replaced:
            replaced.append(os.replace(new.path, path))
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with KVFile.open(path, old.identity) as file:
        assert file.ids == list(range(500, 530))


def test_a_new_file_is_on_the_disk_before_its_name_is_and_both_when_save_returns(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    sync, replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    def rename(source: Path, target: Path) -> None:
        done.append("name")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    conversation = Conversation(path)
    conversation.add_some(10)
    conversation.save().close()
    assert done == ["file", "name", "folder"]
