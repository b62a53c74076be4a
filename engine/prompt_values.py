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
template is given an anchor in place of all it said: before the names of its calls, without their arguments, or as its
content."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a template wants to be given a message that calls tools; found by trying (call_probe.py)."""

    arguments_as_text: bool = False
    """As OpenAI's interface has them; most templates expect an object."""
    no_content: bool = False
    """Without a text, `content` is none, not an empty text."""
    tools_in_system: bool = False
    """Tools are given as a field of the system message, as JSON text (Phi-4-mini)."""
    only_objects: bool = False
    """It fails with arguments that are no object, as small models may write them (`with_object_arguments`)."""

    def spoken(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A message in it."""
        if not fields.get("tool_calls"):
            return fields
        if self.no_content and not fields["content"]:
            fields = {**fields, "content": None}
        calls = fields["tool_calls"]
        return {**fields, "tool_calls": list(map(_with_text, calls))} if self.arguments_as_text else fields


PLAIN = Dialect()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a template renders."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    arguments: Mapping[str, Any]
    dialect: Dialect = PLAIN

    def variables(self, marking: Marking | None = None) -> dict[str, Any]:
        """The names that the template knows, as JSON values. Raises UsageError for anything else."""
        if taken := {"messages", "tools"} & set(self.arguments):
            raise UsageError(f"{taken.pop()!r} cannot be a template argument: the program sets it")
        marking = marking if marking is not None else Marking()
        tools = _json(self.tools, marking.text) if self.tools else None
        messages = [self.dialect.spoken(marking.message(number, m)) for number, m in enumerate(self.messages)]
        if tools and self.dialect.tools_in_system:
            if not messages or messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": ""})
            messages[0]["tools"] = json.dumps(list(map(tool_function, tools)), ensure_ascii=False)
        return {
            **{name: _json(value, marking.text) for name, value in self.arguments.items()},
            "messages": messages,
            "tools": tools,
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
                names = [name_of(call) or "" for call in message.tool_calls]
                names[0] = self.marks.anchor_of(number) + names[0]
                calls = [
                    {**call, "function": {"name": name, "arguments": {}}}
                    for name, call in zip(names, message.tool_calls)
                ]
                return {"role": message.role, "content": "", "tool_calls": calls}
            guard = self.guard if level == ALL else self.control_guard
            if guard is not None:
                mark = functools.partial(guard.protected, mark=split)
            if level != CONTROLS_ONLY and message.ids:
                anchor = self.marks.anchor_of(number)
        given = [_json(_with_arguments(call), mark) for call in message.tool_calls]
        content = mark(message.content)
        if name_of_first_call(message) is None:
            content += anchor
        else:
            function: Any = tool_function(given[0])
            function["name"] = anchor + function["name"]
        fields: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking is not None:
            # Two names are in use for it.
            fields["reasoning_content"] = fields["thinking"] = mark(message.thinking)
        if given:
            fields["tool_calls"] = given
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


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    """The call with its arguments as JSON text."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_text(call["function"])}
    arguments = call.get("arguments")
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)} if isinstance(arguments, dict) else call


def with_object_arguments(message: Message) -> Message:
    """What a call has in place of arguments that are an object, as the one value of such."""

    def mended(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = tool_function(call)
        if isinstance(arguments_of(function), dict):
            return call
        function = {**function, "arguments": {"arguments": function.get("arguments")}}
        return {**call, "function": function} if isinstance(call.get("function"), Mapping) else function

    return replace(message, tool_calls=tuple(map(mended, message.tool_calls)))


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


Messages = tuple[Message, ...]
_SYSTEMS = ("system", "developer")


def forms_of(messages: Messages, *, knows_developer: bool) -> list[Messages]:
    """The forms of messages that `ChatTemplate.encode` tries, each once."""
    if not knows_developer:
        messages = tuple(replace(m, role="system") if m.role == "developer" else m for m in messages)
    first = next((n for n, m in enumerate(messages) if m.role not in _SYSTEMS), len(messages))
    forms = [messages]
    for form in (messages, (*messages[:first], *_as_user(messages[first:])), _as_user(messages)):
        if (joined := _joined(form)) not in forms:
            forms.append(joined)
    return forms


def _as_user(messages: Messages) -> Messages:
    return tuple(replace(m, role="user") if m.role in _SYSTEMS else m for m in messages)


def with_calls_apart(messages: Messages) -> Messages:
    """Each call of a message in a message of its own, with its results behind it, and what is said with calls before
    them; a reply whose ids are known stays as it is if it has one call."""
    alone: list[Message] = []
    for number, message in enumerate(messages):
        if message.role == "tool" and any(m is message for m in alone):
            continue
        if not _may_lose(message):
            alone.append(message)
            continue
        if message.content:
            alone.append(replace(message, tool_calls=(), ids=None))
            message = replace(message, content="", thinking=None)
        behind = messages[number + 1 :]
        results = behind[: next((n for n, m in enumerate(behind) if m.role != "tool"), len(behind))]
        for call in message.tool_calls:
            alone.append(replace(message, tool_calls=(call,), ids=None))
            alone += [m for m in results if m.tool_call_id == call.get("id")]
            message = replace(message, thinking=None)
    return tuple(alone)


def leaves_out(text: str, messages: Messages, *, tells_system: bool) -> bool:
    """Whether a template has dropped a system prompt, a call, or what was said with one.

    Some know no system prompt, or one in front only; some write one call of a message, or the text or the call. Where
    it `tells_system`, one in front is the template's to rewrite.
    """
    systems = [m.content.strip() for m in messages if m.role in _SYSTEMS]
    if tells_system and len(systems) == 1 and messages[0].role in _SYSTEMS:
        systems = []
    if any(x not in text for x in systems):
        return True
    calling = [m for m in messages if _may_lose(m)]
    calls = [arguments_of(tool_function(call)) for m in calling for call in m.tool_calls]
    return any(not _is_in(text, part) for part in (*_texts_in(calls), *(m.content.strip() for m in calling)))


def _may_lose(message: Message) -> bool:
    """Of a single call whose reply has ids, these stand in the prompt."""
    return len(message.tool_calls) > 1 or (len(message.tool_calls) == 1 and message.ids is None)


def _texts_in(value: Any) -> list[str]:
    """The texts of a JSON value, without the names of its fields."""
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _texts_in(part)]


def _is_in(text: str, part: str) -> bool:
    """As it is, or as JSON or Python write it."""
    written = (part, repr(part)[1:-1], *(json.dumps(part, ensure_ascii=x)[1:-1] for x in (False, True)))
    return any(each in text for each in written)


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
