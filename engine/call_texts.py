"""What a schema says of a text, as patterns for texts that stand in a call without JSON's quotes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.errors import SchemaError
from engine.grammar import as_pattern

_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,4}}"
_LONG = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
_DAYS = f"(?:{_LONG}|{_SHORT})"
_DATE = f"[0-9]{{4}}-{_DAYS}"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P(?:[0-9]{1,6}[YMWD]|(?:[0-9]{1,6}D)?T[0-9]{1,6}[HMS])",
    "email": rf"[a-zA-Z0-9_+-]{{1,40}}(?:\.[a-zA-Z0-9_+-]{{1,20}}){{0,2}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "ipv6": "(?:(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|::(?:[0-9a-fA-F]{1,4}:){0,5}[0-9a-fA-F]{1,4}|::)",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"[a-z][a-z0-9+.-]{{0,20}}:\/\/{_HOST}(?::[0-9]{{1,4}})?(?:\/[a-zA-Z0-9._~-]*)*(?:\?[a-zA-Z0-9._~=&-]*)?",
}
"""Some of the texts that are valid under each format, never others."""


def text_patterns(case: Mapping[str, Any], what: str) -> list[str]:
    """Patterns that a text has to be like as a whole, all of them; none where any text is valid.

    Raises SchemaError for a pattern whose anchors stand where they cannot be followed.
    """
    if "enum" in case:
        return [any_of_these(case["enum"])]
    found = []
    if "pattern" in case:
        found.append(_whole(case["pattern"], what))
    if "format" in case:
        found.append(FORMATS[case["format"]])
    least, most = case.get("minLength", 0), case.get("maxLength")
    if least or most is not None:
        found.append(f"(?s:.{{{least},{'' if most is None else most}}})")
    return found


def any_of_these(texts: Iterable[str]) -> str:
    return "|".join(f"(?:{as_pattern(text)})" for text in texts)


def _whole(pattern: str, what: str) -> str:
    """A pattern that is found somewhere in a text, as one that the whole text is like."""
    refused = SchemaError(
        f'{what} cannot be followed: "pattern" {pattern!r} has anchors within it, which is not supported in this '
        "model's form of calls"
    )
    parts: list[str] = []
    depth, in_class, chooses, anchors = 0, False, False, list[int]()
    position = 0
    while position < len(pattern):
        c = pattern[position]
        if c == "\\":
            pair = pattern[position : position + 2]
            if pair in (r"\b", r"\B", r"\A", r"\z", r"\Z"):
                raise refused
            plain = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}.get(pair)
            parts.append(pair if plain is None else plain if in_class else f"[{plain}]")
            position += 2
            continue
        if in_class:
            in_class = c != "]"
        else:
            in_class = c == "["
            depth += (c == "(") - (c == ")")
            chooses = chooses or (c == "|" and depth == 0)
            if c in "^$":
                anchors.append(position)
        parts.append("\\/" if c == "/" else c)
        position += 1
    begins, ends = 0 in anchors, len(pattern) - 1 in anchors
    if set(anchors) - {0, len(pattern) - 1} or (anchors and chooses):
        raise refused
    inner = "".join(parts[begins : len(parts) - ends])
    return f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"
