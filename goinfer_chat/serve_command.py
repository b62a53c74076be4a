"""`goinfer-chat serve`: its flags. What serves is in server/, which is imported only when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Final

import typer

from engine.errors import UsageError
from goinfer_chat.api_keys import VARIABLE as KEY_VARIABLE
from goinfer_chat.cli import Flags, given_flags, number_flag, with_settings
from goinfer_chat.files import read_text
from goinfer_chat.modes import EngineFactory
from goinfer_chat.resolving import resolve
from goinfer_chat.settings import SETTINGS
from goinfer_chat.terminal import Stream
from goinfer_chat.values import parse_size

_FLAGS: Final = (
    "backend", "device", "ctx", "threads", "chat-template", "kv-sessions", "kv-cap", "kv", "spec", "draft",
    "session-dir", "temperature", "top-k", "top-p", "min-p", "repeat-penalty", "presence-penalty", "frequency-penalty",
    "penalty-window", "quiet",
)  # fmt: skip
_SETTINGS: Final = tuple(setting for setting in SETTINGS if setting.flag in _FLAGS)

Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model", metavar="[NAME=]MODEL", help="A model to serve, and the name clients use for it; may be repeated."
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        help=f"The key that clients must send; better set {KEY_VARIABLE}, which lists of processes do not show.",
    ),
]
KeyFile = Annotated[str | None, typer.Option("--api-key-file", metavar="FILE", help="A file that holds the API key.")]
Origins = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-origin",
        metavar="ORIGIN",
        help="A web origin whose pages may use the server, such as https://host; may be repeated.",
    ),
]


def serve_command(make_engine: EngineFactory, environ: Mapping[str, str]) -> Callable[..., int]:
    """The function of the command."""

    @partial(with_settings, settings=_SETTINGS)
    def command(
        context: typer.Context,
        flags: Flags,
        model: Models = None,
        host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
        port: Annotated[int, number_flag("--port", "Port to listen on; 0 picks a free one.")] = 8080,
        api_key: Key = None,
        api_key_file: KeyFile = None,
        allow_origin: Origins = None,
        max_concurrent: Annotated[
            int, number_flag("--max-concurrent", "How many replies are generated at the same time.")
        ] = 4,
        max_queue: Annotated[int, number_flag("--max-queue", "How many more requests may wait for their turn.")] = 16,
        max_inflight: Annotated[
            int, number_flag("--max-inflight", "Most requests in progress, whatever they are waiting for.")
        ] = 64,
        max_body: Annotated[str, typer.Option(metavar="SIZE", help="Largest request body.")] = "4MB",
        prefill_chunk: Annotated[
            int | None,
            number_flag("--prefill-chunk", "Prompt tokens read per step while other replies are generated."),
        ] = None,
    ) -> int:
        """Serve models over HTTP, with OpenAI's and Anthropic's APIs."""
        from goinfer_chat.server.command import ServeOptions, serve
        from goinfer_chat.server.security import Limits

        settings = resolve(given_flags(context, flags), environ)
        options = ServeOptions(
            host=host,
            port=port,
            models=tuple(model or ()),
            api_key=_key(api_key, api_key_file, environ),
            origins=tuple(allow_origin or ()),
            max_concurrent=max_concurrent,
            max_queue=max_queue,
            prefill_chunk=prefill_chunk,
            limits=Limits(max_inflight=max_inflight, max_body_bytes=parse_size(max_body)),
        )
        side = Stream(None) if settings.quiet else Stream(sys.stderr)
        if api_key is not None:
            side.line(
                f"other users can read --api-key in the list of processes; use {KEY_VARIABLE} or --api-key-file instead"
            )
        return serve(settings, options, make_engine, Stream(sys.stdout), side)

    return command


def _key(flag: str | None, file: str | None, environ: Mapping[str, str]) -> str | None:
    """Raises UsageError."""
    if flag is not None and file is not None:
        raise UsageError("--api-key and --api-key-file give two keys; choose one")
    if file is None:
        return flag if flag is not None else environ.get(KEY_VARIABLE) or None
    return read_text(file, f"--api-key-file {file}").rstrip("\r\n")
