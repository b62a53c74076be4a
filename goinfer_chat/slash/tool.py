"""Slash commands about tools, and about replies that follow a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from engine.api import Prospect
from engine.errors import GoinferError, UsageError
from goinfer_chat.agent import Agent, Ask
from goinfer_chat.amounts import counted
from goinfer_chat.files import read_text
from goinfer_chat.foresight import about_to_ask, foresee, standing
from goinfer_chat.slash.registry import Command, Outcome
from goinfer_chat.terminal import true_text

if TYPE_CHECKING:
    from goinfer_chat.calls.toolbox import Toolbox


def _tools(agent: Agent, argument: str) -> Outcome:
    toolbox = agent.open_toolbox()
    _choose(toolbox, argument.split())
    rows = [
        (f"{'on ' if tool.name in toolbox.in_use else 'off'}  {tool.name:<16} {tool.risk:<6}", tool.description)
        for tool in toolbox.registry.tools
    ]
    where = f"The tools work in {toolbox.root.path}."
    return Outcome("\n".join([*toolbox.notices, where]), rows=rows)


def _choose(toolbox: Toolbox, words: Sequence[str]) -> None:
    """Turn tools on or off. Raises UsageError."""
    from goinfer_chat.calls.toolbox import OFF, ON, Choice

    if any(word.endswith(".py") for word in words):
        raise UsageError("a file of tools is given at the start: --tools FILE.py")
    if words == [ON] or words == [OFF]:
        toolbox.use(Choice(on=words == [ON]))
    elif words:
        names = set(toolbox.in_use) ^ set(words)
        for word in words:
            toolbox.use(Choice(names=(word,), on=True))  # refuses a name that is not there
        toolbox.use(Choice(names=tuple(names), on=bool(names)))


def _cost_of_tools(agent: Agent, argument: str) -> Prospect | None:
    toolbox = agent.open_toolbox()
    before = toolbox.in_use
    try:
        _choose(toolbox, argument.split())
        return foresee(agent, standing(agent)) if toolbox.in_use != before else None
    finally:
        toolbox.in_use = before


def _cost_of_call(agent: Agent, argument: str) -> Prospect | None:
    name, _, text = argument.partition(" ")
    there = about_to_ask(agent, Ask(text=text.strip())) if text.strip() else standing(agent)
    return foresee(agent, there, tools=agent.open_toolbox().offered(name)) if name else None


def _call(agent: Agent, argument: str) -> Outcome:
    name, _, text = argument.partition(" ")
    if not name:
        raise UsageError("/call needs the name of a tool; /tools lists them")
    agent.open_toolbox().offered(name)  # refuses a name that is not there
    if text.strip():
        return Outcome(ask=Ask(text=text.strip(), tool=name))
    agent.next_tool = name
    return Outcome(f"The next reply calls {name}.")


def _json(agent: Agent, argument: str) -> Outcome:
    if argument in ("off", "none"):
        agent.schema = None
    elif argument:
        agent.schema = parse_schema(argument)
    if agent.schema is None:
        return Outcome("Replies are any text.")
    about = "any JSON" if agent.schema is True else f"JSON that is valid under {json.dumps(agent.schema)}"
    tools = " Tools are not called meanwhile." if agent.toolbox is not None and agent.toolbox.in_use else ""
    return Outcome(f"Replies are {about}; /json off ends that.{tools}")


def parse_schema(text: str) -> Mapping[str, Any] | bool:
    """`on` for any JSON, a schema as JSON text, or a file that holds one. Raises UsageError."""
    if text == "on":
        return True
    where = "the schema"
    if not text.lstrip().startswith("{"):
        where = true_text(text)
        text = read_text(text)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}") from None
    if schema is not True and not isinstance(schema, dict):
        raise UsageError(f"{where} is not a schema: a schema is a JSON object")
    return schema


def _approvals(agent: Agent, argument: str) -> Outcome:
    approvals = agent.open_toolbox().approvals
    if argument == "clear":
        num_rules = approvals.forget()
        return Outcome(f"{counted(num_rules, 'rule')} forgotten.")
    if argument:
        raise UsageError("/approvals lists the rules, and /approvals clear forgets those kept for this folder")
    rows = [("deny", approvals.deny), ("allow", approvals.allow), ("kept", approvals.kept_rules)]
    lines = [f"{kind:<6}{rule}" for kind, rules in rows for rule in rules]
    if approvals.yes:
        lines.append("all calls run that are not denied: --yes")
    return Outcome("\n".join([*lines, "Reading runs; about other calls you are asked."]))


def _names(agent: Agent) -> Sequence[str]:
    with suppress(GoinferError):
        return agent.open_toolbox().registry.names
    return ()


TOOL_COMMANDS: Final = (
    Command(
        name="tools",
        arguments="[on | off | NAME...]",
        help="List the tools, or turn all or some of them on or off.",
        topic="tools",
        run=_tools,
        costs=_cost_of_tools,
        complete=lambda agent: ["on", "off", *_names(agent)],
    ),
    Command(
        name="call",
        arguments="TOOL [TEXT]",
        help="Make the reply to TEXT, or else the next reply, call this tool.",
        topic="tools",
        run=_call,
        costs=_cost_of_call,
        complete=_names,
    ),
    Command(
        name="json",
        arguments="[FILE | SCHEMA | on | off]",
        help="Make replies JSON that is valid under a schema, until /json off.",
        topic="tools",
        run=_json,
        complete=lambda agent: ["on", "off"],
    ),
    Command(
        name="approvals",
        arguments="[clear]",
        help="Show what may run without asking; clear removes what was allowed for this folder.",
        topic="tools",
        run=_approvals,
        complete=lambda agent: ["clear"],
    ),
)
