"""A server on loopback that plays chat completions as it is told, and misbehaves on demand."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Play = Callable[["Out", dict[str, Any]], None]
"""Answers one request: given where to write and the body that came."""


@dataclass
class CompletionServer:
    plays: list[Play] = field(default_factory=list)
    """One for each request to come; the last one stays."""
    models: list[dict[str, Any]] | None = field(default_factory=lambda: [{"id": "test-model"}])
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    """Set at the end of the test: whoever waits for ever stops."""


class Out:
    """What a play writes."""

    def __init__(self, handler: BaseHTTPRequestHandler, server: CompletionServer) -> None:
        self._handler = handler
        self.server = server

    def fail(self, status: int, message: str, **headers: str) -> None:
        self._answer(status, json.dumps({"error": {"message": message}}).encode(), headers)

    def json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {})

    def _answer(self, status: int, raw: bytes, headers: dict[str, str]) -> None:
        handler = self._handler
        handler.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(raw)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(raw)

    def start(self) -> None:
        self._handler.send_response(200)
        self._handler.send_header("Content-Type", "text/event-stream")
        self._handler.end_headers()

    def raw(self, text: str) -> None:
        self._handler.wfile.write(text.encode())
        self._handler.wfile.flush()

    def delta(self, **delta: Any) -> None:
        self.chunk({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    def chunk(self, chunk: dict[str, Any]) -> None:
        whole = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "test-model", **chunk}
        self.raw(f"data: {json.dumps(whole)}\n\n")

    def end(self, reason: str = "stop", **more: Any) -> None:
        self.chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        if more:
            self.chunk({"choices": [], **more})
        self.raw("data: [DONE]\n\n")


def says(*parts: str, reason: str = "stop", **more: Any) -> Play:
    """A reply of these pieces; `more` goes into a last chunk, such as `usage`."""

    def play(out: Out, body: dict[str, Any]) -> None:
        out.start()
        for part in parts:
            out.delta(content=part)
        out.end(reason, **more)

    return play


def calls(*tool_calls: tuple[str, str]) -> Play:
    """(name, arguments) of each call, in two pieces."""

    def play(out: Out, body: dict[str, Any]) -> None:
        out.start()
        for index, (name, arguments) in enumerate(tool_calls):
            half = len(arguments) // 2
            head = {"index": index, "id": f"id{index}", "type": "function"}
            out.delta(tool_calls=[{**head, "function": {"name": name, "arguments": arguments[:half]}}])
            out.delta(tool_calls=[{"index": index, "function": {"arguments": arguments[half:]}}])
        out.end("tool_calls")

    return play


def fails(status: int, message: str, **headers: str) -> Play:
    return lambda out, body: out.fail(status, message, **headers)


def hangs(*parts: str) -> Play:
    """Says the parts and then nothing more, without an end."""

    def play(out: Out, body: dict[str, Any]) -> None:
        out.start()
        for part in parts:
            out.delta(content=part)
        out.server.released.wait(30)

    return play


def breaks_off(*parts: str, rest: str = "") -> Play:
    """Says the parts, then `rest` as it is, and closes the connection."""

    def play(out: Out, body: dict[str, Any]) -> None:
        out.start()
        for part in parts:
            out.delta(content=part)
        out.raw(rest)

    return play


@contextmanager
def completion_server(*plays: Play, models: Sequence[dict[str, Any]] | None = ()) -> Iterator[CompletionServer]:
    """`models` None: it does not list any; () : one called test-model."""
    state = CompletionServer(list(plays))
    if models is None or models:
        state.models = None if models is None else list(models)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if state.models is None:
                return Out(self, state).fail(404, "no such page")
            return Out(self, state).json({"object": "list", "data": state.models})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.bodies.append(body)
            state.headers.append({name.lower(): value for name, value in self.headers.items()})
            play = state.plays.pop(0) if len(state.plays) > 1 else state.plays[0]
            play(Out(self, state), body)

        def log_message(self, *_: object) -> None:
            pass

    class Listener(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, *_: object) -> None:
            """A client that goes away is no fault."""

    listener = Listener(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{listener.server_port}/v1"
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.released.set()
        listener.shutdown()
        thread.join()
        listener.server_close()
