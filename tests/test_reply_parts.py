"""Replies told apart, however their text is cut into pieces: no half marker is shown, no text is lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from call_templates import FAMILIES
from hypothesis import given
from hypothesis import strategies as st

from engine.api import TextDelta, ThinkingDelta, ToolCallReady
from engine.reply_parts import ReplyParts
from engine.reply_plan import ReplyPlan
from engine.reply_text import ReplyText

QWEN = FAMILIES["qwen3"]
TOOLS = ({"name": "get_file"}, {"name": "get_files"})
CALL = '<tool_call>\n{"name": "get_file", "arguments": {"a": "</tool_call>"}}\n</tool_call>'
BARE = '{"name": "get_file", "arguments": {}}'


def plan(**fields: object) -> ReplyPlan:
    return ReplyPlan(**{"form": QWEN.template.call_form, "tools": TOOLS, "thinks": True, **fields})


def parts_of(pieces: list[str], plan: ReplyPlan) -> tuple[str, str, str]:
    """(thinking, text, call) of a reply, checked for what holds of every one."""
    parts = ReplyParts(plan)
    found = [part for piece in pieces for part in parts.push(piece)] + parts.finish()
    whole = "".join(pieces)
    for before, after in pairwise(found):
        assert before.end <= after.end - len(after.text)
    for part in found:
        assert whole[part.end - len(part.text) : part.end] == part.text
    return (
        *("".join(part.text for part in found if part.kind == kind) for kind in ("thinking", "text")),
        parts.call_text,
    )


REPLIES = [
    ("", ("", "", "")),
    ("Just text. ", ("", "Just text. ", "")),
    ("  spaced\n", ("", "  spaced\n", "")),
    ("a < b <tool", ("", "a < b <tool", "")),
    (CALL, ("", "", CALL)),
    (f"Let me look.\n\n{CALL}", ("", "Let me look.", CALL)),
    (f"<think>\nhm <tool_call>\n</think>\n\n{CALL}", ("hm <tool_call>", "", CALL)),
    ("<think>\nso\n\nand so\n</think>\n\nYes.", ("so\n\nand so", "Yes.", "")),
    ("<think></think>Yes.", ("", "Yes.", "")),
    ("<think>never ends </thin", ("never ends </thin", "", "")),
    ("\n<think>\na</think>b", ("a", "b", "")),
    ("<thin", ("", "<thin", "")),
    ("no <think>here</think>", ("", "no <think>here</think>", "")),
    (BARE, ("", "", BARE)),
    (f"```json\n{BARE}", ("", "", f"```json\n{BARE}")),
    ("```json\n{}\n```", ("", "```json\n{}\n```", "")),
    (f"Like this: {BARE}", ("", f"Like this: {BARE}", "")),
    ('{"name": "Ada"}', ("", '{"name": "Ada"}', "")),
    ('{"name": "get_fi', ("", '{"name": "get_fi', "")),
]


@pytest.mark.parametrize(("text", "expected"), REPLIES)
def test_replies_are_told_apart_piece_by_piece(text: str, expected: tuple[str, str, str]) -> None:
    for size in (1, 2, 3, 7, 1000):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert parts_of(pieces, plan()) == expected


_PIECES = ("<think>", "</think>", "<tool_call>", "{", '"name"', ": ", '"get_file"', "x", "\n", " ", "<", "é")


@given(
    text=st.lists(st.sampled_from(_PIECES)).map("".join),
    cuts=st.lists(st.integers(0, 60)),
    thinking=st.booleans(),
)
def test_no_cut_changes_what_a_reply_says(text: str, cuts: list[int], thinking: bool) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert parts_of(pieces, plan(thinking=thinking)) == parts_of([text], plan(thinking=thinking))


def test_without_tools_and_reasoning_every_character_is_text() -> None:
    text = f"<think>a</think> {CALL} {BARE} "
    assert parts_of([*text], ReplyPlan()) == ("", text, "")
    assert parts_of([BARE], ReplyPlan(thinks=True)) == ("", BARE, "")


def test_reasoning_that_the_prompt_began_is_reasoning() -> None:
    assert parts_of(["hm\n", "</think>", "\n\nYes"], plan(thinking=True)) == ("hm", "Yes", "")
    assert parts_of(["hm\n"], plan(thinking=True)) == ("hm", "", "")


def said(
    text: str, plan: ReplyPlan, *, stops: tuple[str, ...] = (), whole: bool = True
) -> tuple[ReplyText, list[object]]:
    reply = ReplyText(QWEN.tokenizer, plan, stops)
    for id in QWEN.tokenizer.encode(text):
        if reply.push(id):
            return reply, reply.events
    reply.finish(whole=whole)
    return reply, reply.events


def test_calls_come_as_events_and_have_ids_of_their_own() -> None:
    reply, events = said(f"<think>hm</think>Two:\n{CALL}\n{CALL}", plan())
    assert [type(event) for event in events if not isinstance(event, TextDelta | ThinkingDelta)] == [ToolCallReady] * 2
    assert (reply.thinking, reply.text) == ("hm", "Two:")
    assert [(call.name, call.arguments) for call in reply.calls] == [("get_file", '{"a": "</tool_call>"}')] * 2
    assert len({call.id for call in reply.calls}) == 2
    assert all(call.id.startswith("call_") for call in reply.calls)


def test_what_was_not_held_to_the_tools_is_delivered_as_it_was_written() -> None:
    for arguments in ("{}", "[1]", '"text"', '{"a": 1}'):
        unknown = f'<tool_call>{{"name": "launch_rocket", "arguments": {arguments}}}</tool_call>'
        reply, _ = said(unknown, plan())
        expected = arguments if arguments != '"text"' else "text"
        assert [(call.name, call.arguments) for call in reply.calls] == [("launch_rocket", expected)]


def test_a_call_that_is_none_is_text_after_all() -> None:
    reply, events = said("<tool_call> is how calls begin", plan())
    assert reply.text == "<tool_call> is how calls begin"
    assert not reply.calls
    assert not any(isinstance(event, ToolCallReady) for event in events)


@pytest.mark.parametrize("forced", [False, True])
def test_a_call_that_was_cut_is_not_delivered_and_those_before_it_are(forced: bool) -> None:
    for end in range(len(CALL)):
        cut, _ = said(CALL[:end], plan(forced=forced, thinks=False), whole=False)
        assert not cut.calls
        second, _ = said(f"{CALL}\n{CALL[:end]}", plan(forced=forced, thinks=False), whole=False)
        assert len(second.calls) == 1


def test_one_call_only_where_one_is_asked_for() -> None:
    reply, _ = said(f"{CALL}\n{CALL}", plan(several=False))
    assert len(reply.calls) == 1


def test_stop_strings_look_at_text_only_and_keep_what_stands_before_it() -> None:
    tokenizer, text = QWEN.tokenizer, "<think>\nwait\n</think>\n\nI wait here"
    reply, _ = said(text, plan(), stops=("wait",))
    assert (reply.thinking, reply.text) == ("wait", "I ")
    kept = tokenizer.encode(text)[: reply.num_kept()]
    assert tokenizer.decode(kept).startswith("<think>\nwait\n</think>\n\nI ")
    assert len(tokenizer.decode(kept[:-1])) < len("<think>\nwait\n</think>\n\nI ")
    reply, _ = said(f"so {CALL}", plan(), stops=("get_file", "so <"))
    assert (reply.text, len(reply.calls)) == ("so", 1)
