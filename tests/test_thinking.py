"""A model that thinks, through the whole program: what it reasons is shown or told apart, and is never in a reply.

The model has random weights: its template begins to think, and a budget of tokens ends it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from http_server import running_server
from pty_terminal import Terminal
from tiny_models import write_tiny_model

from engine import load
from goinfer_chat.agent import Agent
from goinfer_chat.script import CommandLine
from goinfer_chat.settings import Settings
from goinfer_chat.slash.commands import COMMANDS
from goinfer_chat.terminal import sanitize

ENTER = "\r"
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content.split('</think>')[-1] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- else %}{{ '<think>\\n' }}{% endif %}
{%- endif %}"""
BUDGET = (
    "--think-tokens",
    "8",
    "--max-tokens",
    "40",
    "--temperature",
    "9",
    "--top-k",
    "0",
    "--top-p",
    "1",
    "--spec",
    "off",
)
"""Nearly any token may come next: not all of them are blanks, which would be no reasoning."""
SEED = ("--seed", "5")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    metadata = {"tokenizer.chat_template": TEMPLATE}
    return write_tiny_model(tmp_path / "thinks.gguf", "qwen3", metadata=metadata)


def command(model: Path, *arguments: str) -> list[str]:
    own = ("--session-dir", str(model.parent / "sessions"), "--panel", "panel")
    return [sys.executable, "-m", "goinfer_chat", "--model", str(model), *own, *BUDGET, *SEED, *arguments]


def lines_of(model: Path, turns: str, *arguments: str) -> list[dict[str, Any]]:
    asked = command(model, "--json", "--ids", *arguments)
    done = subprocess.run(asked, input=turns, capture_output=True, text=True, check=True, timeout=120)
    return [json.loads(line) for line in done.stdout.splitlines()]


def after(turn: dict[str, Any]) -> int:
    """Tokens in the cache after a turn: all but the last one, which was drawn and never evaluated."""
    count: int = turn["prompt_tokens"] + turn["completion_tokens"] - 1
    return count


def test_a_script_tells_reasoning_from_reply_and_has_it_in_the_cache_for_the_next_turn(model: Path) -> None:
    first, second, off, auto = lines_of(model, "one\ntwo\n/think off\nthree\n/think auto\nfour\n")
    for turn in (first, second, auto):
        assert turn["thinking"]
        assert "think>" not in turn["text"] + turn["thinking"]
        assert len(turn["reply_ids"]) == turn["completion_tokens"] > 8
    assert off["thinking"] is None
    assert off["text"]
    assert second["prefill_reused_tokens"] >= after(first)
    assert second["prompt_ids"][: after(first) + 1] == first["prompt_ids"] + first["reply_ids"]
    # Whether to think is told behind what was said, so to change it costs no prefill.
    assert off["prefill_reused_tokens"] >= after(second)
    assert auto["prefill_reused_tokens"] >= after(off)


def test_a_pipe_gets_the_reply_alone(model: Path) -> None:
    [told] = lines_of(model, "one\n")
    done = subprocess.run(command(model, "run", "one"), capture_output=True, timeout=120, check=True)
    assert done.stdout.decode().rstrip("\n") == sanitize(told["text"], terminal=False).rstrip("\n")
    assert told["thinking"] not in done.stdout.decode()
    [off] = lines_of(model, "one\n", "--think", "off")
    assert off["thinking"] is None


def test_at_the_prompt_reasoning_is_dim_folded_and_can_be_asked_for(model: Path) -> None:
    with Terminal(command(model), env={"XDG_DATA_HOME": str(model.parent)}) as terminal:
        terminal.wait_for_prompt(60)
        terminal.send("one" + ENTER)
        terminal.wait("TTFT")
        terminal.wait_for_prompt()
        assert re.search(r"\x1b\[2mthought for \d+\.\d s, [\d,]+ words?; /thinking shows them\x1b\[0m", terminal.raw)
        terminal.send("/thinking" + ENTER)
        terminal.wait_for_prompt()
        terminal.send("/think off" + ENTER)
        terminal.wait("think off")
        terminal.wait_for_prompt()
        folded = terminal.raw.count("thought for")
        terminal.send("two" + ENTER)
        terminal.wait(lambda: terminal.text.count("TTFT") == 2)
        assert terminal.raw.count("thought for") == folded


def test_a_server_tells_reasoning_from_content(model: Path) -> None:
    with running_server(model) as server:
        body = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 40, "temperature": 2, "seed": 5}
        message = server.ask("/v1/chat/completions", body).json["choices"][0]["message"]
        assert message["reasoning_content"]  # without a budget it thinks to the end
        assert not message["content"]
        off = server.ask("/v1/chat/completions", {**body, "chat_template_kwargs": {"enable_thinking": False}})
        message = off.json["choices"][0]["message"]
        assert message["content"]
        assert not message.get("reasoning_content")
        del body["seed"]
        budget = {"type": "enabled", "budget_tokens": 8}
        thought, said = server.ask("/v1/messages", {**body, "thinking": budget}).json["content"]
        assert (thought["type"], said["type"]) == ("thinking", "text")
        assert "think>" not in thought["thinking"] + said["text"]


@pytest.mark.parametrize(
    ("template", "said"), [(TEMPLATE, "think on"), ("{{ messages }}", "think on; this model is not known to think")]
)
def test_thinking_turned_on_tells_of_a_model_that_is_not_known_to(tmp_path: Path, template: str, said: str) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", "qwen3", metadata={"tokenizer.chat_template": template})
    with load(path) as engine:
        agent = Agent(engine, Settings())
        with agent.conversations:
            assert COMMANDS.run(agent, CommandLine("think", "on")).shown(100) == said
            assert COMMANDS.run(agent, CommandLine("set", "think on")).shown(100) == said
            assert COMMANDS.run(agent, CommandLine("think", "off")).shown(100) == "think off"
