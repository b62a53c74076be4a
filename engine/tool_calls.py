"""How a model writes calls of tools: a form as data, the grammar of calls in it, and reading calls written in it.

Which form a model has is found from its chat template (call_probe.py); how the arguments are written in it is a matter
of its own (call_arguments.py).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.api import tool_function, tool_name
from engine.call_arguments import Arguments, JsonArguments, json_end
from engine.errors import UsageError
from engine.grammar import GrammarCompiler

CallText = tuple[str, str]
"""Name and arguments as written."""
Schemas = Mapping[str, Mapping[str, Any] | None]
"""The schema of the arguments of each tool; None where it is not known."""

PYTHON_TAG = "<|python_tag|>"
NUMBER = "\x00"
"""Stands in a mark of a form for the number of the call, or its id."""
_AS_JSON = JsonArguments()
_SPACE = "/[ \\t\\n]{0,4}/"
_ANY_NAME = re.compile(r"[^\s\"'<>{}()\[\],:=]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """Calls as text: `head` NAME `between` ARGUMENTS, then `middle` NAME ... for each further one, then `tail`."""

    head: str
    between: str
    tail: str
    middle: str | None = None
    """None: a reply has one call at most."""
    opener: str = ""
    """The marker that `head` begins with, and that stands in no other text; "" for a bare object."""
    arguments: Arguments = _AS_JSON
    number: str = "[0-9]{1,4}"
    """What NUMBER is in a mark."""
    stated: bool = False
    """The system prompt tells of tools and of this form, since the template does not."""
    placed: bool = False
    """Calls are put into the text of a message, since the template writes none."""

    @property
    def quotes_names(self) -> bool:
        return self.head.endswith('"')

    @property
    def has_bare_form(self) -> bool:
        """Models that write a JSON object with name and arguments also write it without the marker."""
        return self.head.endswith('{"name": "')

    @property
    def texts(self) -> tuple[str, ...]:
        """The marks that calls are written with."""
        return (self.head, self.between, self.middle or "", self.tail, *self.arguments.texts)

    def inner_starts(self, names: Sequence[str]) -> list[str]:
        """How calls of these tools begin that a model writes without the opener; none where that could be any text."""
        inner = self._after_opener
        return [inner + self._written(name) + self.between for name in names] if re.match(r"<\w", inner) else []

    def from_opener(self, text: str, names: Sequence[str]) -> str:
        """The calls in a reply, from the opener on, which some leave out; "" where there are none."""
        start = text.find(self.opener) if self.opener else -1
        if start >= 0:
            return text[start:]
        starts = [start for inner in self.inner_starts(names) if (start := text.find(inner)) >= 0]
        return self.opener + text[min(starts) :] if starts else ""

    # -- grammars ------------------------------------------------------------------------------------------------------

    def rules(
        self, compiler: GrammarCompiler, tools: Sequence[Mapping[str, Any]], *, several: bool, lead: str = ""
    ) -> str:
        """A grammar of calls of these tools, from `lead` and the head on. Raises SchemaError."""
        return self._all_rules(compiler, tools, self._literal(compiler, lead + self.head), several)

    def rules_after_opener(
        self, compiler: GrammarCompiler, tools: Sequence[Mapping[str, Any]], *, several: bool
    ) -> str:
        """The same for a model that has begun by itself, which may put another space behind the marker."""
        start = f"{compiler.literal(self.opener)} {_SPACE} {self._literal(compiler, self._after_opener)}"
        return self._all_rules(compiler, tools, start, several)

    def bare_rules(self, compiler: GrammarCompiler, tool: Mapping[str, Any]) -> str:
        """What follows `{"name": ..., "arguments":` of a bare object."""
        arguments = self.arguments if isinstance(self.arguments, JsonArguments) else _AS_JSON
        start, rules = arguments.rules(compiler, parameters(tool), _what(tool), "c")
        return f'start: {_SPACE} {start} {_SPACE} "}}"\n{rules}'

    def argument_rules(self, compiler: GrammarCompiler, tool: Mapping[str, Any]) -> str:
        """The arguments alone, of a call whose name has been said."""
        arguments, rules = self.arguments.rules(compiler, parameters(tool), _what(tool), "c")
        return f"start: {arguments}\n{rules}"

    @property
    def _after_opener(self) -> str:
        return self.head[len(self.opener) :].lstrip()

    def _literal(self, compiler: GrammarCompiler, mark: str) -> str:
        return " NUMBER ".join(map(compiler.literal, mark.split(NUMBER)))

    def _all_rules(
        self, compiler: GrammarCompiler, tools: Sequence[Mapping[str, Any]], start: str, several: bool
    ) -> str:
        again = f"({self._literal(compiler, self.middle)} call)*" if several and self.middle is not None else ""
        lines = [f"start: {start} call {again} {self._literal(compiler, self.tail)}\n"]
        lines.append(f"call: {' | '.join(f'c{i}x' for i in range(len(tools)))}\n")
        for i, tool in enumerate(tools):
            arguments, rules = self.arguments.rules(compiler, parameters(tool), _what(tool), f"c{i}y")
            name = self._literal(compiler, self._written(tool_name(tool)) + self.between)
            lines.append(f"c{i}x: {name} {arguments}\n{rules}")
        if any(NUMBER in text for text in self.texts):
            lines.append(f"NUMBER: /{self.number}/\n")
        return "".join(lines)

    # -- writing and reading -------------------------------------------------------------------------------------------

    def write(self, *calls: CallText) -> str:
        """Calls with their arguments as JSON text."""
        counter = itertools.count()

        def numbered(mark: str) -> str:
            return re.sub(NUMBER, lambda _: str(next(counter)), mark)

        written = numbered(self.head)
        for place, (name, given) in enumerate(calls):
            written += numbered(self.middle or "") if place else ""
            written += self._written(name) + numbered(self.between) + self.arguments.write(given)
        return written + numbered(self.tail)

    def _written(self, name: str) -> str:
        return json.dumps(name, ensure_ascii=False)[1:-1] if self.quotes_names else name

    def place_of_empty(
        self, text: str, name_at: int, names: Sequence[str], otherwise: int | None
    ) -> tuple[int, int] | None:
        """(start, end) of calls of these tools without arguments, where the first name stands at `name_at`.

        None where none do. `otherwise`: where they end if they are not written as this form has it.
        """
        start = self.head_before(text, name_at)
        none = self.between + self.arguments.write("{}")
        end = self._end_of((self.middle or "").join(self._written(n) + none for n in names) + self.tail, text, name_at)
        end = otherwise if end is None else end
        return None if start is None or end is None else (start, end)

    def head_before(self, text: str, name_at: int | None = None) -> int | None:
        """Where the head starts that ends at `name_at`, or at the end of a text; None where none does."""
        end = len(text) if name_at is None else name_at
        found = re.compile(rf"{self._pattern(self.head)}\Z").search(text, max(0, end - len(self.head) - 80), end)
        return None if found is None else found.start()

    def _pattern(self, mark: str) -> str:
        return f"(?:{self.number})".join(map(re.escape, mark.split(NUMBER)))

    def _end_of(self, mark: str, text: str, start: int) -> int | None:
        """Where a mark that begins at `start` ends; None where none does."""
        if NUMBER not in mark:
            return start + len(mark) if text.startswith(mark, start) else None
        found = re.compile(self._pattern(mark)).match(text, start)
        return None if found is None else found.end()

    def read(self, text: str, schemas: Schemas, *, loosely: bool = False) -> tuple[list[CallText], bool]:
        """Whole calls in a text that begins with the head, and whether the text is nothing else.

        `loosely`: also of tools that are not among these.
        """
        calls: list[CallText] = []
        start = re.match(rf"\s*{re.escape(self.opener)}\s*", text)
        position = None if start is None else self._end_of(self._after_opener, text, start.end())
        while position is not None:
            found = self._read_one(text, position, schemas, loosely)
            if found is None:
                break
            name, arguments, end = found
            # One may begin with the other: the longer one is meant.
            marks = sorted({self.tail, self.tail if self.middle is None else self.middle}, key=len, reverse=True)
            mark, last = next(((m, e) for m in marks if (e := self._end_of(m, text, end)) is not None), ("", None))
            if last is None:
                break
            calls.append((name, arguments))
            if mark == self.tail:
                return calls, not text[last:].strip()
            position = last
        return calls, False

    def _read_one(self, text: str, start: int, schemas: Schemas, loosely: bool) -> tuple[str, str, int] | None:
        names = sorted(schemas, key=len, reverse=True)
        if loosely and (other := _ANY_NAME.match(text, start)):
            names.append(other[0])
        for name in names:
            begin = self._end_of(self._written(name) + self.between, text, start)
            read = None if begin is None else self.arguments.read(text, begin, schemas.get(name))
            if read is not None:
                return name, *read
        return None


def read_objects(text: str) -> list[CallText]:
    """Calls written as JSON objects with a name and arguments, whatever stands around them."""
    calls: list[CallText] = []
    position = text.find("{")
    while position >= 0:
        end = json_end(text, position)
        if end is None:
            return calls
        value = json.loads(text[position:end])
        function = tool_function(value) if isinstance(value, dict) else {}
        arguments = function.get("arguments", function.get("parameters"))
        name = function.get("name")
        if isinstance(name, str) and name:
            if not isinstance(arguments, str):
                arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
            calls.append((name, arguments))
        position = text.find("{", end)
    return calls


class BareCall:
    """Whether a reply begins as a bare call of a tool that is given, however it is spaced."""

    def __init__(self, names: Sequence[str]) -> None:
        self._starts = {
            _squeezed(f'{tag}{fence}{{"name":{json.dumps(name, ensure_ascii=False)},"{key}":'): name
            for tag in ("", PYTHON_TAG)
            for fence in ("", "```", "```json")
            for name in names
            for key in ("arguments", "parameters")
        }

    def find(self, text: str) -> tuple[str, int] | None:
        """The tool's name, and where its arguments begin."""
        squeezed = _squeezed(text)
        for start, name in self._starts.items():
            if squeezed.startswith(start):
                missing = len(start)
                for position, character in enumerate(text):
                    missing -= not character.isspace()
                    if not missing:
                        return name, position + 1
        return None

    def possible(self, text: str) -> bool:
        """Whether more text could make it one."""
        squeezed = _squeezed(text)
        return any(start.startswith(squeezed) for start in self._starts)


def _squeezed(text: str) -> str:
    return "".join(text.split())


# -- parameters --------------------------------------------------------------------------------------------------------


def parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a tool's arguments, an object; objects that do not speak of further properties have none.

    A schema leaves those open by default, where a function takes none. What is valid under the narrower schema is
    valid under the tool's own.
    """
    schema = tool_function(tool).get("parameters")
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping):
        raise UsageError(f"{_what(tool)} must be a JSON object, not a {type(schema).__name__}")
    closed: dict[str, Any] = _closed(schema if _COMBINED & schema.keys() else {"type": "object", **schema}, 0)
    return closed


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any] | None]:
    """The schemas of the arguments of these tools."""
    return {tool_name(tool): parameters(tool) for tool in tools}


_COMBINED = {"$ref", "anyOf", "oneOf", "allOf"}
_OPEN = _COMBINED | {"additionalProperties", "patternProperties", "minProperties", "unevaluatedProperties"}


def _closed(schema: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > 50:
        return schema
    closed = dict(schema)
    named = schema.get("properties")
    if isinstance(named, Mapping) and not _COMBINED & schema.keys():
        closed["properties"] = {name: _closed(value, depth + 1) for name, value in named.items()}
        required = schema.get("required", ())
        if not _OPEN & schema.keys() and isinstance(required, (list, tuple)) and set(required) <= set(named):
            closed["additionalProperties"] = False
    if isinstance(schema.get("items"), Mapping) and not _COMBINED & schema.keys():
        closed["items"] = _closed(schema["items"], depth + 1)
    return closed


def _what(tool: Mapping[str, Any]) -> str:
    return f"the schema of the tool {tool_name(tool)!r}"
