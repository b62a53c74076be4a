"""What one request may cost the server, and where its body ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import pytest
from http_server import Running, read_answer, running_server
from tiny_models import write_tiny_model

from goinfer_chat.server.errors import ApiError
from goinfer_chat.server.fields import MAX_CONTAINERS, parse_body

ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One text is tokenized and one waits."""
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", "qwen2", context_size=2048)
    with running_server(path, max_queue=1) as server:
        yield server


class Held:
    """The counting of tokens, which waits until it is let go."""

    def __init__(self, count_tokens: Callable[[Any], int]) -> None:
        self.num_counted = 0
        self.let_go = threading.Event()
        self._count_tokens = count_tokens

    def __call__(self, request: Any) -> int:
        self.num_counted += 1
        self.let_go.wait(20)
        return self._count_tokens(request)


@pytest.fixture
def held(server: Running, monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held(server.engine.count_tokens)
    monkeypatch.setattr(server.engine, "count_tokens", held)
    return held


def test_texts_are_tokenized_one_at_a_time_and_those_that_are_too_many_are_told_when_to_come_again(
    server: Running, held: Held
) -> None:
    refused_before = server.metric("goinfer_rejected_total")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)

    def count(_: int) -> int:
        return client.messages.count_tokens(**ASKED).input_tokens

    with client, ThreadPoolExecutor(2) as pool:
        counts = pool.map(count, range(2))
        server.wait_until(lambda: server.served.texts.num_waiting == 1)
        with pytest.raises(anthropic.RateLimitError) as refused:
            count(2)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        for path, body in (("/tokenize", {"content": "x"}), ("/v1/completions", {"prompt": "x"})):
            answer = server.ask(path, body)
            assert (answer.status, answer.json["error"]["code"]) == (429, "queue_full")
        assert server.metric("goinfer_rejected_total") == refused_before + 3
        assert server.chat("replies do not wait for texts", 2).status == 200
        assert held.num_counted == 1
        held.let_go.set()
        assert len(set(counts)) == 1
    assert server.ask("/tokenize", {"content": "x"}).status == 200


def test_the_text_of_a_client_that_left_while_it_waited_is_not_tokenized(server: Running, held: Held) -> None:
    left_before = server.metric("goinfer_disconnects_total")
    with server.send("/v1/messages/count_tokens", ASKED) as first:
        server.wait_until(lambda: held.num_counted == 1)
        server.send("/v1/messages/count_tokens", ASKED).close()
        server.wait_until(lambda: server.served.texts.num_waiting == 1)
        held.let_go.set()
        assert read_answer(first).status == 200
    server.wait_until(lambda: not server.application.gate.num_inflight)
    assert held.num_counted == 1
    assert server.metric("goinfer_disconnects_total") == left_before + 1


def test_pieces_are_told_of_so_many_tokens_as_memory_has_room_for(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goinfer_chat.server.app.MAX_PIECES", 5)
    assert len(server.ask("/tokenize", {"content": "?" * 5, "with_pieces": True}).json["pieces"]) == 5
    answer = server.ask("/tokenize", {"content": "?" * 6, "with_pieces": True})
    assert (answer.status, answer.json["error"]["param"]) == (400, "with_pieces")
    assert server.ask("/tokenize", {"content": "?" * 6}).json["count"] == 6


# ---------------------------------------------------------------- bodies of many parts
def test_a_body_of_more_objects_and_arrays_than_may_be_is_refused_before_they_are_made() -> None:
    for part in (b"[]", b"{}", b'{"a":1}', b"[[[]]]"):
        many = MAX_CONTAINERS // max(1, part.count(b"[")) - 1
        parse_body(b'{"a": [' + b",".join([part] * (many - 1)) + b"]}")
        with pytest.raises(ApiError, match=f"more than {MAX_CONTAINERS:,} objects and arrays"):
            parse_body(b'{"a": [' + b",".join([part] * (many + 2)) + b"]}")


def test_brackets_in_texts_are_no_objects_and_arrays() -> None:
    text = '[{"\\' * MAX_CONTAINERS
    assert parse_body(json.dumps({text: text}).encode()).text(text) == text
    with pytest.raises(ApiError, match="not JSON"):  # a text without an end
        parse_body(b'{"a": "' + b"[" * MAX_CONTAINERS * 2)


@pytest.mark.parametrize("rest", ['"', '\\"', '"\\', "\\", '"[" ', "\\a"])
def test_many_quotes_cost_no_time(rest: str) -> None:
    started = time.process_time()
    with pytest.raises(ApiError):
        parse_body(b"[" * (MAX_CONTAINERS + 1) + (rest * (100_000 // len(rest))).encode())
    assert time.process_time() - started < 1


# ---------------------------------------------------------------- where a body ends
@pytest.mark.parametrize(
    ("version", "fields"),
    [("1.1", "Content-Length: 13\r\nTransfer-Encoding: chunked"), ("1.0", "Transfer-Encoding: chunked")],
)
def test_a_body_that_a_proxy_could_end_elsewhere_is_refused_and_nothing_behind_it_is_read(
    server: Running, version: str, fields: str
) -> None:
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with server.connect() as connection:
        head = f"POST /tokenize HTTP/{version}\r\nHost: localhost\r\nConnection: keep-alive\r\n{fields}\r\n\r\n"
        connection.sendall(head.encode() + b"0\r\n\r\n" + hidden)
        raw = b""
        while part := connection.recv(65536):  # until the server closes it
            raw += part
    assert raw.startswith(b"HTTP/1.1 400")
    assert raw.count(b"HTTP/1.1") == 1
    assert b"Transfer-Encoding" in raw.partition(b"\r\n\r\n")[2]
