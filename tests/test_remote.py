"""The remote backend against a server that behaves, and against one that does not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import pytest
from completion_server import CompletionServer, Out, Play, breaks_off, calls, completion_server, fails, hangs, says

from engine.api import (
    Event,
    Finished,
    Message,
    NamedTool,
    Notice,
    Reply,
    Request,
    SamplingParams,
    TextDelta,
    ThinkingDelta,
    ToolCallReady,
)
from engine.errors import EngineError, UsageError
from engine.remote import RemoteEngine
from engine.remote.checks import problem_of_text

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
MUL = {"type": "function", "function": {"name": "mul", "parameters": {"type": "object", "properties": {}}}}


@contextmanager
def remote(*plays: Play, **options: object) -> Iterator[tuple[RemoteEngine, CompletionServer]]:
    """An engine that does not really wait before it asks again."""
    with (
        completion_server(*plays) as server,
        RemoteEngine.connect(server.url, sleep=lambda cancel, seconds: cancel.is_set(), **options) as engine,
    ):
        yield engine, server


def request(text: str = "hi", **options: object) -> Request:
    return Request(messages=(Message(role="user", content=text),), **options)


def told(events: Sequence[Event]) -> tuple[str, list[str], Reply]:
    """The text that was shown, the notices, and the reply."""
    assert isinstance(events[-1], Finished)
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    return text, [event.text for event in events if isinstance(event, Notice)], events[-1].reply


# -- what a server is asked --------------------------------------------------------------------------------------------


def test_a_request_is_asked_in_openai_s_form() -> None:
    messages = (
        Message(role="system", content="short"),
        Message(role="user", content="2+3?"),
        Message(
            role="assistant",
            content="",
            ids=(1, 2),
            thinking="hm",
            tool_calls=({"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}},),
        ),
        Message(role="tool", content="5", tool_call_id="c1", name="add"),
    )
    sampling = SamplingParams(temperature=0.3, top_p=0.9, seed=7, presence_penalty=0.5, logit_bias={3: -1.0}, min_p=0.1)
    with remote(says("5")) as (engine, server):
        list(
            engine.generate(
                Request(
                    messages=messages,
                    sampling=sampling,
                    max_tokens=9,
                    stop=("x",),
                    tools=(ADD,),
                    template_kwargs={"date_string": "1 Jan 2026", "enable_thinking": False},
                )
            )
        )
    (body,) = server.bodies
    assert body["messages"] == [
        {"role": "system", "content": "short"},
        {"role": "user", "content": "2+3?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
            ],
        },
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
    ]
    assert {name: body[name] for name in ("model", "temperature", "top_p", "seed", "max_tokens", "stop", "min_p")} == {
        "model": "test-model",
        "temperature": 0.3,
        "top_p": 0.9,
        "seed": 7,
        "max_tokens": 9,
        "stop": ["x"],
        "min_p": 0.1,
    }
    assert (body["logit_bias"], body["tools"], body["tool_choice"]) == ({"3": -1.0}, [ADD], "auto")
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


def test_nothing_but_openai_s_own_fields_is_sent_where_nothing_else_was_asked_for() -> None:
    with remote(says("ok")) as (engine, server):
        list(engine.generate(request()))
    assert set(server.bodies[0]) == {"model", "messages", "stream", "stream_options", "temperature", "top_p"}


def test_a_schema_is_asked_for_and_a_reply_that_breaks_it_is_told() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    with remote(says('{"n": 1}'), says('{"n": "one"}'), says("no")) as (engine, server):
        notices = [told(list(engine.generate(request(json_schema=schema))))[1] for _ in range(3)]
        list(engine.generate(request(json_schema={})))
    assert server.bodies[0]["response_format"]["json_schema"]["schema"] == schema
    assert server.bodies[3]["response_format"] == {"type": "json_object"}
    assert notices[0] == []
    assert "does not keep to the schema: 'one' is not of type 'integer'" in notices[1][0]
    assert "no JSON" in notices[2][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "ngram"}, "how a server guesses ahead is chosen where it is started"),
        ({"think_tokens": 9}, "does not take a budget of reasoning"),
        ({"top_logprobs": 3}, "a server is not asked for log probabilities; leave top_logprobs out"),
        ({"sampling": SamplingParams(penalty_window=9)}, "leave --penalty-window out"),
    ],
)
def test_what_a_server_cannot_be_asked_is_refused_and_not_ignored(options: dict[str, object], message: str) -> None:
    with remote(says("ok")) as (engine, server):
        with pytest.raises(UsageError, match=message):
            engine.generate(request(**options))
        with pytest.raises(UsageError, match="messages, not token ids"):
            engine.generate(Request(prompt_ids=(1, 2)))
    assert server.bodies == []


# -- what a server says ------------------------------------------------------------------------------------------------


def test_text_and_reasoning_arrive_in_pieces_and_figures_are_the_server_s() -> None:
    def play(out: Out, body: dict[str, object]) -> None:
        out.start()
        out.delta(role="assistant", content="")
        out.delta(reasoning_content="let me ")
        out.delta(reasoning="see")
        out.delta(content="Pa")
        out.delta(content="ris")
        usage = {
            "prompt_tokens": 50,
            "completion_tokens": 6,
            "total_tokens": 56,
            "prompt_tokens_details": {"cached_tokens": 40},
        }
        timings = {"prompt_n": 10, "prompt_per_second": 123.5, "draft_n": 4, "draft_n_accepted": 3}
        out.end(usage=usage, timings=timings)

    with remote(play) as (engine, _):
        events = list(engine.generate(request()))
    text, notices, reply = told(events)
    assert (text, notices, reply.text, reply.thinking) == ("Paris", [], "Paris", "let me see")
    assert "".join(event.text for event in events if isinstance(event, ThinkingDelta)) == "let me see"
    assert (reply.finish_reason, reply.ids, reply.as_message().ids) == ("stop", (), None)
    stats = reply.stats
    assert (stats.prompt_tokens, stats.prefill_reused_tokens, stats.prefill_tokens) == (50, 40, 10)
    assert (stats.completion_tokens, stats.prefill_tok_s, stats.context_used) == (6, 123.5, 56)
    assert (stats.draft_tokens, stats.draft_accepted, stats.acceptance) == (4, 3, 0.75)
    assert stats.ttft_ms is not None


def test_what_a_server_does_not_tell_is_not_known_and_never_zero() -> None:
    with remote(says("hello", " there")) as (engine, _):
        stats = told(list(engine.generate(request())))[2].stats
    assert stats.prompt_tokens is stats.prefill_reused_tokens is stats.prefill_tokens is stats.completion_tokens is None
    assert stats.kv_bytes is stats.seed is stats.draft_tokens is stats.draft_saved_ms is None
    assert stats.ttft_ms is not None


def test_calls_of_one_reply_are_told_apart_by_index_and_delivered_whole() -> None:
    with remote(calls(("add", '{"a": 3, "b": 4}'), ("mul", "{}"))) as (engine, _):
        events = list(engine.generate(request(tools=(ADD, MUL))))
    found = [event.call for event in events if isinstance(event, ToolCallReady)]
    assert [(call.id, call.name, call.arguments) for call in found] == [
        ("id0", "add", '{"a": 3, "b": 4}'),
        ("id1", "mul", "{}"),
    ]
    assert told(events)[2].finish_reason == "tool_calls"
    assert told(events)[2].tool_calls == tuple(found)


def test_calls_without_index_are_told_apart_by_id() -> None:
    def play(out: Out, body: dict[str, object]) -> None:
        out.start()
        for number in (1, 2):
            out.delta(tool_calls=[{"id": f"c{number}", "function": {"name": "add", "arguments": "{"}}])
            out.delta(tool_calls=[{"function": {"arguments": f'"a": {number}, "b": 0}}'}}])
        out.end("tool_calls")

    with remote(play) as (engine, _):
        reply = told(list(engine.generate(request(tools=(ADD,)))))[2]
    assert [json.loads(call.arguments)["a"] for call in reply.tool_calls] == [1, 2]


# -- calls that must be made -------------------------------------------------------------------------------------------


def test_a_server_that_ignores_tool_choice_is_named_and_asked_again() -> None:
    plays = says("I would rather talk"), calls(("mul", "{}")), calls(("add", '{"a": 1, "b": 2}'))
    with remote(*plays) as (engine, server):
        events = list(
            engine.generate(
                request(tools=(ADD, MUL), tool_choice=NamedTool(name="add"), sampling=SamplingParams(seed=5))
            )
        )
    text, notices, reply = told(events)
    assert text == ""
    assert [call.arguments for call in reply.tool_calls] == ['{"a": 1, "b": 2}']
    assert ["it calls nothing" in notices[0], "calls 'mul' instead of 'add'" in notices[1]] == [True, True]
    assert [body["seed"] for body in server.bodies] == [5, 6, 7]
    assert server.bodies[0]["tool_choice"] == {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("play", "problem"),
    [
        (says("no"), "it calls nothing"),
        (calls(("add", '{"a": "x", "b": 2}')), "'x' is not of type 'integer'"),
        (calls(("add", '{"a": 1')), "no JSON"),
        (calls(("launch", "{}")), "it calls 'launch', which is not there"),
    ],
)
def test_a_server_that_never_obeys_ends_in_an_error_that_says_what_it_did(play: Play, problem: str) -> None:
    with remote(play) as (engine, server), pytest.raises(EngineError, match="does not obey tool_choice") as error:
        list(engine.generate(request(tools=(ADD,), tool_choice="required")))
    assert problem in str(error.value)
    assert len(server.bodies) == 3


def test_a_call_that_max_tokens_cuts_is_not_delivered() -> None:
    def play(out: Out, body: dict[str, object]) -> None:
        out.start()
        out.delta(tool_calls=[{"index": 0, "id": "x", "function": {"name": "add", "arguments": '{"a": 1'}}])
        out.end("length")

    with remote(play) as (engine, server):
        reply = told(list(engine.generate(request(tools=(ADD,), tool_choice="required"))))[2]
    assert (reply.finish_reason, reply.tool_calls, len(server.bodies)) == ("length", (), 1)


# -- servers in trouble ------------------------------------------------------------------------------------------------


def test_a_busy_server_is_asked_again_when_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def sleep(cancel: threading.Event, seconds: float) -> bool:
        waits.append(seconds)
        return False

    plays = (
        fails(429, "slow down", Retry_After="3"),
        fails(503, "loading"),
        fails(429, "x", Retry_After="9999"),
        says("ok"),
    )
    with completion_server(*plays) as server, RemoteEngine.connect(server.url, sleep=sleep) as engine:
        text, notices, _ = told(list(engine.generate(request())))
    assert text == "ok"
    assert waits == [3.0, 2.0, 60.0]
    assert "is busy (429 slow down); asking again in 3 s" in notices[0]


def test_a_server_that_stays_busy_is_given_up() -> None:
    with remote(fails(503, "overloaded")) as (engine, server):
        with pytest.raises(EngineError, match=r"is busy \(503 overloaded\), also at the 5th attempt"):
            list(engine.generate(request()))
        assert len(server.bodies) == 5


@pytest.mark.parametrize("rest", ["", "data: {not json\n\n", "data: [1, 2]\n\n"])
def test_what_came_of_a_stream_that_breaks_off_is_kept_and_told(rest: str) -> None:
    with remote(breaks_off("half ", "a rep", rest=rest)) as (engine, _):
        text, notices, reply = told(list(engine.generate(request())))
    assert (text, reply.text, reply.finish_reason) == ("half a rep", "half a rep", "dropped")
    assert "broke off; the part of the reply that had come is kept" in notices[0]


@pytest.mark.parametrize(
    ("play", "message"),
    [
        (fails(400, "top_k: unknown field"), "400 top_k: unknown field"),
        (fails(500, "CUDA error\nat line 3"), "500 CUDA error at line 3"),
        (breaks_off(rest="data: {not json\n\n"), "127.0.0.1"),
    ],
)
def test_a_server_that_fails_before_it_says_anything_is_one_line(play: Play, message: str) -> None:
    with remote(play) as (engine, _), pytest.raises(EngineError) as error:
        list(engine.generate(request()))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_server_that_says_nothing_for_too_long_is_given_up() -> None:
    with remote(hangs(), timeout_seconds=0.3) as (engine, _), pytest.raises(EngineError, match="stopped answering"):
        list(engine.generate(request()))


def test_a_cancelled_reply_ends_at_once_whatever_the_server_does() -> None:
    with remote(hangs("so far")) as (engine, _):
        asked = request()
        events: list[Event] = []
        for event in engine.generate(asked):
            events.append(event)
            if isinstance(event, TextDelta):
                started = perf_counter()
                asked.cancel.set()
        assert perf_counter() - started < 2
        # Nor does anything go on waiting for a server that is silent: its connection is closed.
        for thread in threading.enumerate():
            if thread.name == "remote":
                thread.join(5)
                assert not thread.is_alive()
    text, _, reply = told(events)
    assert (text, reply.text, reply.finish_reason) == ("so far", "so far", "cancelled")


# -- connecting --------------------------------------------------------------------------------------------------------


def test_the_model_is_the_one_asked_for_or_the_only_one() -> None:
    two = [{"id": "a", "max_model_len": 4096}, {"id": "b"}]
    with completion_server(says("x"), models=two) as server:
        with RemoteEngine.connect(server.url, "a") as engine:
            assert (engine.info.name, engine.info.context_size, engine.info.backend) == ("a", 4096, "remote")
        with pytest.raises(UsageError, match=r"--model says which model of .* it has a, b"):
            RemoteEngine.connect(server.url)
        with pytest.raises(UsageError, match="has no model 'c'; it has a, b"):
            RemoteEngine.connect(server.url, "c")
    with completion_server(says("x"), models=None) as server:
        with RemoteEngine.connect(server.url, "any") as engine:
            assert engine.info.context_size == 0
        with pytest.raises(UsageError, match="it does not list what it has"):
            RemoteEngine.connect(server.url)


def test_a_server_that_is_not_there_is_one_line() -> None:
    with pytest.raises(EngineError, match="cannot be reached"):
        RemoteEngine.connect("http://127.0.0.1:9/v1", "x")
    with pytest.raises(UsageError, match="begins with http"):
        RemoteEngine.connect("localhost:8000", "x")


def test_the_key_is_sent_and_nothing_else_knows_it() -> None:
    with completion_server(says("x")) as server, RemoteEngine.connect(server.url, api_key="secret-key") as engine:
        list(engine.generate(request()))
        assert server.headers[0]["authorization"] == "Bearer secret-key"
        assert "secret-key" not in repr(engine.info)


def test_a_servers_json_is_held_to_patterns_that_python_cannot_follow() -> None:
    def problem(pattern: str, text: str) -> str | None:
        schema = {"type": "string", "pattern": pattern}
        asked = Request(messages=(Message(role="user", content="go"),), json_schema=schema)
        return problem_of_text(asked, json.dumps(text))

    assert problem(r"^\p{L}+$", "é") is None
    assert problem(r"^\p{L}+$", "1") == r"is not like ^\p{L}+$"
    assert problem("^(a+)+$", "a" * 60 + "!") == "is not like ^(a+)+$"  # 2**60 tries for a matcher that goes back
    assert "cannot be checked" in str(problem("(?=a)", "a"))
