"""Arguments of a call: JSON text to values that satisfy a schema, or a text that says what is wrong with them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn

from tools.errors import ToolError, ToolSetupError

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

MakeValidator = Callable[[Mapping[str, Any]], "Validator"]
"""What checks values against a schema."""

MAX_PROBLEMS: Final = 3
_SHOWN: Final = 200
"""Characters of a value in a message."""


def check_schema(schema: Mapping[str, Any], where: str) -> None:
    """Raises ToolSetupError for anything but a JSON schema."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ToolSetupError(f"{where}: its parameters are not a JSON schema: {error.message}") from error


def is_valid(schema: Mapping[str, Any], value: Any) -> bool:
    return plain_validator(schema).is_valid(value)


def parse_arguments(text: str) -> dict[str, Any]:
    """The object that the text of a call's arguments holds; models write nothing where they mean none.

    Raises ToolError.
    """
    if not text.strip():
        return {}
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        problem = "they are nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ToolError(f"the arguments are not JSON: {problem}; send one JSON object") from error
    if not isinstance(value, dict):
        raise ToolError(f"the arguments must be one JSON object, not {_kind(value)}")
    return value


def check_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any], validator: MakeValidator) -> None:
    """Raises ToolError that names what does not satisfy the schema."""
    from jsonschema.exceptions import best_match

    try:
        errors = list(validator(schema).iter_errors(arguments))
    except RecursionError:
        raise ToolError("the arguments are nested too deeply") from None
    except Exception as error:  # a reference that leads nowhere shows only when it is followed
        raise ToolError(f"the arguments cannot be checked: {error}") from error
    if not errors:
        return
    problems = []
    for found in errors[:MAX_PROBLEMS]:
        deepest = best_match([found]) or found
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in deepest.absolute_path)
        message = deepest.message if len(deepest.message) <= _SHOWN else deepest.message[:_SHOWN] + "..."
        problems.append(f"{place.removeprefix('.')}: {message}" if place else message)
    more = f" (and {len(errors) - MAX_PROBLEMS} more)" if len(errors) > MAX_PROBLEMS else ""
    raise ToolError(f"wrong arguments: {'; '.join(problems)}{more}")


def plain_validator(schema: Mapping[str, Any]) -> Validator:
    """Follows patterns with Python's `re`, which some of them keep busy for ever: for schemas of one's own."""
    from jsonschema import Draft202012Validator
    from referencing import Registry

    # An empty registry: a $ref to an address must fail, not be fetched.
    return Draft202012Validator(schema, registry=Registry())


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    """1e999 is valid JSON, and infinite here: neither JSON nor a schema knows what to do with that."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a text", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
