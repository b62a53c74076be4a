"""Pasted text comes in as one piece, and a paste without an end can be left."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from prompt_toolkit.input.base import Input
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding.key_processor import KeyPress

_CTRL_C: Final = "\x03"
_END_OF_PASTE: Final = "\x1b[201~"
IDLE_SECONDS: Final = 0.3
"""A Ctrl-C that comes by itself this long after the last piece of a paste was pressed, not pasted."""


class PasteParser(Vt100Parser):
    """Keys from what the terminal sends. A paste whose end never comes is closed by Ctrl-C, which then counts."""

    def __init__(
        self, feed_key_callback: Callable[[KeyPress], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(feed_key_callback)
        self._clock = clock
        self._fed_at = clock()

    def feed(self, data: str) -> None:
        idle, self._fed_at = self._clock() - self._fed_at, self._clock()
        if self._in_bracketed_paste and data == _CTRL_C and idle > IDLE_SECONDS:
            super().feed(_END_OF_PASTE)
        super().feed(data)


def mend_pasting(source: Input) -> None:
    """Give an input of a terminal the parser above; others have no pastes."""
    parser = getattr(source, "vt100_parser", None)
    if isinstance(parser, Vt100Parser):
        source.vt100_parser = PasteParser(parser.feed_key_callback)  # type: ignore[attr-defined]
