"""Kept conversations: nothing is lost or overwritten, nothing is readable by others, nothing is left when deleted."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.api import Message, TurnStats
from engine.errors import ContextExceededError, UsageError
from goinfer_chat.store import (
    HEAD,
    Conversation,
    ConversationInUseError,
    LiveConversation,
    ModelRef,
    NewConversation,
    Store,
    StoredMessage,
    StoreError,
    check_name,
    name_from,
    queries,
    session_folder,
    set_aside,
)
from goinfer_chat.store.database import APPLICATION_ID, MIGRATIONS
from goinfer_chat.store.exports import from_json, to_json, to_markdown

MODEL = ModelRef(identity="1f" * 32, name="tiny")
OTHER = ModelRef(identity="2e" * 32, name="other")
STATS = TurnStats(
    prompt_tokens=20, prefill_reused_tokens=12, prefill_tokens=8, completion_tokens=3, ttft_ms=1.5, context_used=23
)
ROOT = Path(__file__).parent.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sessions"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with Store(folder) as store:
        yield store


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, ids: tuple[int, ...] | None = None) -> Message:
    return Message(role="assistant", content=text, ids=ids)


def say(live: LiveConversation, question: str, answer: str, *, after: int | None = HEAD) -> StoredMessage:
    ids = tuple(answer.encode())
    with live.reply_to([user(question)], after=after, model=MODEL) as draft:
        draft.add(answer)
        return draft.finish(assistant(answer, ids), stats=STATS)


def kept(store: Store, *turns: tuple[str, str], name: str | None = None) -> str:
    """The id of a conversation with these turns."""
    with store.create(name=name, model=MODEL) as live:
        for question, answer in turns:
            say(live, question, answer)
        return live.id


def words(path: list[StoredMessage]) -> list[str]:
    return [stored.message.content for stored in path]


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


def run_code(code: str, folder: Path, **options: Any) -> subprocess.Popen[str]:
    """A process of its own with `store`, opened on the folder, and the helpers of this module."""
    prelude = "from pathlib import Path; import sys; from test_store import *; from goinfer_chat.store import *\n"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", prelude + "folder = Path(sys.argv[1])\n" + textwrap.dedent(code), str(folder)],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


# -- a tree that grows -------------------------------------------------------------------------------------------------


class Trees(RuleBasedStateMachine):
    """Random work on a few conversations, beside a model of plain lists."""

    texts = st.text(st.characters(codec="utf-8"), max_size=30)

    @initialize()
    def begin(self) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name) / "sessions"
        self.store = Store(self.folder)
        self.trees: dict[str, dict[int, tuple[int | None, Message]]] = {}
        self.heads: dict[str, int | None] = {}
        self.order: list[str] = []  # the one used last is last

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.temporary.cleanup()

    def path(self, id: str, at: int | None) -> list[Message]:
        messages: list[Message] = []
        while at is not None:
            at, message = self.trees[id][at]
            messages.insert(0, message)
        return messages

    def questions(self, id: str) -> list[int]:
        found, at = [], self.heads[id]
        while at is not None:
            parent, message = self.trees[id][at]
            if message.role == "user":
                found.insert(0, at)
            at = parent
        return found

    def used(self, id: str) -> None:
        self.order = [other for other in self.order if other != id] + [id]

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(list(self.trees)))

    def turn(self, live: LiveConversation, question: Message | None, reply: Message, after: int | None) -> None:
        tree = self.trees.setdefault(live.id, {})
        before = set(tree)
        with live.reply_to([question] if question else [], after=after, model=MODEL) as draft:
            draft.add(reply.content)
            stored = draft.finish(reply, stats=STATS)
        if question:
            assert stored.parent is not None
            tree[stored.parent] = (after, question)
        tree[stored.id] = (stored.parent, reply)
        self.heads[live.id] = stored.id
        assert stored.id > max(before, default=0)

    @precondition(lambda self: len(self.trees) < 4)
    @rule(question=texts, reply=texts, ids=st.lists(st.integers(0, 2**31 - 1), max_size=5))
    def create(self, question: str, reply: str, ids: list[int]) -> None:
        with self.store.create(model=MODEL) as live:
            self.turn(live, user(question), assistant(reply, tuple(ids)), None)
            self.used(live.id)

    @precondition(lambda self: self.trees)
    @rule(data=st.data(), question=texts, reply=texts)
    def append(self, data: st.DataObject, question: str, reply: str) -> None:
        with self.store.open(self.pick(data)) as live:
            self.turn(live, user(question), assistant(reply), self.heads[live.id])
            self.used(live.id)

    @precondition(lambda self: self.trees)
    @rule(data=st.data(), reply=texts)
    def retry(self, data: st.DataObject, reply: str) -> None:
        with self.store.open(self.pick(data)) as live:
            self.used(live.id)
            if self.questions(live.id):
                question = live.last_question().id
                assert question == self.questions(live.id)[-1]
                self.turn(live, None, assistant(reply, (1, 2)), question)

    @precondition(lambda self: self.trees)
    @rule(data=st.data(), question=texts, reply=texts)
    def edit(self, data: st.DataObject, question: str, reply: str) -> None:
        with self.store.open(self.pick(data)) as live:
            self.used(live.id)
            if self.questions(live.id):
                self.turn(live, user(question), assistant(reply), live.last_question().parent)

    @precondition(lambda self: self.trees)
    @rule(data=st.data(), turns=st.integers(1, 3))
    def undo(self, data: st.DataObject, turns: int) -> None:
        with self.store.open(self.pick(data)) as live:
            self.used(live.id)
            questions = self.questions(live.id)
            if len(questions) < turns:
                with pytest.raises(UsageError):
                    live.undo(turns)
            else:
                live.undo(turns)
                self.heads[live.id] = self.trees[live.id][questions[-turns]][0]

    @precondition(lambda self: self.trees)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        with self.store.open(self.pick(data)) as live:
            self.used(live.id)
            self.heads[live.id] = data.draw(st.sampled_from([None, *self.trees[live.id]]))
            live.move_to(self.heads[live.id])

    @precondition(lambda self: self.trees)
    @rule(data=st.data(), question=texts)
    def stop_before_the_first_word(self, data: st.DataObject, question: str) -> None:
        with self.store.open(self.pick(data)) as live, live.reply_to([user(question)], model=MODEL):
            self.used(live.id)

    @precondition(lambda self: 0 < len(self.trees) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        id = self.pick(data)
        if self.heads[id] is None:
            with pytest.raises(UsageError):
                self.store.fork(id)
            return
        fork = self.store.fork(id).conversation
        copies = self.store.path(fork.id)
        assert [stored.message for stored in copies] == self.path(id, self.heads[id])
        self.trees[fork.id] = {stored.id: (stored.parent, stored.message) for stored in copies}
        self.heads[fork.id] = copies[-1].id
        self.used(fork.id)

    @precondition(lambda self: self.trees)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        id = self.pick(data)
        assert self.store.delete(id)
        del self.trees[id], self.heads[id]
        self.order.remove(id)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = Store(self.folder)

    @rule()
    def search_index_is_sound(self) -> None:
        with self.store._database.writing() as connection:
            connection.execute("INSERT INTO words(words, rank) VALUES ('integrity-check', 1)")

    @invariant()
    def everything_is_kept(self) -> None:
        if not hasattr(self, "store"):
            return
        assert [conversation.id for conversation in self.store.recent()] == self.order[::-1]
        for id, tree in self.trees.items():
            stored = self.store.tree(id)
            assert {s.id: (s.parent, s.message) for s in stored} == tree
            assert [s.message for s in self.store.path(id)] == self.path(id, self.heads[id])
        names = [conversation.name for conversation in self.store.recent()]
        assert len(set(names)) == len(names)
        assert all(name and check_name(name) == name for name in names)


TestTrees = Trees.TestCase
TestTrees.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)


def test_messages_come_back_as_they_were(store: Store) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "grep", "arguments": '{"b": 1, "a": [null, "é"]}'}}
    asked = Message(role="assistant", content="", thinking="Let me\nlook", ids=(0, 2**31), tool_calls=(call,))
    result = Message(role="tool", content="a\0b\x1b[31m 漢字 🙂", tool_call_id="c1", name="grep")
    with store.create(model=MODEL, system="Be brief.", settings={"temperature": 0.5}) as live:
        with live.reply_to([user("look")], model=MODEL) as draft:
            first = draft.finish(asked, stats=STATS)
        with live.reply_to([result], model=OTHER) as draft:
            draft.finish(assistant("done", (7,)), finish_reason="length")
        path = live.path()
        info = live.info
    assert [stored.message for stored in path] == [user("look"), asked, result, assistant("done", (7,))]
    assert [stored.finish_reason for stored in path] == [None, "stop", None, "length"]
    assert first.stats == STATS
    assert list(path[1].message.tool_calls[0]["function"]) == ["name", "arguments"]
    assert (info.system, info.settings, info.model) == ("Be brief.", {"temperature": 0.5}, OTHER)


def test_ids_of_another_model_are_left_out_and_come_back_with_their_own(store: Store) -> None:
    with store.create() as live:
        for model, reply in ((MODEL, (1,)), (OTHER, (2,)), (MODEL, (3,))):
            with live.reply_to([user("q")], model=model) as draft:
                draft.finish(assistant("a", reply))
        assert [message.ids for message in live.messages(MODEL.identity)] == [None, (1,), None, None, None, (3,)]
        assert [message.ids for message in live.messages(OTHER.identity)] == [None, None, None, (2,), None, None]
        assert [message.ids for message in live.messages(None)] == [None] * 6


def test_order_does_not_follow_a_clock_that_goes_back(folder: Path) -> None:
    times = iter(range(1000, 0, -1))
    with Store(folder, clock=lambda: float(next(times))) as store:
        ids = [kept(store, ("one", "1"), ("two", "2")) for _ in range(3)]
        assert [conversation.id for conversation in store.recent()] == ids[::-1]
        assert words(store.path(ids[0])) == ["one", "1", "two", "2"]
        store.open(ids[0]).close()
        assert [conversation.id for conversation in store.recent(2)] == [ids[0], ids[2]]


def test_a_conversation_in_which_nothing_was_said_leaves_nothing(store: Store, folder: Path) -> None:
    with store.create(name="empty") as live:
        with live.reply_to([user("never mind")], model=MODEL):
            pass
        assert store.recent() == []
    store.create(name="empty").close()
    store.close()
    assert b"never mind" not in everything(folder)


# -- drafts ------------------------------------------------------------------------------------------------------------


def test_a_running_reply_is_saved_at_most_once_in_its_time_and_never_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[tuple[float, str]] = []
    save = queries.save_draft

    def spy(connection: sqlite3.Connection, id: int, content: str, ids: Any) -> None:
        saved.append((time.monotonic(), content))
        save(connection, id, content, ids)

    monkeypatch.setattr(queries, "save_draft", spy)
    with Store(folder, draft_seconds=0.2) as store, store.create() as live:
        with live.reply_to([user("q")], model=MODEL) as draft:
            text, until = "", time.monotonic() + 0.7
            while time.monotonic() < until:
                draft.add("word ", (1,))
                text += "word "
                time.sleep(0.01)
            time.sleep(0.5)  # the engine says nothing for a while: what it said is saved all the same
            assert saved[-1][1] == text
            assert len(saved) <= 5
            assert all(later - earlier >= 0.19 for (earlier, _), (later, _) in itertools.pairwise(saved))
            draft.finish(assistant("the end"))
        assert words(live.path()) == ["q", "the end"]


def test_a_draft_is_not_part_of_the_conversation_yet(store: Store) -> None:
    id = kept(store, ("one", "1"))
    with store.open(id) as live, live.reply_to([user("two")], model=MODEL) as draft:
        draft.add("almost")
        draft.save()
        assert words(store.path(id)) == words(store.tree(id)) == ["one", "1"]
        assert store.search("almost") == []


def test_a_reply_that_is_left_is_kept_as_interrupted(store: Store) -> None:
    def ask(live: LiveConversation) -> Iterator[str]:
        with live.reply_to([user("count")], model=MODEL) as draft:
            for number in range(9):
                draft.add(f"{number} ", (number,))
                yield str(number)

    with store.create() as live:
        events = ask(live)
        next(events), next(events)
        events.close()
        (_, reply) = live.path()
        assert (reply.message, reply.finish_reason) == (assistant("0 1 ", (0, 1)), "interrupted")


@pytest.mark.parametrize("said", ["", "half an ans"])
def test_an_engine_that_fails_leaves_the_conversation_where_it_was(store: Store, said: str) -> None:
    id = kept(store, ("one", "1"))
    with store.open(id) as live:
        with pytest.raises(ContextExceededError):  # noqa: PT012, SIM117 - the error comes from inside the block
            with live.reply_to([user("two")], model=MODEL) as draft:
                if said:
                    draft.add(said)
                raise ContextExceededError(9, 8)
        assert words(live.path()) == ["one", "1"]
        assert words(store.tree(id)) == ["one", "1"] + (["two", said] if said else [])
        assert [s.finish_reason for s in store.tree(id)][2:] == ([None, "failed"] if said else [])


def test_what_tools_answered_is_kept_though_no_reply_followed(store: Store) -> None:
    result = Message(role="tool", content="deleted", tool_call_id="1")
    with store.create() as live:
        say(live, "delete it", "call")
        with live.reply_to([result], model=MODEL):
            pass
        assert words(live.path()) == ["delete it", "call", "deleted"]


def test_a_draft_that_cannot_be_saved_says_so_and_the_next_one_holds_it_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(folder, draft_seconds=0.05) as store:
        live = store.create()
        with live.reply_to([user("q")], model=MODEL) as draft:
            with monkeypatch.context() as broken:
                broken.setattr(queries, "save_draft", lambda *_: (_ for _ in ()).throw(StoreError("the disk is full")))
                draft.add("one ")
                wait_for(lambda: draft.error is not None)
                assert str(draft.error) == "the disk is full"
            wait_for(lambda: draft.error is None)
            with store._database.reading() as connection:
                assert queries.running(connection, live.id)[-1].message.content == "one "
            draft.finish(assistant("one two"))


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


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
    live = Store(folder).open(sys.argv[1][:0] or Store(folder).find("work").id)
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
    with pytest.raises(StoreError, match="no plain file"):
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


NEW = NewConversation(name="new", model=None, system=None, settings={}, messages=(), head=None)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "empty"),
        (" \u200d ", "empty"),
        ("../../x", "path"),
        ("a/b", "path"),
        ("/tmp/x", "path"),
        ("a\\b", "path"),
        (".hidden", "path"),
        ("x" * 300, "300 characters; at most 80"),
        ("a\0b", r"U\+0000"),
        ("a\nb", r"U\+000A"),
        ("\x1b[31m", r"U\+001B"),
        ("\u202eevil", r"U\+202E"),
        ("\udc80", r"U\+DC80"),
        ("0123456789abcdef", "id of a conversation"),
    ],
)
def test_names_that_cannot_be_taken_are_refused(store: Store, folder: Path, name: str, reason: str) -> None:
    id = kept(store, ("one", "1"), name="good")
    before = set(folder.parent.rglob("*"))
    for attempt in (
        lambda: store.rename(id, name),
        lambda: store.create(name=name),
        lambda: store.fork(id, name=name),
        lambda: store.add(replace(NEW, name=name)),
    ):
        with pytest.raises(UsageError, match=reason):
            attempt()
    assert store.get(id).name == "good"
    assert set(folder.parent.rglob("*")) == before


@given(st.text())
def test_a_name_drawn_from_any_message_is_one_that_can_be_taken(text: str) -> None:
    name = name_from(text)
    assert check_name(name) == name
    assert len(name) <= 49


def test_names_come_from_the_first_message_and_are_numbered(store: Store) -> None:
    question = "  Why is the\tsky blue,\nand what about /etc and ../up? Please be brief in your answer."
    ids = [kept(store, (question, "a"), ("second", "b")) for _ in range(3)]
    names = [store.get(id).name for id in ids]
    first = "Why is the sky blue, and what about etc and…"
    assert names == [first, f"{first} (2)", f"{first} (3)"]
    assert store.get(store.fork(ids[1]).conversation.id).name == f"{first} (4)"


def test_a_name_is_found_by_itself_and_an_id_by_its_start(store: Store) -> None:
    id = kept(store, ("q", "a"), name="Café")
    assert store.find("Cafe\u0301").id == store.find(id).id == store.find(id[:5]).id == id
    with pytest.raises(UsageError, match="did you mean 'Café'"):
        store.find("Caf")
    with pytest.raises(UsageError, match="no conversation ''"):
        store.find("")


def test_a_name_is_not_given_twice(store: Store) -> None:
    id = kept(store, ("q", "a"), name="one")
    other = kept(store, ("q", "a"), name="two")
    with pytest.raises(UsageError, match="there is a conversation 'one' already"):
        store.rename(other, "one")
    assert store.rename(id, " one ") == "one"


def test_the_folder_is_chosen_by_flag_then_variable_then_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOINFER_CHAT_SESSION_DIR", "/variable")
    assert session_folder("/flag") == Path("/flag")
    assert session_folder() == Path("/variable")
    monkeypatch.setenv("GOINFER_CHAT_SESSION_DIR", "")
    assert session_folder().parts[-2:] == ("goinfer-chat", "sessions")


# -- deleting ----------------------------------------------------------------------------------------------------------


def test_nothing_of_a_deleted_conversation_is_left_on_the_disk(store: Store, folder: Path) -> None:
    # Three characters that stand nowhere else are one entry of the search index, so it would show there too.
    question, answer, name = "\ua66e\ua66d\ua66c", "\ua66b\ua66a\ua669", "\ua668\ua667\ua666"
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
    assert store.delete(id)
    left = everything(folder)
    for marker in (question, answer, name, id, "long long"):
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
    with pytest.raises(StoreError, match=r"damaged or no database.*sessions set-aside"):
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
    fork = store.fork  # its words may not fit either, but then it says so
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
    assert out == f"{folder}/conversations.db: Permission denied; name another folder with --session-dir\n", err


def test_a_file_in_place_of_the_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="--session-dir"):
        Store(tmp_path / "file")
    with pytest.raises(StoreError, match="--session-dir"):
        Store(tmp_path / "file" / "below")


# -- schemas -----------------------------------------------------------------------------------------------------------


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


# -- search ------------------------------------------------------------------------------------------------------------


def test_search_finds_parts_of_words_code_and_languages_without_spaces(store: Store) -> None:
    texts = [
        "The KV_cache lives",
        "in C++ (really)",
        "漢字かな交じり文",
        'say "exactly this" twice',
        "ÄRGER im büro",
        "-> ok",
    ]
    id = kept(store, *[(text, "fine") for text in texts])
    for query, expected in [
        ("kv_ca", 0),
        ("c++", 1),
        ("漢字", 2),
        ("字かな交", 2),
        ('"exactly this"', 3),
        ("twice exactly", 3),
        ("ärg BÜRO", 4),
        ("är bü", 4),
        ("->", 5),
    ]:
        assert [hit.message.message.content for hit in store.search(query)] == [texts[expected]], query
    assert store.search("this exactly nowhere") == store.search('"this exactly"') == []
    assert [hit.message.message.content for hit in store.search("i", id=id, limit=2)] == ["fine", "fine"]
    assert store.search("cache", id=kept(store, ("q", "a"))) == []


def test_search_finds_branches_that_were_left_and_forgets_what_was_deleted(store: Store) -> None:
    id = kept(store, ("first version", "1"))
    with store.open(id) as live:
        say(live, "second version", "2", after=None)
    assert [hit.message.message.content for hit in store.search("version")] == ["second version", "first version"]
    store.delete(id)
    assert store.search("version") == []


@given(
    query=st.text(max_size=12) | st.sampled_from(['"', 'a" OR "b', "NEAR(a b)", "*", "content:x", "a\0bcd", "\ud800x"])
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_no_query_is_an_error_of_the_index(query: str, one_store: Store) -> None:
    if query.replace("\0", " ").replace('"', " ").split():
        one_store.search(query)
    else:
        with pytest.raises(UsageError, match="nothing to search for"):
            one_store.search(query)


@given(text=st.text(min_size=1, max_size=40), data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
def test_what_was_said_is_found_by_any_word_of_it(text: str, data: st.DataObject, one_store: Store) -> None:
    id = kept(one_store, (text, "a"))
    if found := text.split("\0")[0].replace('"', " ").split():
        word = data.draw(st.sampled_from(found))
        assert id in [hit.conversation.id for hit in one_store.search(word, limit=10**6)]
    one_store.delete(id)


@pytest.fixture(scope="module")
def one_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store(tmp_path_factory.mktemp("one") / "sessions") as store:
        yield store


def test_a_snippet_is_one_line_around_the_first_word_found(store: Store) -> None:
    kept(store, ("padding " * 50 + "\n\n  the   NEEDLE\n\tin hay " + "padding " * 50, "a"))
    (hit,) = store.search("needle hay")
    assert hit.found is not None
    assert hit.snippet[slice(*hit.found)] == "NEEDLE"
    assert (hit.snippet[0], hit.snippet[-1]) == ("…", "…")
    assert "the NEEDLE in hay padding" in hit.snippet
    assert len(hit.snippet) < 120
    assert "\n" not in hit.snippet


# -- exports -----------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | TEXT, lambda v: st.dictionaries(TEXT, v, max_size=3))


@st.composite
def conversations(draw: st.DrawFn) -> NewConversation:
    messages: list[StoredMessage] = []
    for id in range(1, draw(st.integers(0, 6)) + 1):
        message = Message(
            role=draw(st.sampled_from(["user", "assistant", "tool", "system"])),
            content=draw(TEXT),
            thinking=draw(st.none() | TEXT),
            ids=draw(st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple)),
            tool_calls=tuple(draw(st.lists(st.dictionaries(TEXT, JSON, max_size=3), max_size=2))),
            tool_call_id=draw(st.none() | TEXT),
        )
        stored = StoredMessage(
            id=id,
            parent=draw(st.sampled_from([None, *range(1, id)])),
            message=message,
            created=draw(st.floats(0, 2e9)),
            model=draw(st.sampled_from([None, MODEL.identity])),
            finish_reason=draw(st.sampled_from([None, "stop", "length", "cancelled", "interrupted", "failed"])),
            stats=draw(st.sampled_from([None, STATS])),
        )
        messages.append(stored)
    return NewConversation(
        name="work",
        model=draw(st.sampled_from([None, MODEL])),
        system=draw(st.none() | TEXT),
        settings=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        messages=tuple(messages),
        head=draw(st.sampled_from([None, *range(1, len(messages) + 1)])),
    )


@given(new=conversations())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
def test_an_export_is_taken_in_as_it_was(new: NewConversation, one_store: Store) -> None:
    added = one_store.add(new).conversation
    back = from_json(to_json(added, one_store.tree(added.id)).encode())
    to_markdown(added, one_store.path(added.id))
    one_store.delete(added.id)
    numbers = {stored.id: number for number, stored in enumerate(back.messages, start=1)}
    renumbered = [
        replace(stored, id=numbers[stored.id], parent=None if stored.parent is None else numbers[stored.parent])
        for stored in back.messages
    ]
    head = None if back.head is None else numbers[back.head]
    assert replace(back, messages=tuple(renumbered), head=head) == new


def exported(store: Store) -> dict[str, Any]:
    id = kept(store, ("one", "1"), ("two", "2"))
    document: dict[str, Any] = json.loads(to_json(store.get(id), store.tree(id)))
    return document


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d.update(format="x"), "no exported conversation"),
        (lambda d: d.update(version=2), "version 2.*reads 1"),
        (lambda d: d.update(version=True), "version is no whole number"),
        (lambda d: d.pop("messages"), "messages is missing"),
        (lambda d: d.update(name="../x"), "path"),
        (lambda d: d.update(head=99), "head of the file is message 99"),
        (lambda d: d.update(settings=[]), "settings holds something that is no JSON object"),
        (lambda d: d.update(model="x"), "model is no JSON object"),
        (lambda d: d["messages"].append(7), "message 5 is no JSON object"),
        (lambda d: d["messages"][1].update(parent=4), "message 2: its parent 4 does not stand before it"),
        (lambda d: d["messages"][1].update(id=d["messages"][0]["id"]), "message 2: the id .* is given twice"),
        (lambda d: d["messages"][0].update(role="root"), "message 1: role is none of system"),
        (lambda d: d["messages"][0].update(content=None), "message 1: content is missing"),
        (lambda d: d["messages"][0].update(created=1e300), "message 1: created is no number"),
        (lambda d: d["messages"][1].update(ids=[1, -1]), "message 2: ids is no whole number"),
        (lambda d: d["messages"][1].update(ids=[2**31]), "message 2: ids holds a number that is no token id"),
        (lambda d: d["messages"][1].update(ids="12"), "message 2: ids is no list"),
        (lambda d: d["messages"][1].update(tool_calls=["rm"]), "message 2: tool_calls holds something"),
        (lambda d: d["messages"][1].update(finish_reason="bored"), "message 2: finish_reason is none of"),
        (lambda d: d["messages"][1].update(stats={"prompt_tokens": 1}), "message 2: stats lacks figures"),
        (lambda d: d["messages"][1].update(stats={"prompt_tokens": "1"}), "message 2: stats is no number"),
    ],
)
def test_a_file_that_is_no_export_is_refused_with_the_place(
    store: Store, change: Callable[[dict[str, Any]], Any], reason: str
) -> None:
    document = exported(store)
    change(document)
    with pytest.raises(UsageError, match=reason):
        from_json(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"format": NaN}', "NaN is no JSON"),
        (b'"text"', "is no JSON object"),
    ],
)
def test_bytes_that_are_no_export_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        from_json(data)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
def test_a_changed_export_is_refused_or_can_be_kept(data: st.DataObject, one_store: Store) -> None:
    if not one_store.recent():
        kept(one_store, ("one", "1"), ("two", "2"), name="source")
    source = one_store.find("source")
    text = to_json(source, one_store.tree(source.id)).encode()
    position = data.draw(st.integers(0, len(text)))
    insert = data.draw(
        st.sampled_from([b"", b"9", b"-", b'"', b"null", b"{}", b"[]", b"\\ud800", b"\\u0000", b"1e999"])
    )
    cut = data.draw(st.integers(0, 12))
    try:
        new = from_json(text[:position] + insert + text[position + cut :])
    except UsageError:
        return
    added = one_store.add(new).conversation
    assert len(one_store.tree(added.id)) == len(new.messages)
    one_store.delete(added.id)


def test_markdown_reads_well_and_no_text_ends_its_code_block(store: Store) -> None:
    with store.create(name="Tools", system="Be brief.", model=MODEL) as live:
        with live.reply_to([user("look")], model=MODEL) as draft:
            draft.finish(Message(role="assistant", content="", thinking="hm", tool_calls=({"name": "grep"},)))
        with live.reply_to([Message(role="tool", name="grep", content="````\nx")], model=MODEL) as draft:
            draft.finish(assistant("**done**"), finish_reason="length")
        text = to_markdown(replace(live.info, created=0.0), live.path())
    assert text == textwrap.dedent(
        """\
        # Tools

        *started 1970-01-01 00:00 UTC, model tiny*

        ## System prompt

        Be brief.

        ## You

        look

        ## Assistant

        <details><summary>Thinking</summary>

        hm

        </details>

        ```json
        {
          "name": "grep"
        }
        ```

        ## Tool grep

        `````
        ````
        x
        `````

        ## Assistant

        **done**

        *(length)*
        """
    )


def test_a_fork_takes_the_cache_along_and_can_begin_at_any_message(store: Store) -> None:
    id = kept(store, ("one", "1"), ("two", "2"), name="work")
    store.kv_path(id).write_bytes(b"cache" * 1000)
    path = store.path(id)
    fork = store.fork(id, name="other", at=path[1].id)
    assert fork.kv_problem is None
    assert words(store.path(fork.conversation.id)) == ["one", "1"]
    assert store.kv_path(fork.conversation.id).read_bytes() == b"cache" * 1000
    assert store.delete(id)
    assert store.kv_bytes(fork.conversation.id) == 5000
    with pytest.raises(UsageError, match="no message 999"):
        store.fork(fork.conversation.id, at=999)


def test_lists_say_what_a_conversation_holds(store: Store) -> None:
    (conversation,) = [store.get(kept(store, ("one", "1"), name="work"))]
    assert isinstance(conversation, Conversation)
    assert (conversation.num_messages, conversation.context_tokens, conversation.model) == (2, 23, MODEL)
