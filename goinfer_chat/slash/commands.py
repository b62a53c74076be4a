"""Every slash command: the ones here, and those of each area from a file of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from engine.errors import UsageError
from goinfer_chat.agent import Agent
from goinfer_chat.slash.conversation import CONVERSATION_COMMANDS
from goinfer_chat.slash.message import MESSAGE_COMMANDS
from goinfer_chat.slash.model import MODEL_COMMANDS
from goinfer_chat.slash.registry import Command, Outcome, Registry
from goinfer_chat.slash.setting import setting_commands
from goinfer_chat.slash.tool import TOOL_COMMANDS
from goinfer_chat.slash.view import VIEW_COMMANDS


def _help(registry: Callable[[], Registry]) -> Command:
    def run(_agent: Agent, argument: str) -> Outcome:
        topics = registry().topics
        if argument in topics:  # the command of that name too, which may stand under another topic
            named = [command for command in registry().commands if command.name == argument]
            return Outcome(rows=_rows([*(c for c in named if c not in topics[argument]), *topics[argument]]))
        if argument and argument != "all":
            command = _found(registry(), argument)
            return Outcome(f"{command.usage}\n    {command.help}")
        rows: list[tuple[str, str]] = []
        for topic, commands in topics.items():
            rows += [(topic, ""), *_rows(commands)]
        return Outcome(rows=[*rows, ("a message", ""), *_MESSAGE])

    return Command(
        name="help",
        arguments="[COMMAND | TOPIC]",
        help="List all commands or those of a topic, or explain one command.",
        run=run,
        complete=lambda _agent: [*registry().topics, *(command.name for command in registry().commands)],
    )


_MESSAGE: Final = (
    ("Alt-Enter, Ctrl-J", "start another line"),
    ('"""', "alone on a line, starts and ends a message of several lines"),
    ("@FILE, @FILE#10-40", "attach a file, or some lines of it"),
    ("!COMMAND, !!COMMAND", "run a shell command; !! also attaches its output to the next message"),
    ("//", "starts a message that begins with /"),
    ("Ctrl-R, Ctrl-X Ctrl-E", "search what you typed before; write in $EDITOR"),
)


def _rows(commands: list[Command]) -> list[tuple[str, str]]:
    return [(command.usage, command.help) for command in commands]


def _found(registry: Registry, argument: str) -> Command:
    """The command of that name. Raises UsageError that names the topics too."""
    try:
        return registry.find(argument.removeprefix("/"))
    except UsageError as error:
        raise UsageError(f"{error}; topics: {', '.join(registry.topics)}") from None


def _quit(_agent: Agent, _argument: str) -> Outcome:
    return Outcome(quit=True)


def build_registry() -> Registry:
    """Every command there is, and one for each setting that a chat can change."""
    registry = Registry(
        [
            _help(lambda: registry),
            Command(name="quit", help="Leave the program; Ctrl-D does too.", run=_quit, aliases=("exit", "bye")),
            *CONVERSATION_COMMANDS,
            *MESSAGE_COMMANDS,
            *TOOL_COMMANDS,
            *VIEW_COMMANDS,
            *MODEL_COMMANDS,
            *setting_commands(),
        ]
    )
    return registry


COMMANDS: Final = build_registry()
