"""Tools at the prompt, on a real pty: questions about calls, what is typed before them, Ctrl-C, the terminal after.

The engine is scripted: what a model says is not the point here.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pty_terminal import Terminal

PROGRAM = Path(__file__).parent / "scripted_program.py"
CTRL_C, CTRL_D, ENTER = "\x03", "\x04", "\r"
DONE = {"pieces": ["It is done."]}

Start = Callable[..., Terminal]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"calls": [{"name": name, "arguments": arguments}]}


WRITE = call("write_file", path="b.txt", content="x\x1b[2J\n")
SLEEP = call("run_command", command="sleep 6789.1")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
def start(tmp_path: Path, project: Path) -> Iterator[Start]:
    """`start(turn, ..., arguments=...)`: the program at its prompt, tools on, in the project's folder."""
    with ExitStack() as stack:

        def begin(*turns: dict[str, Any], arguments: tuple[str, ...] = ("--tools", "on"), **terminal: Any) -> Terminal:
            script = tmp_path / "turns.json"
            script.write_text(json.dumps({"turns": turns, "name": "Scripted"}), encoding="utf-8")
            command = [sys.executable, str(PROGRAM), str(script), *arguments, "--root", str(project)]
            env = {
                "GOINFER_CHAT_SESSION_DIR": str(tmp_path / "sessions"),
                "XDG_CONFIG_HOME": str(tmp_path / "config"),
                "EDITOR": terminal.pop("editor", "true"),
                "VISUAL": "",
            }
            return stack.enter_context(Terminal(command, env=env, **{"columns": 100, "rows": 40, **terminal}))

        yield begin


def ask(terminal: Terminal, text: str = "go on") -> None:
    terminal.wait_for_prompt()
    terminal.send(text + ENTER)


QUESTION = "Allow write_file (writes)? yes / no / always / edit:"


def wait_for_question(terminal: Terminal, question: str = QUESTION) -> None:
    terminal.wait(lambda: terminal.lines[-1:] == [question] and terminal.typing)


def test_a_person_sees_the_change_and_says_yes(start: Start, project: Path) -> None:
    terminal = start(WRITE, DONE)
    ask(terminal)
    wait_for_question(terminal)
    assert "+x\u241b[2J" in terminal.lines
    assert "\x1b[2J" not in terminal.raw
    assert not (project / "b.txt").exists()
    terminal.send("y" + ENTER)
    terminal.wait("It is done.")
    terminal.wait_for_prompt()
    assert (project / "b.txt").exists()
    assert "  ok: b.txt: made, 1 line, 6 bytes" in terminal.lines
    terminal.send(CTRL_D)
    assert terminal.wait_for_end() == 0
    assert terminal.attributes == terminal.found
    assert terminal.cursor_is_shown


@pytest.mark.parametrize("more", [1, 2])
def test_a_question_as_wide_as_the_screen_tears_no_word_and_leaves_room_for_the_answer(
    start: Start, project: Path, more: int
) -> None:
    asked = "Allow run_command (runs)? yes / no / always / prefix (always `touch c.txt`) / edit: "
    terminal = start(call("run_command", command="touch c.txt"), DONE, columns=len(asked) + more)
    ask(terminal)
    terminal.wait(lambda: terminal.lines[-1:] == ["/ edit:"] and terminal.typing)
    assert terminal.lines[-2] == asked.removesuffix(" / edit: ")
    terminal.send("yes")
    terminal.wait("/ edit: yes")
    terminal.send(ENTER)
    terminal.wait("It is done.")
    assert (project / "c.txt").exists()


def test_no_asks_for_a_reason_and_other_words_ask_again(start: Start, project: Path) -> None:
    terminal = start(WRITE, DONE)
    ask(terminal)
    wait_for_question(terminal)
    terminal.send("perhaps" + ENTER)
    terminal.wait(f"{QUESTION} perhaps")
    terminal.wait("answer with y, n, a or e; Ctrl-C refuses the call and ends the turn")
    wait_for_question(terminal)
    terminal.send("no" + ENTER)
    terminal.wait("Why not? (the model reads it)")
    terminal.wait(lambda: terminal.typing)
    terminal.send("use c.txt" + ENTER)
    terminal.wait("the user refused this call: use c.txt")
    terminal.wait_for_prompt()
    assert not (project / "b.txt").exists()


def test_what_was_typed_before_the_question_is_no_answer(start: Start, project: Path) -> None:
    slow = {**WRITE, "pieces": ["I begin.\n\n", "And ", "write ", "now. "], "delay": 0.2}
    terminal = start(slow, DONE)
    ask(terminal)
    terminal.wait("I begin.")
    terminal.send("y" + ENTER + "y" + ENTER)
    wait_for_question(terminal)
    terminal.settle(0.5)
    assert terminal.lines[-1] == QUESTION, terminal.text
    assert not (project / "b.txt").exists()
    terminal.send(CTRL_C)
    terminal.wait_for_prompt()


def test_ctrl_c_at_the_question_refuses_and_ends_the_turn(start: Start, project: Path) -> None:
    terminal = start(WRITE, DONE)
    ask(terminal)
    wait_for_question(terminal)
    terminal.send(CTRL_C)
    terminal.wait_for_prompt()
    assert not (project / "b.txt").exists()
    assert "It is done." not in terminal.text
    ask(terminal, "something else")
    terminal.wait("It is done.")


def test_always_is_not_asked_again(start: Start, project: Path) -> None:
    terminal = start(WRITE, WRITE, DONE)
    ask(terminal)
    wait_for_question(terminal)
    terminal.send("a" + ENTER)
    terminal.wait("It is done.")
    terminal.wait_for_prompt()
    assert terminal.text.count(QUESTION) == 1
    terminal.send("/approvals" + ENTER)
    terminal.wait("kept  write_file")


def test_the_arguments_can_be_edited(start: Start, project: Path, tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i s/b.txt/c.txt/ "$1"\n')
    editor.chmod(0o755)
    terminal = start(WRITE, DONE, editor=str(editor))
    ask(terminal)
    wait_for_question(terminal)
    terminal.send("e" + ENTER)
    terminal.wait("It is done.")
    assert (project / "c.txt").exists()
    assert not (project / "b.txt").exists()


def test_ctrl_c_ends_the_tool_and_not_the_chat(start: Start) -> None:
    terminal = start(SLEEP, DONE, arguments=("--tools", "on", "--yes"))
    ask(terminal)
    terminal.wait("* run_command")
    terminal.settle(0.3)
    terminal.send(CTRL_C)
    assert terminal.wait_for_prompt() < 2
    assert "cancelled: it was stopped by the user" in terminal.text
    assert not any(b"6789.1" in path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    ask(terminal, "something else")
    terminal.wait("It is done.")
    terminal.wait_for_prompt()
    terminal.send(CTRL_D)
    assert terminal.wait_for_end() == 0
    assert terminal.attributes == terminal.found


def test_a_tool_that_wants_the_terminal_does_not_get_it(start: Start) -> None:
    tty = call("run_command", command="cat; read x </dev/tty; stty -echo </dev/tty", shell=True)
    terminal = start(tty, DONE, arguments=("--tools", "on", "--yes"))
    ask(terminal)
    started = time.monotonic()
    terminal.wait("It is done.")
    assert time.monotonic() - started < 5
    terminal.wait_for_prompt()
    terminal.send(CTRL_D)
    assert terminal.wait_for_end() == 0
    assert terminal.attributes == terminal.found


def test_a_dumb_terminal_asks_too(start: Start, project: Path) -> None:
    terminal = start(WRITE, DONE, term="dumb")
    terminal.wait(lambda: terminal.lines[-1:] == [">"])
    terminal.send("go on" + ENTER)
    terminal.wait(QUESTION)
    terminal.settle(0.3)
    terminal.send("y" + ENTER)
    terminal.wait("It is done.")
    assert (project / "b.txt").exists()
    assert "\x1b[" not in terminal.raw.replace("\x1b[?2004", "")


def test_agent_at_a_terminal_asks_a_person(start: Start, project: Path) -> None:
    terminal = start(WRITE, DONE, arguments=("agent", "make b.txt"))
    wait_for_question(terminal)
    terminal.send("y" + ENTER)
    assert terminal.wait_for_end() == 0
    assert (project / "b.txt").exists()
    assert "It is done." in terminal.text
    assert terminal.attributes == terminal.found


def test_undo_at_the_prompt_takes_files_back(start: Start, project: Path) -> None:
    terminal = start(WRITE, DONE, arguments=("--tools", "on", "--yes"))
    ask(terminal)
    terminal.wait("It is done.")
    terminal.wait_for_prompt()
    assert (project / "b.txt").exists()
    terminal.send("/undo" + ENTER)
    terminal.wait("Restored: b.txt")
    assert not (project / "b.txt").exists()
