"""The store: which conversations there are, and what is done with a whole one."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from engine.errors import UsageError
from engine.kv_folder import SUFFIX
from goinfer_chat.files import copy_private, reason_of
from goinfer_chat.store import folder as files
from goinfer_chat.store import queries
from goinfer_chat.store.database import MIGRATIONS, Database
from goinfer_chat.store.folder import Lock
from goinfer_chat.store.live import LiveConversation
from goinfer_chat.store.names import check_name, numbered
from goinfer_chat.store.queries import Settled
from goinfer_chat.store.records import (
    HEAD,
    Conversation,
    ConversationInUseError,
    Fork,
    ModelRef,
    NotWrittenError,
    SearchHit,
    StoredMessage,
)
from goinfer_chat.store.searching import snippet, terms_of
from goinfer_chat.store.typed import forget_typed

if TYPE_CHECKING:
    from engine.kv_layout import KVFormat

DRAFT_SECONDS: Final = 1.0
"""How much of a running reply a crash may cost."""
CHANGES_SUFFIX: Final = ".changes"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewConversation:
    """A whole conversation from elsewhere, already checked. Parents stand before their children."""

    name: str | None
    model: ModelRef | None
    system: str | None
    settings: Mapping[str, Any]
    messages: tuple[StoredMessage, ...]
    head: int | None


class Store:
    """The conversations kept in one folder. Any thread may use it, and any number of processes one folder.

    What a crash left of a turn is put in order before anybody looks (`queries.settle`).

    Every method raises StoreError when the files cannot be used, and those that take an id UsageError when no
    conversation has it. `clock` gives times to show; nothing is ordered by them.
    """

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = time.time,
        draft_seconds: float = DRAFT_SECONDS,
        migrations: Sequence[Sequence[str]] = MIGRATIONS,
    ) -> None:
        files.prepare(folder)
        self.folder = folder
        self._clock = clock
        self._draft_seconds = draft_seconds
        self._database = Database(folder / files.DATABASE, migrations=migrations)
        try:
            self._clear_leftovers()
        except BaseException:
            self._database.close()
            raise

    # -- looking -------------------------------------------------------------------------------------------------------

    def recent(self, limit: int | None = None) -> list[Conversation]:
        """Conversations with messages, the one used last first."""
        self._settle_crashed()
        with self._database.reading() as connection:
            return queries.recent(connection, limit)

    def find(self, key: str) -> Conversation:
        """By name, by id, or by the start of an id where only one starts so. Raises UsageError."""
        self._settle_crashed()
        with self._database.reading() as connection:
            ids = queries.ids(connection)
            with suppress(UsageError):
                if named := queries.named(connection, check_name(key)):
                    return self._get(named)
            starting = [id for id in ids if key and id.startswith(key)]
            if len(starting) == 1:
                return self._get(starting[0])
            near = get_close_matches(key, queries.names(connection), n=1)
        if starting:
            raise UsageError(f"{len(starting)} conversations have ids that start with {key!r}; give more of it")
        advice = f"did you mean {near[0]!r}?" if near else "`goinfer-chat sessions` lists them"
        raise UsageError(f"there is no conversation {key!r}; {advice}")

    def get(self, id: str) -> Conversation:
        with self._database.reading():
            return self._get(id)

    def path(self, id: str, at: int | None = HEAD) -> list[StoredMessage]:
        """The messages of one branch down to `at`, without taking the conversation from whoever goes on with it."""
        with self._database.reading() as connection:
            conversation = self._get(id)
            if at == HEAD:
                at = conversation.head
            elif at is not None and queries.message(connection, id, at) is None:
                raise UsageError(f"conversation {conversation.name!r} has no message {at}")
            return queries.path(connection, at)

    def tree(self, id: str) -> list[StoredMessage]:
        """The messages of all branches in the order of writing; parents come before their children."""
        with self._database.reading() as connection:
            self._get(id)
            return queries.tree(connection, id)

    def left_open(self, id: str) -> list[StoredMessage]:
        """What a crash left of the last turn, if nothing was said since: see `LiveConversation.recovered`."""
        with self._database.reading() as connection:
            self._get(id)
            return queries.left_open(connection, id)

    def search(self, text: str, *, id: str | None = None, limit: int = 20) -> list[SearchHit]:
        """Messages, of any branch, that have every word, or "phrase in quotes", of the text; newest first.

        Parts of words count, capitals do not. Raises UsageError for a text without a word.
        """
        terms = terms_of(text)
        if not terms:
            raise UsageError("there is nothing to search for")
        self._settle_crashed()
        with self._database.reading() as connection:
            found = queries.search(connection, terms, conversation=id, limit=limit)
            return [
                SearchHit(conversation=self._get(conversation), message=stored, snippet=shown, found=place)
                for conversation, stored in found
                for shown, place in [snippet(stored.message.content, terms)]
            ]

    # -- going on ------------------------------------------------------------------------------------------------------

    def create(
        self,
        *,
        name: str | None = None,
        system: str | None = None,
        settings: Mapping[str, Any] | None = None,
        model: ModelRef | None = None,
    ) -> LiveConversation:
        """A new conversation, which gets its name from its first message where none is given.

        Raises UsageError for a name that cannot be taken.
        """
        id, lock = self._draw()
        try:
            with self._database.writing() as connection:
                if name is not None:
                    name = self._free_name(name)
                now = self._clock()
                queries.insert_conversation(
                    connection, id, now, name=name, model=model, system=system, settings=settings or {}
                )
                queries.touch(connection, id, holder=os.getpid())
        except BaseException:
            lock.release()
            raise
        return self._live(id, lock)

    def open(self, id: str) -> LiveConversation:
        """Go on with a conversation, alone. What a crash left of a turn is put in order: see `recovered`.

        Raises ConversationInUseError while another process, or this one, goes on with it.
        """
        lock = self._held(id)
        try:
            with self._database.writing() as connection:
                self._get(id)  # deleted while its lock was waited for
                queries.settle(connection, id, Settled.CRASHED, self._clock())
                recovered = queries.left_open(connection, id)
                queries.touch(connection, id, holder=os.getpid())
        except BaseException:
            lock.release()
            raise
        return self._live(id, lock, recovered)

    def check_free(self, id: str) -> None:
        """Raises ConversationInUseError where `open` would."""
        self._held(id).release()

    # -- changing a whole one ------------------------------------------------------------------------------------------

    def rename(self, id: str, name: str) -> str:
        """Returns the name as it is kept. Raises UsageError for one that cannot be taken."""
        with self._database.writing() as connection:
            if self._get(id).name != check_name(name):
                queries.rename(connection, id, self._free_name(name))
            return check_name(name)

    def fork(self, id: str, *, name: str | None = None, at: int | None = HEAD) -> Fork:
        """Another conversation with the same words down to `at`, and the same cache.

        Raises UsageError when there is nothing to fork, or for a name that cannot be taken.
        """
        source, messages = self.get(id), self.path(id, at)
        if not messages:
            raise UsageError("nothing has been said yet, so there is nothing to fork")
        new = NewConversation(
            name=name if name is not None else source.name,
            model=source.model,
            system=source.system,
            settings=source.settings,
            messages=tuple(messages),
            head=messages[-1].id,
        )
        return self.add(new, kv_file=self.kv_path(id), number_name=name is None)

    def add(self, new: NewConversation, *, kv_file: Path | None = None, number_name: bool = True) -> Fork:
        """Keep a whole conversation under a new id, with the cache of `kv_file`, if there is such a file.

        `number_name`: a name that is taken gets a number; otherwise it raises UsageError.
        """
        id, lock = self._draw()
        try:
            with self._database.writing() as connection:
                name = check_name(new.name if new.name is not None else "conversation")
                name = numbered(name, queries.names(connection)) if number_name else self._free_name(name)
                queries.insert_conversation(
                    connection, id, self._clock(), name=name, model=new.model, system=new.system, settings=new.settings
                )
                copies = queries.insert_copies(connection, id, new.messages)
                queries.set_head(connection, id, None if new.head is None else copies[new.head])
            problem = self._adopt(kv_file, id) if kv_file is not None else None
        finally:
            lock.release()
        return Fork(conversation=self.get(id), kv_problem=problem)

    def delete(self, id: str) -> bool:
        """Delete a conversation that nobody goes on with: its words, where they were typed, and its cache.

        False when another program is reading: what it reads is overwritten when it ends. Raises
        ConversationInUseError.
        """
        lock = self._held(id)
        try:
            files.remove_files(self.folder, id)
            with files.explained(self.folder):
                said = {stored.message.content for stored in self.tree(id) if stored.message.role == "user"}
                forget_typed(self.folder, said, self.get(id).name)
            with self._database.writing() as connection:
                queries.delete_conversation(connection, id)
            return self._database.scrub()
        finally:
            lock.release()

    # -- caches --------------------------------------------------------------------------------------------------------

    def kv_path(self, id: str) -> Path:
        """Where the KV cache of a conversation is, or would be, kept."""
        return files.path_of(self.folder, id, SUFFIX)

    def changes_path(self, id: str) -> Path:
        """The folder of what files held before tools changed them in this conversation, where there is one."""
        return files.path_of(self.folder, id, CHANGES_SUFFIX)

    def kv_bytes(self, id: str) -> int:
        """Bytes of that file; 0 when there is none."""
        try:
            return self.kv_path(id).lstat().st_size
        except OSError:
            return 0

    def kv_format(self, id: str) -> KVFormat | None:
        """What its numbers are and what a position takes; None when there is no file that says so."""
        from engine.kv_layout import format_of

        return format_of(self.kv_path(id)) if self.kv_bytes(id) else None

    # ------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _get(self, id: str) -> Conversation:
        with self._database.joined() as connection:
            found = queries.conversation(connection, id)
        if found is None:
            raise UsageError(f"there is no conversation {id!r}; `goinfer-chat sessions` lists them")
        return found

    def _free_name(self, name: str) -> str:
        name = check_name(name)
        with self._database.joined() as connection:
            if queries.named(connection, name) is not None:
                raise UsageError(f"a conversation {name!r} already exists; choose another name")
        return name

    def _lock(self, id: str) -> Lock:
        return Lock(files.path_of(self.folder, id, files.LOCK_SUFFIX))

    def _draw(self) -> tuple[str, Lock]:
        """The id of a new conversation, and its lock, which is held."""
        id = secrets.token_hex(8)
        lock = self._lock(id)
        taken = lock.acquire()
        assert taken, "an id that was just drawn"
        return id, lock

    def _held(self, id: str) -> Lock:
        """The lock of a conversation that nobody else goes on with. Raises ConversationInUseError."""
        lock = self._lock(id)
        conversation = self.get(id)
        if not lock.acquire():
            pid = self._holder(id)
            raise ConversationInUseError(conversation.name or id, pid, ours=pid == os.getpid())
        return lock

    def _holder(self, id: str) -> int | None:
        """Who goes on with a conversation; None if it cannot be found out.

        It is written down once the lock is taken; until then the file names a process that has ended.
        """
        for _ in range(10):
            with self._database.reading() as connection:
                pid = queries.holder(connection, id)
            if pid is not None and _runs(pid):
                return pid
            time.sleep(0.02)
        return None

    def _live(self, id: str, lock: Lock, recovered: Sequence[StoredMessage] = ()) -> LiveConversation:
        return LiveConversation(
            self._database, id, lock, clock=self._clock, draft_seconds=self._draft_seconds, recovered=recovered
        )

    def _adopt(self, kv_file: Path, id: str) -> str | None:
        try:
            copy_private(kv_file, self.kv_path(id))
        except OSError as error:
            return f"the cache could not be copied ({reason_of(error)}); the next turn reads everything again"
        return None

    def _settle_crashed(self) -> None:
        """End the turns of processes that were killed, so that all who look see what was saved of them.

        Where nothing can be written these turns wait: who only looks sees all the others.
        """
        with self._database.reading() as connection:
            found = queries.with_running_turn(connection)
        with suppress(NotWrittenError):
            for id in found:
                lock = self._lock(id)
                if not lock.acquire():
                    continue  # it runs
                try:
                    with self._database.writing() as connection:
                        queries.settle(connection, id, Settled.CRASHED, self._clock())
                finally:
                    lock.release()

    def _clear_leftovers(self) -> None:
        """Remove what killed processes left: files of conversations that are gone, and conversations without a word."""
        with_files = files.ids_with_files(self.folder)
        with self._database.reading() as connection:
            empty = queries.empty_ids(connection)
            orphans = with_files - queries.ids(connection)
        with suppress(NotWrittenError):  # the next start that can write does it
            for id in (*orphans, *empty):
                lock = self._lock(id)
                if not lock.acquire():
                    continue
                try:
                    if id in orphans:
                        files.remove_files(self.folder, id)
                        continue
                    with self._database.writing() as connection:
                        if id in queries.empty_ids(connection):
                            queries.delete_conversation(connection, id)
                finally:
                    lock.release()


def _runs(pid: int) -> bool:
    """Whether there is such a process, whoever owns it; not asked where asking would send it Ctrl-C."""
    if os.name == "nt":
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
