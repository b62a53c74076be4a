"""A reply told apart while it is generated: reasoning, text for the person, calls of tools.

A `PartSorter` takes decoded text in pieces of any size. A marker is never shown, nor is half of one: text that could
still become one is held back until it is decided.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import Literal, NamedTuple

from engine.reply_plan import ReplyPlan
from engine.stop_strings import overlap
from engine.tool_calls import BareCall

Kind = Literal["thinking", "text", "call"]


class Part(NamedTuple):
    """A stretch of a reply of one kind."""

    kind: Kind
    text: str
    end: int
    """Characters of the whole reply up to the end of this part."""


class PartSorter(ABC):
    """Sorts the text of a reply into parts. What has been given out is never taken back."""

    def __init__(self, plan: ReplyPlan) -> None:
        self.bare: tuple[str, int] | None = None
        """Of a call without an opener: the tool, and where in `call_text` its arguments begin."""
        self.call_text = ""
        """The call so far, as the model's form of calls has it; "" where there is none."""
        self._plan = plan
        self._held = ""
        self._end = 0  # characters taken in
        self._state: Literal["start", "header", "thinking", "text", "call"] = "text"

    @property
    def in_call(self) -> bool:
        return self._state == "call"

    @property
    def in_thinking(self) -> bool:
        return self._state == "thinking"

    def push(self, text: str) -> list[Part]:
        """The parts that are decided by now."""
        self._end += len(text)
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    @abstractmethod
    def finish(self) -> list[Part]:
        """Nothing follows: the parts of what was held back."""

    def _step(self, parts: list[Part]) -> bool:
        """Decide about the start of what is held; True if there may be more to decide."""
        if self._state == "call":
            self.call_text += self._held
            self._held = ""
            return False
        return self._decide(parts)

    @abstractmethod
    def _decide(self, parts: list[Part]) -> bool:
        """As `_step`, outside of a call."""

    def _give(self, parts: list[Part], kind: Kind, length: int) -> None:
        """The first `length` characters of what is held are a part."""
        if length:
            text, self._held = self._held[:length], self._held[length:]
            parts.append(Part(kind, text, self._end - len(self._held)))


class ReplyParts(PartSorter):
    """Of a model that marks its reasoning (reasoning.py) and its calls with an opener."""

    def __init__(self, plan: ReplyPlan) -> None:
        super().__init__(plan)
        self._shown = False  # some text has been given out
        self._bare = BareCall(plan.names) if plan.form is not None and plan.form.has_bare_form else None
        self._opener = plan.form.opener if plan.form is not None else ""
        self._inner = plan.form.inner_starts(plan.names) if plan.form is not None and self._opener else []
        self._marks = plan.reasoning
        self._code = _Code()
        self._trims = False  # blanks before the next text are dropped
        if plan.thinking:
            self._state, self._trims = "thinking", True
        elif plan.forced:
            self._state = "call"
        elif plan.thinks:
            self._state = "start"

    def finish(self) -> list[Part]:
        """Nothing follows: what was held back is what it looks like."""
        parts: list[Part] = []
        if self._state == "thinking":
            self._give(parts, "thinking", len(self._held.rstrip()))
        elif self._state != "call":
            self._give(parts, "text", len(self._held))
        self._held = ""
        return parts

    def _decide(self, parts: list[Part]) -> bool:
        if self._trims:
            self._held = self._held.lstrip()
            if not self._held:
                return False
            self._trims = False
        if self._state == "start":
            return self._start()
        if self._state == "thinking":
            return self._think(parts)
        return self._text(parts)

    def _start(self) -> bool:
        text = self._held.lstrip()
        if text.startswith(self._marks.begin):
            self._held = text[len(self._marks.begin) :]
            self._state, self._trims = "thinking", True
        elif self._marks.begin.startswith(text):
            return False
        else:
            self._state = "text"
        return True

    def _think(self, parts: list[Part]) -> bool:
        end = self._held.find(self._marks.end)
        if end < 0:
            shown = len(self._held) - overlap(self._held, self._marks.end)
            self._give(parts, "thinking", len(self._held[:shown].rstrip()))
            return False
        self._give(parts, "thinking", len(self._held[:end].rstrip()))
        self._held = self._held.lstrip()[len(self._marks.end) :]
        self._state, self._trims = "call" if self._plan.forced else "text", True
        return True

    def _text(self, parts: list[Part]) -> bool:
        if self._plan.form is None:
            self._give(parts, "text", len(self._held))
            return False
        if self._opener and (start := self._held.find(self._opener)) >= 0:
            if self._code.holds(self._held[:start]) and not self._opener.startswith("```"):
                self._give(parts, "text", start + len(self._opener))
                return True
            self._give(parts, "text", len(self._held[:start].rstrip()))
            self._held = self._held.lstrip()
            self._state = "call"
            return True
        if (start := self._inner_start()) >= 0:
            self._give(parts, "text", len(self._held[:start].rstrip()))
            if not any(self._held.lstrip().startswith(inner) for inner in self._inner):
                return False
            self._held = self._opener + self._held.lstrip()  # as if it had been written
            self._state = "call"
            return True
        if self._bare is not None and not self._shown:
            self.bare = self._bare.find(self._held)
            if self.bare is not None:
                self._state = "call"
                return True
            if self._bare.possible(self._held):
                return False
        shown = len(self._held) - (overlap(self._held, self._opener) if self._opener else 0)
        self._give(parts, "text", len(self._held[:shown].rstrip()))
        return False

    def _inner_start(self) -> int:
        """Where a call begins, or may, that has no opener; -1 where none does."""
        for start in (i for i, c in enumerate(self._held) if c == "<") if self._inner else ():
            rest = self._held[start:]
            if any(rest.startswith(inner) or inner.startswith(rest) for inner in self._inner):
                return -1 if self._code.holds(self._held[:start]) else start
        return -1

    def _give(self, parts: list[Part], kind: Kind, length: int) -> None:
        if kind == "text":
            self._code.follow(self._held[:length])
            self._shown = self._shown or length > 0
        super()._give(parts, kind, length)


class _Code:
    """Whether a text has come to code: what looks like a call there shows how one is written.

    A block that the text begins with is none, since small models put their calls into blocks.
    """

    def __init__(self) -> None:
        self._line = ""
        self._fenced = False
        self._begun = False  # something stands before
        self._counts = False  # as code

    def follow(self, text: str) -> None:
        """The text goes on."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line.lstrip().startswith("```"):
                self._fenced = not self._fenced
                self._counts = self._begun
            self._begun = self._begun or bool(line.strip())

    def holds(self, text: str) -> bool:
        """Whether code would be open after this text too."""
        ahead = copy(self)
        ahead.follow(text)
        return (ahead._fenced and ahead._counts) or ahead._line.count("`") % 2 == 1
