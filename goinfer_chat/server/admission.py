"""How many replies run and how many requests wait. Without a place it is refused at once."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

from goinfer_chat.server.errors import ApiError


class Admission:
    """Places of one model: `max_running` for replies that run and `max_waiting` for requests. For one event loop.

    A request has one place as long as it runs, and for more replies than one takes others that nobody waits for.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.num_running = 0
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._seconds = 1.0  # of a request, of late

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place to run, waited for in order. Raises ApiError 429 where too many wait."""
        await self._enter()
        started = monotonic()
        try:
            yield
        finally:
            self._seconds += 0.2 * (monotonic() - started - self._seconds)
            self._leave()

    def take_spare(self) -> bool:
        """Another place for who has one, if one is free and nobody waits; `give_back` returns it."""
        spare = self.num_running < self._max_running and not self._waiting
        self.num_running += spare
        return spare

    def give_back(self) -> None:
        """It goes to who has waited for longest."""
        self._leave()

    async def _enter(self) -> None:
        if self.num_running < self._max_running and not self._waiting:
            self.num_running += 1
            return
        if len(self._waiting) >= self._max_waiting:
            raise ApiError(
                429,
                f"{self.num_running} requests are running and {len(self._waiting)} are waiting, which is the limit",
                code="queue_full",
                retry_after=self._retry_after(),
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the place was given in the same moment
                self._leave()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def _leave(self) -> None:
        """The place goes to who has waited for longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its task is cancelled, and has not yet come to take it off the list
                turn.set_result(None)
                return
        self.num_running -= 1

    def _retry_after(self) -> int:
        rounds = (len(self._waiting) + 1) / self._max_running
        return min(60, max(1, math.ceil(rounds * self._seconds)))
