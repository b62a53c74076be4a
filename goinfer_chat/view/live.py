"""The live region: rows at the end of the output that are drawn again and again, below those that are final.

It is never taller than the screen and no row of it reaches the last column, so it can always be erased. A frame is one
write in which rows are overwritten, not cleared, so nothing flickers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from goinfer_chat.terminal import Stream
from goinfer_chat.view.cells import Line, cut_line, is_certain, line_width
from goinfer_chat.view.themes import Theme

MIN_COLUMNS: Final = 8
MIN_ROWS: Final = 3
"""On a smaller screen nothing is live: text appears when it is final."""

_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
"""A terminal that knows synchronized updates shows a frame as a whole; others ignore both."""


class LiveRegion:
    """On a stream that `moves`. Whoever makes one calls `close`, or the cursor stays hidden."""

    def __init__(self, stream: Stream, theme: Theme, environ: Mapping[str, str] = os.environ) -> None:
        self._stream = stream
        self._theme = theme
        self._reflows = reflows(environ)
        self._drawn: list[int] = []
        """The width of each row of the region; the cursor stands at the end of the last one."""
        self._columns = 0

    @property
    def columns(self) -> int:
        """Cells of a row."""
        return max(self._stream.size[0] - 1, 1)

    @property
    def max_rows(self) -> int:
        """Rows the region may have; 0 where the screen is too small for one."""
        columns, rows = self._stream.size
        return rows - 1 if columns >= MIN_COLUMNS and rows >= MIN_ROWS else 0

    def show(self, final: Sequence[Line], live: Sequence[Line]) -> None:
        """Put final rows where the region is and the region below them; of a region too tall the end is shown."""
        columns, max_rows = self.columns, self.max_rows
        live = [cut_line(line, columns) for line in live[max(len(live) - max_rows, 0) :]] if max_rows else []
        if not final and not live and not self._drawn:
            return
        parts = [_BEGIN, "" if self._drawn else _HIDE, self._to_top()]
        parts += [self._row(line, columns) + "\r\n" for line in final]
        parts.append("\r\n".join(self._row(line, columns) for line in live))
        parts += ["" if live else "\r", "\x1b[J" if live or self._drawn else "", "" if live else _SHOW, _END]
        self._drawn, self._columns = [line_width(line) for line in live], columns
        self._stream.frame("".join(parts))

    def close(self) -> None:
        """Erase the region; the cursor stands where it was and can be seen."""
        self.show((), ())

    def _row(self, line: Line, columns: int) -> str:
        # The rest of the row is erased before the text: behind a full row the erasing would take its last character.
        # A final row may be longer than the screen: then what stands below goes first.
        erased = "\x1b[K" if line_width(line) <= columns else "\x1b[J"
        return erased + positioned(line, self._theme)

    def _to_top(self) -> str:
        """The cursor to the start of the region's first row.

        When the screen has become narrower, some terminals have broken its rows into several, others have cut them.
        """
        rows = len(self._drawn)
        if self._reflows and self.columns < self._columns:
            rows = sum(max(-(-width // (self.columns + 1)), 1) for width in self._drawn)
        up = min(rows, self._stream.size[1]) - 1
        erased = "\x1b[J" if self._drawn and self.columns != self._columns else ""
        return (f"\x1b[{up}A" if up > 0 else "") + ("\r" if rows else "") + erased


def positioned(line: Line, theme: Theme) -> str:
    """The line with its styles. After text of which terminals disagree how wide it is, the column is set: so what
    follows, such as the border of a table, stands straight in all of them."""
    parts: list[str] = []
    column, certain = 1, True
    for run in line:
        if not certain and run.text.isascii() | run.text.startswith(("│", " ")):
            parts.append(f"\x1b[{column}G")
            certain = True
        parts.append(theme.painted((run,)))
        column += line_width((run,))
        certain = certain and is_certain(run.text)
    return "".join(parts)


def reflows(environ: Mapping[str, str]) -> bool:
    """Whether the terminal breaks rows anew when it becomes narrower. If that is not known, no: then a row too many
    may stay above, but nothing that was said is erased."""
    term = environ.get("TERM", "")
    if term.startswith(("tmux", "screen")):
        return "TMUX" in environ
    if term.startswith(("xterm-kitty", "xterm-ghostty", "alacritty", "foot", "wezterm")):
        return True
    names = ("VTE_VERSION", "KITTY_WINDOW_ID", "WT_SESSION", "KONSOLE_VERSION", "ALACRITTY_WINDOW_ID", "WEZTERM_PANE")
    programs = ("iTerm.app", "Apple_Terminal", "WezTerm", "vscode", "ghostty")
    return any(name in environ for name in names) or environ.get("TERM_PROGRAM") in programs
