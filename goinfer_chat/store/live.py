"""A conversation that this process goes on with, and the reply that is being written in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from engine.api import Message, TurnStats
from engine.errors import UsageError
from goinfer_chat.store import queries
from goinfer_chat.store.database import Database
from goinfer_chat.store.folder import Lock
from goinfer_chat.store.queries import Settled
from goinfer_chat.store.records import HEAD, Conversation, Ending, ModelRef, StoredMessage, StoreError, for_model


class LiveConversation:
    """Held by one process at a time; see Store.open and Store.create. Any thread may use it.

    recovered   what a crash left of its last turn, if nothing was said since: a reply that was cut (its last
                message is an assistant's), or a question that got none. Empty otherwise.
    """

    def __init__(
        self,
        database: Database,
        id: str,
        lock: Lock,
        *,
        clock: Callable[[], float],
        draft_seconds: float,
        recovered: Sequence[StoredMessage] = (),
    ) -> None:
        self.id = id
        self.recovered = tuple(recovered)
        self._database = database
        self._lock = lock
        self._clock = clock
        self._draft_seconds = draft_seconds
        self._draft: ReplyDraft | None = None

    @property
    def info(self) -> Conversation:
        """Its name, size and times, as lists show them. Raises StoreError."""
        with self._database.reading() as connection:
            found = queries.conversation(connection, self.id)
        if found is None:
            raise StoreError(f"conversation {self.id} is not in {self._database.path} any more")
        return found

    def path(self, at: int | None = HEAD) -> list[StoredMessage]:
        """The messages down to `at`, the first one first."""
        with self._database.reading() as connection:
            if at == HEAD:
                at = self._head(connection)
            return queries.path(connection, at)

    def tree(self) -> list[StoredMessage]:
        """The messages of all branches in the order of writing; parents come before their children."""
        with self._database.reading() as connection:
            return queries.tree(connection, self.id)

    def messages(self, model: str | None, at: int | None = HEAD) -> list[Message]:
        """The same for a request to the model of this identity, with the ids that are its own."""
        return for_model(self.path(at), model)

    def last_question(self) -> StoredMessage:
        """What /retry asks again and /edit replaces: the user's last message. Raises UsageError when there is none."""
        return self._questions()[-1]

    def reply_to(self, messages: Sequence[Message], *, after: int | None = HEAD, model: ModelRef) -> ReplyDraft:
        """Begin a turn: the user's message is saved at once, and the model's answer becomes the next message.

        `after` is the message it follows: the last one; another one begins a branch, and None a new first message.
        To try again, say nothing after `last_question().id`. Nothing is overwritten, and the conversation stands
        where it stood until the reply is finished.
        """
        assert self._draft is None, "one reply at a time"
        now = self._clock()
        with self._database.writing() as connection:
            queries.settle(connection, self.id, Settled.CRASHED, now)  # what could not be ended on a full disk
            parent = self._head(connection) if after == HEAD else after
            assert parent is None or queries.message(connection, self.id, parent) is not None, "of another conversation"
            for message in messages:
                parent = queries.insert_message(connection, self.id, parent, message, created=now, kept=False)
            queries.set_model(connection, self.id, model)
            reply = queries.insert_message(
                connection,
                self.id,
                parent,
                Message(role="assistant", content=""),
                created=now,
                kept=False,
                model=model.identity,
            )
        self._draft = ReplyDraft(self, reply)
        return self._draft

    def undo(self, turns: int = 1) -> list[StoredMessage]:
        """Go back to before the user's last message, or the one `turns` back. Returns what is left behind.

        Raises UsageError when there are not so many turns.
        """
        if turns < 1:
            raise UsageError(f"the number of turns to undo must be 1 or more, not {turns}")
        questions = self._questions()
        if turns > len(questions):
            raise UsageError(f"the conversation has {len(questions)} turns, so {turns} cannot be undone")
        first = questions[-turns]
        left = [stored for stored in self.path() if stored.id >= first.id]
        self._stand_at(first.parent)
        return left

    def set_system(self, system: str | None) -> None:
        with self._database.writing() as connection:
            queries.set_system(connection, self.id, system)

    def set_settings(self, settings: Mapping[str, Any]) -> None:
        """Any JSON object: what the conversation is to find again when it is resumed."""
        with self._database.writing() as connection:
            queries.set_settings(connection, self.id, settings)

    def close(self) -> None:
        """Let others go on with it. One that nothing was said in leaves nothing behind. May be called again."""
        try:
            if self._draft is not None:
                self._draft.close()
            with self._database.writing() as connection:
                if self.id in queries.empty_ids(connection):
                    queries.delete_conversation(connection, self.id)
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _questions(self) -> list[StoredMessage]:
        questions = [stored for stored in self.path() if stored.message.role == "user"]
        if not questions:
            raise UsageError("nothing has been said yet")
        return questions

    def _head(self, connection: Any) -> int | None:
        found = queries.conversation(connection, self.id)
        return found.head if found else None

    def _stand_at(self, id: int | None) -> None:
        with self._database.writing() as connection:
            queries.set_head(connection, self.id, id)
            queries.touch(connection, self.id)


class ReplyDraft:
    """The running reply. While it grows, a thread saves it every `draft_seconds`: the engine never waits for a disk.

    As a context manager it ends the turn, however the block is left. After `finish` nothing is left to do. Where the
    engine raised an error, the conversation stays where it was, and what was said is kept on a branch beside it.
    Otherwise what was said is kept as an interrupted reply, and a turn without a word of reply leaves nothing behind.

    error   why the last attempt to save failed; None if it succeeded
    """

    def __init__(self, conversation: LiveConversation, id: int) -> None:
        self.id = id
        self.error: StoreError | None = None
        self._conversation = conversation
        self._guard = threading.Lock()
        self._pieces: list[str] = []
        self._ids: list[int] = []
        self._unsaved = False
        self._over = threading.Event()
        self._saver: threading.Thread | None = None

    def add(self, text: str, ids: Sequence[int] = ()) -> None:
        """More of the reply, with its token ids where they are known."""
        with self._guard:
            self._pieces.append(text)
            self._ids.extend(ids)
            self._unsaved = True
        if self._saver is None:
            self._saver = threading.Thread(target=self._save_in_time, name="draft", daemon=True)
            self._saver.start()

    def finish(
        self, message: Message, *, finish_reason: Ending = "stop", stats: TurnStats | None = None
    ) -> StoredMessage:
        """The reply as it is: saved when this returns, and the conversation stands at it. Raises StoreError."""
        assert message.role == "assistant"
        self._stop_saving()
        live = self._conversation
        with live._database.writing() as connection:
            queries.finish(
                connection, live.id, self.id, message, now=live._clock(), finish_reason=finish_reason, stats=stats
            )
            stored = queries.message(connection, live.id, self.id)
        assert stored is not None
        live._draft = None
        return stored

    def close(self, how: Settled = Settled.INTERRUPTED) -> None:
        """End the turn without a finished reply. May be called again, and after `finish`. Raises StoreError."""
        live = self._conversation
        if live._draft is not self:
            return
        live._draft = None
        self._stop_saving()
        with live._database.writing() as connection:
            queries.save_draft(connection, self.id, "".join(self._pieces), self._ids)
            queries.settle(connection, live.id, how, live._clock())

    def save(self) -> None:
        """Save what there is. Raises StoreError."""
        with self._guard:
            if not self._unsaved:
                return
            # One piece from here on, or joining the pieces would take longer with each second.
            self._pieces = ["".join(self._pieces)]
            text, ids = self._pieces[0], tuple(self._ids)
            self._unsaved = False
        try:
            with self._conversation._database.writing() as connection:
                queries.save_draft(connection, self.id, text, ids)
        except StoreError:
            self._unsaved = True
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(StoreError):  # the error that is on its way says more
            self.close(Settled.FAILED if isinstance(error, Exception) else Settled.INTERRUPTED)

    def _save_in_time(self) -> None:
        while not self._over.wait(self._conversation._draft_seconds):
            try:
                self.save()
                self.error = None
            except StoreError as error:
                self.error = error

    def _stop_saving(self) -> None:
        self._over.set()
        if self._saver is not None:
            self._saver.join()
