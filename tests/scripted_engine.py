"""An engine that plays given text pieces: for tests where the model is not the point.

It keeps to the rules of `engine.api.Engine`: errors come before the first event, `Request.cancel` ends a reply at the
next piece, a piece that is a stop string ends it too, and the figures are those of a cache that holds everything the
conversation had before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.api import (
    Event,
    Finished,
    FinishReason,
    ModelInfo,
    Notice,
    PrefillProgress,
    Progress,
    Prospect,
    Reply,
    Request,
    TextDelta,
    ThinkingDelta,
    ToolCall,
    ToolCallReady,
    TurnStats,
)
from engine.errors import ContextExceededError, EngineError, TemplateError

CONTEXT_SIZE = 8192


@dataclass(frozen=True, kw_only=True)
class ScriptedTurn:
    """What the engine does when it is asked: an error, or a prefill of some chunks and then the pieces."""

    pieces: Sequence[str] = ()
    thinking: Sequence[str] = ()
    """Pieces of reasoning before the pieces."""
    calls: Sequence[Mapping[str, Any]] = ()
    """Tool calls behind the pieces: `name`, and `arguments` as JSON text or as an object. Each counts as one piece."""
    delay: float = 0.0
    """Seconds before each piece."""
    prefill_chunks: int = 1
    chunk_delay: float = 0.0
    """Seconds each chunk of 64 tokens takes."""
    notice: str | None = None
    error: str | None = None
    """One of: context, template, engine, bug."""
    deaf: bool = False
    """Whether it ignores `Request.cancel`."""
    guesses: bool = False
    """Whether tokens are guessed ahead, two of three rightly, and the figures told after each piece."""


class ScriptedEngine:
    """Plays one turn for each request; the last one again and again. `log`: where the last message of each goes."""

    def __init__(
        self,
        turns: Sequence[ScriptedTurn],
        *,
        notices: tuple[str, ...] = (),
        name: str = "Scripted",
        log: Path | None = None,
    ) -> None:
        self._log = log
        self._turns = list(turns)
        self._notices = notices
        self._name = name
        self._cached = 0
        self._seen: dict[str, list[str]] = {}
        self.requests: list[Request] = []
        self.forgotten: list[str] = []
        self.closed = False

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ScriptedEngine:
        turns = [ScriptedTurn(**turn) for turn in data["turns"]]
        log = Path(data["log"]) if "log" in data else None
        return cls(turns, notices=tuple(data.get("notices", ())), name=data.get("name", "Scripted"), log=log)

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            name=self._name,
            architecture="scripted",
            quantization="Q4_1",
            num_parameters=134_515_008,
            num_layers=1,
            vocab_size=100,
            context_size=CONTEXT_SIZE,
            train_context_size=CONTEXT_SIZE,
            kv_bytes_per_token=1,
            weight_bytes=1,
            backend="cpu",
            kernels="AVX2",
            threads=2,
            identity=f"content of {self._name}",
            notices=self._notices,
        )

    def generate(self, request: Request) -> Iterator[Event]:
        turn = self._turns[min(len(self.requests), len(self._turns) - 1)]
        self.requests.append(request)
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as log:
                log.write(json.dumps(request.messages[-1].content) + "\n")
        match turn.error:
            case "context":
                raise ContextExceededError(9000, CONTEXT_SIZE)
            case "template":
                raise TemplateError("the template of this model says:\nroles must alternate")
            case "engine":
                raise EngineError("the engine cannot go on")
            case "bug":
                raise ZeroDivisionError("a bug")
        return self._play(turn, request)

    def _play(self, turn: ScriptedTurn, request: Request) -> Iterator[Event]:
        submitted = time.monotonic()
        total = self.count_tokens(request)
        reused = min(self._cached, total - 1)
        if turn.notice:
            yield Notice(turn.notice)
        for chunk in range(turn.prefill_chunks):
            if request.cancel.is_set() and not turn.deaf:
                yield self._finished(request, turn, 0, reused, "cancelled", None)
                return
            time.sleep(turn.chunk_delay)
            yield PrefillProgress(reused + (total - reused) * (chunk + 1) // turn.prefill_chunks, total, reused)
        played, reason, first = 0, "stop", None
        for piece in turn.thinking:
            time.sleep(turn.delay)
            yield ThinkingDelta(piece)
        for piece in turn.pieces:
            if piece in request.stop:
                break
            time.sleep(turn.delay)
            if request.cancel.is_set() and not turn.deaf:
                reason = "cancelled"
                break
            if request.max_tokens is not None and played == request.max_tokens:
                reason = "length"
                break
            first = first or time.monotonic()
            played += 1
            yield TextDelta(piece)
            if turn.guesses:
                yield Progress(self._stats(request, turn, played, reused, (first - submitted) * 1000))
        calls: list[ToolCall] = []
        for call in turn.calls if reason == "stop" else ():
            time.sleep(turn.delay)
            if request.cancel.is_set() or played == request.max_tokens:
                reason = "cancelled" if request.cancel.is_set() else "length"
                break
            first = first or time.monotonic()
            played += 1
            calls.append(_call(call, f"call-{len(self.requests)}-{len(calls)}"))
            yield ToolCallReady(calls[-1])
        if reason == "stop" and calls:
            reason = "tool_calls"
        self._cached = total + played
        yield self._finished(request, turn, played, reused, reason, first and (first - submitted) * 1000, calls)

    def _finished(
        self,
        request: Request,
        turn: ScriptedTurn,
        played: int,
        reused: int,
        reason: FinishReason,
        ttft_ms: float | None,
        calls: Sequence[ToolCall] = (),
    ) -> Finished:
        stats = self._stats(request, turn, played, reused, ttft_ms)
        text = "".join(turn.pieces[:played])
        self._seen[request.conversation] = [*self._words(request), "assistant", *text.split(), "end"]
        ids, prompt_ids = tuple(range(played)), tuple(range(stats.prompt_tokens))
        return Finished(
            Reply(
                text=text,
                ids=ids,
                prompt_ids=prompt_ids,
                finish_reason=reason,
                stats=stats,
                thinking="".join(turn.thinking) or None,
                tool_calls=tuple(calls),
            )
        )

    def _stats(
        self, request: Request, turn: ScriptedTurn, played: int, reused: int, ttft_ms: float | None
    ) -> TurnStats:
        total = self.count_tokens(request)
        stats = TurnStats(
            prompt_tokens=total,
            prefill_reused_tokens=reused,
            prefill_tokens=total - reused,
            completion_tokens=played,
            ttft_ms=ttft_ms,
            prefill_tok_s=4.0,
            decode_tok_s=20.0 if played > 1 else None,
            context_used=total + played,
            context_size=CONTEXT_SIZE,
            kv_bytes=total + played,
            seed=request.sampling.seed,
        )
        if not turn.guesses:
            return stats
        return replace(stats, draft_tokens=3 * played, draft_accepted=2 * played, acceptance=2 / 3, tokens_per_step=3.0)

    def count_tokens(self, request: Request) -> int:
        return sum(len(message.content.split()) + 2 for message in request.messages)

    def foresee(self, request: Request, forgotten: str | None = None) -> Prospect:
        """As an engine that keeps all conversations."""
        words = self._words(request)
        known = (seen for name, seen in self._seen.items() if name != forgotten)
        reused = max((common_start(seen, words, len(words)) for seen in known), default=0)
        return Prospect(prompt_tokens=len(words), reused_tokens=reused, tok_s=4.0, problem=None)

    def _words(self, request: Request) -> list[str]:
        """As many as `count_tokens` says, and one for each tool in front."""
        tools = [json.dumps(tool) for tool in request.tools]
        return tools + [
            word for message in request.messages for word in (message.role, *message.content.split(), "end")
        ]

    def forget(self, conversation: str) -> None:
        self._seen.pop(conversation, None)
        self._cached = 0
        self.forgotten.append(conversation)

    def close(self) -> None:
        self.closed = True


def common_start(seen: Sequence[str], words: Sequence[str], limit: int) -> int:
    return next((at for at, (a, b) in enumerate(zip(seen, words, strict=False)) if a != b), min(len(seen), limit))


def _call(call: Mapping[str, Any], id: str) -> ToolCall:
    arguments = call.get("arguments", {})
    return ToolCall(
        id=call.get("id", id),
        name=call["name"],
        arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
    )
