"""One reply without a scheduler: for tests of what a step does to it."""

from __future__ import annotations

from collections.abc import Callable, Generator

from engine.api import Event, Finished
from engine.generate import Generation
from engine.sessions import Sessions
from engine.step import PrefillPace, step


def run(
    generation: Generation, model, sessions: Sessions, pace: PrefillPace, cancelled: Callable[[], bool]
) -> Generator[Event, None, None]:
    """Events of one reply, ending with Finished. `cancelled` is asked before every step."""
    while not generation.done:
        if cancelled():
            generation.cancel()
        if not generation.done:
            step(model, sessions, [generation], pace)
        if generation.error is not None:
            raise generation.error
        yield from generation.take_events()
    yield Finished(generation.reply())
