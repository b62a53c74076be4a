"""Replies held to schemas by real models: always valid, the same words however they were computed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import listed_templates
import pytest
from test_tool_calls import judged
from tiny_models import write_tiny_model

from engine import load
from engine.api import (
    Event,
    Finished,
    Message,
    NamedTool,
    PrefillProgress,
    Progress,
    Reply,
    Request,
    SamplingParams,
    TextDelta,
    ToolCallReady,
)
from engine.call_arguments import ListedArguments
from engine.errors import ContextExceededError, SchemaError
from engine.local import REST, LocalEngine
from engine.prompt_values import PLAIN
from engine.speculate import Guard, Speculation, StepCosts

GREEDY = SamplingParams(temperature=0)
WILD = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, seed=1)


def tool(name: str, properties: dict[str, Any], **fields: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), **fields}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}


SHORT = {"type": "string", "maxLength": 8}
TOOLS = (
    tool("get_file", {"path": SHORT, "line": {"type": "integer", "minimum": 1, "maximum": 99}}),
    tool("get_files", {"paths": {"type": "array", "items": SHORT, "maxItems": 2}}),
    tool("get_file_size", {"path": SHORT, "unit": {"enum": ["bytes", "kilobytes", "megabytes"]}}),
)
REPLY_SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a fact", "a note"]}, "text": SHORT, "sure": {"type": "boolean"}},
    "required": ["kind", "text", "sure"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    path = write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "qwen2")
    with load(path, context_size=2048, threads=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def default_engine(model_path: Callable[[str], Path]) -> Iterator[LocalEngine]:
    with load(model_path("smollm2-135m"), context_size=4096, threads=2) as engine:
        yield engine


def asked(text: str = "Look at a.py.", **fields: Any) -> Request:
    return Request(**{"messages": (Message(role="user", content=text),), "max_tokens": 300, "sampling": WILD, **fields})


def forced(name: str, text: str = "Look at a.py.", **fields: Any) -> Request:
    return asked(text, tools=TOOLS, tool_choice=NamedTool(name=name), **fields)


def reply_of(events: Iterator[Event]) -> Reply:
    *_, last = events
    assert isinstance(last, Finished)
    return last.reply


def fresh(engine: LocalEngine, request: Request) -> Reply:
    engine.forget(request.conversation)
    return reply_of(engine.generate(request))


def seeded(request: Request, seed: int, **fields: Any) -> Request:
    return replace(request, sampling=replace(request.sampling, seed=seed), **fields)


# -- forced calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [tool["function"]["name"] for tool in TOOLS])
def test_a_named_tool_is_called_with_valid_arguments_whatever_the_model(engine: LocalEngine, name: str) -> None:
    for seed in range(8):
        events = list(engine.generate(seeded(forced(name), seed)))
        reply = reply_of(iter(events))
        (call,) = reply.tool_calls
        assert (call.name, reply.finish_reason, reply.text) == (name, "tool_calls", "")
        judged(TOOLS, call)
        assert not any(isinstance(event, TextDelta) for event in events)
        assert [event.call for event in events if isinstance(event, ToolCallReady)] == [call]
        assert reply.stats.forced_tokens
        assert reply.stats.ttft_ms is not None


@pytest.mark.parametrize("closes", [False, True])
def test_the_vocabulary_is_read_for_grammars_when_nobody_has_asked_for_a_while(tmp_path: Path, closes: bool) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", "qwen2")
    others = set(threading.enumerate())
    with load(path, context_size=512, threads=1) as engine:
        (reading,) = (thread for thread in set(threading.enumerate()) - others if thread.name == "grammars")
        events = iter(engine.generate(Request(messages=(Message(role="user", content="Say something long."),))))
        next(events)
        reading.join(2 * REST + 0.1)
        assert reading.is_alive()  # a reply runs
        assert "_vocabulary" not in vars(engine._grammars)
        events.close()
        if closes:
            engine.close()
        reading.join(5)
        assert not reading.is_alive()
        assert ("_vocabulary" in vars(engine._grammars)) == (not closes)


@pytest.mark.parametrize("parallel", [False, True])
def test_required_calls_some_of_the_tools(engine: LocalEngine, parallel: bool) -> None:
    called = set()
    for seed in range(8):
        request = asked(tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel, max_tokens=600)
        reply = reply_of(engine.generate(seeded(request, seed)))
        assert reply.tool_calls
        assert parallel or len(reply.tool_calls) == 1
        assert len({call.id for call in reply.tool_calls}) == len(reply.tool_calls)
        for call in reply.tool_calls:
            judged(TOOLS, call)
        called |= {call.name for call in reply.tool_calls}
    assert len(called) > 1


@pytest.mark.parametrize("source", ["QWEN3_CODER", "GLM", "DSML", "GEMMA4", "LFM25", "MINIMAX"])
def test_calls_are_valid_in_each_form_whatever_the_model(tmp_path: Path, source: str) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", "qwen2")
    template = getattr(listed_templates, source).replace("<|end|>", "<|im_end|>")
    with load(path, context_size=2048, threads=1, chat_template=template) as engine:
        assert isinstance(engine.template.call_form.arguments, ListedArguments)
        for seed in range(3):
            for tool in TOOLS:
                name = tool["function"]["name"]
                (call,) = reply_of(engine.generate(seeded(forced(name), seed))).tool_calls
                assert call.name == name
                judged(TOOLS, call)
            request = seeded(asked(tools=TOOLS, tool_choice="required", max_tokens=600), seed)
            several = reply_of(engine.generate(request))
            for call in several.tool_calls:
                judged(TOOLS, call)
            one = reply_of(engine.generate(replace(request, parallel_tool_calls=False)))
            assert (len(one.tool_calls), one.text) == (1, "")
            messages = (*request.messages, one.as_message(), *results(one), Message(role="user", content="Again."))
            again = reply_of(engine.generate(replace(request, messages=messages, max_tokens=20)))
            assert again.stats.prefill_reused_tokens >= len(one.prompt_ids) + len(one.ids) - 1


def results(reply: Reply) -> list[Message]:
    return [Message(role="tool", content="ok", tool_call_id=call.id, name=call.name) for call in reply.tool_calls]


def test_odd_schemas_together_are_each_followed(engine: LocalEngine) -> None:
    odd = (
        tool("nothing", {}),
        tool(
            "kinds",
            {
                "kind": {"anyOf": [{"const": "decision"}, {"enum": ["fact", "note"]}]},
                "n": {"type": ["integer", "null"], "maximum": 9, "minimum": 0},
            },
            additionalProperties=False,
        ),
        tool("none_of", {"list": {"type": "array", "maxItems": 0}}),
        tool("many", {"n": {"type": "integer", "minimum": 3, "maximum": 12}}),
        tool("names", {name: {"type": "boolean"} for name in ("a.b", "x-y", "名前", 'q"q')}),
        tool('odd "name" ü', {"long": {"type": "string", "maxLength": 5000, "pattern": "^x{0,4}$"}}),
    )
    for one in odd:
        name = one["function"]["name"]
        reply = reply_of(engine.generate(asked(tools=odd, tool_choice=NamedTool(name=name))))
        assert [call.name for call in reply.tool_calls] == [name]
        judged(odd, reply.tool_calls[0])


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_a_call_that_is_cut_is_not_delivered_and_the_next_turn_is_fine(engine: LocalEngine, max_tokens: int) -> None:
    request = forced("get_file", max_tokens=max_tokens)
    events = list(engine.generate(request))
    reply = reply_of(iter(events))
    assert (reply.finish_reason, reply.tool_calls, reply.text) == ("length", (), "")
    assert len(reply.ids) == max_tokens
    assert not any(isinstance(event, TextDelta | ToolCallReady) for event in events)
    messages = (*request.messages, reply.as_message(), Message(role="user", content="Again."))
    again = reply_of(engine.generate(replace(request, messages=messages, max_tokens=300)))
    assert again.stats.prefill_reused_tokens == len(reply.prompt_ids) + max_tokens
    judged(TOOLS, again.tool_calls[0])


def test_an_unsupported_schema_is_refused_before_anything_is_generated(engine: LocalEngine) -> None:
    bad = tool("bad", {"list": {"type": "array", "uniqueItems": True}})
    for choice in ("auto", "required", NamedTool(name="bad")):
        with pytest.raises(SchemaError, match="the schema of the tool 'bad': the keyword \"uniqueItems\""):
            engine.generate(asked(tools=(*TOOLS, bad), tool_choice=choice))
    assert reply_of(engine.generate(asked(tools=(*TOOLS, bad), tool_choice=NamedTool(name="get_file")))).tool_calls
    with pytest.raises(SchemaError, match="nothing is valid"):
        engine.generate(asked(json_schema={"$ref": "#"}))


def test_with_tool_choice_none_calls_are_text_and_a_marker_of_one_token_cannot_be_written(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = asked(tools=TOOLS, tool_choice="none", max_tokens=20)
    assert not reply_of(engine.generate(request)).tool_calls
    assert engine.count_tokens(request) == engine.count_tokens(replace(request, tool_choice="auto"))
    marked = replace(engine.template.call_form, opener="<|im_start|>")
    monkeypatch.setitem(engine.template.__dict__, "_calls", (marked, PLAIN))
    (start,) = engine.tokenizer.encode("<|im_start|>", control=True)
    eager = replace(request, sampling=replace(WILD, logit_bias={start: 1000.0}))
    assert start not in reply_of(engine.generate(eager)).ids
    assert start in reply_of(engine.generate(replace(eager, tools=()))).ids


# -- replies under a schema --------------------------------------------------------------------------------------------


def test_a_reply_follows_its_schema_and_streams(engine: LocalEngine) -> None:
    for seed in range(8):
        events = list(engine.generate(seeded(asked(json_schema=REPLY_SCHEMA), seed)))
        reply = reply_of(iter(events))
        jsonschema.validate(json.loads(reply.text), REPLY_SCHEMA)
        deltas = [event.text for event in events if isinstance(event, TextDelta)]
        assert "".join(deltas) == reply.text
        assert len(deltas) > 3
        assert reply.finish_reason == "stop"


def test_a_schema_holds_raw_prompts_too(engine: LocalEngine) -> None:
    ids = tuple(engine.tokenizer.encode("the answer is "))
    request = Request(prompt_ids=ids, json_schema={"enum": ["yes", "no"]}, sampling=WILD)
    assert json.loads(reply_of(engine.generate(request)).text) in ("yes", "no")


def test_characters_that_span_tokens_are_whole_in_a_forced_text(engine: LocalEngine) -> None:
    text = "😀🇯🇵 👩‍🚀 é 한국어 «щ»"
    schema = {"enum": [text]}
    events = list(engine.generate(asked(json_schema=schema, top_logprobs=1)))
    reply = reply_of(iter(events))
    assert json.loads(reply.text) == text
    assert reply.text == engine.tokenizer.decode(reply.ids)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == reply.text
    assert reply.logprobs is not None
    assert b"".join(entry.chosen.piece for entry in reply.logprobs) == reply.text.encode()
    for max_tokens in range(1, 13):
        cut = reply_of(engine.generate(asked(json_schema=schema, max_tokens=max_tokens, top_logprobs=0)))
        assert cut.finish_reason == "length"
        assert cut.ids == reply.ids[:max_tokens]
        whole = engine.tokenizer.decode(cut.ids)
        assert cut.text == whole
        assert whole.count("\ufffd") <= 1


def test_bias_and_penalties_count_among_what_is_allowed_only(engine: LocalEngine) -> None:
    tokenizer = engine.tokenizer
    yes, no = tokenizer.encode("y")[0], tokenizer.encode("n")[0]
    banned = dict.fromkeys(tokenizer.encode("hello world"), 1000.0)
    for chosen, other, expected in ((yes, no, "y"), (no, yes, "n")):
        sampling = replace(WILD, logit_bias={chosen: 50.0, other: -50.0, **banned}, top_k=1)
        reply = reply_of(engine.generate(asked(json_schema={"enum": ["y", "n"]}, sampling=sampling)))
        assert json.loads(reply.text) == expected


# -- the same words ----------------------------------------------------------------------------------------------------

KINDS = {
    "named": {"tools": TOOLS, "tool_choice": NamedTool(name="get_file_size")},
    "required": {"tools": TOOLS, "tool_choice": "required"},
    "auto": {"tools": TOOLS},
    "schema": {"json_schema": REPLY_SCHEMA},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_guesses_and_log_probabilities_change_no_token(
    engine: LocalEngine, kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever can be guessed is guessed, since what pays depends on the machine.
    monkeypatch.setattr(Speculation, "_count", lambda self, guesses, num_running: len(guesses))
    monkeypatch.setattr(StepCosts, "due", lambda self, depth: False)
    monkeypatch.setattr(Guard, "pausing", False)
    guessed = 0
    for seed in range(5):
        text = '{"name": "get_file_size", "arguments": {"path": "me", "unit": "bytes"}} {"kind": "a note", "text": "a"'
        request = seeded(asked(text, max_tokens=120, **KINDS[kind]), seed)
        request = replace(request, sampling=replace(request.sampling, temperature=temperature))
        plain = fresh(engine, replace(request, speculation="off"))
        told = fresh(engine, replace(request, speculation="off", top_logprobs=2))
        drafted = fresh(engine, replace(request, speculation="ngram"))
        both = fresh(engine, replace(request, speculation="ngram", top_logprobs=2))
        for other in (told, drafted, both):
            assert other.ids == plain.ids
            assert other.finish_reason == plain.finish_reason
            assert [call.arguments for call in other.tool_calls] == [call.arguments for call in plain.tool_calls]
            assert other.stats.context_used == plain.stats.context_used == len(plain.prompt_ids) + len(plain.ids)
        for reply in (told, both):
            assert reply.logprobs is not None
            assert [entry.chosen.id for entry in reply.logprobs] == list(plain.ids)
        assert told.logprobs == both.logprobs
        guessed += drafted.stats.draft_tokens or 0
    assert guessed


def test_log_probabilities_are_the_models_own(engine: LocalEngine) -> None:
    reply = fresh(engine, forced("get_file", top_logprobs=0))
    scores = engine.score([*reply.prompt_ids, *reply.ids], len(reply.prompt_ids))
    assert reply.logprobs is not None
    assert [entry.chosen.logprob for entry in reply.logprobs] == scores


def test_several_at_once_say_what_each_says_alone(engine: LocalEngine) -> None:
    requests = [seeded(asked(f"number {i}", conversation=str(i), **kind), i) for i, kind in enumerate(KINDS.values())]
    alone = [fresh(engine, request).ids for request in requests]
    for request in requests:
        engine.forget(request.conversation)
    found: dict[int, tuple[int, ...]] = {}

    def run(i: int) -> None:
        found[i] = reply_of(engine.generate(requests[i])).ids

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(requests))] == alone


def test_a_warm_cache_changes_no_call_and_the_next_turn_reuses_all_of_it(engine: LocalEngine) -> None:
    request = forced("get_file", "a " * 300, conversation="warm")
    cold = fresh(engine, request)
    warm = reply_of(engine.generate(request))
    assert warm.ids == cold.ids
    assert warm.stats.prefill_reused_tokens == len(cold.prompt_ids) - 1
    (call,) = warm.tool_calls
    result = Message(role="tool", content="<|im_end|> print()", tool_call_id=call.id, name=call.name)
    following = replace(request, messages=(*request.messages, warm.as_message(), result))
    again = reply_of(engine.generate(following))
    assert again.stats.prefill_reused_tokens == len(warm.prompt_ids) + len(warm.ids)
    assert again.ids == fresh(engine, following).ids


def test_tools_that_are_not_called_leave_prose_as_it_is(default_engine: LocalEngine) -> None:
    request = asked("Name three colours.", max_tokens=60, sampling=GREEDY)
    with_tools = fresh(default_engine, replace(request, tools=TOOLS))
    assert not with_tools.tool_calls
    raw = Request(prompt_ids=with_tools.prompt_ids, max_tokens=60, sampling=GREEDY)
    plain = fresh(default_engine, raw)
    assert with_tools.ids == plain.ids
    assert with_tools.text == plain.text


def test_cancelling_in_the_prompt_leaves_nothing_of_a_forced_call(engine: LocalEngine) -> None:
    request = forced("get_file", "word " * 500, conversation="cancelled")
    engine.forget("cancelled")
    events = engine.generate(request)
    for event in events:
        if isinstance(event, PrefillProgress) and event.done < event.total:
            request.cancel.set()
        if isinstance(event, Finished):
            assert event.reply.finish_reason == "cancelled"
            assert event.reply.ids == ()
            break
    judged(TOOLS, reply_of(engine.generate(replace(request, cancel=threading.Event()))).tool_calls[0])


def test_a_full_context_ends_a_forced_call_with_length(engine: LocalEngine) -> None:
    prompt = 0
    text = "word " * 300
    while True:
        request = forced("get_file", text, conversation="full", max_tokens=None)
        prompt = engine.count_tokens(request)
        if prompt > engine.info.context_size - 8:
            break
        text += "word " * max(1, (engine.info.context_size - 8 - prompt) // 6)
    if prompt >= engine.info.context_size:
        with pytest.raises(ContextExceededError):
            engine.generate(request)
        return
    reply = reply_of(engine.generate(request))
    assert (reply.finish_reason, reply.tool_calls) == ("length", ())
    assert reply.stats.context_used == engine.info.context_size


# -- the default model -------------------------------------------------------------------------------------------------


def varied_schemas(count: int) -> list[dict[str, Any]]:
    """Schemas of every kind there is, told apart by their number."""
    made = []
    for n in range(count):
        leaf = [
            {"type": "string", "maxLength": 4 + n % 9},
            {"type": "integer", "minimum": -n, "maximum": 10 * n + 5},
            {"type": "number", "minimum": 0, "exclusiveMaximum": n + 1},
            {"type": "boolean"},
            {"enum": [f"v{n}", n, None, True]},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
            {"type": "string", "pattern": "^[a-z]{2,6}$"},
            {
                "anyOf": [
                    {"const": f"is {n}"},
                    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": n}, "maxItems": 2},
                ]
            },
            {"type": "string", "format": "date"},
            {"$ref": "#/$defs/node"},
        ]
        node = {
            "type": "object",
            "properties": {
                "v": {"type": "integer", "minimum": 0, "maximum": 99},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": n % 2},
            },
            "required": ["v"],
            "additionalProperties": False,
        }
        properties = {
            f"p{n}": leaf[n % 10],
            'na"me ü': leaf[(n * 3 + 1) % 9],
            "list": {"type": "array", "items": leaf[(n + 4) % 9], "minItems": n % 2, "maxItems": 2},
            "inner": {
                "type": "object",
                "properties": {"a": leaf[(n + 7) % 9], "b": leaf[(n + 2) % 9]},
                "required": ["b"],
                "additionalProperties": False,
            },
        }
        schema = {
            "type": "object",
            "properties": properties,
            "required": [f"p{n}", "list"],
            "additionalProperties": False,
        }
        made.append({**schema, "$defs": {"node": node}})
    return made


def check_forced_calls(engine: LocalEngine, schemas: Sequence[dict[str, Any]], repeats: int) -> None:
    for n, schema in enumerate(schemas):
        tools = (
            {"type": "function", "function": {"name": f"tool_{n}", "description": "Anything.", "parameters": schema}},
        )
        for seed in range(repeats):
            sampling = replace(WILD, seed=seed)
            request = asked(tools=tools, tool_choice=NamedTool(name=f"tool_{n}"), sampling=sampling, max_tokens=1500)
            reply = reply_of(engine.generate(request))
            (call,) = reply.tool_calls
            assert call.name == f"tool_{n}"
            jsonschema.validate(json.loads(call.arguments), schema)
            assert (reply.finish_reason, reply.text) == ("tool_calls", "")


def test_fifty_forced_calls_of_the_default_model_are_valid(default_engine: LocalEngine) -> None:
    check_forced_calls(default_engine, varied_schemas(50), 1)


@pytest.mark.slow
def test_two_thousand_forced_calls_of_the_default_model_are_valid(default_engine: LocalEngine) -> None:
    check_forced_calls(default_engine, varied_schemas(50), 40)


def test_tools_that_look_alike_are_called_the_same_with_guesses_and_without(default_engine: LocalEngine) -> None:
    names = ["get_file", "get_files", "get_file_size"]
    system = Message(role="system", content=" ".join(names * 5))
    for i in range(20):
        messages = (system, Message(role="user", content=f"How large is file number {i}, and what is in it?"))
        request = asked(messages=messages, tools=TOOLS, tool_choice="required", sampling=GREEDY, max_tokens=80)
        on, off = (
            reply_of(default_engine.generate(replace(request, speculation=mode, conversation=mode)))
            for mode in ("ngram", "off")
        )
        assert on.ids == off.ids
        assert on.tool_calls
        for call in on.tool_calls:
            judged(TOOLS, call)


def test_figures_are_told_while_a_forced_call_is_decoded(default_engine: LocalEngine) -> None:
    schema = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 9},
        "minItems": 150,
        "maxItems": 150,
    }
    request = asked(tools=(tool("count", {"n": schema}),), tool_choice=NamedTool(name="count"), max_tokens=1000)
    events = list(default_engine.generate(request))
    told = [event.stats for event in events if isinstance(event, Progress)]
    assert told
    assert all(stats.forced_tokens for stats in told)
