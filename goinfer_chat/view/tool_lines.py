"""How calls of tools and their results look as text: one line each; long values are cut, long lists counted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from goinfer_chat.amounts import counted
from goinfer_chat.calls.events import Cost, StepEnded, ToolEnded, ToolStarted, TurnEnded

MAX_VALUE: Final = 80
"""Characters of one argument."""
MAX_DIFF_LINES: Final = 200


def call_line(name: str, arguments: Mapping[str, Any]) -> str:
    """`read_file path="a.py" last_line=5`"""
    return " ".join([name, *(f"{key}={_value(value)}" for key, value in arguments.items())])


def _value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 20]}... ({len(text):,} characters)"


def is_cut(value: Any) -> bool:
    """Whether `call_line` shows only the start of the value."""
    return len(json.dumps(value, ensure_ascii=False)) > MAX_VALUE


def started_line(event: ToolStarted) -> str:
    return f"* {call_line(event.call.name, event.arguments)}"


def ended_line(event: ToolEnded) -> str:
    """How it ended, and its text where that is one line, or says what is wrong."""
    result = event.result
    lines = result.text.splitlines() or [""]
    text = lines[0] if len(lines) == 1 else f"{lines[0][:MAX_VALUE]} ... {len(lines):,} lines"
    if result.status != "ok":
        text = " ".join(result.text.split())
    text = text if len(text) <= 2 * MAX_VALUE else f"{text[: 2 * MAX_VALUE]}..."
    seconds = f" ({event.seconds:.1f} s)" if event.seconds >= 0.1 else ""
    status = "" if result.status == "refused" else f"{result.status}: "
    return f"  {status}{text}{seconds}"


def step_line(event: StepEnded) -> str:
    budget = f" of {event.budget:,}" if event.budget is not None else ""
    return f"step {event.cost.steps} of {event.max_steps} | {event.cost.tokens:,}{budget} tokens read and written"


def end_line(event: TurnEnded) -> str | None:
    """What a turn with tools came to; None for a plain reply."""
    why = {
        "answered": "",
        "steps": "stopped: --max-steps is reached | ",
        "budget": "stopped: --token-budget is used up | ",
        "repeat": "stopped: the same call had the same result again and again | ",
        "cut": "the reply was cut in a call, so nothing of it was run; allow more --max-tokens | ",
        "interrupted": "stopped | ",
        "denied": "a call was refused, because nobody could be asked: --allow RULE or --yes lets it run | ",
        "failed": "the last call failed | ",
    }[event.how]
    return f"{why}{_cost(event.cost)}" if event.cost.calls or event.how == "cut" else None


def _cost(cost: Cost) -> str:
    done = f"{counted(cost.steps, 'step')}, {counted(cost.calls, 'call')}"
    return f"{done}, {counted(cost.read_tokens, 'token')} read, {cost.written_tokens:,} written"


def diff_lines(diff: str) -> list[str]:
    lines = diff.splitlines()
    more = [f"[{len(lines) - MAX_DIFF_LINES:,} more lines]"] if len(lines) > MAX_DIFF_LINES else []
    return lines[:MAX_DIFF_LINES] + more
