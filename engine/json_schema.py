"""Which JSON schemas a reply can be held to: every keyword is looked at before anything is generated.

A keyword that says which values are valid is either followed or refused by name, and never left out. Keywords that only
describe (`title`, `default`, `examples`) and words that JSON Schema does not know are skipped, as the standard asks.
docs/tool-calls.md has the list.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.errors import SchemaError

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

MAX_DEPTH = 60
"""Levels of objects and lists in a schema; each nested object takes two or three."""
MAX_CHARACTERS = 500_000
"""Of a schema as JSON text."""
MAX_SCHEMAS = 5_000
"""Schemas within one: properties, items, alternatives."""
MAX_PROPERTIES = 1_000
"""Of one object: the parser has a state for each that may be left out."""

_ONE = ("items", "additionalProperties")
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")

_UNSUPPORTED = frozenset(
    {"not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"}
    | {"dependentRequired", "dependentSchemas", "dependencies", "additionalItems", "unevaluatedProperties"}
    | {"unevaluatedItems", "$dynamicRef", "$recursiveRef", "disallow", "extends", "divisibleBy"}
)
_FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(_NUMBERS, (int, float)),
    **dict.fromkeys(_COUNTS, (int,)),
    **dict.fromkeys(_ONE, (Mapping, bool)),
    **dict.fromkeys(_SEVERAL, (list, tuple)),
    **dict.fromkeys(_NAMED, (Mapping,)),
    **dict.fromkeys(("required", "enum"), (list, tuple)),
    **dict.fromkeys(("pattern", "format", "$ref"), (str,)),
    "type": (str, list, tuple),
}


_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")


def checked_schema(schema: Mapping[str, Any] | bool, what: str) -> dict[str, Any]:
    """The schema as plain JSON that a grammar can be made of; `what` names it in errors: "the schema of tool 'f'".

    Raises SchemaError that names the keyword and where it stands.
    """
    if isinstance(schema, bool):
        if not schema:
            raise SchemaError(f"{what} is false: nothing is valid under it")
        return {}
    if not isinstance(schema, Mapping):
        raise SchemaError(f"{what} must be a JSON object or true, not a {type(schema).__name__}")
    _check_json(schema, what)
    text = json.dumps(schema)
    if len(text) > MAX_CHARACTERS:
        raise SchemaError(f"{what} has {len(text):,} characters; at most {MAX_CHARACTERS:,} are followed")
    plain: dict[str, Any] = json.loads(text)
    for count, (node, where) in enumerate(_schemas(plain, what)):
        if count == MAX_SCHEMAS:
            raise SchemaError(f"{what} holds more than {MAX_SCHEMAS:,} schemas")
        _check_node(node, f"at {where}" if where else "at the top", what)
    return plain


def _check_json(value: Any, what: str) -> None:
    """Without recursion: what is checked here may be nested as deeply as memory allows."""
    todo: list[tuple[Any, int]] = [(value, 1)]
    while todo:
        item, depth = todo.pop()
        if item is None or isinstance(item, (bool, int)):
            continue
        if isinstance(item, str):
            _check_unicode(item, what)
            continue
        if isinstance(item, float):
            if not math.isfinite(item):
                raise SchemaError(f"{what} holds {item}, which is not a JSON number")
            continue
        if depth > MAX_DEPTH:
            raise SchemaError(f"{what} is nested more than {MAX_DEPTH} levels deep")
        if isinstance(item, Mapping):
            for key in item:
                if not isinstance(key, str):
                    raise SchemaError(f"{what} has a key that is not a text")
                _check_unicode(key, what)
            todo.extend((child, depth + 1) for child in item.values())
        elif isinstance(item, (list, tuple)):
            todo.extend((child, depth + 1) for child in item)
        else:
            raise SchemaError(f"{what} holds a {type(item).__name__}, which is not a JSON value")


def _check_unicode(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SchemaError(f"{what} holds half of a surrogate pair: {_shown(text)}") from None


def _schemas(root: dict[str, Any], what: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Every schema within a schema, and the pointer to it."""
    todo: list[tuple[Any, str]] = [(root, "")]
    while todo:
        node, where = todo.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise SchemaError(f"{what}: at {where} stands no schema but {_shown(node)}")
        yield node, where
        todo.extend((node[word], f"{where}/{word}") for word in _ONE if word in node)
        for word in _SEVERAL:
            todo.extend((item, f"{where}/{word}/{i}") for i, item in enumerate(node.get(word, ())))
        for word in _NAMED:
            todo.extend((item, f"{where}/{word}/{name}") for name, item in node.get(word, {}).items())


def _check_node(node: dict[str, Any], where: str, what: str) -> None:
    """One schema's own keywords. A `format` that says nothing about this type is taken out."""

    def refuse(reason: str) -> SchemaError:
        return SchemaError(f"{what}: {reason} ({where})")

    for word, value in node.items():
        if word in _UNSUPPORTED and not (word == "uniqueItems" and value is False):
            raise refuse(f'the keyword "{word}" is not supported')
        kinds = _KINDS.get(word)
        if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise refuse(f'"{word}" cannot be {_shown(value)}')
    node.pop("uniqueItems", None)
    if len(node.get("properties", ())) > MAX_PROPERTIES:
        raise refuse(f"an object has more than {MAX_PROPERTIES:,} properties")
    reference = node.get("$ref")
    if reference is not None and not reference.startswith("#"):
        raise refuse(f'"$ref" reaches outside of the schema: {_shown(reference)}')
    if "format" in node and "string" not in _types(node):
        del node["format"]
    if node.get("format", "date") not in _FORMATS:
        raise refuse(f'"format" {_shown(node["format"])} is not supported; choose from: {", ".join(sorted(_FORMATS))}')
    unknown = next((name for name in _types(node) if name not in _TYPES), None)
    if unknown is not None:
        raise refuse(f'"type" {_shown(unknown)} is unknown; choose from: {", ".join(_TYPES)}')
    for pattern in (*([node["pattern"]] if "pattern" in node else ()), *node.get("patternProperties", ())):
        problem = _problem_of_pattern(pattern)
        if problem:
            raise refuse(f'"pattern" {_shown(pattern)} cannot be followed: {problem}')
    _check_texts(node, refuse)
    _check_numbers(node, refuse)
    # Keys that a schema does not name may come twice, and count once then.
    if node.get("minProperties", 0) > max(1, len(node.get("required", ()))):
        raise refuse('"minProperties" is supported up to the number of required properties')


def is_valid(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value is valid under a schema that was checked."""
    from referencing.exceptions import Unresolvable

    try:
        return bool(validator(schema).is_valid(value))
    except (Unresolvable, RecursionError, ValueError):
        return False


def validator(schema: Mapping[str, Any] | bool) -> Validator:
    """Of values, in time that grows with them; a pattern that cannot be followed is a ValueError then.

    Python's `re` does not know `\\p{L}`, and some patterns take it years: they are followed as a grammar does.
    """
    from jsonschema import Draft202012Validator, ValidationError, validators
    from referencing import Registry

    def pattern(_: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
        if isinstance(value, str) and not _has_match(pattern, value):
            yield ValidationError(f"is not like {pattern}")

    def named(own: Any, patterns: Mapping[str, Any], value: Any, schema: Any) -> Iterator[ValidationError]:
        for key, item in value.items() if isinstance(value, dict) else ():
            for pattern, inner in patterns.items():
                if _has_match(pattern, key):
                    yield from own.descend(item, inner, path=key)

    def others(own: Any, inner: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
        patterns = schema.get("patternProperties", ())
        if not patterns:  # then its message names all that are too many
            yield from Draft202012Validator.VALIDATORS["additionalProperties"](own, inner, value, schema)
            return
        for key, item in value.items() if isinstance(value, dict) else ():
            if key not in schema.get("properties", {}) and not any(_has_match(p, key) for p in patterns):
                yield from own.descend(item, inner, path=key)

    linear = {"pattern": pattern, "patternProperties": named, "additionalProperties": others}
    made: Validator = validators.extend(Draft202012Validator, linear)(schema, registry=Registry())  # type: ignore[no-untyped-call]
    return made


def _has_match(pattern: str, text: str) -> bool:
    """Whether a regular expression is found in a text. Raises ValueError for one that cannot be followed."""
    from llguidance import LLMatcher, LLTokenizer

    written = json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass")
    schema = json.dumps({"type": "string", "pattern": pattern})
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(schema), log_level=0)
    if matcher.is_error():
        raise ValueError(f"pattern {_shown(pattern)}: {_problem_of_pattern(pattern)}")
    return bool(matcher.try_consume_tokens([*written]) == len(written) and matcher.is_accepting())


def _problem_of_pattern(pattern: str) -> str:
    """Why a regular expression cannot be followed; "" if it can."""
    from llguidance import LLMatcher

    schema = json.dumps({"type": "string", "pattern": pattern})
    said: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    return said.strip().splitlines()[-1].removeprefix("error: ") if said.strip() else ""


def _check_numbers(node: dict[str, Any], refuse: Any) -> None:
    """A grammar has numbers as f64, and writes those beyond 2**53 rounded: another number would be said."""
    wrong = next((x for x in _whole_numbers([node.get("const"), node.get("enum")]) if abs(x) > 2**53), None)
    if wrong is not None:
        raise refuse(f"the number {_shown(wrong)} has more digits than can be followed")


def _whole_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _whole_numbers(item)


def _check_texts(node: dict[str, Any], refuse: Any) -> None:
    """A JSON text can hold every character, but in calls there are no `\\u` escapes: see grammar.py."""
    texts = [*node.get("properties", ()), *_texts([node.get("const"), node.get("enum"), node.get("required")])]
    wrong = next(
        (text for text in texts if any((ord(c) < 32 and c not in "\b\f\n\r\t") or c == "\x7f" for c in text)), None
    )
    if wrong is not None:
        raise refuse(f"the text {_shown(wrong)} has a control character, which is not supported")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _types(node: dict[str, Any]) -> Sequence[str]:
    """The types that a schema names; all of them where it names none."""
    types = node.get("type", "string")
    return [types] if isinstance(types, str) else types


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 80 else f"{text[:80]}..."
