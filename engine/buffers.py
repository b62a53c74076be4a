"""The memory that a forward step works in."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engine.config import ModelConfig
from engine.kernels.attention import BLOCK, PART, STATE
from engine.kernels.plan import FEW_ROWS, GATED_ROWS, QUERY_TILE, SPLIT_ROWS
from engine.pages import zeroed

MAX_WANTED = 64
"""Rows of logits one step can return."""
LINE = 64
"""Bytes of a cache line."""


class Buffers:
    """The memory a step works in. Compiled code holds its addresses, so it must not be replaced."""

    def __init__(self, c: ModelConfig, rows: int, max_positions: int, threads: int) -> None:
        self.num_parts = max_positions // PART + 1
        widest = max(h.dim for h in c.heads)
        state = STATE + widest

        def floats(*shape: int) -> NDArray[np.float32]:
            return zeroed(4 * math.prod(shape)).view(np.float32).reshape(shape)

        def line(n: int) -> int:
            return -(-n // 16) * 16

        def apart(n: int) -> int:
            """Floats of a row of n that lies an odd number of cache lines behind the one before: at multiples of 2 KB,
            what products write of all rows at once would share two of the sets of a cache."""
            return (line(n) // 16 | 1) * 16

        self.ids, self.positions, self.table_rows, self.wanted = (np.zeros(rows, np.int32) for _ in range(4))
        self.x = floats(rows, apart(c.hidden_size))
        gates = c.num_heads if c.arch.delta_layers else 0
        taken = max((c.num_heads + gates) * h.dim + 2 * h.keys for h in c.heads)
        given = c.num_heads * widest
        if c.delta is not None:
            factors = 2 * line(c.delta.num_value_heads)
            taken, given = max(taken, c.delta.channels + c.delta.values + factors), max(given, c.delta.values)
        if c.scan is not None:
            steps = 2 * line(c.scan.num_heads)
            taken, given = max(taken, c.scan.values + c.scan.channels + steps), max(given, c.scan.values)
        if c.convolution is not None:
            taken = max(taken, 3 * c.convolution.channels)
        self.qkv = floats(rows, apart(taken))
        self.attention = floats(rows, given)
        needs_branch = c.arch.post_norms or c.has_shared_gate
        self.branch = floats(rows, apart(max(c.hidden_size, c.layer_embedding_size))) if needs_branch else self.x
        self.beside = floats(rows, apart(c.hidden_size)) if c.experts and c.arch.experts_beside else self.x
        given = c.num_layers * c.layer_embedding_size
        self.given = floats(rows, line(given)) if given else None
        """What gates a branch in each layer."""
        self.states = floats(SPLIT_ROWS * self.num_parts * c.num_heads * state)
        attention = 4 * (QUERY_TILE * (PART + 2 * state) + BLOCK * widest + 2 * BLOCK) + 20 * QUERY_TILE
        gated = GATED_ROWS * (2 * 256 * 4 + LINE)
        self.scratch = zeroed(threads * line(max(attention, gated, 4 * given))).reshape(threads, -1)
        widest_gate = max(c.ffn_sizes, default=0)
        self.products = floats(FEW_ROWS, 2 * widest_gate)
        self.strip_groups = zeroed(8 * (widest_gate // 32 + 1))
        self.logits = floats(MAX_WANTED, apart(c.vocab_size))
        self.generation = zeroed(LINE).view(np.int64)
        self.counters = zeroed(LINE * (16 + 32 * c.num_layers)).view(np.int64)
        self._experts(c, rows)
        numbers = [c.norm_eps, c.attention_scale, c.embedding_factor, c.attention_cap, c.logit_cap]
        numbers += [c.experts.scale if c.experts else 1.0]
        numbers += [1.0, c.delta.head_dim**-0.5 if c.delta else 0.0]
        numbers += [math.sqrt(c.layer_embedding_size / 2), c.scan.norm_eps if c.scan else 0.0]
        self.constants = np.array(numbers, np.float32)

    def _experts(self, c: ModelConfig, rows: int) -> None:
        """Where rows are sent to experts: `CONTEXT` says what each is."""
        count, chosen = (c.experts.count, c.experts.chosen) if c.experts else (0, 0)
        self.num_slots = rows * chosen
        # Behind the router's products is that of a shared expert's factor.
        self.router = np.zeros((rows, -(-count // 16) * 16 + 16), np.float32)
        self.choices, self.slot_rows = (np.zeros(self.num_slots, np.int32) for _ in range(2))
        self.choice_weights, self.slot_weights = (np.zeros(self.num_slots, np.float32) for _ in range(2))
        self.expert_slots, self.expert_ends, self.busy_experts = (np.zeros(count + 1, np.int32) for _ in range(3))
