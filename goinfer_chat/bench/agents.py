"""`bench agents`: conversations of agents that run at the same time, over HTTP, with as many slots and with fewer.

The load is synthetic and fixed: a system prompt that all share, a task for each, and with every turn what a tool might
have put out. A slot is a place to run and a conversation that stays in memory. With a slot each, a turn reads what is
new and nothing else; with fewer, conversations leave memory and come back from their files, so a turn costs the
mapping of a file more. How long requests wait for a place is in the time to the first token, and the depth of the
queue is sampled beside it.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from engine.api import Engine
from engine.errors import GoinferError, UsageError
from goinfer_chat.bench.asking import tokens_of
from goinfer_chat.bench.report import table
from goinfer_chat.settings import Settings

SAMPLE_SECONDS: Final = 0.5
_WORDS: Final = ("shelf", "box", "index", "error", "line", "value", "result", "test", "path", "module", "count", "name")

MakeEngine = Callable[[Settings, Path], Engine]
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How long the messages are, in tokens of the model. Raises UsageError."""

    conversations: int = 3
    turns: int = 10
    scale: float = 0.1
    """Of a shared system prompt of 2,000 tokens, tasks of 4,000, 1,600 more each turn, replies of 200."""

    def __post_init__(self) -> None:
        if self.conversations < 1 or self.turns < 1:
            raise UsageError("there must be at least one conversation and one turn")
        if not 0 < self.scale <= 1:
            raise UsageError(f"scale must be above 0 and at most 1, not {self.scale:g}")

    def tokens(self, full: int) -> int:
        return max(4, round(full * self.scale))

    @property
    def context_size(self) -> int:
        """What the longest conversation needs, with room for what templates put between messages."""
        per_turn = self.tokens(1600) + self.tokens(200) + 32
        return self.tokens(2000) + self.tokens(4000) + self.turns * per_turn + 64


@dataclass(frozen=True, slots=True)
class TurnOf:
    """One turn of one conversation, as its client saw it."""

    turn: int
    ttft_seconds: float
    seconds: float
    usage: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What one number of slots came to."""

    slots: int
    turns: Sequence[TurnOf]
    seconds: float
    queue: Sequence[int]
    """Requests that waited, sampled."""
    cache: dict[str, int]
    """Requests by where their prompt's start was found."""

    def of_turn(self, turn: int) -> list[TurnOf]:
        return [one for one in self.turns if one.turn == turn]

    def as_object(self) -> dict[str, Any]:
        return {
            "slots": self.slots,
            "seconds": round(self.seconds, 3),
            "queue": {"mean": round(statistics.fmean(self.queue or [0]), 3), "max": max(self.queue, default=0)},
            "cache": self.cache,
            "turns": [
                {
                    "turn": one.turn,
                    "ttft_ms": round(one.ttft_seconds * 1e3, 1),
                    "prompt_tokens": one.usage["prompt_tokens"],
                    "prefill_reused_tokens": one.usage["prefill_reused_tokens"],
                    "prefill_tokens": one.usage["prefill_tokens"],
                }
                for one in self.turns
            ],
        }


def measure(
    load: Load, slots: Sequence[int], settings: Settings, make_engine: MakeEngine, progress: Progress
) -> list[Arm]:
    """Each number of slots, one after the other, each with an engine of its own."""
    arms = []
    for number, count in enumerate(slots):

        def part(what: str, share: float, number: int = number) -> None:
            progress(what, (number + share) / len(slots))

        arms.append(_measure(load, count, settings, make_engine, part))
    return arms


def _measure(load: Load, slots: int, settings: Settings, make_engine: MakeEngine, progress: Progress) -> Arm:
    changed = replace(
        settings, kv_sessions=slots, max_concurrent=slots, context_size=settings.context_size or load.context_size
    )
    with TemporaryDirectory(prefix="goinfer-agents-") as folder:
        kept = Path(folder)
        kept.chmod(0o700)
        with closing(make_engine(changed, kept)) as engine:
            if engine.info.context_size < load.context_size:
                raise UsageError(
                    f"{load.turns} turns at scale {load.scale:g} need a context of {load.context_size:,} tokens, and "
                    f"the model has {engine.info.context_size:,}; choose a smaller --scale"
                )
            with _server(engine, slots, load.conversations) as port:
                return _run(load, slots, engine, port, progress)


@contextmanager
def _server(engine: Engine, slots: int, conversations: int) -> Iterator[int]:
    """The engine behind HTTP in this process; its port."""
    from goinfer_chat.server.admission import Admission
    from goinfer_chat.server.app import make_application
    from goinfer_chat.server.command import BackgroundServer
    from goinfer_chat.server.security import Limits
    from goinfer_chat.server.served import Models, Served

    served = Served(name="agents", engine=engine, admission=Admission(slots, conversations))
    with BackgroundServer(make_application(Models([served]), limits=Limits())) as server:
        yield server.port


def _run(load: Load, slots: int, engine: Engine, port: int, progress: Progress) -> Arm:
    turns: list[TurnOf] = []
    errors: list[BaseException] = []
    queue: list[int] = []
    ended = threading.Event()
    texts = _Texts(engine, load)

    def converse(number: int) -> None:
        try:
            for turn in _conversation(port, load, texts, number):
                turns.append(turn)
                progress(f"{slots} slots, turn {turn.turn}", len(turns) / (load.conversations * load.turns))
        except BaseException as error:  # noqa: BLE001 - raised again where the threads are waited for
            errors.append(error)

    def sample() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            queue.append(int(sum(_metrics(port, "goinfer_waiting_requests").values())))

    started = time.perf_counter()
    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    threads = [threading.Thread(target=converse, args=(n,), daemon=True) for n in range(load.conversations)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    ended.set()
    sampler.join()
    if errors:
        raise errors[0]
    found = _metrics(port, "goinfer_cache_requests_total")
    cache = {labels.split('result="')[1].split('"')[0]: int(value) for labels, value in found.items()}
    return Arm(slots=slots, turns=turns, seconds=seconds, queue=queue, cache=cache)


class _Texts:
    """Texts of so many tokens, no two the same."""

    def __init__(self, engine: Engine, load: Load) -> None:
        self._tokenizer = tokens_of(engine).encode
        self._load = load

    def text(self, mark: str, full: int) -> str:
        """About `full` tokens, scaled."""
        wanted = self._load.tokens(full)
        words = [mark]
        number = 0
        while True:
            words += [f"{word} {(number := number + 1) * 7919 % 1000}" for word in _WORDS]
            text = " ".join(words)
            ids = self._tokenizer(text)
            if len(ids) >= wanted:
                return text[: max(len(mark), len(text) * wanted // len(ids))]


def _conversation(port: int, load: Load, texts: _Texts, number: int) -> Iterator[TurnOf]:
    messages = [
        {"role": "system", "content": texts.text("You are an agent.", 2000)},
        {"role": "user", "content": texts.text(f"Task {number}.", 4000)},
    ]
    for turn in range(1, load.turns + 1):
        if turn > 1:
            messages.append({"role": "user", "content": texts.text(f"Output {turn} of task {number}.", 1600)})
        text, one = _ask(port, messages, load.tokens(200), turn)
        messages.append({"role": "assistant", "content": text})
        yield one


def _ask(port: int, messages: Sequence[dict[str, str]], max_tokens: int, turn: int) -> tuple[str, TurnOf]:
    body = {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    first, text = None, ""
    usage: dict[str, Any] = {}
    with closing(HTTPConnection("127.0.0.1", port, timeout=600)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        answer = connection.getresponse()
        if answer.status != 200:
            raise GoinferError(f"the server answered {answer.status}: {answer.read(300).decode('utf-8', 'replace')}")
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise GoinferError(f"the server gave up: {chunk['error']['message']}")
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                if first is None and (piece or choice["finish_reason"]):
                    first = time.perf_counter() - started
                text += piece
            usage = chunk.get("usage") or usage
    assert first is not None, "a stream ends with a reason"
    return text, TurnOf(turn, first, time.perf_counter() - started, usage)


def _metrics(port: int, name: str) -> dict[str, float]:
    """Values of a metric by its labels."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith((f"{name}{{", f"{name} ")))
    return {labels.removeprefix(name): float(value) for labels, _, value in found}


def lines(arms: Sequence[Arm], load: Load) -> list[str]:
    """A table of the time to the first token by turn, and what stands behind it."""
    head = ["turn", "prompt", *(f"{arm.slots} slots: TTFT, ms (prefilled)" for arm in arms)]
    rows = []
    for turn in range(1, load.turns + 1):
        cells = [str(turn), f"{max(one.usage['prompt_tokens'] for one in arms[0].of_turn(turn)):,}"]
        for arm in arms:
            found = arm.of_turn(turn)
            median = statistics.median(one.ttft_seconds * 1e3 for one in found)
            cells.append(f"{median:,.0f} ({max(one.usage['prefill_tokens'] for one in found):,})")
        rows.append(cells)
    about = []
    for arm in arms:
        cache = ", ".join(f"{count} {result}" for result, count in sorted(arm.cache.items()))
        waited = f"queue {statistics.fmean(arm.queue or [0]):.1f} on average, {max(arm.queue, default=0)} at most"
        about.append(f"{arm.slots} slots: {arm.seconds:,.1f} s, {waited}; prompts: {cache}")
    return [*table(head, rows), "", *about]
