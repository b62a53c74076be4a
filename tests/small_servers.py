"""Small servers on loopback, with faults on demand: a hub (listing and fetching files) and a package index."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

S = TypeVar("S", bound="Server")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Seen:
    """One request as it came in."""

    method: str
    path: str
    headers: dict[str, str]

    @property
    def range(self) -> str | None:
        return self.headers.get("range")


@dataclass
class Server:
    """How a server misbehaves, and what it was asked."""

    url: str = ""
    break_after: list[int] = field(default_factory=list)
    """Bytes to send before the connection is cut, one entry for each download to come."""
    fail_with: list[int] = field(default_factory=list)
    """Status codes to answer downloads with, one entry for each download to come."""
    ignore_range: bool = False
    gate: threading.Event | None = None
    """Downloads wait for it after their first half."""
    seen: list[Seen] = field(default_factory=list)

    def asked(self, path: str) -> list[Seen]:
        """The GET requests whose path holds `path`."""
        return [request for request in self.seen if request.method == "GET" and path in request.path]


@dataclass
class Hub(Server):
    """What the hub holds: repository -> file -> bytes."""

    files: dict[str, dict[str, bytes]] = field(kw_only=True)
    token: str | None = None
    """The one token that opens the repositories; None: they are public."""
    gated: bool = False
    stated_sha256: dict[str, str] = field(default_factory=dict)
    """By file name, a checksum to state instead of the right one."""
    stated_bytes: dict[str, int] = field(default_factory=dict)
    """By file name, a length to state instead of the right one."""
    in_git: frozenset[str] = frozenset()
    """Files for which no LFS checksum is stated."""
    redirect_to: str | None = None
    """Another server that has the bytes, as a hub sends clients to its storage."""
    listing_page: str | None = None
    """What to answer to a listing instead of JSON, as a hotel's network does."""

    @property
    def downloads(self) -> list[Seen]:
        return self.asked("/resolve/")

    def listing(self, repo: str) -> dict[str, Any]:
        return {"id": repo, "sha": COMMIT, "siblings": [self._sibling(repo, name) for name in self.files[repo]]}

    def _sibling(self, repo: str, name: str) -> dict[str, Any]:
        data = self.files[repo][name]
        length = self.stated_bytes.get(name, len(data))
        sibling: dict[str, Any] = {"rfilename": name, "size": length, "blobId": "f" * 40}
        if name not in self.in_git:
            digest = self.stated_sha256.get(name, hashlib.sha256(data).hexdigest())
            sibling["lfs"] = {"size": length, "sha256": digest, "pointerSize": 134}
        return sibling


@dataclass
class Index(Server):
    """A package index with the wheels of a folder."""

    folder: Path = field(kw_only=True)
    stated_sha256: dict[str, str] = field(default_factory=dict)
    """By file name, a checksum to state instead of the right one."""
    forbidden: bool = False
    """Wheels are given to pip only."""

    def page(self, project: str) -> str:
        wheels = sorted(self.folder.glob(f"{project.replace('-', '_')}-*.whl"))
        return "".join(f'<a href="{self._link(wheel)}">{wheel.name}</a>' for wheel in wheels)

    def _link(self, wheel: Path) -> str:
        digest = self.stated_sha256.get(wheel.name, hashlib.sha256(wheel.read_bytes()).hexdigest())
        return f"/files/{wheel.name}#sha256={digest}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = {key.lower(): value for key, value in self.headers.items()}
        self.server_state.seen.append(Seen(self.command, path, headers))
        if isinstance(self.server_state, Hub):
            self._hub(self.server_state, path)
        elif isinstance(self.server_state, Index):
            self._index(self.server_state, path)

    def _hub(self, hub: Hub, path: str) -> None:
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/[^/]+)?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        repo = (api or file or [None, None])[1]
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._refuse(401, "GatedRepo" if hub.gated else "RepoNotFound")
        elif repo not in hub.files:
            self._refuse(401 if api else 404, "RepoNotFound")
        elif api:
            body = hub.listing_page or json.dumps(hub.listing(repo))
            self._send(200, body.encode(), {"Content-Type": "application/json"})
        elif file and file[3] not in hub.files[repo]:
            self._refuse(404, "EntryNotFound")
        elif hub.redirect_to:
            self._send(302, b"", {"Location": hub.redirect_to + self.path})
        else:
            assert file
            self._send_file(hub.files[repo][file[3]])

    def _index(self, index: Index, path: str) -> None:
        kind, name = path.strip("/").split("/")
        wheel = index.folder / name
        if kind == "simple" and (page := index.page(name)):
            self._send(200, page.encode(), {"Content-Type": "text/html"})
        elif kind == "simple" or not wheel.is_file():
            self._refuse(404, "")
        elif index.forbidden and not self.headers.get("User-Agent", "").startswith("pip/"):
            self._refuse(403, "")
        else:
            self._send_file(wheel.read_bytes())

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, data: bytes) -> None:
        state = self.server_state
        if state.fail_with:
            self._refuse(state.fail_with.pop(0), "")
            return
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(start[1]) if start and not state.ignore_range else 0
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        body = data[first:]
        if state.break_after:
            self.wfile.write(body[: state.break_after.pop(0)])
            self.close_connection = True
            return
        half = len(body) // 2
        self.wfile.write(body[:half])
        self.wfile.flush()
        if state.gate:
            state.gate.wait(30)
        self.wfile.write(body[half:])


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients that leave early are a part of the tests
            super().handle_error(request, client_address)


@contextmanager
def serve(state: S) -> Iterator[S]:
    """Run the server in a thread on a free port; sets `state.url`."""
    server = _Listener(("127.0.0.1", 0), type("Handler", (_Handler,), {"server_state": state}))
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
