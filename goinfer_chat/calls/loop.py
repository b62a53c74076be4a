"""The loop of a turn with tools: a reply calls tools, their results are the next message, until a reply calls none.

A reply's calls are checked and decided in their order. Those that only read run side by side, others one by one.
Results go to the model in the order of the calls, each with its call's id. Whatever goes wrong with a call is a result.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from engine.api import Event, Message, Notice, Reply, ToolCall
from goinfer_chat.calls.approval import Decision
from goinfer_chat.calls.events import Cost, How, Step, StepEnded, ToolEnded, ToolEvent, ToolStarted, TurnEnded
from goinfer_chat.calls.toolbox import Toolbox
from tools import Checked, Journal, ToolContext, ToolResult, run

MAX_REPEATS: Final = 3
"""Calls of one tool with the same arguments and the same result before a person is asked, or the turn ends."""
MAX_PARALLEL: Final = 8


NextStep = Callable[[Sequence[Message]], Generator[Event, None, Step | None]]
"""Asks the model to go on after these messages; None where the reply was stopped before its first token."""
KeepResults = Callable[[Sequence[Message]], None]
"""Keeps results that no reply follows."""


class ToolLoop:
    """One turn. `how` and `cost` say, during and after it, what became of it."""

    def __init__(
        self, toolbox: Toolbox, journal: Journal, cancel: threading.Event, *, forced: str | None = None
    ) -> None:
        """`forced`: a tool that may be called besides those in use."""
        self.how: How = "answered"
        self.cost = Cost()
        self._toolbox = toolbox
        self._journal = journal
        self._cancel = cancel
        self._offered = frozenset((*toolbox.in_use, *([forced] if forced else [])))
        self._settings = toolbox.settings
        self._seen: dict[tuple[str, str, str], int] = {}
        self._denied = False
        self._last_failed = False

    def run(
        self, first: Step | None, next_step: NextStep, keep: KeepResults
    ) -> Generator[Event | ToolEvent, None, None]:
        """From the first reply to the end of the turn. Raises what the engine raises; results are kept even then."""
        step = first
        while step is not None:
            self._count(step.reply)
            if step.reply.finish_reason != "tool_calls":
                break
            messages, stop = yield from self._answer(step.reply.tool_calls, step.key)
            if not stop:
                stop = yield from self._must_stop(step.reply.tool_calls, messages)
            if stop:
                keep(messages)
                yield TurnEnded(how=self.how, cost=self.cost)
                return
            yield StepEnded(cost=self.cost, max_steps=self._settings.max_steps, budget=self._settings.token_budget)
            step = yield from next_step(messages)
        if step is None or step.reply.finish_reason == "cancelled":
            self.how = "interrupted"
        elif step.reply.finish_reason == "length" and (step.reply.tool_calls or not step.reply.text):
            self.how = "cut"
        elif self._denied:
            self.how = "denied"
        elif self._last_failed:
            self.how = "failed"
        yield TurnEnded(how=self.how, cost=self.cost)

    def run_alone(self, call: ToolCall, key: str, keep: KeepResults) -> Generator[Notice | ToolEvent, None, None]:
        """One call, after which the turn ends."""
        messages, stop = yield from self._answer([call], key)
        keep(messages)
        if not stop:
            self.how = "denied" if self._denied else "failed" if self._last_failed else "answered"
        yield TurnEnded(how=self.how, cost=self.cost)

    def _count(self, reply: Reply) -> None:
        self.cost = Cost(
            steps=self.cost.steps + 1,
            calls=self.cost.calls + len(reply.tool_calls),
            read_tokens=self.cost.read_tokens + (reply.stats.prefill_tokens or 0),
            written_tokens=self.cost.written_tokens + (reply.stats.completion_tokens or 0),
        )

    # -- the calls of one reply ----------------------------------------------------------------------------------------

    def _answer(
        self, calls: Sequence[ToolCall], key: str
    ) -> Generator[Notice | ToolEvent, None, tuple[list[Message], bool]]:
        """The results of all calls, in their order, and whether the turn ends with them."""
        context = self._toolbox.context(self._cancel, self._journal, key)
        results: dict[int, ToolResult] = {}
        waiting: list[tuple[int, Checked]] = []
        stop = False
        for index, call in enumerate(calls):
            checked = self._toolbox.registry.check(call.name, call.arguments)
            if stop or self._cancel.is_set():
                results[index] = ToolResult("cancelled", "the turn was stopped before this call began")
            elif isinstance(checked, ToolResult):
                results[index] = checked
            elif checked.tool.name not in self._offered:
                results[index] = ToolResult("error", f"{call.name} may not be used here")
            elif checked.tool.risk == "reads" and not self._is_denied(checked):
                waiting.append((index, checked))
                yield ToolStarted(call=call, arguments=checked.arguments)
                continue
            else:
                yield from self._run_together(calls, waiting, results, context)
                stop = yield from self._run_one(index, call, checked, results, context)
                continue
            yield ToolEnded(call=call, result=results[index], seconds=0.0)
        yield from self._run_together(calls, waiting, results, context)
        if self._cancel.is_set():
            self.how, stop = "interrupted", True
        ordered = [results[index] for index in range(len(calls))]
        self._last_failed = bool(ordered) and ordered[-1].status in ("error", "timeout")
        return [_message(call, result) for call, result in zip(calls, ordered)], stop

    def _is_denied(self, checked: Checked) -> bool:
        return any(rule.denies(checked.tool, checked.arguments) for rule in self._toolbox.approvals.deny)

    def _run_together(
        self,
        calls: Sequence[ToolCall],
        waiting: list[tuple[int, Checked]],
        results: dict[int, ToolResult],
        context: ToolContext,
    ) -> Generator[ToolEvent, None, None]:
        """Calls that only read, side by side."""
        if not waiting:
            return
        with ThreadPoolExecutor(min(len(waiting), MAX_PARALLEL), thread_name_prefix="tools") as threads:
            running = [(index, threads.submit(_timed, checked, context)) for index, checked in waiting]
            waiting.clear()
            for index, future in running:
                results[index], seconds = future.result()
                yield ToolEnded(call=calls[index], result=results[index], seconds=seconds)

    def _run_one(
        self, index: int, call: ToolCall, checked: Checked, results: dict[int, ToolResult], context: ToolContext
    ) -> Generator[Notice | ToolEvent, None, bool]:
        """A call about which there may be a question. Whether the turn ends with it."""
        decision: Decision = yield from self._toolbox.approvals.decide(call, checked.tool, checked.arguments, context)
        seconds = 0.0
        if decision.refusal is not None:
            results[index] = decision.refusal
            self._denied = self._denied or decision.nobody
        else:
            again = self._toolbox.registry.check(call.name, decision.arguments)
            if isinstance(again, ToolResult):
                results[index] = again
            else:
                yield ToolStarted(call=call, arguments=again.arguments)
                results[index], seconds = _timed(again, context)
                if again.arguments != checked.arguments:
                    results[index] = _with_note(results[index], again.arguments)
        yield ToolEnded(call=call, result=results[index], seconds=seconds)
        if decision.stop:
            self.how = "interrupted"
        return decision.stop

    # -- when it ends --------------------------------------------------------------------------------------------------

    def _must_stop(self, calls: Sequence[ToolCall], messages: Sequence[Message]) -> Generator[ToolEvent, None, bool]:
        settings = self._settings
        if self.cost.steps >= settings.max_steps:
            self.how = "steps"
            return True
        if settings.token_budget is not None and self.cost.tokens >= settings.token_budget:
            self.how = "budget"
            return True
        for call, message in zip(calls, messages):
            same = (call.name, _canonical(call.arguments), message.content)
            self._seen[same] = self._seen.get(same, 0) + 1
            if self._seen[same] < MAX_REPEATS:
                continue
            go_on = yield from self._toolbox.approvals.ask_about_repeat(call, self._seen[same], self._cancel)
            if not go_on:
                self.how = "interrupted" if self._cancel.is_set() else "repeat"
                return True
            self._seen[same] = 0
        return False


def _timed(checked: Checked, context: ToolContext) -> tuple[ToolResult, float]:
    started = time.monotonic()
    result = run(checked, context)
    return result, time.monotonic() - started


def _message(call: ToolCall, result: ToolResult) -> Message:
    """What the model reads; a status that is not `ok` stands before it."""
    text = result.text if result.status in ("ok", "refused") else f"{result.status}: {result.text}"
    return Message(role="tool", content=text, tool_call_id=call.id, name=call.name)


def _with_note(result: ToolResult, arguments: Mapping[str, Any]) -> ToolResult:
    """The model must know that it was not its own call that ran."""
    note = f"[the user changed the arguments to {json.dumps(dict(arguments), ensure_ascii=False)}]"
    return replace(result, text=f"{result.text}\n{note}")


def _canonical(arguments: str) -> str:
    with suppress(ValueError, RecursionError):
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    return arguments
