"""Programs that tools run: no input, no terminal, an end in time with everything they started, no secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import Registry, Root, ToolContext, ToolResult
from tools.environment import safe_environment
from tools.output import HeadAndTail, bounded


@pytest.fixture
def context(tmp_path: Path) -> ToolContext:
    return ToolContext(root=Root(tmp_path), timeout_seconds=2, output_limit=2000)


@pytest.fixture
def run(context: ToolContext) -> Callable[..., ToolResult]:
    registry = Registry.built_in()
    return lambda command, shell=False: registry.call(
        "run_command", json.dumps({"command": command, "shell": shell}), context
    )


def processes(word: str) -> list[str]:
    """Command lines of running processes that hold the word."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if word in line and state != "Z":
            found.append(line)
    return found


def test_a_program_gives_its_exit_code_and_both_outputs_in_order(run: Any, tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), flush=True); print('oops', file=sys.stderr); sys.exit(3)"
    assert run(f'{sys.executable} -c "{code}"') == ToolResult("ok", f"exit code 3\n{tmp_path.resolve()}\noops\n")


def test_without_a_shell_nothing_of_a_shell_happens(run: Any, tmp_path: Path) -> None:
    assert run("echo $HOME '*' ;ls").text == "exit code 0\n$HOME * ;ls\n"
    assert run("echo a && touch b") == ToolResult(
        "error", "&& means something to a shell only; run it with shell true, or without &&"
    )
    assert not (tmp_path / "b").exists()
    assert run("echo a && touch b", shell=True).text == "exit code 0\na\n"
    assert (tmp_path / "b").exists()


def test_what_cannot_be_run_is_said(run: Any) -> None:
    assert run("no-such-program x") == ToolResult("error", "there is no program 'no-such-program' here")
    assert run("/etc/passwd").text == "'/etc/passwd' is not a program that may be run"
    assert run("echo 'a").text.startswith("the command cannot be split into words")
    assert run("echo a\0b").status == "error"
    assert run(" ") == ToolResult("error", "the command is empty")


@pytest.mark.parametrize(
    ("command", "shell", "wanted"),
    [
        ("cat", False, "exit code 0\n(it printed nothing)"),
        (f'{sys.executable} -c "input()"', False, "EOFError"),
        ("sh -c 'read x </dev/tty'", False, "/dev/tty"),
    ],
)
def test_a_program_that_asks_gets_no_answer_and_ends(run: Any, command: str, shell: bool, wanted: str) -> None:
    started = time.monotonic()
    result = run(command, shell)
    assert time.monotonic() - started < 2
    assert result.status == "ok"
    assert wanted in result.text


def test_when_its_time_is_up_everything_it_started_ends(run: Any) -> None:
    # The third one leaves process group and session.
    started = time.monotonic()
    result = run("echo begun; sleep 1234.5 & setsid sleep 1234.5 & trap '' TERM; sleep 1234.5", shell=True)
    assert time.monotonic() - started < 3
    assert result == ToolResult(
        "timeout", "it was ended, because it ran longer than 2 s; until then it printed:\nbegun\n"
    )
    assert processes("1234.5") == []


def test_what_a_program_leaves_running_ends_with_it(run: Any) -> None:
    started = time.monotonic()
    result = run("sleep 2345.6 & echo done", shell=True)
    assert time.monotonic() - started < 1.5
    assert result.text == "exit code 0\ndone\n\n[processes that it left running were ended]"
    assert processes("2345.6") == []


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="other systems show no process that left its group")


@ON_LINUX
@pytest.mark.parametrize("then", ["sleep 0.1", "sleep 60"])
def test_what_left_its_group_and_emptied_its_environment_ends_too(run: Any, then: str) -> None:
    result = run(f"env -i setsid sleep 4567.8 & {then}", shell=True)
    assert result.status == ("ok" if then == "sleep 0.1" else "timeout")
    assert ("left running" in result.text) == (result.status == "ok")
    assert processes("4567.8") == []


@ON_LINUX
@pytest.mark.parametrize("name", ["INT", "HUP", "TERM", "USR1"])
def test_what_a_program_sends_to_its_group_reaches_itself_alone(run: Any, name: str) -> None:
    command = f"trap 'echo got {name}' {name}; kill -{name} 0; env -i setsid sleep 4567.9 & echo on; exit 7"
    text = run(command, shell=True).text
    assert text == f"exit code 7\ngot {name}\non\n\n[processes that it left running were ended]"
    assert processes("4567.9") == []


TO_ITS_WARDEN = """
import os, signal, subprocess, time
warden = os.getppid()
pipes = [name for name in os.listdir(f"/proc/{warden}/fd") if int(name) > 2]
report = os.open(f"/proc/{warden}/fd/{pipes[0]}", os.O_WRONLY)
"""


@ON_LINUX
def test_a_program_that_ends_its_warden_keeps_nobody_waiting_and_ends_too(run: Any, tmp_path: Path) -> None:
    holds = "subprocess.Popen(['sleep', '4567.7'], env={}, process_group=0, pass_fds=[report], stdout=-3, stderr=-3)\n"
    (tmp_path / "ends-its-warden.py").write_text(
        f"{TO_ITS_WARDEN}{holds}os.kill(warden, signal.SIGKILL)\ntime.sleep(60)"
    )
    assert run(f"{sys.executable} ends-its-warden.py").text.startswith("ended by signal 9")
    assert processes("4567.7") == processes("ends-its-warden.py") == []


@ON_LINUX
@pytest.mark.parametrize("said", ["errno x y ", "exit 99999999999 0", "\\xff", "exit 1 1" * 9000])
def test_whatever_a_program_says_in_its_wardens_place_is_a_result(run: Any, tmp_path: Path, said: str) -> None:
    (tmp_path / "a.py").write_text(f"{TO_ITS_WARDEN}os.set_blocking(report, False)\nos.write(report, b'{said}')")
    assert run(f"{sys.executable} a.py").status == "ok"


def is_running(command: str) -> bool:
    return any(line.startswith(command) for line in processes(command))


@ON_LINUX
def test_what_a_program_does_ends_when_whoever_asked_for_it_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tools import Registry, Root, ToolContext\n"
        "Registry.built_in().call('run_command', '{\"command\": \"sleep 5678.9\"}', ToolContext(root=Root(Path())))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=env) as asker:
        until = time.monotonic() + 10
        while not is_running("sleep 5678.9") and time.monotonic() < until:
            time.sleep(0.02)
        asker.kill()
    while is_running("sleep 5678.9") and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_running("sleep 5678.9")


def test_a_pipe_that_is_closed_ends_who_writes_to_it_without_a_word(run: Any) -> None:
    assert run("yes | head -n 1", shell=True).text == "exit code 0\ny\n"


def test_a_program_that_closes_its_output_and_goes_on_ends_in_time(run: Any) -> None:
    started = time.monotonic()
    assert run("exec >&- 2>&-; sleep 3456.7", shell=True).status == "timeout"
    assert time.monotonic() - started < 3
    assert processes("3456.7") == []


def test_cancel_ends_a_program_at_once(tmp_path: Path) -> None:
    context = ToolContext(root=Root(tmp_path), timeout_seconds=60)
    threading.Timer(0.3, context.cancel.set).start()
    started = time.monotonic()
    result = Registry.built_in().call("run_command", '{"command": "sleep 4567.8"}', context)
    assert time.monotonic() - started < 1.5
    assert result == ToolResult("cancelled", "it was stopped by the user; until then it printed nothing")
    assert processes("4567.8") == []


def test_a_flood_of_output_is_bounded_and_its_bytes_are_made_text(run: Any) -> None:
    code = "import sys; w = sys.stdout.buffer.write; w(b'first\\n'); [w('é日\\n'.encode() * 1000) for _ in range(2000)]"
    result = run(f"{sys.executable} -c \"{code}; w(bytes([255, 10])); w(b'last')\"")
    assert len(result.text) < 2300
    assert result.text.startswith("exit code 0\nfirst\n")
    assert result.text.endswith("\ufffd\nlast")
    assert result.text.count("\ufffd") == 1
    assert " bytes left out ...]" in result.text


@pytest.mark.parametrize("limit", range(1, 60))
def test_head_and_tail_are_those_of_the_text_however_it_comes(limit: int) -> None:
    text = "".join(f"line {number} é\n" for number in range(30))
    output = HeadAndTail(limit)
    data = text.encode()
    for start in range(0, len(data), 7):
        output.add(data[start : start + 7])
    shown = output.text()
    head, _, tail = shown.partition("[... ")
    assert text.startswith(head.rstrip("\n"))
    assert text.endswith(tail.partition("left out ...]\n")[2])
    assert len(head) + len(tail) < limit + 80
    assert "\ufffd" not in shown


def test_short_output_is_whole() -> None:
    output = HeadAndTail(10)
    output.add(b"123456")
    output.add(b"7890")
    assert output.text() == "1234567890"
    assert bounded("1234567890", 10) == "1234567890"


def test_a_program_sees_no_secrets(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        "OPENAI_API_KEY": "k",
        "HF_TOKEN": "t",
        "AWS_SECRET_ACCESS_KEY": "s",
        "SSH_AUTH_SOCK": "a",
        "MY_THING": "m",
    }
    environ = {**secrets, "PATH": "/bin", "LC_ALL": "C", "TERM": "xterm", "HOME": "/home/x"}
    found = safe_environment(environ)
    assert not secrets.keys() & found.keys()
    assert (found["PATH"], found["LC_ALL"], found["TERM"], found["HOME"]) == ("/bin", "C", "dumb", "/home/x")
    assert safe_environment(environ, ["MY_THING", "TERM"]) | {"MY_THING": "m", "TERM": "xterm"} == safe_environment(
        environ, ["MY_THING", "TERM"]
    )
    monkeypatch.setenv("HF_TOKEN", "secret")
    context = ToolContext(root=Root(Path("/tmp")), timeout_seconds=5)
    assert "secret" not in Registry.built_in().call("run_command", '{"command": "env"}', context).text


def test_the_projects_tests_are_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it():\n    assert 1 == 2\n\ndef test_other():\n    pass\n")
    context = ToolContext(root=Root(tmp_path), timeout_seconds=30)
    registry = Registry.built_in()
    assert "1 failed, 1 passed" in registry.call("run_tests", "{}", context).text
    assert "1 passed" in registry.call("run_tests", '{"path": "test_it.py::test_other"}', context).text
    assert registry.call("run_tests", '{"path": "../x"}', context).status == "error"
    assert registry.call("run_tests", '{"path": "nowhere"}', context).status == "error"
    own = ToolContext(root=Root(tmp_path), timeout_seconds=30, test_command="echo 'my tests'")
    assert registry.call("run_tests", '{"path": "test_it.py"}', own).text == "exit code 0\nmy tests test_it.py\n"


def test_where_pytest_is_missing_unittest_runs(tmp_path: Path) -> None:
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S -E "$@"\n')
    python.chmod(0o755)
    (tmp_path / "test_it.py").write_text("import unittest\nclass T(unittest.TestCase):\n    def test_it(self): pass\n")
    context = ToolContext(root=Root(tmp_path), timeout_seconds=30)
    assert "Ran 1 test" in Registry.built_in().call("run_tests", "{}", context).text
