"""Values of the database: rows to records, and what goes into a column. A row that cannot be is damage.

Everything that reads a row raises StoreError for one that a sound database does not have.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from sqlite3 import Row
from typing import Any, Final, TypeVar, get_args, overload

from engine.api import Message, Role, TurnStats
from goinfer_chat.store.database import damaged
from goinfer_chat.store.records import Conversation, ModelRef, StoredMessage

_T = TypeVar("_T")
_STATS_FIELDS: Final = frozenset(field.name for field in fields(TurnStats))


# -- rows to records ---------------------------------------------------------------------------------------------------


def conversation_of(row: Row) -> Conversation:
    stats = _stats(_text(row, "last_stats"))
    model = _text(row, "model")
    return Conversation(
        id=need(row, "id", str),
        name=_text(row, "name"),
        created=need(row, "created", float),
        updated=need(row, "updated", float),
        model=ModelRef(identity=model, name=_text(row, "model_name") or "") if model else None,
        system=_text(row, "system"),
        settings=_json(need(row, "settings", str), dict),
        head=get(row, "head", int),
        num_messages=need(row, "num_messages", int),
        num_beside=need(row, "num_all", int) - need(row, "num_messages", int),
        context_tokens=stats.context_used if stats else None,
    )


def message_of(row: Row) -> StoredMessage:
    role: Any = need(row, "role", str)
    if role not in get_args(Role):
        raise damaged(f"a message of the role {role!r}")
    calls = _text(row, "tool_calls")
    ending: Any = _text(row, "finish_reason")
    return StoredMessage(
        id=need(row, "id", int),
        parent=get(row, "parent", int),
        message=Message(
            role=role,
            content=need(row, "content", str),
            thinking=_text(row, "thinking"),
            ids=_decode_ids(get(row, "ids", bytes)),
            tool_calls=tuple(_json(calls, list)) if calls is not None else (),
            tool_call_id=_text(row, "tool_call_id"),
            name=_text(row, "name"),
        ),
        created=need(row, "created", float),
        model=_text(row, "model"),
        finish_reason=ending,
        stats=_stats(_text(row, "stats")),
    )


def get(row: Row, name: str, kind: type[_T]) -> _T | None:
    """The value of a column; None for NULL."""
    value = row[name]
    if value is not None and not isinstance(value, kind):
        raise damaged(f"{name} is not of type {kind.__name__}")
    return value


def need(row: Row, name: str, kind: type[_T]) -> _T:
    """The value of a column that must have one."""
    value = get(row, name, kind)
    if value is None:
        raise damaged(f"{name} is missing")
    return value


def _text(row: Row, name: str) -> str | None:
    return get(row, name, str)


def _json(text: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise damaged(f"JSON that is not of type {kind.__name__}")
    return value


def stats_from(values: Mapping[str, Any]) -> TurnStats | None:
    """Figures by name; unknown names, which a later program wrote, are left out. None when needed ones are missing."""
    try:
        return TurnStats(**{name: value for name, value in values.items() if name in _STATS_FIELDS})
    except TypeError:
        return None


def _stats(text: str | None) -> TurnStats | None:
    return None if text is None else stats_from(_json(text, dict))


def _decode_ids(blob: bytes | None) -> tuple[int, ...] | None:
    if blob is None:
        return None
    if len(blob) % 4:
        raise damaged("token ids cannot be read")
    return struct.unpack(f"<{len(blob) // 4}I", blob)


# -- what goes into columns --------------------------------------------------------------------------------------------


@overload
def storable(text: str) -> str: ...


@overload
def storable(text: None) -> None: ...


def storable(text: str | None) -> str | None:
    """Lone surrogates, which no UTF-8 has, as U+FFFD."""
    return None if text is None else re.sub("[\ud800-\udfff]", "\ufffd", text)


def encode_ids(ids: Sequence[int] | None) -> bytes | None:
    return None if ids is None else struct.pack(f"<{len(ids)}I", *ids)


def model_columns(model: ModelRef | None) -> tuple[str | None, str | None]:
    return (model.identity, storable(model.name)) if model else (None, None)


def calls_column(message: Message) -> str | None:
    """The tool calls of a message as a JSON array; None if it has none."""
    return json.dumps([dict(call) for call in message.tool_calls]) if message.tool_calls else None


def stats_column(stats: TurnStats | None) -> str | None:
    return json.dumps(asdict(stats)) if stats else None
