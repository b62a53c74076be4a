"""Kept conversations: a tree in which nothing is overwritten, drafts, names, search."""

from __future__ import annotations

import itertools
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_helpers import MODEL, NEW, OTHER, STATS, assistant, everything, kept, say, user, wait_for, words

from engine.api import Message
from engine.errors import ContextExceededError, UsageError
from goinfer_chat.store import (
    Conversation,
    LiveConversation,
    Store,
    StoreError,
    check_name,
    name_from,
    queries,
)


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
        assert live.info.context_tokens == 23


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


# -- names -------------------------------------------------------------------------------------------------------------


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
    with pytest.raises(UsageError, match="a conversation 'one' already exists"):
        store.rename(other, "one")
    assert store.rename(id, " one ") == "one"


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


# -- whole conversations -----------------------------------------------------------------------------------------------


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
