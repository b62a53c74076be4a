"""A conversation as a file: Markdown to read, JSON to keep and to take in again (docs/sessions.md has the format)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, Final, TypeVar, get_args

from engine.api import Message, Role
from engine.errors import UsageError
from goinfer_chat.fences import fenced
from goinfer_chat.store.conversations import NewConversation
from goinfer_chat.store.names import check_name
from goinfer_chat.store.records import Conversation, Ending, ModelRef, StoredMessage
from goinfer_chat.store.rows import stats_from, storable

FORMAT: Final = "goinfer-chat conversation"
VERSION: Final = 1
MAX_IMPORT_BYTES: Final = 1 << 28

_HEADINGS: Final = {"user": "You", "assistant": "Assistant", "system": "System", "developer": "Developer"}
_ENDINGS: Final = frozenset(ending for part in get_args(Ending) for ending in get_args(part))
_T = TypeVar("_T")


# -- Markdown ----------------------------------------------------------------------------------------------------------


def to_markdown(conversation: Conversation, path: Sequence[StoredMessage]) -> str:
    """One branch as a document. Thinking is folded away; tool calls and results stand in code blocks."""
    facts = [f"started {_time(conversation.created)}"]
    if conversation.model:
        facts.append(f"model {conversation.model.name}")
    parts = [f"# {conversation.name or 'Conversation'}", "*" + ", ".join(facts) + "*"]
    if conversation.system is not None:
        parts += ["## System prompt", conversation.system]
    for stored in path:
        parts += _message_as_markdown(stored)
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _message_as_markdown(stored: StoredMessage) -> list[str]:
    message = stored.message
    if message.role == "tool":
        return [f"## Tool {message.name or message.tool_call_id or ''}".rstrip(), fenced(message.content)]
    parts = [f"## {_HEADINGS[message.role]}"]
    if message.thinking:
        parts += ["<details><summary>Thinking</summary>", message.thinking, "</details>"]
    if message.content:
        parts.append(message.content)
    parts += [fenced(json.dumps(dict(call), ensure_ascii=False, indent=2), "json") for call in message.tool_calls]
    if stored.finish_reason not in (None, "stop"):
        parts.append(f"*({stored.finish_reason})*")
    return parts


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


# -- JSON --------------------------------------------------------------------------------------------------------------


def to_json(conversation: Conversation, tree: Sequence[StoredMessage]) -> str:
    """All branches, with token ids and figures; a line for each message."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "name": conversation.name,
        "created": conversation.created,
        "updated": conversation.updated,
        "model": {"identity": conversation.model.identity, "name": conversation.model.name}
        if conversation.model
        else None,
        "system": conversation.system,
        "settings": dict(conversation.settings),
        "head": conversation.head,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    messages = ",\n".join(json.dumps(message_as_json(stored)) for stored in tree)
    return "{\n" + "\n".join(lines) + f'\n"messages": [\n{messages}\n]\n}}\n'


def message_as_json(stored: StoredMessage) -> dict[str, Any]:
    """One message; fields that say nothing are left out, but for those every message has."""
    message = stored.message
    shown: dict[str, Any] = {
        "id": stored.id,
        "parent": stored.parent,
        "created": stored.created,
        "role": message.role,
        "content": message.content,
    }
    optional = {
        "thinking": message.thinking,
        "ids": None if message.ids is None else list(message.ids),
        "model": stored.model,
        "tool_calls": [dict(call) for call in message.tool_calls] or None,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "finish_reason": stored.finish_reason,
        "stats": asdict(stored.stats) if stored.stats else None,
    }
    return shown | {name: value for name, value in optional.items() if value is not None}


def from_json(data: bytes) -> NewConversation:
    """A conversation from an exported file. Every value is checked.

    Raises UsageError that says what is wrong and where.
    """
    if len(data) > MAX_IMPORT_BYTES:
        raise UsageError(f"the file has {len(data):,} bytes; at most {MAX_IMPORT_BYTES:,} are read")
    try:
        document = _Fields(json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant), "the file")
    except UnicodeDecodeError:
        raise UsageError("the file is not UTF-8") from None
    except RecursionError:
        raise UsageError("the file is nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"the file is not JSON: {error}") from None
    if document.get("format", _text) != FORMAT:
        raise UsageError("the file is not an exported conversation of goinfer-chat")
    version = document.need("version", _count)
    if version != VERSION:
        raise UsageError(
            f"the file has version {version} of the format, and this goinfer-chat reads {VERSION}; update it"
        )
    name = document.get("name", _text)
    messages = _messages(document.need("messages", _list))
    head = document.get("head", _count)
    if head is not None and head not in {stored.id for stored in messages}:
        raise UsageError(f"the head of the file is message {head}, which it does not have")
    return NewConversation(
        name=None if name is None else check_name(name),
        model=document.get("model", _model),
        system=document.get("system", _text),
        settings=document.get("settings", _object) or {},
        messages=tuple(messages),
        head=head,
    )


def without_ids(new: NewConversation) -> NewConversation:
    """The words alone: the ids of a reply are what a model reads, and a stranger's may say what no word shows."""
    messages = [replace(stored, message=replace(stored.message, ids=None)) for stored in new.messages]
    return replace(new, messages=tuple(messages))


def _messages(entries: list[Any]) -> list[StoredMessage]:
    messages: list[StoredMessage] = []
    seen: set[int] = set()
    for number, entry in enumerate(entries, start=1):
        fields = _Fields(entry, f"message {number}")
        stored = StoredMessage(
            id=fields.need("id", _count),
            parent=fields.get("parent", _count),
            created=fields.need("created", _number),
            message=Message(
                role=fields.need("role", _role),
                content=fields.need("content", _text),
                thinking=fields.get("thinking", _text),
                ids=fields.get("ids", _token_ids),
                tool_calls=fields.get("tool_calls", _objects) or (),
                tool_call_id=fields.get("tool_call_id", _text),
                name=fields.get("name", _text),
            ),
            model=fields.get("model", _text),
            finish_reason=fields.get("finish_reason", _ending),
            stats=fields.get("stats", _stats),
        )
        if stored.id in seen:
            raise UsageError(f"message {number}: the id {stored.id} is given twice")
        if stored.parent is not None and stored.parent not in seen:
            raise UsageError(f"message {number}: its parent {stored.parent} does not stand before it")
        seen.add(stored.id)
        messages.append(stored)
    return messages


class _Fields:
    """The fields of a JSON object, each through a function that raises ValueError for a value it does not take."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise UsageError(f"{where} is not a JSON object")
        self._values: Mapping[str, Any] = value
        self._where = where

    def get(self, name: str, check: Callable[[Any], _T]) -> _T | None:
        value = self._values.get(name)
        return None if value is None else self._checked(name, value, check)

    def need(self, name: str, check: Callable[[Any], _T]) -> _T:
        if self._values.get(name) is None:
            raise UsageError(f"{self._where}: {name} is missing")
        return self._checked(name, self._values[name], check)

    def _checked(self, name: str, value: Any, check: Callable[[Any], _T]) -> _T:
        try:
            return check(value)
        except ValueError as error:
            raise UsageError(f"{self._where}: {name} {error}") from None


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("is not text")
    return storable(value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError("is not a whole number of 0 or more")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or abs(value) > 1e15:
        raise ValueError("is not a number")
    return float(value)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("is not a list")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("holds something that is not a JSON object")
    return value


def _objects(value: Any) -> tuple[dict[str, Any], ...]:
    return tuple(map(_object, _list(value)))


def _role(value: Any) -> Role:
    for role in get_args(Role):
        if role == value:
            return role  # type: ignore[no-any-return]
    raise ValueError(f"is not one of {', '.join(get_args(Role))}")


def _ending(value: Any) -> Ending:
    if value not in _ENDINGS:
        raise ValueError(f"is not one of {', '.join(sorted(_ENDINGS))}")
    return value  # type: ignore[no-any-return]


def _token_ids(value: Any) -> tuple[int, ...]:
    if any(_count(id) >= 2**31 for id in _list(value)):
        raise ValueError("holds a number that is not a token id")
    return tuple(value)


def _model(value: Any) -> ModelRef:
    fields = _Fields(value, "model")
    return ModelRef(identity=fields.need("identity", _text), name=fields.need("name", _text))


def _stats(value: Any) -> Any:
    stats = stats_from({name: _figure(figure) for name, figure in _object(value).items()})
    if stats is None:
        raise ValueError("lacks figures that every turn has")
    return stats


def _figure(value: Any) -> int | float | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    return _number(value)
