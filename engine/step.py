"""One step of all running generations: what each may run, one forward call, and to each its logits.

By the contract of the numerics no result depends on how the rows are cut or what else is in the step. So the cut is
free to serve people: a prompt is read in chunks that leave room to look for a cancellation often enough, in smaller
ones while others wait for their next token, and several prompts share a chunk.

Memory may be too small for all that run. Then the oldest goes on, at the cost of idle conversations first, and next of
the youngest that runs: its K/V are given back, and it is read again when there is room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.buffers import MAX_WANTED
from engine.errors import EngineError
from engine.generate import Generation, Rows
from engine.kv_cache import BLOCK_SIZE, BlockTable, CacheFullError
from engine.model import Batch
from engine.sessions import Sessions
from engine.speculate import StepTime

if TYPE_CHECKING:
    from engine.backend import StepModel

MAX_ROWS = 512
"""Rows of one step at most."""

FEW_ROWS = 8
"""So many rows cost about as much as one, so no reply gets a smaller share."""

UNIT = 32
"""Larger chunks are multiples of this, for kernels that take a dozen rows or a block at a time."""

IN_ONE = 1.5
"""The rest of a prompt is not cut when it has at most so many times the rows of a chunk: each step reads and unpacks
all weights, which on the 1.5B takes some 35 ms, as long as 18 rows."""

SHARED_CHUNK = 0.2
"""The share of a chunk's time that prompts may take in a step in which other replies wait for a token."""


class PrefillPace:
    """How many prompt rows a step takes, so that it ends within `target_seconds`, or half as long again.

    The speed is measured chunk by chunk and kept from request to request; the first chunk is small. No chunk is cut to
    fewer than FEW_ROWS.
    """

    def __init__(self, target_seconds: float = 0.5, max_rows: int = MAX_ROWS) -> None:
        self._target = target_seconds
        self._max_rows = max_rows
        self._fits = min(32, max_rows)

    def rows(self, remaining: int) -> int:
        """Rows of the next chunk when `remaining` are left: about equal chunks, in multiples of 32 where those fit."""
        if remaining <= min(self._max_rows, self._fits * IN_ONE):
            return remaining
        even = math.ceil(remaining / math.ceil(remaining / self._fits))
        return min(self._fits, math.ceil(even / UNIT) * UNIT)

    def share(self, remaining: int, share: float, least: int) -> int:
        """Rows of a chunk that takes about this share of the time of one, and not fewer than `least`."""
        return min(remaining, max(least, int(self._fits * share) // FEW_ROWS * FEW_ROWS))

    def measured(self, num_rows: int, seconds: float) -> None:
        """Learn from a step. Few rows cost more each than many do: they only count when even they took too long."""
        if num_rows < FEW_ROWS or (num_rows < min(self._fits, 64) and seconds <= self._target):
            return
        fits = min(self._max_rows, int(num_rows * self._target / max(seconds, 1e-6)))
        unit = UNIT if fits >= 2 * UNIT else FEW_ROWS
        self._fits = max(FEW_ROWS, fits // unit * unit)


def step(
    model: StepModel,
    sessions: Sessions,
    running: Sequence[Generation],
    pace: PrefillPace,
    prefill_chunk: int | None = None,
) -> None:
    """One forward call over the rows of the `running` generations, the oldest first.

    `prefill_chunk` is how many rows of prompts a step has while others decode; None: as many as take about 0.1 s. A
    generation that cannot go on gets its `error`, and the others know nothing of it.
    """
    started = perf_counter()
    scheduled = _schedule(sessions, running, _shares(running, pace, prefill_chunk))
    if not scheduled:
        return
    num_rows = sum(len(rows.ids) for _, rows in scheduled)
    num_wanted = sum(rows.num_wanted for _, rows in scheduled)
    num_drafted = sum(rows.num_drafted for _, rows in scheduled)
    begun = perf_counter()
    logits = model.forward(to_batch([rows for _, rows in scheduled]))
    seconds = perf_counter() - begun
    if not num_drafted:
        pace.measured(num_rows, perf_counter() - started)
    costs = next((generation.speculation.costs for generation, _ in scheduled if generation.speculation), None)
    if costs is not None and num_wanted == num_rows:  # nothing but decoding
        costs.measured(num_rows, num_drafted, max(len(rows.table) for _, rows in scheduled), seconds)
    time = StepTime(seconds, num_rows, len(scheduled))
    for generation, rows in scheduled:
        try:
            generation.accept(rows, logits[: rows.num_wanted], started, time)
        except BaseException as error:
            # What was half taken in cannot go on, whoever's thread runs the step.
            generation.error = error if isinstance(error, Exception) else EngineError("the reply was interrupted")
            if not isinstance(error, Exception):
                raise
        logits = logits[rows.num_wanted :]


def _shares(running: Sequence[Generation], pace: PrefillPace, prefill_chunk: int | None) -> list[int]:
    """How many rows each may run, as far as its ids go."""
    if len(running) == 1:
        return [pace.rows(running[0].remaining)]
    shares = [min(generation.remaining, FEW_ROWS) for generation in running]
    reading = sorted((n for n, g in enumerate(running) if g.remaining > FEW_ROWS), key=lambda n: running[n].remaining)
    if not reading:
        return shares
    remaining = sum(running[n].remaining for n in reading)
    if len(reading) == len(running):
        left = pace.rows(remaining)
    elif prefill_chunk is None:
        left = pace.share(remaining, SHARED_CHUNK, 4 * FEW_ROWS)
    else:
        left = min(prefill_chunk, pace.rows(remaining))
    left = min(left, MAX_ROWS - MAX_WANTED - FEW_ROWS * len(running))
    for count, n in zip(range(len(reading), 0, -1), reading):  # the shortest first: what it leaves is for the others
        shares[n] = min(running[n].remaining, max(FEW_ROWS, left // count // FEW_ROWS * FEW_ROWS))
        left -= shares[n]
    return shares


def _schedule(
    sessions: Sessions, running: Sequence[Generation], shares: Sequence[int]
) -> list[tuple[Generation, Rows]]:
    """The rows of each generation that there is room for."""
    scheduled = []
    for n, generation in enumerate(running):
        # The oldest takes from the youngest, and the others wait: whoever is the oldest comes to its end.
        younger = [other for other in running[1:] if len(other.table)] if n == 0 else []
        try:
            rows = generation.schedule(shares[n], len(running))
            scheduled.append((generation, _reserve(sessions, generation, rows, younger)))
        except CacheFullError as error:
            if n == 0:
                generation.error = error
        except Exception as error:  # noqa: BLE001 - it ends one reply, and its caller gets it
            generation.error = error
    return scheduled


def _reserve(sessions: Sessions, generation: Generation, rows: Rows, younger: list[Generation]) -> Rows:
    """Make room for the rows. Guesses that would cost another conversation its cache are left out.

    Raises CacheFullError when also those `younger` hold nothing more.
    """
    if rows.num_drafted:
        with suppress(CacheFullError):
            rows.table.reserve(len(rows.ids), rows.num_drafted)
            return rows
        room = BLOCK_SIZE - len(rows.table) % BLOCK_SIZE if rows.table.state is None else len(rows.known)
        ids = rows.ids[:room]  # in the block that one row needs anyway
        num_drafted = len(ids) - len(rows.known)
        rows = Rows(rows.table, ids, num_wanted=1 + num_drafted, num_drafted=num_drafted)
    while True:
        try:
            sessions.reserve(rows.table, len(rows.ids))
        except CacheFullError:
            if not younger:
                raise
            younger.pop().give_way()
        else:
            generation.gave_way = False
            return rows


def to_batch(scheduled: Sequence[Rows]) -> Batch:
    """The rows of one step: those of a table side by side, their positions counting on from its length."""
    tables = [rows.table for rows in scheduled]
    counts = [len(rows.ids) for rows in scheduled]
    blocks = np.zeros((len(tables), max(len(table.blocks) for table in tables)), np.int32)
    for i, table in enumerate(tables):
        blocks[i, : len(table.blocks)] = table.blocks
    ends = list(accumulate(counts))
    # Lists, since a step of one row has more to do than to wait for NumPy a dozen times: some 0.1 ms.
    return Batch(
        ids=np.array([token for rows in scheduled for token in rows.ids], np.int32),
        positions=np.array([i for t, n in zip(tables, counts) for i in range(len(t), len(t) + n)], np.int32),
        tables=blocks,
        table_rows=np.array([i for i, n in enumerate(counts) for _ in range(n)], np.int32),
        want=np.array([i for end, r in zip(ends, scheduled) for i in range(end - r.num_wanted, end)], np.int32),
        states=None if tables[0].state is None else _states(tables),
    )


def _states(tables: Sequence[BlockTable]) -> NDArray[np.int32]:
    """The segments of each table [C, S, 2], the last one repeated where there are fewer."""
    segments = [table.segments() for table in tables]
    width = max(map(len, segments))
    filled = [[*some, *some[-1:] * (width - len(some))] for some in segments]
    return np.array([[(segment.slot, segment.end) for segment in some] for some in filled], np.int32)
