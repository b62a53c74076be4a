"""A terminal for tests: the program on a pty, what it wrote, and what a person would see of it."""

from __future__ import annotations

import os
import signal
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pexpect
import pyte

OF_THE_TERMINAL = (
    *("COLUMNS", "LINES", "COLORTERM", "COLORFGBG", "FORCE_COLOR", "TMUX", "TERM_PROGRAM", "VTE_VERSION"),
    *("KITTY_WINDOW_ID", "WT_SESSION", "KONSOLE_VERSION", "ALACRITTY_WINDOW_ID", "WEZTERM_PANE"),
    *("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"),
)
"""Variables that tell a program about the terminal and the desktop that the tests were started on."""


class Terminal:
    """A program on a pty of `columns` x `rows`; pyte draws the screen with all that scrolled away."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        term: str | None = "xterm-256color",
        columns: int = 80,
        rows: int = 24,
        dimensions: tuple[int, int] | None = None,
    ) -> None:
        """`dimensions`: rows and columns that the terminal claims to have, where pyte could not draw those."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("GOINFER_CHAT_")}
        environ |= {"PYTHONWARNINGS": "error", **(env or {})}
        environ.pop("NO_COLOR", None) if env is None or "NO_COLOR" not in env else None
        for name in ("TERM", *OF_THE_TERMINAL):
            environ.pop(name, None)
        environ |= env or {}
        if term is not None:
            environ["TERM"] = term
        self.raw = ""
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0.5)
        self._stream = pyte.Stream(self._screen)
        self.process = pexpect.spawn(
            command[0],
            list(command[1:]),
            env=environ,
            dimensions=dimensions or (rows, columns),
            encoding="utf-8",
            codec_errors="replace",
        )
        self.process.delaybeforesend = None
        self.found = termios.tcgetattr(self.process.child_fd)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever a test wants to see of the program's end, it has waited for."""
        if self.process.isalive():
            self.process.kill(signal.SIGKILL)
            self.process.wait()
        self.process.ptyproc.delayafterclose = 0
        self.process.close()

    def send(self, text: str) -> None:
        self.process.send(text)

    def resize(self, columns: int, rows: int) -> None:
        """As a terminal does that cuts its rows and never breaks them anew."""
        self.settle(0.05)
        self._screen.resize(rows, columns)
        self.process.setwinsize(rows, columns)

    def signal(self, number: signal.Signals) -> None:
        self.process.kill(number)

    def read(self, seconds: float = 0.05) -> bool:
        """Take in what was written; False when the program has closed the terminal."""
        try:
            text = self.process.read_nonblocking(65536, timeout=seconds)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += text
        self._stream.feed(text)
        return True

    def settle(self, seconds: float) -> None:
        """Let that time pass, taking in what is written meanwhile."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.read(0.02):
            pass

    def wait(self, wanted: str | Callable[[], bool], seconds: float = 15.0) -> float:
        """Until the text is on the screen or in the scrollback, or the condition holds; returns the seconds it took."""
        started = time.monotonic()
        holds = wanted if callable(wanted) else lambda: wanted in self.text
        while not holds():
            assert time.monotonic() < started + seconds, f"no {wanted!r} within {seconds} s:\n{self.text}"
            assert self.read() or holds(), f"the program ended without {wanted!r}:\n{self.text}"
        return time.monotonic() - started

    def wait_for_prompt(self, seconds: float = 15.0) -> float:
        return self.wait(lambda: self.lines[-1:] == [">"] and self.typing, seconds)

    def wait_for_end(self, seconds: float = 15.0) -> int:
        """The exit code; 128 + n for an end by signal n."""
        deadline = time.monotonic() + seconds
        while self.read():
            assert time.monotonic() < deadline, f"still running after {seconds} s:\n{self.text}"
        self.process.wait()
        code, number = self.process.exitstatus, self.process.signalstatus
        return code if code is not None else 128 + number

    @property
    def cells(self) -> list[list[str]]:
        """Scrollback and screen, cell by cell: "" is the right half of a wide character."""
        rows = [*self._screen.history.top, *(self._screen.buffer[i] for i in range(self._screen.lines))]
        return [[row[column].data for column in range(self._screen.columns)] for row in rows]

    @property
    def lines(self) -> list[str]:
        """Scrollback and screen, without trailing blanks and without what stands below the prompt."""
        past = ["".join(row[column].data for column in range(self._screen.columns)) for row in self._screen.history.top]
        shown = self._screen.display[: self._screen.cursor.y + 1] if self.typing else self._screen.display
        rows = [line.rstrip() for line in [*past, *shown]]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    @property
    def below(self) -> list[str]:
        """What stands below the prompt: its toolbar and the menu of completions."""
        rows = [line.rstrip() for line in self._screen.display[self._screen.cursor.y + 1 :]] if self.typing else []
        return [row for row in rows if row]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def cursor_is_shown(self) -> bool:
        return not self._screen.cursor.hidden

    @property
    def typing(self) -> bool:
        """Whether the program reads keys at its prompt: every signal key is off then."""
        return not self.attributes[3] & termios.ISIG

    @property
    def attributes(self) -> list:
        return termios.tcgetattr(self.process.child_fd)


def shell_environment(folder: Path) -> dict[str, str]:
    """For a shell in which `goinfer-chat` is a command; conversations lie in `folder`/sessions."""
    program = folder / "bin" / "goinfer-chat"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m goinfer_chat "$@"\n')
    program.chmod(0o755)
    return {
        "PATH": f"{program.parent}:/usr/bin:/bin",
        "PS1": "READY ",
        "HOME": str(folder),
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "GOINFER_CHAT_SESSION_DIR": str(folder / "sessions"),
    }
