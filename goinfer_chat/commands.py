"""Slash commands, in one registry that runs them, completes them and writes their help.

A command changes the agent and returns text to show; it never writes to a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from engine.errors import UsageError
from goinfer_chat.agent import Agent
from goinfer_chat.script import CommandLine
from goinfer_chat.settings import SETTINGS, Setting


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command leaves to its caller: text to show, and whether the program ends."""

    text: str = ""
    quit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    name: str
    help: str
    run: Callable[[Agent, str], Outcome]
    """Called with what follows the name, stripped. Raises UsageError."""
    arguments: str = ""
    """As in a usage line; empty when the command takes none."""
    aliases: tuple[str, ...] = ()
    complete: Callable[[Agent], Sequence[str]] = lambda agent: ()
    """What may follow the name."""

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.arguments}".rstrip()


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

    def completions(self, agent: Agent, text: str) -> list[tuple[str, str]]:
        """What the last word of a command line could become, each with a line of help. Empty for other lines."""
        if not text.startswith("/") or text.startswith("//"):
            return []
        name, space, argument = text[1:].partition(" ")
        if not space:
            return [(f"/{command.name}", command.help) for command in self.commands if command.name.startswith(name)]
        command = self._by_name.get(name)
        choices = command.complete(agent) if command else ()
        return [(choice, "") for choice in choices if choice.startswith(argument.lstrip())]


def _help(registry: Callable[[], Registry]) -> Command:
    def run(_agent: Agent, argument: str) -> Outcome:
        if argument:
            command = registry().find(argument.removeprefix("/"))
            return Outcome(f"{command.usage}\n    {command.help}")
        commands = registry().commands
        width = max(len(command.usage) for command in commands)
        lines = [f"{command.usage:<{width}}  {command.help}" for command in commands]
        return Outcome("\n".join([*lines, 'A line of """ starts and ends a message of several lines.']))

    return Command(
        name="help",
        arguments="[COMMAND]",
        help="List the commands, or explain one.",
        run=run,
        complete=lambda _agent: [command.name for command in registry().commands],
    )


def _quit(_agent: Agent, _argument: str) -> Outcome:
    return Outcome(quit=True)


def _reset(agent: Agent, _argument: str) -> Outcome:
    agent.reset()
    return Outcome("The conversation starts anew; the system prompt stays.")


def _system(agent: Agent, argument: str) -> Outcome:
    if argument:
        agent.settings = agent.settings.changed({"system": None if argument == "none" else argument})
    system = agent.settings.system
    return Outcome("There is no system prompt." if system is None else f"System prompt: {system}")


def _params(agent: Agent, _argument: str) -> Outcome:
    info, reply = agent.engine.info, agent.last_reply
    rows = [(setting.flag, _show(agent, setting)) for setting in SETTINGS if setting.in_chat]
    rows += [
        ("system", agent.settings.system or "none"),
        ("model", f"{info.name} ({info.architecture}, {info.quantization}, {info.num_parameters:,} parameters)"),
        ("context", f"{reply.stats.context_used if reply else 0:,} of {info.context_size:,} tokens used"),
        ("engine", f"{info.backend}, {info.kernels}, {info.threads} threads"),
    ]
    width = max(len(name) for name, _ in rows)
    return Outcome("\n".join(f"{name:<{width}}  {value}" for name, value in rows))


def _show(agent: Agent, setting: Setting) -> str:
    value = agent.settings.value(setting.name)
    if isinstance(value, tuple):
        return " ".join(repr(item) for item in value) or "none"
    return "none" if value is None else str(value)


def _setting(setting: Setting) -> Command:
    def run(agent: Agent, argument: str) -> Outcome:
        if argument:
            agent.settings = agent.settings.changed({setting.name: setting.parse(argument)})
        return Outcome(f"{setting.flag} {_show(agent, setting)}")

    return Command(
        name=setting.flag,
        arguments=f"[{setting.argument}]",
        help=setting.help,
        run=run,
        complete=lambda agent: [_show(agent, setting)],
    )


def build_registry() -> Registry:
    """Every command there is: the ones with a function above, and one for each setting that a chat can change."""
    registry = Registry(
        [
            _help(lambda: registry),
            Command(name="quit", help="End the program; so does Ctrl-D.", run=_quit, aliases=("exit",)),
            Command(name="reset", help="Forget the conversation.", run=_reset),
            Command(
                name="system",
                arguments="[TEXT | none]",
                help="Show or change the system prompt; the words so far are read again under it.",
                run=_system,
            ),
            Command(name="params", help="Show every setting, the model and the context.", run=_params),
            *(_setting(setting) for setting in SETTINGS if setting.in_chat),
        ]
    )
    return registry


COMMANDS: Final = build_registry()
