"""Files of conversations on a disk that is full or has a cap, files that are deleted, programs that are killed."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kv_chats import GREEDY, Chat, assert_matches, cold_ids, identity, make, started

from engine import kept_files
from engine.api import Finished, Message, Request, TextDelta
from engine.kv_file import KVFile
from engine.kv_folder import path_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    """As on a full disk: the system writes up to there and then refuses."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_a_full_disk_costs_a_notice_and_no_word(folder: Path) -> None:
    chat, kept = started(folder)
    with make(folder) as engine:
        size = path_of(folder, "work").stat().st_size
        with no_file_larger_than(size + 100):
            reply = chat.ask(engine, "go on " * 30)
        assert chat.said[1:] == [f"not saved: File too large; {kept} of {reply.stats.context_used} tokens are kept"]
        assert reply.ids == cold_ids(chat, 4)
        again = chat.ask(engine, "there is room again")
        assert chat.said == []
    with KVFile.open(path_of(folder, "work"), identity()) as file:
        assert len(file.ids) == again.stats.context_used


def test_what_found_no_room_is_saved_when_the_conversation_leaves_memory(folder: Path) -> None:
    chat, _ = started(folder)
    with make(folder, kv_sessions=1) as engine:
        with no_file_larger_than(path_of(folder, "work").stat().st_size + 100):
            reply = chat.ask(engine, "go on " * 30)
        Chat("other").ask(engine, "hello")
        assert chat.ask(engine, "back").stats.prefill_reused_tokens == reply.stats.context_used


def test_files_beyond_the_cap_go_least_recently_used_first_and_that_is_said(folder: Path) -> None:
    chats = [Chat(f"c{number}") for number in range(4)]
    with make(folder, kv_sessions=1, cap_bytes=20_000) as engine:
        for chat in chats[:3]:
            chat.ask(engine, "x" * 700)
            assert not any("removed" in line for line in chat.said) or chat is chats[2]
            time.sleep(0.02)  # the clock of files is coarse
        assert len(chats[2].said) == 1
        assert_matches(
            r"removed the cache of 1 conversation not used for longest \(0\.0 MB\), to stay within 0\.0 MB "
            "on disk; their words are kept, and read again when they go on",
            chats[2].said[0],
        )
        assert sorted(path.name for path in folder.glob("*.giw-kv")) == ["c1.giw-kv", "c2.giw-kv"]


def test_the_cap_takes_nothing_of_what_is_in_memory(folder: Path) -> None:
    chats = [Chat("a"), Chat("b")]
    with make(folder, cap_bytes=0) as engine:
        for chat in chats:
            chat.ask(engine, "hello")
            assert chat.said == []
        assert all(path_of(folder, chat.name).exists() for chat in chats)


def test_what_leaves_memory_unsaved_does_not_write_what_another_process_has(folder: Path) -> None:
    chat, _ = started(folder)
    path = path_of(folder, "work")
    with make(folder, kv_sessions=1) as engine:
        with no_file_larger_than(path.stat().st_size):
            chat.ask(engine, "go on")
        with KVFile.open(path, identity()):
            before = path.read_bytes()
            Chat("other").ask(engine, "hello")
            assert path.read_bytes() == before


def test_a_file_that_was_deleted_does_not_come_back_when_its_conversation_leaves_memory(folder: Path) -> None:
    chat = Chat()
    with make(folder, kv_sessions=1) as engine:
        chat.ask(engine, "hello")
        with no_file_larger_than(path_of(folder, "work").stat().st_size):
            chat.ask(engine, "go on")
        path_of(folder, "work").unlink()
        Chat("other").ask(engine, "hello")
    assert [path.name for path in folder.glob("*.giw-kv*")] == ["other.giw-kv"]


def test_forgetting_leaves_the_file_and_lets_go_of_it(folder: Path) -> None:
    chat = Chat()
    with make(folder) as engine:
        kept = chat.ask(engine, "hello").stats.context_used
        engine.forget("work")
        with KVFile.open(path_of(folder, "work"), identity()) as file:
            assert len(file.ids) == kept
        assert chat.ask(engine, "go on").stats.restored_tokens == kept


def test_an_iterator_dropped_half_way_saves_what_was_evaluated(folder: Path) -> None:
    with make(folder) as engine:
        events = engine.generate(Request(prompt_ids=tuple(b"hello " * 40), max_tokens=50, sampling=GREEDY))
        for event in events:
            if isinstance(event, TextDelta):
                break
        events.close()  # type: ignore[attr-defined]
        kept = len(engine._sessions._tables["default"])
    with KVFile.open(path_of(folder, "default"), identity()) as file:
        assert len(file.ids) == kept >= 240


def test_a_long_reply_is_saved_while_it_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_files, "SAVE_SECONDS", 0.0)
    with make(folder) as engine:
        sizes = []
        for event in engine.generate(Request(prompt_ids=tuple(b"hello"), max_tokens=30, sampling=GREEDY)):
            if isinstance(event, TextDelta):
                sizes.append(path_of(folder, "default").stat().st_size)
        assert isinstance(event, Finished)
        size = path_of(folder, "default").stat().st_size
        assert event.reply.stats.kv_saved_bytes is not None
        assert event.reply.stats.kv_saved_bytes >= size
    assert len(set(sizes)) > 5
    with KVFile.open(path_of(folder, "default"), identity()) as file:
        assert len(file.ids) == 35


def test_a_process_that_is_killed_in_a_turn_costs_what_it_had_not_saved(folder: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("kv_killed_turn.py")), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    chat = Chat(messages=[Message(role="user", content="first question " * 20)])
    first = tuple(int(i) for i in child.stdout.readline().split())
    chat.messages.append(Message(role="assistant", content="", ids=first))
    for _ in range(15):  # pieces of the second reply
        assert child.stdout.readline() == "piece\n"
    os.kill(child.pid, signal.SIGKILL)
    child.stdout.close()
    child.wait()
    with make(folder) as engine:
        reply = chat.ask(engine, "second question " * 20)
    assert reply.ids == cold_ids(chat, 4)
    kept = reply.stats.restored_tokens
    assert kept is not None
    assert chat.said[0].startswith(f"resumed {kept} of ")
    assert kept > len("user:" + "first question " * 20 + "?assistant:") + 12  # also of the turn that was running
