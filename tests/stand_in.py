"""A small model and tokenizer for tests of everything around the model.

`StandInModel` is an `engine.backend.StepModel` and keeps its K/V in the pool: each position stores a
number that depends on its token, its position and all numbers stored before it, and logits are derived from all
numbers found in the row's blocks. So a wrong block table, a missing position or a stale slot changes every later
token, as it would in a real model, and equal outputs mean equal caches.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np

from engine.errors import TemplateError
from engine.kv_cache import BLOCK_SIZE, KVPool

END = 256
CONTROL = 257
VOCAB = 258


class StandInModel:
    """`script(position) -> id or None` forces the reply; without one the logits come from the cache's contents."""

    kv_block_bytes = BLOCK_SIZE * 8
    kv_type = "f16"
    weight_bytes = 1000
    kernels = "stand-in"
    threads = 1
    numerics = 1

    def __init__(self, pool: KVPool | None = None, script: Callable[[int], int | None] | None = None) -> None:
        self.config = SimpleNamespace(
            state_bytes=0, name="stand-in", architecture="none", num_layers=1, vocab_size=VOCAB, train_context_size=4096
        )
        self.script = script
        self.seconds_per_row = 0.0
        self.rows_per_step: list[int] = []
        self.wanted_per_step: list[int] = []
        self.before_step: Callable[[], None] = lambda: None
        self.closed = False
        if pool is not None:
            self.bind_pool(pool)

    def new_pool(self, num_blocks: int, num_states: int = 0, num_checkpoints: int = 0) -> KVPool:
        pool = KVPool(self.kv_block_bytes, num_blocks)
        self.bind_pool(pool)
        return pool

    def bind_pool(self, pool: KVPool) -> None:
        assert pool.block_bytes == self.kv_block_bytes
        self.slots = pool.memory.view(np.uint64)  # [blocks, 64]

    def forward(self, batch) -> np.ndarray:
        self.before_step()
        num_rows = len(batch.ids)
        if self.seconds_per_row:
            time.sleep(self.seconds_per_row * num_rows)
        for array in (batch.ids, batch.positions, batch.tables, batch.table_rows, batch.want):
            assert array.dtype == np.int32
        assert 0 < num_rows <= 512
        assert len(batch.positions) == len(batch.table_rows) == num_rows
        assert sorted(set(batch.want.tolist())) == batch.want.tolist()
        self.rows_per_step.append(num_rows)
        self.wanted_per_step.append(len(batch.want))
        logits = np.empty((len(batch.want), VOCAB), np.float32)
        wanted = {row: place for place, row in enumerate(batch.want.tolist())}
        for row in range(num_rows):
            table = batch.tables[batch.table_rows[row]]
            position = int(batch.positions[row])
            before = self._stored(table, position)
            text = before.tobytes() + f"{batch.ids[row]} at {position}".encode()
            number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
            self.slots[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = number
            if row in wanted:
                logits[wanted[row]] = self._logits(self._stored(table, position + 1))
        return logits

    def _stored(self, table: np.ndarray, length: int) -> np.ndarray:
        blocks = table[: -(-length // BLOCK_SIZE)]
        return self.slots[blocks].reshape(-1)[:length]

    def _logits(self, stored: np.ndarray) -> np.ndarray:
        forced = self.script(len(stored)) if self.script else None
        if forced is not None:
            logits = np.zeros(VOCAB, np.float32)
            logits[forced] = 100
            return logits
        seed = int.from_bytes(hashlib.blake2b(stored.tobytes(), digest_size=8).digest(), "little")
        return _drawn(seed).copy()

    def close(self) -> None:
        self.closed = True


@functools.lru_cache(4096)  # tests ask for the same reply several times
def _drawn(seed: int) -> np.ndarray:
    """Logits [VOCAB] f32."""
    logits = np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32) * 3
    logits[[END, CONTROL]] = -20
    return logits


class StandInTokenizer:
    """One token a byte; END ends a reply and CONTROL has no text."""

    vocab_size = VOCAB
    bos_id = None
    eos_id = END
    add_bos = False
    end_ids = frozenset({END})
    control_ids = frozenset({END, CONTROL})
    notices = ()

    def encode(self, text: str, *, control: bool = False, continues: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def stream(self) -> StandInDecoder:
        return StandInDecoder()


class StandInDecoder:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token]) if token < 256 else b"")

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class StandInTemplate:
    """`role:content` and END for each message, then `assistant:`; kept ids stand for their content.

    Answers of tools are taken where they say which call they answer.
    """

    notices = ("a template of the tests",)
    thinks = False
    has_channels = False
    reasoning = None
    stop: tuple[str, ...] = ()

    def __init__(self, tokenizer: StandInTokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, messages, tools=(), *, add_generation_prompt: bool = True) -> list[int]:
        ids: list[int] = []
        for message in messages:
            if message.role == "tool" and message.tool_call_id is None:
                raise TemplateError("no tools here")
            content = message.ids if message.ids is not None else self.tokenizer.encode(message.content)
            ids += [*self.tokenizer.encode(f"{message.role}:"), *content, END]
        return ids + (self.tokenizer.encode("assistant:") if add_generation_prompt else [])

    encode_foreseen = encode
