"""Every slash command: the ones here, one for each setting, and those about conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from engine.api import ModelInfo
from goinfer_chat.agent import Agent
from goinfer_chat.conversation_commands import CONVERSATION_COMMANDS, called, cost
from goinfer_chat.registry import Command, Outcome, Registry
from goinfer_chat.settings import SETTINGS, Setting


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


def _system(agent: Agent, argument: str) -> Outcome:
    if argument:
        agent.set_system(None if argument == "none" else argument)
    system = agent.settings.system
    text = "There is no system prompt." if system is None else f"System prompt: {system}"
    return Outcome(text + cost(agent))


def _params(agent: Agent, _argument: str) -> Outcome:
    info = agent.engine.info
    used = (agent.live.info.context_tokens if agent.live else None) or 0
    rows = [(setting.flag, _show(agent, setting)) for setting in SETTINGS if setting.in_chat]
    rows += [
        ("system", agent.settings.system or "none"),
        ("model", f"{info.name} ({info.architecture}, {info.quantization}, {info.num_parameters:,} parameters)"),
        ("context", f"{used:,} of {info.context_size:,} tokens used"),
        ("cache", _cache(info, used)),
        ("conversation", called(agent)),
        ("engine", f"{info.backend}, {info.kernels}, {info.threads} threads"),
    ]
    width = max(len(name) for name, _ in rows)
    return Outcome("\n".join(f"{name:<{width}}  {value}" for name, value in rows))


def _cache(info: ModelInfo, used: int) -> str:
    """What the K/V of a position take, those of this conversation, and those of a full context."""
    each = info.kv_bytes_per_token
    kv_type = f"{info.kv_type}, " if info.kv_type else ""
    return f"{kv_type}{each:,} bytes a token, {used * each:,} in all, {info.context_size * each:,} when full"


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
            *CONVERSATION_COMMANDS,
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
