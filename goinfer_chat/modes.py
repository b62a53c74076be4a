"""How the program runs: at a prompt, or through turns that are already written."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Protocol

from engine.api import Engine
from engine.errors import UsageError
from goinfer_chat.agent import Agent, tools_of
from goinfer_chat.batch import question, run_items
from goinfer_chat.conversations import Conversations
from goinfer_chat.engines import Engines
from goinfer_chat.loading import find_model, look_at_model
from goinfer_chat.script import CommandLine, Item, read_script
from goinfer_chat.settings import Settings
from goinfer_chat.terminal import QuietTerminal, Stream, quiet_terminal, true_text
from goinfer_chat.views import Views, draws


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

    from goinfer_chat.calls.approval_prompt import PersonAsker
    from goinfer_chat.repl import run_repl

    # With standard output in a file the conversation still needs a terminal, and the file gets the replies alone.
    screen = replies if replies.terminal else side
    with (
        quiet_terminal(sys.stdin, keep_typing=True) as terminal,
        tools_of(settings) as toolbox,
        Conversations.start(settings, at_prompt=True) as conversations,
        engines_of(make_engine, settings, screen, conversations) as engines,
        closing(
            Agent(
                engines.current,
                settings,
                conversations,
                engines,
                asker=PersonAsker(screen, terminal),
                toolbox=toolbox,
            )
        ) as agent,
    ):
        views = Views(agent, replies, screen, at_prompt=True)
        try:
            return run_repl(agent, terminal, screen, views)
        finally:
            views.keep()


def run(settings: Settings, make_engine: EngineFactory, text: str | None, attach: Sequence[str] = ()) -> int:
    """One question; `-` is all of standard input, and None the script there. Returns the exit code.

    `attach`: files that go into the first message.
    """
    replies, side = Stream(sys.stdout), Stream(sys.stderr)
    if text is None and sys.stdin.isatty():
        raise UsageError("run needs a question; for a prompt, start goinfer-chat without run")
    files: list[Item] = [CommandLine("attach", file) for file in attach]
    if text is None:
        return _run(chain(files, read_script(sys.stdin.buffer)), settings, make_engine, replies, side)
    asked = text_of(text) or ""
    items: Iterator[Item] = chain(files, question(asked)) if text != "-" or asked.strip() else iter(())
    return _run(items, settings, make_engine, replies, side)


def text_of(text: str | None) -> str | None:
    """What was asked on the command line: `-`, or nothing without a terminal, means all of standard input."""
    if text == "-" or (text is None and not sys.stdin.isatty()):
        return sys.stdin.buffer.read().decode("utf-8", "replace")
    return None if text is None else true_text(text)


def _run(items: Iterator[Item], settings: Settings, make_engine: EngineFactory, replies: Stream, side: Stream) -> int:
    engines = partial(engines_of, make_engine, settings, side)
    with quiet_while_drawing(settings, replies, side):
        return run_items(items, engines, settings, side, partial(Views, replies=replies, side=side))


@contextmanager
def quiet_while_drawing(settings: Settings, replies: Stream, side: Stream) -> Iterator[QuietTerminal]:
    """What is typed meanwhile is not echoed into what is drawn: it waits for whoever reads the terminal next."""
    if not draws(settings, replies, side):
        yield QuietTerminal()
        return
    with quiet_terminal(sys.stdin) as terminal:
        yield terminal


def engines_of(make_engine: EngineFactory, settings: Settings, side: Stream, conversations: Conversations) -> Engines:
    """The engine for these settings, and those that may follow; progress goes to `side`."""
    return Engines(
        load=lambda chosen: make_engine(chosen, side, conversations.kv_folder),
        find=lambda chosen: chosen.base_url or find_model(chosen.model, Stream(None) if chosen.quiet else side),
        settings=settings,
        look=lambda chosen: None if chosen.base_url else look_at_model(chosen, conversations.kv_folder),
    )
