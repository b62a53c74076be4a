"""More conversations than places in memory: what a turn then costs, and what a start brings back."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from kv_chats import CONTEXT, Chat, added_by, identity, make, prefilled, started
from tiny_models import write_tiny_model

from engine import kept_files, load
from engine.api import Message, Reply
from engine.kv_file import KVFile
from engine.kv_folder import path_of
from engine.local import LocalEngine
from goinfer_chat.view.render import notices


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def six_turns(engine: Callable[[], LocalEngine], num_conversations: int) -> list[list[Reply]]:
    """Six turns each, taking turns."""
    chats = [Chat(f"c{number}") for number in range(num_conversations)]
    replies: list[list[Reply]] = [[] for _ in chats]
    for turn in range(6):
        for number, chat in enumerate(chats):
            replies[number].append(chat.ask(engine(), f"{number}, turn {turn}: " + "word " * (5 + turn)))
    return replies


@pytest.mark.parametrize("kv_sessions", [4, 2, 1])
@pytest.mark.parametrize("num_conversations", [1, 2, 4])
def test_a_turn_prefills_the_same_however_many_conversations_share_however_many_places(
    num_conversations: int, kv_sessions: int, folder: Path
) -> None:
    with make(folder, kv_sessions=kv_sessions) as engine:
        replies = six_turns(lambda: engine, num_conversations)
        assert len(engine._sessions.kept) == min(num_conversations, kv_sessions)
        for number in range(num_conversations - kv_sessions):  # those who left memory
            KVFile.open(path_of(folder, f"c{number}"), identity()).close()
    for number, of_one in enumerate(replies):
        for turn, reply in enumerate(of_one[1:], 1):
            assert reply.stats.prefill_tokens == added_by(f"{number}, turn {turn}: " + "word " * (5 + turn))
            came_back = num_conversations > kv_sessions
            assert (reply.stats.restored_tokens is not None) == came_back
    with make(None) as engine:
        expected = six_turns(lambda: engine, num_conversations)
    assert [[reply.ids for reply in of_one] for of_one in replies] == [
        [reply.ids for reply in of_one] for of_one in expected
    ]


def test_six_turns_prefill_the_same_at_one_two_and_four_conversations_and_at_six_that_come_back_from_the_disk(
    folder: Path, tmp_path: Path
) -> None:
    """Four places, as the program has them unless it is told otherwise."""
    path = write_tiny_model(tmp_path / "model.gguf", "qwen2")
    counts: dict[int, list[list[int]]] = {}
    for num_conversations in (1, 2, 4, 6):
        with load(path, context_size=1024, threads=1, kv_folder=folder / str(num_conversations)) as engine:
            replies = six_turns(lambda: engine, num_conversations)
        counts[num_conversations] = [[prefilled(reply) for reply in of_one] for of_one in replies]
        for of_one in replies:
            for before, reply in pairwise(of_one):
                assert reply.stats.prefill_reused_tokens == before.stats.context_used
                came_back = reply.stats.restored_tokens is not None
                assert came_back == (num_conversations > 4)
    ((first, *alone),) = counts[1]
    assert len(alone) == 5
    for num_conversations, of_all in counts.items():
        assert [of_one[1:] for of_one in of_all] == [alone] * num_conversations
        assert of_all[0][0] == first
        assert all(of_one[0] < first for of_one in of_all[1:])  # they share the start of the template


def test_the_last_used_are_reloaded_and_the_order_stays(folder: Path) -> None:
    chats = [Chat(f"c{number}") for number in range(5)]
    with make(folder) as engine:
        used = [chat.ask(engine, f"question {number} " * 20).stats.context_used for number, chat in enumerate(chats)]
    for number in range(5):
        os.utime(path_of(folder, f"c{number}"), (1000 + number, 1000 + number))
    for _ in range(2):
        with make(folder, kv_sessions=3) as engine:
            assert engine._sessions.kept == ("c2", "c3", "c4")
            assert (engine.info.kept_conversations, engine.info.kept_tokens) == (3, sum(used[2:]))
    with make(folder, kv_sessions=3) as engine:
        reply = chats[0].ask(engine, "go on")
        assert reply.stats.prefill_reused_tokens == used[0]
        assert chats[0].said[0].startswith(f"resumed {used[0]} of {used[0]} tokens, ")
        assert engine._sessions.kept == ("c3", "c4", "c0")


def test_reloaded_conversations_share_the_start_they_have_in_common(folder: Path) -> None:
    system = Message(role="system", content="s" * 300)
    chats = [Chat(f"c{number}", [system]) for number in range(3)]
    with make(folder) as engine:
        for chat in chats:
            chat.ask(engine, f"I am {chat.name}")
        free = engine._pool.num_free
    with make(folder) as engine:
        assert engine.info.kept_conversations == 3
        assert engine._pool.num_free == free
        for chat in chats:
            assert prefilled(chat.ask(engine, "go on")) == added_by("go on")


def test_a_start_reloads_no_more_than_fits(folder: Path) -> None:
    chats = [Chat(f"c{number}") for number in range(3)]
    with make(folder) as engine:
        for chat in chats:
            chat.ask(engine, chat.name * 700)
    with make(folder, num_blocks=60) as engine:
        assert engine.info.kept_conversations == 2
        assert prefilled(chats[0].ask(engine, "go on")) == added_by("go on")


def test_no_more_is_reloaded_than_the_context_holds(folder: Path) -> None:
    started(folder, length=700)
    with make(folder, context_size=512) as engine:
        assert engine.info.kept_tokens == 512
        chat = Chat()
        reply = chat.ask(engine, "x" * 300)
    assert reply.stats.restored_tokens == len("user:") + 300


def test_a_start_that_has_read_for_long_leaves_the_rest_for_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, kept = started(folder)
    monkeypatch.setattr(kept_files, "RELOAD_SECONDS", -1)
    with make(folder) as engine:
        assert (engine.info.kept_conversations, engine.info.kept_tokens) == (0, 0)
        assert chat.ask(engine, "go on").stats.restored_tokens == kept


def test_without_places_nothing_is_read_or_written(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", "llama")
    chat = Chat()
    with load(path, threads=1, kv_sessions=0, kv_folder=tmp_path / "kept") as engine:
        chat.ask(engine, "hello")
        reply = chat.ask(engine, "again")
        assert engine.info.session_reuse == "session reuse: off"
    assert (reply.stats.prefill_reused_tokens, reply.stats.kv_saved_bytes) == (0, None)
    assert not (tmp_path / "kept").exists()


def test_the_line_about_reuse_has_both_numbers_where_fewer_fit(folder: Path) -> None:
    with make(None) as engine:
        assert engine.info.session_reuse == "session reuse: on (4 conversations kept prefilled)"
        assert notices(engine.info) == ["a template of the tests"]
    with make(None, num_blocks=2 * CONTEXT // 64) as engine:
        assert engine.info.session_reuse == (
            "session reuse: on (2 of 4 conversations kept prefilled; memory has no room for more of 2,048 tokens)"
        )
        # Where there is no banner too: in scripts, and after /model.
        assert notices(engine.info)[1:] == [engine.info.session_reuse]
