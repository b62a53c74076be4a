"""The server under pressure and among strangers: who leaves, who waits, who is refused, and what that leaves behind."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from http_server import Answer as Got
from http_server import Running, read_answer, running_server
from tiny_models import write_tiny_model

from engine.api import Message
from engine.errors import UsageError
from goinfer_chat.server.admission import Admission
from goinfer_chat.server.chat import read_chat
from goinfer_chat.server.command import ServeOptions
from goinfer_chat.server.fields import parse_body
from goinfer_chat.server.metrics import Metrics, resident_bytes
from goinfer_chat.server.responses import Stored
from goinfer_chat.server.security import Limits
from goinfer_chat.server.served import Models, Served
from goinfer_chat.server.streaming import Answer, Context

LONG = {"messages": [{"role": "user", "content": "a long one"}], "max_tokens": 1900, "temperature": 0}
KEY = "s3cret"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", "qwen2", context_size=2048)


@pytest.fixture(scope="module")
def narrow(tiny: Path) -> Iterator[Running]:
    """One place to run, one to wait; a step takes a hundredth of a second, and a row a thousandth."""
    limits = Limits(max_body_bytes=100_000, body_seconds=0.3, max_inflight=20)
    with running_server(tiny, max_concurrent=1, max_queue=1, limits=limits) as server:
        forward = server.engine._model.forward

        def slowly(batch: Any) -> Any:
            time.sleep(0.01 + 0.001 * len(batch.ids))
            return forward(batch)

        server.engine._model.forward = slowly  # type: ignore[method-assign]
        yield server


def in_threads(work: Any, count: int) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def assert_ids_are_right(server: Running) -> None:
    """What is cached goes on as a cold engine goes on."""
    for name in server.engine._sessions.kept:
        table = server.engine._sessions._tables[name]
        assert len(table.blocks) * 64 >= len(table.ids)


# ---------------------------------------------------------------- who leaves
@pytest.mark.parametrize("phase", ["stream", "whole", "prefill", "queue"])
def test_work_stops_within_a_second_when_the_client_leaves(narrow: Running, phase: str) -> None:
    other = None
    body: dict[str, Any] = {**LONG, "stream": phase == "stream"}
    if phase == "queue":
        other = narrow.send("/v1/chat/completions", {**LONG, "stream": True})
        narrow.wait_until(lambda: narrow.served.admission.num_running == 1)
    if phase == "prefill":
        body["messages"] = [{"role": "user", "content": f"{random.random()} " * 50}]
    connection = narrow.send("/v1/chat/completions", body)
    if phase == "queue":
        narrow.wait_until(lambda: narrow.served.admission.num_waiting == 1)
    elif phase == "stream":
        for _ in range(3):
            assert connection.recv(4096)
    else:
        narrow.wait_until(lambda: bool(narrow.engine._scheduler._running))
        generation = narrow.engine._scheduler._running[0].generation
        assert generation is not None
        read = 1 if phase == "prefill" else generation._num_prompt + 3
        narrow.wait_until(lambda: len(generation.table) >= read)
        assert (phase == "prefill") == (len(generation.table) < generation._num_prompt)
    connection.close()
    if other is not None:
        assert narrow.wait_until(lambda: not narrow.served.admission.num_waiting) < 1
        other.close()
    assert narrow.wait_until(lambda: narrow.is_idle) < 1
    started = time.perf_counter()
    short = narrow.chat("short", 2)
    assert short.status == 200
    assert time.perf_counter() - started < 1
    assert_ids_are_right(narrow)
    # The cut-off request, asked again, goes on from what was evaluated and says what it says cold.
    again = narrow.chat(body["messages"], 3)
    for name in narrow.engine._sessions.kept:
        narrow.engine.forget(name)
    cold = narrow.chat(body["messages"], 3)
    assert again.json["choices"] == cold.json["choices"]
    if phase in ("stream", "whole"):
        assert again.json["usage"]["prefill_tokens"] == 1


def test_one_who_stops_and_asks_again_keeps_to_one_slot(narrow: Running) -> None:
    for name in narrow.engine._sessions.kept:
        narrow.engine.forget(name)
    for _ in range(5):
        with narrow.send("/v1/chat/completions", {**LONG, "stream": True}) as connection:
            for _ in range(3):
                assert connection.recv(4096)
        narrow.wait_until(lambda: narrow.is_idle)
    assert len(narrow.engine._sessions.kept) == 1


def test_a_client_that_reads_nothing_holds_up_nobody(narrow: Running) -> None:
    with narrow.send("/v1/chat/completions", {**LONG, "max_tokens": 30, "stream": True}):
        assert narrow.chat("other", 2).status == 200


def test_a_client_that_takes_nothing_for_long_has_left(narrow: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goinfer_chat.server.streaming.SEND_SECONDS", 0.1)
    metrics = Metrics()

    async def play() -> int:
        served = Served(name="tiny", engine=narrow.engine, admission=Admission(1, 0))
        job = read_chat(parse_body(json.dumps({**LONG, "stream": True}).encode()), Models([served]))

        async def never(message: Any = None) -> Any:
            await asyncio.sleep(100)

        await Answer(job, Context(metrics, set()))({"path": "/v1/chat/completions"}, never, never)
        return served.admission.num_running

    started = time.perf_counter()
    assert asyncio.run(play()) == 0
    assert time.perf_counter() - started < 2
    assert metrics.value("goinfer_disconnects_total") == 1
    assert narrow.is_idle


# ---------------------------------------------------------------- who waits
def test_the_choices_of_one_request_take_the_places_that_nobody_waits_for(tiny: Path) -> None:
    with running_server(tiny, max_concurrent=2, max_queue=2) as server:
        forward, most = server.engine._model.forward, 0

        def slowly(batch: Any) -> Any:
            nonlocal most
            time.sleep(0.005)
            most = max(most, len(server.engine._scheduler._running))
            return forward(batch)

        server.engine._model.forward = slowly  # type: ignore[method-assign]
        body = {**LONG, "n": 6, "max_tokens": 50, "speculation": "off"}
        with server.send("/v1/chat/completions", body) as many:
            server.wait_until(lambda: server.served.admission.num_running == 2)
            assert server.chat("one", 2).status == 200
            answered = time.perf_counter()
            assert server.served.admission.num_running
            assert len(read_answer(many).json["choices"]) == 6
        assert time.perf_counter() - answered > 0.25  # one after the first two, three more to come
        assert most == 2
        server.wait_until(lambda: server.is_idle)


def test_one_runs_one_waits_and_the_others_are_told_at_once(narrow: Running) -> None:
    running = narrow.send("/v1/chat/completions", {**LONG, "stream": True})
    narrow.wait_until(lambda: narrow.served.admission.num_running == 1)
    waiting = narrow.send("/v1/chat/completions", {**LONG, "max_tokens": 1})
    narrow.wait_until(lambda: narrow.served.admission.num_waiting == 1)

    def refused(_: int) -> tuple[Got, float]:
        started = time.perf_counter()
        return narrow.chat("too many"), time.perf_counter() - started

    for answer, seconds in in_threads(refused, 4):
        assert answer.status == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json["error"]["type"] == "rate_limit_error"
        assert seconds < 0.5
    started = time.perf_counter()
    assert narrow.ask("/health").status == 200
    assert narrow.ask("/v1/models").status == 200
    assert time.perf_counter() - started < 0.5
    running.close()
    with waiting:
        assert read_answer(waiting).status == 200


def test_fifty_rounds_of_leaving_the_queue_lose_no_place(narrow: Running) -> None:
    running = narrow.send("/v1/chat/completions", {**LONG, "stream": True})
    narrow.wait_until(lambda: narrow.served.admission.num_running == 1)
    for _ in range(50):
        leaving = narrow.send("/v1/chat/completions", LONG)
        narrow.wait_until(lambda: narrow.served.admission.num_waiting == 1)
        leaving.close()
        narrow.wait_until(lambda: narrow.served.admission.num_waiting == 0)
    assert narrow.served.admission.num_running == 1
    waiting = narrow.send("/v1/chat/completions", {**LONG, "max_tokens": 1})
    narrow.wait_until(lambda: narrow.served.admission.num_waiting == 1)
    assert narrow.chat("one too many").status == 429
    running.close()
    with waiting:
        assert read_answer(waiting).status == 200
    narrow.wait_until(lambda: narrow.is_idle and not narrow.application.gate.num_inflight)


def test_more_in_work_than_may_be_are_told_so(tiny: Path) -> None:
    with running_server(tiny, limits=Limits(max_inflight=2, body_seconds=5)) as server:
        silent = []
        for _ in range(2):
            connection = server.connect()
            connection.sendall(
                f"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: 9\r\n\r\n".encode()
            )
            silent.append(connection)
        server.wait_until(lambda: server.application.gate.num_inflight == 2)
        assert server.chat("x").status == 429
        assert server.ask("/health").status == 200
        for connection in silent:
            connection.close()
        server.wait_until(lambda: server.application.gate.num_inflight == 0)
        assert server.chat("x").status == 200


# ---------------------------------------------------------------- what is no request
MESSAGES = [{"role": "user", "content": "x"}]
PARTS = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}]

BAD: list[tuple[object, int, str]] = [
    (b"{:", 400, "body"),
    (b"", 400, "body"),
    (b"[]", 400, "body"),
    (b'{"messages": "\xc4\xe3"}', 400, "body"),
    (b"[" * 90_000, 400, "body"),
    (b"1" * 5000, 400, "body"),
    (b'{"messages": ' + b'{"a":' * 15_000, 400, "body"),
    ({}, 400, "messages"),
    ({"messages": "hi"}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": ["hi"]}, 400, "messages[0]"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": PARTS}]}, 400, "messages[0].content[0].type"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, 400, "messages[0].role"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "messages[0].content"),
    ({"messages": MESSAGES, "temperature": "hot"}, 400, "temperature"),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400, "temperature"),
    ({"messages": MESSAGES, "temperature": -1}, 400, "temperature"),
    ({"messages": MESSAGES, "temperature": 10**400}, 400, "temperature"),
    ({"messages": MESSAGES, "logit_bias": {"1": -(10**400)}}, 400, "logit_bias.1"),
    ({"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens"),
    ({"messages": MESSAGES, "max_tokens": -1}, 400, "max_tokens"),
    ({"messages": MESSAGES, "max_tokens": 1e9}, 400, "max_tokens"),
    ({"messages": MESSAGES, "max_tokens": True}, 400, "max_tokens"),
    ({"messages": MESSAGES, "stop": []}, 400, "stop"),
    ({"messages": MESSAGES, "stop": [""]}, 400, "stop"),
    ({"messages": MESSAGES, "stop": ["a"] * 100}, 400, "stop"),
    ({"messages": MESSAGES, "stop": [1]}, 400, "stop"),
    ({"messages": MESSAGES, "model": "other"}, 404, "model"),
    ({"messages": MESSAGES, "model": 5}, 400, "model"),
    ({"messages": MESSAGES, "seed": -1}, 400, "seed"),
    ({"messages": MESSAGES, "seed": 1.5}, 400, "seed"),
    ({"messages": MESSAGES, "n": 0}, 400, "n"),
    ({"messages": MESSAGES, "n": 1000}, 400, "n"),
    ({"messages": MESSAGES, "stream": "yes"}, 400, "stream"),
    ({"messages": MESSAGES, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"messages": MESSAGES, "stream": True, "stream_options": {"more": 1}}, 400, "stream_options.more"),
    ({"messages": MESSAGES, "logit_bias": {"a": 1}}, 400, "logit_bias"),
    ({"messages": MESSAGES, "logit_bias": {"1": 1000}}, 400, "logit_bias.1"),
    ({"messages": MESSAGES, "top_logprobs": 3}, 400, "top_logprobs"),
    ({"messages": MESSAGES, "tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
    ({"messages": MESSAGES, "tools": [{"type": "function", "function": {}}]}, 400, "tools[0].function.name"),
    ({"messages": MESSAGES, "tool_choice": "required"}, 400, "tool_choice"),
    ({"messages": MESSAGES, "tool_choice": "perhaps"}, 400, "tool_choice"),
    ({"messages": MESSAGES, "response_format": {"type": "xml"}}, 400, "response_format.type"),
    ({"messages": MESSAGES, "chat_template_kwargs": []}, 400, "chat_template_kwargs"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    ({"messages": MESSAGES, "reasoning_effort": "high"}, 400, "reasoning_effort"),
    ({"messages": MESSAGES, "audio": {"voice": "x"}}, 400, "audio"),
    ({"messages": MESSAGES, "store": True}, 400, "store"),
]


@pytest.mark.parametrize(("body", "status", "param"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_what_is_no_request_gets_an_error_that_names_the_field(
    narrow: Running, body: object, status: int, param: str
) -> None:
    answer = narrow.ask("/v1/chat/completions", body)
    assert answer.status == status, answer.body
    error = answer.json["error"]
    assert error["param"] == param
    assert "Traceback" not in error["message"]
    assert param.split(".")[0].split("[")[0] in error["message"]


def test_a_good_request_right_after_bad_ones_is_answered(narrow: Running) -> None:
    for body, _, _ in BAD:
        narrow.ask("/v1/chat/completions", body)
    assert narrow.chat("good").status == 200
    narrow.wait_until(lambda: not narrow.application.gate.num_inflight)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"])
def test_every_route_names_an_option_it_does_not_have(narrow: Running, path: str) -> None:
    body = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x", "max_output_tokens": 3}}.get(
        path, {"messages": MESSAGES, "max_tokens": 3} if path == "/v1/messages" else {"messages": MESSAGES}
    )
    answer = narrow.ask(path, {**body, "magic": 1})
    assert answer.status == 400
    assert "magic" in answer.json["error"]["message"]
    assert narrow.ask(path, body).status == 200


def test_a_body_that_is_too_large_is_refused_before_it_is_read(narrow: Running) -> None:
    with narrow.connect() as connection:
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{narrow.port}\r\nContent-Length: 200000000\r\n\r\n"
        )
        connection.sendall(head.encode())
        answer = read_answer(connection)
    assert answer.status == 413
    assert answer.json["error"]["param"] == "body"


def test_a_body_in_chunks_is_cut_off_where_it_gets_too_large(narrow: Running) -> None:
    with narrow.connect() as connection:
        head = f"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1:{narrow.port}\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head.encode())
        chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
        connection.sendall(chunk * 4)
        assert read_answer(connection).status == 413


def test_a_body_that_does_not_come_is_waited_for_not_too_long(narrow: Running) -> None:
    with narrow.connect() as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{narrow.port}\r\nContent-Length: 500\r\n\r\n{{"
        connection.sendall(head.encode())
        answer = read_answer(connection)
    assert answer.status == 408
    narrow.wait_until(lambda: narrow.application.gate.num_inflight == 0)


def test_what_is_no_http_is_refused(narrow: Running) -> None:
    for raw in (
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ):
        with narrow.connect() as connection:
            connection.sendall(raw + b"\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1000)
    assert narrow.chat("good").status == 200


# ---------------------------------------------------------------- who says nothing
def test_connections_that_ask_nothing_give_way_to_one_that_asks(tiny: Path) -> None:
    with running_server(tiny, listening={"connections": 8}) as server:
        silent = [server.connect() for _ in range(30)]
        silent[-1].sendall(b"GET /health HTTP/1.1\r\nHo")
        assert server.ask("/health").status == 200
        with server.send("/v1/chat/completions", {**LONG, "stream": True}) as busy:
            assert busy.recv(4096)
            silent += [server.connect() for _ in range(30)]
            assert server.chat("short", 2).status == 200
            assert busy.recv(4096)
        for connection in silent:
            connection.close()


def seconds_until_closed(connection: socket.socket) -> float:
    """How long the server bears with a byte now and then."""
    started = time.perf_counter()
    while time.perf_counter() - started < 3:
        time.sleep(0.05)
        try:
            connection.sendall(b"X")
        except OSError:
            break
    return time.perf_counter() - started


def test_a_head_has_its_time_however_slowly_it_comes(tiny: Path) -> None:
    with running_server(tiny, listening={"idle_seconds": 0.3}) as server:
        whole = f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode()
        for head in (b"", b"GET /health HTTP/1.1\r\n", whole + b"G"):
            with server.connect() as connection:
                connection.sendall(head)
                assert seconds_until_closed(connection) < 2
        with server.connect() as connection:  # between two requests there is time too
            for _ in range(2):
                connection.sendall(whole)
                assert read_answer(connection).status == 200
                time.sleep(0.15)


def test_an_answer_that_is_taken_slowly_arrives_whole(tiny: Path) -> None:
    with running_server(tiny, listening={"idle_seconds": 0.4}) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", server.port))
        body = json.dumps({"content": "a b " * 400_000}).encode()
        head = f"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        first = connection.recv(1)  # it has begun
        time.sleep(0.6)
        answer = read_answer(connection, first)
        assert len(answer.json["tokens"]) > 400_000


# ---------------------------------------------------------------- strangers
def test_a_name_that_is_not_this_machine_is_refused(narrow: Running) -> None:
    for host in ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::2]",
                 "127.0.0.1:80, evil.example", "localhost:evil.example", "[::1].evil.example"):  # fmt: skip
        for path in ("/v1/models", "/health"):
            assert narrow.ask(path, headers={"Host": host}).status == 403
    for host in ("localhost", f"LOCALHOST:{narrow.port}", "127.0.0.1", f"[::1]:{narrow.port}"):
        assert narrow.ask("/v1/models", headers={"Host": host}).status == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000", "file://"])
def test_a_page_of_another_origin_is_refused(narrow: Running, origin: str) -> None:
    before = narrow.metric("goinfer_prompt_tokens_total")
    headers = {"Origin": origin, "Content-Type": "text/plain"}
    answer = narrow.ask("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}, headers)
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers
    assert narrow.ask("/v1/chat/completions", headers={"Origin": origin}, method="OPTIONS").status == 403
    assert narrow.ask("/v1/models", headers={"Sec-Fetch-Site": "cross-site"}).status == 403
    assert narrow.metric("goinfer_prompt_tokens_total") == before


def test_a_page_that_was_let_in_may_ask(tiny: Path) -> None:
    page = "https://chat.example"
    with running_server(tiny, origins=(page,)) as server:
        preflight = server.ask("/v1/chat/completions", headers={"Origin": page}, method="OPTIONS")
        assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (204, page)
        answer = server.ask("/v1/models", headers={"Origin": page})
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, page)
        assert server.ask("/v1/models", headers={"Origin": "https://other.example"}).status == 403


def test_with_a_key_only_who_knows_it_is_answered(tiny: Path) -> None:
    with running_server(tiny, api_key=KEY) as server:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": KEY},
            {"Authorization": f"Basic {KEY}"},
            {"Authorization": f"Bearer {KEY}x"},
            {"Authorization": f"Bearer  {KEY}"},
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer caf\xe9"},
            {"X-Api-Key": KEY[:-1]},
        ):
            answer = server.ask("/v1/models", headers=headers)
            assert answer.status == 401
            assert KEY not in answer.body.decode()
        for headers in ({"Authorization": f"Bearer {KEY}"}, {"Authorization": f"bearer {KEY}"}, {"X-Api-Key": KEY}):
            assert server.ask("/v1/models", headers=headers).status == 200
        assert server.ask("/health").status == 200
        assert server.ask("/v1/models", headers={"Host": "box.example", "X-Api-Key": KEY}).status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "box.example"])
def test_without_a_key_it_listens_on_the_loopback_only(host: str) -> None:
    with pytest.raises(UsageError, match="key"):
        ServeOptions(host=host)
    assert ServeOptions(host=host, api_key=KEY).host == host
    for key in ("", " ", f"{KEY} ", f"{KEY}\n"):
        with pytest.raises(UsageError, match="key"):
            ServeOptions(host=host, api_key=key)


# ---------------------------------------------------------------- for long
def _soak(server: Running, seconds: float, seed: int) -> dict[str, int]:
    """Good and bad requests and clients that leave, from four threads. What each came to."""
    counts = dict.fromkeys(("good", "bad", "left", "full"), 0)
    lock = threading.Lock()
    end = time.perf_counter() + seconds

    def client(number: int) -> None:
        dice = random.Random(seed + number)
        mark = f"client {number} of seed {seed}"
        while time.perf_counter() < end:
            kind = dice.choice(["good", "good", "bad", "left"])
            if kind == "good":
                got = server.chat(mark, dice.randrange(1, 40), stream=dice.random() < 0.5)
                assert got.status in (200, 429)
                kind = "good" if got.status == 200 else "full"
            elif kind == "bad":
                assert server.ask("/v1/chat/completions", dice.choice(BAD)[0]).status in (400, 404)
            else:
                messages = [{"role": "user", "content": mark * dice.randrange(1, 9)}]
                body = {"messages": messages, "max_tokens": 900, "stream": dice.random() < 0.5}
                connection = server.send("/v1/chat/completions", body)
                time.sleep(dice.random() * 0.05)
                connection.close()
            with lock:
                counts[kind] += 1

    in_threads(client, 4)
    return counts


@pytest.mark.parametrize("seconds", [2.0, pytest.param(150.0, marks=pytest.mark.slow)])
def test_good_and_bad_requests_and_leaving_clients_lose_nothing_over_time(tiny: Path, seconds: float) -> None:
    with running_server(tiny, max_concurrent=3, max_queue=2) as server:
        said = {number: server.chat(f"client {number} of seed 1", 20).json["choices"] for number in range(4)}
        _soak(server, seconds / 4, 1)
        server.wait_until(lambda: server.is_idle)
        before = resident_bytes()
        counts = _soak(server, seconds, 1)
        assert min(counts[kind] for kind in ("good", "bad", "left")) > 5
        server.wait_until(lambda: server.is_idle)
        assert resident_bytes() - before < 30e6
        server.wait_until(lambda: not server.application.gate.num_inflight)
        assert server.served.admission.num_waiting == 0
        assert server.served.transcripts._busy == set()
        names = {thread.name for thread in threading.enumerate()}
        assert "reply" not in names
        for number, choices in said.items():
            assert server.chat(f"client {number} of seed 1", 20).json["choices"] == choices
        assert json.dumps(counts)


def test_a_place_goes_past_one_that_leaves_in_the_same_moment() -> None:
    async def play() -> int:
        admission = Admission(1, 5)

        async def work() -> None:
            async with admission.place():
                await asyncio.sleep(0)

        async with admission.place():
            tasks = [asyncio.create_task(work()) for _ in range(3)]
            await asyncio.sleep(0)
            tasks[0].cancel()  # it has not run again when the place is given on
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError, type(None), type(None)]
        return admission.num_running + admission.num_waiting

    assert asyncio.run(play()) == 0


def test_responses_kept_for_later_requests_are_bounded_by_their_text_and_not_only_by_their_number() -> None:
    stored = Stored(max_characters=1000)
    for number in range(5):
        stored.add(str(number), (Message(role="user", content="x" * 390),))
    assert [stored.find(str(number)) is not None for number in range(5)] == [False, False, False, True, True]
    stored.add("huge", (Message(role="user", content="x" * 2000),))
    assert stored.find("huge") is None
    stored.add("after", (Message(role="user", content="x"),))
    assert stored.find("after") is not None
