"""One answer that is generated, from the wait for a place to its last byte.

Whatever ends it early, a client that leaves, an error, the end of the server, stops the engine's work and gives the
place free: all of it happens inside of one call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, MutableMapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from starlette.responses import Response

from engine.api import Event, Finished, Message, Reply, Request
from goinfer_chat.server.errors import ApiError, from_exception
from goinfer_chat.server.metrics import Metrics
from goinfer_chat.server.security import Receive, Scope, Send, answer
from goinfer_chat.server.served import Served
from goinfer_chat.server.transcripts import Turn
from goinfer_chat.server.work import Work

PING_SECONDS = 10.0
"""Silence after which a stream shows that it lives: less than what proxies and clients wait."""


SEND_SECONDS = 60.0
"""In which a client must take what it is sent. One that takes nothing has left, for all that it matters."""


class Format(Protocol):
    """How an API writes an answer."""

    def start(self) -> list[bytes]:
        """What a stream begins with."""
        ...

    def event(self, number: int, event: Event) -> list[bytes]:
        """What a stream has of an event of the choice `number`."""
        ...

    def end(self, replies: Sequence[Reply]) -> list[bytes]:
        """What a stream ends with."""
        ...

    def failed(self, error: ApiError) -> list[bytes]:
        """What a stream ends with that cannot go on."""
        ...

    def ping(self) -> bytes: ...

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """The answer in one piece."""
        ...


class OpenAIFormat:
    """What the streams of OpenAI's APIs have in common."""

    def failed(self, error: ApiError) -> list[bytes]:
        return [sse(error.as_openai())]

    def ping(self) -> bytes:
        return b": ping\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a request asks for, checked."""

    model: Served
    requests: Sequence[Request]
    """One for each choice. Their conversations are chosen when they begin."""
    format: Format
    stream: bool
    one_prompt: bool = True
    """All have the same prompt."""
    finished: Callable[[Message], None] = lambda message: None
    """Called with the message of the first reply."""


@dataclass(frozen=True, slots=True)
class TextJob:
    """A job for which a text has to be tokenized first."""

    model: Served
    make: Callable[[], Job]


@dataclass(slots=True)
class Context:
    """What all answers share."""

    metrics: Metrics
    running: set[asyncio.Task[None]]
    """Tasks of answers that are generated: cancelled when the server ends."""
    say: Callable[[str], None] = lambda line: None
    """Tells who runs the server, in one line, what its clients are not told."""
    closing: bool = False


class Answer(Response):
    """Generates a job's answer and sends it."""

    def __init__(self, job: Job, context: Context) -> None:
        super().__init__()
        self._job = job
        self._context = context
        self._begun = False
        self._complete = False  # the last byte is on its way, behind which a client may go

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._answer(scope, send))
        gone = asyncio.create_task(_gone(receive))
        self._context.running.add(work)
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if self._complete:
                await asyncio.wait({work})
            elif not work.done():
                self._context.metrics.count("goinfer_disconnects_total")
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)
            self._context.running.discard(work)

    async def _answer(self, scope: Scope, send: Send) -> None:
        job, send = self._job, _with_patience(send)
        try:
            try:
                if self._context.closing:
                    raise ApiError(503, "the server is shutting down", retry_after=5)
                async with job.model.admission.place(), self._work() as work, aclosing(work.events()) as events:
                    if job.stream:
                        await self._stream(events, send)
                    else:
                        async for _ in events:
                            pass
                    replies = _finished(work)
                self._complete = True
                if job.stream:
                    await _send(send, job.format.end(replies), last=True)
                else:
                    await answer(send, 200, job.format.whole(replies))
            except asyncio.CancelledError:
                if not self._context.closing:
                    raise
                raise ApiError(503, "the server is shutting down", retry_after=5) from None
        except StalledError:
            self._context.metrics.count("goinfer_disconnects_total")
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets to know what it may
            told = from_exception(error)
            if told.code == "queue_full":
                self._context.metrics.count("goinfer_rejected_total", full="queue")
            if not self._begun:
                await answer(send, told.status, told.body(scope["path"]), told.headers)
            else:
                await _send(send, job.format.failed(told), last=True)
            if told.status == 500:
                self._context.say(f"{scope['path']}: internal error: {type(error).__name__}: {error}")

    @asynccontextmanager
    async def _work(self) -> AsyncIterator[Work]:
        """The engine's work on the requests, each under the name of a conversation."""
        job, transcripts = self._job, self._job.model.transcripts
        turns: list[Turn | tuple[str, bool]] = []
        requests = []
        for number, request in enumerate(job.requests):
            if request.messages:
                setting = [request.tools, request.template_kwargs]
                turn = transcripts.begin(request.messages, setting)
                # Further choices are not kept: a conversation whose name cannot be a file's stays off the disk.
                name = turn.name if number == 0 else f".{turn.name}"
                requests.append(replace(request, messages=turn.messages, conversation=name))
                turns.append(turn)
            else:
                raw = transcripts.begin_raw(request.prompt_ids or ())
                requests.append(replace(request, conversation=raw[0]))
                turns.append(raw)
        work = Work(job.model.engine, job.model.admission, requests, one_prompt=job.one_prompt)
        try:
            async with work.running():
                yield work
        finally:
            for number, (turn_, reply) in enumerate(zip(turns, work.replies)):
                if isinstance(turn_, Turn):
                    turn_.end(reply, keep_conversation=number == 0)
                    if number:
                        await asyncio.to_thread(job.model.engine.forget, requests[number].conversation)
                else:
                    transcripts.end_raw(turn_[0], reply)
                if reply is not None:
                    goes_on = turn_.goes_on if isinstance(turn_, Turn) else turn_[1]
                    self._context.metrics.reply(job.model.name, reply.stats, goes_on=goes_on)
            if work.replies[0] is not None and work.replies[0].finish_reason != "cancelled":
                job.finished(work.replies[0].as_message())

    async def _stream(self, events: AsyncGenerator[tuple[int, Event | None]], send: Send) -> None:
        """Nothing is sent before the engine has accepted the request, so what it refuses has a status of its own."""
        form = self._job.format
        iterator = aiter(events)
        await anext(iterator)
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        self._begun = True
        await _send(send, form.start())
        following: asyncio.Task[tuple[int, Event | None]] | None = None
        try:
            while True:
                if following is None:
                    following = asyncio.ensure_future(anext(iterator))
                done, _ = await asyncio.wait({following}, timeout=PING_SECONDS)
                if not done:
                    await _send(send, [form.ping()])
                    continue
                try:
                    number, event = following.result()
                except StopAsyncIteration:
                    break
                finally:
                    following = None
                if isinstance(event, Finished) and event.reply.finish_reason == "cancelled":
                    break
                if event is not None:
                    await _send(send, form.event(number, event))
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)


_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def _send(send: Send, parts: Sequence[bytes], *, last: bool = False) -> None:
    if parts or last:
        await send({"type": "http.response.body", "body": b"".join(parts), "more_body": not last})


def _finished(work: Work) -> list[Reply]:
    """All replies. A cancelled one was so by the engine's end: nobody here cancels and goes on."""
    replies = [reply for reply in work.replies if reply is not None]
    if any(reply.finish_reason == "cancelled" for reply in replies):
        raise ApiError(503, "the server is shutting down", retry_after=5)
    return replies


class StalledError(Exception):
    """The client does not take what it is sent."""


def _with_patience(send: Send) -> Send:
    async def sent(message: MutableMapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await send(message)
        except TimeoutError:
            raise StalledError from None

    return sent


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def sse(data: dict[str, Any] | str, event: str | None = None) -> bytes:
    """One event of a stream."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    head = f"event: {event}\n" if event is not None else ""
    return f"{head}data: {text}\n\n".encode()
