"""The remote backend with servers that are real: our own, and llama.cpp's where a Python has it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from http_server import Running, running_server
from test_remote import ADD, told

from engine.api import Event, Finished, Message, NamedTool, Reply, Request, SamplingParams, TextDelta, ToolCallReady
from engine.errors import EngineError
from engine.remote import RemoteEngine

GREEDY = SamplingParams(temperature=0)
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
PEER = os.environ.get("GOINFER_CHAT_PEER_PYTHON")


@pytest.fixture(scope="module")
def server(model_path: Callable[[str], Path]) -> Iterator[Running]:
    with running_server(model_path("smollm2-135m"), name="served") as server:
        yield server


@pytest.fixture
def engine(server: Running) -> Iterator[RemoteEngine]:
    with RemoteEngine.connect(f"{server.url}/v1") as engine:
        yield engine


def user(text: str) -> Message:
    return Message(role="user", content=text)


def asked(*messages: Message, max_tokens: int = 12, **options: object) -> Request:
    options.setdefault("sampling", GREEDY)
    return Request(messages=messages, max_tokens=max_tokens, **options)


def reply_of(engine: RemoteEngine, request: Request) -> Reply:
    return told(list(engine.generate(request)))[2]


def test_text_comes_in_pieces_and_is_what_the_engine_says_itself(server: Running, engine: RemoteEngine) -> None:
    assert (engine.info.name, engine.info.context_size) == ("served", server.engine.info.context_size)
    request = asked(user("Name three colours."))
    events: list[Event] = list(engine.generate(request))
    text, notices, reply = told(events)
    local = told(list(server.engine.generate(request)))[2]
    assert (text, reply.text, reply.finish_reason, notices) == (local.text, local.text, "length", [])
    assert sum(isinstance(event, TextDelta) for event in events) > 1


def test_reused_tokens_grow_with_the_turns_and_every_figure_is_told(engine: RemoteEngine) -> None:
    messages, reused, whole = [user("What is a lighthouse?")], [], 0
    for text in ("And a harbour?", "And a ship?", "And a sail?"):
        reply = reply_of(engine, asked(*messages))
        stats = reply.stats
        assert stats.prefill_reused_tokens is not None
        assert stats.prompt_tokens is not None
        assert stats.prefill_reused_tokens >= whole - 1
        reused.append(stats.prefill_reused_tokens)
        whole = stats.prompt_tokens + (stats.completion_tokens or 0)
        assert (stats.context_used, stats.completion_tokens) == (whole, 12)
        assert stats.prefill_tokens == stats.prompt_tokens - stats.prefill_reused_tokens
        assert stats.kv_bytes
        assert stats.ttft_ms
        assert stats.seed is not None
        messages += [reply.as_message(), user(text)]
    assert stats.prefill_tok_s
    assert reused == sorted(set(reused))


def test_speculation_of_the_server_is_told(engine: RemoteEngine) -> None:
    request = asked(user("Repeat: one two one two one two one two one two one two"), max_tokens=60)
    stats = reply_of(engine, request).stats
    assert stats.draft_tokens is not None
    assert stats.draft_accepted is not None
    assert stats.tokens_per_step


def test_a_forced_call_is_whole_valid_and_its_result_goes_on(engine: RemoteEngine) -> None:
    question = user("What is 2 + 3?")
    request = asked(question, max_tokens=80, tools=(ADD,), tool_choice=NamedTool(name="add"))
    events = list(engine.generate(request))
    text, notices, reply = told(events)
    (call,) = reply.tool_calls
    assert (text, notices, reply.finish_reason, call.name) == ("", [], "tool_calls", "add")
    assert {type(value) for value in json.loads(call.arguments).values()} == {int}
    assert [event.call for event in events if isinstance(event, ToolCallReady)] == [call]
    result = Message(role="tool", content="5", tool_call_id=call.id, name="add")
    after = reply_of(engine, asked(question, reply.as_message(), result, tools=(ADD,)))
    assert (after.stats.prefill_reused_tokens or 0) >= (reply.stats.prompt_tokens or 0)


def test_a_schema_is_kept(engine: RemoteEngine) -> None:
    _, notices, reply = told(list(engine.generate(asked(user("Ann is 31."), max_tokens=40, json_schema=SCHEMA))))
    assert notices == []
    assert 0 <= json.loads(reply.text)["age"] <= 99


def test_a_schema_that_the_server_cannot_follow_is_an_error_that_says_why(engine: RemoteEngine) -> None:
    with pytest.raises(EngineError, match='keyword "not" is not supported'):
        list(engine.generate(asked(user("x"), json_schema={"not": {"type": "string"}})))


def test_a_cancelled_reply_keeps_its_words_and_frees_the_server(server: Running, engine: RemoteEngine) -> None:
    request = asked(
        user("Count to a thousand."), max_tokens=2000, sampling=SamplingParams(temperature=0, logit_bias={2: -100.0})
    )
    text, cancelled = "", 0.0
    for event in engine.generate(request):
        if isinstance(event, TextDelta):
            text += event.text
            if len(text) > 20 and not cancelled:
                request.cancel.set()
                cancelled = time.perf_counter()
    assert time.perf_counter() - cancelled < 1
    assert isinstance(event, Finished)
    assert event.reply.finish_reason == "cancelled"
    assert event.reply.text.startswith(text[:20])
    assert server.wait_until(lambda: server.is_idle) < 1


def test_ctrl_c_ends_the_program_and_the_work_of_the_server(server: Running, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "goinfer_chat", "run", "Count to a thousand.", "--max-tokens", "4000"]
    flags = ["--temperature", "0", "--backend", "remote", "--base-url", f"{server.url}/v1", "--session-dir", "kept"]
    environment = os.environ | {"GOINFER_CHAT_CONFIG": "none"}
    process = subprocess.Popen(
        [*command, *flags, "--frequency-penalty", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=environment,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(1)
        assert not server.is_idle
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert b"Traceback" not in said
    assert server.wait_until(lambda: server.is_idle) < 1


@pytest.fixture
def peer(model_path: Callable[[str], Path], tmp_path: Path) -> Iterator[str]:
    """The address of llama_cpp.server."""
    if PEER is None:
        pytest.skip("GOINFER_CHAT_PEER_PYTHON names no Python with llama-cpp-python")
    if subprocess.run([PEER, "-c", "import llama_cpp.server.app"], capture_output=True).returncode:
        pytest.skip("llama-cpp-python is there without its server: pip install 'llama-cpp-python[server]'")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [PEER, "-m", "llama_cpp.server", "--model", str(model_path("smollm2-135m")), "--port", str(port)]
    with (tmp_path / "peer.log").open("wb") as log:
        process = subprocess.Popen([*command, "--n_ctx", "2048"], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}/v1"
        for _ in range(300):
            assert process.poll() is None, (tmp_path / "peer.log").read_text()
            with suppress(OSError), urllib.request.urlopen(f"{url}/models", timeout=2):
                break
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_llama_cpp_s_server_answers_in_turn(peer: str) -> None:
    with RemoteEngine.connect(peer) as engine:
        first = reply_of(engine, asked(user("Name a colour.")))
        second = reply_of(engine, asked(user("Name a colour."), first.as_message(), user("Another?")))
    assert first.text
    assert second.text
