"""`bench copy` and `bench chat`: replies that repeat their prompt, and replies that do not, greedy.

Plain decoding and another way to decode, where there is one, take turns; by the contract of the engine their replies
are the same, and that is checked here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from engine.api import Engine, Message, Reply, Request, SpeculationMode, TurnStats
from goinfer_chat.bench.asking import GREEDY, Ask, Progress, ask
from goinfer_chat.bench.report import Summary, table
from goinfer_chat.bench.texts import CODE, CONVERSATIONS, COPY_QUESTION

MAX_TOKENS: Final = 256
COPY: Final = ((COPY_QUESTION.format(code=CODE),),)
CHAT: Final = CONVERSATIONS

Conversations = Sequence[Sequence[str]]
Forget = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to decode: its name and how a request is asked in it."""

    name: str
    ask: Ask


def ways_of(engine: Engine, modes: Sequence[SpeculationMode]) -> list[Way]:
    """Each way to decode, as an engine takes it."""

    def way(mode: SpeculationMode) -> Way:
        return Way(
            "plain" if mode == "off" else mode, lambda request: ask(engine, replace(request, speculation=mode)).reply
        )

    return [way(mode) for mode in modes]


@dataclass(frozen=True, slots=True, kw_only=True)
class WayRow:
    """What one way of decoding did with all conversations."""

    name: str
    rate: Summary
    """Tokens of the replies per second of decoding."""
    num_tokens: int
    """Of all replies together."""
    draft_tokens: int | None = None
    """Guessed in all rounds; this and the next four are None where nothing guesses."""
    draft_accepted: int | None = None
    tokens_per_step: float | None = None
    undrafted_steps: int | None = None
    draft_pauses: int | None = None
    ratio: Summary | None = None
    """Rate over that of plain decoding, turn by turn."""
    same_replies: bool | None = None
    """Whether every reply has the ids of plain decoding's."""
    copied: float | None = None
    """How much of a reply is a faithful copy, of the worst one."""

    @property
    def acceptance(self) -> float | None:
        return (
            self.draft_accepted / self.draft_tokens if self.draft_tokens and self.draft_accepted is not None else None
        )

    def as_object(self) -> dict[str, Any]:
        return {
            "decode": self.name,
            "tok_s": self.rate.as_object(),
            "completion_tokens": self.num_tokens,
            "draft_tokens": self.draft_tokens,
            "draft_accepted": self.draft_accepted,
            "acceptance": self.acceptance,
            "tokens_per_step": self.tokens_per_step,
            "undrafted_steps": self.undrafted_steps,
            "draft_pauses": self.draft_pauses,
            "ratio": self.ratio.as_object() if self.ratio else None,
            "same_replies": self.same_replies,
            "copied": self.copied,
        }


def lines(rows: Sequence[WayRow]) -> list[str]:
    """The table."""
    head = ["decoding", "tok/s", "tokens", "accepted", "tokens a step", "ratio", "same replies", "copied"]
    same = {None: "", True: "yes", False: "NO"}
    return table(
        head,
        [
            [
                row.name,
                row.rate.text(),
                f"{row.num_tokens:,}",
                "" if row.acceptance is None else f"{100 * row.acceptance:.0f} %",
                "" if row.tokens_per_step is None else f"{row.tokens_per_step:.2f}",
                row.ratio.text(2) if row.ratio else "",
                same[row.same_replies],
                "" if row.copied is None else f"{100 * row.copied:.0f} %",
            ]
            for row in rows
        ],
    )


def measure(
    conversations: Conversations,
    ways: Sequence[Way],
    forget: Forget,
    *,
    max_tokens: int,
    repeat: int,
    progress: Progress,
    judge: Callable[[str], float] | None = None,
) -> list[WayRow]:
    """Each way plays all conversations from empty caches, in turn, `repeat` times. The first way is the plain one.

    Raises what Engine.generate raises.
    """
    played: list[list[list[Reply]]] = [[] for _ in ways]
    for n in range(repeat):
        for w, way in enumerate(ways):
            progress(f"{way.name}, {n + 1} of {repeat}", (n * len(ways) + w) / (repeat * len(ways)))
            played[w].append(play(conversations, way.ask, forget, max_tokens))
    plain_ids = {tuple(reply.ids for reply in replies) for replies in played[0]}
    plain_rate = Summary(tuple(map(rate_of, played[0])))
    rows = []
    for way, rounds in zip(ways, played):
        rate = Summary(tuple(map(rate_of, rounds)))
        stats = [reply.stats for replies in rounds for reply in replies]
        other = way is not ways[0]
        rows.append(
            WayRow(
                name=way.name,
                rate=rate,
                num_tokens=sum(len(reply.ids) for reply in rounds[0]),
                draft_tokens=_total([s.draft_tokens for s in stats]),
                draft_accepted=_total([s.draft_accepted for s in stats]),
                tokens_per_step=_tokens_per_step(stats),
                undrafted_steps=_total([s.undrafted_steps for s in stats]),
                draft_pauses=_total([s.draft_pauses for s in stats]),
                ratio=rate.over(plain_rate) if other else None,
                same_replies={tuple(r.ids for r in replies) for replies in rounds} == plain_ids if other else None,
                copied=min(judge(r.text) for replies in rounds for r in replies) if judge else None,
            )
        )
    return rows


def play(conversations: Conversations, ask: Ask, forget: Forget, max_tokens: int, *, first: int = 0) -> list[Reply]:
    """All replies, in order; each conversation goes on with the ids of its replies. `first` numbers their caches."""
    replies = []
    for number, questions in enumerate(conversations, first):
        name = f"bench {number}"
        forget(name)
        messages: tuple[Message, ...] = ()
        for question in questions:
            messages += (Message(role="user", content=question),)
            reply = ask(Request(messages=messages, sampling=GREEDY, max_tokens=max_tokens, conversation=name))
            messages += (Message(role="assistant", content=reply.text, ids=reply.ids),)
            replies.append(reply)
        forget(name)
    return replies


def rate_of(replies: Sequence[Reply]) -> float:
    """Tokens per second over replies of different lengths: all tokens over all time."""
    known = [(len(r.ids), r.stats.decode_tok_s) for r in replies if r.ids and r.stats.decode_tok_s]
    assert known, "no reply has two tokens"
    return sum(count for count, _ in known) / sum(count / rate for count, rate in known)


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _tokens_per_step(stats: Sequence[TurnStats]) -> float | None:
    """Over replies of different lengths: all tokens over all steps."""
    known = [(s.completion_tokens, s.tokens_per_step) for s in stats if s.completion_tokens and s.tokens_per_step]
    return sum(n for n, _ in known) / sum(n / rate for n, rate in known) if known else None


def copied_share(reply: str) -> float:
    """How much of a reply to COPY is the code, to the first character that is not: 1 is a faithful copy."""
    text = reply.partition("\n")[2] if reply.startswith("```") else reply
    same = next((n for n, (mine, theirs) in enumerate(zip(text, CODE)) if mine != theirs), min(len(text), len(CODE)))
    return same / max(1, min(len(text), len(CODE)))
