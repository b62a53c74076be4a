"""What is reused, resumed, guessed and refused, from outside: each turn is a line to the real program.

A tiny model answers. Every process begins anew with what the one before it left on the disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_chat_template import THINKING_TEMPLATE, TOOL_TEMPLATE
from tiny_models import write_tiny_model

ROOT = Path(__file__).parent.parent
OPENED = THINKING_TEMPLATE.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
GLUE_TOKENS = 8
FIGURES = ("prompt_ids", "reply_ids", "finish_reason", "context_used")


class Program:
    """The program on one folder of conversations: `ask("--resume", "x", lines=[...])` is a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stderr = ""
        self.code = 0

    def ask(self, *flags: object, lines: list[str], **env: str) -> list[dict[str, Any]]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GOINFER_CHAT_")}
        done = subprocess.run(
            [sys.executable, "-m", "goinfer_chat", "--json", "--ids", "--temperature", "0", *map(str, flags)],
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=kept | {"GOINFER_CHAT_SESSION_DIR": str(self.folder), "PYTHONWARNINGS": "error"} | env,
            timeout=60,
        )
        self.stderr, self.code = done.stderr, done.returncode
        assert "Traceback" not in self.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path / "sessions")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    folder = tmp_path_factory.mktemp("models")

    def model(architecture: Any) -> Path:
        path = folder / f"{architecture}.gguf"
        return path if path.exists() else write_tiny_model(path, architecture, context_size=8192)

    return model


def ids_of(turns: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(turn[name] for name in FIGURES) for turn in turns]


@pytest.mark.parametrize("kv_type", [pytest.param("f16", marks=pytest.mark.slow), "q8_0"])
@pytest.mark.parametrize("template", [THINKING_TEMPLATE, OPENED])
def test_old_reasoning_costs_no_prefill_in_a_chat_and_after_a_restart(
    program: Program, tiny: Callable[[Any], Path], tmp_path: Path, template: str, kv_type: str
) -> None:
    path = tmp_path / "thinks.jinja"
    path.write_text(template)
    how = ("--model", tiny("qwen3"), "--chat-template", path, "--kv", kv_type)
    how += ("--think-tokens", 9, "--max-tokens", 20)
    turns = program.ask(*how, "--save", "t", lines=["What is 2 + 2?", "And 3 + 3?"])
    turns += program.ask(*how, "--resume", "t", lines=["And the sum of both?"])
    assert "The next turn prefills" not in program.stderr
    for before, turn in pairwise(turns):
        assert turn["prefill_reused_tokens"] >= before["prompt_tokens"] - GLUE_TOKENS
        assert turn["prefill_reused_tokens"] == before["context_used"]
    assert turns[-1]["restored_tokens"] == turns[-2]["context_used"]
    cold = program.ask(*how, "--kv-sessions", 0, "--spec", "off", "--ephemeral", lines=["What is 2 + 2?", "And 3 + 3?"])
    assert ids_of(cold) == ids_of(turns[:2])
    assert [turn["prefill_reused_tokens"] for turn in cold] == [0, 0]


@pytest.mark.parametrize("architecture", [pytest.param("qwen3", marks=pytest.mark.slow), "gemma3"])
def test_guessing_changes_no_id_of_a_reply_the_next_one_or_the_one_after_a_restart(
    program: Program, tiny: Callable[[Any], Path], architecture: str
) -> None:
    said = []
    for guesses in ("off", "ngram"):
        how = ("--model", tiny(architecture), "--spec", guesses, "--max-tokens", 40)
        lines = ["serving " * 48, "1 1 1", "/undo", "another", "/retry"]
        turns = program.ask(*how, "--save", guesses, lines=lines)
        turns += program.ask(*how, "--resume", guesses, lines=["and once more"])
        assert turns[-1]["restored_tokens"] == turns[-2]["context_used"]
        said.append(ids_of(turns))
    assert said[0] == said[1]
    assert sum(turn["draft_accepted"] for turn in turns) > 20


def test_the_context_is_filled_to_its_last_position_and_a_longer_prompt_is_an_error(
    program: Program, tiny: Callable[[Any], Path]
) -> None:
    how = ("--model", tiny("qwen3"), "--ctx", 128, "--ephemeral")
    empty = len(program.ask(*how, "--max-tokens", 1, lines=["1"])[0]["prompt_ids"]) - 1
    for guesses, tokens, reply in (("ngram", 118, 10), ("off", 127, 1)):
        (turn,) = program.ask(*how, "--spec", guesses, lines=["1" * (tokens - empty)])
        assert (turn["prompt_tokens"], turn["completion_tokens"]) == (tokens, reply)
        assert turn["finish_reason"] == "length"
    (failed,) = program.ask(*how, lines=["1" * (128 - empty)])
    assert (failed["error"]["prompt_tokens"], failed["error"]["context_size"]) == (128, 128)
    assert program.code == 4


def test_tools_stand_in_the_prompt_as_their_file_has_them_in_every_process(
    program: Program, tiny: Callable[[Any], Path], tmp_path: Path
) -> None:
    tools = tmp_path / "mine.py"
    functions = (
        "def zeta(b: str, a: int = 3) -> str:",
        "def alpha(y: float, x: str) -> str:",
        "def mid(q: str) -> str:",
    )
    tools.write_text(
        "from tools import tool\n"
        + "".join(f'@tool\n{line}\n    """Of mine."""\n    return ""\n' for line in functions)
    )
    template = tmp_path / "tools.jinja"
    template.write_text(TOOL_TEMPLATE)
    how = ("--model", tiny("qwen2"), "--chat-template", template, "--tools", tools, "--max-tokens", 2, "--ephemeral")
    prompts = []
    for seed in ("0", "7"):
        turns = program.ask(*how, lines=["hi"], PYTHONHASHSEED=seed)
        assert program.code == 0, turns
        prompts.append(next(turn["prompt_ids"] for turn in turns if "prompt_ids" in turn))
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    "damage",
    [
        "a bit in the last block",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("empty", "cut in half", "junk behind it")),
    ],
)
def test_a_damaged_cache_costs_a_prefill_and_changes_no_word(
    program: Program, tiny: Callable[[Any], Path], damage: str
) -> None:
    how = ("--model", tiny("qwen2"), "--max-tokens", 8)
    program.ask(*how, "--save", "w", lines=["some words about rivers " * 12])
    (file,) = program.folder.glob("*.giw-kv")
    good = file.read_bytes()
    bit = bytearray(good)
    bit[-100] ^= 1
    file.write_bytes(
        {"empty": b"", "cut in half": good[: len(good) // 2], "junk behind it": good + b"\x5a" * 2**16}.get(damage, bit)
    )
    (turn,) = program.ask(*how, "--resume", "w", lines=["what did I say?"])
    assert program.code == 0
    told = {"empty": "it is empty", "cut in half": "unfinished from position"}.get(damage, "damaged from position")
    assert program.stderr.count(told) == 1
    script = ["some words about rivers " * 12, "what did I say?"]
    *_, cold = program.ask(*how, "--kv-sessions", 0, "--ephemeral", lines=script)
    assert ids_of([turn]) == ids_of([cold])
    (after,) = program.ask(*how, "--resume", "w", lines=["and now?"])
    assert after["prefill_reused_tokens"] == after["restored_tokens"] == turn["context_used"]
    assert "damaged" not in program.stderr


def test_another_model_reads_the_words_and_the_first_finds_its_cache_again(
    program: Program, tiny: Callable[[Any], Path]
) -> None:
    first, other = tiny("qwen2"), tiny("gemma3")
    lines = ["name two rivers", f"/model {other}", "and a city", f"/model {first}", "and a lake"]
    a, b, c = program.ask("--model", first, "--max-tokens", 8, "--save", "m", lines=lines)
    assert b["prefill_reused_tokens"] == 0
    assert c["prefill_reused_tokens"] == a["context_used"]
    (d,) = program.ask("--model", other, "--max-tokens", 8, "--resume", "m", lines=["and a hill"])
    assert d["prefill_reused_tokens"] == b["context_used"]


def test_a_character_of_many_tokens_is_whole_and_one_that_was_cut_is_shown_once(
    program: Program, tiny: Callable[[Any], Path], tmp_path: Path
) -> None:
    text = "😀🇯🇵 é 한"
    schema = tmp_path / "one.json"
    schema.write_text(json.dumps({"enum": [text]}))
    how = ("--model", tiny("qwen2"), "--ephemeral")
    whole, cut = program.ask(*how, lines=[f"/json {schema}", "say", "/max-tokens 3", "/new", "say"])[:2]
    assert json.loads(whole["text"]) == text
    assert cut["text"] == '"\N{REPLACEMENT CHARACTER}'


def test_what_a_template_refuses_is_told_in_its_words_and_not_kept(
    program: Program, tiny: Callable[[Any], Path], tmp_path: Path
) -> None:
    template = tmp_path / "refuses.jinja"
    refusal = "{% if 'bad' in m.content %}{{ raise_exception('no bad words') }}{% endif %}"
    template.write_text("{% for m in messages %}" + refusal + "{{ m.role }}: {{ m.content }}\n{% endfor %}")
    how = ("--model", tiny("qwen2"), "--chat-template", template, "--max-tokens", 4)
    _, failed = program.ask(*how, "--save", "x", lines=["hi", "bad", "never asked"])
    assert "no bad words" in failed["error"]["message"]
    assert program.code == 1
    (turn,) = program.ask(*how, "--resume", "x", lines=["good"])
    assert turn["finish_reason"] in ("length", "stop")
