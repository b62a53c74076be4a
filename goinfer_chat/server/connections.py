"""Connections: how many there may be, and how long one may ask nothing.

uvicorn waits for ever for the head of a request, and answers 503 to everybody when as many connections are open as may
be. So a client that opens many and says nothing would shut all others out. Here the one that has been idle for longest
gives way to a new one, and a head has its time, however slowly its bytes come.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from goinfer_chat.server.errors import ApiError

ACCEPT_AT_ONCE = 64
"""Connections that are taken in before any of them is looked at."""

MAX_CONNECTIONS = 1024
"""Also those on which nothing is asked."""

IDLE_SECONDS = 30.0
"""In which the head of the next request must have come whole."""

_RESERVED_FILES = 64 + ACCEPT_AT_ONCE  # models, caches, the store, what a reply opens


class Connection(H11Protocol):
    """One client. `limit_concurrency` and `timeout_keep_alive` of the config are how many and how long."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._most = config.limit_concurrency
        self.limit_concurrency = None  # what uvicorn would answer 503 by
        self._idle_since = self.loop.time()
        self._deadline: asyncio.TimerHandle | None = None
        self._waited = False
        """Whether the deadline was moved for an answer that the client had not taken whole."""

    @property
    def is_idle(self) -> bool:
        """No request is in work; the head of one may have come in part."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._most is not None and len(self.connections) > self._most:
            self._make_room()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Bytes that are not HTTP get an error like any other, unless an answer has begun already."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            told = ApiError(400, "this is not an HTTP request that can be read, or its stated length is wrong")
            raw = json.dumps(told.as_openai()).encode()
            fields = {"content-type": "application/json", "content-length": str(len(raw)), "connection": "close"}
            head = h11.Response(status_code=400, headers=list(fields.items()), reason="Bad Request")
            for event in (head, h11.Data(data=raw), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        self._waited = False
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _make_room(self) -> None:
        others = [other for other in self.connections if isinstance(other, Connection) and other is not self]
        idle = [other for other in others if other.is_idle]
        gives_way = min(idle, key=lambda other: other._idle_since, default=self)
        self.connections.discard(gives_way)  # closing takes until the next turn of the loop
        gives_way.transport.abort()

    def _watch(self) -> None:
        """Have a deadline while the connection is idle; bytes that trickle in do not move it."""
        if not self.is_idle or self.transport.is_closing():
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def _give_up(self) -> None:
        self._deadline = None
        if self.transport.get_write_buffer_size() and not self._waited:
            self._waited = True
            self._watch()
        else:
            self.transport.abort()

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def most_connections() -> int:
    """As many as the limit on open files allows, which is raised as far as needed and allowed."""
    try:
        import resource
    except ImportError:  # not a Unix
        return MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, soft - _RESERVED_FILES)
    return MAX_CONNECTIONS


def connection_settings(most: int, idle_seconds: float = IDLE_SECONDS) -> dict[str, Any]:
    """The settings of uvicorn that are about connections."""
    return {
        "http": Connection,
        "limit_concurrency": most,
        "timeout_keep_alive": idle_seconds,
        "backlog": ACCEPT_AT_ONCE,
        "h11_max_incomplete_event_size": 64 * 1024,
        "log_config": None,
        "log_level": "error",  # a warning for each request that is not HTTP would let clients fill the log
        "ws": "none",
        "access_log": False,
        "lifespan": "off",
        "server_header": False,
    }
