"""Draws the pictures of docs/terminal.md from real runs: `python docs/pictures/draw.py`.

Needs tmux and the models named below. The program runs in a tmux of its own; what it shows is taken as text with styles
and exported by rich.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

HERE = Path(__file__).resolve().parent
PROGRAM = Path(sys.executable).with_name("goinfer-chat")
# No font is fetched from anywhere, and no blank is taken away: librsvg trims those that do not break a line as well.
FORMAT = re.sub(r"@font-face\s*{{.*?}}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
FORMAT = FORMAT.replace("<svg ", '<svg xml:space="preserve" ', 1)


class Screen:
    """The program in a tmux of its own, with conversations of its own."""

    def __init__(self, columns: int, rows: int, *arguments: str) -> None:
        self._columns = columns
        self._folder = tempfile.TemporaryDirectory()
        self._socket = str(Path(self._folder.name) / "tmux")
        environ = [f"{name}={self._folder.name}" for name in ("XDG_DATA_HOME", "GOINFER_CHAT_SESSION_DIR")]
        command = ["env", *environ, str(PROGRAM), "--theme", "dark", *arguments]
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(rows), *command)
        self.wait(lambda text: "\n>" in text)

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self._tmux("kill-server")
        self._folder.cleanup()

    def send(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)
        time.sleep(0.3)
        self._tmux("send-keys", "Enter")

    def answered(self, number: int) -> None:
        """Until so many questions are answered. What scrolled away counts: a long reply pushes the others out."""
        self.wait(lambda text: text.count("| TTFT") >= number and is_at_prompt(text), "-S", "-")

    def wait(self, holds: Callable[[str], bool], *rows: str) -> str:
        """Until the screen, or these rows of it, are so; returns them with their styles."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            styled = self._tmux("capture-pane", "-p", "-e", *rows)
            if holds(Text.from_ansi(styled).plain):
                return styled
            time.sleep(0.03)
        raise TimeoutError(self._tmux("capture-pane", "-p"))

    def draw(self, name: str, holds: Callable[[str], bool], last_rows: int) -> None:
        text = Text.from_ansi(self.wait(holds).rstrip())
        console = Console(record=True, width=self._columns, file=io.StringIO(), force_terminal=True)
        for line in text.split("\n")[-last_rows:]:
            console.print(line, no_wrap=True, crop=True)
        svg = console.export_svg(title="goinfer-chat", theme=MONOKAI, code_format=FORMAT, unique_id=name)
        (HERE / f"{name}.svg").write_text(svg, encoding="utf-8")

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run(["tmux", "-S", self._socket, *arguments], capture_output=True, text=True, check=False)
        return done.stdout


def is_at_prompt(text: str) -> bool:
    return text.rstrip().rpartition("\n")[2].startswith(" F1")


def main() -> None:
    arguments = ("--model", "qwen2.5-coder-1.5b", "--temperature", "0", "--panel", "panel")
    with Screen(88, 40, *arguments, "--max-tokens", "250") as screen:
        screen.send("@docs/engine.md What is this about? One sentence.")
        screen.answered(1)
        screen.send("@docs/speculation.md And this? One sentence.")
        screen.draw("reading", lambda text: bool(re.search(r"▒{6,}█{3,}░{3,}", text)), 12)
        screen.answered(2)
        screen.send("Write a Python class Stack with push and pop, then a table of the cost of each operation.")
        screen.draw("replying", lambda text: "self" in text and "guesses" in text and "def push" in text, 22)
        screen.answered(3)
        screen.send("/stats")
        screen.draw("stats", lambda text: "prompts  " in text and "\n>" in text, 14)
    with Screen(88, 40, *arguments) as screen:
        screen.send(
            "Three Markdown headings about apples with one sentence each, and a table of three sorts of apples."
        )
        screen.answered(1)
        screen.draw("reply", is_at_prompt, 28)


if __name__ == "__main__":
    main()
