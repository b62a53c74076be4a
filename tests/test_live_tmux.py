"""Replies and figures in a real tmux, which breaks rows anew and tells of a new size only after a while."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tmux_terminal import TMUX, Tmux

PROGRAM = Path(__file__).parent / "scripted_program.py"
WORDS = [f"word{number}" for number in range(120)]
PARAGRAPHS = [f"{word} " if number % 9 else f"{word}.\n\n" for number, word in enumerate(WORDS, 1)]

Start = Callable[..., Tmux]

pytestmark = pytest.mark.skipif(TMUX is None, reason="tmux is not installed")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(pieces, ...)`: the program in a window of 80 x 24."""
    with ExitStack() as stack:

        def begin(pieces: list[str], *arguments: str, delay: float) -> Tmux:
            script = tmp_path / "turns.json"
            turn = {"pieces": pieces, "delay": delay, "guesses": True}
            script.write_text(json.dumps({"turns": [turn]}), encoding="utf-8")
            command = [sys.executable, str(PROGRAM), str(script), "--session-dir", str(tmp_path / "data"), *arguments]
            socket = Path(stack.enter_context(tempfile.TemporaryDirectory()), "tmux")
            return stack.enter_context(Tmux(command, socket, env={"XDG_DATA_HOME": str(tmp_path)}))

        yield begin


@pytest.mark.parametrize(
    ("panel", "sizes", "pause"),
    [
        ("panel", [(20, 24)], 0.0),
        ("line", [(20, 24)], 0.0),
        ("panel", [(60, 24), (40, 12), (20, 24), (80, 24)], 0.5),
        ("line", [(60, 24), (40, 12), (20, 24), (80, 24)] * 3, 0.05),
        ("panel", [(40, 24), (80, 24), (30, 24)] * 4, 0.02),
    ],
)
def test_a_window_that_changes_its_size_during_a_reply_keeps_every_word_once_and_no_figures(
    start: Start, panel: str, sizes: list[tuple[int, int]], pause: float
) -> None:
    terminal = start(PARAGRAPHS, "--panel", panel, delay=0.02)
    terminal.wait("F1 help")  # below the prompt
    terminal.send("hi")
    terminal.key("Enter")
    terminal.wait("tokens, TTFT" if panel == "panel" else "tokens | TTFT")
    terminal.resize(*sizes[0])
    terminal.wait(lambda: "TTFT" not in terminal.text)  # the program knows: nothing is live until the size stays
    for columns, rows in sizes[1:]:
        time.sleep(pause)
        terminal.resize(columns, rows)
    terminal.wait("prompt 3 ")
    terminal.wait(lambda: terminal.text.count(">") >= 2)
    reply, _, after = terminal.text.partition("prompt 3 ")
    assert [word.strip(".") for word in reply.split() if word.startswith("word")] == WORDS
    for figure in ("╭", "│", "TTFT", "right", "tok/s"):
        assert figure not in reply
    assert after.count(">") == 1


def test_a_window_that_changes_its_size_at_the_prompt_shows_one_prompt_and_the_draft_once(start: Start) -> None:
    terminal = start(["Hello."], delay=0.0)
    terminal.wait("F1 help")
    terminal.send("/help")  # on an empty screen tmux pushes rows out that nothing can bring back
    terminal.key("Enter")
    terminal.wait("/thinking")
    time.sleep(0.3)
    draft = "a draft that takes more than one row of a narrow window, and then a second one"
    terminal.send(draft)
    terminal.wait("second one")
    for columns in (40, 120, 60, 30, 80):
        terminal.resize(columns, 24)
        time.sleep(0.6)
    terminal.wait(lambda: [line for line in terminal.lines if line.startswith("> a")] == [f"> {draft[:78]}"])
    assert terminal.text.count("F1 help") == 1
    assert terminal.text.count("a draft") == 1
