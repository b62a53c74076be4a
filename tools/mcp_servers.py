"""Tools of MCP servers, over a pipe to a program or over HTTP, with the official `mcp` package.

That package is asynchronous: one thread runs its loop and holds every connection, and calls come in from other threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from tools.environment import safe_environment
from tools.errors import ToolError, ToolSetupError
from tools.tool import Risk, Tool, ToolContext, ToolResult

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

CONNECT_SECONDS: Final = 20.0
CLOSE_SECONDS: Final = 6.0
"""The package gives a server that does not end by itself four seconds before it kills it."""
MAX_PAGES: Final = 100
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """How one server is reached: the command that starts it, or its address."""

    name: str
    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the program, besides those that are known to be harmless."""
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    risk: Risk = "runs"
    """What its tools may do, as the person sees it: what a server says about its own tools is not trusted."""
    reads: Sequence[str] = ()
    """Tools of it that only read."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ToolSetupError(f"MCP server {self.name}: give either its command or its url")
        if self.risk not in ("reads", "writes", "runs"):
            raise ToolSetupError(
                f"MCP server {self.name}: unknown risk {self.risk!r}; choose from: reads, writes, runs"
            )


class McpServers:
    """Connections to servers, kept until `close`. A context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._thread.start()
        self._ends: list[tuple[asyncio.Event, Future[None]]] = []

    def connect(self, server: McpServer) -> tuple[list[Tool], list[str]]:
        """The tools of a server, and what is wrong with those that cannot be offered.

        Raises ToolSetupError when the server cannot be reached.
        """
        ready: Future[tuple[Client, list[Any]]] = Future()
        end = asyncio.Event()
        # One task opens and closes a connection: the package allows no other.
        running = asyncio.run_coroutine_threadsafe(_hold(server, ready, end), self._loop)
        try:
            client, found = ready.result(CONNECT_SECONDS)
        except KeyboardInterrupt:
            running.cancel()
            raise
        except BaseException as error:
            running.cancel()
            raise ToolSetupError(f"MCP server {server.name} cannot be used: {_reason(error)}") from error
        self._ends.append((end, running))
        tools, problems = [], []
        for about in found:
            try:
                tools.append(self._tool(server, client, about))
            except ToolSetupError as error:
                problems.append(f"MCP server {server.name}: {error}")
        return tools, problems

    def close(self) -> None:
        """End every connection, and the programs behind them. May be called again."""
        if self._loop.is_closed():
            return
        deadline = time.monotonic() + CLOSE_SECONDS
        for end, _ in self._ends:
            self._loop.call_soon_threadsafe(end.set)
        for _, running in self._ends:
            with suppress(Exception):
                running.result(max(0.0, deadline - time.monotonic()))
        self._ends.clear()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1)
        if not self._loop.is_running():
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _tool(self, server: McpServer, client: Client, about: Any) -> Tool:
        def run(arguments: dict[str, Any], context: ToolContext) -> ToolResult:
            try:
                answer = self._await(client.call_tool(about.name, arguments), context)
            except (ToolError, ToolSetupError):
                raise
            except Exception as error:
                raise ToolError(f"MCP server {server.name}: {_reason(error)}") from error
            return answer if isinstance(answer, ToolResult) else _result(answer)

        return Tool(
            name=_name(server.name, about.name),
            description=about.description or about.title or about.name,
            parameters=about.input_schema,
            risk="reads" if about.name in server.reads else server.risk,
            run=run,
            source=f"MCP server {server.name}",
        )

    def _await(self, call: Coroutine[Any, Any, _Value], context: ToolContext) -> _Value | ToolResult:
        """What a call gives, or how it ended without a result; the server is told of a call that was left early."""
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        deadline = time.monotonic() + context.timeout_seconds
        while True:
            try:
                return future.result(0.05)
            except FutureTimeoutError:
                if future.done():
                    raise  # the server's own
            if context.cancel.is_set():
                future.cancel()
                return ToolResult("cancelled", "stopped by the user")
            if time.monotonic() > deadline:
                future.cancel()
                return ToolResult("timeout", f"the server took longer than {context.timeout_seconds:g} s")


async def _hold(server: McpServer, ready: Future[tuple[Client, list[Any]]], end: asyncio.Event) -> None:
    """Connect, give client and tools to `ready`, and stay connected until `end`."""
    async with AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(await _client(server, stack))
            ready.set_result((client, await _list(client)))
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for it
            ready.set_exception(error)
            return
        await end.wait()


async def _client(server: McpServer, stack: AsyncExitStack) -> Client:
    from mcp import Client, StdioServerParameters, stdio_client

    # Without a handler of its own, what the package logs of a server's lines goes to the terminal.
    logging.getLogger("mcp").addHandler(logging.NullHandler())

    if server.url is not None:
        from httpx2 import AsyncClient, Timeout
        from mcp.client.streamable_http import streamable_http_client

        # A server may take as long as a call may; reading has no limit of its own.
        http = await stack.enter_async_context(
            AsyncClient(headers=dict(server.headers), timeout=Timeout(30.0, read=None))
        )
        return Client(streamable_http_client(server.url, http_client=http))
    program, *arguments = server.command
    parameters = StdioServerParameters(
        command=program, args=arguments, env={**safe_environment(), **server.environment}
    )
    # What a server says besides the protocol would go to the middle of the screen.
    log = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    return Client(stdio_client(parameters, errlog=log))


async def _list(client: Client) -> list[Any]:
    found: list[Any] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return found


def _result(answer: CallToolResult) -> ToolResult:
    """Texts as they are; other content is named, not shown."""
    parts = []
    for content in answer.content:
        match content.type:
            case "text":
                parts.append(content.text)
            case "resource" if hasattr(content.resource, "text"):
                parts.append(content.resource.text)
            case kind:
                parts.append(f"[{kind}, which is not shown]")
    if not parts and answer.structured_content is not None:
        parts.append(json.dumps(answer.structured_content, ensure_ascii=False))
    text = "\n".join(parts) or "(the server gave an empty answer)"
    return ToolResult("error" if answer.is_error else "ok", text)


def _name(server: str, tool: str) -> str:
    """Both names, so that two servers may have tools of one name."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", f"{server}_{tool}")[:64]


def _reason(error: BaseException) -> str:
    """The first cause of a group of errors, on one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, FutureTimeoutError):
        return f"it did not answer within {CONNECT_SECONDS:g} s"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
