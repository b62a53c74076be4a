"""What a chat template is given: messages and tools as JSON values, with marks in them where they are needed.

Also the forms of a conversation that are tried on a template that refuses some orders of roles.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.api import Message, tool_function
from engine.errors import UsageError
from engine.prompt_marks import Guard, Marks

CONTROLS_ONLY, CONTROLS_AND_ANCHOR, ALL, AS_CALL, WHOLE = range(5)
"""How what an assistant said is marked; more is better. The last two stand for a reply whose ids are known: the
template is given an anchor in place of all it said, as the name of its one call or as its content."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a template renders."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    arguments: Mapping[str, Any]

    def variables(self, marking: Marking | None = None) -> dict[str, Any]:
        """The names that the template knows, as JSON values. Raises UsageError for what is no JSON value."""
        if taken := {"messages", "tools"} & set(self.arguments):
            raise UsageError(f"{taken.pop()!r} is no template argument: it is given already")
        marking = marking if marking is not None else Marking()
        return {
            **{name: _json(value, marking.text) for name, value in self.arguments.items()},
            "messages": [marking.message(number, message) for number, message in enumerate(self.messages)],
            "tools": _json(self.tools, marking.text) if self.tools else None,
        }

    def texts(self) -> set[str]:
        """Every text in it."""
        texts: set[str] = set()
        todo: list[Any] = list(self.variables().values())
        while todo:
            value = todo.pop()
            if isinstance(value, str):
                texts.add(value)
            elif isinstance(value, (dict, list)):
                todo.extend(value)
                todo.extend(value.values() if isinstance(value, dict) else ())
        return texts


@dataclass(frozen=True, slots=True)
class Marking:
    """Puts marks into what the template is given; none at all without `marks`."""

    marks: Marks | None = None
    guard: Guard | None = None
    control_guard: Guard | None = None
    levels: Mapping[int, int] | None = None
    """Message number -> how it is marked."""

    def text(self, text: str) -> str:
        """What people and tools wrote."""
        return text if self.marks is None or self.guard is None else self.guard.protected(text, self.marks.split)

    def message(self, number: int, message: Message) -> dict[str, Any]:
        """A message as templates expect it."""
        mark, anchor = self.text, ""
        if self.marks is not None and self.levels is not None and number in self.levels:
            level, split = self.levels[number], self.marks.split
            if level == WHOLE:
                return {"role": message.role, "content": self.marks.anchor_of(number)}
            if level == AS_CALL:
                call = {**message.tool_calls[0], "function": {"name": self.marks.anchor_of(number), "arguments": {}}}
                return {"role": message.role, "content": "", "tool_calls": [call]}
            guard = self.guard if level == ALL else self.control_guard
            if guard is not None:
                mark = functools.partial(guard.protected, mark=split)
            if level != CONTROLS_ONLY and message.ids:
                anchor = self.marks.anchor_of(number)
        calls = [_json(_with_arguments(call), mark) for call in message.tool_calls]
        content = mark(message.content)
        if name_of_first_call(message) is None:
            content += anchor
        else:
            function: Any = tool_function(calls[0])
            function["name"] = anchor + function["name"]
        fields: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking is not None:
            # Two names are in use for it.
            fields["reasoning_content"] = fields["thinking"] = mark(message.thinking)
        if calls:
            fields["tool_calls"] = calls
        if message.tool_call_id is not None:
            fields["tool_call_id"] = self.text(message.tool_call_id)
        if message.name is not None:
            fields["name"] = self.text(message.name)
        return fields


def _json(value: Any, mark: Callable[[str], str]) -> Any:
    """The value as plain lists and dicts, key order kept, with each text (keys too) passed through `mark`."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, Mapping):
        return {mark(str(key)): _json(item, mark) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(item, mark) for item in value]
    raise UsageError(f"a chat template is given JSON values only, not a {type(value).__name__}")


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """The call with its arguments as an object, which templates expect, where they came as JSON text."""
    call = dict(call)
    if isinstance(call.get("function"), Mapping):
        call["function"] = _with_arguments(call["function"])
    elif isinstance(call.get("arguments"), str):
        try:
            arguments = json.loads(call["arguments"] or "{}")
        except (ValueError, RecursionError):
            return call
        if isinstance(arguments, dict):
            call["arguments"] = arguments
    return call


def arguments_of(function: Mapping[str, Any]) -> Any:
    """The arguments as a value, to be compared."""
    try:
        return _with_arguments(function).get("arguments")
    except RecursionError:
        return None


def name_of_first_call(message: Message) -> str | None:
    return name_of(message.tool_calls[0]) if message.tool_calls else None


def name_of(call: Mapping[str, Any]) -> str | None:
    name = tool_function(call).get("name")
    return name if isinstance(name, str) else None


def with_short_ids(message: Message) -> Message:
    """Mistral's templates want nine letters and digits."""

    def short(id: str) -> str:
        letters = "".join(c for c in id if c.isascii() and c.isalnum())
        return letters[-9:].rjust(9, "0")

    calls = tuple({**call, "id": short(str(call.get("id", "")))} for call in message.tool_calls)
    answers = None if message.tool_call_id is None else short(message.tool_call_id)
    return replace(message, tool_calls=calls, tool_call_id=answers)


def forms_of(messages: tuple[Message, ...], *, knows_developer: bool) -> list[tuple[Message, ...]]:
    """The forms that `ChatTemplate.encode` tells of, each once."""
    if not knows_developer:
        messages = tuple(replace(m, role="system") if m.role == "developer" else m for m in messages)
    as_user = tuple(replace(m, role="user") if m.role in ("system", "developer") else m for m in messages)
    forms = [messages]
    for form in (_joined(messages), _joined(as_user)):
        if form not in forms:
            forms.append(form)
    return forms


def _joined(messages: Sequence[Message]) -> tuple[Message, ...]:
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is not None and last.role == message.role != "tool" and not last.tool_calls and not message.tool_calls:
            thinking = "\n\n".join(text for text in (last.thinking, message.thinking) if text) or None
            content = f"{last.content}\n\n{message.content}"
            joined[-1] = replace(last, content=content, thinking=thinking, ids=None)
        else:
            joined.append(message)
    return tuple(joined)
