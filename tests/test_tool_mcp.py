"""Tools of MCP servers: a real small server, over a pipe and over HTTP."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import Registry, Root, ToolContext, ToolSetupError
from tools.mcp_servers import McpServer, McpServers

SERVER = Path(__file__).parent / "mcp_test_server.py"


@pytest.fixture(scope="module")
def servers() -> Iterator[McpServers]:
    with McpServers() as servers:
        yield servers


@pytest.fixture(scope="module")
def registry(servers: McpServers) -> Registry:
    server = McpServer(name="test", command=(sys.executable, str(SERVER)), environment={"GIVEN": "yes"}, reads=("add",))
    found, problems = servers.connect(server)
    assert problems == []
    return Registry(found)


@pytest.fixture
def context(tmp_path: Path) -> ToolContext:
    return ToolContext(root=Root(tmp_path), timeout_seconds=10)


def test_the_tools_of_a_server_are_tools_under_its_name(registry: Registry) -> None:
    assert registry.names == ["test_add", "test_fail", "test_sleep", "test_what_is-it"]
    add = registry.get("test_add")
    assert (add.risk, registry.get("test_fail").risk) == ("reads", "runs")
    assert (add.description, add.source) == ("Add two numbers.", "MCP server test")
    assert add.parameters["required"] == ["a", "b"]


def test_a_call_gives_the_servers_answer(registry: Registry, context: ToolContext) -> None:
    result = registry.call("test_add", '{"a": 2, "b": 3}', context)
    assert (result.status, result.text) == ("ok", "5")
    wrong = registry.call("test_add", '{"a": 2}', context)
    assert (wrong.status, wrong.text) == ("error", "wrong arguments: 'b' is a required property")


def test_a_tool_that_fails_on_the_server_is_a_result(registry: Registry, context: ToolContext) -> None:
    result = registry.call("test_fail", '{"text": "not today"}', context)
    assert result.status == "error"
    assert "not today" in result.text


def test_a_server_that_takes_too_long_and_one_that_is_cancelled(registry: Registry, tmp_path: Path) -> None:
    context = ToolContext(root=Root(tmp_path), timeout_seconds=0.3)
    assert registry.call("test_sleep", '{"seconds": 1}', context).status == "timeout"
    context = ToolContext(root=Root(tmp_path), timeout_seconds=10)
    threading.Timer(0.2, context.cancel.set).start()
    assert registry.call("test_sleep", '{"seconds": 1}', context).status == "cancelled"
    assert registry.call("test_add", '{"a": 1, "b": 1}', ToolContext(root=Root(tmp_path))).text == "2"


def test_a_server_gets_what_it_was_given_and_no_secrets(
    servers: McpServers, context: ToolContext, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    found, _ = servers.connect(McpServer(name="second", command=(sys.executable, str(SERVER))))
    second = Registry(found)
    assert registry.call("test_what_is-it", '{"name": "GIVEN"}', context).text == "yes"
    assert second.call("second_what_is-it", '{"name": "HF_TOKEN"}', context).text == "not set"


def test_a_server_that_cannot_be_used_is_one_error(servers: McpServers) -> None:
    for command in (("no-such-program",), (sys.executable, "-c", "")):
        with pytest.raises(ToolSetupError, match="MCP server broken cannot be used: "):
            servers.connect(McpServer(name="broken", command=command))
    with pytest.raises(ToolSetupError, match="MCP server broken cannot be used: "):
        servers.connect(McpServer(name="broken", url="http://127.0.0.1:9/mcp"))
    with pytest.raises(ToolSetupError, match="give either its command or its url"):
        McpServer(name="both", command=("x",), url="y")


def test_a_server_that_prints_something_else_writes_nothing_on_the_terminal() -> None:
    script = (
        "from tools.mcp_servers import *\n"
        "server = McpServer(name='noisy', command=('sh', '-c', 'echo noise; exit 3'))\n"
        "with McpServers() as servers:\n"
        "    try:\n"
        "        servers.connect(server)\n"
        "    except ToolSetupError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=SERVER.parent.parent)
    assert done.stdout.startswith("MCP server noisy cannot be used: ")
    assert done.stderr == ""


def test_a_server_that_died_is_a_result(context: ToolContext, tmp_path: Path) -> None:
    told_to_die = tmp_path / "die"
    code = (
        "import os, runpy, threading, time\n"
        "def die():\n"
        f"    while not os.path.exists({str(told_to_die)!r}): time.sleep(0.02)\n"
        "    os._exit(0)\n"
        "threading.Thread(target=die, daemon=True).start()\n"
        f"runpy.run_path({str(SERVER)!r}, run_name='__main__')"
    )
    with McpServers() as servers:
        found, _ = servers.connect(McpServer(name="dying", command=(sys.executable, "-c", code)))
        registry = Registry(found)
        assert registry.call("dying_add", '{"a": 1, "b": 1}', context).status == "ok"
        told_to_die.touch()
        last = time.monotonic() + 20
        while (result := registry.call("dying_add", '{"a": 1, "b": 1}', context)).status == "ok":
            assert time.monotonic() < last
        assert result.status == "error"


def test_the_end_of_the_connections_ends_the_servers() -> None:
    servers = McpServers()
    servers.connect(McpServer(name="test", command=(sys.executable, str(SERVER))))
    before = set(threading.enumerate())
    servers.close()
    servers.close()
    assert not any(thread.name == "mcp" and thread.is_alive() for thread in before - set(threading.enumerate()))


def test_a_server_is_reached_over_http(servers: McpServers, context: ToolContext) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(SERVER), str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        found, _ = servers.connect(
            McpServer(name="web", url=f"http://127.0.0.1:{port}/mcp", headers={"X-Test": "1"}, risk="reads")
        )
        registry = Registry(found)
        assert registry.get("web_add").risk == "reads"
        assert registry.call("web_add", '{"a": 2, "b": 3}', context).text == "5"
    finally:
        process.terminate()
        process.wait()
