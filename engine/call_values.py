"""Values of arguments where calls are no JSON: JSON or Python literals, and names and texts without JSON's quotes."""

from __future__ import annotations

import json
import re
from typing import Any

NO_VALUE = object()
"""What is read where no value stands."""

_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_WORD = re.compile(r"[A-Za-z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_BARE_KEY = re.compile(r"[^\s:{}\[\],\"'<>]+")
_PYTHON_STRING = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_MAX_DEPTH = 100
_MAX_DIGITS = 4000
"""Python refuses to read longer whole numbers."""


def read_value(text: str, start: int, quotes: tuple[str, str] = ("", ""), depth: int = 0) -> tuple[Any, int]:
    """(value, end) of what stands at `start`: JSON, Python, or texts within `quotes`; NO_VALUE where nothing does."""
    nothing = (NO_VALUE, start)
    if depth > _MAX_DEPTH:
        return nothing
    if quotes[0] and text.startswith(quotes[0], start):
        begin = start + len(quotes[0])
        end = text.find(quotes[1], begin)
        return nothing if end < 0 else (text[begin:end], end + len(quotes[1]))
    first = text[start : start + 1]
    if first == '"':
        try:
            return json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            return _python_string(text, start)
    if first == "'":
        return _python_string(text, start)
    if first in ("[", "{"):
        return _read_several(text, start, quotes, depth)
    if word := _WORD.match(text, start):
        return (_WORDS[word[0]], word.end()) if word[0] in _WORDS else nothing
    number = _NUMBER.match(text, start)
    if number is None or len(number[0]) > _MAX_DIGITS:
        return nothing
    whole = re.fullmatch(r"-?\d+", number[0])
    value = int(number[0]) if whole else float(number[0])
    return (value, number.end()) if whole or abs(value) != float("inf") else nothing


def _read_several(text: str, start: int, quotes: tuple[str, str], depth: int) -> tuple[Any, int]:
    """A list or an object."""
    is_list = text[start] == "["
    closing, nothing = "]" if is_list else "}", (NO_VALUE, start)
    items: list[Any] = []
    named: dict[str, Any] = {}
    position = _skip(text, start + 1)
    while not text.startswith(closing, position):
        if (items or named) and not text.startswith(",", position):
            return nothing
        position = _skip(text, position + 1) if items or named else position
        key: Any = ""
        if not is_list:
            bare = _BARE_KEY.match(text, position)
            key, position = (bare[0], bare.end()) if bare else read_value(text, position, quotes, depth + 1)
            position = _skip(text, position)
            if not isinstance(key, str) or not text.startswith(":", position):
                return nothing
            position = _skip(text, position + 1)
        value, position = read_value(text, position, quotes, depth + 1)
        if value is NO_VALUE:
            return nothing
        if is_list:
            items.append(value)
        else:
            named[key] = value
        position = _skip(text, position)
    return items if is_list else named, position + 1


def _skip(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\n", "\t", "\r"):
        position += 1
    return position


def _python_string(text: str, start: int) -> tuple[Any, int]:
    found = _PYTHON_STRING.match(text, start)
    if found is None:
        return NO_VALUE, start
    inside = found[1] if found[1] is not None else found[2]
    value = _ESCAPE.sub(_unescaped, inside)
    return value.encode("utf-8", "replace").decode(), found.end()


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    if code is None:
        return _ESCAPED.get(escape[4], escape[4] if escape[4] in "'\"\\" else escape[0])
    number = int(code, 16)
    return chr(number) if number < 0x110000 else "\ufffd"


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
