"""`goinfer-chat serve` as a process: what it prints, how it ends, what it refuses to start with."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from http_server import read_answer
from test_server_limits import KEY
from tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", "qwen2", context_size=8192)


class Process:
    def __init__(self, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-m", "goinfer_chat", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.fullmatch(r"listening on http://127\.0\.0\.1:(\d+)\n", line)
        assert found, line + self.end(signal.SIGKILL)[1]
        self.port = int(found[1])

    def send(self, path: str, body: Any, **headers: str) -> Any:
        import socket

        raw = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(raw)}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        connection = socket.create_connection(("127.0.0.1", self.port), 20)
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
        return connection

    def ask(self, path: str, body: Any, **headers: str) -> Any:
        with self.send(path, body, **headers) as connection:
            return read_answer(connection)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit code and standard error."""
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=30)
        return self.process.returncode, said


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[Process]:
    started = Process(*arguments, **environment)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.end(signal.SIGKILL)
        for stream in (started.process.stdout, started.process.stderr):
            if stream is not None:
                stream.close()


def asked(max_tokens: int, *more: str, stream: bool = False) -> dict[str, Any]:
    messages = [
        {"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(("tell me more", *more))
    ]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": stream}


def test_several_models_have_names_and_a_restart_finds_the_conversation(tiny: Path, tmp_path: Path) -> None:
    flags = ("--model", f"one={tiny}", "--model", f"two={tiny}", "--session-dir", str(tmp_path / "kept"))
    with process(*flags) as server:
        first = server.ask("/v1/chat/completions", {**asked(20), "model": "one"}).json
        other = server.ask("/v1/chat/completions", {**asked(20), "model": "two"}).json
        assert first["choices"] == other["choices"]
        assert other["usage"]["prefill_reused_tokens"] == 0
        code, said = server.end()
    assert code == 0
    assert "session reuse: on (4 conversations kept prefilled)" in said
    assert said.endswith("stopped\n")
    assert str(tiny.parent) not in said
    text = first["choices"][0]["message"]["content"]
    with process(*flags) as server:
        further = server.ask("/v1/chat/completions", {**asked(5, text, "and then"), "model": "one"}).json
        assert further["timings"]["restored_tokens"] == first["usage"]["total_tokens"]
        assert server.end(signal.SIGINT)[0] == 0


def test_a_client_that_changes_models_gets_what_each_says_of_the_same_words(tiny: Path, tmp_path: Path) -> None:
    """Nothing of the first model answers, and back with it only what still matches is used again."""
    other = write_tiny_model(tmp_path / "other.gguf", "llama", context_size=2048, seed=7)
    words: list[str] = []
    with process("--model", f"one={tiny}", "--model", f"two={other}") as server:
        seen = []
        for number, model in enumerate(("one", "two", "one")):
            body = {**asked(12, *words), "model": model}
            seen.append((body, server.ask("/v1/chat/completions", body).json))
            words += [seen[-1][1]["choices"][0]["message"]["content"].strip(), f"and then {number}"]
        server.end()
    assert seen[1][1]["usage"]["prefill_reused_tokens"] == 0
    assert seen[2][1]["usage"]["prefill_reused_tokens"] > 0
    for body, answer in seen:
        with process("--model", f"{body['model']}={other if body['model'] == 'two' else tiny}") as alone:
            said = alone.ask("/v1/chat/completions", body).json
            alone.end()
        assert said["choices"] == answer["choices"]


def test_what_runs_when_it_is_asked_to_end_comes_to_its_end_or_is_saved(tiny: Path, tmp_path: Path) -> None:
    flags = ("--model", str(tiny), "--session-dir", str(tmp_path), "--ctx", "8192")
    with process(*flags) as server, server.send("/v1/chat/completions", asked(8000, stream=True)) as connection:
        begun = connection.recv(4096)
        assert b"200 OK" in begun
        time.sleep(0.3)
        started = time.perf_counter()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        code, _ = server.end(signal.SIGTERM)  # the second one does not wait for the reply
        assert code == 0
        assert time.perf_counter() - started < 4
        rest = b""
        while part := connection.recv(65536):
            rest += part
        assert b"the server is shutting down" in rest
    saved = list((tmp_path / "server-tiny").glob("*.giw-kv"))
    assert len(saved) == 1
    assert saved[0].stat().st_size > 50_000


def test_what_a_kill_cut_off_is_asked_again_and_goes_on_from_its_file(tiny: Path, tmp_path: Path) -> None:
    flags = ("--model", str(tiny), "--session-dir", str(tmp_path))
    with process(*flags) as server:
        first = server.ask("/v1/chat/completions", asked(40)).json
        text = first["choices"][0]["message"]["content"]
        with server.send("/v1/chat/completions", asked(4000, text, "and more", stream=True)) as connection:
            for _ in range(20):
                assert connection.recv(4096)
            server.end(signal.SIGKILL)
    with process(*flags) as server:
        again = server.ask("/v1/chat/completions", asked(20, text, "and more")).json
        assert again["timings"]["restored_tokens"] >= first["usage"]["total_tokens"]
        assert server.end()[0] == 0
    with process("--model", str(tiny), GOINFER_CHAT_SESSION_DIR="") as server:
        server.ask("/v1/chat/completions", asked(40))
        assert server.ask("/v1/chat/completions", asked(20, text, "and more")).json["choices"] == again["choices"]


def test_a_short_reply_is_waited_for(tiny: Path) -> None:
    with process("--model", str(tiny)) as server:
        with server.send("/v1/chat/completions", asked(600)) as connection:
            time.sleep(0.1)
            server.process.send_signal(signal.SIGTERM)
            answer = read_answer(connection)
        assert answer.status == 200
        assert answer.json["usage"]["completion_tokens"] == 600
        assert server.process.wait(10) == 0


def test_a_key_comes_from_a_variable_or_a_file_and_is_never_said(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    for flags, environment in (((), {"GOINFER_CHAT_API_KEY": KEY}), (("--api-key-file", str(file)), {})):
        with process("--model", str(tiny), *flags, **environment) as server:
            assert server.ask("/v1/chat/completions", asked(1)).status == 401
            assert server.ask("/v1/chat/completions", asked(1), Authorization=f"Bearer {KEY}").status == 200
            assert KEY not in Path(f"/proc/{server.process.pid}/cmdline").read_text() or sys.platform != "linux"
            assert KEY not in server.end()[1]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--host", "0.0.0.0"], "lets others reach this server: give it a key"),
        (["--max-concurrent", "0"], "max-concurrent must be 1 or more"),
        (["--model", "a=x.gguf", "--model", "a=y.gguf"], "two models have the name a"),
        (["--port", "70000"], "port must be at most 65535"),
        (["--api-key", "x", "--api-key-file", "y"], "give two keys"),
        (["--api-key-file", "/nowhere/key"], "No such file"),
    ],
)
def test_what_cannot_be_obeyed_is_one_line_and_exit_code_2(flags: list[str], text: str) -> None:
    command = [sys.executable, "-m", "goinfer_chat", "serve", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert result.returncode == 2
    assert text in result.stderr
    assert len(result.stderr.splitlines()) == 1 + ("--api-key" in flags and "--api-key-file" not in flags)


def test_a_port_that_is_taken_is_one_line(tiny: Path) -> None:
    with process("--model", str(tiny)) as server:
        command = [sys.executable, "-m", "goinfer_chat", "serve", "--model", str(tiny), "--port", str(server.port)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert result.returncode == 2
        assert f"cannot listen on 127.0.0.1 port {server.port}" in result.stderr
