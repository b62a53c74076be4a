"""The schema of an argument taken apart into cases of one type each.

Where a value is no JSON, its type decides how it is written: a text stands as it is, a number as JSON. So the words
that combine schemas (`anyOf`, `$ref`, ...) are resolved here, as far as the type of the value and, for objects, their
properties need it; what a case says beyond that is left to whoever follows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import SchemaError

TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
_MAX_STEPS = 64
"""References and combinations that are followed for one value."""
_MAX_CASES = 256
DEFINITIONS = ("$defs", "definitions")
DESCRIBING = frozenset({"title", "description", "$schema", "$id", "$comment", "default", "examples", "deprecated"})


def kind_of(value: Any) -> str:
    """The type of a JSON value."""
    if isinstance(value, bool):
        return "boolean"
    kinds: dict[type, str] = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def cases_of(schema: Any, root: Mapping[str, Any], what: str) -> list[dict[str, Any]]:
    """Schemas whose `type` is one word, or with an `enum` of values of that type, of which a value fits one or more.

    `root` holds the definitions that references name. Raises SchemaError for what cannot be taken apart.
    """
    found: list[dict[str, Any]] = []
    todo: list[tuple[Any, int]] = [(schema, 0)]
    while todo:
        node, steps = todo.pop(0)
        if node is False:
            continue
        node = {} if node is True else dict(node)
        if steps > _MAX_STEPS or len(todo) + len(found) > _MAX_CASES:
            raise SchemaError(f"{what} cannot be followed: an argument refers to too many schemas")
        if (reference := node.pop("$ref", None)) is not None:
            todo.append((_merged(_target(reference, root, what), node, what), steps + 1))
        elif (parts := node.pop("allOf", None)) is not None:
            for part in parts:
                node = _merged(node, part, what)
            todo.append((node, steps + 1))
        elif (branches := node.pop("anyOf", None)) is not None:
            todo.extend((_merged(node, branch, what), steps + 1) for branch in branches)
        elif (branches := node.pop("oneOf", None)) is not None:
            found.extend(_exclusive(node, branches, root, what))
        else:
            found.extend(_single(node))
    return found


def _exclusive(
    node: dict[str, Any], branches: Sequence[Any], root: Mapping[str, Any], what: str
) -> list[dict[str, Any]]:
    """Cases of which one alone may be valid: of other types, or other values; lists and objects are left together."""
    several = [cases_of(_merged(node, branch, what), root, what) for branch in branches]
    cases = [case for each in several for case in each]
    kinds = ["number" if case["type"] == "integer" else case["type"] for case in cases]
    values = [repr(value) for case in cases for value in case.get("enum", ())]
    if len(set(kinds)) == len(kinds) or (all("enum" in case for case in cases) and len(set(values)) == len(values)):
        return cases
    if set(kinds) <= {"object", "array"}:
        return [{**node, "type": kind, "oneOf": list(branches)} for kind in dict.fromkeys(kinds)]
    raise SchemaError(f"{what} cannot be followed: several cases of a 'oneOf' may be valid at once")


def _single(node: dict[str, Any]) -> list[dict[str, Any]]:
    """A schema that combines nothing, for each of its types."""
    types = node.get("type", [type for type in TYPES if type != "integer"])
    types = [types] if isinstance(types, str) else list(types)
    values = [node["const"]] if "const" in node else node.get("enum")
    if values is None:
        return [{**node, "type": type} for type in types]
    fitting: dict[str, list[Any]] = {}
    for value in values:
        kind = kind_of(value)
        if kind in types or (kind == "integer" and "number" in types):
            fitting.setdefault(kind, []).append(value)
    return [{"type": kind, "enum": values} for kind, values in fitting.items()]


def _target(reference: str, root: Mapping[str, Any], what: str) -> Any:
    node: Any = root
    for word in reference.removeprefix("#").split("/")[1:]:
        word = word.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, Mapping) or word not in node:
            raise SchemaError(f"{what} cannot be followed: nothing stands at {reference!r}")
        node = node[word]
    return node


def _merged(one: Any, other: Any, what: str) -> Any:
    """A schema under which is valid what is valid under both."""
    if one is False or other is False:
        return False
    one, other = ({} if each is True else each for each in (one, other))
    merged = {**one, **other}
    for word in (one.keys() & other.keys()) - DESCRIBING:
        a, b = one[word], other[word]
        if a == b:
            continue
        if word == "properties":
            merged[word] = {
                name: {"allOf": [a[name], b[name]]} if name in a and name in b else {**a, **b}[name]
                for name in [*a, *(name for name in b if name not in a)]
            }
        elif word == "required":
            merged[word] = [*a, *(name for name in b if name not in a)]
        elif word == "type":
            merged[word] = _common_types(a, b)
            if not merged[word]:
                return False
        elif word in ("anyOf", "oneOf", "allOf"):
            rest = {key: value for key, value in other.items() if key != word}
            merged = {**_merged(one, rest, what)}
            merged["allOf"] = [*merged.get("allOf", ()), {word: b}]
            return merged
        else:
            raise SchemaError(f"{what} cannot be followed: it says {word!r} twice of one argument")
    return merged


def _common_types(one: str | Sequence[str], other: str | Sequence[str]) -> list[str]:
    a, b = ([each] if isinstance(each, str) else list(each) for each in (one, other))
    wide_a, wide_b = (each + ["integer"] * ("number" in each) for each in (a, b))
    return [type for type in dict.fromkeys([*a, *b]) if type in wide_a and type in wide_b]
