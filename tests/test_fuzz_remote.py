"""Whatever a server says to the remote backend: a reply, or an error of ours; and text that steers nothing.

Some cases that are the same in every run; `-m slow` tries many more, drawn anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from completion_server import CompletionServer, Out, completion_server
from hypothesis import given
from hypothesis import strategies as st
from test_fuzz_engine import JSON, assert_one_line, few, many
from test_remote import ADD

from engine.api import Finished, Message, Request
from engine.errors import GoinferError
from engine.remote import RemoteEngine


@pytest.fixture(scope="module")
def server() -> Iterator[CompletionServer]:
    with completion_server() as server:
        yield server


ODD = JSON | st.sampled_from(["", "stop", "length", "tool_calls", "\ud800", "\x1b[2J", -1, 10**30, "[" * 3000])
CALL = st.fixed_dictionaries(
    {},
    optional={
        "index": st.integers(-1, 3) | ODD,
        "id": ODD,
        "type": ODD,
        "function": st.fixed_dictionaries({}, optional={"name": ODD, "arguments": ODD}) | ODD,
    },
)
DELTA = st.fixed_dictionaries(
    {},
    optional={
        "content": ODD,
        "reasoning_content": ODD,
        "reasoning": ODD,
        "role": ODD,
        "refusal": ODD,
        "tool_calls": st.lists(CALL, max_size=2) | ODD,
    },
)
CHOICE = st.fixed_dictionaries({}, optional={"index": ODD, "delta": DELTA | ODD, "finish_reason": ODD, "logprobs": ODD})
FIGURES = ("prompt_tokens", "completion_tokens", "prompt_tokens_details", "prefill_tokens", "total_tokens")
CHUNK = st.fixed_dictionaries(
    {},
    optional={
        "choices": st.lists(CHOICE | ODD, max_size=2) | ODD,
        "usage": st.fixed_dictionaries({}, optional=dict.fromkeys(FIGURES, ODD)) | ODD,
        "timings": st.dictionaries(st.sampled_from(["cache_n", "prompt_ms", "predicted_ms", "draft_n"]), ODD) | ODD,
        "error": ODD,
        "id": ODD,
        "model": ODD,
    },
)
LINE = st.one_of(
    CHUNK.map(lambda chunk: f"data: {json.dumps(chunk)}\n\n"),
    ODD.map(lambda value: f"data: {json.dumps(value)}\n\n"),
    st.sampled_from(
        ["data: [DONE]\n\n", "data: {\n\n", ": ping\n\n", "event: error\ndata: {}\n\n", "x", "\n", "data: \n\n"]
    ),
)
STREAMS = st.tuples(st.sampled_from([200, 200, 200, 400, 429, 500]), st.lists(LINE, max_size=5))


def check_stream(server: CompletionServer, status: int, lines: list[str]) -> None:
    def play(out: Out, body: dict[str, Any]) -> None:
        if status != 200:
            out.fail(status, "".join(lines)[:500])
            return
        out.start()
        for line in lines:
            out.raw(line)

    server.plays[:] = [play]
    with RemoteEngine.connect(server.url, sleep=lambda cancel, seconds: False) as engine:
        for options in ({}, {"tools": (ADD,), "tool_choice": "required"}):
            request = Request(messages=(Message(role="user", content="hi"),), max_tokens=8, **options)  # type: ignore[arg-type]
            try:
                *_, last = engine.generate(request)
            except GoinferError as error:
                assert_one_line(error)
            else:
                assert isinstance(last, Finished)
                assert isinstance(last.reply.text, str)
                assert all(
                    isinstance(call.name, str) and isinstance(call.arguments, str) for call in last.reply.tool_calls
                )
                last.reply.text.encode()


@few(40)
@given(stream=STREAMS)
def test_a_server_that_says_anything_is_a_reply_or_one_line(
    server: CompletionServer, stream: tuple[int, list[str]]
) -> None:
    check_stream(server, *stream)


@pytest.mark.slow
@many(3000)
@given(stream=STREAMS)
def test_servers_that_say_many_things_are_a_reply_or_one_line(
    server: CompletionServer, stream: tuple[int, list[str]]
) -> None:
    check_stream(server, *stream)
