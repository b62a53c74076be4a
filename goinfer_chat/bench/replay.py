"""`bench replay`: the time to the first token, turn by turn, in a session of a coding agent.

The session is fixed (`transcript.py`), so that every engine reads the same words. A turn is timed as the wall clock of
a request for one token of a forced call: the tool that the session calls there, held to its schema, as `run --tool` and
an agent's named calls are. Then the fixed reply is put behind the prompt untimed, so that its keys and values are
cached when the next turn comes, as they are when the model has written the reply itself. So a turn reads what is new to
a model in a live session: the result of a tool, and what the template puts around it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Final, Self

from engine.api import Engine, Message, NamedTool, Request, ToolCall
from engine.errors import UsageError
from goinfer_chat.bench.asking import GREEDY, Progress, ask, tokens_of
from goinfer_chat.bench.more_tools import MORE_TOOLS
from goinfer_chat.bench.peer_process import Peer
from goinfer_chat.bench.report import Summary, table
from goinfer_chat.bench.transcript import STEPS, SYSTEM, TASK, TOOLS

CONVERSATION: Final = "bench-replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """One turn, played once or several times."""

    turn: int
    prompt_tokens: int
    reused_tokens: int
    prefilled_tokens: int
    wall_ms: Summary
    """Of a request for one token."""
    ttft_ms: Summary
    """To the first token known, without running that token through the model."""
    peer_ms: Summary | None = None
    ratio: Summary | None = None
    """The peer's time over ours, turn by turn."""
    without_ms: Summary | None = None
    """The same when nothing is reused."""
    saved: Summary | None = None
    """That time over the one with reuse, turn by turn."""
    restore_ms: Summary | None = None
    """To bring the tokens that are reused back from the disk, when the engine started."""

    def as_object(self) -> dict[str, Any]:
        names = ("wall_ms", "ttft_ms", "without_ms", "saved", "restore_ms", "peer_ms", "ratio")
        figures: dict[str, Summary | None] = {name: getattr(self, name) for name in names}
        return {
            "turn": self.turn,
            "prompt_tokens": self.prompt_tokens,
            "prefill_reused_tokens": self.reused_tokens,
            "prefill_tokens": self.prefilled_tokens,
            **{name: figure.as_object() for name, figure in figures.items() if figure is not None},
        }


def lines(rows: Sequence[TurnRow], peer: str | None) -> list[str]:
    """The table."""
    head = [
        "turn",
        "prompt",
        "reused",
        "prefilled",
        "one token, ms",
        "known after, ms",
        "without reuse, ms",
        "times",
        "restored in, ms",
        peer or "",
        "ratio",
    ]
    return table(
        head,
        [
            [
                str(row.turn),
                f"{row.prompt_tokens:,}",
                f"{row.reused_tokens:,}",
                f"{row.prefilled_tokens:,}",
                row.wall_ms.text(),
                row.ttft_ms.text(),
                row.without_ms.text() if row.without_ms else "",
                row.saved.text(1) if row.saved else "",
                row.restore_ms.text() if row.restore_ms else "",
                row.peer_ms.text() if row.peer_ms else "",
                row.ratio.text(2) if row.ratio else "",
            ]
            for row in rows
        ],
    )


@dataclass(slots=True)
class _Turn:
    """What was measured of one turn so far."""

    counts: set[tuple[int, int, int]] = field(default_factory=set)
    wall: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    def row(self, turn: int) -> TurnRow:
        # Which tokens are reused is a matter of ids, not of time: another count would be a fault.
        ((prompt, reused, prefilled),) = self.counts
        wall, peer = Summary(tuple(self.wall)), Summary(tuple(self.peer)) if self.peer else None
        return TurnRow(
            turn=turn,
            prompt_tokens=prompt,
            reused_tokens=reused,
            prefilled_tokens=prefilled,
            wall_ms=wall,
            ttft_ms=Summary(tuple(self.ttft)),
            peer_ms=peer,
            ratio=peer.over(wall) if peer else None,
            restore_ms=Summary(tuple(self.restore)) if self.restore else None,
        )


class Restarts:
    """One engine after another on one model, with a folder of kept caches between them. A context manager."""

    def __init__(self, make: Callable[[Path], Engine]) -> None:
        """`make` starts an engine that keeps its caches in a folder."""
        self._make = make
        self._folder = ExitStack()
        self._engine = ExitStack()
        self._path: Path | None = None

    def fresh(self) -> Engine:
        """An engine with nothing kept."""
        self._close()
        self._path = Path(self._folder.enter_context(TemporaryDirectory()))
        return self.again()

    def again(self) -> Engine:
        """An engine that finds what the one before it has kept."""
        assert self._path is not None
        self._engine.close()
        return self._engine.enter_context(closing(self._make(self._path)))

    def _close(self) -> None:
        self._engine.close()
        self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()


class Replay:
    """The session with an engine. Raises UsageError for a number of turns that it does not have.

    With `restarts`, every turn but the first is played on an engine that has just been started.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        num_turns: int,
        reuse: bool,
        num_tools: int = len(TOOLS),
        peer: Peer | None = None,
        restarts: Restarts | None = None,
    ) -> None:
        self._tools = tools_of(num_tools)
        if not 1 <= num_turns <= len(STEPS):
            raise UsageError(f"the session has {len(STEPS)} turns; play 1 to {len(STEPS)} of them, not {num_turns}")
        self._engine, self._peer, self._reuse, self._restarts = engine, peer, reuse, restarts
        self._tokens = tokens_of(engine)
        self._prompts: list[tuple[Message, ...]] = []
        messages = [Message(role="system", content=SYSTEM), Message(role="user", content=TASK)]
        self._replies = [tuple(self._tokens.encode(step.reply)) for step in STEPS]
        for n, (step, ids) in enumerate(zip(STEPS[:num_turns], self._replies)):
            self._prompts.append(tuple(messages))
            call = ToolCall(id=f"call_{n}", name=step.tool, arguments=json.dumps(step.arguments))
            result = Message(role="tool", content=step.result, tool_call_id=call.id, name=call.name)
            messages += [Message(role="assistant", content="", ids=ids, tool_calls=(call.as_json(),)), result]

    def play(self, repeat: int, progress: Progress) -> list[TurnRow]:
        """Play the session `repeat` times, each from an empty cache. Raises what Engine.generate raises."""
        turns = [_Turn() for _ in self._prompts]
        self._warm_up()
        for n in range(repeat):
            self._engine.forget(CONVERSATION)
            if self._restarts:
                self._engine = self._restarts.fresh()
            for t, turn in enumerate(turns):
                if self._restarts and t:
                    self._engine = self._restarts.again()
                progress(f"turn {t + 1} of {len(turns)}, session {n + 1} of {repeat}", t / len(turns))
                self._measure(t, turn)
        self._engine.forget(CONVERSATION)
        return [turn.row(number) for number, turn in enumerate(turns, 1)]

    def _request(self, t: int) -> Request:
        return Request(
            messages=self._prompts[t],
            tools=self._tools,
            tool_choice=NamedTool(name=STEPS[t].tool),
            sampling=GREEDY,
            max_tokens=1,
            conversation=CONVERSATION,
        )

    def _warm_up(self) -> None:
        """The first request of a program learns how many rows take how long; it is not the session's first."""
        for _ in range(2):
            self._engine.forget(CONVERSATION)
            ids = ask(self._engine, self._request(0)).reply.prompt_ids
        if self._peer:
            self._peer.prompt(ids)

    def _measure(self, t: int, turn: _Turn) -> None:
        if not self._reuse:
            self._engine.forget(CONVERSATION)
        answer = ask(self._engine, self._request(t))
        stats, prompt_ids = answer.reply.stats, answer.reply.prompt_ids
        assert stats.ttft_ms is not None
        turn.counts.add((stats.prompt_tokens or 0, stats.prefill_reused_tokens or 0, stats.prefill_tokens or 0))
        turn.wall.append(answer.seconds * 1e3)
        turn.ttft.append(stats.ttft_ms)
        if stats.restore_ms is not None:
            turn.restore.append(stats.restore_ms)
        if self._peer:
            turn.peer.append(self._peer.prompt(prompt_ids, reuse=self._reuse and t > 0) * 1e3)
        if self._reuse and t + 1 < len(self._prompts):
            self._write(prompt_ids + self._replies[t])

    def _write(self, ids: tuple[int, ...]) -> None:
        """The reply gets its keys and values, as if the model had written it."""
        ask(self._engine, Request(prompt_ids=ids, sampling=GREEDY, max_tokens=1, conversation=CONVERSATION))
        if self._peer:
            self._peer.prompt(ids, reuse=True)


def tools_of(number: int) -> tuple[dict[str, Any], ...]:
    """So many tools for the prompt, those of the session first. Raises UsageError."""
    tools = (*TOOLS, *MORE_TOOLS)
    if not len(TOOLS) <= number <= len(tools):
        raise UsageError(f"the prompt can have {len(TOOLS)} to {len(tools)} tool schemas, not {number}")
    return tools[:number]


def beside_no_reuse(rows: Sequence[TurnRow], without: Sequence[TurnRow]) -> list[TurnRow]:
    """Turns with reuse, and beside them the same turns without."""
    return [
        replace(row, without_ms=other.wall_ms, saved=other.wall_ms.over(row.wall_ms))
        for row, other in zip(rows, without, strict=True)
    ]
