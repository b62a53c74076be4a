"""`bench speed`: prefill and decode at given depths, beside the limits of the machine and, in turn, beside a peer.

Every measurement stands next to its limit, measured a moment before it, and next to the peer's, measured a moment after
it: machines are shared and drift, so figures are compared pair by pair.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from engine.buffers import MAX_WANTED
from engine.errors import UsageError
from goinfer_chat.bench.machine import Machine, Probe, describe
from goinfer_chat.bench.peer_process import Peer, PeerChoice
from goinfer_chat.bench.report import Summary, table
from goinfer_chat.bench.stepper import Stepper

Kind = Literal["prefill", "decode", "rows"]
Progress = Callable[[str, float], None]

QUIET_SECONDS: Final = 0.05
"""Threads of an engine look for more work for some milliseconds before they sleep. What is measured next waits."""
ROW_STEPS: Final = 8
"""Steps of several rows timed together."""
WARM_UP_TOKENS: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure. Raises UsageError for numbers that cannot be measured."""

    prefill: tuple[int, ...] = (512, 3020)
    """Prompt tokens."""
    depths: tuple[int, ...] = (128, 2048)
    """Positions in the cache before decode is timed."""
    rows: tuple[int, ...] = ()
    """Rows of a step, whose cost over a step of one row is measured at each depth."""
    tokens: int = 64
    """Decode steps timed."""
    repeat: int = 5

    def __post_init__(self) -> None:
        if self.repeat < 1 or self.tokens < 1 or any(n < 1 for n in (*self.prefill, *self.depths)):
            raise UsageError("prompts, depths, tokens and repeats must be 1 or more")
        if any(not 2 <= n <= MAX_WANTED for n in self.rows):
            raise UsageError(f"rows of a step must be 2 to {MAX_WANTED}")
        if not (self.prefill or self.depths):
            raise UsageError("there is nothing to measure")

    @property
    def num_positions(self) -> int:
        behind = max((self.tokens, *self.rows))
        return max((*self.prefill, *(depth + behind for depth in self.depths)))

    @property
    def cases(self) -> list[tuple[Kind, int, int]]:
        """(what, tokens or depth, rows of a step)."""
        decode: list[tuple[Kind, int, int]] = [("decode", depth, 1) for depth in self.depths]
        rows: list[tuple[Kind, int, int]] = [("rows", depth, count) for depth in self.depths for count in self.rows]
        return [*(("prefill", count, 1) for count in self.prefill), *decode, *rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case, measured several times. All its figures are in the order of measuring."""

    kind: Kind
    tokens: int
    """Prompt tokens, or positions in the cache."""
    rate: Summary | None = None
    """Tokens per second."""
    limit: Summary | None = None
    """What the machine could do beside each: products of bytes per second for prefill, bytes per second for decode."""
    share: Summary | None = None
    """How much of the time the limit alone explains: products of the matrices, or bytes of weights."""
    share_with_attention: Summary | None = None
    """The same with the float products of attention, or with the bytes of keys and values."""
    peer: Summary | None = None
    ratio: Summary | None = None
    """Ours over the peer's, pair by pair."""
    width: int = 1
    """Rows of a step."""
    extra_row: Summary | None = None
    """Cost of each row beyond the first, in steps of one row at the same depth."""

    @property
    def title(self) -> str:
        if self.kind == "prefill":
            return f"prefill {self.tokens:,}"
        return f"decode at {self.tokens:,}" if self.kind == "decode" else f"{self.width} rows at {self.tokens:,}"

    def as_object(self) -> dict[str, Any]:
        figures = {
            "tok_s": self.rate,
            "limit": self.limit,
            "share_of_limit": self.share,
            "share_with_attention": self.share_with_attention,
            "peer_tok_s": self.peer,
            "ratio": self.ratio,
            "extra_row_cost": self.extra_row,
        }
        shown = {name: figure.as_object() for name, figure in figures.items() if figure is not None}
        return {"measure": self.kind, "tokens": self.tokens, "rows": self.width, **shown}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The result."""

    model: str
    weight_bytes: int
    machine: Machine
    threads: int
    rows: tuple[Row, ...]
    peer: str | None = None
    peer_system: str | None = None

    def as_object(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "weight_bytes": self.weight_bytes,
            "machine": self.machine.as_object(),
            "threads": self.threads,
            "peer": self.peer,
            "peer_system": self.peer_system,
            "rows": [row.as_object() for row in self.rows],
        }

    def lines(self) -> list[str]:
        head = ["", "tok/s", "limit", "of it", "with attention", self.peer or "", "ratio", "each further row"]
        return [
            f"{self.model}, {self.weight_bytes / 1e6:,.0f} MB of weights a step",
            *self.machine.lines(self.threads),
            *([f"peer: {self.peer} ({self.peer_system})"] if self.peer else []),
            "",
            *table(head, [_cells(row) for row in self.rows]),
        ]


def _cells(row: Row) -> list[str]:
    limit = ""
    if row.limit:
        unit = " GMAC/s" if row.kind == "prefill" else " GB/s"
        limit = row.limit.scaled(1e-9).text(0 if row.kind == "prefill" else 1, unit)
    return [
        row.title,
        row.rate.text() if row.rate else "",
        limit,
        row.share.percent() if row.share else "",
        row.share_with_attention.percent() if row.share_with_attention else "",
        row.peer.text() if row.peer else "",
        row.ratio.text(2) if row.ratio else "",
        row.extra_row.text(3) if row.extra_row else "",
    ]


def measure_speed(path: Path, plan: Plan, *, threads: int | None, peer: PeerChoice | None, progress: Progress) -> Speed:
    """Load the model (and the peer's) and measure. Raises UsageError, ModelError or EngineError."""
    with ExitStack() as close:
        stepper = Stepper(path, threads=threads, num_positions=plan.num_positions, progress=progress)
        close.callback(stepper.close)
        model = stepper.model
        probe = Probe(model.threads)
        close.callback(probe.close)
        other = None
        if peer:
            progress(f"loading {peer.name}", 0.0)
            other = close.enter_context(Peer(peer, path, threads=model.threads, num_positions=plan.num_positions))
        bench = Bench(stepper, probe, other, plan)
        bench.warm_up()
        cases = plan.cases
        rows = [bench.measure(*case, partial(_tell, progress, n / len(cases))) for n, case in enumerate(cases)]
        return Speed(
            model=stepper.config.name,
            weight_bytes=stepper.work.weight_bytes,
            machine=describe(),
            threads=model.threads,
            rows=tuple(rows),
            peer=f"{other.name} {other.version}" if other else None,
            peer_system=other.system if other else None,
        )


def _tell(progress: Progress, share: float, what: str) -> None:
    progress(what, share)


class Bench:
    """Ours, the probe and the peer, which take turns."""

    def __init__(self, stepper: Stepper, probe: Probe, peer: Peer | None, plan: Plan) -> None:
        self._stepper, self._probe, self._peer, self._plan = stepper, probe, peer, plan
        self._ids = stepper.ids(plan.num_positions)

    def warm_up(self) -> None:
        """Pages come in, threads start, the engine learns how many rows take how long."""
        ids = self._ids[:WARM_UP_TOKENS]
        for _ in range(2):
            self._stepper.prompt(ids)
        if self._peer:
            self._peer.prompt(ids)

    def measure(self, kind: Kind, tokens: int, width: int, progress: Callable[[str], None]) -> Row:
        """One case, with what belongs beside it."""
        if kind == "rows":
            return self._rows(tokens, width, progress)
        rates, limits, shares, all_shares, peers = [], [], [], [], []
        title = Row(kind=kind, tokens=tokens).title
        for n in range(self._plan.repeat):
            progress(f"{title}, {n + 1} of {self._plan.repeat}")
            time.sleep(QUIET_SECONDS)
            limit, least, least_of_all = self._least_seconds(kind, tokens)
            limits.append(limit)
            rate = self._rate(self._stepper, kind, tokens)
            rates.append(rate)
            shares.append(least * rate)
            all_shares.append(least_of_all * rate)
            if self._peer:
                time.sleep(QUIET_SECONDS)
                peers.append(self._rate(self._peer, kind, tokens))
        ours = Summary(tuple(rates))
        peer = Summary(tuple(peers)) if peers else None
        return Row(
            kind=kind,
            tokens=tokens,
            rate=ours,
            limit=Summary(tuple(limits)),
            share=Summary(tuple(shares)),
            share_with_attention=Summary(tuple(all_shares)),
            peer=peer,
            ratio=ours.over(peer) if peer else None,
        )

    def _least_seconds(self, kind: Kind, tokens: int) -> tuple[float, float, float]:
        """The limit at this moment, and the seconds a token takes at it, without and with attention."""
        work = self._stepper.work
        if kind == "decode":
            bandwidth = self._probe.bandwidth()
            return bandwidth, work.weight_bytes / bandwidth, (work.weight_bytes + work.kv_bytes(tokens)) / bandwidth
        peaks = self._probe.peaks()
        matrices, attention = work.matrices(tokens, 1), work.prompt_attention(tokens)
        least, least_of_all = (peaks.seconds(p.integer, p.floating) for p in (matrices, matrices.plus(attention)))
        return peaks.integer, least / tokens, least_of_all / tokens

    def _rate(self, who: Stepper | Peer, kind: Kind, tokens: int) -> float:
        if kind == "prefill":
            return tokens / who.prompt(self._ids[:tokens])
        count = self._plan.tokens
        return count / who.decode(self._ids[:tokens], self._ids[:count])

    def _rows(self, depth: int, width: int, progress: Callable[[str], None]) -> Row:
        costs = []
        before: Sequence[int] = self._ids[:depth]
        for n in range(self._plan.repeat):
            progress(f"{width} rows at {depth:,}, {n + 1} of {self._plan.repeat}")
            one = self._stepper.rows(before, self._ids[:1], ROW_STEPS)
            many = self._stepper.rows(before, self._ids[:width], ROW_STEPS)
            costs.append((many / one - 1) / (width - 1))
        return Row(kind="rows", tokens=depth, width=width, extra_row=Summary(tuple(costs)))
