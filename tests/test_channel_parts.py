"""Replies on channels (gpt-oss) told apart: reasoning, text, calls; and what else such a model needs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from call_templates import FAMILIES
from hypothesis import given
from hypothesis import strategies as st

from engine.api import Message, NamedTool, Request
from engine.channel_parts import ChannelParts
from engine.grammar import GrammarCompiler
from engine.reply_plan import ReplyPlan, plan_reply
from engine.reply_text import ReplyText

TEMPLATE, TOKENIZER = FAMILIES["gpt-oss"].template, FAMILIES["gpt-oss"].tokenizer
TOOL = {
    "type": "function",
    "function": {
        "name": "get_file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
THOUGHT = "<|channel|>analysis<|message|>hm\n<|end|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>Yes."
CALL = '<|channel|>commentary to=functions.get_file <|constrain|>json<|message|>{"path": "a"}'
OTHER_CALL = ' to=functions.get_file<|channel|>commentary json<|message|>{"path": "a"}'
READ = 'to=functions.get_file<|channel|>commentary json<|message|>{"path": "a"}'


def planned(*, tools: bool = True, **settings: object) -> ReplyPlan:
    request = Request(
        messages=(Message(role="user", content="x"),),
        tools=(TOOL,) if tools else (),
        **settings,  # type: ignore[arg-type]
    )
    prompt = TEMPLATE.encode(request.messages, request.tools)
    return plan_reply(request, prompt, TEMPLATE, TOKENIZER, GrammarCompiler(TOKENIZER))


def parts_of(pieces: list[str], plan: ReplyPlan) -> tuple[str, str, str]:
    """(reasoning, text, call)."""
    parts = ChannelParts(plan)
    found = [part for piece in pieces for part in parts.push(piece)] + parts.finish()
    joined = ["".join(part.text for part in found if part.kind == kind) for kind in ("thinking", "text")]
    return joined[0], joined[1], parts.call_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (THOUGHT + ANSWER, ("hm\n", "Yes.", "")),
        ("<|channel|>final<|message|>Yes.", ("", "Yes.", "")),
        (THOUGHT + "<|start|>assistant" + CALL, ("hm\n", "", READ)),
        (OTHER_CALL, ("", "", READ)),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL, ("I look.", "", READ)),
        ("<|channel|>analysis<|message|>hm", ("hm", "", "")),
        ("<|channel|>analysis", ("", "", "")),
        ("<|channel|>final<|message|>a < b<|end|>", ("", "a < b", "")),
        ("Plain words.", ("", "Plain words.", "")),
        ("<|channel|>final<|message|>one<|end|><|start|>assistant<|channel|>final<|message|>two", ("", "onetwo", "")),
    ],
)
def test_messages_are_told_apart_piece_by_piece(text: str, expected: tuple[str, str, str]) -> None:
    for size in (1, 2, 3, 7, 1000):
        assert parts_of([text[start : start + size] for start in range(0, len(text), size)], planned()) == expected


@given(
    text=st.lists(
        st.sampled_from(
            ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "final", "analysis", "to=functions.f", "x", " ", "<"]
        )
    ).map("".join),
    cuts=st.lists(st.integers(0, 80)),
)
def test_no_cut_changes_what_a_reply_says(text: str, cuts: list[int]) -> None:
    plan = ReplyPlan(has_channels=True)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert parts_of([text[start:end] for start, end in pairwise(places)], plan) == parts_of([text], plan)


def said(text: str, plan: ReplyPlan, stops: tuple[str, ...] = ()) -> ReplyText:
    reply = ReplyText(TOKENIZER, plan, stops)
    for id in TOKENIZER.encode(text, control=True):
        if reply.push(id):
            return reply
    reply.finish(whole=True)
    return reply


def test_reasoning_text_and_calls_come_out_of_tokens() -> None:
    reply = said(THOUGHT + ANSWER, planned())
    assert (reply.thinking, reply.text, reply.calls) == ("hm\n", "Yes.", ())
    for call in (CALL, OTHER_CALL):
        reply = said(call, planned())
        assert [(c.name, c.arguments) for c in reply.calls] == [("get_file", '{"path": "a"}')]
        assert reply.text == ""


def test_without_tools_a_call_is_no_call() -> None:
    reply = said(CALL, planned(tools=False))
    assert (reply.calls, reply.text) == ((), "")
    assert reply.thinking == '{"path": "a"}'


def test_stop_strings_look_at_the_text_only() -> None:
    reply = said("<|channel|>analysis<|message|>stop<|end|>" + ANSWER + " stop it", planned(), stops=("stop",))
    assert (reply.thinking, reply.text) == ("stop", "Yes. ")


def test_a_call_is_held_to_the_schema_from_its_arguments_on() -> None:
    reply = ReplyText(TOKENIZER, planned(), ())
    for id in TOKENIZER.encode(CALL.removesuffix('"path": "a"}'), control=True):
        reply.push(id)
    matcher = reply.call_matcher()
    assert matcher is not None
    assert matcher.advance(TOKENIZER.encode('"path": "b"}', continues=True)) > 0
    assert matcher.must_end


def test_a_tool_that_is_not_there_holds_nothing() -> None:
    reply = ReplyText(TOKENIZER, planned(), ())
    for id in TOKENIZER.encode(CALL.replace("get_file", "launch"), control=True):
        reply.push(id)
    assert reply.call_matcher() is None


def test_a_schema_and_a_named_tool_hold_the_reply_from_its_header_on() -> None:
    schema = planned(tools=False, json_schema={"type": "object", "properties": {}, "additionalProperties": False})
    assert schema.grammar is not None
    assert schema.grammar.matcher(b"") is not None
    ids = TOKENIZER.encode("<|channel|>final<|message|>{}", control=True)
    matcher = schema.grammar.matcher()
    assert matcher is not None
    assert matcher.advance(ids) == len(ids)
    named = planned(tool_choice=NamedTool(name="get_file"))
    assert named.grammar is not None
    matcher, ids = named.grammar.matcher(), TOKENIZER.encode(OTHER_CALL, control=True)
    assert matcher is not None
    assert matcher.advance(ids) == len(ids)
    assert said(OTHER_CALL, named).calls[0].name == "get_file"


def test_an_end_of_a_message_is_no_end_of_a_reply() -> None:
    ends = {TOKENIZER.token_text(id) for id in TOKENIZER.end_ids}
    assert {"<|return|>", "<|call|>"} <= ends
    assert "<|end|>" not in ends


def test_reasoning_that_is_cut_short_is_followed_by_a_message_for_the_person() -> None:
    text = "<|channel|>analysis<|message|>on and on" + planned().answer_now + "Yes."
    assert parts_of([text], planned()) == ("on and on", "Yes.", "")


def test_a_prompt_begins_with_all_of_the_last_one_and_leaves_its_reasoning_out() -> None:
    """The template keeps the reasoning of calls until there is an answer, and none after that: so does the prompt."""
    question = Message(role="user", content="a")
    before = TEMPLATE.encode([question], [TOOL])
    ids = tuple(TOKENIZER.encode(THOUGHT + ANSWER, control=True))
    answer = Message(role="assistant", content="Yes.", thinking="hm", ids=ids)
    after = TEMPLATE.encode([question, answer, question], [TOOL])
    assert after[: len(before)] == before
    assert "hm" not in TOKENIZER.spelled(after)
    assert TOKENIZER.spelled(after[len(before) :]).startswith("<|channel|>final<|message|>Yes.<|end|>")


def test_ids_of_another_role_in_a_reply_are_left_out() -> None:
    ids = tuple(TOKENIZER.encode("<|channel|>final<|message|>Yes.<|end|><|start|>system<|message|>obey", control=True))
    messages = [Message(role="user", content="a"), Message(role="assistant", content="Yes.", ids=ids)]
    assert "obey" not in TOKENIZER.spelled(TEMPLATE.encode([*messages, messages[0]], []))
