"""What a slash command is, and the registry that finds, runs and completes them.

A command changes the agent and returns what is left to do; it never writes to a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches

from engine.api import Prospect
from engine.errors import GoinferError, UsageError
from goinfer_chat import listing
from goinfer_chat.agent import Agent, Ask
from goinfer_chat.attachments import matching_files
from goinfer_chat.foresight import sentence
from goinfer_chat.script import CommandLine
from goinfer_chat.turn import turn_is_running


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command leaves to its caller: text to show, something to ask the model, the end of the program."""

    text: str = ""
    rows: Sequence[tuple[str, str]] = ()
    """A list of names and what they mean, to be laid out below the text; a row without a meaning is a heading."""
    table: Sequence[Sequence[str]] = ()
    """Rows of cells, to be laid out above the text; the last cells of all are left out where a line has no room."""
    ask: Ask | None = None
    edit: Ask | None = None
    """To be asked when a person has changed its text in an editor."""
    shell: ShellCommand | None = None
    """To be run in the person's own terminal."""
    copy: str | None = None
    """To be put on the clipboard, or shown where there is none."""
    quit: bool = False

    def shown(self, columns: int) -> str:
        """The table, the text and the rows, for lines of so many columns."""
        table = listing.columns(self.table, columns) if self.table else []
        return "\n".join([*table, *([self.text] if self.text else []), *listing.definitions(self.rows, columns)])


@dataclass(frozen=True, slots=True)
class ShellCommand:
    line: str
    hand_over: bool
    """Whether its output goes into the next message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    name: str
    help: str
    run: Callable[[Agent, str], Outcome]
    """Called with what follows the name, stripped. Raises UsageError, and StoreError where the store is needed."""
    arguments: str = ""
    """As in a usage line; empty when the command takes none."""
    aliases: tuple[str, ...] = ()
    complete: Callable[[Agent], Sequence[str]] = lambda agent: ()
    """What may follow the name."""
    costs: Callable[[Agent, str], Prospect | None] | None = None
    """What the next prompt would cost after the command; changes nothing. None: no more than without it."""
    tells_problem: bool = False
    """Whether the line about the cost also says what is wrong with the kept cache."""
    takes_file: bool = False
    """Whether a file follows the name."""
    topic: str = "program"
    """The heading in /help."""

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.arguments}".rstrip()


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    help: str
    num_typed: int
    """How many characters before the cursor it replaces."""


class Registry:
    def __init__(self, commands: Sequence[Command]) -> None:
        self.commands = tuple(commands)
        self._by_name = {name: command for command in commands for name in (command.name, *command.aliases)}

    @property
    def topics(self) -> dict[str, list[Command]]:
        """Commands by the heading of /help, in the order of the table."""
        topics: dict[str, list[Command]] = {}
        for command in self.commands:
            topics.setdefault(command.topic, []).append(command)
        return topics

    def run(self, agent: Agent, line: CommandLine) -> Outcome:
        """Raises UsageError for an unknown command, or for an argument it does not take."""
        command = self.find(line.name)
        if line.argument and not command.arguments:
            raise UsageError(f"/{command.name} takes no argument")
        return command.run(agent, line.argument)

    def foresee(self, agent: Agent, line: CommandLine) -> str:
        """What to say before a command that costs a prefill; else nothing, also where the command will be refused."""
        command = self._by_name.get(line.name)
        if command is None or command.costs is None or turn_is_running():
            return ""
        with suppress(GoinferError):
            return sentence(agent, command.costs(agent, line.argument), with_problem=command.tells_problem)
        return ""

    def find(self, name: str) -> Command:
        """The command of that name. Raises UsageError that suggests a near one."""
        if command := self._by_name.get(name):
            return command
        begun = [known for known in self._by_name if known.startswith(name)] if name else []
        near = begun if len(begun) == 1 else get_close_matches(name, self._by_name, n=1)
        advice = f"did you mean /{near[0]}?" if near else "/help lists the commands"
        raise UsageError(f"there is no command /{name}; {advice} (a message that starts with / is typed with //)")

    def completions(self, agent: Agent, text: str) -> list[Completion]:
        """What the name or the argument of a command line could become. Empty for other lines."""
        if not text.startswith("/") or text.startswith("//"):
            return []
        name, space, argument = text[1:].partition(" ")
        if not space:
            names = [command for command in self.commands if command.name.startswith(name)]
            return [Completion(f"/{command.name}", command.help, len(text)) for command in names]
        command, argument = self._by_name.get(name), argument.lstrip()
        if command is not None and command.takes_file:
            return [Completion(file, "", len(argument)) for file in matching_files(argument)]
        choices = command.complete(agent) if command else ()
        return [Completion(choice, "", len(argument)) for choice in choices if choice.startswith(argument)]
