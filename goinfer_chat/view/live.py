"""The live region: rows at the end of the output that are drawn again and again, below those that are final.

What has scrolled away cannot be erased, so the region is never taller than the screen and no row of it reaches the last
column. A terminal that becomes narrower may break rows into several and so push the upper ones out: therefore only so
many rows are live that their pieces would still be on the screen (`survives`). And because such a terminal may be ahead
of what it told about its size, nothing is live while the size goes on changing.

A frame is one write in which rows are overwritten, not cleared, so nothing flickers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from goinfer_chat.terminal import Stream
from goinfer_chat.view.cells import Line, cut_line, is_certain, line_width, num_pieces
from goinfer_chat.view.themes import Theme

MIN_COLUMNS: Final = 8
MIN_ROWS: Final = 3
"""On a smaller screen nothing is live: text appears when it is final."""

NARROWEST: Final = 20
"""Columns; narrower screens than this are not prepared for."""

CALM_SECONDS: Final = 0.4
"""After a change of the size. tmux breaks rows at once, but reports a new size only every 250 ms."""

_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
"""A terminal that knows synchronized updates shows a frame as a whole; others ignore both."""


class LiveRegion:
    """On a stream that `moves`. Whoever makes one calls `close`, or the cursor stays hidden."""

    def __init__(
        self,
        stream: Stream,
        theme: Theme,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._theme = theme
        self._reflows = reflows(environ)
        self._clock = clock
        self._drawn: list[Line] = []
        """The rows of the region; the cursor stands at the end of the last one."""
        self._drawn_columns = 0
        self._size = stream.size
        self._calm_from = 0.0

    @property
    def columns(self) -> int:
        """Cells of a row."""
        return max(self._stream.size[0] - 1, 1)

    @property
    def max_rows(self) -> int:
        """Rows the region may have at most; 0 where the screen is too small for one, or has just changed its size."""
        return self._max_rows(self._stream.size)

    @property
    def is_out_of_place(self) -> bool:
        """Whether the screen has changed its size since the region was drawn."""
        return bool(self._drawn) and self._stream.size != self._size

    def survives(self, live: Sequence[Line]) -> bool:
        """Whether these rows could still be erased when the screen becomes much smaller."""
        size = self._stream.size
        return len(live) < size[1] and survives(live, size, self._stream.rows_above)

    def show(self, final: Sequence[Line], live: Sequence[Line]) -> None:
        """Put final rows where the region is and the region below them; if the region is too tall, its end is shown."""
        size = self._stream.size
        columns, drawn = max(size[0] - 1, 1), bool(self._drawn)
        above = self._stream.rows_above + len(final)
        num_live = min(last_that_survive(live, size, above), self._max_rows(size))
        live = [cut_line(line, columns) for line in live[len(live) - num_live :]]
        if not final and not live and not drawn:
            return
        has_long = any(line_width(line) > columns for line in final)
        parts = [_BEGIN, "" if drawn else _HIDE, self._to_top(size, erase=not live or has_long)]
        parts += [self._row(line, columns) + "\r\n" for line in final]
        parts.append("\r\n".join(self._row(line, columns) for line in live))
        parts += ["\x1b[J" if live else "\r", "" if live else _SHOW, _END]
        self._drawn, self._drawn_columns = live, size[0]
        self._stream.frame("".join(parts), len(final))

    def close(self) -> None:
        """Erase the region; the cursor stands where it was and can be seen."""
        self.show((), ())

    def _row(self, line: Line, columns: int) -> str:
        # The rest of the row is erased before the text: behind a full row the erasing would take its last character.
        return ("\x1b[K" if line_width(line) <= columns else "") + positioned(line, self._theme)

    def _max_rows(self, size: tuple[int, int]) -> int:
        if size != self._size:
            self._size, self._calm_from = size, self._clock() + CALM_SECONDS
        columns, rows = size
        return rows - 1 if columns >= MIN_COLUMNS and rows >= MIN_ROWS and self._clock() >= self._calm_from else 0

    def _to_top(self, size: tuple[int, int], *, erase: bool) -> str:
        """The cursor to the start of the region's first row.

        When the screen has become narrower, some terminals have broken its rows into several, others have cut them.
        """
        if not self._drawn:
            return ""
        columns, max_rows = size
        rows = len(self._drawn)
        if self._reflows and columns < self._drawn_columns:
            rows = sum(num_pieces(line, columns) for line in self._drawn)
        rows = min(rows, max_rows)
        if not erase and columns == self._drawn_columns:
            return _up(rows - 1) + "\r"
        # Row by row: where the region begins at the top of the screen, tmux moves what ED erases into the scrollback.
        return "\r\x1b[K" + "\x1b[A\x1b[K" * (rows - 1)


def _up(rows: int) -> str:
    return f"\x1b[{rows}A" if rows > 0 else ""


def last_that_survive(lines: Sequence[Line], size: tuple[int, int], above: int) -> int:
    """How many of the last lines are to be live: as many as survive, but a few that would not rather than none."""
    at_least = min(max(size[1] // 3, 2), 8)
    for number in range(min(len(lines), size[1] - 1), at_least, -1):
        if survives(lines[len(lines) - number :], size, above):
            return number
    return min(len(lines), at_least)


def survives(lines: Sequence[Line], size: tuple[int, int], above: int) -> bool:
    """Whether all the rows are still on the screen when it suddenly has a quarter of its width, or half of it and two
    thirds of its height, or half of its height.

    Blank rows below stay where they are, so pieces push upwards, and there is room as long as rows stand `above`.
    """
    columns, rows = size
    low = min(rows, max(rows // 2, 8))
    narrow, half = (min(columns, max(columns // part, NARROWEST)) for part in (4, 2))
    for width, height in ((narrow, rows), (half, max(rows * 2 // 3, low)), (columns, low)):
        pieces = sum(num_pieces(line, width) for line in lines)
        if pieces >= height or pieces - len(lines) > above:
            return False
    return True


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
    if term.startswith("screen"):
        return "TMUX" in environ
    if term.startswith(("tmux", "xterm-kitty", "xterm-ghostty", "alacritty", "foot", "wezterm")):
        return True
    names = ("VTE_VERSION", "KITTY_WINDOW_ID", "WT_SESSION", "KONSOLE_VERSION", "ALACRITTY_WINDOW_ID", "WEZTERM_PANE")
    programs = ("iTerm.app", "Apple_Terminal", "WezTerm", "vscode", "ghostty")
    return any(name in environ for name in names) or environ.get("TERM_PROGRAM") in programs
