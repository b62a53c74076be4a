"""The line editor on a real pty: what keys, pasting, history, files and commands do to the next message.

The engine logs the message it got, so a test sees exactly what was sent.
"""

from __future__ import annotations

import json
import re
import stat
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pty_terminal import Terminal

PROGRAM = Path(__file__).parent / "scripted_program.py"
CTRL_C, CTRL_D, CTRL_J, CTRL_R, ENTER, ESCAPE = "\x03", "\x04", "\n", "\x12", "\r", "\x1b"
UP, RIGHT = "\x1b[A", "\x1b[C"
PASTE, PASTE_END = "\x1b[200~", "\x1b[201~"
F1, F4 = "\x1bOP", "\x1bOS"
REPLY = {"pieces": ["ok"]}

Start = Callable[..., Terminal]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(turn, ...)`: the program at its prompt, on a wide terminal, so that a reply is one line."""
    with ExitStack() as stack:

        def begin(*turns: dict[str, Any], arguments: tuple[str, ...] = (), **terminal: Any) -> Terminal:
            script = tmp_path / "turns.json"
            log = tmp_path / "log"
            script.write_text(json.dumps({"turns": turns or [REPLY], "log": str(log)}), encoding="utf-8")
            env = {"GOINFER_CHAT_SESSION_DIR": str(tmp_path / "sessions"), **terminal.pop("env", {})}
            command = [sys.executable, str(PROGRAM), str(script), *arguments]
            started = stack.enter_context(Terminal(command, env=env, **{"columns": 200, **terminal}))
            started.log = log
            started.num_asked = len(log.read_text().splitlines()) if log.exists() else 0
            started.wait_for_prompt()
            return started

        yield begin


def sent(terminal: Terminal) -> str:
    """The message of the next turn that was not asked for yet, once the prompt is back after it."""
    terminal.num_asked += 1

    def messages() -> list[str]:
        return [json.loads(line) for line in terminal.log.read_text().splitlines()] if terminal.log.exists() else []

    terminal.wait(lambda: len(messages()) >= terminal.num_asked)
    terminal.wait_for_prompt()
    return messages()[terminal.num_asked - 1]


# -- looks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("term", "palette"), [("vt100", False), ("xterm-mono", False), ("xterm-256color", True)])
def test_a_terminal_gets_a_palette_only_where_it_is_known_to_have_one(start: Start, term: str, palette: bool) -> None:
    terminal = start(REPLY, term=term)
    terminal.send("hello" + ENTER)
    terminal.wait("TTFT")
    terminal.wait_for_prompt()
    terminal.send("hel")  # a suggestion, in grey where there is one
    terminal.settle(0.3)
    terminal.send("\x15/t\t")
    terminal.wait(lambda: any("temperature" in row for row in terminal.below))
    assert bool(re.search(r"\x1b\[[0-9;]*[34]8;5;", terminal.raw)) == palette


# -- several lines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_line", [CTRL_J, ESCAPE + ENTER, f"{PASTE}\n{PASTE_END}"], ids=["ctrl-j", "alt", "paste"])
def test_a_message_can_have_several_lines(start: Start, new_line: str) -> None:
    terminal = start()
    terminal.send(f"one{new_line}/two{new_line}three")
    terminal.wait("  three")
    terminal.send(ENTER)
    assert sent(terminal) == "one\n/two\nthree"


def test_a_pasted_text_is_one_message_whatever_it_holds(start: Start) -> None:
    terminal = start()
    text = '/quit\r\n!touch ran\r"""\r\x03\x04\x1b[A\ttab\rhe said "@x.py"\r'
    terminal.send(f"{PASTE}{text}{PASTE_END}")
    terminal.wait("he said")
    terminal.send(ENTER)
    assert sent(terminal) == '/quit\n!touch ran\n"""\n\x03\x04\x1b[A\ttab\nhe said "@x.py"\n'
    assert "200~" not in terminal.text
    assert not (Path.cwd() / "ran").exists()


def test_a_paste_whose_mark_comes_in_two_pieces_is_a_paste(start: Start) -> None:
    terminal = start()
    terminal.send("\x1b[20")
    terminal.settle(0.02)
    terminal.send(f"0~one\rtwo{PASTE_END}")
    terminal.wait("  two")
    terminal.send(ENTER)
    assert sent(terminal) == "one\ntwo"


def test_a_paste_that_never_ends_is_left_with_ctrl_c_and_comes_back_with_up(start: Start) -> None:
    terminal = start()
    terminal.send(f"{PASTE}half a paste")
    terminal.settle(0.5)
    terminal.send(CTRL_C)
    terminal.settle(0.2)
    terminal.send("hi" + ENTER)
    assert sent(terminal) == "hi"
    terminal.send(UP + UP + ENTER)
    assert sent(terminal) == "half a paste"


def test_what_is_pasted_during_a_reply_is_one_message_too(start: Start) -> None:
    terminal = start({"pieces": ["one ", "two ", "three"], "delay": 0.2}, REPLY)
    terminal.send("go" + ENTER)
    terminal.wait("one ")
    assert terminal.raw.rfind("\x1b[?2004h") > terminal.raw.rfind("\x1b[?2004l")
    terminal.send(f"{PASTE}a\rb{PASTE_END}{ENTER}")
    assert sent(terminal) == "go"
    assert sent(terminal) == "a\nb"


def test_a_dumb_terminal_takes_a_line_of_ten_thousand_characters_whole(start: Start) -> None:
    terminal = start(term="dumb")
    terminal.send("x" * 10_000 + ENTER)
    assert sent(terminal) == "x" * 10_000


def test_characters_that_turn_the_direction_of_text_are_shown_and_sent(start: Start) -> None:
    terminal = start()
    terminal.send("a\u202eb\u2066c")
    terminal.wait("a<U+202E>b<U+2066>c")
    terminal.send("\x1b[D\x1b[D\x7fX" + ENTER)
    assert sent(terminal) == "a\u202eX\u2066c"
    assert "\u202e" not in terminal.raw


# -- drafts and history ------------------------------------------------------------------------------------------------


def test_a_cleared_draft_comes_back_with_up_in_this_session_alone(start: Start, tmp_path: Path) -> None:
    terminal = start()
    terminal.send("a draft")
    terminal.wait("a draft")
    terminal.send(CTRL_C)
    terminal.wait_for_prompt()
    terminal.send(UP)
    terminal.wait("> a draft")
    terminal.send(CTRL_C + CTRL_D)
    assert terminal.wait_for_end() == 0
    assert not (tmp_path / "sessions" / "typed.jsonl").exists()


def test_what_was_sent_is_found_in_later_sessions_by_up_and_by_search(start: Start, tmp_path: Path) -> None:
    terminal = start()
    for text in ("the first question", "a second one", " a private one"):
        terminal.send(text + ENTER)
        assert sent(terminal) == text
    terminal.send(CTRL_D)
    terminal.wait_for_end()
    file = tmp_path / "sessions" / "typed.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    terminal = start()
    terminal.send(UP)
    terminal.wait("> a second one")
    terminal.send(CTRL_C)
    terminal.wait_for_prompt()
    terminal.send(CTRL_R + "fir")
    terminal.wait("> the first question")
    terminal.send(ENTER)
    terminal.wait(lambda: terminal.typing)
    terminal.send(ENTER)
    assert sent(terminal) == "the first question"
    terminal.send("/delete the first question" + ENTER)
    terminal.wait("Deleted")
    assert "first" not in file.read_text()


def test_a_line_that_began_so_is_shown_dim_and_right_takes_it(start: Start) -> None:
    terminal = start()
    terminal.send("the first question" + ENTER)
    assert sent(terminal) == "the first question"
    terminal.wait_for_prompt()
    terminal.send("the f")
    terminal.wait(lambda: terminal.lines[-1] == "> the first question")
    assert re.search(r"\x1b\[0;(39;)?2mirst question", terminal.raw)
    terminal.send(RIGHT + ENTER)
    assert sent(terminal) == "the first question"
    terminal.send("the f" + ENTER)
    assert sent(terminal) == "the f"
    terminal = start(env={"NO_COLOR": "1"})
    terminal.send("the")
    terminal.wait("> the")
    terminal.settle(0.3)
    assert terminal.lines[-1] == "> the"


def test_a_chat_that_keeps_nothing_keeps_no_history(start: Start, tmp_path: Path) -> None:
    terminal = start(arguments=("--ephemeral",))
    terminal.send("secret" + ENTER)
    sent(terminal)
    terminal.send(UP)
    terminal.wait(lambda: terminal.lines[-1] == "> secret")
    assert not list(tmp_path.glob("sessions/typed*"))


# -- keys --------------------------------------------------------------------------------------------------------------


def test_ctrl_x_ctrl_e_writes_the_draft_in_the_editor_and_gives_it_the_terminal_as_it_was(
    start: Start, tmp_path: Path
) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf " more\\nlines\\n" >> "$1"\nprintf editing\nread answer\n')
    editor.chmod(0o700)
    terminal = start(env={"EDITOR": str(editor)})
    terminal.send("draft\x18\x05")
    terminal.wait("editing")
    terminal.wait(lambda: terminal.attributes == terminal.found)
    terminal.send("\n")
    terminal.wait("  lines")
    terminal.send(ENTER)
    assert sent(terminal) == "draft more\nlines"


def test_an_editor_that_fails_leaves_the_draft_as_it_is(start: Start) -> None:
    terminal = start(env={"EDITOR": "/no/such/editor"})
    terminal.send("draft\x18\x05")
    terminal.wait("error: the editor /no/such/editor cannot be used")
    terminal.wait("> draft")
    terminal.send(ENTER)
    assert sent(terminal) == "draft"


def test_vi_keys_are_a_setting(start: Start) -> None:
    terminal = start(arguments=("--keys", "vi"))
    terminal.send("xhix")
    terminal.wait("xhix")
    assert "F4 keys vi, insert" in terminal.below[-1]
    terminal.send(ESCAPE)
    terminal.wait(lambda: "F4 keys vi, normal" in "".join(terminal.below))
    terminal.send("x0x" + ENTER)
    assert sent(terminal) == "hi"
    terminal.send(ESCAPE)
    terminal.settle(0.3)
    terminal.send("i/keys emacs" + ENTER)
    terminal.wait("keys emacs")
    terminal.wait_for_prompt()
    terminal.send("xhi\x01\x04" + ENTER)
    assert sent(terminal) == "hi"


def test_function_keys_stand_in_the_row_below_the_prompt_and_keep_the_draft(start: Start) -> None:
    terminal = start()
    terminal.wait(lambda: bool(terminal.below))
    assert "F1 help" in terminal.below[-1]
    assert "F4 keys emacs" in terminal.below[-1]
    assert "0 of 8,192 tokens" in terminal.below[-1]
    terminal.send("draft" + F4)
    terminal.wait(lambda: "F4 keys vi" in terminal.text + "".join(terminal.below))
    terminal.send(F4 + F1)
    terminal.wait("Ctrl-X Ctrl-E")
    terminal.wait("> draft")
    assert terminal.text.count("> draft") == 1
    terminal.send("/toolbar off\x1b" + CTRL_C)
    terminal.wait_for_prompt()
    terminal.send("/toolbar off" + ENTER)
    terminal.wait("toolbar off")
    terminal.wait_for_prompt()
    terminal.settle(0.1)
    assert terminal.below == []


def test_the_row_below_the_prompt_comes_up_when_the_draft_becomes_shorter(start: Start) -> None:
    terminal = start()
    terminal.send("a\x0ab\x0ac\x0ad")
    terminal.wait("  d")
    terminal.send(CTRL_C)
    terminal.wait_for_prompt()
    terminal.settle(0.2)
    screen = terminal.cells
    [prompt] = [number for number, row in enumerate(screen) if "".join(row).startswith("> ")]
    assert "F1 help" in "".join(screen[prompt + 1])


def test_a_tab_is_blanks_in_the_draft_and_a_tab_in_the_message(start: Start) -> None:
    terminal = start()
    terminal.send(f"{PASTE}a\n\tb{PASTE_END}")
    terminal.wait("      b")
    assert "^I" not in terminal.text
    terminal.send(ENTER)
    assert sent(terminal) == "a\n\tb"


@pytest.mark.parametrize(("columns", "rows"), [(20, 24), (200, 8)])
def test_the_row_below_the_prompt_fits_or_is_not_there(start: Start, columns: int, rows: int) -> None:
    terminal = start(columns=columns, rows=rows)
    terminal.settle(0.2)
    assert [len(row) <= columns for row in terminal.below] == [True] * (rows >= 10)
    assert terminal.lines[-1] == ">"


def test_tab_completes_commands_their_arguments_and_files(start: Start, tmp_path: Path) -> None:
    (tmp_path / "dir with blanks").mkdir()
    (tmp_path / "dir with blanks" / "notes.md").write_text("noted")
    terminal = start()
    terminal.send("/exp\t")
    terminal.wait("> /export")
    terminal.send(f" {tmp_path}/dir\t")
    terminal.wait("dir with blanks/")
    terminal.send(CTRL_C)
    terminal.wait_for_prompt()
    terminal.send(f"see @{tmp_path}/dir\t")
    terminal.wait("dir with blanks/")
    terminal.send("no\t")
    terminal.wait('notes.md"')
    terminal.send(" please" + ENTER)
    assert sent(terminal).endswith("notes.md:\n```\nnoted\n```")


# -- files and commands ------------------------------------------------------------------------------------------------


def test_a_file_that_is_mentioned_is_in_the_message_and_its_tokens_are_said(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "main.py"
    file.write_text("one\ntwo <|im_end|>\nthree\n")
    terminal = start()
    terminal.send(f"explain @{file}#2-3, please" + ENTER)
    assert sent(terminal) == f"explain @{file}#2-3, please\n\n{file}, lines 2 to 3:\n```\ntwo <|im_end|>\nthree\n```"
    assert f"{file}, lines 2 to 3: 2 lines, " in terminal.text
    assert "tokens; in this message." in terminal.text
    terminal.send(f"and @{tmp_path}/none.py" + ENTER)
    terminal.wait(f"error: there is no file {tmp_path}/none.py")


def test_a_command_runs_in_the_terminal_as_it_was_and_hands_its_output_over_when_asked(
    start: Start, tmp_path: Path
) -> None:
    terminal = start()
    terminal.send("!printf 'name? '; read n; echo got $n" + ENTER)
    terminal.wait(lambda: terminal.lines[-1] == "name?")
    assert terminal.attributes[3] & termios.ECHO
    terminal.send("me\n")
    terminal.wait("got me")
    terminal.wait_for_prompt()
    terminal.send("!!printf '\\033[31mred\\033[0m\\n'; exit 3" + ENTER)
    terminal.wait("; in the next message.")
    terminal.wait_for_prompt()
    terminal.send("why?" + ENTER)
    message = sent(terminal)
    assert message.startswith("why?\n\n$ printf")
    assert message.endswith("; exit 3 (exit code 3):\n```\nred\n```")
    terminal.send("!!" + ENTER)
    terminal.wait(lambda: terminal.text.count("in the next message") == 2)
    terminal.wait_for_prompt()
    terminal.send("\\!not a command" + ENTER)
    assert sent(terminal).startswith("!not a command\n\n$ printf")


def test_ctrl_c_ends_a_command_and_not_the_chat(start: Start) -> None:
    terminal = start()
    terminal.send("!echo begun; exec sleep 30" + ENTER)
    terminal.wait(lambda: "begun" in terminal.lines)
    terminal.send(CTRL_C)
    terminal.wait("ended by SIGINT")
    terminal.wait_for_prompt()
    terminal.send("hi" + ENTER)
    assert sent(terminal) == "hi"


# -- poor surroundings -------------------------------------------------------------------------------------------------


def test_a_home_that_nothing_can_be_written_to_costs_what_is_kept_and_not_the_chat(start: Start) -> None:
    nowhere = {"HOME": "/dev/null", "GOINFER_CHAT_SESSION_DIR": "", "XDG_DATA_HOME": "", "XDG_CONFIG_HOME": ""}
    terminal = start(env=nowhere)
    assert "nothing of this chat is kept" in terminal.text
    terminal.send("hi" + ENTER)
    assert sent(terminal) == "hi"
    terminal.send("/temperature 0.1" + ENTER + "/save-settings" + ENTER)
    terminal.wait("config.toml cannot be written: /dev/null is not a folder")
    terminal.wait_for_prompt()
    terminal.send(UP + UP + UP)
    terminal.wait("> hi")
    terminal.send(CTRL_C + CTRL_D)
    assert terminal.wait_for_end() == 0
    assert terminal.attributes == terminal.found
