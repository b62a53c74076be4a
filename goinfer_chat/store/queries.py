"""Every SQL statement but the schema: records in, records out. All of it runs inside a transaction of its caller."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from sqlite3 import Connection
from typing import Any

from engine.api import Message, TurnStats
from goinfer_chat.store.names import name_from, numbered
from goinfer_chat.store.records import Conversation, Ending, ModelRef, StoredMessage
from goinfer_chat.store.rows import (
    calls_column,
    conversation_of,
    encode_ids,
    get,
    message_of,
    model_columns,
    need,
    stats_column,
    storable,
)

_CONVERSATIONS = """
    SELECT c.*,
        (SELECT count(*) FROM messages m WHERE m.conversation = c.id AND m.kept) AS num_all,
        (WITH RECURSIVE up(id, parent) AS (
            SELECT m.id, m.parent FROM messages m WHERE m.id = c.head
            UNION SELECT m.id, m.parent FROM messages m JOIN up ON m.id = up.parent
        ) SELECT count(*) FROM up) AS num_messages,
        (WITH RECURSIVE up(parent, stats) AS (
            SELECT m.parent, m.stats FROM messages m WHERE m.id = c.head
            UNION ALL SELECT m.parent, m.stats FROM messages m JOIN up ON m.id = up.parent WHERE up.stats IS NULL
        ) SELECT up.stats FROM up WHERE up.stats IS NOT NULL) AS last_stats
    FROM conversations c
"""
_HAS_MESSAGES = "EXISTS (SELECT 1 FROM messages m WHERE m.conversation = c.id AND m.kept)"


# -- conversations -----------------------------------------------------------------------------------------------------


def conversation(connection: Connection, id: str) -> Conversation | None:
    row = connection.execute(f"{_CONVERSATIONS} WHERE c.id = ?", (id,)).fetchone()
    return conversation_of(row) if row else None


def recent(connection: Connection, limit: int | None) -> list[Conversation]:
    """Those that hold something, the one used last first."""
    rows = connection.execute(
        f"{_CONVERSATIONS} WHERE {_HAS_MESSAGES} ORDER BY c.used DESC LIMIT ?", (-1 if limit is None else limit,)
    )
    return [conversation_of(row) for row in rows]


def ids(connection: Connection) -> set[str]:
    return {need(row, "id", str) for row in connection.execute("SELECT id FROM conversations")}


def empty_ids(connection: Connection) -> list[str]:
    """Conversations without any message, not even one of a turn that runs."""
    rows = connection.execute(
        "SELECT id FROM conversations c WHERE NOT EXISTS (SELECT 1 FROM messages m WHERE m.conversation = c.id)"
    )
    return [need(row, "id", str) for row in rows]


def named(connection: Connection, name: str) -> str | None:
    """The id of the conversation of that name."""
    row = connection.execute("SELECT id FROM conversations WHERE name = ?", (name,)).fetchone()
    return need(row, "id", str) if row else None


def names(connection: Connection) -> set[str]:
    rows = connection.execute("SELECT name FROM conversations WHERE name IS NOT NULL")
    return {need(row, "name", str) for row in rows}


def insert_conversation(
    connection: Connection,
    id: str,
    now: float,
    *,
    name: str | None,
    model: ModelRef | None,
    system: str | None,
    settings: Mapping[str, Any],
) -> None:
    connection.execute(
        "INSERT INTO conversations (id, name, created, updated, used, model, model_name, system, settings)"
        " VALUES (?, ?, ?, ?, (SELECT coalesce(max(used), 0) + 1 FROM conversations), ?, ?, ?, ?)",
        (id, name, now, now, *model_columns(model), storable(system), json.dumps(dict(settings))),
    )


def touch(connection: Connection, id: str, *, holder: int | None = None) -> None:
    """The conversation is the one used last. `holder`: the process that goes on with it."""
    connection.execute(
        "UPDATE conversations SET used = (SELECT max(used) + 1 FROM conversations), holder = coalesce(?, holder)"
        " WHERE id = ?",
        (holder, id),
    )


def holder(connection: Connection, id: str) -> int | None:
    row = connection.execute("SELECT holder FROM conversations WHERE id = ?", (id,)).fetchone()
    return get(row, "holder", int) if row else None


def rename(connection: Connection, id: str, name: str) -> None:
    connection.execute("UPDATE conversations SET name = ? WHERE id = ?", (name, id))


def set_head(connection: Connection, id: str, head: int | None) -> None:
    connection.execute("UPDATE conversations SET head = ? WHERE id = ?", (head, id))


def set_model(connection: Connection, id: str, model: ModelRef) -> None:
    connection.execute("UPDATE conversations SET model = ?, model_name = ? WHERE id = ?", (*model_columns(model), id))


def set_system(connection: Connection, id: str, system: str | None) -> None:
    connection.execute("UPDATE conversations SET system = ? WHERE id = ?", (storable(system), id))


def set_settings(connection: Connection, id: str, settings: Mapping[str, Any]) -> None:
    connection.execute("UPDATE conversations SET settings = ? WHERE id = ?", (json.dumps(dict(settings)), id))


def delete_conversation(connection: Connection, id: str) -> None:
    connection.execute("UPDATE conversations SET head = NULL WHERE id = ?", (id,))
    connection.execute("DELETE FROM messages WHERE conversation = ?", (id,))
    connection.execute("DELETE FROM conversations WHERE id = ?", (id,))


# -- the tree of messages ----------------------------------------------------------------------------------------------


def path(connection: Connection, at: int | None) -> list[StoredMessage]:
    """From the first message down to `at`."""
    rows = connection.execute(
        "WITH RECURSIVE up(id, parent) AS ("
        " SELECT id, parent FROM messages WHERE id = ?"
        " UNION SELECT m.id, m.parent FROM messages m JOIN up ON m.id = up.parent)"
        " SELECT m.* FROM messages m JOIN up ON m.id = up.id ORDER BY m.id",
        (at,),
    )
    return [message_of(row) for row in rows]


def tree(connection: Connection, conversation: str) -> list[StoredMessage]:
    """Every kept message of all branches in the order of writing, so that parents come first."""
    rows = connection.execute("SELECT * FROM messages WHERE conversation = ? AND kept ORDER BY id", (conversation,))
    return [message_of(row) for row in rows]


def message(connection: Connection, conversation: str, id: int) -> StoredMessage | None:
    row = connection.execute(
        "SELECT * FROM messages WHERE id = ? AND conversation = ? AND kept", (id, conversation)
    ).fetchone()
    return message_of(row) if row else None


def insert_message(
    connection: Connection,
    conversation: str,
    parent: int | None,
    message: Message,
    *,
    created: float,
    kept: bool,
    model: str | None = None,
    finish_reason: Ending | None = None,
    stats: TurnStats | None = None,
) -> int:
    cursor = connection.execute(
        "INSERT INTO messages (conversation, parent, kept, created, role, content, thinking, ids, model, tool_calls,"
        " tool_call_id, name, finish_reason, stats) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            conversation,
            parent,
            kept,
            created,
            message.role,
            storable(message.content),
            storable(message.thinking),
            encode_ids(message.ids),
            model,
            calls_column(message),
            storable(message.tool_call_id),
            storable(message.name),
            finish_reason,
            stats_column(stats),
        ),
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def insert_copies(connection: Connection, conversation: str, messages: Iterable[StoredMessage]) -> dict[int, int]:
    """The same messages in another conversation, parents first. Returns new ids by old ones."""
    copies: dict[int, int] = {}
    for stored in messages:
        copies[stored.id] = insert_message(
            connection,
            conversation,
            None if stored.parent is None else copies[stored.parent],
            stored.message,
            created=stored.created,
            kept=True,
            model=stored.model,
            finish_reason=stored.finish_reason,
            stats=stored.stats,
        )
    return copies


# -- the turn that runs ------------------------------------------------------------------------------------------------


class Settled(Enum):
    """How a turn ends whose reply was not finished."""

    INTERRUPTED = "interrupted"
    FAILED = "failed"
    CRASHED = "crashed"
    """Found when the conversation is opened again."""


def with_running_turn(connection: Connection) -> list[str]:
    """Conversations with a turn that has not ended: it runs, or the program ended first."""
    rows = connection.execute("SELECT DISTINCT conversation FROM messages WHERE NOT kept")
    return [need(row, "conversation", str) for row in rows]


def left_open(connection: Connection, conversation: str) -> list[StoredMessage]:
    """What a crash left of the last turn, as `settle` keeps it: what was said, and the reply as far as it is known.

    Empty where something has been said since.
    """
    rows = connection.execute(
        "SELECT m.*, c.head AS head FROM messages m JOIN conversations c ON c.id = m.conversation"
        " WHERE m.conversation = ? AND m.kept ORDER BY m.id DESC LIMIT 1",
        (conversation,),
    ).fetchall()
    if not rows:
        return []
    last, head = message_of(rows[0]), get(rows[0], "head", int)
    cut = last.finish_reason == "interrupted" and last.id == head
    unanswered = last.message.role == "user" and last.parent == head
    if last.message.role == "tool" and last.id == head:
        return [last]
    if not cut and not unanswered:
        return []
    said = [] if unanswered or last.parent is None else path(connection, last.parent)
    first = next((n for n, stored in reversed(list(enumerate(said))) if stored.message.role == "user"), len(said))
    return [*said[first:], last]


def running(connection: Connection, conversation: str) -> list[StoredMessage]:
    """What belongs to a turn that has not ended: what was said to the model, then the draft of its reply."""
    rows = connection.execute("SELECT * FROM messages WHERE conversation = ? AND NOT kept ORDER BY id", (conversation,))
    return [message_of(row) for row in rows]


def save_draft(connection: Connection, id: int, content: str, ids: Sequence[int]) -> None:
    connection.execute(
        "UPDATE messages SET content = ?, ids = ? WHERE id = ? AND NOT kept",
        (storable(content), encode_ids(ids) if ids else None, id),
    )


def finish(
    connection: Connection,
    conversation: str,
    reply: int,
    message: Message,
    *,
    now: float,
    finish_reason: Ending,
    stats: TurnStats | None,
) -> None:
    """The draft becomes the reply, and the conversation stands at it."""
    connection.execute(
        "UPDATE messages SET content = ?, thinking = ?, ids = ?, tool_calls = ?, finish_reason = ?, stats = ?"
        " WHERE id = ?",
        (
            storable(message.content),
            storable(message.thinking),
            encode_ids(message.ids),
            calls_column(message),
            finish_reason,
            stats_column(stats),
            reply,
        ),
    )
    _keep_running(connection, conversation, head=reply, now=now)


def settle(connection: Connection, conversation: str, how: Settled, now: float) -> list[StoredMessage]:
    """End a turn whose reply was not finished, and return what is kept of it.

    What the model said is kept, as a branch beside the conversation if the engine failed. What tools answered is kept,
    because it happened. A question that got no answer is kept only after a crash, beside the conversation: two
    questions in a row are more than many chat templates take.
    """
    turn = running(connection, conversation)
    if not turn:
        return []
    *said, reply = turn
    answered = any(stored.message.role == "tool" for stored in said)
    if reply.message.content:
        reason = "failed" if how is Settled.FAILED else "interrupted"
        connection.execute("UPDATE messages SET finish_reason = ? WHERE id = ?", (reason, reply.id))
        kept = turn
    else:
        connection.execute("DELETE FROM messages WHERE id = ?", (reply.id,))
        kept = said if answered or how is Settled.CRASHED else []
    if not kept:
        connection.execute("DELETE FROM messages WHERE conversation = ? AND NOT kept", (conversation,))
        return []
    (head,) = connection.execute("SELECT head FROM conversations WHERE id = ?", (conversation,)).fetchone()
    if reply.message.content and how is not Settled.FAILED:
        head = reply.id
    elif answered:
        head = said[-1].id
    _keep_running(connection, conversation, head=head, now=now)
    return [found for stored in kept if (found := message(connection, conversation, stored.id))]


def _keep_running(connection: Connection, conversation: str, *, head: int | None, now: float) -> None:
    connection.execute("UPDATE messages SET kept = 1 WHERE conversation = ? AND NOT kept", (conversation,))
    connection.execute("UPDATE conversations SET head = ?, updated = ? WHERE id = ?", (head, now, conversation))
    touch(connection, conversation)
    _draw_name(connection, conversation)


def _draw_name(connection: Connection, conversation: str) -> None:
    """A conversation without a name gets one from the first thing a person said in it."""
    row = connection.execute(
        "SELECT m.content FROM conversations c JOIN messages m ON m.conversation = c.id"
        " WHERE c.id = ? AND c.name IS NULL ORDER BY m.role != 'user', m.id LIMIT 1",
        (conversation,),
    ).fetchone()
    if row:
        rename(connection, conversation, numbered(name_from(need(row, "content", str)), names(connection)))


# -- search ------------------------------------------------------------------------------------------------------------


def search(
    connection: Connection, terms: Sequence[str], *, conversation: str | None, limit: int
) -> list[tuple[str, StoredMessage]]:
    """Messages that have all terms, newest first, each with the id of its conversation."""
    assert terms
    # Fewer than three characters make no trigram.
    indexed = [term for term in terms if len(term) >= 3]
    conditions, values = ["m.kept"], []
    if indexed:
        conditions.append("m.id IN (SELECT rowid FROM words WHERE words MATCH ?)")
        values.append(" ".join('"' + term.replace('"', '""') + '"' for term in indexed))
    for term in terms:
        if len(term) < 3:
            conditions.append("contains(m.content, ?)")
            values.append(term)
    if conversation is not None:
        conditions.append("m.conversation = ?")
        values.append(conversation)
    where = " AND ".join(conditions)  # constants, all of them
    rows = connection.execute(
        "SELECT m.* FROM messages m JOIN conversations c ON c.id = m.conversation"  # noqa: S608
        f" WHERE {where} ORDER BY m.id DESC LIMIT ?",
        (*values, limit),
    )
    return [(need(row, "conversation", str), message_of(row)) for row in rows]
