"""JSON bodies, checked field by field: whatever is wrong becomes a 400 that names the field.

A reader knows which fields were asked for, so that `refuse_others` can name the first that nobody knows: an option
that is not obeyed is refused, never ignored. A field that is null counts as not given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from goinfer_chat.server.errors import ApiError, invalid

MAX_CONTAINERS = 50_000
"""Objects and arrays in a body: ten thousand messages with parts and calls have fewer. Python's garbage collector looks
at all there are again and again while more are made, and the whole server waits for it."""

_NAMES = {dict: "an object", list: "an array", str: "a text", bool: "true or false", type(None): "null"}
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A text of a body; one that does not end goes to the end, or the search would begin anew at each quote in it. Nothing
is tried twice, or each backslash would be remembered."""


def kind_of(value: object) -> str:
    """What a JSON value is, for people."""
    return _NAMES.get(type(value), "a number")


def parse_body(raw: bytes) -> Fields:
    """The object of a request; a byte order mark, which editors put in front of a file, is dropped. Raises ApiError."""
    if not raw:
        raise ApiError(400, "the body is empty; it must be a JSON object", param="body")
    if _num_containers(raw) > MAX_CONTAINERS:
        raise ApiError(400, f"the body has more than {MAX_CONTAINERS:,} objects and arrays", param="body")
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8", param="body") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", param="body") from None
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "a number is too long"
        raise ApiError(400, f"the body is not JSON: {reason}", param="body") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be an object, not {kind_of(value)}", param="body")
    return Fields(value)


def _num_containers(raw: bytes) -> int:
    """How many objects and arrays begin in a body, where it has more than may be; else more than there are."""
    count = raw.count(b"[") + raw.count(b"{")
    return count if count <= MAX_CONTAINERS else sum(map(_TEXT.sub(b"", raw).count, (b"[", b"{")))


class Fields:
    """An object of a body. `where` is how its place is called, such as "messages[0]."."""

    def __init__(self, value: object, where: str = "") -> None:
        if not isinstance(value, dict):
            raise invalid(where.rstrip(".") or "body", f"must be an object, not {kind_of(value)}")
        self._value: dict[str, Any] = value
        self._asked: set[str] = set()
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self._value.get(name) is not None

    def name(self, name: str) -> str:
        return self.where + name

    def invalid(self, name: str, message: str) -> ApiError:
        return invalid(self.name(name), message)

    def value(self, name: str) -> Any:
        """Whatever it is; None where it is not given."""
        self._asked.add(name)
        return self._value.get(name)

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self.value(name)
        return default if value is None else checked_text(value, self.name(name))

    def required_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise self.invalid(name, "is missing")
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.invalid(name, f"must be true or false, not {kind_of(value)}")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.value(name)
        if value is None:
            return None
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole and not (isinstance(value, float) and value.is_integer()):
            raise self.invalid(name, "must be a whole number")
        if not low <= value <= high:
            raise self.invalid(name, f"must be between {low} and {high}")
        return int(value)

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.invalid(name, f"must be a number, not {kind_of(value)}")
        # Compared before it is made a float: a whole number may be too large for one. NaN is in no range.
        if not low <= value <= high:
            raise self.invalid(name, f"must be a number between {low:g} and {high:g}")
        return float(value)

    def choice(self, name: str, *known: str) -> str | None:
        value = self.text(name)
        if value is not None and value not in known:
            raise self.invalid(name, f"must be one of {', '.join(known)}")
        return value

    def fields(self, name: str) -> Fields | None:
        value = self.value(name)
        return None if value is None else Fields(value, self.name(name) + ".")

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """An object taken as it is; the texts in it can be encoded."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.invalid(name, f"must be an object, not {kind_of(value)}")
        check_texts(value, self.name(name))
        return value

    def items(self, name: str) -> list[Any] | None:
        value = self.value(name)
        if value is not None and not isinstance(value, list):
            raise self.invalid(name, f"must be an array, not {kind_of(value)}")
        return value

    def objects(self, name: str) -> Iterator[Fields]:
        """The objects of an array; none where it is not given."""
        for number, value in enumerate(self.items(name) or ()):
            yield Fields(value, f"{self.name(name)}[{number}].")

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A text, or an array of some; empty where it is not given."""
        value = self.value(name)
        if value is None:
            return ()
        values = [value] if isinstance(value, str) else self.items(name) or []
        if not 0 < len(values) <= most:
            raise self.invalid(name, f"must have 1 to {most} texts")
        found = tuple(checked_text(text, self.name(name)) for text in values)
        if not all(found):
            raise self.invalid(name, "must not hold an empty text")
        return found

    def only(self, name: str, *allowed: object) -> None:
        """A field of which only these values, which are what happens anyway, can be obeyed."""
        value = self.value(name)
        if value is not None and value not in allowed:
            shown = ", ".join(json.dumps(value) for value in allowed)
            raise self.invalid(name, f"is not supported, except {shown}")

    def labels(self, *names: str) -> None:
        """Fields that change nothing by their nature: who asks, what for."""
        self._asked.update(names)

    def refuse_others(self) -> None:
        """Raises ApiError that names a field which nobody has asked for."""
        unknown = next(
            (name for name, value in self._value.items() if name not in self._asked and value is not None), None
        )
        if unknown is not None:
            shown = unknown if unknown.isprintable() and len(unknown) <= 80 else "an option"
            raise ApiError(
                400, f"{self.where}{shown} is not supported here", param=self.name(shown), code="unknown_parameter"
            )


def checked_text(value: object, name: str) -> str:
    """Raises ApiError for anything but a text, and for half a surrogate pair."""
    if not isinstance(value, str):
        raise invalid(name, f"must be a text, not {kind_of(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(name, "holds half of a surrogate pair, which is not text") from None
    return value


def check_texts(value: object, name: str) -> None:
    """Raises ApiError where a text at any depth, names too, cannot be encoded."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            checked_text(item, name)
        elif isinstance(item, dict):
            todo += [*item, *item.values()]
        elif isinstance(item, list):
            todo += item
