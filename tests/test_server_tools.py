"""Tools and schemas over HTTP: a tiny model with random weights calls what it must call, and says what it must say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from http_server import Running, running_server
from tiny_models import write_tiny_model

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools:\\n' }}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ 'Call as <tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function if call.function else call %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"The {name}.", "parameters": PARAMETERS}}
    for name in ("weather", "forecast")
]
ANTHROPIC_TOOLS: Any = [
    {"name": name, "description": f"The {name}.", "input_schema": PARAMETERS} for name in ("weather", "forecast")
]
USER: Any = {"role": "user", "content": "How warm is it?"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "ok": {"type": "boolean"}},
    "required": ["colour", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = write_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny.gguf",
        "qwen2",
        context_size=4096,
        metadata={"tokenizer.chat_template": TEMPLATE},
    )
    with running_server(path, context_size=4096) as server:
        yield server


def valid(arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(arguments)
    jsonschema.validate(found, PARAMETERS)
    return found


def test_a_forced_call_is_made_and_the_conversation_goes_on(server: Running, client: openai.OpenAI) -> None:
    messages: list[Any] = [USER]
    choice: Any = {"type": "function", "function": {"name": "forecast"}}
    first = client.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS, tool_choice=choice, max_tokens=200, temperature=0
    )
    assert first.choices[0].finish_reason == "tool_calls"
    message = first.choices[0].message
    assert message.tool_calls is not None
    call: Any = message.tool_calls[0]
    assert call.function.name == "forecast"
    valid(call.function.arguments)
    messages += [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "20"}]
    second = client.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=5, temperature=0
    )
    assert first.usage is not None
    assert second.usage is not None
    reused = second.usage.prompt_tokens_details
    assert reused is not None
    assert reused.cached_tokens == first.usage.total_tokens


@pytest.mark.parametrize("parallel", [True, False])
def test_a_streamed_call_has_its_index_and_arrives_whole(client: openai.OpenAI, parallel: bool) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[USER],
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=parallel,
            max_tokens=400,
            temperature=0,
            stream=True,
        )
    )
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    assert len(calls) > 1 if parallel else len(calls) == 1  # this model goes on as long as it may
    for call in calls:
        assert call.function is not None
        valid(call.function.arguments or "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    if not parallel:
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_call_that_is_cut_off_is_no_call(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(
        model="tiny", messages=[USER], tools=TOOLS, tool_choice="required", max_tokens=6, temperature=0
    )
    assert got.choices[0].finish_reason == "length"
    assert not got.choices[0].message.tool_calls


def test_structured_outputs_are_valid(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
    got = client.chat.completions.create(model="tiny", messages=[USER], response_format=form, max_tokens=100)
    jsonschema.validate(json.loads(got.choices[0].message.content or ""), SCHEMA)
    text: Any = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
    other = client.responses.create(model="tiny", input="colour?", text=text, max_output_tokens=100)
    jsonschema.validate(json.loads(other.output_text), SCHEMA)
    anything = client.chat.completions.create(
        model="tiny",
        messages=[USER],
        response_format={"type": "json_object"},
        max_tokens=2000,
        extra_body={"speculation": "ngram"},
    )
    if anything.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(anything.choices[0].message.content or ""), dict)
    else:
        assert (anything.choices[0].message.content or "").startswith("{")


def test_characters_over_several_tokens_arrive_whole_and_cut_ones_once(server: Running) -> None:
    word = "😀🇯🇵 👩‍🚀 é 한국어 «щ»"
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [word]}}}
    for max_tokens in (*range(1, 13), 200):
        fields: dict[str, Any] = {"response_format": form, "logprobs": True, "top_logprobs": 0}
        whole = server.chat("emoji", max_tokens, **fields).json["choices"][0]
        raw = b"".join(bytes(token["bytes"]) for token in whole["logprobs"]["content"])
        text = whole["message"]["content"]
        assert text == raw.decode("utf-8", "replace")
        assert text.count("\ufffd") <= 1
        streamed = server.chat("emoji", max_tokens, stream=True, **fields).events
        deltas = [event["choices"][0]["delta"].get("content", "") for event in streamed[:-1] if event["choices"]]
        assert "".join(deltas) == text
    assert json.loads(text) == word


def test_anthropics_structured_outputs_are_valid(claude: anthropic.Anthropic) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    got = claude.messages.create(model="tiny", max_tokens=100, messages=[USER], output_config=config)
    jsonschema.validate(json.loads(got.content[0].text), SCHEMA)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(unclosed"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "#"},
        {"type": "wizard"},
        {"anyOf": []},
    ],
)
def test_a_schema_that_cannot_be_obeyed_is_a_400_and_never_free_text(server: Running, schema: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = server.chat("x", 5, response_format=form)
    assert answer.status == 400, answer.body
    assert len(answer.json["error"]["message"]) > 20


def test_a_schema_of_any_depth_leaves_the_server_alive(server: Running) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": deep}}
    assert server.chat("x", 5, response_format=form).status in (200, 400)
    assert server.chat("x", 5).status == 200


def test_the_responses_of_openai_call_tools(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    choice: Any = {"type": "function", "name": "weather"}
    got = client.responses.create(
        model="tiny", input="How warm?", tools=tools, tool_choice=choice, max_output_tokens=200, temperature=0
    )
    call: Any = next(item for item in got.output if item.type == "function_call")
    assert call.name == "weather"
    valid(call.arguments)
    further = client.responses.create(
        model="tiny",
        previous_response_id=got.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "20"}],
        tools=tools,
        tool_choice="none",
        max_output_tokens=5,
        temperature=0,
    )
    assert further.usage is not None
    assert got.usage is not None
    assert further.usage.input_tokens_details.cached_tokens == got.usage.total_tokens
    with client.responses.stream(
        model="tiny", input="How warm?", tools=tools, tool_choice=choice, max_output_tokens=200, temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.done" in kinds
    assert kinds[-1] == "response.completed"
    assert [item.arguments for item in final.output if item.type == "function_call"] == [call.arguments]


def test_anthropics_client_calls_tools_and_brings_results(claude: anthropic.Anthropic) -> None:
    asked: Any = {
        "model": "tiny",
        "max_tokens": 200,
        "tools": ANTHROPIC_TOOLS,
        "tool_choice": {"type": "tool", "name": "weather"},
        "messages": [USER],
        "extra_body": {"temperature": 0},
    }
    first = claude.messages.create(**asked)
    assert first.stop_reason == "tool_use"
    block: Any = next(block for block in first.content if block.type == "tool_use")
    jsonschema.validate(block.input, PARAMETERS)
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert [b.input for b in streamed.content if b.type == "tool_use"] == [block.input]
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "20"}
    second = claude.messages.create(
        **asked
        | {
            "messages": [
                USER,
                {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in first.content]},
                {"role": "user", "content": [result]},
            ],
            "tool_choice": {"type": "none"},
            "max_tokens": 5,
        }
    )
    usage = first.usage
    assert second.usage.cache_read_input_tokens == (
        usage.input_tokens + (usage.cache_read_input_tokens or 0) + usage.output_tokens
    )


def test_calls_are_the_same_alone_and_beside_others(server: Running) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def ask(number: int) -> Any:
        fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"} if number % 2 else {}
        if number % 4 == 2:
            fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
        answer = server.chat(f"number {number % 8}", 60, speculation="ngram", **fields).json["choices"][0]["message"]
        return answer["content"], [call["function"] for call in answer.get("tool_calls", ())]

    alone = [ask(number) for number in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(24))) == alone * 3
