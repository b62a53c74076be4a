"""Values of settings from text, and back. Each parser raises UsageError that shows the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from engine.errors import UsageError
from goinfer_chat.terminal import true_text

NONE = ("none", "random", "auto")
"""Words for "no value"."""


def parse_int(text: str) -> int:
    try:
        value = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise UsageError(f"{text!r} is not a whole number") from None
    return checked_int(value)


def checked_int(value: int) -> int:
    """The number. Raises UsageError for one of more than 64 bits: Python does not even write very long ones."""
    if value.bit_length() > 64:
        raise UsageError(f"a number of {value.bit_length():,} bits is too large for any setting")
    return value


def parse_size(text: str) -> int:
    """Bytes: a number, or one with a decimal unit such as 500MB or 1.5 GB."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    number = text.rstrip("BKMGTbkmgt ")
    try:
        size = int(float(number.replace(",", "")) * units[text[len(number) :].strip().upper()])
    except (ValueError, KeyError, OverflowError):
        raise UsageError(f"{text!r} is not a size; sizes look like 500MB or 8GB") from None
    if size < 0:
        raise UsageError(f"a size is 0 or more, not {text}")
    return size


def written_size(num_bytes: int) -> str:
    """The shortest text that `parse_size` reads as this number of bytes: `8GB`."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)


def parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number") from None


def parse_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise UsageError(f"{text!r} is neither on nor off")


def parse_stop(text: str) -> tuple[str, ...]:
    r"""One stop string as it is, several as a JSON array such as `["###", "\n\n"]`, or `none`."""
    text = true_text(text)
    if text == "none":
        return ()
    if not text.startswith("["):
        return (text,)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        if not text.startswith('["'):
            return (text,)
        raise UsageError(
            f"{text} begins like a JSON array and is none; one string alone: {json.dumps([text])}"
        ) from None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UsageError("several stop strings are a JSON array of strings")
    return tuple(values)


def optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The same parser, which also takes `none`."""
    return lambda text: None if text.lower() in NONE else parse(text)


def one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    """A parser of one of these words."""

    def parse(text: str) -> str:
        word = true_text(text).lower()
        if word not in choices:
            raise UsageError(f"{true_text(text)!r} is not one of: {', '.join(choices)}")
        return word

    return parse


def did_you_mean(name: str, known: list[str], prefix: str = "") -> str:
    """`; did you mean NAME?`, where one is near. `prefix`: what all begin with and has no part in how near they are."""
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def shown(value: Any) -> str:
    """A value as a person would type it."""
    match value:
        case None:
            return "none"
        case bool():
            return "on" if value else "off"
        case float() if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        case tuple():
            return " ".join(repr(item) for item in value) or "none"
        case _:
            return str(value)
