"""Completion in a real bash: what `--show-completion` prints, read by the shell, and Tab pressed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pty_terminal import Terminal, shell_environment

BASH = shutil.which("bash")

pytestmark = pytest.mark.skipif(BASH is None, reason="bash is not installed")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Terminal]:
    """A bash that has read the completion; `goinfer-chat` is a command there."""
    assert BASH is not None
    with Terminal([BASH, "--norc", "--noprofile", "-i"], env=shell_environment(tmp_path)) as terminal:
        terminal.send("source <(SHELL=bash goinfer-chat --show-completion bash); bind 'set bell-style none'\n")
        terminal.wait(lambda: terminal.text.count("READY") == 2 and terminal.lines[-1] == "READY")
        yield terminal


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("goinfer-chat sess\t", "goinfer-chat sessions"),
        ("goinfer-chat run --think-t\t", "goinfer-chat run --think-tokens"),
        ("goinfer-chat --panel pan\t", "goinfer-chat --panel panel"),
        ("goinfer-chat --model qwen2.5-coder-0\t", "goinfer-chat --model qwen2.5-coder-0.5b"),
    ],
)
def test_tab_completes_commands_flags_and_their_words(shell: Terminal, typed: str, completed: str) -> None:
    shell.send(typed)
    shell.wait(lambda: shell.lines[-1] == f"READY {completed}")


def test_two_tabs_list_what_there_is(shell: Terminal) -> None:
    shell.send("goinfer-chat --theme \t")
    shell.settle(1.0)
    shell.send("\t")
    shell.wait(lambda: all(name in shell.text for name in ("auto", "dark", "light", "none")))
