"""Arguments of a call as code writes them: `path="a.py", line=3`, each value as JSON.

For models that were shown calls as lines of Python. Parameters that are more than a list of named values, or whose
names are no names in Python, are given as one JSON object instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_PLAIN = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})
_DESCRIBING = frozenset({"title", "description", "$schema", "$id", "$comment", "default", "examples"})


def code_rules(
    prefix: str, schema: Mapping[str, Any], json_rule: Callable[[Mapping[str, Any] | bool], str]
) -> tuple[str, str] | None:
    """(start, rules) of a grammar of arguments, names in the order of the schema; None where they are no plain list.

    `json_rule` makes the grammar of one value; `prefix` keeps the rules' names apart from others.
    """
    properties, required = schema.get("properties", {}), schema.get("required", ())
    plain = schema.keys() <= _PLAIN | _DESCRIBING and schema.get("additionalProperties") is False
    if not plain or not set(required) <= properties.keys() or not all(name.isidentifier() for name in properties):
        return None
    shared = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    lines = []
    names = list(properties)
    # `first`: nothing stands before; `more`: something does, so a comma comes first.
    for i, name in enumerate(names):
        value = properties[name]
        value = {**shared, **value} if isinstance(value, Mapping) else value
        rest = f"{prefix}more{i + 1}"
        skip = "" if name in required else f" | {prefix}first{i + 1}"
        lines.append(f"{prefix}value{i}: {json.dumps(f'{name}=')} {json_rule(value)}\n")
        lines.append(f"{prefix}first{i}: {prefix}value{i} {rest}{skip}\n")
        skip = "" if name in required else f" | {rest}"
        lines.append(f'{prefix}more{i}: ", " {prefix}value{i} {rest}{skip}\n')
    lines += [f'{prefix}first{len(names)}: ""\n', f'{prefix}more{len(names)}: ""\n']
    return f"{prefix}first0", "".join(lines)


def read_code(text: str, start: int, json_end: Callable[[str, int], int | None]) -> tuple[str, int] | None:
    """(arguments as a JSON object, end) of what begins at `start`, up to a closing bracket."""
    if text.startswith("{", start):
        end = json_end(text, start)
        return None if end is None else (text[start:end], end)
    parts: list[str] = []
    position = start
    while name := re.compile(r"(\w+)=").match(text, position):
        end = json_end(text, name.end())
        if end is None:
            return None
        parts.append(f"{json.dumps(name[1], ensure_ascii=False)}: {text[name.end() : end]}")
        position = end
        if not text.startswith(", ", position):
            break
        position += 2
    return f"{{{', '.join(parts)}}}", position


def write_code(arguments: str) -> str:
    """Arguments, which came as a JSON object, as code."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(value, dict) or not all(name.isidentifier() for name in value):
        return arguments
    return ", ".join(f"{name}={json.dumps(item, ensure_ascii=False)}" for name, item in value.items())
