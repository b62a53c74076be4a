"""What a tool is: a function a model may call, the schema of its arguments, and what it may do."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast, overload

from tools.docstring import read_docstring
from tools.environment import safe_environment
from tools.errors import ToolSetupError
from tools.journal import Journal
from tools.root import Root
from tools.schema import parameters_of
from tools.validation import check_schema

Risk = Literal["reads", "writes", "runs"]
"""`reads`: changes nothing. `writes`: changes files in the root folder. `runs`: anything else."""

Status = Literal["ok", "error", "timeout", "refused", "cancelled"]

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What became of a call; `text` is what the model reads."""

    status: Status
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """Where a call runs and what it may use."""

    root: Root
    cancel: threading.Event = field(default_factory=threading.Event)
    """Set from any thread to end the call."""
    timeout_seconds: float = 120.0
    output_limit: int = 12_000
    """Characters of a result at most; the middle of a longer one is left out."""
    environment: Mapping[str, str] = field(default_factory=safe_environment)
    """Of programs that a tool starts."""
    journal: Journal | None = None
    """Keeps what files held before a tool changed them."""
    key: str = ""
    """Under which the journal keeps what this call changes."""
    test_command: str | None = None
    """How the project's tests are run; None: found from its files."""


Run = Callable[[dict[str, Any], ToolContext], ToolResult]
Preview = Callable[[Mapping[str, Any], ToolContext], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool under its name. `run` gets valid arguments; whatever it raises becomes a result (`Registry.call`)."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""
    risk: Risk
    run: Run
    source: str = ""
    """Where it comes from, for people: "built in", a file, a server."""
    show: Preview | None = None
    command: str | None = None
    """The argument that holds a command line, where approval may be for its first words."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ToolSetupError(
                f"{self.name!r} cannot be the name of a tool; take 1 to 64 of the letters a-z, A-Z, digits, _ and -"
            )
        if self.risk not in ("reads", "writes", "runs"):
            raise ToolSetupError(f"{self.name}: unknown risk {self.risk!r}; choose from: reads, writes, runs")
        check_schema(self.parameters, self.name)

    def describe(self) -> dict[str, Any]:
        """The object that chat templates and servers take."""
        about = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": about}

    def preview(self, arguments: Mapping[str, Any], context: ToolContext) -> str | None:
        """What a call would change, as a unified diff; None where there is none to show, or the call would fail."""
        if self.show is None:
            return None
        try:
            return self.show(arguments, context)
        except Exception:  # noqa: BLE001 - the call itself says what is wrong
            return None


@overload
def tool(function: Callable[..., Any]) -> Tool: ...


@overload
def tool(
    *,
    risk: Risk = "runs",
    name: str | None = None,
    description: str | None = None,
    preview: Preview | None = None,
    command: str | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    *,
    risk: Risk = "runs",
    name: str | None = None,
    description: str | None = None,
    preview: Preview | None = None,
    command: str | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a Tool of a typed function: its schema comes from the signature, its words from the docstring.

    A parameter of the type ToolContext gets the context and is not seen by the model. What is returned becomes text: a
    text as it is, a ToolResult with its status, anything else as JSON. Without a risk a tool counts as one that runs
    programs, about which a person is asked. Raises ToolSetupError.
    """

    def make(function: Callable[..., Any]) -> Tool:
        return _make(function, risk=risk, name=name, description=description, preview=preview, command=command)

    return make if function is None else make(function)


def _make(
    function: Callable[..., Any],
    *,
    risk: Risk,
    name: str | None,
    description: str | None,
    preview: Preview | None,
    command: str | None,
) -> Tool:
    about, texts = read_docstring(inspect.getdoc(function) or "")
    shape, contexts = parameters_of(function, texts, (ToolContext,))

    def run(arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        given = shape.convert(arguments) | dict.fromkeys(contexts, context)
        value = function(**given)
        if inspect.iscoroutine(value):
            import asyncio

            value = asyncio.run(value)
        return result_of(value)

    found = about if description is None else description
    if not found:
        raise ToolSetupError(f"{function.__name__} says nowhere what it does; give it a docstring")
    return Tool(
        name=name or function.__name__,
        description=found,
        parameters=shape.schema,
        risk=risk,
        run=run,
        show=preview,
        command=command,
    )


def result_of(value: Any) -> ToolResult:
    """What a function returned, as a result."""
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult("ok", value)
    if value is None:
        return ToolResult("ok", "done")
    try:
        return ToolResult("ok", json.dumps(value, default=_as_json, ensure_ascii=False, allow_nan=False))
    except ValueError:  # a float that JSON has no word for, or a value within itself
        return ToolResult("ok", str(value))


def _as_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(cast("Any", value))
    return list(value) if isinstance(value, set | frozenset) else str(value)
