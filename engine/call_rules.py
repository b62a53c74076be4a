"""The grammar of arguments that are written one by one: names in the order of the schema, values by their types.

A rule for each argument and each place it can have: something stands before it, so the mark between two comes first, or
nothing does. Texts without quotes end with the first mark that ends them, and hold none.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.call_schema import DEFINITIONS, cases_of
from engine.call_texts import any_of_these, text_patterns
from engine.errors import SchemaError
from engine.grammar import GrammarCompiler, as_pattern

if TYPE_CHECKING:
    from engine.call_arguments import ListedArguments

_JSON_WORDS = ("true", "false", "null")
_NAME = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"
"""Of an argument that the schema does not name."""
_PYTHON_PLAIN = "/[^'\\\\\\x00-\\x1f]*/"
_PYTHON_TEXT = "/'([^'\\\\\\x00-\\x1f]|\\\\[nrt'\\\\\"])*'/"


class ListRules:
    """Makes the grammar of the arguments of one call."""

    def __init__(
        self, compiler: GrammarCompiler, form: ListedArguments, schema: Mapping[str, Any], what: str, prefix: str
    ) -> None:
        self._compiler = compiler
        self._form = form
        self._root = schema
        self._what = what
        self._prefix = prefix
        self._lines: list[str] = []
        self._numbers = itertools.count()
        self._made: dict[str, str] = {}
        self._shared = {word: schema[word] for word in DEFINITIONS if word in schema}

    def made(self) -> tuple[str, str]:
        """(start, rules)."""
        form = self._form
        marks = (form.first, form.next, form.last, form.none)
        objects = [case for case in self._cases(self._root) if case["type"] == "object"]
        start = self._rule(*(self._object(case, marks, inside=False) for case in objects))
        return start, "".join(self._lines)

    def _rule(self, *choices: str) -> str:
        """The name of a rule for one of these."""
        if not choices:
            raise SchemaError(f"{self._what} cannot be followed: nothing is valid under it")
        name = f"{self._prefix}r{next(self._numbers)}"
        self._lines.append(f"{name}: {' | '.join(dict.fromkeys(choices))}\n")
        return name

    def _cases(self, schema: Any) -> list[dict[str, Any]]:
        return cases_of(schema, self._root, self._what)

    def _refuse(self, word: str) -> SchemaError:
        return SchemaError(f"{self._what} cannot be followed: {word!r} is not supported in this model's form of calls")

    # -- names ---------------------------------------------------------------------------------------------------------

    def _object(self, case: Mapping[str, Any], marks: tuple[str, str, str, str], *, inside: bool) -> str:
        """Names and values between these marks."""
        unknown = next((word for word in ("enum", "oneOf") if word in case), None)
        if unknown is not None:
            raise self._refuse(unknown)
        first, following, last, none = map(self._compiler.literal, marks)
        named, others = self._named(case), self._others(case, inside=inside)
        required = set(case.get("required", ()))
        number, end = next(self._numbers), len(named)
        begin, more = f"{self._prefix}f{number}x", f"{self._prefix}m{number}x"
        # Without any: not where one at least is wanted.
        empty = [none] if required or not case.get("minProperties") else []
        empty += [f"{first} {others} {more}{end}"] if others else []
        lines = self._lines
        for i, (name, schema) in enumerate(named.items()):
            value = self._rule(f"{json.dumps(name, ensure_ascii=False)} {self._named_value(schema, inside=inside)}")
            skip = "" if name in required or (i + 1 == end and not empty) else f" | {begin}{i + 1}"
            lines.append(f"{begin}{i}: {first} {value} {more}{i + 1}{skip}\n")
            skip = "" if name in required else f" | {more}{i + 1}"
            lines.append(f"{more}{i}: {following} {value} {more}{i + 1}{skip}\n")
        if empty:
            lines.append(f"{begin}{end}: {' | '.join(empty)}\n")
        elif not named:
            raise SchemaError(f"{self._what} cannot be followed: nothing is valid under it")
        other = f" | {following} {others} {more}{end}" if others else ""
        lines.append(f"{more}{end}: {last}{other}\n")
        return f"{begin}0"

    def _named(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """The schemas of the arguments that have names, in the order of the call."""
        named = dict(case.get("properties", {}))
        rest = case.get("additionalProperties", True)
        named.update({name: rest for name in case.get("required", ()) if name not in named})
        if "maxProperties" in case and (rest is not False or len(named) > case["maxProperties"]):
            raise self._refuse("maxProperties")
        impossible = next((n for n, s in named.items() if s is False and n in case.get("required", ())), None)
        if impossible is not None:
            raise SchemaError(f"{self._what} cannot be followed: nothing is valid as {impossible!r}")
        named = {name: schema for name, schema in named.items() if schema is not False}
        return dict(sorted(named.items(), key=lambda item: item[0].lower())) if self._form.sorts else named

    def _others(self, case: Mapping[str, Any], *, inside: bool) -> str | None:
        """A rule for an argument that the schema does not name; None if it allows no such argument."""
        known = any_of_these(case.get("properties", {}))
        unknown = f"/{_NAME}/{f' & ~/{known}/' if known else ''}"
        choices: list[str] = []

        def allow(names: str, schema: Any) -> None:
            if schema is not False:
                name = f"{self._prefix}N{next(self._numbers)}".upper()
                self._lines.append(f"{name}: {names}\n")
                choices.append(f"{name} {self._named_value(schema, inside=inside)}")

        others = unknown
        for pattern, schema in case.get("patternProperties", {}).items():
            like = text_patterns({"pattern": pattern}, self._what)[0]
            allow(f"{unknown} & /{like}/", schema)
            others += f" & ~/{like}/"
        allow(others, case.get("additionalProperties", True))
        return self._rule(*choices) if choices else None

    # -- values --------------------------------------------------------------------------------------------------------

    def _named_value(self, schema: Any, *, inside: bool) -> str:
        """A value with the marks around it."""
        if inside:
            return f"{json.dumps(self._form.style.key_separator)} {self._value(schema)}"
        form, cases = self._form, self._cases(schema)
        close = self._compiler.literal(form.close)
        texts = [case for case in cases if case["type"] == "string"]
        others = [case for case in cases if case["type"] != "string"]
        if not form.quotes[0] and not form.colons and any(not text_patterns(case, self._what) for case in texts):
            texts, others = [{"type": "string"}], []  # all else is a text too
        choices = []
        for case in texts:
            colon = self._compiler.literal(form.colon_of("string"))
            choices.append(f"{colon} {self._text(case, closes=True)}")
        for case in others:
            colon = self._compiler.literal(form.colon_of(case["type"]))
            choices.append(f"{colon} {self._other(case)} {close}")
        return self._rule(*choices)

    def _value(self, schema: Any) -> str:
        """A value within a list or an object whose names have no quotes. Rules that name themselves end here."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._made:
            self._made[key] = f"{self._prefix}v{next(self._numbers)}"
            choices = [
                self._text(case, closes=False) if case["type"] == "string" else self._other(case)
                for case in self._cases(schema)
            ]
            self._lines.append(f"{self._made[key]}: {self._rule(*choices)}\n")
        return self._made[key]

    def _other(self, case: dict[str, Any]) -> str:
        """A value that is not a text."""
        form, kind = self._form, case["type"]
        if kind in ("boolean", "null"):
            values = case.get("enum", [None] if kind == "null" else [True, False])
            places = [2 if value is None else 0 if value else 1 for value in values]
            words = dict.fromkeys(word for i in places for word in (form.words[i], _JSON_WORDS[i]))
            return self._rule(*map(json.dumps, words))
        if not form.bare or kind in ("number", "integer"):
            return self._rule(self._compiler.json_rule({**self._shared, **case}, self._what, form.style))
        if "enum" in case:
            return self._rule(*(self._compiler.literal(form.written(value, inside=True)) for value in case["enum"]))
        num_lines = len(self._lines)
        try:
            if kind == "array":
                return self._list(case)
            return self._object(case, ("{", form.style.item_separator, "}", "{}"), inside=True)
        except SchemaError:  # JSON can say more
            del self._lines[num_lines:]
            return self._rule(self._compiler.json_rule({**self._shared, **case}, self._what))

    def _list(self, case: Mapping[str, Any]) -> str:
        if "prefixItems" in case:
            raise self._refuse("prefixItems")
        least, most = case.get("minItems", 0), case.get("maxItems")
        if most == 0 or case.get("items") is False:
            return self._rule('"[]"')
        item, comma = self._value(case.get("items", True)), json.dumps(self._form.style.item_separator)
        repeated = f"({comma} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return self._rule(f'"[" {item} {repeated} "]"', *(['"[]"'] if least == 0 else []))

    # -- texts ---------------------------------------------------------------------------------------------------------

    def _text(self, case: Mapping[str, Any], *, closes: bool) -> str:
        """A text up to the end of its quotes; `closes`: and of the argument."""
        form, literal = self._form, self._compiler.literal
        close = form.close if closes else ""
        if form.escapes != "none":
            quoted = self._compiler.json_rule({**self._shared, **case}, self._what, form.style)
            choices = [f"{self._rule(quoted)} {literal(close)}"]
            if form.escapes == "python":
                choices.append(f"{self._python_text(case)} {literal(close)}")
            return self._rule(*choices)
        begin, end = literal(form.quotes[0]), form.quotes[1] + close
        if "enum" in case:
            texts = [text for text in case["enum"] if end not in text]
            return self._rule(*(f"{begin} {json.dumps(t, ensure_ascii=False)} {literal(end)}" for t in texts))
        return f"{begin} {self._text_until(end, text_patterns(case, self._what))}"

    def _python_text(self, case: Mapping[str, Any]) -> str:
        """A text in Python's quotes; without escapes where not every text is valid."""
        if "enum" in case:
            return self._rule(*(json.dumps(repr(text), ensure_ascii=False) for text in case["enum"]))
        patterns = text_patterns(case, self._what)
        inside = " & ".join([*(f"/{pattern}/" for pattern in patterns), _PYTHON_PLAIN])
        name = f"{self._prefix}P{next(self._numbers)}".upper()
        self._lines.append(f"{name}: " + (f"/'/ ({inside}) /'/" if patterns else _PYTHON_TEXT) + "\n")
        return name

    def _text_until(self, end: str, patterns: Sequence[str]) -> str:
        """A text that is like all the patterns, and the mark that ends it, which it does not hold."""
        number, mark = next(self._numbers), as_pattern(end)
        name = f"{self._prefix}t{number}"
        holds_none = f"~/(?s:.*){mark}(?s:.*)/"
        inside = " & ".join([*(f"/{pattern}/" for pattern in patterns or ["(?s:.*)"]), holds_none])
        before, control = self._compiler.split_at_control(end)
        if control:  # which no text is, so that it ends the text wherever it stands
            self._lines.append(f"{name}: {name.upper()}\n{name.upper()}: ({inside}){_pattern(before)}\n")
            return f"{name} {self._compiler.literal(control)}"
        if not patterns:
            self._lines.append(f"{name}[lazy]: /(?s:.*){mark}/\n")
        else:
            self._lines.append(f"{name}[lazy]: {name.upper()}\n{name.upper()}: ({inside}) /{mark}/\n")
        return name


def _pattern(text: str) -> str:
    return f" /{as_pattern(text)}/" if text else ""
