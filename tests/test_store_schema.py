"""A store of any schema that was released opens with all it held."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from store_helpers import OTHER, STATS, run_code, words

from engine.api import Message
from goinfer_chat.store import (
    Store,
    StoreError,
)
from goinfer_chat.store.database import APPLICATION_ID, MIGRATIONS


@pytest.fixture
def schema_1(folder: Path) -> Path:
    """A folder with a store as the first schema left it."""
    folder.mkdir(mode=0o700)
    packed = (Path(__file__).parent / "data" / "conversations-1.db.gz").read_bytes()
    (folder / "conversations.db").write_bytes(gzip.decompress(packed))
    return folder


def check_schema_1(store: Store) -> None:
    """What that file held."""
    work, other = store.find("work"), store.find("Hello 🙂")
    assert [conversation.id for conversation in store.recent()] == [work.id, other.id]
    assert words(store.path(work.id)) == ["look", "", "a\x1b[31m 漢字", "done", "again", "half"]
    assert words(store.tree(work.id))[-3:] == ["done differently", "again", "half"]
    assert store.tree(work.id)[1].message == Message(
        role="assistant",
        content="",
        thinking="hm",
        ids=(0, 1, 2**31 - 1),
        tool_calls=({"name": "grep", "arguments": {"b": 1, "a": 2}},),
    )
    assert store.tree(work.id)[1].stats == STATS
    assert (work.system, work.settings, work.model) == ("Be brief.", {"temperature": 0.5}, OTHER)
    assert [hit.message.message.content for hit in store.search("differ")] == ["done differently"]


def test_a_store_of_the_first_schema_opens_with_all_it_held(schema_1: Path) -> None:
    with Store(schema_1) as store:
        store.open(store.find("work").id).close()  # a draft that was running when it was copied
        check_schema_1(store)
        assert store.delete(store.find("work").id)


NEXT = ("ALTER TABLE messages ADD COLUMN stars INTEGER", "UPDATE messages SET stars = 5 WHERE role = 'assistant'")


def test_schemas_are_migrated_in_order_once_and_with_what_they_hold(schema_1: Path) -> None:
    ahead = (*MIGRATIONS, NEXT, ("ALTER TABLE messages RENAME COLUMN stars TO rating",))
    for _ in range(2):
        with Store(schema_1, migrations=ahead) as store:
            store.open(store.find("work").id).close()
            check_schema_1(store)
            with store._database.reading() as connection:
                assert connection.execute("PRAGMA user_version").fetchone()[0] == len(ahead)
                assert connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID
                ratings = connection.execute("SELECT DISTINCT role, rating FROM messages ORDER BY role").fetchall()
                assert [tuple(row) for row in ratings] == [("assistant", 5), ("tool", None), ("user", None)]
    with pytest.raises(StoreError, match="newer goinfer-chat"):
        Store(schema_1)


def test_a_migration_that_fails_half_way_changes_nothing(schema_1: Path) -> None:
    with pytest.raises(StoreError):
        Store(schema_1, migrations=(*MIGRATIONS, (*NEXT, "SELECT nonsense FROM nowhere")))
    with Store(schema_1) as store:
        store.open(store.find("work").id).close()
        check_schema_1(store)
        with store._database.reading() as connection:
            assert "stars" not in [row["name"] for row in connection.execute("PRAGMA table_info(messages)")]


def test_processes_that_start_at_once_make_one_database(folder: Path) -> None:
    processes = [run_code("kept(Store(folder), ('q', 'a'))", folder) for _ in range(4)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    with Store(folder) as store:
        assert [conversation.name for conversation in store.recent()].count("q") == 1
        assert len(store.recent()) == 4
