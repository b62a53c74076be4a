"""What happens between the replies of a turn that calls tools, besides the events of the engine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from engine.api import Event, Reply, ToolCall
from goinfer_chat.calls.approval_rules import Rule
from tools import Tool, ToolResult

How = Literal["answered", "steps", "budget", "repeat", "cut", "denied", "failed", "interrupted"]
"""How a turn with tools ended. `cut`: --max-tokens, or the end of the context, cut a reply in a call. `denied`:
answered, though a call was refused because nobody could be asked. `failed`: answered, though the last call had not done
what it should."""

EXIT_CODES: Final[Mapping[How, int]] = {
    "answered": 0,
    "steps": 5,
    "budget": 5,
    "repeat": 5,
    "cut": 5,
    "denied": 6,
    "failed": 7,
    "interrupted": 130,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One reply of a turn, as it was kept. `key`: of the message, under which the changes of its calls are kept."""

    reply: Reply
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a turn has cost so far."""

    steps: int = 0
    """Requests to the model."""
    calls: int = 0
    read_tokens: int = 0
    """Prompt tokens that were evaluated; what was in the cache costs nothing."""
    written_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.read_tokens + self.written_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a person says about a call."""

    allowed: bool
    reason: str = ""
    """Why not; it goes to the model."""
    arguments: Mapping[str, Any] | None = None
    """In place of those that the model wrote."""
    always: Rule | None = None
    """What is allowed in this folder from here on."""
    stop: bool = False
    """End the turn."""


class Question:
    """Something a person is to be asked. The turn waits until `answer` is called, from any thread, or is cancelled."""

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def answer(self, answer: Answer) -> None:
        self._answers.put(answer)

    def wait(self, cancel: threading.Event) -> Answer:
        while not cancel.is_set():
            try:
                return self._answers.get(timeout=0.05)
            except queue.Empty:
                continue
        return Answer(allowed=False, stop=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalAsked:
    """May this call run?"""

    call: ToolCall
    tool: Tool
    arguments: Mapping[str, Any]
    preview: str | None
    """A unified diff of what would change."""
    prefix: str | None
    """The first words of the command, where they can be allowed from here on."""
    question: Question = field(default_factory=Question, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatAsked:
    """The same call has had the same result several times: is the turn to go on?"""

    call: ToolCall
    times: int
    question: Question = field(default_factory=Question, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStarted:
    call: ToolCall
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEnded:
    call: ToolCall
    result: ToolResult
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """The results of a step are there, and the model is asked again."""

    cost: Cost
    max_steps: int
    budget: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnded:
    how: How
    cost: Cost


ToolEvent = ApprovalAsked | RepeatAsked | ToolStarted | ToolEnded | StepEnded | TurnEnded
TurnEvent = Event | ToolEvent
