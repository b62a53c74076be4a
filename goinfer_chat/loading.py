"""From the name of a model to an engine that is ready, with progress a person can see."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.api import Engine
from engine.errors import ModelNotFoundError, OutOfMemoryError, UsageError
from goinfer_chat.files import read_text
from goinfer_chat.settings import Settings
from goinfer_chat.terminal import Stream

if TYPE_CHECKING:
    from engine.unloaded import UnloadedModel


def load_engine(settings: Settings, side: Stream, kv_folder: Path | None = None) -> Engine:
    """The engine for these settings, its model fetched if it is not here. Raises ModelError or UsageError.

    `kv_folder`: where it keeps conversations' caches as files, if it does.
    """
    if (settings.backend == "remote") != (settings.base_url is not None):
        raise UsageError("--backend remote needs --base-url URL, and --base-url needs --backend remote")
    if settings.base_url is not None:
        return connect(settings, settings.base_url)
    if settings.backend == "cpu" and settings.device not in ("auto", "cpu"):
        raise UsageError(f"--device {settings.device} needs --backend torch")
    bar = Stream(None) if settings.quiet else side
    path = find_model(settings.model, bar)
    draft = None if settings.draft is None else find_model(settings.draft, bar)

    from engine import load

    with _shown(side, after=PATIENCE if settings.quiet else 0.0) as progress, _memory_error_explained(path):
        return load(
            path,
            context_size=settings.context_size,
            threads=settings.threads,
            chat_template=_template(settings),
            kv_sessions=settings.kv_sessions,
            kv_folder=kv_folder,
            kv_cap_bytes=settings.kv_cap_bytes,
            kv_type=settings.kv_type,
            draft=draft,
            from_disk=settings.from_disk,
            max_concurrent=settings.max_concurrent,
            prefill_chunk=settings.prefill_chunk,
            progress=progress,
            backend=settings.backend,
            device=settings.device,
        )


PATIENCE = 3.0
"""Seconds. Kernels are compiled at a first start for 20 and more: a terminal that is silent for so long looks hung."""


@contextmanager
def _shown(side: Stream, *, after: float) -> Iterator[Callable[[str, float], None]]:
    """A passing line that tells what is being done, once that has taken `after` seconds; none outside of a terminal."""
    latest, late = "loading the model", threading.Event()

    def progress(what: str, share: float) -> None:
        nonlocal latest
        # The compiler says nothing while it works: no share is better than one that stands still.
        latest = f"{what} ({share:.0%})" if share else what
        if late.is_set():
            side.status(latest)

    def begin() -> None:
        side.status(latest)
        late.set()

    timer = threading.Timer(after, begin)
    if after:
        timer.daemon = True
        timer.start()
    else:
        late.set()
    try:
        yield progress
    finally:
        timer.cancel()
        if after:
            timer.join()
        side.clear_status()


@contextmanager
def _memory_error_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        # What was free can be gone, or less than the system says: a limit of the shell counts too.
        raise OutOfMemoryError(
            f"{path.name}: memory ran out while it was loaded; close other programs or choose a smaller model"
        ) from error


def connect(settings: Settings, base_url: str) -> Engine:
    """The model of a server. Raises UsageError or EngineError."""
    from engine.remote import RemoteEngine
    from goinfer_chat.api_keys import api_key

    # The default model is ours: a server that has one model need not be told which.
    model = None if settings.model == Settings().model else settings.model
    return RemoteEngine.connect(base_url, model, api_key=api_key(base_url, os.environ))


def look_at_model(settings: Settings, kv_folder: Path | None = None) -> UnloadedModel | None:
    """The model of these settings without its weights; None where it must be fetched.

    Raises ModelError or UsageError.
    """
    from engine.unloaded import UnloadedModel
    from goinfer_chat.models import catalogue

    path = catalogue.resolve(settings.model)
    if path is None:
        if not catalogue.can_be_pulled(settings.model):
            raise ModelNotFoundError(f"{settings.model}: no such model")
        return None
    return UnloadedModel.open(
        path,
        context_size=settings.context_size,
        chat_template=_template(settings),
        # Which numerics torch has here, only torch can say.
        kv_folder=kv_folder if settings.kv_sessions and settings.backend == "cpu" else None,
        kv_type=settings.kv_type,
    )


def find_model(model: str, side: Stream) -> Path:
    """The file of a model, fetched if it is not here. Raises ModelError or UsageError."""
    from goinfer_chat.models import catalogue

    return catalogue.resolve(model) or fetch_model(model, side)


def _template(settings: Settings) -> str | None:
    """The text of the template file, if one was given. Raises UsageError when it cannot be read."""
    path = settings.chat_template
    return None if path is None else read_text(path, f"--chat-template {path}")


def fetch_model(model: str, side: Stream) -> Path:
    """Pull a model, with a bar on a terminal and a line now and then elsewhere. Raises what catalogue.pull raises."""
    from rich.console import Console

    from goinfer_chat.models import catalogue
    from goinfer_chat.models.progress import download_progress

    if side.file is None:
        return catalogue.pull(model)
    console = Console(file=side.file, force_terminal=side.moves, no_color=not side.colour)
    with download_progress(console, model) as progress:
        return catalogue.pull(model, progress, side.line)
