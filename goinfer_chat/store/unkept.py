"""A conversation that no file holds: the same tree of messages, in memory, and gone with the program."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from goinfer_chat.store import queries
from goinfer_chat.store.conversations import DRAFT_SECONDS, NewConversation
from goinfer_chat.store.database import Database
from goinfer_chat.store.folder import Lock
from goinfer_chat.store.live import LiveConversation

_IN_MEMORY: Final = Path(":memory:")


class UnkeptConversation(LiveConversation):
    """The conversation of a script, or of a chat that keeps nothing. `as_new` is for keeping it after all."""

    def __init__(self, *, system: str | None = None, settings: Mapping[str, Any] | None = None) -> None:
        database, id = Database(_IN_MEMORY), secrets.token_hex(8)
        with database.writing() as connection:
            queries.insert_conversation(
                connection, id, time.time(), name=None, model=None, system=system, settings=settings or {}
            )
        # The lock is never acquired: nobody else can see this conversation.
        super().__init__(database, id, Lock(_IN_MEMORY), clock=time.time, draft_seconds=DRAFT_SECONDS)

    def as_new(self, name: str) -> NewConversation:
        info = self.info
        return NewConversation(
            name=name,
            model=info.model,
            system=info.system,
            settings=info.settings,
            messages=tuple(self.tree()),
            head=info.head,
        )

    def close(self) -> None:
        """May be called again."""
        if self._draft is not None:
            self._draft.close()
        self._database.close()
