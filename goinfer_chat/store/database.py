"""The SQLite file: its schema, how an older one becomes this one, transactions, and what its errors mean.

Durable and private: WAL with a sync at every commit, deleted content overwritten, temporary data in memory only.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from engine.errors import UsageError
from goinfer_chat.store.file_system import HOW_TO_GO_ON, copies_on_write, is_full, why_not_written
from goinfer_chat.store.records import NotWrittenError, StoreError

APPLICATION_ID: Final = int.from_bytes(b"giwc", "big")
"""In the header of the file, so that another program's database is never taken for ours."""
BUSY_SECONDS: Final = 10.0
_REMEDY: Final = "restore a copy of it, or move it out of the way with `goinfer-chat sessions set-aside`"

_SCHEMA_1: Final = (
    """
    CREATE TABLE conversations (
        id TEXT PRIMARY KEY NOT NULL,
        name TEXT UNIQUE,
        created REAL NOT NULL,
        updated REAL NOT NULL,
        used INTEGER NOT NULL,      -- ascends with every use, whatever the clock does
        holder INTEGER,             -- process id of whoever opened it last
        model TEXT,
        model_name TEXT,
        system TEXT,
        settings TEXT NOT NULL,     -- JSON object
        head INTEGER REFERENCES messages(id)
    )
    """,
    """
    CREATE TABLE messages (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        conversation TEXT NOT NULL REFERENCES conversations(id),
        parent INTEGER REFERENCES messages(id),
        kept INTEGER NOT NULL,      -- 0 while the turn it belongs to runs
        created REAL NOT NULL,
        role TEXT NOT NULL,
        content TEXT NOT NULL,
        thinking TEXT,
        ids BLOB,                   -- u32, little-endian
        model TEXT,
        tool_calls TEXT,            -- JSON array
        tool_call_id TEXT,
        name TEXT,
        finish_reason TEXT,
        stats TEXT                  -- JSON object
    )
    """,
    "CREATE INDEX conversations_by_head ON conversations(head)",
    "CREATE INDEX messages_by_conversation ON messages(conversation)",
    "CREATE INDEX messages_by_parent ON messages(parent)",
    "CREATE VIEW kept_messages AS SELECT id, content FROM messages WHERE kept",
    # Trigrams find parts of words, code and languages that have no spaces.
    "CREATE VIRTUAL TABLE words USING fts5(content, content='kept_messages', content_rowid='id', tokenize='trigram')",
    """
    CREATE TRIGGER words_of_inserted AFTER INSERT ON messages WHEN new.kept BEGIN
        INSERT INTO words(rowid, content) VALUES (new.id, new.content);
    END
    """,
    """
    CREATE TRIGGER words_of_kept AFTER UPDATE OF kept ON messages WHEN new.kept AND NOT old.kept BEGIN
        INSERT INTO words(rowid, content) VALUES (new.id, new.content);
    END
    """,
    """
    CREATE TRIGGER words_of_deleted AFTER DELETE ON messages WHEN old.kept BEGIN
        INSERT INTO words(words, rowid, content) VALUES ('delete', old.id, old.content);
    END
    """,
)

_SCHEMA_2: Final = (
    # Every look at the store asks which turns have not ended.
    "CREATE INDEX running_messages ON messages(conversation) WHERE NOT kept",
)

MIGRATIONS: Final[Sequence[Sequence[str]]] = (_SCHEMA_1, _SCHEMA_2)
"""Statements that lead from schema i to schema i + 1. What was released is never edited, only added to."""


class Database:
    """One connection, which any thread may use; threads take turns.

    Raises StoreError, here and in every transaction, with what to do about it.
    """

    def __init__(self, path: Path, *, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._file: tuple[int, int] | None = None
        with self._explained():
            self._connection = sqlite3.connect(
                path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                self._connection.row_factory = _Row
                self._configure()
                self._migrate(migrations)
                self._file = _which_file(path)
            except BaseException:
                self._connection.close()
                raise

    def _configure(self) -> None:
        pragmas = ("foreign_keys = ON", "synchronous = FULL", "secure_delete = ON", "temp_store = MEMORY")
        for pragma in pragmas:
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.create_function("contains", 2, _contains, deterministic=True)

    def _migrate(self, migrations: Sequence[Sequence[str]]) -> None:
        self._version(migrations)  # refuses before anything in the file is changed
        self._use_wal()
        if self._version(migrations) == len(migrations):
            return
        with self.writing() as connection:
            # Another process may have done it meanwhile.
            for statements in migrations[self._version(migrations) :]:
                for statement in statements:
                    connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {len(migrations)}")

    def _version(self, migrations: Sequence[Sequence[str]]) -> int:
        """The schema of the file, 0 for one that is empty. Raises StoreError for one that is not ours to read."""
        (application,) = self._connection.execute("PRAGMA application_id").fetchone()
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        (num_objects,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if (application, version, num_objects) == (0, 0, 0):
            return 0
        if application != APPLICATION_ID:
            raise StoreError(
                f"{self.path} is a database of another program; move it elsewhere, or choose "
                "another folder with --session-dir"
            )
        assert isinstance(version, int)
        if not 1 <= version <= len(migrations):
            raise StoreError(
                f"{self.path} was written by a newer goinfer-chat (schema {version}, and this one knows "
                f"{len(migrations)}); update goinfer-chat, or choose another folder with --session-dir"
            )
        return version

    def _use_wal(self) -> None:
        """A file system that cannot do WAL, or not where it is full, has a rollback journal, which is as safe."""
        if copies_on_write(self.path.parent):
            with suppress(sqlite3.OperationalError):  # another process uses the log, or the disk is full already
                self._connection.execute("PRAGMA journal_mode = DELETE")
            return
        give_up = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                # SQLite does not wait here by itself while another process does the same.
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                    raise
                time.sleep(0.02)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that others see whole, on the disk when it is over, or not at all.

        SQLite would go on writing to a file that was removed, and all of it would be lost.
        """
        if self._file is not None and _which_file(self.path) != self._file:
            raise StoreError(f"{self.path} was removed or replaced while it was in use; start again")
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A transaction that sees one state of the file."""
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def joined(self) -> Iterator[sqlite3.Connection]:
        """The transaction this thread is in."""
        with self._lock:
            assert self._connection.in_transaction
            yield self._connection

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._lock, self._explained():
            self._connection.execute(begin)
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def scrub(self) -> bool:
        """Overwrite every trace of what was deleted, also in the index and the log.

        False when another program is reading: then the log goes when the last one that uses the file closes it.
        """
        with self._lock, self._explained():
            # Deleted words stay in the index until its parts are merged.
            self._connection.execute("INSERT INTO words(words) VALUES ('optimize')")
            busy, _, _ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            return not busy

    def close(self) -> None:
        with self._lock, self._explained():
            self._connection.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """SQLite's errors as StoreError; those that only a bug can cause stay what they are."""
        try:
            yield
        except (sqlite3.ProgrammingError, sqlite3.InterfaceError):
            raise
        except OverflowError:
            raise UsageError("a number has too many digits") from None
        except UnicodeDecodeError as error:  # SQLite reports damage in the words that it found
            raise damaged("text that is not UTF-8") from error
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith(_UNWRITTEN):
                said = _unwritten(error, name, why_not_written(self.path.parent))
                raise NotWrittenError(f"{self.path}: {said}") from error
            raise StoreError(f"{self.path}: {_explanation(error, name)}") from error


def _which_file(path: Path) -> tuple[int, int] | None:
    """None where there is none, as of a database in memory."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino


class _Row(sqlite3.Row):
    """A row whose columns are there, unless the schema in the file is damaged."""

    def __getitem__(self, key: Any) -> Any:
        try:
            return super().__getitem__(key)
        except IndexError:
            raise damaged(f"no {key}") from None


def damaged(what: str) -> StoreError:
    return StoreError(f"the store of conversations is damaged: {what}; {_REMEDY}")


def _contains(text: str, part: str) -> bool:
    return part.casefold() in text.casefold()


_UNWRITTEN = ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")


def _explanation(error: sqlite3.Error, name: str) -> str:
    if name in ("SQLITE_BUSY", "SQLITE_LOCKED") or name.startswith("SQLITE_BUSY_"):
        return f"another program has been writing for more than {BUSY_SECONDS:.0f} seconds; try again"
    if "no such module" in str(error) or "no such tokenizer" in str(error):
        return f"the SQLite of this Python ({sqlite3.sqlite_version}) lacks full-text search by trigrams; 3.34 has it"
    return f"the file is damaged or not a database ({error}); {_REMEDY}"


def _unwritten(error: sqlite3.Error, name: str, reason: OSError | None) -> str:
    """SQLite says "unable to open database file" of a full disk as of a forbidden one; the system knows which it is."""
    if reason is not None and is_full(reason):
        return f"{reason.strerror}; {HOW_TO_GO_ON}"
    if name == "SQLITE_FULL":
        # No command of ours can make room here: SQLite does not even open its log on a full disk.
        return f"the disk is full; {HOW_TO_GO_ON}"
    if name.startswith("SQLITE_IOERR"):
        return f"reading or writing failed (a full disk, a quota or a failing one); {HOW_TO_GO_ON}"
    said = error if reason is None else reason.strerror
    return f"it cannot be written ({said}); make it writable, or choose another folder with --session-dir"
