"""A conversation goes on after a restart as if there had been none, at the cost of what is new."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
from stand_in import StandInModel, StandInTemplate, StandInTokenizer
from tiny_models import write_tiny_model

from engine import kept_files, load
from engine.api import Event, Finished, Message, Notice, Reply, Request, SamplingParams, TextDelta
from engine.errors import UsageError
from engine.kv_file import KVFile
from engine.kv_folder import KVFileLockedError, aside_of, path_of, prepare, remove
from engine.kv_layout import Identity, KVLayout
from engine.local import LocalEngine
from engine.memory import MemoryPlan
from engine.prefill_speed import PrefillSpeed
from goinfer_chat.view.render import notices

GREEDY = SamplingParams(temperature=0)
HOT = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, seed=7)
CONTEXT = 2048


def identity(model: bytes = b"m" * 32) -> Identity:
    """Of the stand-in: a number of 8 bytes for each position."""
    layout = KVLayout(layers=(((1, 8),),))
    return Identity(model=model, architecture="none", rope=b"r" * 32, kv_type="f16", layout=layout)


def make(
    folder: Path | None,
    *,
    kv_sessions: int = 4,
    model: bytes = b"m" * 32,
    num_blocks: int | None = None,
    context_size: int = CONTEXT,
    **settings: int,
) -> LocalEngine:
    tokenizer = StandInTokenizer()
    gguf = SimpleNamespace(metadata={"general.file_type": 3}, tensors={}, close=lambda: None, content_hash=model.hex)
    num_blocks = num_blocks or max(1, kv_sessions) * CONTEXT // 64
    plan = MemoryPlan(context_size=context_size, num_blocks=num_blocks, notices=())
    engine = LocalEngine(gguf, tokenizer, StandInTemplate(tokenizer), StandInModel(), plan, kv_sessions)  # type: ignore[arg-type]
    if folder is not None:
        prepare(folder)
        engine.keep_in(folder, identity(model), **settings)
    return engine


@dataclass
class Chat:
    """One conversation, with whatever engine there is."""

    name: str = "work"
    messages: list[Message] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """Notices of the last turn."""
    before_prefill: int = 0
    """How many of them came before anything else."""
    foresees: bool = False
    """Whether the engine is asked before each turn what it costs, which must come true."""

    def ask(
        self, engine: LocalEngine, text: str | None, *, max_tokens: int = 12, cut: int | None = None, **settings: object
    ) -> Reply:
        """A turn; `cut`: cancelled after so many pieces of text. No text: the messages as they are are answered."""
        if text is not None:
            self.messages.append(Message(role="user", content=text))
        request = Request(
            messages=tuple(self.messages),
            max_tokens=max_tokens,
            conversation=self.name,
            **{"sampling": GREEDY, **settings},  # type: ignore[arg-type]
        )
        events: list[Event] = []
        foreseen = engine.foresee(request).prefill_tokens if self.foresees else None
        for event in engine.generate(request):
            events.append(event)
            if sum(isinstance(event, TextDelta) for event in events) == cut:
                request.cancel.set()
        self.said = [event.text for event in events if isinstance(event, Notice)]
        others = [isinstance(event, Notice) for event in events]
        self.before_prefill = others.index(False)
        last = events[-1]
        assert isinstance(last, Finished)
        assert foreseen in (None, last.reply.stats.prefill_tokens)
        self.messages.append(Message(role="assistant", content=last.reply.text, ids=last.reply.ids))
        return last.reply

    def undo(self) -> None:
        del self.messages[-2:]

    def answer_call(self, name: str, result: str) -> None:
        """What an agent adds when the last reply called a tool."""
        call = {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
        self.messages[-1] = replace(self.messages[-1], tool_calls=(call,))
        self.messages.append(Message(role="tool", content=result, tool_call_id=name, name=name))

    def fork(self, name: str, folder: Path | None) -> Chat:
        """What the program does: the words and the file are copied."""
        if folder is not None:
            shutil.copy(path_of(folder, self.name), path_of(folder, name))
        return Chat(name, list(self.messages))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def started(folder: Path, length: int = 400, **settings: object) -> tuple[Chat, int]:
    """A conversation of one turn, and how many positions its file has."""
    chat = Chat()
    with make(folder) as engine:
        return chat, chat.ask(engine, "x" * length, **settings).stats.context_used  # type: ignore[arg-type]


def added_by(text: str) -> int:
    """Prompt tokens that a turn adds to a conversation whose last reply is cached."""
    return len(f"?user:{text}?assistant:")


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


def prefilled(reply: Reply) -> int:
    return reply.stats.prefill_tokens


# ---------------------------------------------------------------------- more conversations than places
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


# ---------------------------------------------------------------------- files that cannot be used
def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_to_its_header(path: Path) -> None:
    os.truncate(path, int.from_bytes(path.read_bytes()[16:20], "little"))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def be_empty(path: Path) -> None:
    path.write_bytes(b"")


def be_something_else(path: Path) -> None:
    path.write_bytes(b"what is this" * 100)


def be_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


DAMAGES = [
    (cut_in_half,
     r"resumed 192 of 192 tokens, .* ms; unfinished from position 192 on, as after a kill; the 192 before it are used"),
    (lambda path: flip(path, path.stat().st_size // 2),
     r"resumed 192 of \d+ tokens, .* ms; damaged from position 192 on; the 192 before it are used"),
    (lambda path: flip(path, 300), r"not resumed: damaged from position 0 on; nothing of it is used"),
    (lambda path: flip(path, 500), r"not resumed: damaged from position 0 on; nothing of it is used"),
    (lambda path: path.write_bytes(path.read_bytes() + bytes(2**20)),
     r"resumed 428 of 428 tokens, .* ms; damaged from position 428 on; the 428 before it are used"),
    (lambda path: flip(path, 30), r"not resumed: its header is damaged"),
    (be_empty, r"not resumed: it is empty"),
    (cut_to_its_header, r"not resumed: it holds nothing of what was said"),
    (be_something_else, r"not resumed: it is not a .giw-kv file"),
    (be_a_link, r"not resumed and not saved: refused: it is a symbolic link; remove /.*/kept/work.giw-kv"),
]  # fmt: skip
"""What is done to a file, and what is said of it."""


@pytest.mark.parametrize(("harm", "said"), DAMAGES)
def test_a_file_that_is_damaged_costs_one_notice_and_a_prefill_and_no_word(
    harm: Callable[[Path], None], said: str, folder: Path
) -> None:
    chat, kept = started(folder)
    harm(path_of(folder, "work"))
    with make(folder) as engine:
        reply = chat.ask(engine, "go on")
        assert [chat.before_prefill, len(chat.said)] == [1, 1]
        assert_matches(said, chat.said[0])
        restored = reply.stats.restored_tokens or 0
        assert reply.stats.prefill_tokens == kept - restored + added_by("go on")
        chat.ask(engine, "and on")
        assert chat.said == []
    assert reply.ids == cold_ids(chat, 4)
    with make(folder) as engine:
        reply = chat.ask(engine, "once more")
    if harm is not be_a_link:
        assert prefilled(reply) == added_by("once more")


@pytest.mark.parametrize(("harm", "said"), DAMAGES)
def test_what_a_turn_will_cost_is_known_before_it_whatever_became_of_the_file(
    harm: Callable[[Path], None], said: str, folder: Path
) -> None:
    chat, _ = started(folder)
    path = path_of(folder, "work")
    harm(path)
    before = path.read_bytes()
    chat.foresees = True
    with make(folder) as engine:
        request = Request(messages=tuple(chat.messages), conversation="work")
        problem = engine.foresee(request).problem
        if "nothing of what was said" in said:
            assert problem is None
        else:
            assert problem is not None
            assert_matches(re.split("not saved: |not resumed: |ms; ", said)[-1], problem)
        assert path.read_bytes() == before
        assert chat.ask(engine, "go on").ids == cold_ids(chat, 4)
        chat.ask(engine, "and on")
        harm(path)
        chat.ask(engine, "from memory")


@pytest.mark.parametrize(
    ("harm", "left"),
    [(cut_in_half, r"resumed 192 of 192 tokens, [\d.]+ ms"), (be_empty, None), (lambda path: flip(path, 300), None)],
)
def test_what_was_told_of_a_file_before_a_turn_is_not_told_in_it(
    harm: Callable[[Path], None], left: str | None, folder: Path
) -> None:
    chat, _ = started(folder)
    harm(path_of(folder, "work"))
    with make(folder) as engine:
        told = engine.foresee(Request(messages=tuple(chat.messages), conversation="work")).problem
        assert told
        chat.ask(engine, "go on", told=told)
        assert len(chat.said) == (left is not None)
        for line in chat.said:
            assert_matches(left or "", line)
    other, _ = started(folder / "other")
    harm(path_of(folder / "other", "work"))
    with make(folder / "other") as engine:
        other.ask(engine, "go on", told="damaged from position 7 on; the 7 before it are used")
        assert told in other.said[0]


@pytest.mark.parametrize("shared", [0, 20, 100])
def test_a_damaged_first_record_is_told_alike_before_the_turn_and_in_it_whoever_holds_its_start(
    folder: Path, shared: int
) -> None:
    chat, _ = started(folder)
    path = path_of(folder, "work")
    with KVFile.open(path, identity()) as file:
        assert file._log is not None
        offset = file._log.pieces[0].offset
    flip(path, offset)
    chat.foresees = True
    said = "damaged from position 0 on; nothing of it is used"
    with make(folder) as engine:
        Chat("other").ask(engine, "x" * shared + "y" * 30)
        request = Request(messages=(*chat.messages, Message(role="user", content="go on")), conversation="work")
        foreseen = engine.foresee(request)
        assert foreseen.reused_tokens >= shared
        reply = chat.ask(engine, "go on")
        assert reply.ids == cold_ids(chat, 4)
        if shared > 64:  # the record is not needed, and nobody has looked at it
            assert foreseen.problem is None
        else:
            assert (foreseen.problem, chat.said) == (said, [f"not resumed: {said}"])
    with make(folder) as engine:  # the file is right again
        assert prefilled(chat.ask(engine, "once more")) == added_by("once more")


def test_what_a_turn_will_cost_is_known_before_it_of_other_models_and_files_in_use(folder: Path) -> None:
    chat, kept = started(folder)
    chat.foresees = True
    path, other = path_of(folder, "work"), b"n" * 32
    with make(folder, model=other) as engine:
        request = Request(messages=tuple(chat.messages), conversation="work")
        assert engine.foresee(request).problem == "made with another model"
        chat.ask(engine, "go on")
    with make(folder) as engine:  # its file has been set aside
        assert engine.foresee(request).reused_tokens >= kept
        with KVFile.open(path, identity(other)):
            assert engine.foresee(request).problem == "locked: another goinfer-chat has this conversation open"
            chat.ask(engine, "in use")
    with make(folder) as engine:
        chat.ask(engine, "free again")
        assert engine.foresee(request, "work").reused_tokens >= kept  # from its file
        path.unlink()
        assert engine.foresee(request).problem is None  # in memory, and it will be written
    with make(folder) as engine:
        remove(path)
        assert engine.foresee(request).problem == "file missing"
        chat.ask(engine, "gone")
    flip(path, 500)
    fork = chat.fork("fork", None)
    with make(folder, kv_sessions=1) as engine:  # what is damaged is in memory, and what comes behind it is not
        short = Chat("short", chat.messages[:2], foresees=True)
        assert short.ask(engine, "here").stats.prefill_reused_tokens == 0
        assert chat.ask(engine, "there").stats.restored_tokens
    with make(folder) as first, make(folder) as second:
        for engine in (first, second, first, second, second):
            chat.ask(engine, "in turn")
            fork.ask(engine, "beside")


def assert_matches(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text), text


def cold_ids(chat: Chat, num_messages: int) -> tuple[int, ...]:
    """The reply that ends the first messages, from an engine that knows nothing."""
    request = Request(messages=tuple(chat.messages[: num_messages - 1]), max_tokens=12, sampling=GREEDY)
    with make(None) as engine:
        *_, last = engine.generate(request)
    assert isinstance(last, Finished)
    return last.reply.ids


def test_another_model_s_file_is_named_as_such_and_set_aside_until_that_model_goes_on(folder: Path) -> None:
    chat, kept = started(folder)
    with make(folder, model=b"n" * 32) as engine:
        assert engine.info.kept_conversations == 0
        reply = chat.ask(engine, "go on")
        assert chat.said == ["not resumed: made with another model"]
        assert reply.stats.prefill_reused_tokens == 0
    with make(folder, model=b"n" * 32) as engine:
        assert prefilled(chat.ask(engine, "and on")) == added_by("and on")
    assert sorted(path.name for path in folder.glob("work*")) == ["work.giw-kv", f"work.giw-kv.{identity().key}"]
    with make(folder) as engine:
        reply = chat.ask(engine, "back")
        assert reply.stats.prefill_reused_tokens == reply.stats.restored_tokens == kept
        assert chat.said[0].startswith(f"resumed {kept} of {kept} tokens, ")
    assert reply.ids == cold_ids(chat, len(chat.messages))
    with make(folder, model=b"n" * 32) as engine:  # and there again
        reply = chat.ask(engine, "once more")
        assert prefilled(reply) < reply.stats.prompt_tokens / 2
    remove(path_of(folder, "work"))
    assert list(folder.glob("work*")) == []


def test_a_file_of_another_kv_type_is_named_as_such_and_used_again_with_its_own(folder: Path, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", "llama")
    chat, other = Chat(), Chat("other")
    with load(path, context_size=512, threads=1, kv_folder=folder) as engine:
        kept = chat.ask(engine, "a question").stats.context_used
    with load(path, context_size=512, threads=1, kv_folder=folder, kv_type="q8_0") as engine:
        assert (engine.info.kept_conversations, engine.info.kv_type) == (0, "q8_0")
        assert engine.info.kv_bytes_per_token == 2 * 2 * 2 * (64 + 2 * 2)  # layers, K and V, heads, numbers and scales
        chat.ask(engine, "go on")
        assert chat.said == ["not resumed: made with another KV type, f16, and q8_0 is in use"]
        other.ask(engine, "a question")
    with load(path, context_size=512, threads=1, kv_folder=folder, kv_type="q8_0") as engine:
        assert engine.info.kept_conversations == 2
    with load(path, context_size=512, threads=1, kv_folder=folder) as engine:
        assert chat.ask(engine, "back").stats.restored_tokens == kept


def test_files_that_are_set_aside_count_for_the_cap(folder: Path) -> None:
    chat, _ = started(folder)
    with make(folder, model=b"n" * 32) as engine:
        chat.ask(engine, "go on")
    aside = aside_of(path_of(folder, "work"), identity().key)
    os.utime(aside, (1000, 1000))
    with make(folder, model=b"n" * 32, cap_bytes=aside.stat().st_size) as engine:
        chat.ask(engine, "and on")
        assert chat.said[-1].startswith("removed the cache of 1 conversation not used for longest")
    assert [path.name for path in folder.glob("work*")] == ["work.giw-kv"]


def test_what_a_model_left_in_the_middle_of_a_swap_is_found(folder: Path) -> None:
    chat, kept = started(folder)
    path = path_of(folder, "work")
    path.rename(aside_of(path, identity().key))
    with make(folder) as engine:
        assert chat.ask(engine, "go on").stats.restored_tokens == kept


def test_a_file_that_is_in_use_elsewhere_is_not_swapped(folder: Path) -> None:
    chat, _ = started(folder)
    with make(folder, model=b"n" * 32) as engine:
        chat.ask(engine, "go on")
    before = {path.name: path.read_bytes() for path in folder.glob("work*")}
    with make(folder) as engine, KVFile.open(path_of(folder, "work"), identity(b"n" * 32)):
        chat.ask(engine, "back")
        assert chat.said == ["not resumed and not saved: locked: another goinfer-chat has this conversation open"]
    assert {path.name: path.read_bytes() for path in folder.glob("work*")} == before


def test_a_file_that_is_in_use_is_left_alone_and_said_once(folder: Path) -> None:
    chat, kept = started(folder)
    path = path_of(folder, "work")
    before = path.read_bytes()
    with make(folder) as engine, KVFile.open(path, identity()):
        chat.ask(engine, "go on")  # reloaded before somebody else took the file
        assert chat.said == ["not saved: locked: another goinfer-chat has this conversation open"]
        chat.ask(engine, "and on")
        assert chat.said == []
        with make(folder) as other:
            assert other.info.kept_conversations == 0
            cold = Chat(messages=chat.messages[:2])
            reply = cold.ask(other, "go on")
            assert reply.stats.prefill_tokens == kept + added_by("go on")
            assert cold.said == ["not resumed and not saved: locked: another goinfer-chat has this conversation open"]
            assert reply.ids == chat.messages[3].ids
        assert path.read_bytes() == before
    with make(folder) as engine:
        reply = chat.ask(engine, "free again")
        assert reply.stats.restored_tokens == kept


def test_a_file_that_is_free_again_is_saved_to(folder: Path) -> None:
    chat, _ = started(folder)
    with make(folder) as engine:
        with KVFile.open(path_of(folder, "work"), identity()):
            chat.ask(engine, "go on")
        reply = chat.ask(engine, "and on")
        assert chat.said == []
    with KVFile.open(path_of(folder, "work"), identity()) as file:
        assert len(file.ids) == reply.stats.context_used


def test_a_warm_conversation_is_not_called_unresumed_because_of_its_file(folder: Path) -> None:
    chat, _ = started(folder)
    path = path_of(folder, "work")
    with make(folder) as engine:
        with KVFile.open(path, identity()):
            chat.ask(engine, "go on")
        be_something_else(path)
        reply = chat.ask(engine, "and on")
        assert chat.said == []
    assert prefilled(reply) == added_by("and on")
    with make(folder) as engine:
        assert chat.ask(engine, "again").stats.restored_tokens == reply.stats.context_used


def test_a_file_that_is_locked_again_is_said_again(folder: Path) -> None:
    chat, _ = started(folder)
    with make(folder) as engine:
        for text in ("one", "two"):
            with KVFile.open(path_of(folder, "work"), identity()):
                chat.ask(engine, text)
            assert len(chat.said) == 1
            chat.ask(engine, "free")
            engine.forget("work")


def test_a_fork_in_memory_needs_no_file(folder: Path) -> None:
    chat, _ = started(folder)
    with make(folder) as engine:
        chat.ask(engine, "go on")
        twin = Chat("twin", list(chat.messages))
        reply = twin.ask(engine, "and on")
    assert twin.said == []
    assert prefilled(reply) == added_by("and on")


def test_what_a_stranger_s_file_holds_is_not_called_resumed(folder: Path) -> None:
    chat, other = started(folder)[0], Chat("other")
    chat.fork("twin", folder)
    with make(folder) as engine:
        num_kept = other.ask(engine, "y" * 300).stats.context_used
    shutil.copy(path_of(folder, "other"), path_of(folder, "work"))
    with make(folder) as engine:
        reply = chat.ask(engine, "go on")
    assert prefilled(reply) == added_by("go on")  # the twin has all of it
    in_common = len("user:")
    assert reply.stats.restored_tokens == in_common
    assert_matches(rf"resumed {in_common} of {num_kept} tokens, \d+ ms", chat.said[0])


def test_two_engines_on_one_folder_keep_their_own_conversations_and_read_each_other_s(folder: Path) -> None:
    a, b = Chat("a"), Chat("b")
    with make(folder) as one, make(folder) as two:
        for turn in range(3):
            for engine, chat in ((one, a), (two, b)):
                reply = chat.ask(engine, f"{chat.name}, turn {turn}")
                assert chat.said == []
                assert turn == 0 or prefilled(reply) == added_by(f"{chat.name}, turn {turn}")
    with make(folder) as engine:
        assert engine.info.kept_conversations == 2
        for chat in (a, b):
            assert prefilled(chat.ask(engine, "go on")) == added_by("go on")


def test_two_engines_take_turns_with_one_conversation_and_each_reads_what_the_other_added(folder: Path) -> None:
    chat, expected = Chat(), Chat()
    with make(folder) as one, make(folder) as two, make(None) as alone:
        for turn in range(6):
            reply = chat.ask((one, two)[turn % 2], f"turn {turn}")
            other = expected.ask(alone, f"turn {turn}")
            assert reply.ids == other.ids
            assert prefilled(reply) == prefilled(other)
            assert len(chat.said) == (turn > 0)
            assert all(line.startswith("resumed ") for line in chat.said)


def test_a_conversation_is_in_use_while_a_turn_of_it_runs(folder: Path) -> None:
    chat, kept = started(folder)
    before = path_of(folder, "work").stat().st_size
    with make(folder) as one, make(folder) as two:
        request = Request(
            prompt_ids=tuple(b"something else " * 20), max_tokens=50, sampling=GREEDY, conversation="work"
        )
        running = one.generate(request)
        while not isinstance(next(running), TextDelta):
            pass
        reply = chat.ask(two, "go on")
        assert chat.said == ["not saved: locked: another goinfer-chat has this conversation open"]
        assert (reply.stats.prefill_reused_tokens, reply.stats.kv_saved_bytes) == (kept, None)
        assert path_of(folder, "work").stat().st_size == before
        for _ in running:
            pass
        assert chat.ask(two, "and on").stats.kv_saved_bytes
        assert chat.said == []


@pytest.mark.parametrize("deleted", [False, True])
def test_a_file_that_was_let_go_of_is_taken_again_only_as_it_was(folder: Path, deleted: bool) -> None:
    _, kept = started(folder)
    path = path_of(folder, "work")
    with KVFile.open(path, identity()) as file:
        for _ in range(2):
            file.pause()
            assert file.go_on()
        assert len(file.ids) == kept
        file.pause()
        time.sleep(0.02)  # the clock of files is coarse
        with KVFile.open(path, identity()):  # it might have been changed
            with pytest.raises(KVFileLockedError):
                file.go_on()
            if deleted:
                path.unlink()
        assert not file.go_on()


def test_the_place_of_a_file_is_taken_again_only_if_there_is_none_yet(folder: Path) -> None:
    folder.mkdir()
    with KVFile.open(path_of(folder, "work"), identity()) as file:
        file.pause()
        assert file.go_on()
        file.pause()
        started(folder)
        assert not file.go_on()


def test_a_start_that_looks_at_a_file_for_a_moment_is_waited_for(folder: Path) -> None:
    _, kept = started(folder)
    naps: list[float] = []
    held = KVFile.open(path_of(folder, "work"), identity())

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        held.close()

    with kept_files._open_patiently(path_of(folder, "work"), identity(), sleep) as file:
        assert len(file.ids) == kept
    assert len(naps) == 1


def test_a_name_that_fits_no_file_is_answered_and_said_once(folder: Path) -> None:
    chat = Chat("../outside")
    with make(folder) as engine:
        reply = chat.ask(engine, "hello")
        assert len(chat.said) == 1
        assert "'../outside' cannot name a conversation's file" in chat.said[0]
        assert reply.stats.kv_saved_bytes is None
        assert prefilled(chat.ask(engine, "go on")) == added_by("go on")
        assert chat.said == []
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="conversations cannot be kept there"):
        load(tmp_path / "no model", kv_folder=tmp_path / "file" / "kept")


# ---------------------------------------------------------------------- full disks, caps, deletion, death
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
