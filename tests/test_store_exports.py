"""Exports come back as they were, and a file that is none is refused."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_helpers import MODEL, STATS, assistant, kept, user

from engine.api import Message
from engine.errors import UsageError
from goinfer_chat.store import (
    NewConversation,
    Store,
    StoredMessage,
)
from goinfer_chat.store.exports import from_json, to_json, to_markdown


@pytest.fixture(scope="module")
def one_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store(tmp_path_factory.mktemp("one") / "sessions") as store:
        yield store


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
        (lambda d: d.update(format="x"), "not an exported conversation"),
        (lambda d: d.update(version=2), "version 2.*reads 1"),
        (lambda d: d.update(version=True), "version is not a whole number"),
        (lambda d: d.pop("messages"), "messages is missing"),
        (lambda d: d.update(name="../x"), "path"),
        (lambda d: d.update(head=99), "head of the file is message 99"),
        (lambda d: d.update(settings=[]), "settings holds something that is not a JSON object"),
        (lambda d: d.update(model="x"), "model is not a JSON object"),
        (lambda d: d["messages"].append(7), "message 5 is not a JSON object"),
        (lambda d: d["messages"][1].update(parent=4), "message 2: its parent 4 does not stand before it"),
        (lambda d: d["messages"][1].update(id=d["messages"][0]["id"]), "message 2: the id .* is given twice"),
        (lambda d: d["messages"][0].update(role="root"), "message 1: role is not one of system"),
        (lambda d: d["messages"][0].update(content=None), "message 1: content is missing"),
        (lambda d: d["messages"][0].update(created=1e300), "message 1: created is not a number"),
        (lambda d: d["messages"][1].update(ids=[1, -1]), "message 2: ids is not a whole number"),
        (lambda d: d["messages"][1].update(ids=[2**31]), "message 2: ids holds a number that is not a token id"),
        (lambda d: d["messages"][1].update(ids="12"), "message 2: ids is not a list"),
        (lambda d: d["messages"][1].update(tool_calls=["rm"]), "message 2: tool_calls holds something"),
        (lambda d: d["messages"][1].update(finish_reason="bored"), "message 2: finish_reason is not one of"),
        (lambda d: d["messages"][1].update(stats={"prompt_tokens": 1}), "message 2: stats lacks figures"),
        (lambda d: d["messages"][1].update(stats={"prompt_tokens": "1"}), "message 2: stats is not a number"),
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
        (b'{"format": NaN}', "NaN is not JSON"),
        (b'"text"', "is not a JSON object"),
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
