"""The prompt: one line in, one turn or command out, until Ctrl-D."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, create_app_session
from prompt_toolkit.application.current import get_app_or_none
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.plain_text import PlainTextOutput
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.styles import Attrs

from engine.errors import UsageError
from goinfer_chat.agent import Agent, Ask
from goinfer_chat.commands import COMMANDS
from goinfer_chat.conversation_commands import recent, resumed
from goinfer_chat.editor import edited
from goinfer_chat.listing import excerpt
from goinfer_chat.render import View, banner, report_error
from goinfer_chat.script import Item, Turn, read_item
from goinfer_chat.store import StoreError
from goinfer_chat.terminal import OutputError, QuietTerminal, Stream, true_text
from goinfer_chat.turn import play_turn


def run_repl(agent: Agent, terminal: QuietTerminal, screen: Stream, make_view: Callable[[], View]) -> int:
    """Turns and commands until Ctrl-D or /quit; an error is one line and costs only its turn. Returns the exit code.

    The caller has made the terminal quiet (`terminal.quiet_terminal`).
    """
    _begin(agent, screen)
    prompt = Prompt(agent, screen)
    with _ending_on_signals() as ending:
        while ending.exit_code is None:
            try:
                item = read_item(prompt)
                if item is not None and not _run_item(agent, item, terminal, screen, make_view):
                    return 0
            except _Ended:
                break
            except EOFError:
                return 0
            except _LineCleared:
                screen.line("Ctrl-D or /quit ends", dim=True)
            except OutputError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a turn does, the next one can be tried
                report_error(error, screen)
        return ending.exit_code or 0


def _begin(agent: Agent, screen: Stream) -> None:
    """What a person should see before the first prompt."""
    if not agent.settings.quiet:
        for line in banner(agent.engine.info):
            screen.line(line, dim=True)
    if agent.conversations.problem is not None:
        report_error(agent.conversations.problem, screen)
        screen.line("nothing of this chat is kept", dim=True)
    if agent.settings.quiet:
        return
    if agent.live is not None and agent.live.info.has_words:
        screen.line(resumed(agent), dim=True)
    elif agent.live is None:
        with suppress(StoreError):  # the first turn says it
            for line in recent(agent):
                screen.line(line, dim=True)


def _run_item(agent: Agent, item: Item, terminal: QuietTerminal, screen: Stream, make_view: Callable[[], View]) -> bool:
    """False when the program ends."""
    if isinstance(item, Turn):
        play_turn(agent, Ask(text=item.text), make_view())
        return True
    outcome = COMMANDS.run(agent, item)
    if outcome.text:
        screen.line(outcome.text)
    ask = outcome.ask
    if outcome.edit is not None:
        with terminal.lent():
            text = edited(outcome.edit.text or "")
        if not text.strip() or text == outcome.edit.text:
            raise UsageError("the message was not changed, so nothing was asked")
        ask = replace(outcome.edit, text=text)
        screen.line(f"> {excerpt(text)}")
    if ask is not None:
        play_turn(agent, ask, make_view())
    return not outcome.quit


class _LineCleared(Exception):  # noqa: N818 - not an error
    """Ctrl-C at an empty prompt, which also leaves a block that was begun."""


class Prompt:
    """The line editor. Called with whether the line belongs to a block, it returns the line; EOFError at Ctrl-D."""

    def __init__(self, agent: Agent, screen: Stream) -> None:
        assert screen.file is not None
        self._session: PromptSession[str]
        if screen.moves:
            self._session = PromptSession(
                output=Screen.on(screen.file, colour=screen.colour),
                completer=_Commands(agent),
                complete_while_typing=False,
                enable_suspend=True,
                key_bindings=_keys(),
                interrupt_exception=_LineCleared,
            )
            return
        # prompt_toolkit has a prompt without cursor movement, but not for a terminal whose TERM is not set, and only
        # when no output is given; without one it would make one that moves the cursor once.
        os.environ["TERM"] = "dumb"
        with create_app_session(output=PlainTextOutput(screen.file)):
            self._session = PromptSession(interrupt_exception=_LineCleared)

    def __call__(self, inside_block: bool) -> str:
        try:
            return true_text(self._session.prompt("... " if inside_block else "> "))
        except EOFError:
            if inside_block:
                raise _LineCleared from None
            raise


class Screen(Vt100_Output):
    """A terminal that is never asked where its cursor is, and has no styles where NO_COLOR is set.

    The answer to such a question comes in as typing, late on a slow line and never in a script's pty.
    """

    colour = True

    @classmethod
    def on(cls, file: TextIO, *, colour: bool) -> Screen:
        screen = cls.from_pty(file, term=os.environ.get("TERM"))
        assert isinstance(screen, cls)
        screen.colour = colour
        return screen

    @property
    def responds_to_cpr(self) -> bool:
        return False

    def set_attributes(self, attrs: Attrs, color_depth: ColorDepth) -> None:
        if self.colour:
            super().set_attributes(attrs, color_depth)

    def reset_attributes(self) -> None:
        if self.colour:
            super().reset_attributes()


class _Commands(Completer):
    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        for found in COMMANDS.completions(self._agent, document.text_before_cursor):
            yield Completion(found.text, start_position=-found.num_typed, display_meta=found.help)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("c-c", filter=has_focus(DEFAULT_BUFFER))
    @keys.add("<sigint>")
    def _clear(event: KeyPressEvent) -> None:
        if event.app.current_buffer.text:
            event.app.current_buffer.reset()
        else:
            event.app.exit(exception=_LineCleared())

    return keys


class _Ended(Exception):  # noqa: N818 - not an error
    """A signal ended the prompt."""


@dataclass
class _Ending:
    exit_code: int | None = None
    """Set once a signal asked for the end."""

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.exit_code = 128 + number
        app = get_app_or_none()
        if app is None or not app.is_running:
            sys.exit(self.exit_code)
        # An exception in the middle of prompt_toolkit would leave the paste mode on: it ends by its own road.
        if app.loop is not None and not app.is_done:
            app.loop.call_soon_threadsafe(_end_prompt, app)


def _end_prompt(app: Application[Any]) -> None:
    if app.is_running and not app.is_done:
        app.exit(exception=_Ended())


@contextmanager
def _ending_on_signals() -> Iterator[_Ending]:
    """SIGTERM and SIGHUP unwind the program, so that the terminal is restored; SIGINT between turns does nothing."""
    ending = _Ending()

    def ignore(_number: int, _frame: FrameType | None) -> None:
        pass

    previous = {number: signal.signal(number, ending) for number in (signal.SIGTERM, signal.SIGHUP)}
    previous[signal.SIGINT] = signal.signal(signal.SIGINT, ignore)
    try:
        yield ending
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
