"""Who may ask, and how much at once: checked before a body is read.

A page of the web can make a browser send requests to this machine, and can make a name of its own point here (DNS
rebinding). So without a key only requests are answered whose Host is this machine's own loopback name, and none that
a page of another origin has sent. With a key the Host does not matter: nobody else knows the key.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from typing import Any

from goinfer_chat.server.errors import ApiError
from goinfer_chat.server.metrics import Metrics

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
ROUTES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/tokenize",
        "/health",
        "/metrics",
    }
)
"""Paths that are counted by name: what clients make up is counted together."""
_OPEN_PATHS = frozenset({"/health"})
_UNCOUNTED_PATHS = frozenset({"/health", "/metrics", "/v1/models"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_body_bytes: int = 4_000_000
    max_held_bytes: int = 32_000_000
    """Of all bodies that are in work: as objects they take some ten times as much."""
    max_inflight: int = 64
    body_seconds: float = 20.0
    """In which a body must have come."""


class Gate:
    """The outermost application. A request gets in with its whole body, or an error."""

    def __init__(
        self,
        app: App,
        *,
        metrics: Metrics,
        limits: Limits,
        api_key: str | None = None,
        origins: Collection[str] = (),
        check_host: bool = True,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._limits = limits
        self._api_key = api_key.encode() if api_key is not None else None
        self._origins = frozenset(origins)
        self._check_host = check_host
        self.num_inflight = 0
        self.num_held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        origin = headers.get(b"origin", b"").decode("latin-1")
        send = self._counting(scope, _with_headers(send, self._cors(origin)))
        counted = scope["path"] not in _UNCOUNTED_PATHS
        try:
            self._check_frame(scope, headers)
            self._check(scope, headers, origin)
            if scope["method"] == "OPTIONS" and origin:
                await answer(send, 204, None, {"Access-Control-Max-Age": "600"})
                return
            self._check_size(headers)
            if counted and self.num_inflight >= self._limits.max_inflight:
                self._metrics.count("goinfer_rejected_total", full="inflight")
                raise ApiError(
                    429,
                    f"{self.num_inflight} requests are in progress, which is the limit",
                    code="inflight_full",
                    retry_after=1,
                )
        except ApiError as error:
            closing = {"Connection": "close"} if b"transfer-encoding" in headers else {}  # its end may be doubtful
            await answer(send, error.status, error.body(scope["path"]), {**error.headers, **closing})
            return
        self.num_inflight += counted
        body = bytearray()
        try:
            await self._read(receive, body)
            await self._app(scope, _replayed(bytes(body), receive), send)
        except ApiError as error:
            await answer(send, error.status, error.body(scope["path"]), {**error.headers, "Connection": "close"})
        except _GoneError:
            pass
        finally:
            self.num_inflight -= counted
            self.num_held_bytes -= len(body)

    def _check(self, scope: Scope, headers: dict[bytes, bytes], origin: str) -> None:
        if self._check_host and _host_name(headers.get(b"host", b"").decode("latin-1")) not in LOOPBACK_NAMES:
            raise ApiError(403, "this server answers only to localhost, and the Host of this request is another name")
        if origin and origin not in self._origins:
            raise ApiError(403, "pages of this origin may not use this server; --allow-origin lets one in")
        if not origin and headers.get(b"sec-fetch-site", b"none") in (b"cross-site", b"same-site"):
            raise ApiError(403, "pages of other sites may not use this server")
        if self._api_key is None or scope["path"] in _OPEN_PATHS or scope["method"] == "OPTIONS":
            return
        given = headers.get(b"x-api-key", b"")
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            given = token
        if not hmac.compare_digest(given, self._api_key):
            raise ApiError(401, "an API key is needed: Authorization: Bearer KEY", code="invalid_api_key")

    def _check_frame(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """That there is one way to find the end of a request. Raises ApiError.

        Where a proxy in front finds another end, what it takes for a body is the next request here, which it has not
        seen: https://www.rfc-editor.org/rfc/rfc9112#section-6.1
        """
        if b"transfer-encoding" in headers and (b"content-length" in headers or scope["http_version"] == "1.0"):
            raise ApiError(400, "Transfer-Encoding has no place beside Content-Length, nor in HTTP/1.0")

    def _check_size(self, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._limits.max_body_bytes:
            raise _too_large(self._limits.max_body_bytes)

    async def _read(self, receive: Receive, body: bytearray) -> None:
        """Add the whole body. Raises ApiError, or _GoneError where the client has left."""
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    part = message.get("body", b"")
                    body += part
                    self.num_held_bytes += len(part)
                    if len(body) > self._limits.max_body_bytes:
                        raise _too_large(self._limits.max_body_bytes)
                    if self.num_held_bytes > max(self._limits.max_held_bytes, self._limits.max_body_bytes):
                        self._metrics.count("goinfer_rejected_total", full="bytes")
                        raise ApiError(429, "the requests in progress are too large", code="bytes_full", retry_after=1)
                    if not message.get("more_body"):
                        return
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time", param="body") from None

    def _cors(self, origin: str) -> dict[str, str]:
        if not origin or origin not in self._origins:
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Headers": "*, Authorization",
            "Access-Control-Allow-Methods": "GET, POST",
            "Vary": "Origin",
        }

    def _counting(self, scope: Scope, send: Send) -> Send:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope["path"] if scope["path"] in ROUTES else "other"
                self._metrics.count("goinfer_requests_total", route=route, status=str(message["status"]))
            await send(message)

        return counted


class _GoneError(Exception):
    """The client has left before its request was whole."""


async def answer(send: Send, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
    """A whole JSON answer; one without a body for None."""
    raw = b"" if body is None else json.dumps(body).encode()
    fields = {"Content-Type": "application/json", "Content-Length": str(len(raw)), **(headers or {})}
    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": raw})


def _with_headers(send: Send, headers: dict[str, str]) -> Send:
    if not headers:
        return send
    added = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *added]
        await send(message)

    return sent


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body once, then what else the client does."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


def _host_name(host: str) -> str:
    """The name of a Host field without its port; anything else than name and port is taken whole."""
    match = re.fullmatch(r"(?:\[([^]]*)\]|([^:]*))(?::[0-9]*)?", host)
    return (match[1] or match[2] or "").lower() if match else host


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit:,} bytes", param="body")
