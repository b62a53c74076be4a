"""Forward steps with given tokens, timed: what `bench speed` measures.

The tokens are the same on every run and nothing is drawn from the logits, so that another program can be given exactly
the same work. A prompt goes in chunks of the size that the engine's own loop takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from engine.buffers import MAX_WANTED
from engine.config import ModelConfig
from engine.errors import UsageError
from engine.generate import Rows
from engine.gguf_file import open_gguf
from engine.kv_cache import BlockTable, common_start
from engine.memory import available_memory, plan_memory
from engine.model import LoadOptions, Model
from engine.step import MAX_ROWS, PrefillPace, to_batch
from goinfer_chat.bench.work import Work


class Stepper:
    """A loaded model with one conversation's cache."""

    def __init__(
        self, path: Path, *, threads: int | None, num_positions: int, progress: Callable[[str, float], None]
    ) -> None:
        """Room for `num_positions` tokens. Raises ModelError, and UsageError when model or memory have no such room."""
        with open_gguf(path) as gguf:
            self.work = Work.of(gguf)
            self.config = ModelConfig.from_gguf(gguf)
            weight_bytes, block_bytes = Model.estimate(gguf)
            plan = plan_memory(
                name=path.name,
                weight_bytes=weight_bytes,
                block_bytes=block_bytes,
                context_size=num_positions,
                train_context_size=self.config.train_context_size,
                kv_sessions=1,
                available=available_memory(),
                state_bytes=self.config.state_bytes,
            )
            if plan.context_size < num_positions:
                raise UsageError(f"{num_positions:,} tokens are asked for: {'; '.join(plan.notices)}")
            options = LoadOptions(threads=threads, max_rows=MAX_ROWS, max_positions=num_positions, progress=progress)
            self.model = Model.load(gguf, options)
        pool = self.model.new_pool(plan.num_blocks, plan.num_states, plan.num_checkpoints)
        self._table = BlockTable(pool)
        self._pace = PrefillPace()

    def ids(self, count: int) -> list[int]:
        """The first `count` of an endless row of tokens that reaches through the whole vocabulary."""
        size = self.config.vocab_size
        low = 500 if size > 1500 else size // 4  # away from the ends, where control tokens are
        return [(7919 * i + 13) % (size - 2 * low) + low for i in range(count)]

    def prompt(self, ids: Sequence[int]) -> float:
        """Seconds to run `ids` from an empty cache to the logits of the last."""
        self._table.truncate(0)
        return self._prefill(ids)

    def decode(self, before: Sequence[int], ids: Sequence[int]) -> float:
        """Seconds to run `ids` one by one, with `before` in the cache."""
        self._go_to(before)
        started = perf_counter()
        for token in ids:
            self._step([token], 1)
        return perf_counter() - started

    def rows(self, before: Sequence[int], ids: Sequence[int], count: int) -> float:
        """Seconds of `count` steps of all `ids` at once with logits of each, and always with `before` in the cache."""
        assert len(ids) <= min(MAX_ROWS, MAX_WANTED)
        self._go_to(before)
        seconds = 0.0
        for _ in range(count):
            started = perf_counter()
            self._step(ids, len(ids))
            seconds += perf_counter() - started
            self._table.truncate(len(before))
        return seconds

    def close(self) -> None:
        self.model.close()

    def _go_to(self, ids: Sequence[int]) -> None:
        """Exactly these in the cache."""
        self._table.truncate(common_start(self._table.ids, ids, len(ids)))
        if len(self._table) < len(ids):
            self._prefill(ids)
        self._table.rest()  # to be gone back to, where a model has a running state

    def _prefill(self, ids: Sequence[int]) -> float:
        first = started = perf_counter()
        while (done := len(self._table)) < len(ids):
            part = ids[done : done + self._pace.rows(len(ids) - done)]
            self._step(part, int(done + len(part) == len(ids)))
            now = perf_counter()
            self._pace.measured(len(part), now - started)
            started = now
        return started - first

    def _step(self, ids: Sequence[int], num_wanted: int) -> None:
        self._table.reserve(len(ids))
        self.model.forward(to_batch([Rows(self._table, list(ids), num_wanted=num_wanted)]))
        self._table.append(ids)
