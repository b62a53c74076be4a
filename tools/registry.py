"""The registry: which tools there are, and a call of one, which ends with a result whatever the model wrote."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Final

from tools.errors import ToolError, ToolSetupError
from tools.output import bounded
from tools.tool import Tool, ToolContext, ToolResult
from tools.validation import MakeValidator, check_arguments, parse_arguments, plain_validator

PATIENCE_SECONDS: Final = 0.7
"""How long a tool may take to end by itself after its time is up or it was cancelled."""

_STILL_RUNNING: Final = "it has not ended yet, and what it is still doing is not known"


@dataclass(frozen=True, slots=True)
class Checked:
    """A call that can be run: a tool that is there, and arguments that satisfy its schema."""

    tool: Tool
    arguments: dict[str, Any]


class Registry:
    """Tools by name, in the order they were added.

    `validator` checks arguments; one that is given follows the patterns of strangers' schemas in bounded time.
    """

    def __init__(self, tools: Iterable[Tool] = (), validator: MakeValidator = plain_validator) -> None:
        self._tools: dict[str, Tool] = {}
        self._validator = validator
        for tool in tools:
            self.add(tool)

    @classmethod
    def built_in(cls, validator: MakeValidator = plain_validator) -> Registry:
        """The tools for work on files and programs."""
        from tools.commands import run_command, run_tests
        from tools.files import edit_file, list_files, read_file, write_file
        from tools.search import search

        tools = (read_file, list_files, search, edit_file, write_file, run_command, run_tests)
        return cls((replace(tool, source="built in") for tool in tools), validator)

    def add(self, tool: Tool) -> None:
        """Raises ToolSetupError for a name that is taken."""
        if (other := self._tools.get(tool.name)) is not None:
            raise ToolSetupError(
                f"two tools are called {tool.name}: one of {other.source or 'unknown origin'}, "
                f"one of {tool.source or 'unknown origin'}; give one of them another name"
            )
        self._tools[tool.name] = tool

    def get(self, name: str) -> Tool:
        """Raises ToolError, which names the tools there are."""
        if (tool := self._tools.get(name)) is not None:
            return tool
        near = get_close_matches(name, self._tools, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ToolError(f"there is no tool {name!r}{hint}; the tools are: {', '.join(self._tools) or 'none'}")

    @property
    def names(self) -> list[str]:
        return list(self._tools)

    @property
    def tools(self) -> list[Tool]:
        return list(self._tools.values())

    def select(self, names: Iterable[str]) -> Registry:
        """These tools alone, in this registry's order. Raises ToolError for a name that is not there."""
        wanted = {self.get(name).name for name in names}
        return Registry((tool for name, tool in self._tools.items() if name in wanted), self._validator)

    def check(self, name: str, arguments: str | Mapping[str, Any]) -> Checked | ToolResult:
        """The call, if it can be run; otherwise the result that says why not. `arguments`: the model's JSON text."""
        try:
            tool = self.get(name)
            values = parse_arguments(arguments) if isinstance(arguments, str) else dict(arguments)
            check_arguments(tool.parameters, values, self._validator)
        except ToolError as error:
            return ToolResult("error", str(error))
        return Checked(tool, values)

    def call(self, name: str, arguments: str, context: ToolContext) -> ToolResult:
        """Check and run. Never raises for what a model wrote or a tool did."""
        checked = self.check(name, arguments)
        return checked if isinstance(checked, ToolResult) else run(checked, context)


def run(call: Checked, context: ToolContext) -> ToolResult:
    """The result of a checked call, within its time.

    A tool that neither ends in time nor obeys `context.cancel` is left to itself: its thread ends with the program, and
    what it returns is lost. Programs that the built-in tools start are always ended.
    """
    if context.cancel.is_set():
        return ToolResult("cancelled", "the call was stopped before it began")
    stop = threading.Event()
    results: list[ToolResult] = []
    done = threading.Event()
    inner = replace(context, cancel=stop)

    def work() -> None:
        results.append(_run(call, inner))
        done.set()

    threading.Thread(target=work, name=f"tool {call.tool.name}", daemon=True).start()
    waited = _wait(done, context)
    if waited != "done":
        stop.set()
        done.wait(PATIENCE_SECONDS)
    if results:
        result = results[0]
        if waited == "cancelled" and result.status == "ok":
            return ToolResult("cancelled", bounded(f"stopped by the user\n{result.text}", context.output_limit))
        return ToolResult(result.status, bounded(result.text, context.output_limit))
    if waited == "cancelled":
        return ToolResult("cancelled", f"stopped by the user; {_STILL_RUNNING}")
    return ToolResult("timeout", f"it took longer than {context.timeout_seconds:g} s; {_STILL_RUNNING}")


def _wait(done: threading.Event, context: ToolContext) -> str:
    """Until it is done, its time is up, with the patience that a tool needs which keeps the time itself, or cancel."""
    left = context.timeout_seconds + PATIENCE_SECONDS
    step = 0.02
    while left > 0:
        if done.wait(step):
            return "done"
        if context.cancel.is_set():
            return "cancelled"
        left -= step
    return "timeout"


def _run(call: Checked, context: ToolContext) -> ToolResult:
    try:
        return call.tool.run(call.arguments, context)
    except ToolError as error:
        return ToolResult("error", str(error))
    except BaseException as error:  # noqa: BLE001 - a tool that ends its thread, or the program, does not end the chat
        text = " ".join(str(error).split())
        return ToolResult("error", f"{call.tool.name} failed: {type(error).__name__}{f': {text}' if text else ''}")
