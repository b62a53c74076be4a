"""The program in a real tmux, which breaks rows anew when its window becomes narrower."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pty_terminal import OF_THE_TERMINAL

TMUX = shutil.which("tmux")


class Tmux:
    """A server of its own with one window of `columns` x `rows` that nobody is attached to."""

    def __init__(
        self,
        command: Sequence[str],
        socket: Path,
        *,
        env: Mapping[str, str] | None = None,
        columns: int = 80,
        rows: int = 24,
    ) -> None:
        """`socket`: a short path, for the system cuts long ones."""
        assert TMUX is not None
        self._tmux = [TMUX, "-S", str(socket), "-f", "/dev/null"]
        dropped = {name for name in os.environ if name.startswith("GOINFER_CHAT_")} | {"NO_COLOR", *OF_THE_TERMINAL}
        self._environ = {name: value for name, value in os.environ.items() if name not in dropped} | dict(env or {})
        self._do("new-session", "-d", "-x", str(columns), "-y", str(rows), f"{shlex.join(command)}; sleep 60")
        self._do("set-option", "-g", "history-limit", "10000")

    def __enter__(self) -> Tmux:
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run([*self._tmux, "kill-server"], env=self._environ, check=False, capture_output=True)

    def send(self, text: str) -> None:
        self._do("send-keys", "-l", text)

    def key(self, name: str) -> None:
        self._do("send-keys", name)

    def resize(self, columns: int, rows: int) -> None:
        self._do("resize-window", "-x", str(columns), "-y", str(rows))

    def wait(self, wanted: str | Callable[[], bool], seconds: float = 15.0) -> None:
        deadline = time.monotonic() + seconds
        holds = wanted if callable(wanted) else lambda: wanted in self.text
        while not holds():
            assert time.monotonic() < deadline, f"no {wanted!r} within {seconds} s:\n{self.text}"
            time.sleep(0.02)

    @property
    def lines(self) -> list[str]:
        """Scrollback and screen, without trailing blanks; lines that tmux has broken are whole."""
        return [line.rstrip() for line in self._do("capture-pane", "-p", "-J", "-S", "-").rstrip().splitlines()]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def _do(self, *words: str) -> str:
        done = subprocess.run([*self._tmux, *words], env=self._environ, check=True, capture_output=True, timeout=10)
        return done.stdout.decode("utf-8", "replace")
