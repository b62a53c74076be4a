"""A smaller model that guesses for a larger one of the same vocabulary.

It reads the same ids into a cache of its own, which follows the conversations as that of the larger model does: reuse,
forks and the least recently used one going first are `Sessions` again. Each guess costs a step of it, so it stops when
the odds that all guesses so far are right no longer pay for another one.

A guess is drawn the way the reply is: with the sampling settings and the random number of that position. So where the
two models agree on the odds they draw the same token, at any temperature.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from engine.backend import Backend, StepModel
from engine.config import ModelConfig
from engine.errors import UsageError
from engine.gguf_file import GGUFFile
from engine.kv_cache import BLOCK_SIZE, CacheFullError
from engine.model import Batch, LoadOptions
from engine.sampler import largest
from engine.sessions import Sessions

Pick = Callable[[NDArray[np.float32], int, Sequence[int]], int]
"""The id at a position, from logits [V] f32 and the ids before it: `Sampler.sample`."""

MAX_ROWS = 256
"""Positions read in one go: a fraction of a second, so that a cancellation is seen in time."""

GAPS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""How far the best logit is above the second best, sorted into classes: these limits and all beyond make 7."""


def confidence(logits: NDArray[np.float32]) -> int:
    """The class, 0 to 6, of how clearly a model prefers its best token."""
    best, second = logits[largest(logits, 2)] if len(logits) > 1 else (0.0, -np.inf)
    return int(np.searchsorted(GAPS, float(best) - float(second)))


class DraftModel:
    """The smaller model in memory. `guess` is for one thread at a time, that of the engine's step."""

    @classmethod
    def load(
        cls,
        backend: Backend,
        gguf: GGUFFile,
        *,
        vocab_size: int,
        threads: int | None,
        num_blocks: int,
        kv_sessions: int,
        context_size: int,
        progress: Callable[[str, float], None] | None = None,
    ) -> Self:
        """Load a model whose vocabulary was checked. `num_blocks` is of its cache.

        Raises what Backend.load raises.
        """
        positions = min(context_size, ModelConfig.from_gguf(gguf).train_context_size)
        options = LoadOptions(threads=threads, max_rows=MAX_ROWS, max_positions=positions, progress=progress)
        model = backend.load(gguf, options)
        return cls(model, vocab_size, num_blocks, kv_sessions)

    def __init__(self, model: StepModel, vocab_size: int, num_blocks: int, kv_sessions: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._sessions = Sessions(model.new_pool(num_blocks), kv_sessions)
        self._steps: deque[float] = deque(maxlen=9)

    @property
    def step_seconds(self) -> float:
        """What one more guess costs; 0 as long as that is not known."""
        return sorted(self._steps)[len(self._steps) // 2] if self._steps else 0.0

    def guess(
        self, conversation: str, ids: Sequence[int], limit: int, pick: Pick, worth: Callable[[int], bool]
    ) -> list[tuple[int, int]]:
        """(token, class of confidence) of at most `limit` that may follow `ids`, as long as one more is `worth` it.

        Empty where the model has yet to catch up with a long prompt (a part of it is read each time), or its context
        or cache is full.
        """
        limit = min(limit, self._model.max_positions - len(ids))
        if limit < 1:
            return []
        guesses: list[tuple[int, int]] = []
        table = self._sessions.begin(conversation, ids)
        try:
            todo = list(ids[len(table) :])
            while len(guesses) < limit:
                rows = todo[:MAX_ROWS]
                started, known = perf_counter(), len(table)
                self._sessions.reserve(table, len(rows))
                logits = self._model.forward(_batch(rows, table.blocks, known))[0, : self._vocab_size]
                table.append(rows)
                if len(rows) < len(todo):
                    break
                token = pick(logits, known + len(rows), [*ids, *(guess for guess, _ in guesses)])
                guesses.append((token, confidence(logits)))
                if len(rows) == 1:
                    self._steps.append(perf_counter() - started)
                if not worth(guesses[-1][1]):
                    break
                todo = [token]
        except CacheFullError:
            pass  # other conversations may end and leave room
        finally:
            self._sessions.end(conversation)
        return guesses

    def forget(self, conversation: str) -> None:
        self._sessions.forget(conversation)

    def close(self) -> None:
        self._model.close()


def check_vocabulary(draft: GGUFFile, target: GGUFFile) -> None:
    """Raises UsageError where ids of one model mean something else in the other."""
    ours, theirs = _tokens(target), _tokens(draft)
    advice = "choose a smaller model of the same family"
    if len(ours) != len(theirs):
        raise UsageError(
            f"{draft.path.name} cannot guess for {target.path.name}: it has {len(theirs):,} tokens instead of "
            f"{len(ours):,}; {advice}"
        )
    differs = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
    if differs is not None:
        raise UsageError(
            f"{draft.path.name} cannot guess for {target.path.name}: token {differs} is {theirs[differs]!r} instead of "
            f"{ours[differs]!r}; {advice}"
        )


def _tokens(gguf: GGUFFile) -> list[Any]:
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    return tokens if isinstance(tokens, list) else []


def _batch(ids: list[int], blocks: list[int], start: int) -> Batch:
    """Rows of one conversation, logits of the last wanted."""
    return Batch(
        ids=np.array(ids, np.int32),
        positions=np.arange(start, start + len(ids), dtype=np.int32),
        tables=np.array([blocks], np.int32),
        table_rows=np.zeros(len(ids), np.int32),
        want=np.array([len(ids) - 1], np.int32),
    )


assert MAX_ROWS % BLOCK_SIZE == 0
