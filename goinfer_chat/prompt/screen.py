"""The terminal as the line editor writes to it."""

from __future__ import annotations

import os
from typing import Final

from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.styles import Attrs

from goinfer_chat.terminal import Stream
from goinfer_chat.view.colours import depth_of

PASTE_MODE_ON: Final = "\x1b[?2004h"
PASTE_MODE_OFF: Final = "\x1b[?2004l"
"""Bracketed paste: a terminal marks what was pasted, so a line end in it is no Enter."""


class Screen(Vt100_Output):
    """A terminal that is never asked where its cursor is, and has no styles where NO_COLOR is set.

    The answer to such a question comes in as typing, late on a slow line and never in a script's pty.
    """

    stream: Stream

    @classmethod
    def on(cls, stream: Stream) -> Screen:
        assert stream.file is not None
        screen = cls.from_pty(stream.file, term=os.environ.get("TERM"))
        assert isinstance(screen, cls)
        screen.stream = stream
        return screen

    @property
    def responds_to_cpr(self) -> bool:
        return False

    def get_rows_below_cursor_position(self) -> int:
        """At least the prompt's own row. Without an answer the toolbar would wait for one from the terminal."""
        return 1

    def erase_down(self) -> None:
        """From the start of a row. At the top of the screen tmux would move what is erased into the scrollback."""
        self.write_raw("\x1b7\x1b[K\x1b[B\x1b[J\x1b8")

    def erase_screen(self) -> None:
        super().erase_screen()
        self.stream.lost_track()

    def get_default_color_depth(self) -> ColorDepth:
        """As many colours as replies have: a TERM that prompt_toolkit does not know would get a palette of 256."""
        return {8: ColorDepth.DEPTH_8_BIT, 24: ColorDepth.DEPTH_24_BIT}.get(
            depth_of(os.environ), ColorDepth.DEPTH_1_BIT
        )

    def set_attributes(self, attrs: Attrs, color_depth: ColorDepth) -> None:
        if self.stream.colour:
            super().set_attributes(attrs, color_depth)

    def reset_attributes(self) -> None:
        if self.stream.colour:
            super().reset_attributes()
