"""What the store holds, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from engine.api import FinishReason, Message, TurnStats
from engine.errors import GoinferError

HEAD: Final = -1
"""In place of a message id: the message a conversation stands at. None is the place before its first message."""

Ending = FinishReason | Literal["interrupted", "failed"]
"""How a reply ended. `interrupted`: the program did before the reply. `failed`: the engine raised an error."""


class StoreError(GoinferError):
    """The kept conversations cannot be read or written; what was saved before stands."""


class NotWrittenError(StoreError):
    """There is no room, or no right to write; what is there can be read."""


class ConversationInUseError(StoreError):
    """Another process, or another part of this one, goes on with the conversation. `pid` is None if not known."""

    def __init__(self, name: str, pid: int | None, *, ours: bool) -> None:
        where = "already open in this program"
        if not ours:
            where = "open in another process" + (f" (pid {pid})" if pid is not None else "")
        super().__init__(
            f"conversation {name!r} is {where}; look at it with `sessions show`, or fork it and go on there"
        )
        self.pid = pid


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """Which model: `identity` is a hash of its content, whatever its path; `name` is for people."""

    identity: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation as lists show it."""

    id: str
    """16 hexadecimal digits, drawn; the names of its files begin with it."""
    name: str | None
    """None until its first turn is kept or it is given one."""
    created: float
    """Seconds since the epoch, as all times here."""
    updated: float
    """When its last turn was kept."""
    model: ModelRef | None
    """The model of its last turn."""
    system: str | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    head: int | None
    num_messages: int
    """From the first one to the one it stands at."""
    num_beside: int
    """On other branches, and left by an undo."""
    context_tokens: int | None
    """Positions in the cache after the last reply; None where that is not known."""

    @property
    def has_words(self) -> bool:
        """Whether anything was said in it, on any branch."""
        return self.num_messages + self.num_beside > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
    """A message and its place in the tree of its conversation. Ids ascend in the order of writing."""

    id: int
    parent: int | None
    message: Message
    """With its token ids, whichever model they are of."""
    created: float
    model: str | None = None
    """Identity of the model that said it, whose ids they are; None for messages of others."""
    finish_reason: Ending | None = None
    """None for all but replies."""
    stats: TurnStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHit:
    conversation: Conversation
    message: StoredMessage
    snippet: str
    """One line around the first place where a word was found."""
    found: tuple[int, int] | None
    """Start and end of that word in the snippet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    conversation: Conversation
    kv_problem: str | None
    """Why the cache could not be copied, so that the next turn reads everything again; None when it was, or when
    there is none."""


def for_model(messages: Sequence[StoredMessage], model: str | None) -> list[Message]:
    """The messages as a request takes them: ids are kept where they are of this model, and text everywhere.

    Another model's ids mean other words.
    """
    return [
        stored.message if stored.message.ids is None or stored.model == model else replace(stored.message, ids=None)
        for stored in messages
    ]
