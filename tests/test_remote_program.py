"""The program with a server behind it: the same prompts, tools, conversations and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from completion_server import CompletionServer, breaks_off, calls, completion_server, fails, says
from tiny_models import write_tiny_model


def program(
    server: CompletionServer | None, folder: Path, *arguments: str, script: str = "", **environ: str
) -> subprocess.CompletedProcess[str]:
    remote = [] if server is None else ["--backend", "remote", "--base-url", server.url]
    return subprocess.run(
        [sys.executable, "-m", "goinfer_chat", *arguments, *remote, "--session-dir", str(folder / "kept")],
        input=script,
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"GOINFER_CHAT_CONFIG": "none"} | environ,
    )


def test_turns_of_a_script_go_to_the_server_and_each_prompt_begins_with_the_last(tmp_path: Path) -> None:
    with completion_server(says("one"), says("two"), says("three")) as server:
        done = program(server, tmp_path, "--system", "be brief", script="a\nb\nc\n")
    assert (done.returncode, done.stdout) == (0, "one\ntwo\nthree\n")
    first, second, third = (body["messages"] for body in server.bodies)
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert third[0] == {"role": "system", "content": "be brief"}
    assert third[-2:] == [{"role": "assistant", "content": "two"}, {"role": "user", "content": "c"}]


def test_json_has_null_for_what_the_server_does_not_tell(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    with completion_server(says("hello"), says("hello", usage=usage)) as server:
        silent, telling = (
            json.loads(program(server, tmp_path, "run", "hi", "--json").stdout.splitlines()[-1]) for _ in range(2)
        )
    assert (silent["text"], silent["prompt_tokens"], silent["completion_tokens"]) == ("hello", None, None)
    assert (telling["prompt_tokens"], telling["prefill_reused_tokens"], telling["completion_tokens"]) == (7, None, 2)


def test_the_agent_runs_tools_that_a_server_calls(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("the code is 4711\n")
    plays = calls(("read_file", '{"path": "notes.txt"}')), says("The code is 4711.")
    with completion_server(*plays) as server:
        done = program(server, tmp_path, "agent", "What is the code in notes.txt?")
    assert done.returncode == 0, done.stderr
    assert "The code is 4711." in done.stdout
    asked, answered = (body["messages"] for body in server.bodies)
    assert answered[: len(asked)] == asked
    assert answered[-2]["tool_calls"][0]["function"]["name"] == "read_file"
    assert "the code is 4711" in answered[-1]["content"]


def test_a_conversation_goes_on_with_a_local_model_and_back_with_the_server(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny.gguf", "llama")
    with completion_server(says("from afar"), says("again")) as server:
        assert program(server, tmp_path, "--save", "work", script="first\n").stdout == "from afar\n"
        local = program(
            None, tmp_path, "--resume", "work", "--model", str(model), "--max-tokens", "4", "--json", script="second\n"
        )
        assert local.returncode == 0, local.stderr
        here = json.loads(local.stdout.splitlines()[-1])
        assert here["prefill_reused_tokens"] == 0
        done = program(server, tmp_path, "--resume", "work", script="third\n")
    assert (done.returncode, done.stdout) == (0, "again\n")
    said = [(message["role"], message["content"]) for message in server.bodies[1]["messages"]]
    assert said == [
        ("user", "first"),
        ("assistant", "from afar"),
        ("user", "second"),
        ("assistant", here["text"]),
        ("user", "third"),
    ]


def test_a_reply_that_broke_off_is_kept_and_the_next_turn_goes_on(tmp_path: Path) -> None:
    with completion_server(breaks_off("half"), says("whole")) as server:
        done = program(server, tmp_path, script="a\nb\n")
    assert (done.returncode, done.stdout) == (0, "half\nwhole\n")
    assert "broke off" in done.stderr
    assert [m["content"] for m in server.bodies[1]["messages"]] == ["a", "half", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "remote"], "--backend remote needs --base-url URL"),
        (["--base-url", "http://127.0.0.1:9/v1"], "--base-url needs --backend remote"),
        (["--backend", "remote", "--base-url", "http://127.0.0.1:9/v1"], "cannot be reached"),
    ],
)
def test_a_server_that_cannot_be_used_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = program(None, tmp_path, "run", "hi", *arguments)
    assert done.returncode != 0
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert message in done.stderr


def test_control_sequences_of_a_server_do_not_reach_the_terminal(tmp_path: Path) -> None:
    with completion_server(says("a\x1b[31mred"), fails(400, "bad\x1b[2J")) as server:
        first = program(server, tmp_path, "run", "hi")
        second = program(server, tmp_path, "run", "hi")
    assert "\x1b" not in first.stdout + first.stderr + second.stderr
    assert second.returncode == 1


def test_the_key_comes_from_the_environment_and_is_nowhere_else(tmp_path: Path) -> None:
    with completion_server(says("ok")) as server:
        done = program(
            server, tmp_path, "--save", "work", script="hi\n/params\n", GOINFER_CHAT_API_KEY="sk-very-secret"
        )
    assert server.headers[0]["authorization"] == "Bearer sk-very-secret"
    assert "sk-very-secret" not in done.stdout + done.stderr
    kept = b"".join(path.read_bytes() for path in (tmp_path / "kept").rglob("*") if path.is_file())
    assert b"sk-very-secret" not in kept
