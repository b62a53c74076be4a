"""Replies and figures on a real pty: small screens, screens that change, wide characters, locales without any."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pty_terminal import Terminal

PROGRAM = Path(__file__).parent / "scripted_program.py"
ENTER, CTRL_C, CTRL_D, F2 = "\r", "\x03", "\x04", "\x1bOQ"
ODD = "❤️ 👩‍🚀 日本語 🇯🇵 e\u0301"
EDGES = "│┌├└"

Start = Callable[..., Terminal]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(pieces, ...)`: the program, whose replies consist of these pieces, with the panel in full."""
    with ExitStack() as stack:

        def begin(pieces: list[str], *arguments: str, delay: float = 0.0, **terminal: Any) -> Terminal:
            script = tmp_path / "turns.json"
            turn = {"pieces": pieces, "delay": delay, "guesses": True}
            script.write_text(json.dumps({"turns": [turn]}), encoding="utf-8")
            folder = str(tmp_path / "data")
            env = {"XDG_DATA_HOME": folder, "GOINFER_CHAT_SESSION_DIR": folder, **terminal.pop("env", {})}
            command = [sys.executable, str(PROGRAM), str(script), "--panel", "panel", "--no-toolbar", *arguments]
            return stack.enter_context(Terminal(command, env=env, **terminal))

        yield begin


FIGURES = "(0 reused"
"""In the line behind a reply, however narrow the screen is."""


def ask(terminal: Terminal) -> None:
    terminal.wait_for_prompt()
    terminal.send("hi" + ENTER)


def answered(terminal: Terminal) -> None:
    terminal.wait(FIGURES)
    terminal.wait_for_prompt()


def test_a_reply_taller_than_the_screen_is_there_once(start: Start) -> None:
    terminal = start([f"- item {number}\n" for number in range(40)], delay=0.03, rows=10)
    ask(terminal)
    terminal.wait("prompt   3 tokens")
    answered(terminal)
    lines = terminal.lines
    assert [line for line in lines if "item" in line] == [f"• item {number}" for number in range(40)]
    assert not any("prompt   " in line for line in lines)


def test_a_block_taller_than_the_screen_is_there_once(start: Start) -> None:
    rows = [f"| row {number} | {ODD} |\n" for number in range(30)]
    terminal = start(["| a | b |\n|---|---|\n", *rows, "\nend"], delay=0.03, rows=10)
    ask(terminal)
    answered(terminal)
    for number in range(30):
        assert sum(f" row {number} " in line for line in terminal.lines) == 1


def test_borders_stay_straight_on_a_narrow_screen(start: Start) -> None:
    cells = [f"| {cell} | {cell} |\n" for cell in ODD.split(" ")]
    terminal = start(["| a | b |\n|---|---|\n", *cells, "\n", ODD], columns=20)
    ask(terminal)
    answered(terminal)
    table = [row for row in terminal.cells if row[0] in EDGES]
    places = {tuple(i for i, cell in enumerate(row) if cell in "│┌├└┬┼┴┐┤┘" and cell) for row in table}
    assert len(table) == 9
    assert len(places) == 1


def test_a_screen_that_is_resized_during_the_reply_shows_it_once_and_one_prompt(start: Start) -> None:
    terminal = start([f"paragraph {number}\n\n" for number in range(30)], delay=0.05)
    ask(terminal)
    for number, columns in ((3, 20), (10, 80), (15, 33)):
        terminal.wait(f"paragraph {number}\n")
        terminal.resize(columns, 24)
    terminal.wait(FIGURES)
    terminal.wait_for_prompt()
    lines = terminal.lines
    assert [line for line in lines if line.startswith("paragraph")] == [f"paragraph {number}" for number in range(30)]
    assert [line for line in lines if line.startswith(">")] == ["> hi", ">"]
    assert not any(set(line) & set("╭│╰") for line in lines)


@pytest.mark.parametrize("dimensions", [(24, 1), (24, 5), (1, 80), (0, 0)])
def test_no_size_of_the_screen_is_an_error(start: Start, dimensions: tuple[int, int]) -> None:
    terminal = start(["**one** two ", "three\n\n", "| a | b |\n|---|---|\n| 1 | 2 |\n"], dimensions=dimensions)
    terminal.wait(lambda: terminal.typing)
    terminal.send("hi" + ENTER)
    terminal.wait(lambda: "prompt3" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\s", "", terminal.raw))
    terminal.wait(lambda: terminal.typing)
    terminal.send(CTRL_D)
    assert terminal.wait_for_end() == 0
    assert "Traceback" not in terminal.raw
    assert "error" not in terminal.raw


def test_a_locale_without_pictures_has_borders_of_ascii(start: Start) -> None:
    environ = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    terminal = start([f"{ODD}\n\n", "│ a │\n\n", "| a | b |\n|---|---|\n| 1 | 2 |\n"], delay=0.4, env=environ)
    ask(terminal)
    terminal.wait("+- replying")
    answered(terminal)
    assert "| 1 | 2 |" in terminal.lines
    assert "| a |" in terminal.lines
    assert terminal.raw.isascii()


def test_a_reply_has_the_colours_of_the_theme_or_none(start: Start) -> None:
    pieces = ["```python\ndef f():\n    return 1\n```\n"]
    terminal = start(pieces, "--theme", "dark")
    ask(terminal)
    answered(terminal)
    assert "\x1b[38;5;177mdef\x1b[0m" in terminal.raw
    terminal = start(pieces, "--theme", "none")
    ask(terminal)
    answered(terminal)
    assert "\x1b[38" not in terminal.raw


def test_raw_shows_what_was_written(start: Start) -> None:
    terminal = start(["# Head\n\n**bold** | a |\n"])
    ask(terminal)
    answered(terminal)
    assert terminal.lines[3:6] == ["Head", "", "bold | a |"]
    terminal.send("/raw" + ENTER)
    terminal.wait("raw on")
    terminal.wait_for_prompt()
    terminal.send("hi" + ENTER)
    terminal.wait("# Head")
    terminal.wait("**bold** | a |")


def test_copy_asks_the_terminal_to_take_the_exact_text(start: Start) -> None:
    terminal = start(["**a**\n```\nx = 1\n```\n"], env={"PATH": "/nowhere"})
    ask(terminal)
    answered(terminal)
    terminal.send("/copy 1" + ENTER)
    terminal.wait("Sent 6 characters to the terminal's clipboard")
    [data] = re.findall(r"\x1b\]52;c;([^\x07]*)\x07", terminal.raw)
    assert base64.b64decode(data) == b"x = 1\n"


def test_f2_goes_to_the_next_size_and_the_next_start_knows_it(start: Start, tmp_path: Path) -> None:
    terminal = start(["hello"])
    terminal.wait_for_prompt()
    terminal.send(F2 + F2)
    terminal.send("/panel" + ENTER)
    terminal.wait("panel line")
    terminal.wait_for_prompt()
    terminal.send(CTRL_D)
    assert terminal.wait_for_end() == 0
    assert json.loads((tmp_path / "data" / "goinfer-chat" / "remembered.json").read_text()) == {"panel": "line"}


def test_plain_text_is_written_once_from_top_to_bottom(start: Start) -> None:
    terminal = start(["# Head\n", "**bold** ", "text"], "--plain", delay=0.4)
    ask(terminal)
    answered(terminal)
    reply = terminal.raw[terminal.raw.index("# Head") : terminal.raw.index("TTFT")]
    assert reply.startswith("# Head\r\n**bold** text\r\n")
    assert not re.search(r"\x1b\[\d*[ABCDGHJK]", reply)


def test_a_key_pressed_during_a_reply_waits_for_the_prompt(start: Start) -> None:
    terminal = start(["one ", "two ", "three"], delay=0.3)
    ask(terminal)
    terminal.wait("one")
    terminal.send("typed")
    terminal.wait("one two three")
    terminal.wait("> typed")


def test_what_was_typed_right_before_ctrl_c_waits_for_the_prompt_too(start: Start) -> None:
    terminal = start([f"word{number} " for number in range(100)], delay=0.05)
    ask(terminal)
    terminal.wait("word3")
    terminal.send("typed" + CTRL_C)
    terminal.wait("> typed")


def test_f2_works_during_a_reply_too(start: Start) -> None:
    terminal = start([f"word{number} " for number in range(100)], delay=0.05)
    ask(terminal)
    terminal.wait("╭─ replying")
    terminal.send("ty" + F2 + "ped")
    terminal.wait(lambda: "╭" not in terminal.text and "word" in terminal.text)
    assert "word99" not in terminal.text
    terminal.send(F2)
    terminal.wait("tok/s | ")
    assert "word99" not in terminal.text
    terminal.send(CTRL_C)
    terminal.wait("> typed")
