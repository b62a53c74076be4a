"""`agent`, `tools`, `run --tool` and `run --schema` from outside: streams, exit codes, JSON lines, Ctrl-C.

The engine is scripted: what a model says is not the point here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "scripted_program.py"
Program = Callable[..., subprocess.CompletedProcess[str]]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"calls": [{"name": name, "arguments": arguments}]}


DONE = {"pieces": ["It is ", "done."]}
WRITE = call("write_file", path="b.txt", content="x\n")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def command(tmp_path: Path, turns: Sequence[dict[str, Any]], *arguments: str) -> list[str]:
    script = tmp_path / "turns.json"
    script.write_text(json.dumps({"turns": turns}), encoding="utf-8")
    return [sys.executable, str(PROGRAM), str(script), *arguments]


def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GOINFER_CHAT_")}
    return kept | {"PYTHONWARNINGS": "error", "XDG_CONFIG_HOME": str(tmp_path / "config")}


@pytest.fixture
def program(tmp_path: Path, project: Path) -> Program:
    """`program(turns, *arguments, stdin="")`: runs it to its end in the project's folder."""

    def run(turns: Sequence[dict[str, Any]], *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(tmp_path, turns, *arguments),
            input=stdin,
            capture_output=True,
            text=True,
            cwd=project,
            env=environment(tmp_path),
            timeout=60,
        )

    return run


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


# A repository task


def test_a_failing_test_is_found_mended_and_run_again(program: Program, project: Path) -> None:
    (project / "stock.py").write_text("def total(items):\n    return sum(items[1:])\n")
    (project / "test_stock.py").write_text(
        "from stock import total\n\ndef test_total():\n    assert total([1, 2, 3]) == 6\n"
    )
    turns = [
        call("run_tests"),
        call("search", pattern="def total"),
        call("read_file", path="stock.py"),
        call("edit_file", path="stock.py", old="sum(items[1:])", new="sum(items)"),
        call("run_tests", path="test_stock.py"),
        {"pieces": ["total left the first item out; it sums all of them."]},
    ]
    done = program(turns, "agent", "--json", "--allow", "runs", "--allow", "edit_file", "mend the tests")
    assert done.returncode == 0, done.stderr
    assert (project / "stock.py").read_text() == "def total(items):\n    return sum(items)\n"
    results = [line for line in lines(done) if line["event"] == "result"]
    assert [result["name"] for result in results] == ["run_tests", "search", "read_file", "edit_file", "run_tests"]
    assert "assert 5 == 6" in results[0]["text"]
    assert results[1]["text"] == "stock.py:1:def total(items):"
    assert "1 passed" in results[4]["text"]
    *_, reply, end = lines(done)
    assert reply["text"] == "total left the first item out; it sums all of them."
    assert (end["how"], end["steps"], end["calls"], end["exit_code"]) == ("answered", 6, 5, 0)


# Output


def test_only_the_replies_go_to_standard_output(program: Program) -> None:
    turns = [{**call("list_files"), "pieces": ["Let me look."]}, DONE]
    done = program(turns, "agent", "what is here?")
    assert (done.returncode, done.stdout) == (0, "Let me look.\nIt is done.\n")
    shown = done.stderr.splitlines()
    assert "* list_files" in shown
    assert "  ok: no file in ." in shown
    assert any(line.startswith("step 1 of 25 | ") for line in shown)
    assert shown[-1].startswith("2 steps, 1 call, ")


def test_quiet_shows_the_replies_alone(program: Program) -> None:
    done = program([call("list_files"), DONE], "agent", "--quiet", "what is here?")
    assert (done.stdout, done.stderr) == ("It is done.\n", "")


def test_json_gives_a_line_for_each_event(program: Program, project: Path) -> None:
    (project / "a.txt").write_text("é\n")
    done = program([call("read_file", path="a.txt"), DONE], "agent", "--json", "read it")
    first, started, ended, last, end = lines(done)
    assert done.stdout.isascii()
    assert first["event"] == "reply"
    assert first["finish_reason"] == "tool_calls"
    assert first["tool_calls"] == [{"id": started["id"], "name": "read_file", "arguments": {"path": "a.txt"}}]
    assert started == {"event": "call", **first["tool_calls"][0]}
    assert (ended["event"], ended["status"], ended["text"]) == ("result", "ok", "a.txt, lines 1-1, to the end\né")
    assert (last["event"], last["text"], last["tool_calls"]) == ("reply", "It is done.", [])
    assert set(end) == {"event", "how", "exit_code", "steps", "calls", "read_tokens", "written_tokens"}


def test_the_task_may_come_from_standard_input(program: Program) -> None:
    assert program([DONE], "agent", stdin="do it\nwell\n").stdout == "It is done.\n"
    assert program([DONE], "agent", "-", stdin="do it\n").stdout == "It is done.\n"


def test_nothing_a_tool_printed_reaches_the_terminal_as_a_sequence(program: Program, project: Path) -> None:
    (project / "\x1b[2Ja.txt").write_text("")
    done = program([call("list_files", path="\x1b[31m"), call("list_files"), DONE], "agent", "look")
    assert "\x1b" not in done.stdout + done.stderr


# Exit codes


@pytest.mark.parametrize(
    ("turns", "arguments", "code"),
    [
        ([WRITE, DONE], ["--yes"], 0),
        ([WRITE, DONE], [], 6),
        ([WRITE, DONE], ["--yes", "--deny", "writes"], 0),
        ([call("list_files")], ["--max-steps", "2"], 5),
        ([call("list_files")], ["--token-budget", "1"], 5),
        ([call("list_files")], [], 5),
        ([call("read_file", path="nowhere"), DONE], [], 7),
        ([call("read_file", path="nowhere"), call("list_files"), DONE], [], 0),
        ([{"error": "engine"}], [], 1),
        ([call("list_files"), {"error": "context"}], [], 4),
    ],
)
def test_the_exit_code_says_how_it_ended(
    program: Program, turns: list[dict[str, Any]], arguments: list[str], code: int
) -> None:
    started = time.monotonic()
    done = program(turns, "agent", *arguments, "do it")
    assert done.returncode == code, done.stderr
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "arguments",
    [
        ["agent", "--tools", "no_such_tool", "do it"],
        ["agent", "--tools", "nowhere.py", "do it"],
        ["agent", "--allow", "no_such_tool", "do it"],
        ["agent", "--root", "nowhere", "do it"],
        ["agent", "--max-steps", "0", "do it"],
        ["agent", " "],
        ["run", "--tool", "no_such_tool", "do it"],
        ["run", "--tool", "search"],
        ["run", "--execute", "do it"],
        ["run", "--tool", "search", "--schema", "x", "do it"],
        ["run", "--schema", "nowhere.json", "do it"],
    ],
)
def test_wrong_usage_is_one_line_and_code_2(program: Program, arguments: list[str]) -> None:
    done = program([DONE], *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_ends_the_tool_and_all_it_started(tmp_path: Path, project: Path) -> None:
    turns = [call("run_command", command="sleep 5678.9 & sleep 5678.9", shell=True), DONE]
    process = subprocess.Popen(
        command(tmp_path, turns, "agent", "--yes", "wait"),
        cwd=project,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert process.stderr is not None
    while "* run_command" not in process.stderr.readline():
        pass
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, shown = process.communicate(timeout=20)
    assert time.monotonic() - started < 3
    assert process.returncode == 130
    assert "cancelled" in shown
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(b"5678.9" in line for line in running)


# One call


def test_a_forced_call_is_printed_alone(program: Program, project: Path) -> None:
    done = program([WRITE], "run", "--quiet", "--json", "--tool", "write_file", "make b.txt")
    assert (done.returncode, done.stderr) == (0, "")
    (shown,) = lines(done)
    assert shown == {"id": shown["id"], "name": "write_file", "arguments": {"path": "b.txt", "content": "x\n"}}
    assert not (project / "b.txt").exists()
    assert lines(program([WRITE], "run", "--tool", "write_file", "make b.txt"))[0]["name"] == "write_file"


def test_a_forced_call_is_run_where_it_may(program: Program, project: Path) -> None:
    arguments = ("run", "--quiet", "--tool", "write_file", "--execute", "make b.txt")
    refused = program([WRITE], *arguments)
    assert refused.returncode == 6
    assert "nobody can be asked" in refused.stdout
    done = program([WRITE], *arguments, "--yes")
    assert (done.returncode, done.stdout) == (0, "b.txt: made, 1 line, 2 bytes\n")
    assert (project / "b.txt").read_text() == "x\n"
    shown = lines(program([call("read_file", path="nowhere")], *arguments[:2], "--json", *arguments[2:]))
    assert shown[0]["result"]["status"] == "error"


def test_a_forced_call_that_was_cut_is_an_error_and_not_run(program: Program, project: Path) -> None:
    cut = {**WRITE, "pieces": ["x"]}
    done = program([cut], "run", "--tool", "write_file", "--execute", "--yes", "--max-tokens", "1", "make b.txt")
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.splitlines()[-1] == (
        "error: the call was cut before its end, so there is none; allow more --max-tokens"
    )
    assert not (project / "b.txt").exists()


def test_a_reply_under_a_schema_that_was_cut_has_an_exit_code_of_its_own(program: Program, project: Path) -> None:
    (project / "schema.json").write_text('{"type": "string"}', encoding="utf-8")
    turns = [{"pieces": ['"ab', 'cd"']}]
    cut = program(turns, "run", "--schema", "schema.json", "--max-tokens", "1", "a word")
    assert (cut.returncode, cut.stdout) == (5, '"ab\n')
    whole = program(turns, "run", "--schema", "schema.json", "--max-tokens", "2", "a word")
    assert (whole.returncode, whole.stdout) == (0, '"abcd"\n')
    text = program(turns, "run", "--max-tokens", "1", "a word")
    assert (text.returncode, text.stdout) == (0, '"ab\n')


def test_tools_in_a_script_of_turns(program: Program, project: Path) -> None:
    script = "/tools on\nmake b.txt\n/undo\n"
    done = program([WRITE, DONE], "--yes", "--quiet", stdin=script)
    assert (done.returncode, done.stdout) == (0, "It is done.\n")
    assert not (project / "b.txt").exists()
    refused = program([WRITE, DONE, DONE], "--tools", "on", "--quiet", stdin="make b.txt\nand then\n")
    assert (refused.returncode, refused.stdout) == (6, "It is done.\n")


# The list


def test_tools_lists_what_there_is_with_risk_and_arguments(program: Program, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from tools import tool\n@tool\ndef mine(a: int, b: str = 'x') -> str:\n    'Mine.'\n    return ''\n"
    )
    done = program([], "tools", "--tools", str(own))
    assert done.returncode == 0
    assert "edit_file  writes  (built in)" in done.stdout
    assert f"mine  runs  ({own})\n    Mine.\n    a (integer)\n    b (string, may be left out)\n" in done.stdout
    listed = lines(program([], "tools", "--json"))
    assert [tool["name"] for tool in listed][:2] == ["read_file", "list_files"]
    assert {tool["risk"] for tool in listed} == {"reads", "writes", "runs"}
    assert listed[0]["parameters"]["required"] == ["path"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--schema", '{"not": {}}', "x"], 'the schema: the keyword "not" is not supported (at the top)'),
        (
            ["run", "--schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "x"],
            "the schema cannot be followed: minimum (5) is greater than maximum (3)",
        ),
        (["run", "--tool", "no_such", "x"], "there is no tool 'no_such'"),
        (["--tools", "no_such", "run", "x"], "there is no tool 'no_such'"),
        (["--tools", "gone.py", "agent", "x"], "gone.py"),
        (["--allow", "no_such", "agent", "x"], "no_such"),
        (["--tools", "no_such"], "there is no tool 'no_such'"),
    ],
)
def test_what_is_wrong_with_a_schema_or_tools_is_said_before_a_model_is_looked_for(
    project: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "goinfer_chat", "--model", str(project / "none.gguf"), *words],
        input="x\n",
        capture_output=True,
        text=True,
        cwd=project,
        env=environment(tmp_path) | {"PYTHONPATH": str(PROGRAM.parent.parent)},
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "none.gguf" not in done.stderr
