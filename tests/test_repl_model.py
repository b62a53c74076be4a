"""The prompt with a real model: Ctrl-C leaves words, ids and cache in agreement, and the next turn is as from cold."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pty_terminal import Terminal

MODEL = "smollm2-135m"
CTRL_C, CTRL_D, ENTER = "\x03", "\x04", "\r"
END_OF_TURN = 2
LONG_TEXT = " ".join(f"Item {number} of the list costs {number * 7 % 100} francs." for number in range(120))
"""About 1,700 tokens."""

COLD = """
import json, sys
from engine import load
from engine.api import Request, SamplingParams

path, prompt_ids, count = json.loads(sys.argv[1])
with load(path) as engine:
    request = Request(prompt_ids=tuple(prompt_ids), sampling=SamplingParams(temperature=0), max_tokens=count)
    *_, last = engine.generate(request)
    print(json.dumps(last.reply.ids))
"""


@pytest.fixture
def start(model_path: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """`start(flag, ...)`: the program at its prompt, greedy, with the default model and a store of its own."""
    terminals: list[Terminal] = []

    def begin(*flags: str, columns: int = 80) -> Terminal:
        own = ("--session-dir", str(tmp_path / "own"))
        flags = ("--model", str(model_path(MODEL)), "--temperature", "0", *own, *flags)
        terminals.append(Terminal([sys.executable, "-m", "goinfer_chat", *flags], columns=columns))
        terminals[-1].wait_for_prompt(120)  # kernels may have to be compiled
        return terminals[-1]

    yield begin
    for terminal in terminals:
        terminal.process.close(force=True)


def objects(terminal: Terminal) -> list[dict[str, Any]]:
    return [json.loads(line) for line in re.findall(r'\{"text".*\}(?=\r\n)', terminal.raw)]


def ask(terminal: Terminal, text: str, *, stop_after: float | None = None) -> dict[str, Any]:
    """The object of one turn, stopped by Ctrl-C after that time."""
    count = len(objects(terminal))
    terminal.send(text + ENTER)
    if stop_after is not None:
        terminal.settle(stop_after)
        terminal.send(CTRL_C)
        # Half a second is what is promised; a busy machine that runs tests may take twice as long.
        assert terminal.wait(lambda: len(objects(terminal)) > count) < 1.0
    terminal.wait(lambda: len(objects(terminal)) > count, 60)
    terminal.wait_for_prompt()
    return objects(terminal)[-1]


def from_cold(path: Path, turn: dict[str, Any]) -> list[int]:
    """The reply to the same token ids in a process of its own."""
    asked = json.dumps([str(path), turn["prompt_ids"], len(turn["reply_ids"])])
    done = subprocess.run([sys.executable, "-c", COLD, asked], capture_output=True, text=True, check=True)
    ids: list[int] = json.loads(done.stdout)
    return ids


def test_a_stopped_reply_is_kept_closed_and_the_next_turn_is_as_from_cold(
    start: Callable[..., Terminal], model_path: Callable[[str], Path]
) -> None:
    terminal = start("--json", "--ids")
    for seconds in (0.15, 0.5, 2.0):  # a turn stopped before its first word is not kept, so it can be tried again
        stopped = ask(terminal, "Write a long story about the sea.", stop_after=seconds)
        if stopped["reply_ids"]:
            break
    assert stopped["finish_reason"] == "cancelled"
    assert stopped["reply_ids"]
    assert stopped["context_used"] == len(stopped["prompt_ids"]) + len(stopped["reply_ids"])
    terminal.send("/max-tokens 32" + ENTER)
    terminal.wait("max-tokens 32")
    following = ask(terminal, "Now say hello.")
    so_far = [*stopped["prompt_ids"], *stopped["reply_ids"]]
    assert following["prompt_ids"][: len(so_far)] == so_far
    assert following["prompt_ids"][len(so_far)] == END_OF_TURN
    assert following["prefill_reused_tokens"] == len(so_far)
    assert following["reply_ids"] == from_cold(model_path(MODEL), following)


def test_a_stopped_prefill_leaves_nothing_but_a_warm_cache(
    start: Callable[..., Terminal], model_path: Callable[[str], Path]
) -> None:
    terminal = start("--json", "--ids", "--system", LONG_TEXT, "--max-tokens", "32", "--threads", "1")
    stopped = ask(terminal, "What does item 7 cost?", stop_after=0.2)
    assert (stopped["finish_reason"], stopped["text"], stopped["reply_ids"]) == ("cancelled", "", [])
    assert stopped["prompt_tokens"] > 1500
    assert stopped["prefill_tokens"] < stopped["prompt_tokens"]
    following = ask(terminal, "And item 8?")
    assert len(following["prompt_ids"]) < len(stopped["prompt_ids"]) + 5
    assert following["reply_ids"] == from_cold(model_path(MODEL), following)


def test_a_long_prefill_is_seen_and_a_later_turn_costs_only_what_is_new(start: Callable[..., Terminal]) -> None:
    terminal = start("--system", LONG_TEXT, "--max-tokens", "8", "--threads", "1", columns=120)  # for all figures
    terminal.send("What does item 7 cost?" + ENTER)
    terminal.wait("reading the prompt: ")
    terminal.wait("TTFT", 60)
    assert "reading" not in terminal.text
    terminal.wait_for_prompt()
    terminal.send("And item 8?" + ENTER)
    terminal.wait(lambda: terminal.text.count("TTFT") == 2, 60)
    (_, first), (reused, prefilled) = re.findall(r"\(([\d,]+) reused, ([\d,]+) prefilled\)", terminal.text)
    assert int(first.replace(",", "")) > 1500
    assert int(reused.replace(",", "")) > int(first.replace(",", ""))
    assert int(prefilled) < 32


def test_a_prompt_too_long_is_one_line_with_both_numbers_and_costs_only_its_turn(
    start: Callable[..., Terminal],
) -> None:
    terminal = start("--ctx", "128", "--max-tokens", "4")
    terminal.send("word " * 200 + ENTER)
    terminal.wait("error: ")
    terminal.wait_for_prompt()
    assert re.search("error: the prompt has 231 tokens.*the context of *128", "".join(terminal.lines))
    assert "/new" not in terminal.text  # nothing has been said that could be left
    terminal.send("Hi" + ENTER)
    terminal.wait("prompt 31 (")
    terminal.send("word " * 200 + ENTER)
    said = r"larger --ctx; +/new *begins a new conversation"
    terminal.wait(lambda: re.search(said, " ".join(terminal.lines)) is not None)


def test_the_terminal_is_as_it_was_after_interrupts_and_ctrl_d(start: Callable[..., Terminal]) -> None:
    terminal = start()
    for wait in (0.05, 0.3):
        terminal.send("Tell me a long story." + ENTER)
        terminal.settle(wait)
        terminal.signal(signal.SIGINT)
        terminal.wait_for_prompt(1)
    terminal.send(CTRL_D)
    assert terminal.wait_for_end() == 0
    assert terminal.attributes == terminal.found
    assert terminal.cursor_is_shown
    assert terminal.raw.rfind("\x1b[?2004l") > terminal.raw.rfind("\x1b[?2004h")


def test_a_conversation_that_goes_on_in_another_process_says_what_it_would_have_said_in_one(
    start: Callable[..., Terminal], tmp_path: Path
) -> None:
    flags = ("--json", "--ids", "--max-tokens", "24", "--system", "You are brief.")
    questions = ("My name is Ada. Say hello.", "What is my name?", "Write one line about the sea.")
    in_one = start(*flags, "--session-dir", str(tmp_path / "one"))
    expected = [ask(in_one, question) for question in questions]
    said = []
    for question in questions:
        terminal = start(*flags, "--session-dir", str(tmp_path / "many"), *(["--continue"] if said else []))
        said.append(ask(terminal, question))
        terminal.send(CTRL_D)
        assert terminal.wait_for_end() == 0
    for turn, same in zip(said, expected, strict=True):
        assert turn["prompt_ids"] == same["prompt_ids"]
        assert turn["reply_ids"] == same["reply_ids"]
        assert turn["prefill_tokens"] == same["prefill_tokens"]
    assert [turn["restored_tokens"] for turn in said] == [
        None,
        *(turn["context_used"] for turn in said[:-1]),
    ]
    assert re.search(r"1 back: ([\d,]+) tok, \d+ ms", terminal.text)  # short, on 80 columns
    assert re.search(r"resumed (\d+) of \1 tokens, \d+ ms", terminal.text)


def test_after_undo_and_retry_the_next_turn_is_as_from_cold(
    start: Callable[..., Terminal], model_path: Callable[[str], Path]
) -> None:
    terminal = start("--json", "--ids", "--max-tokens", "24")
    first = ask(terminal, "Name three rivers.")
    ask(terminal, "And three lakes.")
    terminal.send("/undo" + ENTER)
    terminal.wait("Undone: And three lakes.")
    terminal.wait_for_prompt()
    other = ask(terminal, "And three hills.")
    assert other["prefill_reused_tokens"] >= len(first["prompt_ids"]) + len(first["reply_ids"])
    again = ask(terminal, "/retry")
    assert (again["prompt_ids"], again["reply_ids"]) == (other["prompt_ids"], other["reply_ids"])
    assert again["prefill_tokens"] == 1
    assert again["reply_ids"] == from_cold(model_path(MODEL), again)


def test_a_fork_takes_the_cache_along_and_a_deleted_conversation_leaves_none(
    start: Callable[..., Terminal], tmp_path: Path
) -> None:
    folder = tmp_path / "sessions"
    flags = ("--json", "--ids", "--max-tokens", "16", "--session-dir", str(folder))
    terminal = start(*flags, "--save", "work")
    first = ask(terminal, "Name three rivers.")
    terminal.send("/fork other" + ENTER)
    terminal.wait('Continuing in a copy, "other".')
    terminal.send(CTRL_D)
    assert terminal.wait_for_end() == 0
    assert len(list(folder.glob("*.giw-kv"))) == 2
    terminal = start(*flags, "--resume", "other")
    following = ask(terminal, "And three lakes.")
    assert following["restored_tokens"] == first["context_used"]
    for name in ("work", "other"):
        terminal.send(f"/delete {name}{ENTER}")
        terminal.wait(f"Deleted {name}.")
    assert list(folder.glob("*.giw-kv*")) == []
    assert ask(terminal, "Hello.")["prompt_tokens"] < first["context_used"]


def test_a_question_leaves_nothing_on_the_disk(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "goinfer_chat", "run", "Hi", "--model", str(model_path(MODEL)), "--quiet"]
    done = subprocess.run(
        [*command, "--max-tokens", "4", "--session-dir", str(tmp_path / "sessions")], capture_output=True, check=True
    )
    assert done.stdout.strip()
    assert not (tmp_path / "sessions").exists()
