"""An engine that is a server: requests go out through the official OpenAI client, events come in.

A thread of its own reads the stream, so that a cancellation is obeyed within a tenth of a second whatever the server
does. What a server may get wrong is noticed here: it is asked again when it is busy, what came of a broken stream is
kept, and a call that had to be made is checked before anybody hears of it.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from engine.api import (
    Event,
    Finished,
    ModelInfo,
    NamedTool,
    Notice,
    Prospect,
    Request,
    SamplingParams,
    TextDelta,
    ToolCallReady,
)
from engine.errors import EngineError, UsageError, one_line
from engine.remote.body import body_of
from engine.remote.checks import problem_of_calls, problem_of_text
from engine.remote.reply import Incoming

if TYPE_CHECKING:
    from openai import OpenAI

TICK_SECONDS = 0.1
ATTEMPTS = 5
"""How often a busy server is asked."""
FORCED_ATTEMPTS = 3
"""How often a call that had to be made is asked for."""
LONGEST_WAIT = 60.0
"""Seconds between two attempts, whatever the server wants."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """The stream is over; `error` says what broke it."""

    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Busy:
    """The server has no room; it wants to be asked again after so many seconds, if it said."""

    reason: str
    retry_after: float | None


class _Reading:
    """The connection of one stream, which its reader waits on and another thread may end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.stopped = False

    def started(self, response: Any) -> None:
        """The server has answered; what it sends comes over the connection of `response`."""
        network = response.extensions.get("network_stream")
        with self._lock:
            self._socket = network and network.get_extra_info("socket")
            if self.stopped:
                self._hang_up()

    def ended(self) -> None:
        """All has come; the connection is no longer this stream's, and the next request may be sent over it."""
        with self._lock:
            self._socket = None

    def stop(self) -> None:
        """Nothing more is wanted: a reader that waits for a server that says nothing wakes up, and the server sees
        that nobody listens."""
        with self._lock:
            self.stopped = True
            self._hang_up()

    def _hang_up(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is closed already
                self._socket.shutdown(socket.SHUT_RDWR)


class RemoteEngine:
    """A model on a server. Several requests may run at once; usable as a context manager."""

    @classmethod
    def connect(
        cls,
        base_url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        timeout_seconds: float = 600.0,
        sleep: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> RemoteEngine:
        """The server at `base_url` (such as http://127.0.0.1:8000/v1), checked to be there and to have the model.

        `model` None: the only one it has. `timeout_seconds`: how long nothing may come. `sleep(cancel, seconds)` waits
        between two attempts. Raises UsageError for a model it does not have, and EngineError where it cannot be used.
        """
        from openai import OpenAI

        if not base_url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url {base_url}: a server's address begins with http:// or https://")
        # The client wants a key; servers that need none do not look at it.
        client = OpenAI(base_url=base_url, api_key=api_key or "none", max_retries=0, timeout=timeout_seconds)
        return cls(client, model, sleep)

    def __init__(
        self, client: OpenAI, model: str | None, sleep: Callable[[threading.Event, float], bool] = threading.Event.wait
    ) -> None:
        self._client = client
        self._sleep = sleep
        self._closing = threading.Event()
        self._host = client.base_url.host
        found = _choose(self._models(), model, self._host)
        self.info = ModelInfo(
            name=_string(found, "id"),
            architecture="",
            quantization="",
            num_parameters=0,
            num_layers=0,
            vocab_size=0,
            context_size=_first_count(found, "max_model_len", "context_length", "context_window"),
            train_context_size=0,
            kv_bytes_per_token=0,
            weight_bytes=0,
            backend="remote",
            kernels=self._host,
            threads=0,
            identity=f"remote {client.base_url} {_string(found, 'id')}",
        )

    # -- the protocol --------------------------------------------------------------------------------------------------

    def generate(self, request: Request) -> Iterator[Event]:
        """Events of one reply, ending with Finished.

        Raises UsageError at once for what a server cannot be asked. While it runs: EngineError for a server that
        refuses, cannot be reached, or does not call the tool it must.
        """
        _check(request)
        if self._closing.is_set():
            raise EngineError("the connection is closed; start again")
        return self._run(request)

    def count_tokens(self, request: Request) -> int:
        """Raises EngineError: only the server knows."""
        raise EngineError("the server does not say how many tokens a prompt has before it reads it")

    def foresee(self, request: Request, forgotten: str | None = None) -> Prospect:
        """Raises EngineError: only the server knows."""
        raise EngineError("the server does not say what it still has of a prompt before it reads it")

    def forget(self, conversation: str) -> None:
        """What a server keeps is its own affair."""

    def close(self) -> None:
        """Ends what runs."""
        self._closing.set()
        self._client.close()

    def __enter__(self) -> RemoteEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- a reply -------------------------------------------------------------------------------------------------------

    def _run(self, request: Request) -> Iterator[Event]:
        body, submitted = body_of(request, self.info.name), perf_counter()
        forced = bool(request.tools) and (
            request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)
        )
        for attempt in range(1, FORCED_ATTEMPTS + 1):
            incoming = Incoming(submitted, self.info.context_size)
            # Whether a forced call is right is known at its end: nothing of it is shown before.
            for event in self._stream(body, incoming, request.cancel):
                if not (forced and isinstance(event, TextDelta)):
                    yield event
            if request.cancel.is_set() or self._closing.is_set():
                yield Finished(incoming.reply("cancelled"))
                return
            reason = incoming.finish_reason
            problem = problem_of_calls(request, incoming.calls()) if forced and reason != "length" else None
            if problem is None:
                break
            if attempt == FORCED_ATTEMPTS:
                raise EngineError(
                    f"{self._host} does not obey tool_choice: {problem}, {attempt} times; choose another model"
                )
            yield Notice(f"{self._host} does not obey tool_choice: {problem}; asking again")
            if "seed" in body:
                body["seed"] += 1  # the same seed would say the same
        if reason is None:
            yield Notice(f"the stream of {self._host} broke off; the part of the reply that had come is kept")
        reply = incoming.reply(reason or "dropped")
        for call in reply.tool_calls:
            yield ToolCallReady(call)
        if request.json_schema is not None and reason == "stop" and (wrong := problem_of_text(request, reply.text)):
            yield Notice(f"{self._host} does not keep to the schema: {wrong}")
        if forced and not reply.tool_calls:
            reply = replace(reply, text="")
        yield Finished(reply)

    def _stream(self, body: dict[str, Any], incoming: Incoming, cancel: threading.Event) -> Iterator[Event]:
        """Events of one stream, asked for again as long as the server is busy. Raises EngineError."""
        for attempt in range(1, ATTEMPTS + 1):
            busy: _Busy | None = None
            for item in self._items(body, cancel):
                match item:
                    case _Busy():
                        busy = item
                    case _Ended(error=None):
                        return
                    case _Ended(error=error):
                        if not incoming.begun:
                            raise EngineError(f"{self._host}: {one_line(error)}") from error
                        return
                    case _:
                        yield from incoming.push(item)
            if busy is None:  # cancelled
                return
            if attempt == ATTEMPTS:
                raise EngineError(f"{self._host} is busy ({busy.reason}), also at the {attempt}th attempt; try later")
            wait = min(LONGEST_WAIT, 0.5 * 2**attempt if busy.retry_after is None else busy.retry_after)
            yield Notice(f"{self._host} is busy ({busy.reason}); asking again in {wait:.0f} s")
            if self._sleep(cancel, wait):
                return

    def _items(self, body: dict[str, Any], cancel: threading.Event) -> Iterator[Mapping[str, Any] | _Busy | _Ended]:
        """Chunks as they come, and how it ended; nothing more once it is cancelled."""
        items: queue.SimpleQueue[Mapping[str, Any] | _Busy | _Ended] = queue.SimpleQueue()
        reading = _Reading()
        threading.Thread(target=self._read, args=(body, items, reading), name="remote", daemon=True).start()
        try:
            while not (cancel.is_set() or self._closing.is_set()):
                with contextlib.suppress(queue.Empty):
                    item = items.get(timeout=TICK_SECONDS)
                    yield item
                    if isinstance(item, (_Busy, _Ended)):
                        return
        finally:
            reading.stop()

    def _read(self, body: dict[str, Any], items: queue.SimpleQueue[Any], reading: _Reading) -> None:
        from openai import APIConnectionError, APIError, APIStatusError

        try:
            with self._client.chat.completions.create(**body) as stream:
                reading.started(stream.response)
                for chunk in stream:
                    if reading.stopped:
                        return
                    items.put(chunk.model_dump())
                reading.ended()
            items.put(_Ended())
        except APIStatusError as error:
            if error.status_code in (429, 503):
                reason = f"{error.status_code} {_message(error.body) or error.response.reason_phrase}"
                items.put(_Busy(one_line(reason), _seconds(error.response.headers.get("retry-after"))))
            else:
                items.put(_Ended(EngineError(f"{error.status_code} {_message(error.body) or error.message}")))
        except APIConnectionError as error:  # a timeout is one too
            items.put(_Ended(EngineError(f"cannot be reached, or stopped answering ({error.__cause__ or error})")))
        except APIError as error:
            items.put(_Ended(error))
        except Exception as error:  # noqa: BLE001 - whatever a server sends, it ends this stream and no more
            items.put(_Ended(error))

    def _models(self) -> list[Mapping[str, Any]] | None:
        """What the server lists; None where it lists nothing. Raises EngineError where it cannot be used."""
        from openai import APIConnectionError, APIError, APIStatusError

        try:
            return [model.model_dump() for model in self._client.models.list().data or ()]
        except APIStatusError as error:
            if error.status_code in (401, 403):
                raise EngineError(
                    f"{self._host} wants a key ({error.status_code}): set GOINFER_CHAT_API_KEY or keep one in a keyring"
                ) from error
            return None
        except APIConnectionError as error:
            raise EngineError(f"{self._host} cannot be reached ({one_line(error.__cause__ or error)})") from error
        except (APIError, ValueError, AttributeError, TypeError):
            return None


def _choose(models: list[Mapping[str, Any]] | None, name: str | None, host: str) -> Mapping[str, Any]:
    """The model of that name, or the only one. Raises UsageError."""
    names = [_string(model, "id") for model in models or ()]
    if name is None:
        if models is None or len(models) != 1:
            there = f"it has {', '.join(names[:20])}" if names else "it does not list what it has"
            raise UsageError(f"--model says which model of {host} to use; {there}")
        return models[0]
    for model, known in zip(models or (), names):
        if known == name:
            return model
    if names:
        raise UsageError(f"{host} has no model {name!r}; it has {', '.join(names[:20])}")
    return {"id": name}


def _check(request: Request) -> None:
    defaults = SamplingParams()
    if request.prompt_ids is not None:
        raise UsageError("a server takes messages, not token ids; give messages instead of prompt_ids")
    if request.speculation is not None:
        raise UsageError("how a server guesses ahead is chosen where it is started; leave --spec out")
    if request.think_tokens is not None:
        raise UsageError("a server does not take a budget of reasoning; leave --think-tokens out")
    if request.top_logprobs is not None:
        raise UsageError("a server is not asked for log probabilities; leave top_logprobs out")
    if request.sampling.penalty_window != defaults.penalty_window:
        raise UsageError("a server has its own window of penalties; leave --penalty-window out")


def _string(model: Mapping[str, Any], key: str) -> str:
    value = model.get(key)
    return value if isinstance(value, str) else ""


def _first_count(model: Mapping[str, Any], *keys: str) -> int:
    return next((model[key] for key in keys if isinstance(model.get(key), int) and model[key] > 0), 0)


def _message(body: object) -> str:
    """The server's own words in an error: OpenAI's form, or those others use."""
    while isinstance(body, Mapping):
        body = body.get("error") or body.get("message") or body.get("detail")
    return body if isinstance(body, str) else ""


def _seconds(text: str | None) -> float | None:
    """Seconds in a Retry-After header; None for a date or anything else that is not a number."""
    try:
        return max(0.0, float(text)) if text is not None else None
    except ValueError:
        return None
