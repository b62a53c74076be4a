"""What the tokens of a reply say: events for the person, and how many tokens the text needs.

Tokens are decoded, told apart (reply_parts.py) and let through as far as the stop strings allow, which look at text
only, not at reasoning and not at calls.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.api import Event, TextDelta, ThinkingDelta, ToolCall, ToolCallReady
from engine.channel_parts import ChannelParts
from engine.grammar import Matcher
from engine.reply_parts import Part, PartSorter, ReplyParts
from engine.reply_plan import ReplyPlan
from engine.stop_strings import StopStrings

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer


class ReplyText:
    """`events` are those not yet handed out; whoever hands them out empties it."""

    def __init__(self, tokenizer: Tokenizer, plan: ReplyPlan, stops: Sequence[str]) -> None:
        self.events: list[Event] = []
        self.calls: tuple[ToolCall, ...] = ()
        self._plan = plan
        self._decoder = tokenizer.stream()
        self._parts: PartSorter = ChannelParts(plan) if plan.has_channels else ReplyParts(plan)
        self._stops = StopStrings(stops)
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._text_start: int | None = None  # in characters of all that was decoded
        self._ends: list[int] = []  # characters decoded up to and with each token
        self._call_begun = False
        self.num_thinking = 0
        """Tokens taken in while the reply reasons; 0 once it answers."""

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def thinking(self) -> str | None:
        return "".join(self._thinking) or None

    @property
    def stop_string(self) -> str | None:
        """The one that ended the reply."""
        return self._stops.found

    def push(self, token: int) -> bool:
        """Take in the next token; True when a stop string ended the reply."""
        marker = self._plan.markers.get(token)
        text = self._decoder.push(token) if marker is None else marker
        self._ends.append((self._ends[-1] if self._ends else 0) + len(text))
        parts = self._parts.push(text)
        self.num_thinking = self.num_thinking + 1 if self._parts.in_thinking else 0
        return self._show(parts)

    def finish(self, *, whole: bool) -> bool:
        """Nothing follows: what was held back is text after all, a cut character becomes U+FFFD. True when a stop
        string turned up in that. `whole`: the reply ended by itself, so a call that it ends with is complete."""
        parts = self._parts.push(self._decoder.finish()) + self._parts.finish()
        if self._show(parts) or self._let_out(self._stops.finish()):
            return True
        if self._parts.in_call:
            calls = self._plan.read(self._parts.call_text, whole=whole)
            if calls is None:
                self._let_out(self._parts.call_text)
            else:
                self.calls = tuple(calls)
                self.events.extend(map(ToolCallReady, calls))
        return False

    def call_matcher(self) -> Matcher | None:
        """Once, when the reply has begun a call by itself: what holds the rest of it."""
        if self._call_begun or not self._parts.in_call or self._plan.forced:
            return None
        self._call_begun = True
        (pending, _), _ = self._decoder.state()
        return None if pending else self._plan.call_matcher(self._parts.call_text, self._parts.bare)

    def num_kept(self) -> int:
        """Tokens up to the one that completes what was let out before a stop string.

        That token's own text may reach into the stop string; a token cannot be cut.
        """
        length = (self._text_start or 0) + sum(map(len, self._text))
        return min(bisect_left(self._ends, length) + 1, len(self._ends)) if length else 0

    def _show(self, parts: Sequence[Part]) -> bool:
        for part in parts:
            if part.kind == "thinking":
                self._thinking.append(part.text)
                self.events.append(ThinkingDelta(part.text))
                continue
            if self._text_start is None:
                self._text_start = part.end - len(part.text)
            text, stopped = self._stops.push(part.text)
            self._let_out(text)
            if stopped:
                return True
        if self._parts.in_call:
            self._let_out(self._stops.finish())
        return False

    def _let_out(self, text: str) -> bool:
        if text:
            self._text.append(text)
            self.events.append(TextDelta(text))
        return False
