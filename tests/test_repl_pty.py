"""The prompt on a real pty: what a person sees, what Ctrl-C and Ctrl-D do, and the terminal left as it was found.

The engine is scripted: what a model says is not the point here.
"""

from __future__ import annotations

import json
import re
import signal
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
SLOW = {"pieces": [f"word{number} " for number in range(200)], "delay": 0.05}
LONG_PREFILL = {"pieces": ["answered"], "prefill_chunks": 100, "chunk_delay": 0.1}
HELLO = {"pieces": ["Hello ", "there."]}

Start = Callable[..., Terminal]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(turn, turn, ...)`: the program at its prompt, on a terminal of 80 x 24 unless said otherwise."""
    with ExitStack() as stack:

        def begin(
            *turns: dict[str, Any],
            arguments: tuple[str, ...] = (),
            shell: str | None = None,
            load_seconds: float = 0,
            save_seconds: float = 0,
            patience_seconds: float = 0,
            env: dict[str, str] | None = None,
            **terminal: Any,
        ) -> Terminal:
            script = tmp_path / "turns.json"
            data = {
                "turns": turns,
                "name": "Scripted\x1b[2J",
                "load_seconds": load_seconds,
                "save_seconds": save_seconds,
                "patience_seconds": patience_seconds,
            }
            script.write_text(json.dumps(data), encoding="utf-8")
            command = [sys.executable, str(PROGRAM), str(script), *arguments]
            if shell is not None:
                command = ["/bin/sh", "-c", shell, "sh", *command]
            env = {"GOINFER_CHAT_SESSION_DIR": str(tmp_path / "sessions"), **(env or {})}
            return stack.enter_context(Terminal(command, env=env, **terminal))

        yield begin


def assert_left_as_found(terminal: Terminal) -> None:
    assert terminal.attributes == terminal.found
    assert terminal.cursor_is_shown
    assert terminal.raw.rfind("\x1b[?2004l") >= terminal.raw.rfind("\x1b[?2004h")
    assert not re.search(r"\x1b\[[0-9;]*m\Z", terminal.raw) or terminal.raw.endswith(("\x1b[0m", "\x1b[22m"))


def test_a_turn_shows_the_reply_and_one_line_of_figures(start: Start) -> None:
    terminal = start(HELLO)
    terminal.wait_for_prompt()
    terminal.send("hi" + ENTER)
    terminal.wait("TTFT")
    terminal.wait_for_prompt()
    assert len(terminal.lines) == 6
    assert terminal.lines[2:4] == ["> hi", "Hello there."]
    assert re.fullmatch(r"prompt 3 \(0 reused, 3 prefilled\) \| TTFT \d+ ms \| 20\.0 tok/s", terminal.lines[4])
    assert "\x1b[2mprompt 3" in terminal.raw
    terminal.send(CTRL_D)
    assert terminal.wait_for_end() == 0
    assert_left_as_found(terminal)


def test_the_banner_shows_model_context_and_kernels_and_cannot_steer_the_terminal(start: Start) -> None:
    terminal = start(HELLO)
    terminal.wait_for_prompt()
    assert terminal.lines == [
        "Scripted\u241b[2J (135M, Q4_1) | context 8,192 | AVX2, 2 threads",
        "/help lists the commands; Ctrl-C stops a reply, Ctrl-D ends",
        ">",
    ]


def test_a_reply_appears_while_it_is_made(start: Start) -> None:
    terminal = start(SLOW)
    terminal.wait_for_prompt()
    terminal.send("go on" + ENTER)
    terminal.wait("word3 ")
    assert "word30 " not in terminal.text


def test_no_sequence_of_a_reply_reaches_the_terminal(start: Start) -> None:
    terminal = start({"pieces": ["a\x1b", "[2J\x1b]0;title\x07b", "\x9b31mc\x08\r\nend"]})
    terminal.wait_for_prompt()
    terminal.send("hi" + ENTER)
    terminal.wait("TTFT")
    assert "a\u241b[2J\u241b]0;title\u2407b<U+009B>31mc\u2408" in terminal.lines
    assert "\x1b[2J" not in terminal.raw
    assert "\x1b]" not in terminal.raw


def test_ctrl_c_stops_a_reply_and_keeps_what_was_said(start: Start) -> None:
    terminal = start(SLOW, HELLO)
    terminal.wait_for_prompt()
    terminal.send("go on" + ENTER)
    terminal.wait("word3 ")
    terminal.send(CTRL_C)
    assert terminal.wait_for_prompt() < 0.5
    assert "word3 " in terminal.text
    assert "word100 " not in terminal.text
    assert "| stopped" in terminal.text
    terminal.send("and now" + ENTER)
    terminal.wait("Hello there.")
    terminal.wait_for_prompt()
    reused = re.findall(r"\((\d+) reused", terminal.text)[-1]
    assert int(reused) > 4
    terminal.send(CTRL_D)
    assert terminal.wait_for_end() == 0
    assert_left_as_found(terminal)


def test_ctrl_c_stops_a_prefill_whose_message_is_not_kept(start: Start) -> None:
    terminal = start(LONG_PREFILL, HELLO)
    terminal.wait_for_prompt()
    terminal.send("a long text" + ENTER)
    terminal.settle(0.2)
    terminal.send(CTRL_C)
    assert terminal.wait_for_prompt() < 0.5
    assert "stopped before the reply began; the message was not kept" in terminal.text
    terminal.send("hi" + ENTER)
    terminal.wait("prompt 3 (0 reused, 3 prefilled)")


def test_a_long_prefill_shows_a_line_that_is_gone_when_the_reply_starts(start: Start) -> None:
    terminal = start({**LONG_PREFILL, "prefill_chunks": 12})
    terminal.wait_for_prompt()
    terminal.send("a long text" + ENTER)
    assert terminal.wait("reading the prompt: ") > 0.4
    assert re.match(r"reading the prompt: \d of 5 tokens \(\d+%\) \| █+░+ \| \d tok/s", terminal.lines[-1])
    terminal.wait("answered")
    terminal.wait_for_prompt()
    assert "reading" not in terminal.text
    assert terminal.lines[2:4] == ["> a long text", "answered"]


def test_a_short_prefill_shows_no_progress(start: Start) -> None:
    terminal = start({**LONG_PREFILL, "prefill_chunks": 3})
    terminal.wait_for_prompt()
    terminal.send("hi" + ENTER)
    terminal.wait("answered")
    assert "reading" not in terminal.raw


def test_ctrl_c_at_the_prompt_clears_the_line_and_never_ends(start: Start) -> None:
    terminal = start(HELLO)
    terminal.wait_for_prompt()
    terminal.send("half a message")
    terminal.wait("half a message")
    terminal.send(CTRL_C)
    terminal.wait(lambda: "half" not in terminal.text)
    terminal.send(CTRL_C + CTRL_C)
    terminal.wait("Ctrl-D or /quit leaves")
    terminal.send("hi" + ENTER)
    terminal.wait("Hello there.")
    terminal.wait("prompt 3 (0 reused, 3 prefilled)")


def test_ctrl_c_twice_in_a_reply_is_the_same_as_once(start: Start) -> None:
    terminal = start({**SLOW, "delay": 0.4}, HELLO)
    terminal.wait_for_prompt()
    terminal.send("go on" + ENTER)
    terminal.wait("word1 ")
    for _ in range(3):
        terminal.send(CTRL_C)
        terminal.settle(0.05)
    terminal.wait("| stopped")
    terminal.wait_for_prompt()
    terminal.send("hi" + ENTER)
    terminal.wait("Hello there.")


@pytest.mark.parametrize("presses", [1, 3])
def test_ctrl_c_during_a_save_loses_nothing(start: Start, presses: int) -> None:
    terminal = start(HELLO, save_seconds=0.4)
    terminal.wait_for_prompt()
    terminal.send("hi" + ENTER)
    terminal.wait("Hello there.")
    terminal.settle(0.2)  # the reply is there, its line of figures is not: it is being saved
    assert "TTFT" not in terminal.text
    for _ in range(presses):
        terminal.send(CTRL_C)
        terminal.settle(0.1)
    terminal.wait_for_prompt()
    terminal.send("again" + ENTER)
    terminal.wait("(5 reused, ")
    terminal.wait_for_prompt()
    terminal.send(CTRL_D)
    assert terminal.wait_for_end() == 0
    assert_left_as_found(terminal)
    shown = start(arguments=("sessions", "show", "hi"))
    shown.wait_for_end()
    assert shown.text.count("Hello there.") == 2


def test_ctrl_c_ends_the_program_when_the_engine_does_not_stop(start: Start) -> None:
    terminal = start({**SLOW, "deaf": True}, patience_seconds=0.5)
    terminal.wait_for_prompt()
    terminal.send("go on" + ENTER)
    terminal.wait("word3 ")
    terminal.send(CTRL_C)
    terminal.settle(0.6)
    terminal.send(CTRL_C)
    assert terminal.wait_for_end(5) == 130
    assert_left_as_found(terminal)


def test_an_interrupt_from_another_process_is_the_same_as_the_key(start: Start) -> None:
    terminal = start(SLOW, HELLO)
    terminal.wait_for_prompt()
    terminal.send("typed")
    terminal.wait("typed")
    terminal.signal(signal.SIGINT)
    terminal.wait(lambda: "typed" not in terminal.text)
    terminal.send("go on" + ENTER)
    terminal.wait("word3 ")
    terminal.signal(signal.SIGINT)
    assert terminal.wait_for_prompt() < 0.5


def test_ctrl_d_in_mid_line_never_ends(start: Start) -> None:
    terminal = start(HELLO)
    terminal.wait_for_prompt()
    terminal.send("xhi" + CTRL_D + "\x01" + CTRL_D + ENTER)
    terminal.wait("Hello there.")
    terminal.wait_for_prompt()
    assert "> hi" in terminal.lines
    terminal.send("/quit" + ENTER)
    assert terminal.wait_for_end() == 0
    assert_left_as_found(terminal)


@pytest.mark.parametrize("word", ["exit", "quit"])
def test_exit_and_quit_leave_only_as_a_whole_line(word: str, start: Start) -> None:
    terminal = start(HELLO)
    terminal.wait_for_prompt()
    terminal.send(f"{word} what?" + ENTER)
    terminal.wait("Hello there.")
    terminal.wait_for_prompt()
    terminal.send(word + ENTER)
    assert terminal.wait_for_end() == 0


def test_what_is_typed_during_a_reply_waits_for_the_prompt(start: Start) -> None:
    terminal = start({"pieces": ["one ", "two ", "three"], "delay": 0.3}, HELLO)
    terminal.wait_for_prompt()
    terminal.send("go on" + ENTER)
    terminal.wait("one ")
    terminal.send("typed" + ENTER + "ahead")
    terminal.wait("Hello there.")
    terminal.wait("> ahead")
    assert [line for line in terminal.lines if line.startswith(("one", ">"))] == [
        "> go on",
        "one two three",
        "> typed",
        "> ahead",
    ]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("context", "error: the prompt has 9,000 tokens"),
        ("template", "error: the template of this model says: roles must alternate"),
        ("bug", "error: unexpected ZeroDivisionError: a bug (GOINFER_CHAT_DEBUG=1 shows where)"),
    ],
)
def test_a_turn_that_fails_is_one_line_and_the_next_one_goes_on_without_it(
    start: Start, error: str, shown: str
) -> None:
    terminal = start({"error": error}, HELLO)
    terminal.wait_for_prompt()
    terminal.send("refused" + ENTER)
    terminal.wait(shown)
    terminal.wait_for_prompt()
    terminal.send("hi" + ENTER)
    terminal.wait("prompt 3 (0 reused, 3 prefilled)")
    assert "Traceback" not in terminal.text


def test_commands_work_at_the_prompt_and_a_wrong_one_is_one_line(start: Start) -> None:
    terminal = start(HELLO)
    terminal.wait_for_prompt()
    for line, shown in (
        ("/temperature 0.2", "temperature 0.2"),
        ("/temperature 1000", "error: temperature must be between 0 and 100, not 1000.0"),
        ("/temprature", "error: there is no command /temprature; did you mean /temperature?"),
        ("/params", "context            0 of 8,192 tokens used"),
        ("/temp\t", "temperature 0.2"),
    ):
        terminal.send(line + ENTER)
        terminal.wait(shown)
        terminal.wait_for_prompt()


def test_a_block_is_one_message_and_ctrl_c_leaves_it(start: Start) -> None:
    terminal = start(HELLO)
    terminal.wait_for_prompt()
    terminal.send('"""' + ENTER + "a b" + ENTER + ENTER + "c d" + ENTER + '"""' + ENTER)
    terminal.wait("prompt 6 (0 reused, 6 prefilled)")
    terminal.wait_for_prompt()
    terminal.send('"""' + ENTER + "dropped" + ENTER)
    terminal.wait("... dropped")
    terminal.settle(0.2)
    terminal.send(CTRL_C)
    terminal.wait_for_prompt()
    terminal.send("hi" + ENTER)
    terminal.wait("prompt 13 (8 reused, 5 prefilled)")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
@pytest.mark.parametrize("busy", [False, True])
def test_a_signal_that_ends_the_program_leaves_the_terminal_as_it_was(
    start: Start, number: signal.Signals, busy: bool
) -> None:
    terminal = start(SLOW)
    terminal.wait_for_prompt()
    if busy:
        terminal.send("go on" + ENTER)
        terminal.wait("word3 ")
    terminal.signal(number)
    assert terminal.wait_for_end(5) == 128 + number
    assert_left_as_found(terminal)
    assert "Traceback" not in terminal.text


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131), (signal.SIGINT, 130)],
)
def test_a_signal_while_the_model_loads_leaves_the_terminal_as_it_was(
    start: Start, number: signal.Signals, code: int
) -> None:
    terminal = start(HELLO, load_seconds=30)
    terminal.wait("loading")
    assert terminal.attributes != terminal.found
    terminal.signal(number)
    assert terminal.wait_for_end(5) == code
    assert_left_as_found(terminal)
    assert "Traceback" not in terminal.text


def test_what_is_typed_while_the_model_loads_is_the_first_message(start: Start) -> None:
    terminal = start(HELLO, load_seconds=0.5)
    terminal.wait("loading")
    terminal.send("hi" + ENTER)
    terminal.wait("Hello there.")
    assert terminal.text.count("hi") == 1


def test_suspending_at_the_prompt_gives_the_terminal_back_and_keeps_the_line(start: Start) -> None:
    terminal = start(HELLO)
    terminal.wait_for_prompt()
    terminal.send("hal")
    terminal.wait("> hal")
    terminal.send("\x1a")
    terminal.wait(lambda: terminal.attributes == terminal.found)
    terminal.settle(0.3)
    terminal.signal(signal.SIGCONT)
    terminal.wait(lambda: terminal.typing)
    terminal.send("lo" + ENTER)
    terminal.wait("Hello there.")
    assert "> hallo" in terminal.lines
    terminal.wait_for_prompt()
    terminal.send(CTRL_D)
    assert terminal.wait_for_end() == 0
    assert_left_as_found(terminal)


def test_suspending_during_a_reply_gives_the_terminal_back_and_takes_it_again(start: Start) -> None:
    terminal = start(SLOW)
    terminal.wait_for_prompt()
    terminal.send("go on" + ENTER)
    terminal.wait("word3 ")
    during = terminal.attributes
    assert during != terminal.found
    terminal.send("\x1a")
    terminal.wait(lambda: terminal.attributes == terminal.found)
    terminal.settle(0.3)
    stopped_at = len(terminal.raw)
    terminal.settle(0.3)
    assert len(terminal.raw) == stopped_at
    terminal.signal(signal.SIGCONT)
    terminal.wait(lambda: terminal.attributes == during)
    terminal.send(CTRL_C)
    terminal.wait_for_prompt()


def test_no_colour_means_no_styles_at_all(start: Start) -> None:
    terminal = start(HELLO, env={"NO_COLOR": "1"})
    terminal.wait_for_prompt()
    terminal.send("hi" + ENTER)
    terminal.wait("TTFT")
    terminal.wait_for_prompt()
    terminal.send(CTRL_D)
    assert terminal.wait_for_end() == 0
    assert not re.search(r"\x1b\[[0-9;]*m", terminal.raw)


@pytest.mark.parametrize("term", ["dumb", None])
def test_a_dumb_terminal_gets_no_sequence_at_all(start: Start, term: str | None) -> None:
    terminal = start({**LONG_PREFILL, "prefill_chunks": 3}, term=term)

    def wait_for_prompt() -> None:
        terminal.wait(lambda: terminal.lines[-1:] == [">"])
        terminal.settle(0.05)

    wait_for_prompt()
    terminal.send("hi" + ENTER)
    terminal.wait("TTFT")
    wait_for_prompt()
    terminal.send("/help" + ENTER)
    terminal.wait("/params")
    wait_for_prompt()
    terminal.send(CTRL_C)
    terminal.wait("Ctrl-D or /quit leaves")
    wait_for_prompt()
    terminal.send(CTRL_D)
    assert terminal.wait_for_end() == 0
    assert not set(terminal.raw) & set("\x1b\x08")
    assert not re.search(r"\r(?!\r*\n)", terminal.raw)
    assert terminal.attributes == terminal.found


def test_the_terminal_is_never_asked_a_question(start: Start) -> None:
    terminal = start(HELLO)
    terminal.wait_for_prompt()
    terminal.send("hi" + ENTER)
    terminal.wait("TTFT")
    terminal.settle(0.3)
    assert not re.search(r"\x1b\[[0-9;>?]*[cn]", terminal.raw)


def test_standard_output_in_a_file_gets_the_replies_alone(start: Start, tmp_path: Path) -> None:
    terminal = start(HELLO, shell='"$@" >' + str(tmp_path / "replies"))
    terminal.wait_for_prompt()
    terminal.send("hi" + ENTER)
    terminal.wait("TTFT")
    terminal.wait_for_prompt()
    terminal.send(CTRL_D)
    assert terminal.wait_for_end() == 0
    assert (tmp_path / "replies").read_text() == "Hello there.\n"
    assert "Hello" not in terminal.text


def test_input_from_a_pipe_is_a_script_also_on_a_terminal(start: Start) -> None:
    terminal = start(HELLO, {"pieces": ["bye \x1b[2J"]}, shell="printf 'hi\\nyou\\n' | \"$@\"")
    assert terminal.wait_for_end() == 0
    assert terminal.lines[0] == "Hello there."
    assert terminal.lines[2] == "bye \u241b[2J"
    assert "\x1b[6n" not in terminal.raw
    assert ">" not in terminal.text


def test_json_at_a_prompt_shows_objects(start: Start) -> None:
    terminal = start(HELLO, arguments=("--json",), columns=1000)
    terminal.wait_for_prompt()
    terminal.send("hi" + ENTER)
    terminal.wait("finish_reason")
    terminal.wait_for_prompt()
    [shown] = [json.loads(line) for line in terminal.lines if line.startswith("{")]
    assert shown["text"] == "Hello there."


def test_the_prompt_is_there_within_a_second(start: Start) -> None:
    started = time.monotonic()
    terminal = start(HELLO)
    terminal.wait_for_prompt()
    assert time.monotonic() - started - seconds_without_a_cpu(terminal.process.pid) < 1.0


def seconds_without_a_cpu(pid: int) -> float:
    """How long a process could have run and others did; 0 where the system does not tell (Linux does)."""
    figures = Path(f"/proc/{pid}/schedstat")
    return int(figures.read_text().split()[1]) / 1e9 if figures.exists() else 0.0
