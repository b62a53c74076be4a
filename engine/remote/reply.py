"""What a stream of chunks adds up to: text, reasoning, calls, figures."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from engine.api import Event, FinishReason, Progress, Reply, TextDelta, ThinkingDelta, ToolCall, TurnStats

PROGRESS_SECONDS = 0.1

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}


@dataclass
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class Incoming:
    """A reply in the making. `push` takes a chunk of the stream as plain JSON and gives the events in it."""

    def __init__(self, submitted: float, context_size: int) -> None:
        self.finish_reason: FinishReason | None = None
        """None until the server has said that the reply is whole."""
        self._submitted = submitted
        self._context_size = context_size
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._first: float | None = None
        self._last: float | None = None
        self._told = submitted
        self._num_chunks = 0
        self._usage: Mapping[str, Any] = {}
        self._timings: Mapping[str, Any] = {}

    @property
    def begun(self) -> bool:
        """Whether anything was said."""
        return self._first is not None

    def push(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """Whatever is missing or has another type than expected counts as not there."""
        self._usage = _mapping(chunk.get("usage")) or self._usage
        self._timings = _mapping(chunk.get("timings")) or self._timings
        choices = chunk.get("choices")
        choice = _mapping(choices[0]) if isinstance(choices, list) and choices else {}
        delta = _mapping(choice.get("delta"))
        thinking = _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
        text, calls = _text(delta.get("content")), delta.get("tool_calls")
        if thinking or text or calls:
            self._last = perf_counter()
            self._first = self._first or self._last
            self._num_chunks += 1
        if thinking:
            self._thinking.append(thinking)
            yield ThinkingDelta(thinking)
        if text:
            self._text.append(text)
            yield TextDelta(text)
        for part in calls if isinstance(calls, list) else ():
            self._add_call(_mapping(part))
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self.finish_reason = _REASONS.get(reason, "stop")
        if self._last is not None and self._last - self._told >= PROGRESS_SECONDS:
            self._told = self._last
            yield Progress(self.stats())

    def _add_call(self, part: Mapping[str, Any]) -> None:
        """Parts of a call have its index; a server that leaves it out begins a new call with each new id."""
        index, function = part.get("index"), _mapping(part.get("function"))
        if not isinstance(index, int):
            last = max(self._calls, default=-1)
            index = last if last >= 0 and part.get("id") in (None, "", self._calls[last].id) else last + 1
        call = self._calls.setdefault(index, _Call())
        call.id = call.id or _text(part.get("id"))
        call.name = call.name or _text(function.get("name"))
        arguments = function.get("arguments")
        call.arguments.append(arguments if isinstance(arguments, str) else "")

    def calls(self) -> tuple[ToolCall, ...]:
        """The calls so far, in order; whole once the reply is."""
        return tuple(
            ToolCall(
                id=call.id or f"call_{secrets.token_hex(8)}", name=call.name, arguments="".join(call.arguments) or "{}"
            )
            for _, call in sorted(self._calls.items())
        )

    def reply(self, finish_reason: FinishReason) -> Reply:
        """What there is, ended for this reason. Calls are only handed out whole."""
        whole = finish_reason in ("stop", "tool_calls")
        calls = self.calls() if whole else ()
        return Reply(
            text="".join(self._text),
            ids=(),
            prompt_ids=(),
            finish_reason="tool_calls" if calls else finish_reason,
            stats=self.stats(),
            thinking="".join(self._thinking) or None,
            tool_calls=calls,
        )

    def stats(self) -> TurnStats:
        """TTFT and the rate of decoding are measured here; the rest is what the server says, and None where it does
        not. `timings` has llama.cpp's names, or ours from a server of this program."""
        usage, timings = self._usage, self._timings
        prompt = _count(usage.get("prompt_tokens"))
        reused = _count(_mapping(usage.get("prompt_tokens_details")).get("cached_tokens"))
        reused = _count(timings.get("cache_n")) if reused is None else reused
        read = _first_count(timings, "prompt_n", "prefill_tokens")
        if read is None and prompt is not None and reused is not None:
            read = max(0, prompt - reused)
        said = _count(usage.get("completion_tokens"))
        known = said if said is not None else self._num_chunks
        seconds = None if self._first is None or self._last is None else self._last - self._first
        drafted = _first_count(timings, "draft_n", "draft_tokens")
        accepted = _first_count(timings, "draft_n_accepted", "draft_accepted")
        return TurnStats(
            prompt_tokens=prompt,
            prefill_reused_tokens=reused,
            prefill_tokens=read,
            completion_tokens=said if said is not None or self.finish_reason is None else None,
            ttft_ms=None if self._first is None else (self._first - self._submitted) * 1e3,
            prefill_tok_s=_number(timings.get("prompt_per_second")) or _number(timings.get("prefill_tok_s")),
            decode_tok_s=(known - 1) / seconds if seconds and known > 1 else None,
            context_used=None if prompt is None or said is None else prompt + said,
            context_size=self._context_size,
            kv_bytes=_count(timings.get("kv_bytes")),
            seed=_count(timings.get("seed")),
            forced_tokens=_count(timings.get("forced_tokens")),
            draft_tokens=drafted,
            draft_accepted=accepted,
            acceptance=accepted / drafted if drafted and accepted is not None else None,
            tokens_per_step=_number(timings.get("tokens_per_step")),
            undrafted_steps=_count(timings.get("undrafted_steps")),
            draft_saved_ms=_number(timings.get("draft_saved_ms"), above=-math.inf),
            draft_pauses=_count(timings.get("draft_pauses")),
            restore_ms=_number(timings.get("restore_ms")),
            restored_tokens=_count(timings.get("restored_tokens")),
            kv_saved_bytes=_count(timings.get("kv_saved_bytes")),
        )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _first_count(timings: Mapping[str, Any], *names: str) -> int | None:
    return next((count for name in names if (count := _count(timings.get(name))) is not None), None)


def _number(value: Any, above: float = 0.0) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value > above else None
