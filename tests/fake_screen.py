"""A terminal in memory: what is written to it is drawn by pyte, with all that scrolled away."""

from __future__ import annotations

import io

import pyte
import pytest

from goinfer_chat.terminal import Stream

XTERM = {"TERM": "xterm-256color"}


class FakeScreen(io.StringIO):
    """`raw` is what was written; COLUMNS and LINES say how large the screen is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, columns: int = 80, rows: int = 24) -> None:
        super().__init__()
        self._monkeypatch = monkeypatch
        self.raw = ""
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0.5)
        self._feed = pyte.Stream(self.screen)
        self._size(columns, rows)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.raw += text
        self._feed.feed(text.replace("\r\n", "\n").replace("\n", "\r\n"))
        return len(text)

    def stream(self, environ: dict[str, str] | None = None) -> Stream:
        return Stream(self, XTERM if environ is None else environ)

    def resize(self, columns: int, rows: int) -> None:
        """As a terminal does that cuts its rows and never breaks them anew."""
        self.screen.resize(rows, columns)
        self._size(columns, rows)

    def _size(self, columns: int, rows: int) -> None:
        self._monkeypatch.setenv("COLUMNS", str(columns))
        self._monkeypatch.setenv("LINES", str(rows))

    @property
    def cells(self) -> list[list[str]]:
        """Scrollback and screen, cell by cell: "" is the right half of a wide character."""
        rows = [*self.screen.history.top, *(self.screen.buffer[i] for i in range(self.screen.lines))]
        return [[row[column].data for column in range(self.screen.columns)] for row in rows]

    @property
    def lines(self) -> list[str]:
        """The same as text, without trailing blanks."""
        lines = ["".join(row).rstrip() for row in self.cells]
        while lines and not lines[-1]:
            lines.pop()
        return lines
