"""`bench clients`: several conversations at once, which share the steps of the model.

Each client plays a conversation of two ordinary questions, greedy, as soon as its last reply is there. The rate is all
tokens of all replies over the wall clock, prompts included. Alone, the same conversations are played one after the
other. By the contract of the engine every reply is the one that the client gets alone with plain decoding, and that is
checked here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

from engine.api import Engine, Reply, SpeculationMode
from goinfer_chat.bench.asking import Progress
from goinfer_chat.bench.report import Summary, table
from goinfer_chat.bench.texts import CONVERSATIONS
from goinfer_chat.bench.traffic import Way, play, ways_of

MAX_TOKENS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientsRow:
    """What one way of decoding did with one number of clients."""

    name: str
    clients: int
    rate: Summary
    """Tokens of all replies per second of the wall clock."""
    ratio: Summary | None
    """Rate over that of one client, decoding the same way."""
    same_replies: bool
    """Whether every reply has the ids of that which its client gets alone with plain decoding."""

    def as_object(self) -> dict[str, Any]:
        return {
            "decode": self.name,
            "clients": self.clients,
            "tok_s": self.rate.as_object(),
            "ratio": self.ratio.as_object() if self.ratio else None,
            "same_replies": self.same_replies,
        }


def lines(rows: Sequence[ClientsRow]) -> list[str]:
    """The table."""
    return table(
        ["decoding", "clients", "tok/s together", "of one client", "same replies"],
        [
            [
                row.name,
                f"{row.clients}",
                row.rate.text(),
                row.ratio.text(2) if row.ratio else "",
                "yes" if row.same_replies else "NO",
            ]
            for row in rows
        ],
    )


def measure(
    engine: Engine,
    modes: Sequence[SpeculationMode],
    clients: int,
    *,
    max_tokens: int,
    repeat: int,
    progress: Progress,
) -> list[ClientsRow]:
    """One client and several, in turn, `repeat` times each, from empty caches. The first mode is the plain one.

    Raises what Engine.generate raises.
    """
    ways = ways_of(engine, modes)
    runs = [(way, count) for way in ways for count in (1, clients)]
    rates: dict[tuple[str, int], list[float]] = {(way.name, count): [] for way, count in runs}
    said: dict[tuple[str, int], set[tuple[tuple[int, ...], ...]]] = {(way.name, count): set() for way, count in runs}
    for n in range(repeat):
        for r, (way, count) in enumerate(runs):
            progress(f"{way.name}, {count} at once, {n + 1} of {repeat}", (n * len(runs) + r) / (repeat * len(runs)))
            replies, seconds = play_at_once(way, engine.forget, clients, count, max_tokens)
            rates[way.name, count].append(sum(len(reply.ids) for reply in replies) / seconds)
            said[way.name, count].add(tuple(reply.ids for reply in replies))
    expected = said[ways[0].name, 1]
    rows = []
    for way, count in runs:
        rate = Summary(tuple(rates[way.name, count]))
        rows.append(
            ClientsRow(
                name=way.name,
                clients=count,
                rate=rate,
                ratio=rate.over(Summary(tuple(rates[way.name, 1]))) if count > 1 else None,
                same_replies=said[way.name, count] == expected,
            )
        )
    return rows


def play_at_once(
    way: Way, forget: Callable[[str], None], conversations: int, at_once: int, max_tokens: int
) -> tuple[list[Reply], float]:
    """All replies in the order of conversations, and the seconds from the first request to the last reply."""

    def client(number: int) -> list[Reply]:
        questions = CONVERSATIONS[number % len(CONVERSATIONS)]
        return play([questions], way.ask, forget, max_tokens, first=number)

    started = perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        replies = [reply for played in threads.map(client, range(conversations)) for reply in played]
    return replies, perf_counter() - started
