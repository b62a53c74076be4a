"""What a slash command is, and the registry that finds, runs and completes them.

A command changes the agent and returns what is left to do; it never writes to a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from engine.errors import UsageError
from goinfer_chat.agent import Agent, Ask
from goinfer_chat.script import CommandLine


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command leaves to its caller: text to show, something to ask the model, the end of the program."""

    text: str = ""
    ask: Ask | None = None
    edit: Ask | None = None
    """To be asked when a person has changed its text in an editor."""
    quit: bool = False


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

    def run(self, agent: Agent, line: CommandLine) -> Outcome:
        """Raises UsageError for an unknown command, or for an argument it does not take."""
        command = self.find(line.name)
        if line.argument and not command.arguments:
            raise UsageError(f"/{command.name} takes no argument")
        return command.run(agent, line.argument)

    def find(self, name: str) -> Command:
        """The command of that name. Raises UsageError that suggests a near one."""
        if command := self._by_name.get(name):
            return command
        near = get_close_matches(name, self._by_name, n=1)
        advice = f"did you mean /{near[0]}?" if near else "/help lists the commands"
        raise UsageError(f"there is no command /{name}; {advice} (a message may start with //)")

    def completions(self, agent: Agent, text: str) -> list[Completion]:
        """What the name or the argument of a command line could become. Empty for other lines."""
        if not text.startswith("/") or text.startswith("//"):
            return []
        name, space, argument = text[1:].partition(" ")
        if not space:
            names = [command for command in self.commands if command.name.startswith(name)]
            return [Completion(f"/{command.name}", command.help, len(text)) for command in names]
        command, argument = self._by_name.get(name), argument.lstrip()
        choices = command.complete(agent) if command else ()
        return [Completion(choice, "", len(argument)) for choice in choices if choice.startswith(argument)]
