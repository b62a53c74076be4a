"""The engine that answers, and how that of another model takes its place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from engine.api import Engine
from engine.errors import GoinferError
from goinfer_chat.settings import Settings
from goinfer_chat.turn import turn_is_running

if TYPE_CHECKING:
    from engine.unloaded import UnloadedModel


class Engines:
    """One engine at a time: memory is for one model. Usable as a context manager, which closes it at the end.

    load   the engine for these settings; raises ModelError or UsageError
    find   sees to it that the model is here, as far as that can be known without loading it; raises the same
    look   opens a model without loading it; None where it is not here. Raises the same
    """

    def __init__(
        self,
        load: Callable[[Settings], Engine],
        find: Callable[[Settings], object],
        settings: Settings,
        look: Callable[[Settings], UnloadedModel | None] = lambda _settings: None,
    ) -> None:
        self.look = look
        self._load = load
        self._find = find
        self._settings = settings
        self.current = load(settings)

    def switch(self, settings: Settings) -> None:
        """`current` becomes the engine for these settings. Raises what loading raises; the model stays then."""
        self._find(settings)
        self.current.close()
        try:
            self.current = self._load(settings)
        except BaseException:
            with suppress(GoinferError):  # what is on its way says why no model answers
                self.current = self._load(self._settings)
            raise
        self._settings = settings

    def close(self) -> None:
        """Leaves an engine alone that is still working on a turn: closing it would wait for that."""
        if not turn_is_running():
            self.current.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
