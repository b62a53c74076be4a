"""The present conversation, and the store of those that are kept."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from engine.errors import UsageError
from goinfer_chat.settings import Settings
from goinfer_chat.store import (
    Conversation,
    Fork,
    LiveConversation,
    Store,
    StoreError,
    UnkeptConversation,
    session_folder,
)

DATE: Final = "date"
"""In the settings of a conversation: the day it began. A prompt that told the day would change with it otherwise, and
everything would be read again."""


def of_today() -> dict[str, Any]:
    """The settings to keep with a new conversation."""
    return {DATE: datetime.now().astimezone().date().isoformat()}


class Conversations:
    """The present conversation, `live`: None until a new one has its first message.

    keep      whether new conversations are kept
    problem   why they are not, though they should be

    The store is opened when it is needed, so what keeps nothing needs no disk. Everything that opens it raises
    StoreError; a call that fails leaves `live` as it was.
    """

    def __init__(self, folder: Path, *, keep: bool) -> None:
        self.keep = keep
        self.live: LiveConversation | None = None
        self.problem: StoreError | None = None
        self._folder = folder
        self._store: Store | None = None

    @classmethod
    def start(cls, settings: Settings, *, at_prompt: bool) -> Self:
        """As the flags say. A chat at a prompt is kept; a script and a question are where a flag says which.

        Without such a flag a store that cannot be used keeps nobody from talking: see `problem`. Raises UsageError
        for a name that is not there, or is there already.
        """
        asked_for = settings.continue_last or settings.resume is not None or settings.save is not None
        conversations = cls(
            session_folder(settings.session_dir), keep=not settings.ephemeral and (at_prompt or asked_for)
        )
        try:
            if settings.continue_last:
                conversations.resume_latest()
            elif settings.resume is not None:
                conversations.resume(settings.resume)
            elif settings.save is not None:
                conversations.begin(name=settings.save)
            elif conversations.keep:
                conversations._open_or_do_without()
        except BaseException:
            conversations.close()
            raise
        return conversations

    @property
    def store(self) -> Store:
        if self._store is None:
            self._store = Store(self._folder)
        return self._store

    @property
    def is_kept(self) -> bool:
        """Whether the next message is kept."""
        return self.keep if self.live is None else not isinstance(self.live, UnkeptConversation)

    @property
    def kv_folder(self) -> Path | None:
        """Where the engine keeps the caches of what is kept; None where nothing is."""
        return self._folder if self.keep else None

    def recent(self, limit: int | None = None) -> list[Conversation]:
        """Kept ones, the one used last first."""
        return self.store.recent(limit)

    def begin(self, *, name: str | None = None, system: str | None = None) -> LiveConversation:
        """Begin a new conversation if there is none; one with a name is kept. Raises UsageError for a wrong name."""
        assert self.live is None
        settings = of_today()
        if self.keep or name is not None:
            self.live = self.store.create(name=name, system=system, settings=settings)
        else:
            self.live = UnkeptConversation(system=system, settings=settings)
        return self.live

    def resume(self, key: str) -> LiveConversation:
        """Continue a kept one. Raises UsageError, or ConversationInUseError."""
        conversation = self.store.find(key)
        if self.live is not None and self.live.id == conversation.id:
            raise UsageError(f"{conversation.name!r} is the conversation you are in already")
        live = self.store.open(conversation.id)
        self.leave()
        self.live = live
        return live

    def resume_latest(self) -> LiveConversation:
        """Continue the one used last, other than the present one. Raises UsageError when there is none."""
        return self.resume(self.latest().id)

    def latest(self) -> Conversation:
        """The one used last, other than the present one. Raises UsageError when there is none."""
        present = self.live.id if self.live is not None else None
        latest = next((conversation for conversation in self.recent(2) if conversation.id != present), None)
        if latest is None:
            raise UsageError("there is no other conversation to continue" if present else "no conversations are kept")
        return latest

    def leave(self) -> None:
        """Leave the present conversation; the next message begins a new one."""
        if self.live is not None:
            live, self.live = self.live, None
            live.close()

    def rename(self, name: str) -> str:
        """Returns the name as it is kept. What was not kept is from here on. Raises UsageError for a wrong name."""
        if self.live is None:
            self.begin(name=name)
        elif isinstance(self.live, UnkeptConversation):
            added = self.store.add(self.live.as_new(name), number_name=False)
            self.resume(added.conversation.id)
        else:
            return self.store.rename(self.live.id, name)
        assert self.live is not None
        return self.live.info.name or name

    def fork(self, name: str | None) -> Fork:
        """Continue in a copy with the same words. Raises UsageError."""
        if not self.is_kept:
            raise UsageError("this conversation is not kept; /rename NAME keeps it, then it can be forked")
        if self.live is None:
            raise UsageError("nothing has been said yet, so there is nothing to fork")
        fork = self.store.fork(self.live.id, name=name)
        self.resume(fork.conversation.id)
        return fork

    def close(self) -> None:
        """May be called again."""
        try:
            self.leave()
        finally:
            if self._store is not None:
                self._store.close()
                self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open_or_do_without(self) -> None:
        try:
            _ = self.store
        except StoreError as error:
            self.problem = error
            self.keep = False
