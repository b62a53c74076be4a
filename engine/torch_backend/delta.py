"""Layers with a running state in torch (`kernels/delta.py`), over slots on the device: the gated delta rule, state
space layers, and short convolutions.

What a row's own numbers give is computed for a whole tile, in one shape. The state takes rows one by one, in order and
in one shape too, so that its bits do not depend on how a text was cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import ConvolutionSizes, DeltaSizes, ScanSizes
from engine.kernels.plan import DELTA_COLUMNS, TAPS
from engine.kv_cache import StatePool
from engine.torch_backend.kv import memory_of
from engine.torch_backend.parts import Linear, Norm, even


@dataclass(frozen=True, slots=True)
class Run:
    """Rows first .. last - 1 of a tile, which may be none, take the state of slot `source` along and leave it in
    `target`."""

    source: int
    target: int
    first: int
    last: int


def runs_of_tile(tables: NDArray[np.integer], states: NDArray[np.integer], first: int, last: int) -> tuple[Run, ...]:
    """Of rows first .. last - 1 of a step whose rows have these tables [T], with `Batch.states` [C, S, 2]."""
    runs = []
    for table in dict.fromkeys(tables[first:last].tolist()):
        rows = np.flatnonzero(tables == table)
        begin, end = int(rows[0]), int(rows[-1]) + 1
        source, start = int(states[table, 0, 0]), begin
        for slot, length in states[table].tolist():
            stop = min(begin + length, end)
            a, b = max(start, first), min(stop, last)
            # A segment begins with a copy even where it has no rows; the last one is repeated, and that is none.
            if a < b or first <= start == stop < min(last, end):
                runs.append(Run(source if a == start else slot, slot, a - first, b - first))
            source, start = slot, stop
    return tuple(runs)


class StateStore:
    """The numbers in a pool's slots, layer by layer (`model_twin._recalled` says how they lie)."""

    def __init__(self, sizes: DeltaSizes | ConvolutionSizes | ScanSizes, pool: StatePool) -> None:
        layers = memory_of(pool).view(torch.float32).unflatten(-1, (len(sizes.layers), -1))
        split = (TAPS - 1) * sizes.channels
        self.seen = layers[..., :split].unflatten(-1, (TAPS - 1, sizes.channels))
        """[slots, layers, TAPS - 1, channels]: the last rows before the convolution."""
        self.matrices = layers[..., split:]
        """[slots, layers, heads, strips, keys, DELTA_COLUMNS]; of convolutions nothing."""
        if not isinstance(sizes, ConvolutionSizes):
            heads, keys, values = sizes.state_shape
            self.matrices = self.matrices.unflatten(-1, (heads, values // DELTA_COLUMNS, keys, DELTA_COLUMNS))

    def convolved(self, layer: int, x: Tensor, taps: Tensor, runs: Sequence[Run]) -> Tensor:
        """[rows, channels] of x, with taps [TAPS, channels] over it and the rows before it; the slots have the last
        rows of x."""
        out = torch.zeros_like(x)
        for run in runs:
            rows = torch.cat([self.seen[run.source, layer], x[run.first : run.last]])
            count = run.last - run.first
            self.seen[run.target, layer] = rows[count:]
            total = taps[0] * rows[:count]
            for j in range(1, TAPS):
                total = total + taps[j] * rows[j : j + count]
            out[run.first : run.last] = total
        return out


@dataclass(frozen=True, slots=True)
class Mix:
    """The weights of a layer that is a short convolution, but for the matrix behind it."""

    number: int
    """Among the layers with a state."""
    parts: Linear
    """Of what comes in, its gate, and the gate of what comes out."""
    taps: Tensor
    """[TAPS, channels]."""

    def __call__(self, taken: Tensor, store: StateStore, runs: Sequence[Run]) -> Tensor:
        """[rows, channels] f32 of what the layer takes [rows, hidden]; the states of the runs' slots go on."""
        u, gate, v = self.parts(taken).chunk(3, -1)
        return gate * store.convolved(self.number, u * v, self.taps, runs)


@dataclass(frozen=True, slots=True)
class Scan:
    """The weights of a state space layer, but for the matrix behind it."""

    sizes: ScanSizes
    number: int
    """Among the layers with a running state."""
    parts: Linear
    """Of a gate for each value, of values, keys and queries, and of a step for each head."""
    taps: Tensor
    """[TAPS, channels]."""
    bias: Tensor | None
    step_bias: Tensor
    rate: Tensor
    skip: Tensor
    """[heads, 1]."""
    norm: Norm
    """Of each group."""

    def __call__(self, taken: Tensor, store: StateStore, runs: Sequence[Run]) -> Tensor:
        """[rows, values] f32 of what the layer takes [rows, hidden]; the states of the runs' slots go on."""
        sizes, rows = self.sizes, len(taken)
        gate, mixed, step = self.parts(taken).split([sizes.values, sizes.channels, sizes.num_heads], -1)
        step = _softplus(even(step + self.step_bias))
        decay = torch.exp(even(self.rate) * step)[:, : sizes.num_heads]
        step = step[:, : sizes.num_heads]
        x = store.convolved(self.number, mixed, self.taps, runs)
        x = torch.nn.functional.silu(x if self.bias is None else x + self.bias)
        keys = sizes.num_groups * sizes.key_dim
        v, k, q = x.split([sizes.values, keys, keys], -1)
        shared = sizes.num_heads // sizes.num_groups
        k, q = (y.unflatten(-1, (sizes.num_groups, -1)).repeat_interleave(shared, 1) for y in (k, q))
        v = v.unflatten(-1, (sizes.num_heads, -1))
        added = (v * step[..., None]).view(rows, sizes.num_heads, -1, 1, DELTA_COLUMNS)
        out = torch.zeros_like(v)
        for run in runs:
            state = store.matrices[run.source, self.number]
            for row in range(run.first, run.last):
                k1, q1 = (y[row, :, None, :, None] for y in (k, q))
                state = state * decay[row, :, None, None, None] + k1 * added[row]
                out[row] = (state * q1).sum(-2).flatten(1)
            store.matrices[run.target, self.number] = state
        y = (out + self.skip * v).flatten(1) * torch.nn.functional.silu(gate)
        return self.norm(y.unflatten(-1, (sizes.num_groups, -1))).flatten(1)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The weights of one layer, but for the matrix behind it."""

    sizes: DeltaSizes
    number: int
    """Among the layers with a running state."""
    interleaved: bool
    """`ArchSpec.interleaved_deltas`."""
    mixed: Linear
    """Of queries, keys and values."""
    gate: Linear
    factors: tuple[Linear, ...]
    """Of beta and decay, or one for both."""
    taps: Tensor
    """[TAPS, channels]."""
    bias: Tensor
    rate: Tensor
    """Of the decay of each value head, as the bias."""
    norm: Norm

    def __call__(self, taken: Tensor, store: StateStore, runs: Sequence[Run]) -> Tensor:
        """[rows, values] f32 of what the layer takes [rows, hidden]; the states of the runs' slots go on."""
        sizes, rows = self.sizes, len(taken)
        beta, decay = self._factors(taken)
        x = torch.nn.functional.silu(store.convolved(self.number, self.mixed(taken), self.taps, runs))
        q, k, v = x.split([sizes.keys, sizes.keys, sizes.values], -1)
        q, k = (self._spread(_unit(y.unflatten(-1, (-1, sizes.head_dim)), self.norm.eps)) for y in (q, k))
        q = q * sizes.head_dim**-0.5
        out = torch.zeros_like(v).view(rows, sizes.num_value_heads, -1, DELTA_COLUMNS)
        # Each row as the state has it: [heads, strips, keys, columns].
        parts = [q[:, :, None, :, None], k[:, :, None, :, None], v.reshape(out.shape)]
        factors = [y[:, :, None, None] for y in (beta, decay)]
        for run in runs:
            state = store.matrices[run.source, self.number]
            for row in range(run.first, run.last):
                (q1, k1, v1), (beta1, decay1) = (y[row] for y in parts), (y[row] for y in factors)
                change = beta1 * (v1 - decay1 * (state * k1).sum(-2))
                state = state * decay1[..., None] + k1 * change[..., None, :]
                out[row] = (state * q1).sum(-2)
            store.matrices[run.target, self.number] = state
        y = out.view(rows, sizes.num_value_heads, sizes.head_dim)
        gate = self.gate(taken).view(y.shape)
        return (self.norm(y) * torch.nn.functional.silu(gate)).flatten(1)

    def _factors(self, taken: Tensor) -> tuple[Tensor, Tensor]:
        """beta and decay [rows, heads] f32."""
        if self.interleaved:
            both = self.factors[0](taken).unflatten(-1, (self.sizes.num_key_heads, 2, -1))
            beta, decay = (both[:, :, i].flatten(1) for i in range(2))
        else:
            beta, decay = (matrix(taken) for matrix in self.factors)
        x, heads = even(decay + self.bias), self.sizes.num_value_heads
        return torch.sigmoid(even(beta))[:, :heads], torch.exp(even(self.rate) * _softplus(x))[:, :heads]

    def _spread(self, x: Tensor) -> Tensor:
        """[rows, value heads, D] of key heads [rows, key heads, D]."""
        shared = self.sizes.num_value_heads // self.sizes.num_key_heads
        return x.repeat_interleave(shared, 1) if self.interleaved else x.repeat(1, shared, 1)


def _softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def _unit(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
