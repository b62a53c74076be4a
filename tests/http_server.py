"""A server of the program on the loopback, in this process, with what tests look at; and requests by hand."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import load
from engine.api import SamplingParams
from engine.local import LocalEngine
from goinfer_chat.server.admission import Admission
from goinfer_chat.server.app import Application, make_application
from goinfer_chat.server.command import BackgroundServer
from goinfer_chat.server.security import Limits
from goinfer_chat.server.served import Models, Served
from goinfer_chat.server.transcripts import Transcripts

GREEDY = SamplingParams(temperature=0)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """What a stream's `data:` lines hold; the last is "[DONE]" where the form has it."""
        lines = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass
class Running:
    """A server that runs."""

    port: int
    application: Application
    served: Served

    @property
    def engine(self) -> LocalEngine:
        assert isinstance(self.served.engine, LocalEngine)
        return self.served.engine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 20)

    def send(
        self,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        method: str | None = None,
    ) -> socket.socket:
        """A request whose answer is still to be read. A body that is no bytes is sent as JSON."""
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"Host": f"127.0.0.1:{self.port}", "Content-Length": str(len(raw)), "Connection": "close"}
        fields |= headers or {}
        method = method or ("GET" if body is None else "POST")
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        connection = self.connect()
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode() + raw)
        return connection

    def ask(self, path: str, body: object = None, headers: Mapping[str, str] | None = None, **more: Any) -> Answer:
        with self.send(path, body, headers, **more) as connection:
            return read_answer(connection)

    def chat(self, text: str | list[Any], max_tokens: int = 8, **fields: Any) -> Answer:
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, **fields}
        return self.ask("/v1/chat/completions", body)

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        lines = self.ask("/metrics").body.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def wait_until(self, condition: Callable[[], bool], seconds: float = 5.0) -> float:
        """How long it took."""
        started = time.perf_counter()
        while not condition():
            assert time.perf_counter() - started < seconds, "it never came true"
            time.sleep(0.005)
        return time.perf_counter() - started

    @property
    def is_idle(self) -> bool:
        return not self.engine._scheduler._running and not self.served.admission.num_running


def read_answer(connection: socket.socket, raw: bytes = b"") -> Answer:
    """All of an answer, of which `raw` was read; the connection is closed by the server, or the length is told."""
    while b"\r\n\r\n" not in raw and (part := connection.recv(65536)):
        raw += part
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = headers.get("content-length")
    while (length is None or len(body) < int(length)) and (part := connection.recv(65536)):
        body += part
    if headers.get("transfer-encoding") == "chunked":
        body = _unchunked(body)
    return Answer(int(status.split()[1]), headers, body)


def _unchunked(body: bytes) -> bytes:
    found = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        number = int(size, 16)
        found, body = found + rest[:number], rest[number + 2 :]
        if not number:
            break
    return found


@contextmanager
def running_server(
    path: Path,
    *,
    name: str = "tiny",
    max_queue: int = 16,
    max_concurrent: int = 4,
    limits: Limits | None = None,
    api_key: str | None = None,
    origins: tuple[str, ...] = (),
    folder: Path | None = None,
    listening: Mapping[str, Any] | None = None,
    **loading: Any,
) -> Iterator[Running]:
    """A server with one model. `listening`: what `BackgroundServer` is told."""
    loading.setdefault("context_size", 2048)
    with load(path, max_concurrent=max_concurrent, kv_folder=folder, **loading) as engine:
        transcripts = Transcripts(None if folder is None else folder / "replies.jsonl")
        served = Served(
            name=name,
            engine=engine,
            admission=Admission(max_concurrent, max_queue),
            texts=Admission(1, max_queue),
            transcripts=transcripts,
        )
        application = make_application(
            Models([served]), limits=limits or Limits(), api_key=api_key, origins=origins, check_host=api_key is None
        )
        with BackgroundServer(application, **(listening or {})) as server:
            yield Running(server.port, application, served)
