"""Completion in real shells: what `--show-completion` prints, read by the shell, and Tab pressed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pty_terminal import Terminal, shell_environment
from store_helpers import kept

from goinfer_chat.store import Store

START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "--private"],
}
READ = {
    "bash": "source <(goinfer-chat --show-completion); bind 'set bell-style none'",
    "zsh": "bindkey -e; autoload -U compinit; compinit -u -D; source <(goinfer-chat --show-completion)",
    "fish": "goinfer-chat --show-completion | source",
}
NAMES = ("x $(touch ran)", "x$(touch ran)", "x`touch ran`", 'x";touch ran;"', "x';touch ran;'", "x:touch")
"""Of conversations, which a shell would run or part."""


@contextmanager
def started(name: str, folder: Path, *conversations: str) -> Iterator[Terminal]:
    """A shell in `folder` that has read the completion; `goinfer-chat` is a command there, with these conversations."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    with Store(folder / "sessions") as store:
        for conversation in conversations:
            kept(store, ("hi", "hello"), name=conversation)
    with Terminal(START[name], env=shell_environment(folder), columns=200) as terminal:
        terminal.send(f"cd '{folder}'; {READ[name]}; echo COMPLETION''READ\r")
        terminal.wait("COMPLETIONREAD")
        terminal.settle(0.2)
        yield terminal


@pytest.fixture(params=START)
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    with started(request.param, tmp_path, "holiday-plan") as terminal:
        yield terminal


def test_tab_completes_commands_flags_and_what_stands_behind_them(shell: Terminal) -> None:
    for typed, completed in (
        ("goinfer-chat sess", "goinfer-chat sessions"),
        ("goinfer-chat run --think-t", "goinfer-chat run --think-tokens"),
        ("goinfer-chat --panel pan", "goinfer-chat --panel panel"),
        ("goinfer-chat --model qwen2.5-coder-0", "goinfer-chat --model qwen2.5-coder-0.5b"),
        ("goinfer-chat pull qwen2.5-coder-0", "goinfer-chat pull qwen2.5-coder-0.5b"),
        ("goinfer-chat sessions show holi", "goinfer-chat sessions show holiday-plan"),
    ):
        shell.send(f"{typed}\t")
        shell.wait(lambda: shell.lines[-1].endswith(completed))  # noqa: B023 - waited for at once
        shell.send("\x15")
        shell.wait(lambda: not shell.lines[-1].endswith(completed))  # noqa: B023


def test_tabs_list_what_there_is(shell: Terminal) -> None:
    shell.send("goinfer-chat --theme \t\t")  # bash wants two
    shell.wait(lambda: all(name in shell.text for name in ("auto", "dark", "light", "none")))


@pytest.mark.parametrize("name", START)
def test_no_name_of_a_conversation_runs_a_command_at_a_tab(name: str, tmp_path: Path) -> None:
    asked = "complete -C 'goinfer-chat --resume x'\n" if name == "fish" else "goinfer-chat --resume x\t"
    with started(name, tmp_path, *NAMES, "xsafe-1.2") as terminal:
        terminal.send(asked)
        terminal.wait("xsafe-1.2")
        assert not (tmp_path / "ran").exists()
        assert "touch" not in terminal.text
