"""A conversation goes on after a restart as if there had been none, at the cost of what is new."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from stand_in import StandInModel, StandInTemplate, StandInTokenizer

from engine.api import Finished, Message, Notice, Reply, Request, SamplingParams
from engine.kv_folder import path_of, prepare
from engine.kv_layout import Identity, KVLayout
from engine.local import LocalEngine
from engine.memory import MemoryPlan

GREEDY = SamplingParams(temperature=0)
HOT = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, seed=7)
CONTEXT = 2048


def identity(model: bytes = b"m" * 32) -> Identity:
    """Of the stand-in: a number of 8 bytes for each position."""
    layout = KVLayout(num_layers=1, parts=((1, 8),))
    return Identity(model=model, architecture="none", rope=b"r" * 32, kv_type="f16", layout=layout)


def make(folder: Path | None, *, kv_sessions: int = 4, model: bytes = b"m" * 32, **settings: int) -> LocalEngine:
    tokenizer = StandInTokenizer()
    gguf = SimpleNamespace(metadata={"general.file_type": 3}, tensors={}, close=lambda: None, content_hash=model.hex)
    plan = MemoryPlan(context_size=CONTEXT, num_blocks=max(1, kv_sessions) * CONTEXT // 64, notices=())
    engine = LocalEngine(gguf, tokenizer, StandInTemplate(tokenizer), StandInModel(), plan, kv_sessions)  # type: ignore[arg-type]
    if folder is not None:
        prepare(folder)
        engine.keep_in(folder, identity(model), **settings)
    return engine


def notices(events: list[object]) -> list[str]:
    return [event.text for event in events if isinstance(event, Notice)]


@dataclass
class Chat:
    """One conversation, with whatever engine there is."""

    name: str = "work"
    messages: list[Message] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """Notices of the last turn."""

    def ask(
        self, engine: LocalEngine, text: str, *, max_tokens: int = 12, cut: int | None = None, **settings: object
    ) -> Reply:
        """A turn; `cut`: cancelled after so many events."""
        self.messages.append(Message(role="user", content=text))
        request = Request(
            messages=tuple(self.messages),
            max_tokens=max_tokens,
            conversation=self.name,
            **{"sampling": GREEDY, **settings},  # type: ignore[arg-type]
        )
        events: list[object] = []
        for event in engine.generate(request):
            events.append(event)
            if len(events) == cut:
                request.cancel.set()
        self.said = notices(events)
        last = events[-1]
        assert isinstance(last, Finished)
        self.messages.append(Message(role="assistant", content=last.reply.text, ids=last.reply.ids))
        return last.reply


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def test_a_restart_costs_what_the_turn_adds_and_says_what_it_resumed(folder: Path) -> None:
    chat, other = Chat(), Chat()
    with make(folder) as engine:
        first = chat.ask(engine, "a long question " * 20)
        assert chat.said == []
        assert first.stats.restored_tokens is None
        saved = first.stats.kv_saved_bytes
    assert saved == path_of(folder, "work").stat().st_size
    with make(None) as never_stopped:
        other.ask(never_stopped, "a long question " * 20)
        expected = other.ask(never_stopped, "and more")
    kept = first.stats.context_used
    with make(folder) as engine:
        info = engine.info
        assert (info.kept_conversations, info.kept_tokens) == (1, kept)
        assert info.kept_ms is not None
        second = chat.ask(engine, "and more")
    assert second.ids == expected.ids
    assert (
        second.stats.prefill_tokens == expected.stats.prefill_tokens == 1 + len("user:and more") + 1 + len("assistant:")
    )
    assert (second.stats.restored_tokens, second.stats.prefill_reused_tokens) == (kept, kept)
    assert second.stats.restore_ms is not None
    assert len(chat.said) == 1
    assert chat.said[0].startswith(f"resumed {kept} of {kept} tokens, ")
    added = second.stats.context_used - kept
    assert 8 * added < second.stats.kv_saved_bytes < 12 * added + 100
