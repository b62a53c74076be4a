"""Signals while the program is at its prompt, or between two of them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from prompt_toolkit.application import Application
from prompt_toolkit.application.current import get_app_or_none

from goinfer_chat.terminal import ENDING_SIGNALS


class PromptEnded(Exception):  # noqa: N818 - not an error
    """A signal ended the prompt."""


@dataclass
class Ending:
    exit_code: int | None = None
    """Set once a signal asked for the end."""

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.exit_code = 128 + number
        app = get_app_or_none()
        if app is None or not app.is_running:
            sys.exit(self.exit_code)
        # An exception in the middle of prompt_toolkit would leave the paste mode on: it ends by its own road.
        if app.loop is not None and not app.is_done:
            app.loop.call_soon_threadsafe(_end_prompt, app)


def _end_prompt(app: Application[Any]) -> None:
    if app.is_running and not app.is_done:
        app.exit(exception=PromptEnded())


@contextmanager
def ending_on_signals() -> Iterator[Ending]:
    """Signals that ask for the end unwind the program, so that the terminal is restored; SIGINT between turns does
    nothing."""
    ending = Ending()

    def ignore(_number: int, _frame: FrameType | None) -> None:
        pass

    previous = {number: signal.signal(number, ending) for number in ENDING_SIGNALS}
    previous[signal.SIGINT] = signal.signal(signal.SIGINT, ignore)
    try:
        yield ending
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
