"""A conversation goes on after a restart as if there had been none, at the cost of what is new."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from kv_chats import HOT, Chat, added_by, assert_matches, make, prefilled, started
from tiny_models import write_tiny_model

from engine import load
from engine.api import Message, Reply
from engine.kv_folder import path_of
from engine.local import LocalEngine
from engine.prefill_speed import PrefillSpeed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


# ---------------------------------------------------------------------- resumed, and said so
def test_a_restart_costs_what_the_turn_adds_and_says_what_it_resumed(folder: Path) -> None:
    chat, other = Chat(), Chat()
    with make(folder) as engine:
        first = chat.ask(engine, "a long question " * 20)
        assert chat.said == []
        assert first.stats.restored_tokens is None
        assert first.stats.kv_saved_bytes == path_of(folder, "work").stat().st_size
    with make(None) as never_stopped:
        other.ask(never_stopped, "a long question " * 20)
        expected = other.ask(never_stopped, "and more")
        assert (expected.stats.restored_tokens, expected.stats.kv_saved_bytes) == (None, None)
    kept = first.stats.context_used
    with make(folder) as engine:
        info = engine.info
        assert (info.kept_conversations, info.kept_tokens) == (1, kept)
        assert info.kept_ms is not None
        second = chat.ask(engine, "and more")
    assert second.ids == expected.ids
    assert second.stats.prefill_tokens == expected.stats.prefill_tokens == added_by("and more")
    assert (second.stats.restored_tokens, second.stats.prefill_reused_tokens) == (kept, kept)
    assert second.stats.restore_ms is not None
    assert len(chat.said) == chat.before_prefill == 1
    assert chat.said[0].startswith(f"resumed {kept} of {kept} tokens, ")
    written, added = second.stats.kv_saved_bytes, second.stats.context_used - kept
    assert written is not None
    assert 12 * added <= written < 12 * added + 100


def test_the_third_turn_is_warm_and_says_nothing(folder: Path) -> None:
    chat, _ = started(folder)
    with make(folder) as engine:
        chat.ask(engine, "one")
        reply = chat.ask(engine, "two")
    assert chat.said == []
    assert reply.stats.restored_tokens is None
    assert reply.stats.prefill_tokens == added_by("two")


def test_what_a_resume_saved_is_said_where_the_speed_of_reading_is_known(folder: Path) -> None:
    chat = Chat()
    with make(folder) as engine:
        engine._model.seconds_per_row = 0.002
        kept = chat.ask(engine, "x" * 400, max_tokens=2).stats.context_used
    with make(folder) as engine:
        chat.ask(engine, "go on")
    assert_matches(rf"resumed {kept} of {kept} tokens, \d+ ms, saved about (0\.[89]|1\.\d|\d+) s", chat.said[0])
    with make(folder, kv_sessions=1) as engine:
        Chat("other").ask(engine, "hello")
        reply = chat.ask(engine, "and on")
    shared = len("user:")  # was in memory
    kept = reply.stats.prefill_reused_tokens
    assert reply.stats.restored_tokens == kept - shared
    assert chat.said[0].startswith(f"resumed {kept} of {kept} tokens, ")


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"' + (b"m" * 32).hex() + '": -1}', "[" * 60_000])
def test_a_speed_that_cannot_be_read_is_not_known(content: str, folder: Path) -> None:
    chat, kept = started(folder, length=20)
    (folder / "prefill-speed.json").write_text(content)
    with make(folder) as engine:
        chat.ask(engine, "go on")
    assert_matches(rf"resumed {kept} of {kept} tokens, \d+ ms", chat.said[0])


def test_speeds_of_several_models_stand_side_by_side_for_the_owner_alone(folder: Path) -> None:
    folder.mkdir()
    for model, speed in (("a", 100.0), ("b", 7.0), ("a", 110.0), ("a", 150.0)):
        PrefillSpeed(folder, model).learn(64, speed)
    PrefillSpeed(folder, "b").learn(63, 1000.0)
    assert [PrefillSpeed(folder, model).tok_s for model in "abc"] == [150.0, 7.0, None]
    assert stat.S_IMODE((folder / "prefill-speed.json").stat().st_mode) == 0o600


def test_a_turn_that_goes_another_way_resumes_what_still_holds(folder: Path) -> None:
    chat, kept = started(folder, length=300)
    with make(folder) as engine:
        chat.messages[0] = Message(role="user", content="x" * 200 + "y" * 100)
        reply = chat.ask(engine, "go on")
    same = len("user:") + 200
    assert (reply.stats.restored_tokens, reply.stats.prefill_reused_tokens) == (same, same)
    assert chat.said[0].startswith(f"resumed {same} of {kept} tokens, ")


def test_a_new_conversation_has_no_file_and_says_nothing(folder: Path) -> None:
    with make(folder) as engine:
        chat = Chat()
        reply = chat.ask(engine, "hello")
    assert chat.said == []
    assert reply.stats.restored_tokens is None


def test_a_conversation_that_goes_on_without_its_file_says_so(folder: Path) -> None:
    chat, _ = started(folder)
    path_of(folder, "work").unlink()
    with make(folder) as engine:
        reply = chat.ask(engine, "go on")
        assert reply.stats.prefill_reused_tokens == 0
        assert chat.said == ["not resumed: file missing"]
        chat.ask(engine, "and on")
        assert chat.said == []


# ---------------------------------------------------------------------- the same words as never having stopped
Steps = Callable[[Callable[[], LocalEngine], Path | None], list[Reply]]
"""A conversation. Every call of its first argument gives the engine to go on with."""


def plain_turns(engine: Callable[[], LocalEngine], folder: Path | None, **settings: object) -> list[Reply]:
    chat = Chat()
    return [chat.ask(engine(), f"turn {n} " * 9, **settings) for n in range(4)]  # type: ignore[arg-type]


def greedy(engine: Callable[[], LocalEngine], folder: Path | None) -> list[Reply]:
    return plain_turns(engine, folder)


def sampled(engine: Callable[[], LocalEngine], folder: Path | None) -> list[Reply]:
    return plain_turns(engine, folder, sampling=HOT)


def with_guesses(engine: Callable[[], LocalEngine], folder: Path | None) -> list[Reply]:
    return plain_turns(engine, folder, sampling=HOT, speculation="ngram")


def long_replies(engine: Callable[[], LocalEngine], folder: Path | None) -> list[Reply]:
    return plain_turns(engine, folder, max_tokens=100)


def after_undo(engine: Callable[[], LocalEngine], folder: Path | None) -> list[Reply]:
    chat = Chat()
    replies = [chat.ask(engine(), f"turn {n} " * 9) for n in range(3)]
    chat.undo()
    replies.append(chat.ask(engine(), "another question"))
    chat.undo()
    chat.undo()
    return [*replies, chat.ask(engine(), "yet another one")]


def after_a_fork(engine: Callable[[], LocalEngine], folder: Path | None) -> list[Reply]:
    chat = Chat()
    replies = [chat.ask(engine(), f"turn {n} " * 9) for n in range(2)]
    twin = chat.fork("twin", folder)
    for text in ("left", "right"):
        replies += [chat.ask(engine(), text), twin.ask(engine(), text * 2)]
    return replies


def after_a_cancellation(engine: Callable[[], LocalEngine], folder: Path | None) -> list[Reply]:
    chat = Chat()
    first = chat.ask(engine(), "a question", max_tokens=50, cut=5)
    assert first.finish_reason == "cancelled"
    return [first, chat.ask(engine(), "go on", cut=3), chat.ask(engine(), "and on")]


def after_a_stop_string(engine: Callable[[], LocalEngine], folder: Path | None) -> list[Reply]:
    chat = Chat()
    whole = chat.ask(engine(), "a question", max_tokens=40)
    chat.undo()
    stop = whole.text[10:14]
    stopped = chat.ask(engine(), "a question", max_tokens=40, stop=(stop,))
    assert stopped.finish_reason == "stop"
    return [whole, stopped, chat.ask(engine(), "go on")]


def after_tool_calls(engine: Callable[[], LocalEngine], folder: Path | None) -> list[Reply]:
    """Two calls in a turn, each with a restart before its answer is read; then an undo of all that, and one more."""
    chat = Chat()
    replies = [chat.ask(engine(), "what is in these files?", sampling=HOT)]
    for name in ("read_file", "list_files"):
        chat.answer_call(name, f"the result of {name} " * 20)
        replies.append(chat.ask(engine(), None, sampling=HOT))
    replies.append(chat.ask(engine(), "and now?"))
    del chat.messages[3:]  # behind the first answer of a tool
    assert chat.messages[-1].role == "tool"
    replies.append(chat.ask(engine(), None))
    return replies


@contextmanager
def restarted(start: Callable[[], LocalEngine]) -> Iterator[Callable[[], LocalEngine]]:
    """A new engine for each call."""
    running: list[LocalEngine] = []

    def again() -> LocalEngine:
        while running:
            running.pop().close()
        running.append(start())
        return running[0]

    yield again
    running[0].close()


SCENARIOS = [
    greedy, sampled, with_guesses, long_replies, after_undo, after_a_fork, after_a_cancellation, after_a_stop_string,
    after_tool_calls,
]  # fmt: skip


@pytest.mark.parametrize("steps", SCENARIOS)
def test_restarts_between_all_turns_change_no_token_and_cost_no_prefill(steps: Steps, folder: Path) -> None:
    with make(None) as engine:
        expected = steps(lambda: engine, None)
    with restarted(lambda: make(folder)) as again:
        replies = steps(again, folder)
    assert [reply.ids for reply in replies] == [reply.ids for reply in expected]
    assert [reply.text for reply in replies] == [reply.text for reply in expected]
    assert [prefilled(reply) for reply in replies] == [prefilled(reply) for reply in expected]
    assert sum(reply.stats.restored_tokens or 0 for reply in replies[1:]) > 0


@pytest.mark.parametrize(
    ("steps", "architecture"),
    [
        *((steps, "llama") for steps in SCENARIOS if steps is not long_replies),
        *((steps, architecture) for architecture in ("gemma3", "gemma4") for steps in (sampled, after_undo)),
    ],
)
def test_restarts_change_no_token_of_a_real_model(
    steps: Steps, architecture: Literal["llama", "gemma3", "gemma4"], folder: Path, tmp_path: Path
) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", architecture, num_layers=3 if architecture == "gemma4" else 2)
    with load(path, context_size=1024, threads=1) as engine:
        expected = steps(lambda: engine, None)
    with restarted(lambda: load(path, context_size=1024, threads=1, kv_folder=folder)) as again:
        replies = steps(again, folder)
    assert [reply.ids for reply in replies] == [reply.ids for reply in expected]
    assert [prefilled(reply) for reply in replies] == [prefilled(reply) for reply in expected]


def test_the_default_model_goes_on_after_restarts_with_the_same_tokens(
    model_path: Callable[[str], Path], folder: Path
) -> None:
    path = model_path("smollm2-135m")
    questions = ["Name three colours.", "Which of them is warm?", "Why?"]

    def turns(engine: Callable[[], LocalEngine]) -> list[Reply]:
        chat = Chat()
        return [chat.ask(engine(), question, max_tokens=24) for question in questions]

    with load(path, context_size=512) as engine:
        expected = turns(lambda: engine)
    with restarted(lambda: load(path, context_size=512, kv_folder=folder)) as again:
        replies = turns(again)
    assert [reply.ids for reply in replies] == [reply.ids for reply in expected]
    assert [prefilled(reply) for reply in replies] == [prefilled(reply) for reply in expected]
    assert all(reply.stats.restored_tokens == reply.stats.prefill_reused_tokens for reply in replies[1:])
