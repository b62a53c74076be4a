"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, however the text is cut into pieces.

    The first one is the one whose last character comes first; of several that end there, the longest. Text at the end
    that could still become a stop string is held back until it is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops)
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """The one that ended the text."""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that may be shown, and whether a stop string follows it (then nothing may be pushed any more)."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            end, start = min(found)
            self.found = text[start:end]
            return text[:start], True
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """The text still held back: nothing follows that could make it a stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))
