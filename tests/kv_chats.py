"""Conversations with engines that keep them as files: a stand-in for the model, so that a turn takes no time."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

from stand_in import StandInModel, StandInTemplate, StandInTokenizer

from engine.api import Event, Finished, Message, Notice, Reply, Request, SamplingParams, TextDelta
from engine.kv_folder import path_of, prepare
from engine.kv_layout import Identity, KVLayout
from engine.local import LocalEngine
from engine.memory import MemoryPlan

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


def started(folder: Path, length: int = 400, **settings: object) -> tuple[Chat, int]:
    """A conversation of one turn, and how many positions its file has."""
    chat = Chat()
    with make(folder) as engine:
        return chat, chat.ask(engine, "x" * length, **settings).stats.context_used  # type: ignore[arg-type]


def added_by(text: str) -> int:
    """Prompt tokens that a turn adds to a conversation whose last reply is cached."""
    return len(f"?user:{text}?assistant:")


def prefilled(reply: Reply) -> int:
    return reply.stats.prefill_tokens


def assert_matches(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text), text


def cold_ids(chat: Chat, num_messages: int) -> tuple[int, ...]:
    """The reply that ends the first messages, from an engine that knows nothing."""
    request = Request(messages=tuple(chat.messages[: num_messages - 1]), max_tokens=12, sampling=GREEDY)
    with make(None) as engine:
        *_, last = engine.generate(request)
    assert isinstance(last, Finished)
    return last.reply.ids
