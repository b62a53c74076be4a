"""How near one model's logits are to another's, and whether a model keeps its own bits in steps of other shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from engine.backend import StepModel
from engine.buffers import MAX_WANTED
from engine.generate import Rows
from engine.kv_cache import BlockTable, KVPool
from engine.step import MAX_ROWS, to_batch

Floats = NDArray[np.float32]

_STATES = 8
"""Slots for running states: two conversations, each with what a step leaves behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Logits against those of a reference, over many positions."""

    largest: float
    """Difference, in units of the spread (standard deviation) of the reference's logits."""
    mean: float
    """Of the differences' magnitudes, in the same unit."""
    same_best: float
    """Share of positions with the same likeliest token."""
    divergence: float
    """Kullback-Leibler divergence of the distributions of the next token from the reference's: mean, in nats."""


def compare(found: Floats, reference: Floats) -> Parity:
    """Of logits [P, V]."""
    away = np.abs(found.astype(np.float64) - reference) / reference.std()
    ours, theirs = (_log_softmax(x) for x in (found, reference))
    return Parity(
        largest=float(away.max()),
        mean=float(away.mean()),
        same_best=float(np.mean(found.argmax(-1) == reference.argmax(-1))),
        divergence=float((np.exp(theirs) * (theirs - ours)).sum(-1).mean()),
    )


def _log_softmax(x: Floats) -> NDArray[np.float64]:
    x = x.astype(np.float64) - x.max(-1, keepdims=True)
    shares: NDArray[np.float64] = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens per second."""

    prefill_tok_s: float
    decode_tok_s: float


class Reader:
    """A model with a pool of its own, which it is given ids to read."""

    def __init__(self, model: StepModel, num_blocks: int) -> None:
        self._model = model
        self._pool: KVPool = model.new_pool(num_blocks, _STATES, 1)

    def logits(self, ids: Sequence[int], probes: Sequence[int], chunk: int = MAX_ROWS) -> Floats:
        """[P, V] of the positions `probes`, ascending, of a conversation read in chunks from its start."""
        found = []
        table = BlockTable(self._pool)
        for first in range(0, len(ids), chunk):
            some = list(ids[first : first + chunk])
            wanted = [probe - first for probe in probes if first <= probe < first + len(some)]
            found.append(self._step([(table, some)], wanted))
        table.release()
        return np.concatenate(found)

    def logits_beside(self, ids: Sequence[int], other: Sequence[int], probes: Sequence[int], chunk: int) -> Floats:
        """The same, while another conversation goes on in every step, its rows before these."""
        found = []
        tables = [BlockTable(self._pool) for _ in range(2)]
        for first in range(0, len(ids), chunk):
            some = list(ids[first : first + chunk])
            beside = list(other[first : first + chunk - 1])
            parts = [(tables[0], beside)] if beside else []
            wanted = [probe - first + len(beside) for probe in probes if first <= probe < first + len(some)]
            found.append(self._step([*parts, (tables[1], some)], wanted))
        for table in tables:
            table.release()
        return np.concatenate(found)

    def rates(self, ids: Sequence[int], num_decoded: int = 16) -> Rates:
        """Of reading the ids, and of rows one by one behind them. Something was read before: nothing is waited for."""
        table = BlockTable(self._pool)
        started = perf_counter()
        for first in range(0, len(ids), MAX_ROWS):
            self._step([(table, list(ids[first : first + MAX_ROWS]))], [])
        read = perf_counter()
        for token in ids[:num_decoded]:
            self._step([(table, [token])], [0])
        decoded = perf_counter()
        table.release()
        return Rates(prefill_tok_s=len(ids) / (read - started), decode_tok_s=num_decoded / (decoded - read))

    def _step(self, parts: list[tuple[BlockTable, list[int]]], wanted: list[int]) -> Floats:
        assert len(wanted) <= MAX_WANTED
        for table, ids in parts:
            table.reserve(len(ids))
        batch = to_batch([Rows(table, ids, num_wanted=0) for table, ids in parts])
        logits = self._model.forward(replace(batch, want=np.array(wanted, np.int32))).copy()
        for table, ids in parts:
            table.append(ids)
        return logits
