"""The parts of a reply whose model sends messages on channels (gpt-oss, OpenAI's "harmony" format).

    <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>

The header of a message, up to `<|message|>`, says what it is; the recipient may stand before the channel too. What is
on the channel commentary without a recipient goes with the reasoning: the model tells what it is about to do.
"""

from __future__ import annotations

import re
from typing import Literal

from engine.reply_parts import Kind, Part
from engine.reply_plan import CHANNEL_MARKERS, ReplyPlan
from engine.stop_strings import overlap

CHANNEL, MESSAGE, START, END, _ = CHANNEL_MARKERS
_HEADER_STARTS = (CHANNEL, START, "to=")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class ChannelParts:
    """As `ReplyParts`. What has been given out is never taken back."""

    def __init__(self, plan: ReplyPlan) -> None:
        self._plan = plan
        self._held = ""
        self._end = 0  # characters taken in
        self._state: Literal["header", "thinking", "text", "call"] = "header"
        self.bare: tuple[str, int] | None = None
        """Of a call: the tool, and where in `call_text` its arguments begin."""
        self.call_text = ""
        """As the model's form of calls has it; "" where there is no call."""

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

    def finish(self) -> list[Part]:
        """Nothing follows: what was held back is what it looks like. A header alone says nothing."""
        parts: list[Part] = []
        if self._state in ("thinking", "text"):
            self._give(parts, len(self._held))
        self._held = ""
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Decide about the start of what is held; True if there may be more to decide."""
        if self._state == "call":
            self.call_text += self._held
            self._held = ""
            return False
        if self._state == "header":
            return self._header()
        ends = [at for marker in (END, START, CHANNEL) if (at := self._held.find(marker)) >= 0]
        if ends:
            self._give(parts, min(ends))
            self._held = self._held.removeprefix(END)
            self._state = "header"
            return True
        self._give(parts, len(self._held) - max(overlap(self._held, marker) for marker in (END, START, CHANNEL)))
        return False

    def _header(self) -> bool:
        begun = self._held.lstrip()
        if not any(start.startswith(begun[: len(start)]) for start in _HEADER_STARTS):
            self._state = "text"  # a model that sends no headers
            return True
        header, found, rest = self._held.partition(MESSAGE)
        if not found:
            return False
        self._held = rest
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self._plan.form is not None:
            form = self._plan.form
            self._state, self.call_text = "call", form.head.lstrip() + recipient[1] + form.between
            self.bare = recipient[1], len(self.call_text)
        elif recipient is None and f"{CHANNEL}final" in header:
            self._state = "text"
        else:
            self._state = "thinking"
        return True

    def _give(self, parts: list[Part], length: int) -> None:
        if length:
            text, self._held = self._held[:length], self._held[length:]
            kind: Kind = "thinking" if self._state == "thinking" else "text"
            parts.append(Part(kind, text, self._end - len(self._held)))
