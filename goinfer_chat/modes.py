"""How the program runs: at a prompt, or through turns that are already written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

from engine.api import Engine
from engine.errors import UsageError
from goinfer_chat.agent import Agent
from goinfer_chat.batch import question, run_items
from goinfer_chat.conversations import Conversations
from goinfer_chat.render import JsonView, TextView, View
from goinfer_chat.script import Item, read_script
from goinfer_chat.settings import Settings
from goinfer_chat.terminal import Stream, quiet_terminal, true_text
from goinfer_chat.turn import open_engine


class EngineFactory(Protocol):
    def __call__(self, settings: Settings, side: Stream, kv_folder: Path | None = None) -> Engine:
        """The engine for these settings; progress goes to `side`, and caches are kept in `kv_folder`, if anywhere.

        Raises ModelError or UsageError.
        """
        ...


def chat(settings: Settings, make_engine: EngineFactory) -> int:
    """A prompt where a person can type and see; else the turns of standard input. Returns the exit code."""
    replies, side = Stream(sys.stdout), Stream(sys.stderr)
    if not sys.stdin.isatty() or not (replies.terminal or side.terminal):
        return _run(read_script(sys.stdin.buffer), settings, make_engine, replies, side)

    from goinfer_chat.repl import run_repl

    # With standard output in a file the conversation still needs a terminal, and the file gets the replies alone.
    screen = replies if replies.terminal else side
    with (
        quiet_terminal(sys.stdin) as terminal,
        Conversations.start(settings, at_prompt=True) as conversations,
        open_engine(make_engine(settings, screen, conversations.kv_folder)) as engine,
    ):
        agent = Agent(engine, settings, conversations)
        return run_repl(agent, terminal, screen, partial(_view, settings, replies, screen))


def run(settings: Settings, make_engine: EngineFactory, text: str | None) -> int:
    """One question; `-` is all of standard input, and None the script there. Returns the exit code."""
    replies, side = Stream(sys.stdout), Stream(sys.stderr)
    if text == "-":
        text = sys.stdin.buffer.read().decode("utf-8", "replace")
        items: Iterator[Item] = question(text) if text.strip() else iter(())
    elif text is not None:
        items = question(true_text(text))
    elif sys.stdin.isatty():
        raise UsageError("run needs a question; without one, goinfer-chat opens a prompt")
    else:
        items = read_script(sys.stdin.buffer)
    return _run(items, settings, make_engine, replies, side)


def _run(items: Iterator[Item], settings: Settings, make_engine: EngineFactory, replies: Stream, side: Stream) -> int:
    return run_items(
        items, partial(make_engine, settings, side), settings, side, partial(_view, settings, replies, side)
    )


def _view(settings: Settings, replies: Stream, side: Stream) -> View:
    if settings.json:
        return JsonView(replies, side, ids=settings.ids, quiet=settings.quiet)
    return TextView(replies, side, quiet=settings.quiet)
