"""Steps of a model on tables of a pool of its own, and what they leave in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from kernel_calls import assert_same_bits

from engine.api import KVType
from engine.generate import Rows
from engine.gguf_file import open_gguf
from engine.kernels import twins
from engine.kv_cache import BLOCK_SIZE, BlockTable, KVPool
from engine.model import LoadOptions, Model
from engine.step import to_batch


@dataclass
class Runner:
    """A model with a pool of its own."""

    model: Model
    pool: KVPool

    def table(self) -> BlockTable:
        return BlockTable(self.pool)

    def step(self, *parts: tuple[BlockTable, Sequence[int]], want: Sequence[int] | None = None) -> np.ndarray:
        """Append ids to conversations in one step; logits [W, V] of the wanted rows, all by default."""
        for table, ids in parts:
            table.reserve(len(ids))
        logits = self.forward(*parts, want=want)
        for table, ids in parts:
            table.append([int(i) for i in ids])
        return logits

    def forward(self, *parts: tuple[BlockTable, Sequence[int]], want: Sequence[int] | None = None) -> np.ndarray:
        """The step alone, on tables that have room and get no ids."""
        wanted = np.array(range(sum(len(ids) for _, ids in parts)) if want is None else want, np.int32)
        batch = replace(to_batch([Rows(table, [int(i) for i in ids], 0) for table, ids in parts]), want=wanted)
        return self.model.forward(batch).copy()

    def feed(self, table: BlockTable, ids: Sequence[int], chunk: int, probes: Sequence[int] = ()) -> np.ndarray:
        """Append ids in chunks; logits of the positions in `probes`, and of the last one."""
        found = []
        for first in range(0, len(ids), chunk):
            some = ids[first : first + chunk]
            wanted = [i for i in range(len(some)) if len(table) + i in probes or first + i == len(ids) - 1]
            found.append(self.step((table, some), want=wanted))
        return np.concatenate(found)

    def state(self, table: BlockTable) -> np.ndarray:
        """Running states [layers with such, layer_bytes / 4] f32 of a conversation, which rests from here on."""
        assert self.pool.states is not None
        assert table.state is not None
        table.rest()
        slot = table.state.checkpoints[-1].slot
        assert self.model.config.recurrent is not None
        return self.pool.states.memory[slot].view(np.float32).reshape(len(self.model.config.recurrent.layers), -1)

    def cache(self, table: BlockTable) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Of each layer that has some, keys and values [S, G, D] of a conversation; q8_0 as what it stands for."""
        c, kv_type, found = self.model.config, self.model.kv_type, ([], [])
        number = {"f16": np.float16, "f32": np.float32, "q8_0": np.int8}[kv_type]
        memory, start = self.pool.memory[table.blocks], 0

        def positions(kind: Any, heads: int, width: int, is_key: bool) -> np.ndarray:
            """[S, G, width] of what comes next in the blocks: numbers or scales."""
            nonlocal start
            end = start + heads * width * BLOCK_SIZE * np.dtype(kind).itemsize
            shape = (width, BLOCK_SIZE) if is_key else (BLOCK_SIZE, width)
            part = np.ascontiguousarray(memory[:, start:end]).view(kind).reshape(-1, heads, *shape)
            start = end
            return (part.swapaxes(-1, -2) if is_key else part).swapaxes(1, 2).reshape(-1, heads, width)[: len(table)]

        for n in c.attention_layers:
            heads, dim = c.heads[n].num_kv_heads, c.heads[n].dim
            for is_key, layers in zip((True, False), found, strict=True):
                cached = positions(number, heads, dim, is_key)
                if kv_type == "q8_0":
                    cached = twins.from_q8_0(cached, positions(np.float16, heads, -(-dim // 32), is_key))
                layers.append(cached)
        assert start == memory.shape[1]
        return found


@contextmanager
def running(
    path: Path,
    *,
    threads: int = 1,
    positions: int = 1024,
    blocks: int = 64,
    kv_type: KVType = "f16",
    from_disk: bool = False,
) -> Iterator[Runner]:
    with open_gguf(path) as gguf:
        model = Model.load(
            gguf, LoadOptions(threads=threads, max_positions=positions, kv_type=kv_type, from_disk=from_disk)
        )
        try:
            pool = model.new_pool(blocks, 24, 6)
            yield Runner(model, pool)
        finally:
            model.close()


def tokens(count: int, vocab: int = 300, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, count)


def assert_same_cache(runner: Runner, table: BlockTable, expected: tuple[Sequence[np.ndarray], ...]) -> None:
    for ours, theirs in zip(chain(*runner.cache(table)), chain(*expected), strict=True):
        assert_same_bits(ours, theirs)
