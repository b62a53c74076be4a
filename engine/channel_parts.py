"""The parts of a reply whose model sends messages on channels (gpt-oss, OpenAI's "harmony" format).

    <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>

The header of a message, up to `<|message|>`, says what it is; the recipient may stand before the channel too. What is
on the channel commentary without a recipient goes with the reasoning: the model tells what it is about to do.
"""

from __future__ import annotations

import re

from engine.reply_parts import Kind, Part, PartSorter
from engine.reply_plan import CHANNEL_MARKERS, ReplyPlan
from engine.stop_strings import overlap

CHANNEL, MESSAGE, START, END, _ = CHANNEL_MARKERS
_HEADER_STARTS = (CHANNEL, START, "to=")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class ChannelParts(PartSorter):
    """Of a model that sends messages on channels."""

    def __init__(self, plan: ReplyPlan) -> None:
        super().__init__(plan)
        self._state = "header"

    def finish(self) -> list[Part]:
        """Nothing follows: what was held back is what it looks like. A header alone says nothing."""
        parts: list[Part] = []
        if self._state in ("thinking", "text"):
            self._give(parts, self._kind, len(self._held))
        self._held = ""
        return parts

    @property
    def _kind(self) -> Kind:
        """Of the message whose header was read last."""
        return "thinking" if self._state == "thinking" else "text"

    def _decide(self, parts: list[Part]) -> bool:
        if self._state == "header":
            return self._header()
        ends = [at for marker in (END, START, CHANNEL) if (at := self._held.find(marker)) >= 0]
        if ends:
            self._give(parts, self._kind, min(ends))
            self._held = self._held.removeprefix(END)
            self._state = "header"
            return True
        held_back = max(overlap(self._held, marker) for marker in (END, START, CHANNEL))
        self._give(parts, self._kind, len(self._held) - held_back)
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
