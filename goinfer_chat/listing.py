"""How lists of conversations and messages look, at the prompt and from `goinfer-chat sessions`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from textwrap import wrap
from typing import TYPE_CHECKING, Final

from goinfer_chat.amounts import size
from goinfer_chat.view.cells import width

if TYPE_CHECKING:
    from goinfer_chat.store import Conversation, SearchHit, Store

HEADINGS: Final = ("name", "last used", "messages", "tokens", "cache", "a token", "model", "id")
SHORT: Final = 6
"""How many of them a list at the prompt has."""
_MAX_NAME_COLUMNS: Final = 34
TRACES_LEFT: Final = "its last traces on the disk go when the other goinfer-chat that is reading them ends"
"""Said of a deleted conversation where Store.delete returns False."""


def name_of(conversation: Conversation) -> str:
    return conversation.name or conversation.id


def when(seconds: float) -> str:
    """A time since the epoch, as it was on the clock here."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def columns(rows: Sequence[Sequence[str]], room: int | None = None) -> list[str]:
    """A line for each row, its cells below each other.

    `room`: what a line may take on the screen. The last columns are left out where they do not fit, but for the first
    two.
    """
    widths = [max(map(width, column)) for column in zip(*rows)]
    while room is not None and len(widths) > 2 and sum(widths) + 2 * (len(widths) - 1) > room:
        widths.pop()
    return ["  ".join(cell + " " * (most - width(cell)) for cell, most in zip(row, widths)).rstrip() for row in rows]


def definitions(rows: Sequence[tuple[str, str]], columns: int) -> list[str]:
    """Lines of names with their meanings beside them, or below where that leaves no room; words stay whole."""
    width = max((len(name) for name, meaning in rows if meaning and len(name) <= _MAX_NAME_COLUMNS), default=0)
    beside = columns - width - 4 >= 20
    lines = []
    for name, meaning in rows:
        if not meaning:
            lines.append(name)
        elif beside and len(name) <= width:
            first, *others = wrap(meaning, columns - width - 4, break_long_words=False, break_on_hyphens=False) or [""]
            lines.append(f"  {name:<{width}}  {first}")
            lines += [" " * (width + 4) + line for line in others]
        else:
            lines += [f"  {name}"] if name else []
            lines += [
                f"    {line}"
                for line in wrap(meaning, max(columns - 4, 10), break_long_words=False, break_on_hyphens=False)
            ]
    return lines


def cells_of(store: Store, conversation: Conversation) -> tuple[str, ...]:
    """Cells below `HEADINGS`."""
    kv_bytes, kv_format = store.kv_bytes(conversation.id), store.kv_format(conversation.id)

    return (
        name_of(conversation),
        when(conversation.updated),
        f"{conversation.num_messages:,}"
        + (f" (+{conversation.num_beside:,} beside)" if conversation.num_beside else ""),
        "" if conversation.context_tokens is None else f"{conversation.context_tokens:,}",
        size(kv_bytes) if kv_bytes else "",
        f"{kv_format.position_bytes:,} bytes ({kv_format.kv_type})" if kv_format else "",
        conversation.model.name if conversation.model else "",
        conversation.id,
    )


def hit_rows(hit: SearchHit) -> list[tuple[str, str]]:
    """Where and when something was found, and the words around it, for `definitions`."""
    stored = hit.message
    where = f"{name_of(hit.conversation)} | {stored.message.role} | {when(stored.created)}"
    return [(where, ""), ("", hit.snippet.strip())]


def excerpt(text: str, num_lines: int = 6, num_columns: int = 300) -> str:
    """The first lines of a text, and a sign where there is more."""
    lines = text.strip("\n").split("\n")
    shown = [line if len(line) <= num_columns else line[:num_columns] + "…" for line in lines[:num_lines]]
    return "\n".join([*shown, "…"] if len(lines) > num_lines else shown)
