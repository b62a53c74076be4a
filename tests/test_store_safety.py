"""Kept conversations are not lost, not readable by others, and gone when they are deleted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from store_helpers import MODEL, NEW, assistant, everything, kept, run_code, say, user, words

from engine.errors import UsageError
from goinfer_chat.store import (
    ConversationInUseError,
    Store,
    StoreError,
    session_folder,
    set_aside,
)
from goinfer_chat.store.database import MIGRATIONS

# -- crashes and other processes ---------------------------------------------------------------------------------------


def test_kill_9_at_any_moment_loses_nothing_that_was_said_to_be_saved(folder: Path) -> None:
    code = """
    store = Store(folder, draft_seconds=0.01)
    live = store.open(store.find("work").id)
    for number in range(len(live.path()) // 2, 10**6):
        with live.reply_to([user(f"question {number}")], model=MODEL) as draft:
            for word in range(20):
                draft.add(f"answer {number} ")
                time.sleep(0.0005)
            draft.finish(assistant(f"answer {number} " * 20), stats=STATS)
        print(number, flush=True)
    """
    with Store(folder) as store:
        kept(store, ("question 0", "answer 0 " * 20), name="work")
    said = 1
    for round in range(8):
        process = run_code(code, folder)
        assert process.stdout is not None
        for _ in range(2):
            said = int(process.stdout.readline()) + 1
        time.sleep(0.013 * round)
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0].split("\n")[:-1]
        said = int(rest[-1]) + 1 if rest else said
        with Store(folder) as store, store.open(store.find("work").id) as live:
            path = live.path()
            for number in range(said):
                assert path[2 * number].message.content == f"question {number}"
                assert path[2 * number + 1].message.content.startswith(f"answer {number} ")
            assert all(stored.finish_reason in (None, "stop", "interrupted") for stored in path)
            for cut in live.recovered:
                if cut.message.role == "assistant":
                    assert cut.finish_reason == "interrupted"
                    assert (f"answer {len(path) // 2 - 1} " * 20).startswith(cut.message.content)
            with store._database.reading() as connection:
                assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
            said = len(path) // 2
    assert said > 16


def test_a_crash_costs_at_most_what_was_said_since_the_last_save(folder: Path) -> None:
    code = """
    store = Store(folder, draft_seconds=0.2)
    live = store.create(name="work")
    with live.reply_to([user("count")], model=MODEL) as draft:
        for number in range(10**6):
            draft.add(f"{number} ")
            print(number, time.time(), flush=True)
            time.sleep(0.005)
    """
    process = run_code(code, folder)
    assert process.stdout is not None
    said = [process.stdout.readline().split() for _ in range(150)]
    process.kill()
    said += [line.split() for line in process.communicate()[0].splitlines() if line.count(" ") == 1]
    end = float(said[-1][1])
    with Store(folder) as store, store.open(store.find("work").id) as live:
        (_, reply) = live.path()
        assert live.recovered == tuple(live.path())
    numbers = reply.message.content.split()
    assert numbers == [number for number, _ in said][: len(numbers)]
    lost = [when for _, when in said[len(numbers) :]]
    assert not lost or end - float(lost[0]) < 0.2 + 0.15  # the time it takes to save


def test_a_question_that_a_crash_left_unanswered_is_not_lost(folder: Path) -> None:
    code = """
    store = Store(folder)
    live = store.open(store.find("work").id)
    live.reply_to([user("long question")], model=MODEL)
    print("asked", flush=True)
    time.sleep(60)
    """
    with Store(folder) as store:
        kept(store, ("one", "1"), name="work")
    process = run_code(code, folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "asked\n"
    process.kill()
    process.communicate()
    with Store(folder) as store, store.open(store.find("work").id) as live:
        assert words(list(live.recovered)) == ["long question"]
        assert words(live.path()) == ["one", "1"]
        assert store.search("long question")[0].message == live.recovered[0]
        say(live, "long question", "2")
        assert words(live.path()) == ["one", "1", "long question", "2"]


def test_whoever_looks_after_a_crash_sees_what_was_saved_of_the_turn(folder: Path) -> None:
    code = """
    store = Store(folder, draft_seconds=0.02)
    live = store.open(store.find("work").id)
    draft = live.reply_to([user("a long question")], model=MODEL)
    draft.add("half of an ")
    time.sleep(0.5)
    print("saved", flush=True)
    time.sleep(60)
    """
    with Store(folder) as store:
        id = kept(store, ("one", "1"), name="work")
        process = run_code(code, folder)
        assert process.stdout is not None
        assert process.stdout.readline() == "saved\n"
        # While it runs, it is left to its process.
        assert words(store.path(id)) == ["one", "1"]
        assert store.search("half") == []
        assert store.find("work").num_messages == 2
        process.kill()
        process.communicate()
        assert [words([hit.message]) for hit in store.search("half")] == [["half of an "]]
        assert store.recent()[0].num_messages == 4
        path = store.path(id)
        assert (words(path[2:]), path[-1].finish_reason) == (["a long question", "half of an "], "interrupted")
        assert words(store.path(store.fork(id).conversation.id)) == words(path)
        for _ in range(2):  # also who opens it later is told
            with store.open(id) as live:
                assert words(list(live.recovered)) == ["a long question", "half of an "]
        with store.open(id) as live:
            say(live, "on", "2")
        assert store.left_open(id) == []


def test_a_second_process_is_told_who_has_the_conversation_and_a_killed_one_has_it_no_more(folder: Path) -> None:
    code = """
    store = Store(folder)
    live = store.open(store.find("work").id)
    print("open", flush=True)
    time.sleep(60)
    """
    with Store(folder) as store:
        id = kept(store, ("one", "1"), name="work")
        process = run_code(code, folder)
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with pytest.raises(ConversationInUseError, match=rf"'work' is open in another process \(pid {process.pid}\)"):
            store.open(id)
        with pytest.raises(ConversationInUseError):
            store.delete(id)
        # Looking, and going on in a fork, needs no lock.
        assert words(store.path(id)) == ["one", "1"]
        with store.open(store.fork(id).conversation.id) as fork:
            say(fork, "two", "2")
        process.kill()
        process.communicate()
        with store.open(id) as live:
            say(live, "three", "3")
        assert words(store.path(id)) == ["one", "1", "three", "3"]


def test_a_process_that_has_ended_is_not_named_as_the_one_that_goes_on(store: Store, folder: Path) -> None:
    """Between taking the lock and saying so, the store still names whoever went on before."""
    id = kept(store, ("one", "1"), name="work")
    ended = run_code("", folder)
    ended.communicate()
    other = "import os\nlock = Store(folder)._held(store_id)\nprint('held', flush=True)\ntime.sleep(60)"
    process = run_code(other.replace("store_id", repr(id)), folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"

    def name(pid: int) -> None:
        with store._database.writing() as connection:
            connection.execute("UPDATE conversations SET holder = ?", (pid,))

    name(ended.pid)
    with pytest.raises(ConversationInUseError, match="open in another process;"):
        store.open(id)
    said = threading.Timer(0.05, name, (process.pid,))
    said.start()
    with pytest.raises(ConversationInUseError, match=rf"open in another process \(pid {process.pid}\)"):
        store.open(id)
    said.join()
    process.kill()
    process.communicate()


def test_one_program_does_not_open_a_conversation_twice(store: Store) -> None:
    with store.create(name="work") as live, pytest.raises(ConversationInUseError, match="already open in this program"):
        store.open(live.id)


def test_processes_that_write_different_conversations_do_not_disturb_each_other(folder: Path) -> None:
    code = """
    import secrets
    name = secrets.token_hex(4)
    store = Store(folder)
    live = store.create(name=name)
    for number in range(15):
        say(live, f"{name} {number}", "ok")
    live.close()
    store.close()
    print(name)
    """
    processes = [run_code(code, folder) for _ in range(3)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    with Store(folder) as store:
        for out, _ in outputs:
            name = out.strip()
            expected = [text for number in range(15) for text in (f"{name} {number}", "ok")]
            assert words(store.path(store.find(name).id)) == expected


def test_threads_share_a_store(store: Store) -> None:
    def work(number: int) -> None:
        try:
            kept(store, *[(f"{number} {turn}", "ok") for turn in range(5)])
        except BaseException as error:  # noqa: BLE001 - raised in a thread
            errors.append(error)

    errors: list[BaseException] = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(conversation.num_messages for conversation in store.recent()) == [10] * 4


def test_leftovers_of_killed_processes_are_cleared_and_those_in_use_are_not(store: Store, folder: Path) -> None:
    live = store.create()
    id = kept(store, ("one", "1"))
    for name in ("0123456789abcdef.giw-kv", "0123456789abcdef.giw-kv.tmp", "0123456789abcdef.lock", f"{id}.giw-kv"):
        (folder / name).write_bytes(b"x")
    (folder / "notes.txt").write_bytes(b"x")
    Store(folder).close()
    names = {path.name for path in folder.iterdir() if not path.name.startswith("conversations.db")}
    assert names == {f"{id}.giw-kv", f"{live.id}.lock", "notes.txt"}
    assert live.info.name is None


# -- who may read it, and where it is ----------------------------------------------------------------------------------


@pytest.fixture(params=[0o022, 0o000, 0o077], ids=["022", "000", "077"])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.iterdir()]}


def test_everything_is_its_owners_alone_whatever_the_umask(umask: None, folder: Path) -> None:
    with Store(folder) as store:
        id = kept(store, ("one", "1"))
        store.kv_path(id).write_bytes(b"cache")
        store.kv_path(id).chmod(0o600)
        with store.open(store.fork(id).conversation.id) as live:
            say(live, "two", "2")
            found = modes(folder)
            assert len(found) == 7  # folder, database, log, index of the log, two caches, lock
    assert found.pop("sessions") == 0o700
    assert set(found.values()) == {0o600}


def test_older_wide_files_are_tightened(folder: Path) -> None:
    with Store(folder) as store:
        id = kept(store, ("one", "1"))
        store.kv_path(id).write_bytes(b"cache")
        live = store.open(id)
        for path in folder.iterdir():
            path.chmod(0o666)
        folder.chmod(0o755)
        Store(folder).close()
        found = modes(folder)
        live.close()
    assert found.pop("sessions") == 0o700
    assert set(found.values()) == {0o600}


def test_a_folder_that_others_use_is_neither_closed_to_them_nor_used(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    shared.chmod(0o755)
    (shared / "theirs.txt").write_text("x")
    with pytest.raises(StoreError, match="holds other files"):
        Store(shared)
    assert modes(shared)["shared"] == 0o755


@pytest.mark.parametrize("name", ["conversations.db", "conversations.db-wal"])
def test_a_link_in_place_of_the_database_is_refused(tmp_path: Path, folder: Path, name: str) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    folder.mkdir(mode=0o700)
    (folder / name).symlink_to(outside)
    with pytest.raises(StoreError, match="not a plain file"):
        Store(folder)
    assert outside.read_text() == "mine"


def test_a_link_in_place_of_a_cache_leads_nowhere(store: Store, folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    id = kept(store, ("one", "1"))
    store.kv_path(id).symlink_to(outside)
    fork = store.fork(id)
    assert fork.kv_problem is not None
    assert store.kv_bytes(fork.conversation.id) == 0
    assert store.delete(id)
    assert not os.path.lexists(store.kv_path(id))
    assert outside.read_text() == "mine"
    (tmp_path / "cache").write_bytes(b"cache")
    link = folder / "link"
    link.symlink_to(tmp_path / "cache")
    assert store.add(NEW, kv_file=link).kv_problem is not None


def test_the_folder_is_chosen_by_flag_then_variable_then_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOINFER_CHAT_SESSION_DIR", "/variable")
    assert session_folder("/flag") == Path("/flag")
    assert session_folder() == Path("/variable")
    monkeypatch.setenv("GOINFER_CHAT_SESSION_DIR", "")
    assert session_folder().parts[-2:] == ("goinfer-chat", "sessions")


# -- deleting ----------------------------------------------------------------------------------------------------------


def test_nothing_of_a_deleted_conversation_is_left_on_the_disk(store: Store, folder: Path) -> None:
    # Three characters that stand nowhere else are one entry of the search index, so they would show there too.
    question, answer, name = "\u3402\u3403\u3404", "\u4e02\u4e04\u4e05", "\u9fa0\u9fa1\u9fa2"
    other = kept(store, ("one", "1"))
    id = kept(store, (f"{question} {'long ' * 5000}", f"{answer} {'text ' * 5000}"), name=name)
    with store.open(id) as live:
        live.set_system(f"system {question}")
        with live.reply_to([user(question)], model=MODEL) as draft:
            draft.add(answer * 2000)
            draft.save()
            draft.finish(replace(assistant(answer), thinking=answer, tool_calls=({"name": answer},)))
    store.kv_path(id).write_bytes(question.encode())
    for marker in (question, answer, name):
        assert marker.encode() in everything(folder)
    with store._database.reading() as connection:
        index = b"".join(row["block"] for row in connection.execute("SELECT block FROM words_data"))
    assert question[1:].encode() in index
    assert answer[1:].encode() in index
    assert store.delete(id)
    left = everything(folder)
    for marker in (question[1:], answer[1:], name, id, "long long"):
        assert marker.encode() not in left
        assert json.dumps(marker).strip('"').encode() not in left
    assert not [path for path in folder.iterdir() if path.name.startswith(id)]
    with pytest.raises(UsageError):
        store.get(id)
    assert store.search("one")[0].conversation.id == other
    with store._database.reading() as connection:
        connection.execute("CREATE VIRTUAL TABLE temp.vocabulary USING fts5vocab(main, words, row)")
        assert [row["term"] for row in connection.execute("SELECT term FROM temp.vocabulary")] == ["one"]


def test_while_another_program_reads_the_delete_says_that_traces_are_left(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store._database._connection.execute("PRAGMA busy_timeout = 100")
    id = kept(store, ("secret question", "1"))
    reader = sqlite3.connect(folder / "conversations.db", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM messages").fetchone()
    assert not store.delete(id)
    reader.close()
    store.close()
    assert b"secret question" not in everything(folder)


# -- files that cannot be used -----------------------------------------------------------------------------------------


def test_a_file_that_is_no_database_is_refused_left_alone_and_moved_only_when_told(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    database = folder / "conversations.db"
    database.write_bytes(b"not a database, but long enough to look at\n" * 100)
    with pytest.raises(StoreError, match=r"damaged or not a database.*sessions set-aside"):
        Store(folder)
    before = database.read_bytes()
    (moved,) = set_aside(folder)
    assert moved.read_bytes() == before
    with Store(folder) as store:
        kept(store, ("one", "1"))
        with store.open(store.recent()[0].id), pytest.raises(StoreError, match="in use"):
            set_aside(folder)
    assert len(set_aside(folder)) == 1
    assert {path.name for path in folder.iterdir()} == {"aside-1-conversations.db", "aside-2-conversations.db"}
    with pytest.raises(UsageError, match=r"has no conversations\.db"):
        set_aside(folder)


def test_a_database_of_another_program_is_refused_and_not_changed(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    database = folder / "conversations.db"
    connection = sqlite3.connect(database)
    connection.execute("CREATE TABLE conversations (id)")
    connection.commit()
    connection.close()
    before = database.read_bytes()
    with pytest.raises(StoreError, match="database of another program"):
        Store(folder)
    assert database.read_bytes() == before


def test_a_newer_schema_is_refused_with_both_numbers(folder: Path) -> None:
    Store(folder).close()
    connection = sqlite3.connect(folder / "conversations.db", isolation_level=None)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match=rf"newer goinfer-chat \(schema 99, and this one knows {len(MIGRATIONS)}\)"):
        Store(folder)


def damaged_copies(whole: bytes) -> Iterator[bytes]:
    for part in range(16):
        yield whole[: len(whole) * part // 16]
    for position in [*range(0, 100, 7), *range(100, len(whole), len(whole) // 60)]:
        yield whole[:position] + bytes([whole[position] ^ 0x41]) + whole[position + 1 :]
    yield whole[:4096] + bytes(len(whole) - 4096)
    random = Random(7)
    for _ in range(120):
        position = random.choice([position for position, byte in enumerate(whole) if byte])
        yield whole[:position] + bytes([whole[position] ^ 1 << random.randrange(8)]) + whole[position + 1 :]


def test_a_damaged_database_never_ends_in_anything_but_a_clear_error(folder: Path) -> None:
    with Store(folder) as store:
        id = kept(store, ("one " * 500, "1 " * 500), ("two", "2"))
    whole = (folder / "conversations.db").read_bytes()
    messages, num_usable = [], 0
    for copy in damaged_copies(whole):
        for path in folder.iterdir():
            path.unlink()
        (folder / "conversations.db").write_bytes(copy)
        try:
            with Store(folder) as store:
                for conversation in store.recent():
                    store.path(conversation.id)
                    store.search("two")
                kept(store, ("three", "3"))
                if id in [conversation.id for conversation in store.recent()]:
                    store.delete(id)
            num_usable += 1
        except StoreError as error:
            messages.append(str(error))
    assert num_usable > 3
    assert len(messages) > 3
    assert all("conversations" in message for message in messages)


def test_a_full_disk_is_said_and_costs_nothing_that_was_saved(folder: Path) -> None:
    code = """
    import resource
    store = Store(folder)
    live = store.open(store.find("work").id)
    store.kv_path(live.id).write_bytes(b"c" * 500_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    saved = 0
    try:
        for number in range(1000):
            say(live, f"question {number}", f"answer {number} " * 300)
            saved += 1
    except StoreError as error:
        print(saved)
        print(error)
    assert words(live.path())[2::2] == [f"question {number}" for number in range(saved)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    say(live, "room again", "yes")
    live.close()
    store.close()
    """
    with Store(folder) as store:
        id = kept(store, ("one", "1"), name="work")
    process = run_code(code, folder)
    out, err = process.communicate()
    assert process.returncode == 0, err
    saved, message = out.strip().split("\n")
    assert int(saved) >= 1
    assert "what was saved before stands" in message
    with Store(folder) as store:
        path = words(store.path(id))
        assert path[2:-2:2] == [f"question {number}" for number in range(int(saved))]
        assert path[-2:] == ["room again", "yes"]
        with store._database.reading() as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def test_a_full_disk_is_said_with_what_may_be_removed_by_hand(folder: Path, store: Store) -> None:
    with store._database.reading() as connection:
        connection.execute("PRAGMA max_page_count = 1")  # as many as there are: SQLITE_FULL, as on a full disk
    with pytest.raises(StoreError, match=r"the disk is full; .* \.giw-kv are caches, which may be removed"):
        kept(store, ("one", "1" * 100_000))


def test_a_cache_that_cannot_be_copied_is_said_and_the_words_are_forked(folder: Path) -> None:
    code = """
    import resource
    store = Store(folder)
    id = store.find("work").id
    store.kv_path(id).write_bytes(b"c" * 500_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    fork = store.fork(id, name="fork")
    print(fork.kv_problem)
    assert words(store.path(fork.conversation.id)) == ["one", "1"]
    assert len(list(folder.glob(f"{fork.conversation.id}*"))) == 0
    """
    with Store(folder) as store:
        kept(store, ("one", "1"), name="work")
    out, err = run_code(code, folder).communicate()
    assert out.startswith("the cache could not be copied (File too large)"), err


@pytest.mark.parametrize("replaced", [False, True])
def test_a_store_that_is_removed_while_it_is_in_use_takes_no_more_words(folder: Path, replaced: bool) -> None:
    with Store(folder) as store:
        live = store.create(name="work")
        say(live, "one", "1")
        shutil.rmtree(folder)
        if replaced:
            Store(folder).close()
        for _ in range(2):
            with pytest.raises(StoreError, match=r"conversations.db was removed or replaced while it was in use"):
                say(live, "two", "2")
        with pytest.raises(StoreError, match="removed or replaced"):
            live.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a process that gives up its rights")
def test_a_folder_that_cannot_be_written_is_said() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o755)
        folder = Path(place) / "sessions"
        folder.mkdir(mode=0o500)
        code = "Store(folder)" if os.getuid() else "os.setuid(65534); Store(folder)"
        if not os.getuid():
            os.chown(folder, 65534, -1)
        process = run_code(f"try: {code}\nexcept StoreError as error: print(error)", folder)
        out, err = process.communicate()
    assert out == f"{folder}/conversations.db: Permission denied; choose another folder with --session-dir\n", err


def test_a_file_in_place_of_the_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="/file: it is not a folder; choose another folder with --session-dir"):
            Store(folder)
