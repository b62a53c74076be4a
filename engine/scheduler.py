"""Several replies at once: who is admitted, who runs a step, and what becomes of those who leave.

Only one thread at a time, the writer, touches the model, the pool, the conversations and their files. There is no
special thread for that: whoever waits for an event of a reply runs a step for all replies, and leaves the events of
others where their callers find them. So a lone caller needs no switch of threads (one for each token would cost a
small model a tenth of its speed), and a program in which nobody waits uses no CPU.

A reply continues as long as anybody waits for any reply. Its events are kept until they are fetched, and they are few:
a reply ends with the context at the latest. Two requests of one conversation run one after the other, since a
conversation has one history.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Self

from engine.api import Event, Finished, Request
from engine.errors import EngineError
from engine.generate import Generation
from engine.kept_files import KeptFiles, KeptTurn
from engine.kv_cache import BlockTable
from engine.sessions import Sessions
from engine.step import PrefillPace, step

if TYPE_CHECKING:
    from engine.backend import StepModel

MAX_CONCURRENT = 32
"""Each of so many has at least two rows of logits in a step, and eight of a prompt."""

CLOSED = "the engine is closed; load the model again"

Start = Callable[[BlockTable], Generation]
"""Makes the generation on a table that holds the start of its prompt."""


@dataclass(eq=False, slots=True)
class _Job:
    """A request on its way: waiting (no generation yet), running, ended."""

    request: Request
    prompt_ids: Sequence[int]
    start: Start
    wake: threading.Condition
    """The caller waits on it: for `events`, for `ended`, or for its turn to run a step."""
    events: deque[Event] = field(default_factory=deque)
    error: Exception | None = None
    """Raised after the events, once."""
    generation: Generation | None = None
    turn: KeptTurn | None = None
    submitted: bool = False
    waits: bool = False
    """Its caller waits."""
    dropped: bool = False
    """Nobody wants the rest."""
    ended: bool = False

    @property
    def ready(self) -> bool:
        return bool(self.events) or self.ended


class Scheduler:
    """The replies of one model. Others may touch model, sessions and files only inside `writing`."""

    def __init__(
        self, model: StepModel, sessions: Sessions, *, max_concurrent: int = 4, prefill_chunk: int | None = None
    ) -> None:
        assert 1 <= max_concurrent <= MAX_CONCURRENT
        self.kept: KeptFiles | None = None
        self._model: StepModel | None = model
        self._sessions: Sessions | None = sessions
        self._max_concurrent = max_concurrent
        self._prefill_chunk = prefill_chunk
        self._pace = PrefillPace()
        self._mutex = threading.Lock()  # of all below; held for microseconds, never in a step
        self._writer: int | None = None  # its thread
        self._wanting: deque[threading.Condition] = deque()  # others that want to write, in order
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._dropped: deque[_Job] = deque()
        self._ended: list[_Job] = []  # whose callers have not been told
        self._to_forget: set[str] = set()
        self._busy = False  # somebody has asked for a reply since `wait_for_rest` looked
        self._closed = threading.Event()

    def submit(self, request: Request, prompt_ids: Sequence[int], start: Start, first: Sequence[Event] = ()) -> Events:
        """Events of a request, `first` before all others; it queues when the first of them is asked for."""
        return Events(self, _Job(request, prompt_ids, start, threading.Condition(self._mutex), deque(first)))

    def forget(self, conversation: str) -> None:
        """Drop the cache of a conversation: at once, or when its turn ends."""
        self._to_forget.add(conversation)
        with self.writing():
            self._forget_idle()

    def close(self, then: Callable[[], None]) -> None:
        """End all replies as cancelled, and refuse others. Calls `then`, the first time, with nothing running."""
        self._closed.set()
        with self.writing():
            first = self._model is not None
            for job in [*self._waiting]:
                self._fail(job, EngineError(CLOSED))
            for job in [*self._running]:
                assert job.generation is not None
                job.generation.cancel()
                self._end(job)
            if first:
                if self.kept is not None:
                    self.kept.close()
                self.kept = self._model = self._sessions = None
                then()

    @property
    def closing(self) -> bool:
        return self._closed.is_set()

    def wait_for_rest(self, seconds: float) -> bool:
        """Wait until no reply was waiting or running for so long; False where the engine is closed before."""
        while not self._closed.wait(seconds):
            with self._mutex:
                rested = not self._busy and not self._waiting and not self._running
                self._busy = False
            if rested:
                return True
        return False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Alone with the model and all that belongs to it, between two steps. Whoever asks first is first."""
        with self._mutex:
            if self._writer is not None or self._wanting:
                turn = threading.Condition(self._mutex)
                self._wanting.append(turn)
                while self._writer is not None or self._wanting[0] is not turn:
                    turn.wait()
                self._wanting.popleft()
            self._writer = get_ident()
        try:
            yield
        finally:
            with self._mutex:
                self._hand_over()

    # ------------------------------------------------------------------ of callers; each holds the mutex
    def next_event(self, job: _Job) -> Event | None:
        """The next event of a reply, None behind the last. Runs steps where nobody else does."""
        with self._mutex:
            self._submit(job)
            while True:
                if job.events:
                    event = job.events.popleft()
                    self._wake_one()
                    return event
                if job.ended:
                    self._wake_one()
                    error, job.error = job.error, None
                    if error is not None:
                        raise error
                    return None
                self._drive_or_wait(job)

    def drop(self, job: _Job) -> None:
        """End a reply that nobody reads any more. Returns when its cache is consistent, where it can wait for that."""
        if not job.submitted or job.ended:
            job.ended, job.error = True, None
            job.events.clear()
            return
        job.dropped = True
        self._dropped.append(job)
        # Garbage may be collected, and an iterator with it, in a thread that is inside of this class. It cannot wait
        # for itself, and need not: the next step begins with those dropped.
        if self._writer == get_ident() or not self._mutex.acquire(timeout=0.1):
            return
        try:
            self._wait_for_end(job)
            self._wake_one()
        finally:
            self._mutex.release()

    def _wait_for_end(self, job: _Job) -> None:
        while not job.ended:
            self._drive_or_wait(job)

    def _submit(self, job: _Job) -> None:
        if not job.submitted:
            job.submitted = True
            if not job.ended and self.closing:
                job.ended, job.error = True, EngineError(CLOSED)
            elif not job.ended:
                self._busy = True
                self._waiting.append(job)

    def _drive_or_wait(self, job: _Job) -> None:
        """Run one step for all, or wait until something has changed for this one."""
        if self._writer is not None or self._wanting:
            job.waits = True
            job.wake.wait()
            job.waits = False
            return
        self._writer = get_ident()
        self._mutex.release()
        try:
            self._round()
        except BaseException:
            job.dropped = True  # an interrupt of this thread: its caller goes, the others go on
            self._dropped.append(job)
            raise
        finally:
            self._mutex.acquire()
            self._hand_over(job)

    def _hand_over(self, driver: _Job | None = None) -> None:
        """The writer is done: wake the next one that wants to write, and callers whose events have come."""
        self._writer = None
        for other in [*self._running, *self._waiting, *self._ended]:
            if other.waits and other.ready:
                other.wake.notify()
        self._ended.clear()
        if self._wanting:
            self._wanting[0].notify()
        elif driver is None or driver.dropped:  # else it goes on
            self._wake_one()

    def _wake_one(self) -> None:
        """Wake somebody to run the next step, if nobody runs one."""
        if self._writer is not None:
            return
        if self._wanting:
            self._wanting[0].notify()
            return
        for other in (*self._running, *self._waiting):
            if other.waits and not other.ready:
                other.wake.notify()
                return

    # ------------------------------------------------------------------ of the writer
    def _round(self) -> None:
        """End what is over, admit what waits, and run one step for all."""
        self._leave()
        self._forget_idle()
        self._admit()
        running = [job.generation for job in self._running if job.generation is not None]
        assert self._model is not None
        assert self._sessions is not None
        going = [generation for generation in running if not generation.done]
        if going:
            try:
                step(self._model, self._sessions, going, self._pace, self._prefill_chunk)
            except Exception as error:  # noqa: BLE001 - none of them can go on, and their callers get it
                for generation in going:
                    generation.error = error
        for job in [*self._running]:
            self._collect(job)

    def _leave(self) -> None:
        """End what nobody wants or what was cancelled."""
        while self._dropped:
            job = self._dropped.popleft()
            if not job.ended:
                self._end(job)
        assert self._sessions is not None
        for job in [*self._waiting]:
            if job.request.cancel.is_set():
                self._waiting.remove(job)
                job.generation = job.start(BlockTable(self._sessions.pool))
                job.generation.cancel()
                self._finish(job, [Finished(job.generation.reply())])
        for job in self._running:
            if job.request.cancel.is_set() and job.generation is not None:
                job.generation.cancel()

    def _admit(self) -> None:
        """Begin what waits, in order, as far as there are places. A conversation's next request waits for its last."""
        for job in [*self._waiting]:
            if len(self._running) == self._max_concurrent:
                return
            if all(other.request.conversation != job.request.conversation for other in self._running):
                try:
                    self._begin(job)
                except Exception as error:  # noqa: BLE001 - it is this request's, and its caller gets it
                    self._fail(job, error)

    def _begin(self, job: _Job) -> None:
        assert self._sessions is not None
        conversation = job.request.conversation
        warm = conversation in self._sessions.kept
        table = self._sessions.begin(conversation, job.prompt_ids)
        try:
            if self.kept is not None:
                goes_on, told = job.request.goes_on, job.request.told
                job.turn = self.kept.begin(conversation, table, job.prompt_ids, warm=warm, goes_on=goes_on, told=told)
                job.events += job.turn.take_notices()
            job.generation = job.start(table)
        except BaseException:
            if job.turn is not None:
                job.turn.finish(save=False)
            self._sessions.end(conversation)
            raise
        self._waiting.remove(job)
        self._running.append(job)

    def _collect(self, job: _Job) -> None:
        """Take what a step has brought."""
        generation = job.generation
        assert generation is not None
        job.events += generation.take_events()
        if generation.done or generation.error is not None:
            self._end(job)
        elif job.turn is not None and not generation.behind:
            job.turn.keep_up()

    def _end(self, job: _Job) -> None:
        """A running reply is over, in whatever way; or one that waits is not wanted any more."""
        generation, conversation = job.generation, job.request.conversation
        if generation is None:
            self._waiting.remove(job)
            self._finish(job, [])
            return
        assert self._sessions is not None
        last: list[Event] = [*generation.take_events()]
        generation.table.rest()
        if job.turn is not None:
            job.turn.finish(save=not generation.behind)
            last += job.turn.take_notices()
        if generation.error is None and not job.dropped:
            reply = generation.reply()
            last.append(Finished(reply if job.turn is None else job.turn.described(reply)))
        self._running.remove(job)
        self._sessions.end(conversation)
        self._forget_idle()
        self._finish(job, last, generation.error)

    def _fail(self, job: _Job, error: Exception) -> None:
        self._waiting.remove(job)
        self._finish(job, [], error)

    def _finish(self, job: _Job, last: Sequence[Event], error: Exception | None = None) -> None:
        if job.dropped:
            job.events.clear()
        else:
            job.events += last
            job.error = error
        job.ended = True
        self._ended.append(job)

    def _forget_idle(self) -> None:
        """Drop the caches that nobody wants any more, but those in use."""
        if self._sessions is None:
            return
        running = {job.request.conversation for job in self._running}
        for conversation in self._to_forget - running:
            self._to_forget.discard(conversation)
            self._sessions.forget(conversation)
            if self.kept is not None:
                self.kept.forget(conversation)


class Events:
    """The events of one reply. For one thread at a time, and any thread; `close` and dropping it end the reply."""

    def __init__(self, scheduler: Scheduler, job: _Job) -> None:
        self._scheduler = scheduler
        self._job = job

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        event = self._scheduler.next_event(self._job)
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        """End the reply, if it has not ended. What was evaluated stays in the cache."""
        self._scheduler.drop(self._job)

    def __del__(self) -> None:
        self.close()
