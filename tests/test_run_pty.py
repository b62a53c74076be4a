"""`run`, `agent` and scripts: drawn on a terminal as at the prompt, exact text in a pipe or file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pty_terminal import Terminal

PROGRAM = Path(__file__).parent / "scripted_program.py"
CTRL_C = "\x03"
TEXT = "# Head\n\n**bold** and `code`:\n\n```python\ndef f():\n    return 1\n```\n"
MARKDOWN = {"pieces": re.split(r"(?<= )|(?<=\n)", TEXT)}
WRITE = {"calls": [{"name": "write_file", "arguments": {"path": "b.txt", "content": "x\n"}}]}
COLOUR = re.compile(r"\x1b\[[0-9;]*m")

Start = Callable[..., Terminal]


def command_of(folder: Path, turns: tuple[dict[str, Any], ...], arguments: tuple[str, ...]) -> list[str]:
    script = folder / "turns.json"
    script.write_text(json.dumps({"turns": turns}), encoding="utf-8")
    return [sys.executable, str(PROGRAM), str(script), *arguments]


def environ_of(folder: Path) -> dict[str, str]:
    return {"GOINFER_CHAT_SESSION_DIR": str(folder / "sessions"), "XDG_DATA_HOME": str(folder)}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(arguments, turn, ...)`: the program with these arguments on a terminal; `shell` may pipe it."""
    with ExitStack() as stack:

        def begin(arguments: tuple[str, ...], *turns: dict[str, Any], shell: str = "", **terminal: Any) -> Terminal:
            command = command_of(tmp_path, turns, arguments)
            if shell:
                command = ["/bin/sh", "-c", shell, "sh", *command]
            env = environ_of(tmp_path) | terminal.pop("env", {})
            return stack.enter_context(Terminal(command, env=env, **terminal))

        yield begin


def ended(terminal: Terminal, code: int = 0) -> str:
    assert terminal.wait_for_end() == code, terminal.text
    assert terminal.attributes == terminal.found
    assert terminal.cursor_is_shown
    return terminal.text


def test_a_question_on_a_terminal_is_answered_in_markdown_as_it_streams(start: Start) -> None:
    terminal = start(("run", "hi", "--panel", "panel"), {**MARKDOWN, "delay": 0.15, "guesses": True})
    terminal.wait("│ prompt   3 tokens")
    terminal.wait("Head")
    text = ended(terminal)
    assert "**" not in text
    assert re.search(r"\x1b\[1;4;38;5;\d+mHead", terminal.raw)
    assert re.match(r"prompt 3 \(0 reused, 3 prefilled\) \| TTFT", terminal.lines[-1])
    assert "│ prompt" not in text


@pytest.mark.parametrize("shell", ['"$@" 2>side | cat', '"$@" >out 2>side; cat out'])
def test_a_question_in_a_pipe_or_file_is_answered_with_the_exact_text(start: Start, shell: str, tmp_path: Path) -> None:
    terminal = start(("run", "hi"), MARKDOWN, shell=f"cd {tmp_path}; {shell}")
    terminal.wait_for_end()
    assert terminal.raw == TEXT.replace("\n", "\r\n")


def test_figures_in_a_file_leave_the_reply_on_the_terminal_as_text(start: Start, tmp_path: Path) -> None:
    terminal = start(("run", "hi"), MARKDOWN, shell=f'"$@" 2> {tmp_path}/side')
    assert "**bold**" in ended(terminal)
    assert "TTFT" in (tmp_path / "side").read_text()


@pytest.mark.parametrize(
    ("arguments", "env", "term"),
    [(("--plain",), {}, "xterm"), ((), {"TERM": "dumb"}, None), (("--raw",), {}, "xterm")],
)
def test_the_exact_text_can_be_had_on_a_terminal_too(
    start: Start, arguments: tuple[str, ...], env: dict[str, str], term: str | None
) -> None:
    terminal = start(("run", "hi", *arguments), MARKDOWN, env=env, term=term)
    assert "**bold** and `code`:" in ended(terminal)


def test_json_of_a_schema_is_shown_as_it_is(start: Start) -> None:
    terminal = start(("run", "hi", "--schema", "{}"), {"pieces": ['{"a": "*x* _y_",\n', '"b": 1}\n']})
    text = ended(terminal)
    assert '{"a": "*x* _y_",\n"b": 1}' in text


def test_a_script_in_a_pipe_is_drawn_on_a_terminal(start: Start) -> None:
    terminal = start((), MARKDOWN, shell="printf 'hi\\nyou\\n' | \"$@\"")
    text = ended(terminal)
    assert text.count("bold and code:") == 2
    assert "**" not in text


def test_agent_on_a_terminal_shows_markdown_and_its_calls(start: Start, tmp_path: Path) -> None:
    done = {"pieces": ["It is **done**."]}
    terminal = start(("agent", "make b.txt", "--yes", "--root", str(tmp_path)), WRITE, done)
    text = ended(terminal)
    assert '* write_file path="b.txt"' in text
    assert "It is done." in text
    assert "2 steps, 1 call" in terminal.lines[-1]


def test_ctrl_c_ends_a_question_keeps_what_was_said_and_the_terminal_as_it_was(start: Start) -> None:
    slow = {"pieces": [f"word{number} " for number in range(200)], "delay": 0.05}
    terminal = start(("run", "hi", "--save", "kept"), slow)
    terminal.wait("word3 ")
    terminal.send("typed" + CTRL_C)
    text = ended(terminal, 130)
    assert "| stopped" in text
    assert "typed" not in text
    terminal = start(("sessions", "show", "kept"))
    terminal.wait("word3 ")


def test_thoughts_are_folded_and_no_command_is_named_that_cannot_be_given(start: Start) -> None:
    terminal = start(("run", "hi"), {"pieces": ["So."], "thinking": ["Well, ", "let me ", "see."], "delay": 0.3})
    terminal.wait("let me")
    text = ended(terminal)
    assert re.search(r"^thought for \d\.\d s, 4 words$", text, re.MULTILINE)
    assert "let me" not in text


# -- colours -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({}, "38;5;"),
        ({"FORCE_COLOR": "3"}, "38;2;"),
        ({"FORCE_COLOR": "2", "COLORTERM": "truecolor"}, "38;5;"),
        ({"COLORTERM": "truecolor"}, "38;2;"),
        ({"FORCE_COLOR": "0"}, None),
        ({"NO_COLOR": "1"}, None),
        ({"NO_COLOR": "1", "FORCE_COLOR": "3"}, None),
    ],
)
def test_variables_say_how_many_colours_a_terminal_gets(start: Start, env: dict[str, str], wanted: str | None) -> None:
    terminal = start(("run", "hi"), MARKDOWN, env=env)
    ended(terminal)
    codes = COLOUR.findall(terminal.raw)
    if wanted is None:
        assert codes == []
    else:
        assert any(wanted in code for code in codes)
        assert not any({"38;5;": "38;2;", "38;2;": "38;5;"}[wanted] in code for code in codes)


@pytest.mark.parametrize("forced", ["1", "2", "3"])
def test_a_pipe_gets_no_control_sequence_even_when_colours_are_forced(tmp_path: Path, forced: str) -> None:
    command = command_of(tmp_path, (MARKDOWN,), ("run", "hi"))
    env = {"PATH": "/usr/bin:/bin", "FORCE_COLOR": forced, "TERM": "xterm-256color", **environ_of(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == TEXT
    assert "TTFT" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
