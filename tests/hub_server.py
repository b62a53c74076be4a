"""A small hub on loopback: the part of the hub's API that listing and fetching a file needs, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

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
class Hub:
    """What the server holds and how it misbehaves. `files` is repository -> file -> bytes."""

    files: dict[str, dict[str, bytes]]
    url: str = ""
    token: str | None = None
    """The one token that opens the repositories; None: they are public."""
    gated: bool = False
    stated_sha256: dict[str, str] = field(default_factory=dict)
    """By file name, a checksum to state instead of the right one."""
    in_git: frozenset[str] = frozenset()
    """Files for which no LFS checksum is stated."""
    break_after: list[int] = field(default_factory=list)
    """Bytes to send before the connection is cut, one entry for each download to come."""
    fail_with: list[int] = field(default_factory=list)
    """Status codes to answer downloads with, one entry for each download to come."""
    ignore_range: bool = False
    redirect_to: str | None = None
    """Another server that has the bytes, as a hub sends clients to its storage."""
    gate: threading.Event | None = None
    """Downloads wait for it after their first half."""
    seen: list[Seen] = field(default_factory=list)

    @property
    def downloads(self) -> list[Seen]:
        return [request for request in self.seen if request.method == "GET" and "/resolve/" in request.path]

    def listing(self, repo: str) -> dict[str, Any]:
        return {"id": repo, "sha": COMMIT, "siblings": [self._sibling(repo, name) for name in self.files[repo]]}

    def _sibling(self, repo: str, name: str) -> dict[str, Any]:
        data = self.files[repo][name]
        sibling: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": "f" * 40}
        if name not in self.in_git:
            digest = self.stated_sha256.get(name, hashlib.sha256(data).hexdigest())
            sibling["lfs"] = {"size": len(data), "sha256": digest, "pointerSize": 134}
        return sibling


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.seen.append(Seen(self.command, path, {key.lower(): value for key, value in self.headers.items()}))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/[^/]+)?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        repo = (api or file or [None, None])[1]
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._refuse(401, "GatedRepo" if hub.gated else "RepoNotFound")
        elif repo not in hub.files:
            self._refuse(401 if api else 404, "RepoNotFound")
        elif api:
            self._send(200, json.dumps(hub.listing(repo)).encode(), {"Content-Type": "application/json"})
        elif file and file[3] not in hub.files[repo]:
            self._refuse(404, "EntryNotFound")
        elif hub.fail_with:
            self._refuse(hub.fail_with.pop(0), "")
        elif hub.redirect_to:
            self._send(302, b"", {"Location": hub.redirect_to + self.path})
        else:
            assert file
            self._send_file(hub.files[repo][file[3]])

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, data: bytes) -> None:
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(start[1]) if start and not self.hub.ignore_range else 0
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        body = data[first:]
        if self.hub.break_after:
            self.wfile.write(body[: self.hub.break_after.pop(0)])
            self.close_connection = True
            return
        half = len(body) // 2
        self.wfile.write(body[:half])
        self.wfile.flush()
        if self.hub.gate:
            self.hub.gate.wait(30)
        self.wfile.write(body[half:])


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Run the hub in a thread on a free port; sets `hub.url`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
