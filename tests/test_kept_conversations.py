"""Kept conversations from outside: flags, scripts, two processes at once, kill -9, Ctrl-C, what a person sees at a pty.

The engine is scripted: what a model says is not the point here.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from pty_terminal import Terminal

from goinfer_chat.slash.conversation import EARLIER
from goinfer_chat.store import Store

PROGRAM = Path(__file__).parent / "scripted_program.py"
CTRL_C, CTRL_D, ENTER = "\x03", "\x04", "\r"
TURNS = [{"pieces": [word, " said"]} for word in ("One", "Two", "Three", "Four")]
SLOW = [{"pieces": [f"word{number} " for number in range(400)], "delay": 0.02}]

Program = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sessions"


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., list[str]]:
    def build(*arguments: str, turns: Sequence[dict[str, Any]] = TURNS) -> list[str]:
        script = tmp_path / f"turns-{len(list(tmp_path.iterdir()))}.json"
        script.write_text(json.dumps({"turns": turns}), encoding="utf-8")
        return [sys.executable, str(PROGRAM), str(script), *arguments]

    return build


@pytest.fixture
def environ(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GOINFER_CHAT_")}
    return kept | {"PYTHONWARNINGS": "error", "GOINFER_CHAT_SESSION_DIR": str(folder)}


@pytest.fixture
def program(command: Callable[..., list[str]], environ: dict[str, str]) -> Program:
    """`program(flag, ..., stdin="a\\nb\\n")`: runs it to its end."""

    def run(*arguments: str, stdin: str = "", env: dict[str, str] | None = None, **options: Any) -> Any:
        return subprocess.run(
            command(*arguments, **options),
            input=stdin,
            capture_output=True,
            text=True,
            env=environ | (env or {}),
            timeout=30,
        )

    return run


@pytest.fixture
def start(command: Callable[..., list[str]], environ: dict[str, str]) -> Iterator[Callable[..., Terminal]]:
    """`start(flag, ...)`: the program on a terminal of 80 x 24."""
    with ExitStack() as stack:

        def begin(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> Terminal:
            env = {"GOINFER_CHAT_SESSION_DIR": environ["GOINFER_CHAT_SESSION_DIR"], **(env or {})}
            return stack.enter_context(Terminal(command(*arguments, **options), env=env))

        yield begin


def kept(folder: Path, name: str) -> list[str]:
    with Store(folder) as store:
        return [stored.message.content for stored in store.path(store.find(name).id)]


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


# -- scripts -----------------------------------------------------------------------------------------------------------


def test_a_question_and_a_script_keep_nothing(program: Program, folder: Path) -> None:
    assert program("run", "hi").returncode == program(stdin="a\nb\n/new\nc\n").returncode == 0
    assert not folder.exists()


def test_a_script_goes_on_in_another_process(program: Program, folder: Path) -> None:
    assert program("--save", "work", stdin="a\n").stdout == "One said\n"
    done = program("--resume", "work", stdin="b\n")
    assert (done.returncode, done.stdout) == (0, "One said\n")
    going_on, figures = done.stderr.splitlines()
    assert going_on.startswith('Continuing "work": 2 messages.')
    assert figures.startswith("prompt 10 (")
    assert program("run", "c", "--continue", "--quiet").stderr == ""
    assert kept(folder, "work") == ["a", "One said", "b", "One said", "c", "One said"]


def test_commands_about_conversations_work_in_scripts(program: Program) -> None:
    done = program("--quiet", stdin="a\n/undo\nb\n/retry\n/edit c\n")
    assert (done.returncode, done.stdout) == (0, "One said\nTwo said\nThree said\nFour said\n")
    done = program("--quiet", "--json", "--ids", stdin="a\n/retry\n")
    first, second = [json.loads(line) for line in done.stdout.splitlines()]
    assert first["prompt_ids"] == second["prompt_ids"]


def test_what_a_command_or_a_start_costs_is_said_before_it_happens(program: Program) -> None:
    question = "how do you do this my friend"
    done = program("--save", "work", stdin=f"{question}\n/system Be brief.\n/temperature 1\n/retry\n")
    lines = done.stderr.splitlines()
    at = lines.index("The next turn prefills 17 tokens, about 4 s.")
    assert lines[at + 1] == "System prompt: Be brief."
    assert [line for line in lines[at + 2 :] if "prefills" in line] == ["The next turn prefills 13 tokens, about 3 s."]
    lines = program("--resume", "work", stdin="x\n").stderr.splitlines()
    assert lines[:2] == ['Continuing "work": 2 messages.', "The next turn prefills 17 tokens, about 4 s."]
    assert "prefills" not in program("--resume", "work", "--quiet", stdin="x\n").stderr


def test_a_script_has_no_editor(program: Program) -> None:
    done = program("--quiet", stdin="a\n/edit\nb\n")
    assert (done.returncode, done.stdout) == (2, "One said\n")
    assert done.stderr == "error: /edit needs its TEXT in a script: there is no terminal for an editor\n"


def test_kept_conversations_are_listed_with_the_flag_before_or_behind(program: Program, folder: Path) -> None:
    program("--save", "work", stdin="a\n")
    elsewhere = {"GOINFER_CHAT_SESSION_DIR": ""}
    for arguments in (("--session-dir", str(folder), "sessions"), ("sessions", "--session-dir", str(folder), "list")):
        assert program(*arguments, env=elsewhere).stdout.splitlines()[1].startswith("work")
    assert program("--top-k", "3", "sessions").returncode == 2


def test_only_one_conversation_can_be_asked_for_and_a_flag_counts_before_the_variables(program: Program) -> None:
    program("--save", "work", stdin="a\n")
    assert program("--continue", "--resume", "work", stdin="b\n").returncode == 2
    done = program("--ephemeral", "--quiet", stdin="b\n", env={"GOINFER_CHAT_CONTINUE": "on"})
    assert (done.returncode, done.stdout) == (0, "One said\n")
    done = program(stdin="b\n", env={"GOINFER_CHAT_RESUME": "work"})
    assert done.stderr.startswith('Continuing "work"')


def test_what_is_asked_for_and_not_there_is_wrong_usage(program: Program) -> None:
    for arguments in (("--resume", "nothing"), ("--continue",), ("--save", "../x")):
        done = program(*arguments, stdin="a\n")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1


def test_folder_and_files_are_their_owners_alone(program: Program, folder: Path) -> None:
    previous = os.umask(0o022)
    try:
        program("--save", "work", stdin="a\n")
    finally:
        os.umask(previous)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


# -- two processes, kill -9 --------------------------------------------------------------------------------------------


def test_a_second_process_is_told_who_has_the_conversation_and_loses_nothing(
    program: Program, command: Callable[..., list[str]], environ: dict[str, str], folder: Path
) -> None:
    program("--save", "work", stdin="a\n")
    first = subprocess.Popen(
        command("--resume", "work", "--quiet"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
    )
    with first:
        first.stdin.write(b"b\n")
        first.stdin.flush()
        assert first.stdout.readline() == b"One said\n"
        second = program("--resume", "work", stdin="".join(f"lost {number}\n" for number in range(5)))
        assert (second.returncode, second.stdout) == (1, "")
        assert f"conversation 'work' is open in another process (pid {first.pid})" in second.stderr
        assert "fork it" in second.stderr
        for number in range(4):
            first.stdin.write(f"{number}\n".encode())
        first.stdin.close()
        assert first.wait(10) == 0
    assert kept(folder, "work")[0::2] == ["a", "b", "0", "1", "2", "3"]


def test_after_kill_9_in_mid_reply_the_conversation_goes_on_with_what_was_saved(
    program: Program, command: Callable[..., list[str]], environ: dict[str, str], folder: Path
) -> None:
    program("--save", "work", stdin="a\n")
    process = subprocess.Popen(
        command("--resume", "work", turns=SLOW), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
    )
    with process:
        process.stdin.write(b"go on\n")
        process.stdin.flush()
        process.stdout.read(1)
        time.sleep(1.5)  # a running reply is saved once a second
        process.kill()
    done = program("--resume", "work", stdin="b\n")
    assert (done.returncode, done.stdout) == (0, "One said\n")
    assert "The program ended in this reply; /retry asks again." in done.stderr
    _, _, question, cut, *last = kept(folder, "work")
    assert question == "go on"
    assert cut.startswith("word0 word1 ")
    assert last == ["b", "One said"]


# -- at the prompt -----------------------------------------------------------------------------------------------------


def say(terminal: Terminal, text: str, shown: str) -> None:
    """A line at the prompt, until `shown` stands there once more than before and the prompt is back."""
    before = terminal.text.count(shown)
    terminal.send(text + ENTER)
    terminal.wait(lambda: terminal.text.count(shown) > before)
    terminal.wait_for_prompt()


def leave(terminal: Terminal) -> None:
    terminal.send(CTRL_D)
    assert terminal.wait_for_end() == 0


def test_the_next_start_shows_recent_conversations_and_tab_completes_their_names(
    start: Callable[..., Terminal], folder: Path
) -> None:
    terminal = start()
    terminal.wait_for_prompt()
    for number, question in enumerate(("Why is the sky blue?", "b", "c", "d")):
        say(terminal, question, f"{TURNS[number]['pieces'][0]} said")
        say(terminal, "/new", "A new conversation.")
    leave(terminal)
    terminal = start()
    terminal.wait_for_prompt()
    assert [line.split(" |")[0] for line in terminal.lines[2:6]] == [
        EARLIER,
        "d",
        "c",
        "b",
    ]
    terminal.send("/resume Why\t")
    terminal.wait("> /resume Why is the sky blue?")
    terminal.send(ENTER)
    terminal.wait('Continuing "Why is the sky blue?": 2 messages.')
    terminal.wait_for_prompt()
    say(terminal, "and now", "TTFT")
    leave(terminal)
    assert kept(folder, "Why is the sky blue?") == ["Why is the sky blue?", "One said", "and now", "One said"]


def test_at_the_prompt_it_says_what_a_command_costs_before_it_obeys(start: Callable[..., Terminal]) -> None:
    terminal = start()
    terminal.wait_for_prompt()
    say(terminal, "how do you do this my friend", "One said")
    say(terminal, "/system Be brief.", "System prompt: Be brief.")
    assert re.search(r"The next turn prefills 17 tokens, about 4 s\.\s+System prompt: Be brief\.", terminal.text)
    leave(terminal)


def test_continue_shows_the_last_exchange_and_goes_on(start: Callable[..., Terminal]) -> None:
    terminal = start()
    terminal.wait_for_prompt()
    say(terminal, "Why is the sky blue?", "TTFT")
    leave(terminal)
    terminal = start("--continue")
    terminal.wait_for_prompt()
    assert terminal.lines[2].startswith('Continuing "Why is the sky blue?": 2 messages.')
    assert "> Why is the sky blue?" in terminal.lines
    assert "One said" in terminal.lines
    say(terminal, "b", "prompt 14 (")


def test_edit_opens_the_last_question_in_the_editor_on_a_terminal_as_it_was_found(
    start: Callable[..., Terminal], tmp_path: Path
) -> None:
    editor = tmp_path / "editor"
    change = 'printf \'the new %s\\nin two lines\\n\' "$answer" > "$1"'
    editor.write_text(f"#!/bin/sh\necho editing; read answer\n{change}\n", encoding="utf-8")
    editor.chmod(0o700)
    terminal = start(env={"EDITOR": str(editor), "VISUAL": ""})
    terminal.wait_for_prompt()
    say(terminal, "first", "One said")
    terminal.send("/edit" + ENTER)
    terminal.wait("editing")
    assert terminal.attributes == terminal.found
    terminal.send("question\n")
    terminal.wait("Two said")
    terminal.wait_for_prompt()
    assert "> the new question\nin two lines\nTwo said" in terminal.text
    leave(terminal)


def test_an_editor_that_changes_nothing_or_cannot_be_run_asks_nothing(start: Callable[..., Terminal]) -> None:
    for editor, shown in (
        ("true", "error: the message was not changed, so nothing was asked"),
        ("false", "error: the editor false ended with code 1"),
        ("no-such-editor", "error: the editor no-such-editor cannot be used"),
    ):
        terminal = start("--ephemeral", env={"EDITOR": editor, "VISUAL": ""})
        terminal.wait_for_prompt()
        say(terminal, "first", "One said")
        say(terminal, "/edit", shown)
        assert "Two said" not in terminal.text


def test_ctrl_c_at_any_moment_around_a_save_damages_nothing(start: Callable[..., Terminal], folder: Path) -> None:
    terminal = start(turns=[{"pieces": ["word "] * 5, "delay": 0.01}])
    terminal.wait_for_prompt()
    for number in range(12):
        terminal.send(f"question {number}" + ENTER)
        terminal.settle(0.02)
        for _ in range(number + 1):
            terminal.send(CTRL_C)
            terminal.settle(0.01)
        terminal.wait_for_prompt()
    terminal.settle(0.2)
    terminal.send(CTRL_C)
    say(terminal, "last", "TTFT")
    assert "error" not in terminal.text
    leave(terminal)
    with Store(folder) as store:
        (conversation,) = store.recent()
        path = store.path(conversation.id)
    assert [stored.message.role for stored in path] == ["user", "assistant"] * (len(path) // 2)
    assert [stored.message.content for stored in path[-2:]] == ["last", "word " * 5]
    for question, reply in zip(path[0::2], path[1::2]):
        assert question.message.content.startswith(("question ", "last"))
        assert len(reply.message.content.split()) == len(reply.message.ids)


def test_a_signal_that_ends_the_program_in_mid_reply_keeps_what_was_said(
    start: Callable[..., Terminal], folder: Path
) -> None:
    terminal = start(turns=SLOW)
    terminal.wait_for_prompt()
    terminal.send("go on" + ENTER)
    terminal.wait("word9 ")
    terminal.signal(signal.SIGTERM)
    assert terminal.wait_for_end(5) == 143
    with closing(Store(folder)) as store:
        live = store.open(store.find("go on").id)
        assert live.recovered == ()
        _, reply = live.path()
        live.close()
    assert (reply.finish_reason, reply.message.content[:12]) == ("cancelled", "word0 word1 ")


def test_a_store_that_is_damaged_is_said_and_the_chat_goes_on_unkept(
    start: Callable[..., Terminal], folder: Path
) -> None:
    folder.mkdir(mode=0o700)
    (folder / "conversations.db").write_bytes(b"no database at all" * 100)
    terminal = start()
    terminal.wait_for_prompt()
    assert "sessions set-aside" in terminal.text.replace("\n", "")
    assert "nothing of this chat is kept" in terminal.lines
    say(terminal, "first", "One said")
    assert (folder / "conversations.db").read_bytes() == b"no database at all" * 100
