"""One turn on the screen: the engine works in a thread, the main thread shows the events and hears Ctrl-C."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final

from engine.api import Finished, Reply
from goinfer_chat.agent import Agent, Ask
from goinfer_chat.calls.events import EXIT_CODES, Answer, ApprovalAsked, RepeatAsked, TurnEnded, TurnEvent
from goinfer_chat.start import INTERRUPTED
from goinfer_chat.view.render import View

ENGINE_THREAD: Final = "engine"
TICK_SECONDS: Final = 1 / 15
PATIENCE_SECONDS: Final = 2.0
"""How long an engine may take to stop before another Ctrl-C ends the program."""


@dataclass(frozen=True, slots=True)
class Played:
    """A turn that was shown: its last reply, and the exit code of a program that ends with it."""

    reply: Reply
    exit_code: int


def play_turn(agent: Agent, ask: Ask, view: View, take_keys: Callable[[], None] = lambda: None) -> Played:
    """Show a turn. Ctrl-C stops it and keeps what was said: see `finish_reason`. `take_keys` is called now and then.

    Raises what Agent.ask raises; KeyboardInterrupt when Ctrl-C comes again PATIENCE_SECONDS after the first and
    the engine still has not stopped; OutputError when a stream cannot be written to.
    """
    cancel = threading.Event()
    reply: Reply | None = None
    code = None
    try:
        with (
            stopping_on_interrupt(cancel),
            waiting_to_suspend() as suspended,
            closing(events_of(agent, ask, cancel)) as events,
        ):
            for event in events:
                take_keys()
                if suspended.wanted:
                    view.pause()
                    suspended()
                if event is None:
                    view.tick()
                    continue
                view.event(event)
                match event:
                    case Finished():
                        reply = event.reply
                    case TurnEnded():
                        code = EXIT_CODES[event.how]
                    case ApprovalAsked() | RepeatAsked():
                        _put_question(agent, event, cancel)
                    case _:
                        pass
    finally:
        view.close()
    assert reply is not None, "an engine ends with Finished or raises"
    if code is None:
        code = INTERRUPTED if reply.finish_reason == "cancelled" else 0
    if not code and agent.schema is not None and reply.finish_reason == "length":
        code = EXIT_CODES["cut"]  # half a JSON text, which nobody should take for a valid one
    return Played(reply, code)


def _put_question(agent: Agent, event: ApprovalAsked | RepeatAsked, cancel: threading.Event) -> None:
    """Ask on this thread, which owns the terminal; after Ctrl-C nothing is asked any more."""
    answer = Answer(allowed=False, stop=True)
    if agent.asker is not None and not cancel.is_set():
        answer = agent.asker(event)
    if answer.stop:
        cancel.set()
    event.question.answer(answer)


def events_of(agent: Agent, ask: Ask, cancel: threading.Event) -> Generator[TurnEvent | None]:
    """The events of a turn that runs in a thread of its own; None whenever TICK_SECONDS pass without one, and at once
    when the screen has changed its size.

    Left early, it cancels the turn and waits for the thread, though not longer than PATIENCE_SECONDS.
    """
    items: queue.SimpleQueue[TurnEvent | BaseException | _Ended | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            for event in agent.ask(ask, cancel):
                items.put(event)
            items.put(_Ended())
        except BaseException as error:  # noqa: BLE001 - raised again by the reader
            items.put(error)

    worker = threading.Thread(target=work, name=ENGINE_THREAD, daemon=True)
    worker.start()
    try:
        with _told_of_resizing(lambda: items.put(None)):
            while True:
                try:
                    item = items.get(timeout=TICK_SECONDS)
                except queue.Empty:
                    item = None
                if isinstance(item, _Ended):
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
    finally:
        cancel.set()
        worker.join(PATIENCE_SECONDS)


class _Ended:
    """Behind the last event of a turn."""


@contextmanager
def _told_of_resizing(tell: Callable[[], None]) -> Iterator[None]:
    """Inside, `tell` is called whenever the screen changes its size: the longer redrawing waits, the less is known of
    where the terminal has put the rows."""
    if not hasattr(signal, "SIGWINCH"):
        yield
        return
    previous = signal.signal(signal.SIGWINCH, lambda _signal, _frame: tell())
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, previous)


def turn_is_running() -> bool:
    """Whether a turn that was given up still holds its engine, which must then be neither asked nor closed."""
    return any(thread.name == ENGINE_THREAD for thread in threading.enumerate())


@contextmanager
def stopping_on_interrupt(cancel: threading.Event, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Inside, SIGINT sets `cancel`. Pressed again, it does nothing for PATIENCE_SECONDS and then interrupts."""
    first: float | None = None

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal first
        cancel.set()
        if first is None:
            first = clock()
        elif clock() - first > PATIENCE_SECONDS:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


class Suspension:
    """Ctrl-Z that waits until the screen is in order."""

    def __init__(self) -> None:
        self.wanted = False
        self._suspend = signal.getsignal(signal.SIGTSTP) if hasattr(signal, "SIGTSTP") else None

    def __call__(self) -> None:
        """What the signal did before."""
        self.wanted = False
        if callable(self._suspend):
            self._suspend(signal.SIGTSTP, None)

    @property
    def is_needed(self) -> bool:
        """Where nobody restores the terminal, the signal is left alone."""
        return callable(self._suspend)

    def want(self, _signal: int, _frame: FrameType | None) -> None:
        self.wanted = True


@contextmanager
def waiting_to_suspend() -> Iterator[Suspension]:
    """Inside, SIGTSTP only asks to be suspended; whoever draws on the terminal does it between two frames."""
    suspension = Suspension()
    if not suspension.is_needed:
        yield suspension
        return
    previous = signal.signal(signal.SIGTSTP, suspension.want)
    try:
        yield suspension
    finally:
        signal.signal(signal.SIGTSTP, previous)
