"""Engine requests in threads, their events in the event loop.

The engine's iterators block, so each has a thread. Events are handed over in bundles: one wake of the loop takes all
that have come since the last.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from engine.api import Engine, Event, Finished, PrefillProgress, Reply, Request
from goinfer_chat.server.admission import Admission

Accepted = None
"""Stands before the events of a request that the engine has not refused."""


class Work:
    """Requests of one client. `events` yields (number of the request, event); the first is (0, Accepted).

    One always runs, in the place that the client has, and more in places that nobody waits for; the others come next.
    """

    def __init__(self, engine: Engine, admission: Admission, requests: Sequence[Request], *, one_prompt: bool) -> None:
        """`one_prompt`: all have the same, so it is read once, by the first, before the others start."""
        self._engine = engine
        self._admission = admission
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[int, Event | BaseException | None]] = deque()
        self._arrived = asyncio.Event()
        self._told = False  # the loop knows that there are items
        self._num_ended = 0
        self.replies: list[Reply | None] = [None] * len(requests)
        """What each came to, also where it was stopped; all are known when `running` is left."""
        self._read = threading.Event()
        if not one_prompt:
            self._read.set()
        self._to_begin = deque(range(len(requests)))
        self._num_alive = 0
        self._over = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Work]:
        """Left early, it stops the requests and waits until the engine has let go of them."""
        self._begin()
        try:
            yield self
        finally:
            self._to_begin.clear()
            for request in self._requests:
                request.cancel.set()
            self._read.set()
            await self._wait_for_all()

    async def _wait_for_all(self) -> None:
        """Also where the wait is cancelled: the place must not be free before the engine is."""
        cancelled = False
        while not self._over.is_set():
            try:
                await asyncio.shield(self._over.wait())
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    async def events(self) -> AsyncGenerator[tuple[int, Event | None]]:
        """Raises what the engine raised."""
        while True:
            while self._items:
                number, item = self._items.popleft()
                if isinstance(item, BaseException):
                    raise item
                yield number, item
                self._num_ended += isinstance(item, Finished)
            if self._num_ended == len(self._requests):
                return
            self._arrived.clear()
            self._told = False
            if not self._items:
                await self._arrived.wait()

    def _begin(self) -> None:
        """What there are places for."""
        while self._to_begin and (not self._num_alive or self._admission.take_spare()):
            number = self._to_begin.popleft()
            threading.Thread(target=self._run, args=(number,), name="reply", daemon=True).start()
            self._num_alive += 1

    def _run(self, number: int) -> None:
        request = self._requests[number]
        try:
            if number:
                self._read.wait()
            events = self._engine.generate(request)
            self._put(number, Accepted)
            for event in events:
                if not isinstance(event, PrefillProgress):
                    self._read.set()
                if isinstance(event, Finished):
                    self.replies[number] = event.reply
                self._put(number, event)
        except BaseException as error:  # noqa: BLE001 - raised again by the reader
            self._put(number, error)
        finally:
            self._read.set()
            self._call(self._ended)

    def _put(self, number: int, item: Event | BaseException | None) -> None:
        self._items.append((number, item))
        if not self._told:
            self._told = True
            self._call(self._arrived.set)

    def _call(self, function: Callable[[], object]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _ended(self) -> None:
        self._num_alive -= 1
        if self._num_alive:
            self._admission.give_back()
        self._begin()
        if not self._num_alive:
            self._over.set()
