"""What the measurements of whole requests share: an engine is asked, and its reply comes back with the wall clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Final, Protocol, runtime_checkable

from engine.api import Engine, Finished, PrefillProgress, Reply, Request, SamplingParams
from engine.errors import UsageError

GREEDY: Final = SamplingParams(temperature=0)

Ask = Callable[[Request], Reply]
Progress = Callable[[str, float], None]


class Tokens(Protocol):
    """What replies are made into ids with; engine.tokenizer.Tokenizer is one."""

    @property
    def end_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]: ...


@runtime_checkable
class HasTokens(Protocol):
    """An engine that shows its tokenizer. Not every backend can."""

    @property
    def tokenizer(self) -> Tokens: ...


def tokens_of(engine: Engine) -> Tokens:
    """The engine's tokenizer. Raises UsageError where there is none to see."""
    if not isinstance(engine, HasTokens):
        raise UsageError(f"the backend {engine.info.backend} does not show its token ids; take --backend cpu")
    return engine.tokenizer


@dataclass(frozen=True, slots=True)
class Answer:
    reply: Reply
    seconds: float
    """From the request to the end of the reply."""
    num_chunks: int
    """Steps in which the prompt was read."""


def ask(engine: Engine, request: Request) -> Answer:
    """The engine's reply. Raises what Engine.generate raises."""
    started = perf_counter()
    chunks = 0
    for event in engine.generate(request):
        if isinstance(event, PrefillProgress):
            chunks += 1
        if isinstance(event, Finished):
            return Answer(event.reply, perf_counter() - started, chunks)
    raise AssertionError("an engine ends with Finished or raises")
