"""Whether a server did what it was told: the call that had to be made, the schema that had to be kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.api import NamedTool, Request, ToolCall, tool_function, tool_name
from engine.json_schema import validator


def problem_of_calls(request: Request, calls: Sequence[ToolCall]) -> str | None:
    """What is wrong with the calls of a reply that had to call; None if nothing is."""
    choice = request.tool_choice
    tools = {tool_name(tool): tool_function(tool) for tool in request.tools}
    if not calls:
        return "it calls nothing"
    if not request.parallel_tool_calls and len(calls) > 1:
        return f"it calls {len(calls)} tools instead of one"
    for call in calls:
        if isinstance(choice, NamedTool) and call.name != choice.name:
            return f"it calls {call.name!r} instead of {choice.name!r}"
        if call.name not in tools:
            return f"it calls {call.name!r}, which is not there"
        schema = tools[call.name].get("parameters")
        wrong = _problem(call.arguments, schema if isinstance(schema, Mapping) else {"type": "object"})
        if wrong is not None:
            return f"its arguments of {call.name!r} are wrong: {wrong}"
    return None


def problem_of_text(request: Request, text: str) -> str | None:
    """Why a reply is not valid under the schema of its request; None if it is."""
    schema = request.json_schema
    return None if schema is None else _problem(text, schema)


def _problem(text: str, schema: Mapping[str, Any] | bool) -> str | None:
    from jsonschema import SchemaError
    from referencing.exceptions import Unresolvable

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"no JSON ({error})"
    try:
        wrong = next(iter(validator(schema).iter_errors(value)), None)
    except (SchemaError, Unresolvable, RecursionError, ValueError) as problem:
        return f"the schema cannot be checked ({problem})"
    return None if wrong is None else " ".join(wrong.message.split())[:200]
