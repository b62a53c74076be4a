"""How a turn is shown: as text while it streams, or as one JSON object.

A view gets the events of a turn, and a tick at least ten times a second while nothing happens.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final, Protocol

from engine.api import (
    Finished,
    ModelInfo,
    Notice,
    PrefillProgress,
    Progress,
    Reply,
    TextDelta,
    ThinkingDelta,
    ToolCall,
    TurnStats,
)
from engine.errors import ContextExceededError, GoinferError
from goinfer_chat.amounts import counted, size
from goinfer_chat.calls.events import EXIT_CODES, StepEnded, ToolEnded, ToolStarted, TurnEnded, TurnEvent
from goinfer_chat.terminal import Stream
from goinfer_chat.view.tool_lines import end_line, ended_line, started_line, step_line

PROGRESS_AFTER_SECONDS: Final = 0.5
"""A prefill that is done sooner needs no progress line: it would only flicker."""


class View(Protocol):
    def event(self, event: TurnEvent) -> None: ...

    def tick(self) -> None: ...

    def pause(self) -> None:
        """Leave the terminal to somebody else until the next tick or event."""
        ...

    def close(self) -> None:
        """The turn is over, however it ended."""
        ...


class TextView:
    """The reply on one stream as it comes; progress, notices and the line of figures on the other."""

    def __init__(
        self,
        replies: Stream,
        side: Stream,
        *,
        quiet: bool = False,
        progress: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`progress`: whether a line may come and go while the prompt is read."""
        self._progress = progress and not quiet
        self._replies = replies
        self._side = side
        self._quiet = quiet
        self._clock = clock
        self._started = clock()
        self._prefill: PrefillProgress | None = None
        self._replying = False
        self._held: list[str] = []

    def event(self, event: TurnEvent) -> None:
        match event:
            case PrefillProgress():
                self._prefill = event
                self.tick()
            case TextDelta():
                self._replying = True
                self._side.clear_status()
                self._replies.write(event.text)
            case ThinkingDelta() if not self._quiet:
                # What a model thinks is no answer: here only that it does is shown.
                self._side.status("thinking")
            case Notice() if not self._quiet:
                self._notice(event.text)
            case Finished():
                self._finish(event.reply)
            case ToolStarted() | ToolEnded() | StepEnded() | TurnEnded() if not self._quiet:
                self._tool(event)
            case _:
                pass

    def tick(self) -> None:
        waited = self._clock() - self._started
        if self._prefill and not self._replying and self._progress and waited >= PROGRESS_AFTER_SECONDS:
            self._side.status(prefill_line(self._prefill))

    def pause(self) -> None:
        self._side.clear_status()

    def close(self) -> None:
        self._side.clear_status()
        self._replies.end_line()
        while self._held:
            self._side.line(self._held.pop(0), dim=True)

    def _notice(self, text: str) -> None:
        """At once, but not amid a reply where both may be on one terminal."""
        if self._replying and self._replies.terminal and self._side.terminal:
            self._held.append(text)
        else:
            self._side.line(text, dim=True)

    def _tool(self, event: ToolStarted | ToolEnded | StepEnded | TurnEnded) -> None:
        self.close()
        match event:
            case ToolStarted():
                line: str | None = started_line(event)
            case ToolEnded():
                line = ended_line(event)
            case StepEnded():
                line = step_line(event)
            case TurnEnded():
                line = end_line(event)
        if line is not None:
            self._side.line(line, dim=True)

    def _finish(self, reply: Reply) -> None:
        self.close()
        self._started, self._prefill, self._replying = self._clock(), None, False  # another reply may follow
        if not self._quiet:
            self._side.line(closing_line(reply, self._side.size[0] if self._side.terminal else 1000), dim=True)


class JsonView:
    """Lines of JSON on the reply stream; progress and notices on the other.

    One object for a reply, when it is finished. In a turn with tools, and with `events`, each object says which `event`
    it is; with `events` there is also one for everything that happens meanwhile (docs/events.schema.json).
    """

    def __init__(
        self,
        replies: Stream,
        side: Stream,
        *,
        ids: bool = False,
        quiet: bool = False,
        tools: bool = False,
        events: bool = False,
    ) -> None:
        self._replies = replies
        self._progress = TextView(Stream(None), side, quiet=quiet)
        self._ids = ids
        self._tools = tools
        self._events = events

    def event(self, event: TurnEvent) -> None:
        match event:
            case Finished(reply=reply):
                self._progress.close()
                self._replies.write(to_json(self._reply(reply)))
            case ToolStarted(call=call, arguments=arguments):
                self._write("call", id=call.id, name=call.name, arguments=dict(arguments))
            case ToolEnded(call=call, result=result, seconds=seconds):
                about = {"id": call.id, "name": call.name, "status": result.status, "text": result.text}
                self._write("result", **about, seconds=round(seconds, 3))
            case TurnEnded(how=how, cost=cost):
                self._write("end", how=how, exit_code=EXIT_CODES[how], **asdict(cost))
            case StepEnded():
                pass
            case _ if self._events:
                self._meanwhile(event)
            case _:
                self._progress.event(event)

    def _meanwhile(self, event: TurnEvent) -> None:
        match event:
            case PrefillProgress(done=done, total=total, reused=reused):
                self._write("prefill", done=done, total=total, reused=reused)
            case Progress(stats=stats):
                self._write("progress", **figures(stats))
            case TextDelta(text=text):
                self._write("text", text=text)
            case ThinkingDelta(text=text):
                self._write("thinking", text=text)
            case Notice(text=text):
                self._write("notice", text=text)
            case _:
                pass

    def _reply(self, reply: Reply) -> dict[str, Any]:
        shown = reply_object(reply, ids=self._ids)
        if not (self._tools or self._events or reply.tool_calls):
            return shown
        return {"event": "reply", **shown, "tool_calls": [call_object(call) for call in reply.tool_calls]}

    def _write(self, kind: str, **values: Any) -> None:
        self._progress.close()
        self._replies.write(to_json({"event": kind, **values}))

    def tick(self) -> None:
        self._progress.tick()

    def pause(self) -> None:
        self._progress.pause()

    def close(self) -> None:
        self._progress.close()


def closing_line(reply: Reply, columns: int = 1000) -> str:
    """What stands below a reply; in few columns some of it is shorter or left out, so that it is one row."""
    if reply.finish_reason == "cancelled" and not (reply.ids or reply.text):
        return "stopped before the reply began; the message was not kept"
    return stats_line(reply, columns)


def call_object(call: ToolCall) -> dict[str, Any]:
    """A call as --json shows it: the arguments as an object, or as text if they are not JSON."""
    arguments: Any = call.arguments
    with suppress(ValueError, RecursionError):
        values = json.loads(call.arguments or "{}")
        json.dumps(values, allow_nan=False)  # NaN and 1e999 are read, and cannot be written
        arguments = values
    return {"id": call.id, "name": call.name, "arguments": arguments}


def prefill_line(progress: PrefillProgress) -> str:
    reused = f", {progress.reused:,} of them reused" if progress.reused else ""
    share = progress.done / max(progress.total, 1)
    return f"reading the prompt: {progress.done:,} of {progress.total:,} tokens{reused} ({share:.0%})"


def stats_line(reply: Reply, columns: int = 1000) -> str:
    """The figures of a turn on one line, as many as fit; those that are not known are left out.

    What was reused goes last of all: it says whether the turn cost only what was added to it.
    """
    stats = reply.stats
    guesses = shorter = ""
    if stats.draft_tokens:
        accepted = stats.draft_accepted or 0
        guesses = f"{accepted:,} of {stats.draft_tokens:,} guesses right"
        shorter = f"guesses {accepted / stats.draft_tokens:.0%} right"
    prompt = prompt_figures(stats) if stats.prompt_tokens is not None else ""
    ttft = f"TTFT {stats.ttft_ms:,.0f} ms" if stats.ttft_ms is not None else ""
    rate = f"{stats.decode_tok_s:.1f} tok/s" if stats.decode_tok_s is not None else ""
    bare = prompt.partition(" (")[0]
    knows = bare and stats.prefill_reused_tokens is not None
    reused = f"{bare} ({stats.prefill_reused_tokens:,} reused)" if knows else bare
    end = _why_it_is_not_complete(reply)
    lines = [
        " | ".join(filter(None, parts))
        for parts in (
            (prompt, ttft, rate, guesses, end),
            (prompt, ttft, rate, shorter, end),
            (reused, ttft, rate, shorter, end),
            (reused, ttft, rate, end),
            (reused, rate, end),
            (reused, end),
            (bare, end),
        )
    ]
    return next((line for line in lines if len(line) <= columns), lines[-1])


def _why_it_is_not_complete(reply: Reply) -> str:
    stats = reply.stats
    match reply.finish_reason:
        case "cancelled":
            return "stopped"
        case "dropped":
            return "cut: the connection broke off"
        case "length":
            full = (stats.context_used or 0) >= stats.context_size > 0
            return "cut: the context is full" if full else "cut at --max-tokens"
        case _:
            return ""


def prompt_figures(stats: TurnStats) -> str:
    """Such as "prompt 65 (47 reused, 18 prefilled)"; a server may tell only some of it."""
    counts = [(stats.prefill_reused_tokens, "reused"), (stats.prefill_tokens, "prefilled")]
    counts += [(stats.recomputed_tokens, "again")] if stats.recomputed_tokens else []
    known = ", ".join(f"{count:,} {what}" for count, what in counts if count is not None)
    return f"prompt {stats.prompt_tokens or 0:,} ({known or 'how many were reused is not known'})"


def banner(info: ModelInfo, columns: int = 1000) -> list[str]:
    """At most three lines: the model and what runs it; what is kept in memory; notices, if any, and what to type.

    Each has as many parts as fit into `columns`, but notices are whole.
    """
    if info.backend == "remote":
        return [
            _fitting([f"{info.name} on {info.kernels}", *_context(info)], columns),
            f"{'; '.join(info.notices)} | {_KEYS[0]}" if info.notices else _fitting(_KEYS, columns, mark=""),
        ]
    size = f"{info.num_parameters / 1e6:,.0f}M" if info.num_parameters < 1e9 else f"{info.num_parameters / 1e9:.1f}B"
    facts = f" ({size}, {info.quantization}) | context {info.context_size:,} | {info.computed_by}"
    name = info.name if len(info.name + facts) <= columns else info.name[: max(columns - len(facts) - 1, 12)] + "…"
    kept = _kept_in_memory(info, columns)
    cache = _cache(info)
    beside = bool(kept) and len(f"{kept} | {cache}") <= columns
    below = [cache] if kept and not beside and len(f"{cache} | {_KEYS[0]}") <= columns and not info.notices else []
    return [
        _fitting((name + facts).split(" | "), columns),
        *([f"{kept} | {cache}" if beside else kept] if kept else []),
        f"{'; '.join(info.notices)} | {_KEYS[0]}" if info.notices else " | ".join([*below, _keys(columns, below)]),
    ]


def _context(info: ModelInfo) -> list[str]:
    return [f"context {info.context_size:,}"] if info.context_size else []


_KEYS: Final = ("/help lists the commands", "; Ctrl-C stops a reply", ", Ctrl-D ends")


def notices(info: ModelInfo) -> list[str]:
    """What a person should know where there is no banner: what could not be done as it was asked for."""
    return [*info.notices, *([info.session_reuse] if info.fewer_sessions else [])]


def _keys(columns: int, before: Sequence[str]) -> str:
    return _fitting(_KEYS, columns - sum(len(part) + 3 for part in before), mark="")


def _fitting(parts: Sequence[str], columns: int, mark: str = " | ") -> str:
    line, *others = parts
    for part in others:
        line += mark + part if len(line + mark + part) <= columns else ""
    return line


def _kept_in_memory(info: ModelInfo, columns: int) -> str:
    """What stays in memory and what came back from the disk, shorter where that does not fit."""
    if not info.session_reuse or not info.kept_conversations:
        return info.session_reuse
    num, tokens, ms = info.kept_conversations, f"{info.kept_tokens or 0:,}", f"{info.kept_ms or 0:,.0f} ms"
    line = f"{info.session_reuse} | {counted(num, 'conversation')} back with {tokens} tokens in {ms}"
    return line if len(line) <= columns else _fitting([info.session_reuse, f"{num} back: {tokens} tok, {ms}"], columns)


def _cache(info: ModelInfo) -> str:
    """What the K/V of a position take, and those of a full context."""
    kv_type = f" ({info.kv_type})" if info.kv_type else ""
    in_all = size(info.kv_bytes_per_token * info.context_size)
    line = f"cache {info.kv_bytes_per_token:,} bytes a token{kv_type}, {in_all} when full"
    if info.state_bytes:
        line += f" | state {size(info.state_bytes)}, {info.state_slots} kept at most"
    return line


def reply_object(reply: Reply, *, ids: bool) -> dict[str, Any]:
    """The object of --json (docs/cli.md)."""
    said = {"text": reply.text, "thinking": reply.thinking, "finish_reason": reply.finish_reason}
    shown = said | figures(reply.stats)
    return shown | ({"prompt_ids": reply.prompt_ids, "reply_ids": reply.ids} if ids else {})


def figures(stats: TurnStats) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(stats).items()}


def error_object(error: Exception) -> dict[str, Any]:
    """What --json prints in place of a turn that failed (docs/cli.md)."""
    shown: dict[str, Any] = {"type": type(error).__name__, "message": str(error), "exit_code": exit_code(error)}
    if isinstance(error, ContextExceededError):
        shown |= {"prompt_tokens": error.prompt_tokens, "context_size": error.context_size}
    return {"error": shown}


def exit_code(error: Exception) -> int:
    return error.exit_code if isinstance(error, GoinferError) else GoinferError.exit_code


def report_error(error: Exception, side: Stream, advice: str = "") -> None:
    """One line for a person; GOINFER_CHAT_DEBUG=1 adds the traceback of an unexpected error.

    `advice`: what can be done just there, behind what the error says.
    """
    if isinstance(error, GoinferError):
        side.line(f"error: {one_line(str(error))}{advice and '; '}{advice}")
        return
    if os.environ.get("GOINFER_CHAT_DEBUG"):
        side.line("".join(traceback.format_exception(error)).rstrip("\n"))
    name = type(error).__name__
    side.line(f"error: unexpected {name}: {one_line(str(error))} (GOINFER_CHAT_DEBUG=1 shows where)")


def one_line(text: str) -> str:
    return " ".join(text.split())


def to_json(value: dict[str, Any]) -> str:
    """One line. ASCII only, so that any locale can write it and no text in it can steer a terminal."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False) + "\n"
