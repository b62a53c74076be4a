"""How the arguments of a call are written: as one JSON object, or one by one with their names.

A form of arguments is data, and it is used for all that has to do with them: the grammar they are held to (`rules`),
the reading of what was written (`read`) and the writing (`write`). Arguments one by one, `<parameter=path>a.py
</parameter>` or `path='a.py'`, differ from family to family in their marks only:

    first KEY colon VALUE close next KEY colon VALUE close last

A text stands as it is up to the mark that follows, or within quotes; other values are JSON, or words as Python has
them. Whether `3` is a text or a number is a matter of the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.call_rules import ListRules
from engine.call_schema import TYPES, cases_of, kind_of
from engine.call_values import NO_VALUE, as_json, read_value
from engine.errors import SchemaError
from engine.grammar import GrammarCompiler, JsonStyle
from engine.json_schema import is_valid

Schema = Mapping[str, Any]

_STYLE = JsonStyle()
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """One JSON object."""

    style: JsonStyle = _STYLE

    @property
    def texts(self) -> tuple[str, ...]:
        """Marks that a call is written with."""
        return ()

    def rules(self, compiler: GrammarCompiler, schema: Schema, what: str, prefix: str) -> tuple[str, str]:
        """(start, rules) of a grammar; `prefix` keeps the names of rules apart from others. Raises SchemaError."""
        return compiler.json_rule(schema, what, self.style), ""

    def write(self, arguments: str) -> str:
        """Arguments, which come as JSON text."""
        return arguments or "{}"

    def read(self, text: str, start: int, schema: Schema | None) -> tuple[str, int] | None:
        """(arguments as JSON text, end) of what begins at `start`; None where no arguments do."""
        end = json_end(text, start)
        return None if end is None else (text[start:end], end)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedArguments:
    """One by one, as the docstring of this file has them."""

    first: str = ""
    next: str
    last: str = ""
    none: str = ""
    """In place of `first` and `last` where there are no arguments."""
    colon: str
    colons: Mapping[str, str] = field(default_factory=dict)
    """Of values of these types, where the mark says the type."""
    close: str = ""
    quotes: tuple[str, str] = ("", "")
    """Around a text."""
    escapes: Literal["none", "json", "python"] = "none"
    """How a text within quotes says what cannot stand there."""
    words: tuple[str, str, str] = ("true", "false", "null")
    style: JsonStyle = _STYLE
    """Of lists and objects."""
    bare: bool = False
    """Lists and objects have names without quotes, and texts in the quotes of this form."""
    sorts: bool = False
    """Names come in their alphabetical order."""
    takes_object: bool = False
    """Arguments that are no names are one JSON object."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Marks that a call is written with."""
        marks = (self.first, self.next, self.last, self.none, self.colon, self.close, *self.quotes)
        return (*marks, *self.colons.values())

    @property
    def text_end(self) -> str:
        """What a text ends with."""
        return self.quotes[1] + self.close

    def colon_of(self, kind: str) -> str:
        """What stands between a name and a value of this type."""
        return self.colons.get(kind, self.colons.get("number", self.colon) if kind == "integer" else self.colon)

    # -- grammar -------------------------------------------------------------------------------------------------------

    def rules(self, compiler: GrammarCompiler, schema: Schema, what: str, prefix: str) -> tuple[str, str]:
        """(start, rules) of a grammar; `prefix` keeps the names of rules apart from others. Raises SchemaError."""
        compiler.json_rule(schema, what)  # refuses the keywords that are not supported
        if self.takes_object and not _has_plain_names(schema):
            return compiler.json_rule(schema, what, self.style), ""
        return ListRules(compiler, self, schema, what, prefix).made()

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(self, arguments: str) -> str:
        """Arguments, which come as JSON text."""
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
        if not isinstance(value, dict) or (self.takes_object and not all(map(str.isidentifier, value))):
            return arguments
        names = sorted(value, key=str.lower) if self.sorts else list(value)
        listed = (f"{n}{self.colon_of(kind_of(value[n]))}{self.written(value[n])}{self.close}" for n in names)
        return f"{self.first}{self.next.join(listed)}{self.last}" if value else self.none

    def written(self, value: Any, *, inside: bool = False) -> str:
        """A value; `inside` of a list or an object."""
        if isinstance(value, str) and (self.bare or not inside):
            if self.escapes == "none":
                return f"{self.quotes[0]}{value}{self.quotes[1]}"
            return as_json(value) if self.escapes == "json" else repr(value)
        if value is None or isinstance(value, bool):
            word = self.words[2 if value is None else 0 if value else 1]
            return as_json(value) if inside and not self.bare else word
        if not self.bare or not isinstance(value, (list, dict)):
            separators = (self.style.item_separator, self.style.key_separator)
            return json.dumps(value, ensure_ascii=False, separators=separators)
        colon, comma = self.style.key_separator, self.style.item_separator
        if isinstance(value, list):
            return f"[{comma.join(self.written(item, inside=True) for item in value)}]"
        names = sorted(value, key=str.lower) if self.sorts else list(value)
        return f"{{{comma.join(f'{name}{colon}{self.written(value[name], inside=True)}' for name in names)}}}"

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, text: str, start: int, schema: Schema | None) -> tuple[str, int] | None:
        """(arguments as JSON text, end) of what begins at `start`; None where no arguments do.

        `schema` says which texts are numbers; without one a text that is JSON is what it says.
        """
        if self.takes_object and text.startswith("{", start):
            end = json_end(text, start)
            return None if end is None else (text[start:end], end)
        found: dict[str, str] = {}
        position = start + len(self.first)
        begins = text.startswith(self.first, start)
        while begins:
            name = self._name(text, position, schema)
            read = None if name is None else self._value(text, position + len(name), name, schema)
            if name is None or read is None:
                break
            found[name], position = read
            ends = sorted(((self.next, True), (self.last, False)), key=lambda end: -len(end[0]))
            mark, goes_on = next((end for end in ends if text.startswith(end[0], position)), ("", None))
            if goes_on is None:
                return None
            position += len(mark)
            if not goes_on:
                return _as_object(found), position
        if found or not text.startswith(self.none, start):
            return None
        return "{}", start + len(self.none)

    def _name(self, text: str, start: int, schema: Schema | None) -> str | None:
        colons = {self.colon, *self.colons.values()}
        for name in sorted((schema or {}).get("properties", {}), key=len, reverse=True):
            if any(text.startswith(name + colon, start) for colon in colons):
                return str(name)
        ends = [end for colon in colons if (end := text.find(colon, start, start + _LONGEST_NAME)) >= 0]
        name = text[start : min(ends)] if ends else ""
        return name if name and not re.search(r"[\s<>{}()\[\]\"']", name) else None

    def _value(self, text: str, start: int, name: str, schema: Schema | None) -> tuple[str, int] | None:
        """(JSON text, end) of the value that follows a name."""
        colon = max((c for c in {self.colon, *self.colons.values()} if text.startswith(c, start)), key=len)
        begin = start + len(colon)
        kinds = {kind for kind, mark in self.colons.items() if mark == colon}
        if self.quotes[0]:
            value, end = read_value(text, begin, self.quotes if self.escapes == "none" else ("", ""))
            if value is NO_VALUE or not text.startswith(self.close, end):
                return None
            return _json_text(text[begin:end], value), end + len(self.close)
        end = text.find(self.close, begin)
        if end < 0:
            return None
        written = text[begin:end]
        if kinds or self.colons:
            schema = {"properties": {name: {"type": sorted(kinds)} if kinds else {}}}
        return _typed(written, name, schema), end + len(self.close)


Arguments = JsonArguments | ListedArguments


def json_end(text: str, start: int) -> int | None:
    """Where the JSON value that begins at `start` ends; None where there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _has_plain_names(schema: Schema) -> bool:
    """Whether arguments are a list of named values and nothing else."""
    combined = {"$ref", "anyOf", "oneOf", "allOf", "patternProperties", "minProperties", "maxProperties"}
    named = schema.get("properties", {})
    closed = schema.get("additionalProperties") is False and not combined & schema.keys()
    return closed and set(schema.get("required", ())) <= named.keys() and all(map(str.isidentifier, named))


def _as_object(named: Mapping[str, str]) -> str:
    """A JSON object of values that are JSON texts."""
    return f"{{{', '.join(f'{as_json(name)}: {value}' for name, value in named.items())}}}"


def _json_text(written: str, value: Any) -> str:
    """A value as JSON; as it was written where that is JSON."""
    return written if json_end(written, 0) == len(written) else as_json(value)


def _typed(written: str, name: str, schema: Schema | None) -> str:
    """What stands between two marks as JSON: a text, or the value it says, as the schema has it."""
    kinds, own = _kinds(name, schema)
    stripped = written.strip()
    value, end = read_value(stripped, 0)
    if value is NO_VALUE or end != len(stripped) or isinstance(value, str):
        return as_json(written)
    kind = kind_of(value)
    named = kind in kinds or (kind in ("integer", "number") and not kinds.isdisjoint(("integer", "number")))
    if not named or ("string" in kinds and own is not None and not _fits(value, own, schema)):
        # Where no text is wanted either, it is what it says: whoever runs the call has to answer that.
        return as_json(written) if "string" in kinds else _json_text(stripped, value)
    return _json_text(stripped, value)


def _kinds(name: str, schema: Schema | None) -> tuple[set[str], Any]:
    """The types an argument may have, and its schema."""
    anything = set(TYPES)
    if schema is None:
        return anything, None
    own = schema.get("properties", {}).get(name, schema.get("additionalProperties", True))
    try:
        kinds = {case["type"] for case in cases_of(own, schema, "it")}
    except (SchemaError, AttributeError, TypeError):
        return anything, None
    return kinds or anything, own


def _fits(value: Any, own: Any, schema: Schema | None) -> bool:
    """Whether a value that could be a text as well is valid as what it says."""
    if isinstance(own, bool):
        return own
    shared = {word: (schema or {})[word] for word in ("$defs", "definitions") if word in (schema or {})}
    return is_valid(value, {**shared, **own})
