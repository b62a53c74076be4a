"""Writes docs/help.md: what `--help` says of every command. `python tests/write_help.py` from the project's folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from goinfer_chat.cli import build_app
from goinfer_chat.loading import load_engine

PAGE = Path(__file__).parents[1] / "docs" / "help.md"
WIDTH = 96
"""Columns that a block of code on a page has room for."""


def commands(command: Any, words: tuple[str, ...] = ("goinfer-chat",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A command and all below it, with the words that call each."""
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from commands(below, (*words, name))


def help_of(words: tuple[str, ...], command: Any) -> str:
    context = command.make_context(" ".join(words), ["--help"], resilient_parsing=True, terminal_width=WIDTH)
    context.max_content_width = WIDTH
    return str(command.get_help(context)).strip()


def page() -> str:
    parts = [
        "# What --help prints\n",
        "For those who look up a flag without starting the program: what `--help` prints for every command.",
        "Written by `python tests/write_help.py`; [cli.md](cli.md) explains the rest.",
    ]
    for words, command in commands(typer.main.get_command(build_app(load_engine))):
        parts.append(f"\n## {' '.join(words)}\n\n```text\n{help_of(words, command)}\n```")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
