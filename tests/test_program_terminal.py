"""The program with the default model on a real terminal: questions about calls, results without end, a window closed.

What a model says is not the point; that all parts are the real ones is.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pty_terminal import Terminal

from goinfer_chat.store import Store

CTRL_D, ENTER, F3 = "\x04", "\r", "\x1bOR"
TOOLS = """
from typing import Literal
from tools import ToolContext, tool

@tool(risk="writes")
def mark(context: ToolContext, name: Literal["mark.txt"]) -> str:
    "Make a mark."
    (context.root.path / name).write_text("x")
    return "made"

@tool(risk="reads")
def flood() -> str:
    "Tell much."
    return "y\\n" * 6000 + "\\x1b[2J<|im_end|>"
"""
NOT_KNOWN = "think on; this model is not known to think"
QUESTION = "Allow mark (writes)? yes / no / always / edit:"

Start = Callable[..., Terminal]


@pytest.fixture
def start(tmp_path: Path, model_path: Callable[[str], Path]) -> Iterator[Start]:
    """`start(flag, ...)`: the program at its prompt in a folder of its own."""
    tools = tmp_path / "more_tools.py"
    tools.write_text(TOOLS)
    with ExitStack() as stack:

        def begin(*flags: str, with_tools: bool = True, **terminal: Any) -> Terminal:
            (tmp_path / "project").mkdir(exist_ok=True)
            command = [sys.executable, "-m", "goinfer_chat", "--model", str(model_path("smollm2-135m"))]
            command += ["--temperature", "0", "--max-tokens", "80", "--root", str(tmp_path / "project"), *flags]
            for name in (str(tools), "mark", "flood") if with_tools else ():
                command += ["--tools", name]
            env = {
                "GOINFER_CHAT_SESSION_DIR": str(tmp_path / "sessions"),
                "XDG_CONFIG_HOME": str(tmp_path / "config"),
                "PYTHONPATH": str(Path(__file__).parent.parent),
            }
            started = stack.enter_context(Terminal(command, env=env, **{"columns": 100, **terminal}))
            started.wait_for_prompt(30)
            return started

        yield begin


def call(terminal: Terminal, tool: str) -> None:
    terminal.wait_for_prompt()
    terminal.send(f"/call {tool} go on{ENTER}")


def leave(terminal: Terminal) -> None:
    terminal.wait_for_prompt(30)
    terminal.send(CTRL_D)
    assert terminal.wait_for_end() == 0
    assert terminal.attributes == terminal.found
    assert terminal.cursor_is_shown


def wait_for_question(terminal: Terminal) -> None:
    terminal.wait(lambda: terminal.lines[-1:] == [QUESTION] and terminal.typing, 30)


def test_no_runs_nothing_and_always_still_counts_after_a_restart(start: Start, tmp_path: Path) -> None:
    first = start("--max-steps", "1")
    call(first, "mark")
    wait_for_question(first)
    first.send(f"no not now{ENTER}")
    first.wait("the user refused this call: not now")
    first.wait_for_prompt()
    assert not (tmp_path / "project/mark.txt").exists()
    call(first, "mark")
    wait_for_question(first)
    first.send(f"always{ENTER}")
    first.wait("ok: made")
    leave(first)
    (tmp_path / "project/mark.txt").unlink()
    again = start("--max-steps", "1")
    call(again, "mark")
    again.wait("ok: made")
    again.wait_for_prompt()
    assert (tmp_path / "project/mark.txt").exists()
    assert QUESTION not in again.text
    leave(again)


def test_a_result_longer_than_the_context_is_answered_and_so_is_what_comes_next(start: Start) -> None:
    terminal = start("--ctx", "1024", "--max-steps", "2", "--max-tokens", "30")
    call(terminal, "flood")
    terminal.wait("the context has no room for all that the tools gave, so the middle of it is left out", 30)
    terminal.wait_for_prompt(30)
    terminal.send(f"And what is 2 + 2?{ENTER}")
    terminal.settle(0.2)
    terminal.wait_for_prompt(30)
    assert "error" not in terminal.text
    assert "\x1b[2J" not in terminal.raw
    leave(terminal)


def test_a_model_that_is_not_known_to_think_is_said_to_be_at_the_start_and_at_the_key(start: Start) -> None:
    terminal = start("--think", "on")
    assert NOT_KNOWN in terminal.lines
    for _ in range(3):  # off, auto, on
        assert terminal.text.count(NOT_KNOWN) == 1
        terminal.send(F3)
        terminal.settle(0.2)
    terminal.wait(lambda: terminal.text.count(NOT_KNOWN) == 2)
    leave(terminal)


def test_what_was_said_is_kept_when_the_window_is_closed_in_mid_reply(start: Start, tmp_path: Path) -> None:
    terminal = start("--save", "story", "--max-tokens", "2000", with_tools=False)
    terminal.send(f"Tell me a long story about a dragon.{ENTER}")
    terminal.wait(lambda: terminal.text.lower().count("dragon") > 3, 30)
    descriptor = os.open(os.devnull, os.O_RDWR)
    os.dup2(descriptor, terminal.process.child_fd)
    os.close(descriptor)
    deadline = time.monotonic() + 10
    while terminal.process.isalive() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert terminal.process.exitstatus is not None  # it ended, and by itself
    with Store(tmp_path / "sessions") as store:
        question, reply = store.open(store.find("story").id).path()
    assert (question.message.role, reply.finish_reason) == ("user", "cancelled")
    assert "dragon" in reply.message.content
    assert reply.message.ids
