"""The program with a model that has running states: whatever a person does, the words are those without any cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_running_state import SIZES
from test_state_engine import TEMPLATE
from tiny_models import write_tiny_model

ROOT = Path(__file__).parents[1]
Play = Callable[..., list[dict[str, Any]]]
FIRST = [
    "one two three one two three",
    "four",
    "/retry",
    "five five five",
    "/undo",
    "six seven six seven",
    "/fork",
    "eight",
    "/new",
    "a conversation beside",
    "/resume a",
    "and on",
    "/undo 2",
    "nine",
]
AFTER_A_RESTART = ["again from the disk", "/undo", "otherwise", "/retry"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return write_tiny_model(path, "qwen35", metadata={"tokenizer.chat_template": TEMPLATE}, **SIZES)


@pytest.fixture
def play(model: Path, tmp_path: Path) -> Play:
    def play_one(lines: list[str], store: str, *flags: str, said: str = "") -> list[dict[str, Any]]:
        """The object of each turn of a script, in a process of its own."""
        command = [sys.executable, "-m", "goinfer_chat", "--model", str(model), "--temperature", "0", "--json", "--ids"]
        command += ["--max-tokens", "14", "--ctx", "1024", "--session-dir", str(tmp_path / store), *flags]
        env = {name: value for name, value in os.environ.items() if not name.startswith("GOINFER_CHAT_")}
        script = "".join(f"{line}\n" for line in lines)
        done = subprocess.run(command, input=script, capture_output=True, text=True, cwd=ROOT, env=env)
        assert done.returncode == 0, done.stderr
        assert said in done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines()]
        return [turn for turn in found if "reply_ids" in turn]

    return play_one


def words(turns: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    return [(turn["prompt_ids"], turn["reply_ids"]) for turn in turns]


def test_commands_guesses_and_a_restart_have_the_words_of_a_program_without_reuse(play: Play) -> None:
    without = ("--kv-sessions", "0", "--spec", "off")
    expected = play(FIRST, "cold", "--save", "a", *without), play(AFTER_A_RESTART, "cold", "--resume", "a", *without)
    found = play(FIRST, "warm", "--save", "a", "--spec", "ngram"), play(AFTER_A_RESTART, "warm", "--resume", "a")
    assert [words(turns) for turns in found] == [words(turns) for turns in expected]
    assert [len(turns) for turns in found] == [9, 3]
    assert all(turn["prefill_reused_tokens"] == 0 for turns in expected for turn in turns)
    assert found[1][0]["restored_tokens"] == found[1][0]["prefill_reused_tokens"] > 0
    assert all(turn["prefill_tokens"] < 40 for turns in found for turn in turns)
    # What follows a reply in both, which no state was kept of: said to be computed again.
    assert found[0][4]["recomputed_tokens"] >= 5
    assert sum(turn["draft_tokens"] or 0 for turn in found[0]) > 0


def test_a_damaged_state_on_the_disk_costs_tokens_and_no_words(play: Play, tmp_path: Path) -> None:
    play(["one two three", "four", "five"], "whole", "--save", "a")
    (path,) = (tmp_path / "whole").rglob("*.giw-kv")
    data = path.read_bytes()
    assert data.rfind(b"####") > data.rfind(b"++++")  # the last record is a state
    changed = {"flipped": data[:-100] + bytes([data[-100] ^ 1]) + data[-99:], "cut": data[:-100]}
    for name, damaged in changed.items():
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        (tmp_path / name / path.relative_to(tmp_path / "whole")).write_bytes(damaged)
    (expected,) = play(["and on"], "whole", "--resume", "a")
    for name, said in (("flipped", "damaged"), ("cut", "unfinished")):  # as a kill leaves it
        (found,) = play(["and on"], name, "--resume", "a", said=said)
        assert words([found]) == words([expected])
        assert 0 < found["restored_tokens"] < expected["restored_tokens"]
        assert found["recomputed_tokens"] == expected["restored_tokens"] - found["restored_tokens"]
