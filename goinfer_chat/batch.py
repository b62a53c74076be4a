"""Turns without a prompt: a question on the command line, or a script on standard input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Final

from engine.errors import UsageError
from goinfer_chat.agent import Agent, Ask, tools_of
from goinfer_chat.conversations import Conversations
from goinfer_chat.engines import Engines
from goinfer_chat.script import CommandLine, Item, Turn
from goinfer_chat.settings import Settings
from goinfer_chat.shell import how_it_ended, run_shell_captured
from goinfer_chat.slash.commands import COMMANDS
from goinfer_chat.slash.conversation import cost, resumed
from goinfer_chat.slash.message import attached
from goinfer_chat.slash.registry import Outcome, ShellCommand
from goinfer_chat.terminal import Stream
from goinfer_chat.turn import play_turn
from goinfer_chat.view.render import View, notices

if TYPE_CHECKING:
    from goinfer_chat.calls.approval import Asker

COLUMNS: Final = 100
"""The width that lists are laid out for: there may be no screen to ask."""


def run_items(
    items: Iterator[Item],
    make_engines: Callable[[Conversations], Engines],
    settings: Settings,
    side: Stream,
    views: Callable[[Agent], Callable[[], View]],
    *,
    asker: Asker | None = None,
    prepare: Callable[[Agent], None] | None = None,
) -> int:
    """Each turn in order, until the end, /quit, an error, which is raised, or Ctrl-C. Returns the exit code.

    The model is loaded when the first item is there, so an empty script costs nothing.
    """
    first = next(items, None)
    if first is None:
        return 0
    with (
        tools_of(settings) as toolbox,
        Conversations.start(settings, at_prompt=False) as conversations,
        make_engines(conversations) as engines,
        closing(Agent(engines.current, settings, conversations, engines, asker=asker, toolbox=toolbox)) as agent,
    ):
        if prepare is not None:
            prepare(agent)
        make_view = views(agent)
        say = Stream(None) if settings.quiet else side
        for notice in (*notices(agent.engine.info), *(agent.toolbox.notices if agent.toolbox else ())):
            say.line(notice, dim=True)
        if agent.doubt:
            say.line(agent.doubt, dim=True)
        if agent.live is not None and agent.live.info.has_words:
            say.line(resumed(agent, with_words=False), dim=True)
            if line := cost(agent):
                say.line(line, dim=True)
        item: Item | None = first
        while item is not None:
            if isinstance(item, Turn):
                ask: Ask | None = agent.asked(item.text)
            else:
                outcome = _obey(agent, item, say)
                if outcome.quit:
                    return 0
                ask = outcome.ask
            if ask is not None and (code := play_turn(agent, ask, make_view()).exit_code):
                return code
            item = next(items, None)
    return 0


def _obey(agent: Agent, command: CommandLine, say: Stream) -> Outcome:
    """Run a slash command and what it asks for, except asking the model and ending. Raises what the command does."""
    if line := COMMANDS.foresee(agent, command):
        say.line(line, dim=True)
    outcome = COMMANDS.run(agent, command)
    if text := outcome.shown(COLUMNS):
        say.line(text)
    if outcome.copy is not None:
        say.line(outcome.copy)
    if outcome.shell is not None:
        _shell(agent, outcome.shell, say)
    if outcome.edit is not None:
        raise UsageError("/edit needs its TEXT in a script: there is no terminal for an editor")
    return outcome


def _shell(agent: Agent, command: ShellCommand, say: Stream) -> None:
    """Raises UsageError unless --shell allows it, and when the command fails, as every command that fails does."""
    if not agent.settings.shell:
        raise UsageError("/shell in a script needs the flag --shell: what others wrote could run anything")
    output, code = run_shell_captured(command.line, say.write)
    if code:
        raise UsageError(f"/shell {command.line}: {how_it_ended(code)}")
    if command.hand_over:
        say.line(attached(agent, output))


def question(text: str) -> Iterator[Item]:
    """A question on the command line as a script of one turn; it is never a command. Raises UsageError when empty."""
    if not text.strip():
        raise UsageError("the question is empty")
    return iter((Turn(text),))
