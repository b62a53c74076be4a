"""`agent`, `tools`, and `run` with a forced call or a schema: what these commands do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from engine.api import Reply, ToolCall
from engine.errors import EngineError, GoinferError, UsageError
from goinfer_chat.agent import Agent, Ask
from goinfer_chat.batch import question, run_items
from goinfer_chat.calls.events import EXIT_CODES, ToolEnded, TurnEnded, TurnEvent
from goinfer_chat.conversations import Conversations
from goinfer_chat.modes import EngineFactory, engines_of, quiet_while_drawing, text_of
from goinfer_chat.settings import Settings
from goinfer_chat.slash.tool import parse_schema
from goinfer_chat.terminal import Stream, quiet_terminal
from goinfer_chat.turn import play_turn
from goinfer_chat.view.render import call_object, to_json
from goinfer_chat.views import Views

if TYPE_CHECKING:
    from tools import ToolResult

SYSTEM: Final = """\
You are a careful programmer who works in a project's folder by calling tools. Look before you change anything: read \
the code that a change touches and the tests that cover it. Make the smallest change that solves the task, in the \
style of the code around it. After a change run the tests and read what they say. Take paths from the project's \
folder. When the task is done, say in two sentences what you found and what you changed."""


def run_agent(settings: Settings, make_engine: EngineFactory, task: str | None) -> int:
    """Work on a task with tools until an answer. `-`, or nothing where no terminal is: the task is standard input.

    Returns the exit code.
    """
    text = text_of(task)
    if text is None:
        raise UsageError("agent needs a task, such as: goinfer-chat agent 'find out why the tests fail'")
    settings = replace(settings, tools=settings.tools or ("on",), system=settings.system or SYSTEM)
    replies, side = Stream(sys.stdout), Stream(sys.stderr)
    with quiet_terminal(sys.stdin) as terminal:
        asker = None
        # A person who can see the question and type the answer is asked; standard output may go to a file meanwhile.
        if sys.stdin.isatty() and side.terminal and not settings.json:
            from goinfer_chat.calls.approval_prompt import PersonAsker

            asker = PersonAsker(side, terminal)
        engines = partial(engines_of, make_engine, settings, side)
        views = partial(Views, replies=replies, side=side)
        return run_items(question(text), engines, settings, side, views, asker=asker, prepare=_look_first)


def _look_first(agent: Agent) -> None:
    """A small model that is asked about a folder otherwise tells what it has never looked at."""
    agent.must_look = True


class CutCallError(GoinferError):
    """A forced call that did not come to its end."""

    exit_code = EXIT_CODES["cut"]


def run_with_schema(settings: Settings, make_engine: EngineFactory, text: str | None, schema: str) -> int:
    """One question whose reply is valid under a schema. Returns the exit code."""
    found = parse_schema(schema)
    if settings.backend != "remote":  # a server may know others
        from engine.grammar import check_schema

        check_schema(found)
    asked = text_of(text)
    if asked is None:
        raise UsageError("run needs a question")
    replies, side = Stream(sys.stdout), Stream(sys.stderr)

    def prepare(agent: Agent) -> None:
        agent.schema = found

    engines = partial(engines_of, make_engine, settings, side)
    views = partial(Views, replies=replies, side=side)
    with quiet_while_drawing(settings, replies, side):
        return run_items(question(asked), engines, settings, side, views, prepare=prepare)


def run_forced(settings: Settings, make_engine: EngineFactory, text: str | None, tool: str, execute: bool) -> int:
    """One call of this tool, printed and, if asked for, run. Returns the exit code.

    Raises CutCallError when the call was cut before its end: then nothing is run.
    """
    asked = text_of(text)
    if not asked or not asked.strip():
        raise UsageError("run --tool needs a question: what the tool is to be called for")
    from goinfer_chat.calls.toolbox import Toolbox

    replies, side = Stream(sys.stdout), Stream(sys.stderr)
    with ExitStack() as stack:
        toolbox = stack.enter_context(Toolbox.chosen(settings))
        toolbox.offered(tool)
        conversations = stack.enter_context(Conversations.start(settings, at_prompt=False))
        engines = stack.enter_context(engines_of(make_engine, settings, side, conversations))
        agent = stack.enter_context(closing(Agent(engines.current, settings, conversations, engines, toolbox=toolbox)))
        agent.runs_calls = False
        view = _CallView(Stream(None) if settings.quiet else side)
        played = play_turn(agent, Ask(text=asked, tool=tool), view)
        if played.exit_code:
            return played.exit_code
        call = _call_of(played.reply)
        if not execute:
            return _print(replies, settings, call, None, 0)
        results = list(agent.run_call(call))
        ended = next(event for event in results if isinstance(event, ToolEnded))
        end = next(event for event in results if isinstance(event, TurnEnded))
        return _print(replies, settings, call, ended.result, EXIT_CODES[end.how])


def _call_of(reply: Reply) -> ToolCall:
    if reply.tool_calls:
        return reply.tool_calls[0]
    if reply.finish_reason == "length":
        raise CutCallError("the call was cut before its end, so there is none; allow more --max-tokens")
    raise EngineError("the model wrote no call")


def _print(replies: Stream, settings: Settings, call: ToolCall, result: ToolResult | None, code: int) -> int:
    shown = call_object(call)
    if result is not None:
        shown["result"] = {"status": result.status, "text": result.text}
    if settings.json or result is None:
        replies.write(to_json(shown))
    else:
        replies.line(result.text)
    return code


class _CallView:
    """Nothing of a reply but its progress: the call is printed whole."""

    def __init__(self, side: Stream) -> None:
        from goinfer_chat.view.render import TextView

        self._view = TextView(Stream(None), side)

    def event(self, event: TurnEvent) -> None:
        self._view.event(event)

    def tick(self) -> None:
        self._view.tick()

    def pause(self) -> None:
        self._view.pause()

    def close(self) -> None:
        self._view.close()


def show_tools(settings: Settings) -> int:
    """List the tools there are. Returns the exit code."""
    from goinfer_chat.calls.toolbox import Toolbox

    out, side = Stream(sys.stdout), Stream(sys.stderr)
    with Toolbox.open(settings) as toolbox:
        for notice in toolbox.notices:
            side.line(notice, dim=True)
        for tool in toolbox.registry.tools:
            if settings.json:
                about: dict[str, Any] = {"name": tool.name, "risk": tool.risk, "source": tool.source}
                about |= {"description": tool.description, "parameters": dict(tool.parameters)}
                out.write(to_json(about))
                continue
            out.line(f"{tool.name}  {tool.risk}  ({tool.source})")
            out.line(f"    {tool.description}")
            for line in parameter_lines(tool.parameters):
                out.line(f"    {line}")
    return 0


def parameter_lines(schema: Any) -> Iterator[str]:
    """One line for each property: name, type, whether it may be left out, what it means."""
    required = schema.get("required", ())
    for name, about in schema.get("properties", {}).items():
        kind = about.get("type") or ("one of " + ", ".join(map(str, about["enum"])) if "enum" in about else "any")
        kind = " or ".join(kind) if isinstance(kind, list) else kind
        optional = "" if name in required else ", may be left out"
        text = f": {about['description']}" if "description" in about else ""
        yield f"{name} ({kind}{optional}){text}"
