"""Whatever a client sends: an answer, or an error in the form of its API; and the next request is answered.

Each test tries a few dozen cases that are the same in every run; `-m slow` tries many more, drawn anew.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from http_server import Running, read_answer, running_server
from hypothesis import given
from hypothesis import strategies as st
from test_fuzz_engine import JSON, few, many
from tiny_models import write_tiny_model

from goinfer_chat.server.security import Limits

ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", "qwen2", context_size=512)
    with running_server(path, limits=Limits(max_body_bytes=100_000, body_seconds=0.3), context_size=512) as server:
        yield server


TEXT = st.text(max_size=5) | st.sampled_from(["<|im_end|>", "\ud800", "\x00", "x" * 3000, "user", "auto", "none"])
PARTS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["text", "input_text", "tool_use", "tool_result", "thinking", "image_url"]) | JSON,
            "text": TEXT,
            "id": TEXT,
            "tool_use_id": TEXT,
            "name": TEXT,
            "input": JSON,
            "content": TEXT | JSON,
        },
    ),
    max_size=3,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function")},
        optional={
            "id": TEXT | JSON,
            "function": JSON | st.fixed_dictionaries({"name": TEXT, "arguments": TEXT | JSON}),
        },
    ),
    max_size=2,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]) | JSON},
        optional={
            "content": TEXT | PARTS | JSON,
            "tool_calls": CALLS | JSON,
            "tool_call_id": TEXT,
            "name": TEXT | JSON,
            "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]),
            "reasoning_content": TEXT | JSON,
        },
    ),
    max_size=4,
)
SCHEMA = st.recursive(
    st.sampled_from(
        [{}, True, {"type": "string"}, {"type": "integer", "minimum": 3}, {"enum": [1, "a"]}, {"$ref": "#"}]
    )
    | JSON,
    lambda inner: st.fixed_dictionaries(
        {"type": st.sampled_from(["object", "array", "string", "nothing"])},
        optional={
            "properties": st.dictionaries(TEXT, inner, max_size=2),
            "items": inner,
            "anyOf": st.lists(inner, max_size=2),
            "required": st.lists(TEXT, max_size=2) | JSON,
            "pattern": st.sampled_from(["^a$", "(", "(a+)+$", "\\p{L}"]),
            "maxItems": st.integers(-1, 3),
        },
    ),
    max_leaves=4,
)
TOOLS = st.lists(
    st.one_of(
        JSON,
        st.fixed_dictionaries(
            {"type": st.just("function")},
            optional={"function": st.fixed_dictionaries({"name": TEXT}, optional={"parameters": SCHEMA})},
        ),
        st.fixed_dictionaries({"name": TEXT}, optional={"input_schema": SCHEMA, "type": TEXT, "parameters": SCHEMA}),
    ),
    max_size=2,
)
NUMBERS = st.sampled_from([0, 1, -1, 2, 0.5, 1e308, 10**400, 2**63, True, None, "1"])
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "n", "logprobs", "top_logprobs"), NUMBERS),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repeat_penalty", "penalty_window"), NUMBERS),
    **dict.fromkeys(("stream", "stop", "logit_bias", "stream_options", "metadata", "user", "thinking", "store"), JSON),
    "tools": TOOLS,
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "any"}, {"type": "tool", "name": "f"}]) | JSON,
    "response_format": st.fixed_dictionaries(
        {"type": st.just("json_schema")}, optional={"json_schema": st.fixed_dictionaries({"schema": SCHEMA}) | JSON}
    ),
    "text": JSON,
    "system": TEXT | PARTS | JSON,
    "instructions": TEXT | JSON,
    "chat_template_kwargs": JSON,
    "previous_response_id": TEXT,
    "prompt": TEXT | st.lists(st.integers(-1, 400), max_size=3) | JSON,
    "input": TEXT | MESSAGES | JSON,
    "parallel_tool_calls": JSON,
    "reasoning_effort": JSON,
}
BODIES = st.fixed_dictionaries({"messages": MESSAGES | JSON}, optional=OPTIONS) | st.fixed_dictionaries(
    {}, optional=OPTIONS
)


def check_body(server: Running, path: str, body: Any) -> None:
    limit = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    if path == "/v1/messages/count_tokens":
        fields = {"messages", "system", "tools", "tool_choice", "model", "thinking"}
        body = {key: value for key, value in body.items() if key in fields}
    elif isinstance(body, dict):
        body = {**body, limit: 2}
    raw = json.dumps(body).encode()
    answer = server.ask(path, raw)
    assert answer.status in (200, 400, 404), (answer.status, answer.body)
    if answer.status != 200:
        error = answer.json["error"]
        assert error["message"]
        assert "Traceback" not in error["message"]
        assert len(answer.body) < 10_000


@few(120)
@given(path=st.sampled_from(ROUTES), body=BODIES)
def test_any_body_is_answered_in_the_form_of_its_api(server: Running, path: str, body: Any) -> None:
    check_body(server, path, body)


@pytest.mark.slow
@many(5000)
@given(path=st.sampled_from(ROUTES), body=BODIES)
def test_bodies_of_many_kinds_are_answered_in_the_form_of_their_api(server: Running, path: str, body: Any) -> None:
    check_body(server, path, body)


@few(60)
@given(path=st.sampled_from(ROUTES), raw=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_a_body_of_any_bytes_is_a_400(server: Running, path: str, raw: bytes) -> None:
    answer = server.ask(path, raw)
    assert answer.status == 400, answer.body
    assert answer.json["error"]["message"]


HEAD = st.lists(
    st.sampled_from(
        [
            b"GET ",
            b"POST ",
            b"OPTIONS ",
            b"/health",
            b"/v1/models",
            b"/v1/models/%00",
            b"/%ff",
            b" HTTP/1.1",
            b"\r\n",
            b"\n",
        ]
    )
    | st.sampled_from(
        [b"Host: localhost\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"\r\n\r\n"]
    )
    | st.sampled_from(
        [b"Content-Length: 99999999999999999999\r\n", b"5\r\n", b"Origin: null\r\n", b"Upgrade: websocket\r\n"]
    )
    | st.binary(max_size=8),
    max_size=8,
).map(b"".join)


@few(60)
@given(raw=HEAD)
def test_a_connection_of_any_bytes_leaves_the_server_alive(server: Running, raw: bytes) -> None:
    with server.connect() as connection:
        connection.settimeout(5)
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass


def test_after_all_that_nothing_is_left_in_work(server: Running) -> None:
    with server.send("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}) as sent:
        assert read_answer(sent).status == 200
    server.wait_until(lambda: server.is_idle and not server.application.gate.num_inflight)
