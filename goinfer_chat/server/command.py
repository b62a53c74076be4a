"""`goinfer-chat serve`: load the models, listen, and end in order."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import re
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import uvicorn

from engine.errors import UsageError
from engine.kv_folder import prepare
from goinfer_chat.modes import EngineFactory
from goinfer_chat.server.admission import Admission
from goinfer_chat.server.app import Application, make_application
from goinfer_chat.server.connections import IDLE_SECONDS, MAX_CONNECTIONS, connection_settings, most_connections
from goinfer_chat.server.security import Limits
from goinfer_chat.server.served import Models, Served
from goinfer_chat.server.transcripts import Transcripts
from goinfer_chat.settings import Settings
from goinfer_chat.terminal import Stream

GRACE_SECONDS = 5.0
"""What replies get to come to their end when the server is asked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where and for whom. Raises UsageError when a value cannot be obeyed."""

    host: str = "127.0.0.1"
    port: int = 8080
    models: tuple[str, ...] = ()
    """NAME=PATH, or what --model takes otherwise."""
    api_key: str | None = None
    origins: tuple[str, ...] = ()
    max_concurrent: int = 4
    max_queue: int = 16
    prefill_chunk: int | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("port", self.port, 0),
            ("max-concurrent", self.max_concurrent, 1),
            ("max-queue", self.max_queue, 0),
            ("max-inflight", self.limits.max_inflight, 1),
        ):
            if value < least:
                raise UsageError(f"{flag} must be {least} or more, not {value}")
        if self.port > 65535:
            raise UsageError(f"port must be at most 65535, not {self.port}")
        if self.api_key is not None and (not self.api_key or self.api_key != self.api_key.strip()):
            raise UsageError("the API key is empty, or has white space around it that a client cannot send")
        if self.api_key is None and not self.is_loopback:
            raise UsageError(
                f"--host {self.host} lets others reach this server: give it a key (GOINFER_CHAT_API_KEY or "
                "--api-key-file), or listen on 127.0.0.1"
            )

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def serve(settings: Settings, options: ServeOptions, make_engine: EngineFactory, out: Stream, side: Stream) -> int:
    """Run until a signal ends it. Returns the exit code. Raises UsageError or ModelError."""
    with ExitStack() as undo:
        listener = undo.enter_context(closing(_listen(options)))
        models = []
        for name, model in _named(options.models or (settings.model,)):
            served = _load(name, settings.changed({"model": model}), options, make_engine, side)
            undo.callback(served.engine.close)
            models.append(served)
            info = served.engine.info
            side.line(f"{name}: {info.name} | context {info.context_size:,} | {info.computed_by}")
            kept = f" | {info.kept_conversations} back" if info.kept_conversations else ""
            side.line(f"{info.session_reuse}{kept} | up to {options.max_concurrent} at once")
            if options.max_concurrent > settings.kv_sessions:
                side.line(
                    f"{options.max_concurrent} may run at once and only {settings.kv_sessions} stay in memory; "
                    "--kv-sessions gives each of them a slot"
                )
            for notice in info.notices:
                side.line(notice)
        application = make_application(
            Models(models),
            limits=options.limits,
            api_key=options.api_key,
            origins=options.origins,
            check_host=options.api_key is None,
            say=side.line,
        )
        address = listener.getsockname()
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        out.line(f"listening on http://{shown}:{address[1]}")
        run_server(application, listener)
    side.line("stopped")
    return 0


def run_server(application: Application, listener: socket.socket, grace_seconds: float = GRACE_SECONDS) -> None:
    """Answer until a signal comes."""
    config = uvicorn.Config(
        application.gate,
        **connection_settings(most_connections()),
        timeout_graceful_shutdown=int(grace_seconds) + 5,
    )
    GracefulServer(config, application, grace_seconds).run(sockets=[listener])


class GracefulServer(uvicorn.Server):
    """Asked to end, it takes no more requests, lets replies end for a while, and then ends them."""

    def __init__(self, config: uvicorn.Config, application: Application, grace_seconds: float) -> None:
        super().__init__(config)
        self._application = application
        self._grace_seconds = grace_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._application.context.closing = True
        ending = asyncio.create_task(self._end())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end(self) -> None:
        if not self.force_exit:
            await asyncio.sleep(self._grace_seconds)
        await self._application.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal ends replies at once; each is saved all the same."""
        if self.should_exit and sig in (signal.SIGINT, signal.SIGTERM):
            self._grace_seconds = 0.0
            loop = self._loop
            if loop is not None:
                loop.call_soon_threadsafe(lambda: loop.create_task(self._application.stop()))
            return
        self.should_exit = True  # uvicorn would have the signal end the process when all is over

    _loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)


class BackgroundServer:
    """A server in a thread of its own, for programs that measure it. Usable as a context manager."""

    def __init__(
        self, application: Application, *, connections: int = MAX_CONNECTIONS, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self.listener = _bound("127.0.0.1", 0)
        config = uvicorn.Config(application.gate, **connection_settings(connections, idle_seconds))
        self._server = GracefulServer(config, application, 0.0)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self.listener]}, name="server", daemon=True
        )

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def __enter__(self) -> BackgroundServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        self.listener.close()


def _named(models: Sequence[str]) -> list[tuple[str, str]]:
    """(name, model) of each; a model without a name has its own. Raises UsageError for a name given twice."""
    named: list[tuple[str, str]] = []
    for text in models:
        name, equals, model = text.partition("=")
        if not equals or "/" in name:
            name, model = Path(text).name.removesuffix(".gguf") if "/" in text else text, text
        if not name or not model or not name.isprintable():
            raise UsageError(f"--model {text}: give NAME=PATH, or a model")
        if any(name == other for other, _ in named):
            raise UsageError(f"two models have the name {name}; give each another: --model NAME=PATH")
        named.append((name, model))
    return named


def _load(name: str, settings: Settings, options: ServeOptions, make_engine: EngineFactory, side: Stream) -> Served:
    folder = None
    if settings.session_dir is not None:
        folder = Path(settings.session_dir) / f"server-{_slug(name)}"
        prepare(folder)
    changed = replace(settings, max_concurrent=options.max_concurrent, prefill_chunk=options.prefill_chunk)
    engine = make_engine(changed, side, folder)
    replies = None if folder is None else folder / f"replies-{engine.info.identity[:16] or 'unknown'}.jsonl"
    return Served(
        name=name,
        engine=engine,
        admission=Admission(options.max_concurrent, options.max_queue),
        # A prompt is tokenized before its reply has a place: no request that has one may be refused here.
        texts=Admission(1, options.max_concurrent + options.max_queue),
        sampling=settings.sampling,
        speculation=None if settings.speculation == "auto" else settings.speculation,
        transcripts=Transcripts(replies),
    )


def _slug(name: str) -> str:
    """A folder's name for a model's; names that cannot be a folder's get a hash, so that no two share one."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", name)[:60]
    return plain if plain == name else f"{plain}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def _listen(options: ServeOptions) -> socket.socket:
    return _bound(options.host, options.port)


def _bound(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises UsageError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return listener
