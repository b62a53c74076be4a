"""The server as strangers meet it: the program as a process, asked over plain sockets."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import read_answer
from test_server_process import Process, process
from tiny_models import write_tiny_model

ROUTE = "/v1/chat/completions"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", "qwen2", context_size=2048)


@pytest.fixture
def server(tiny: Path) -> Iterator[Process]:
    with process("--model", str(tiny)) as started:
        yield started


def connect(server: Process) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 20)


def exchange(server: Process, *parts: bytes) -> tuple[int, Any]:
    """The first answer to what is sent in these parts: its status and its JSON."""
    with connect(server) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.05)
        answer = read_answer(connection)
        assert answer.headers["content-type"] == "application/json"
        return answer.status, answer.json


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0, **more}


def head(*lines: str, host: str = "localhost") -> bytes:
    return "\r\n".join([f"POST {ROUTE} HTTP/1.1", f"Host: {host}", *lines, "", ""]).encode()


def test_what_is_no_http_is_told_so_in_json_and_fills_no_log(server: Process) -> None:
    for raw in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the start of TLS
        b"\x00" * 100,
        head("Content-Length: -5"),
        head("Content-Length: many"),
        head("Content-Length: 1" + "0" * 30),
        head("Transfer-Encoding: gzip"),
        head("Host: evil.example"),
        head("Transfer-Encoding: chunked") + b'5\r\n{"mes\r\nzz\r\n',
    ):
        status, told = exchange(server, raw)
        assert status == 400, raw
        assert "not an HTTP request" in told["error"]["message"]
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk", "Content-Length: 2")
    assert exchange(server, head(*upgrade) + b"{}")[0] == 400
    assert server.ask(ROUTE, asked("good")).status == 200
    assert "HTTP" not in server.end()[1]


def test_bytes_behind_a_refusal_end_the_connection_without_a_traceback(server: Process) -> None:
    """The answer is out before the body is read, and then what comes is no body."""
    for refused in (head("Transfer-Encoding: chunked", host="evil.example"), head("Content-Length: 200000000")):
        status, _ = exchange(server, refused, b"zz\r\n" * 10)
        assert status in (403, 413)
    assert server.ask(ROUTE, asked("good")).status == 200
    said = server.end()[1]
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 4


def test_a_body_of_a_file_with_a_byte_order_mark_is_read(server: Process) -> None:
    raw = json.dumps(asked("hi")).encode()
    marked = b"\xef\xbb\xbf" + raw
    status, told = exchange(server, head(f"Content-Length: {len(marked)}") + marked)
    assert status == 200
    assert told["choices"] == server.ask(ROUTE, asked("hi")).json["choices"]
    assert "empty" in exchange(server, head("Content-Length: 0"))[1]["error"]["message"]


def test_a_text_of_megabytes_keeps_nobody_waiting(server: Process) -> None:
    """Its tokens take seconds to find; meanwhile others are answered."""
    answers: list[Any] = []
    text = "".join(chr(ord("a") + at * at % 26) for at in range(3_000_000))
    large = threading.Thread(target=lambda: answers.append(server.ask(ROUTE, asked(text))))
    started = time.perf_counter()
    large.start()
    waits = []
    while large.is_alive():
        before = time.perf_counter()
        assert server.ask("/v1/messages/count_tokens", {"messages": asked("hi")["messages"]}).status == 200
        waits.append(time.perf_counter() - before)
    large.join()
    took = time.perf_counter() - started
    assert answers[0].json["error"]["code"] == "context_length_exceeded"
    assert took > 0.5, "the text is too short to tell"
    assert max(waits) < took / 2
