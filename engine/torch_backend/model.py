"""The forward step in torch: `model_twin.py` with rows, blocks and devices.

Rows go through the model in tiles of a fixed size, each through all layers before the next. So every product, norm and
sum has one shape, whatever a step consists of, and attention has one that depends on a row's position alone: all
positions up to the next multiple of 512. What is missing in a tile is filled up with a row that is there. A library
that computes the rows of a product alike then gives a row the same bits in every step; the tests find out whether it
does, and `goinfer-chat check --backend torch` on the machine at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.api import KVType
from engine.config import UNSAID, ModelConfig
from engine.gguf_file import GGUFFile
from engine.kernels.attention import PART
from engine.kernels.routing import LEAST_SUM
from engine.kernels.rows import CLIP, CLIPPED_SLOPE
from engine.kv_cache import BLOCK_SIZE, KVPool, StatePool
from engine.kv_layout import KVLayout
from engine.model import Batch, LoadOptions
from engine.torch_backend.delta import Run, StateStore, runs_of_tile
from engine.torch_backend.device import Device
from engine.torch_backend.kv import DevicePool, DeviceStatePool, LayerStore
from engine.torch_backend.matrices import Form
from engine.torch_backend.parts import Norm, even
from engine.torch_backend.weights import Attention, Beside, FeedForward, Layer, TorchWeights


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows first .. last - 1 of a tile: of one conversation, in one part of 512 positions."""

    first: int
    last: int
    index: Tensor
    """Rows of the tile [Q] i64, filled up."""
    blocks: Tensor
    """[8 n] i64: all that positions up to the end of the part can lie in."""
    hidden: Tensor
    """[Q, S] bool: positions that a row does not see."""
    hidden_in_window: Tensor | None
    """The same in the layers with a window, if there are any."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """The rows of one pass, all tensors [rows], filled up with the last one."""

    ids: Tensor
    positions: Tensor
    count: int
    """Rows that are not filled up."""
    blocks: Tensor
    """Where K and V go, of `count` rows."""
    slots: Tensor
    groups: tuple[_Group, ...]
    runs: tuple[Run, ...]
    """What running states do, if the model has such."""


class TorchModel:
    """A `StepModel` on a device."""

    config: ModelConfig

    def __init__(self, gguf: GGUFFile, device: Device, form: Form, options: LoadOptions) -> None:
        """Raises UnsupportedModelError for what this backend does not know, ModelFileError or OutOfMemoryError."""
        config = ModelConfig.from_gguf(gguf)
        on_cpu = device.torch.type == "cpu"
        if on_cpu and options.threads is not None:
            torch.set_num_threads(options.threads)
        self.max_positions = options.max_positions or config.train_context_size
        self.config = config.for_context(self.max_positions)
        self.kv_type: KVType = options.kv_type
        self.kv_layout = KVLayout.of(self.config, self.kv_type)
        self.threads = torch.get_num_threads() if on_cpu else 0
        self.max_rows = options.max_rows
        self.numerics = device.numerics(form)
        self._device, self._form = device, form
        self._weights = TorchWeights(gguf, self.config, device.torch, form, options.progress)
        self._rope = {
            local: tuple(
                torch.from_numpy(t).to(device.torch) for t in self.config.rope_tables(self.max_positions, local)
            )
            for local in {self.config.is_local(n) for n in range(self.config.num_layers)}
        }
        self._query_scales: dict[bool, Tensor] = {}
        """Of layers that are rotated, and of those that are not."""
        for n in range(self.config.num_layers):
            if (rotated := self.config.is_rotated(n)) not in self._query_scales:
                scales = torch.from_numpy(self.config.query_scales(self.max_positions, n))
                self._query_scales[rotated] = scales.to(device.torch)
        self._stores: dict[int, LayerStore] = {}
        self._states: StateStore | None = None

    @property
    def kernels(self) -> str:
        forms = {"f32": "float32", "f16": "float16", "blocks": "quantized weights, float16"}
        return f"torch {torch.__version__.partition('+')[0]}, {self._device.title}, {forms[self._form]}"

    @property
    def weight_bytes(self) -> int:
        return self._weights.num_bytes

    @property
    def kv_block_bytes(self) -> int:
        return self.kv_layout.block_bytes

    def new_pool(self, num_blocks: int, num_states: int = 0, num_checkpoints: int = 0) -> KVPool:
        size, device, sizes = self.kv_block_bytes, self._device, self.config.recurrent
        pool = DevicePool(size, num_blocks, device.torch) if device.own_memory else KVPool(size, num_blocks)
        starts = zip(self.config.attention_layers, self.kv_layout.offsets, strict=True)
        self._stores = {n: LayerStore(self.config.heads[n], self.kv_type, pool, start) for n, start in starts}
        if sizes is not None:
            size, of_states = self.config.state_bytes, (num_states, num_checkpoints)
            on_device = device.own_memory
            pool.states = DeviceStatePool(size, *of_states, device.torch) if on_device else StatePool(size, *of_states)
            self._states = StateStore(sizes, pool.states)
        return pool

    def close(self) -> None:
        self._stores, self._states = {}, None
        del self._weights, self._rope, self._query_scales
        if self._device.torch.type == "cuda":
            torch.cuda.empty_cache()

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        """Run the rows; logits [W, V] f32 of the wanted ones."""
        assert 0 < len(batch.ids) <= self.max_rows
        with torch.inference_mode():
            return self._forward(batch)

    def _forward(self, batch: Batch) -> NDArray[np.float32]:
        logits = np.empty((len(batch.want), self.config.vocab_size), np.float32)
        for first in range(0, len(batch.ids), self._device.rows):
            tile = self._tile(batch, first)
            wanted = np.flatnonzero((batch.want >= first) & (batch.want < first + tile.count))
            x = self._run(tile, None if len(wanted) else self.config.last_remembered + 1)
            if len(wanted):
                rows = self._indices(batch.want[wanted] - first)
                logits[wanted] = self._head(x)[rows].cpu().numpy()
        self._device.synchronize()  # its time is this step's, and a cancellation is seen between steps
        return logits

    # ------------------------------------------------------------------ the rows of a pass
    def _indices(self, numbers: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(np.asarray(numbers, np.int64)).to(self._device.torch)

    def _tile(self, batch: Batch, first: int) -> _Tile:
        rows = slice(first, min(first + self._device.rows, len(batch.ids)))
        positions, tables = batch.positions[rows].astype(np.int64), batch.table_rows[rows]
        count = len(positions)
        filled = np.minimum(np.arange(self._device.rows), count - 1)
        blocks = batch.tables[tables, positions // BLOCK_SIZE]
        # Rows go on with the group before them as long as conversation and part are the same and there is room.
        same = np.stack([tables, positions // PART])
        starts = [0]
        for row in range(1, count):
            if (same[:, row] != same[:, starts[-1]]).any() or row - starts[-1] == self._device.queries:
                starts.append(row)
        groups = [self._group(positions, batch.tables[tables[a]], a, b) for a, b in zip(starts, [*starts[1:], count])]
        return _Tile(
            self._indices(batch.ids[rows][filled]),
            self._indices(positions[filled]),
            count,
            self._indices(blocks),
            self._indices(positions % BLOCK_SIZE),
            tuple(groups),
            () if batch.states is None else runs_of_tile(batch.table_rows, batch.states, rows.start, rows.stop),
        )

    def _group(self, positions: NDArray[np.int64], table: NDArray[np.int32], first: int, last: int) -> _Group:
        index = np.minimum(np.arange(first, first + self._device.queries), last - 1)
        size = (int(positions[first]) // PART + 1) * PART
        blocks = np.zeros(size // BLOCK_SIZE, np.int64)
        blocks[: min(len(table), len(blocks))] = table[: len(blocks)]
        own = self._indices(positions[index])[:, None]
        every = torch.arange(size, device=self._device.torch)
        hidden = every > own
        window = self.config.window
        seen_from = own // -window * -window if window < 0 else own + 1 - window
        in_window = hidden | (every < seen_from) if window else None
        return _Group(first, last, self._indices(index), self._indices(blocks), hidden, in_window)

    # ------------------------------------------------------------------ the layers
    def _run(self, tile: _Tile, num_layers: int | None) -> Tensor:
        """The residual stream [rows, hidden] f32 behind so many layers, or all; K and V are in the cache."""
        c, w = self.config, self._weights
        x = w.embedding.rows(tile.ids)
        given = None if w.given is None else self._given(tile, x)
        x = x * c.embedding_factor
        for n, layer in enumerate(w.layers[:num_layers]):
            taken = x if layer.attention_norm is None else layer.attention_norm(x)
            if not isinstance(layer.mixer, Attention):
                assert self._states is not None
                y = layer.output(layer.mixer(taken, self._states, tile.runs))
            else:
                y = layer.output(self._attended(n, layer.mixer, taken, tile))
            x = x + (y if layer.post_attention_norm is None else layer.post_attention_norm(y))
            if not c.is_parallel:
                taken = x if layer.ffn_norm is None else layer.ffn_norm(x)
            x = self._feed_forward(layer, taken, x)
            if given is not None and layer.given is not None:
                y = layer.given.outward(_gelu(layer.given.inward(x)) * given[:, n])
                x = x + (y if layer.given.norm is None else layer.given.norm(y))
            if layer.scale is not None:
                x = x * layer.scale
        return x

    def _given(self, tile: _Tile, x: Tensor) -> Tensor:
        """[rows, layers, size] f32: what gates a branch in each layer, of embeddings x as they are."""
        assert self._weights.given is not None
        table, projection, norm = self._weights.given
        size = self.config.layer_embedding_size
        made = norm(projection(x).unflatten(-1, (-1, size)))
        return (made + table.rows(tile.ids).unflatten(-1, (-1, size)) * size**0.5) * 0.5**0.5

    def _head(self, x: Tensor) -> Tensor:
        """Logits [rows, V] f32."""
        c, w = self.config, self._weights
        logits = w.head(w.output_norm(x))
        logits = c.logit_cap * torch.tanh(logits / c.logit_cap) if c.logit_cap else logits
        if c.unsaid_ids:
            logits[:, list(c.unsaid_ids)] += UNSAID
        return logits

    def _attended(self, n: int, layer: Attention, taken: Tensor, tile: _Tile) -> Tensor:
        """[rows, H * D] f32 of what the layer takes [rows, hidden]; K and V are in the cache."""
        c, heads = self.config, self.config.heads[n]
        sizes = [c.num_heads * heads.dim, heads.keys, heads.keys]
        sizes[0] *= 2 if c.arch.delta_layers else 1
        if c.kv_layer(n) != n:
            (q,) = (matrix(taken) for matrix in layer.qkv)
            return self._attend(n, layer, self._query(n, layer, q, tile.positions), tile)
        computed = torch.cat([matrix(taken) for matrix in layer.qkv], -1)
        if heads.keys_are_values:
            computed = torch.cat([computed, computed[:, sizes[0] :]], -1)
        q, k, v = computed.split(sizes, -1)
        gate = None
        if c.arch.delta_layers:
            q, gate = (y.flatten(1) for y in q.unflatten(-1, (c.num_heads, 2, heads.dim)).unbind(2))
        q = self._query(n, layer, q, tile.positions)
        k = self._normed_and_rotated(n, k, layer.k_norm, tile.positions)
        v = v.unflatten(-1, (-1, heads.dim))
        v = v if layer.v_norm is None else layer.v_norm(v)
        self._stores[n].store(tile.blocks, tile.slots, k[: tile.count], v[: tile.count])
        seen = self._attend(n, layer, q, tile)
        return seen if gate is None else seen * torch.sigmoid(gate)

    def _query(self, n: int, layer: Attention, q: Tensor, positions: Tensor) -> Tensor:
        """[rows, H, D] f32 with the scale of scores in it."""
        scales = self._query_scales[self.config.is_rotated(n)]
        return self._normed_and_rotated(n, q, layer.q_norm, positions) * scales[positions][:, None, None]

    def _normed_and_rotated(self, n: int, y: Tensor, norm: Norm | None, positions: Tensor) -> Tensor:
        """Queries or keys y [rows, heads * D] as [rows, heads, D], normed and rotated."""
        c, late = self.config, self.config.arch.late_head_norms
        y = self._normed_heads(y, c.heads[n].dim, None if late else norm)
        if c.is_rotated(n):
            cos, sin = (table[positions][:, None] for table in self._rope[c.is_local(n)])
            y = _rotated(y, cos, sin, c.arch.neox_rope)
        return norm(y) if late and norm is not None else y

    def _normed_heads(self, y: Tensor, dim: int, norm: Norm | None) -> Tensor:
        """y [rows, heads * D] as [rows, heads, D], each head or all together through a norm, if there is one."""
        if norm is not None and self.config.arch.whole_head_norms:
            y, norm = norm(y), None
        y = y.unflatten(-1, (-1, dim))
        return y if norm is None else norm(y)

    def _attend(self, n: int, layer: Attention, q: Tensor, tile: _Tile) -> Tensor:
        """[rows, H * D] f32."""
        c, store = self.config, self._stores[self.config.kv_layer(n)]
        out = torch.zeros_like(q)
        for group in tile.groups:
            keys, values = store.keys(group.blocks), store.values(group.blocks)
            hidden = group.hidden_in_window if c.is_local(n) else group.hidden
            some = q[group.index].unflatten(1, (c.heads[n].num_kv_heads, -1)).transpose(0, 1)  # [G, Q, H / G, D]
            scores = torch.bmm(some.flatten(1, 2), keys).unflatten(1, some.shape[1:3])  # [G, Q, H / G, S]
            if c.attention_cap:
                scores = c.attention_cap * torch.tanh(scores / c.attention_cap)
            assert hidden is not None
            weights = _softmax(scores.masked_fill(hidden[:, None], -torch.inf), layer.sinks)
            seen = torch.bmm(weights.flatten(1, 2), values).unflatten(1, some.shape[1:3])
            seen = seen.transpose(0, 1).flatten(1, 2)  # [Q, H, D]
            out[group.first : group.last] = seen[: group.last - group.first]
        return out.flatten(1)

    def _feed_forward(self, layer: Layer, taken: Tensor, x: Tensor) -> Tensor:
        """x [rows, hidden] and what the experts, and what all rows pass, make of `taken`."""
        if layer.beside is not None:
            return self._experts_and_dense(layer, layer.beside, taken, x)
        if layer.experts is not None:
            x = self._with_experts(layer, layer.experts, taken, x)
        if layer.dense is not None:
            y = self._branch(layer.dense, taken)
            if layer.shared_gate is not None:
                y = y * torch.sigmoid(layer.shared_gate.times(taken))
            x = x + (y if layer.post_ffw_norm is None else layer.post_ffw_norm(y))
        return x

    def _experts_and_dense(self, layer: Layer, norms: Beside, taken: Tensor, x: Tensor) -> Tensor:
        """x and what experts and the feed-forward layer make of it side by side, each through norms."""
        assert layer.experts is not None
        assert layer.dense is not None
        assert layer.post_ffw_norm is not None
        y = self._with_experts(layer, layer.experts, norms.before(x), torch.zeros_like(x), norms.of_router(x))
        y = norms.behind(y) + norms.behind_dense(self._branch(layer.dense, taken))
        return x + layer.post_ffw_norm(y)

    def _branch(self, part: FeedForward, taken: Tensor, expert: int = 0) -> Tensor:
        arch = self.config.arch
        inner = torch.cat([matrix(taken, expert) for matrix in part.gate_up], -1)
        gate, up = inner.chunk(2, -1) if arch.gated else (inner, None)
        if arch.activation == "clipped":
            assert up is not None
            gate, up = gate.clamp(max=CLIP), up.clamp(-CLIP, CLIP) + 1
            inner = gate * torch.sigmoid(gate * CLIPPED_SLOPE)
        elif arch.activation == "gelu":
            inner = _gelu(gate)
        else:
            inner = torch.nn.functional.silu(gate) if arch.activation == "silu" else torch.relu(gate).square()
        return part.down(inner if up is None else inner * up, expert)

    def _with_experts(
        self, layer: Layer, part: FeedForward, taken: Tensor, x: Tensor, routed: Tensor | None = None
    ) -> Tensor:
        """x and what each row's experts make of it, added in the order of their numbers.

        A row passes every expert that any row of the tile has chosen, with a weight of 0 where it has not. `routed`:
        what the router takes, if that is something else.
        """
        e = self.config.experts
        assert e is not None
        assert layer.router is not None
        logits = layer.router(taken if routed is None else routed)
        if e.is_even:
            shares = torch.sigmoid(even(logits))[:, : logits.shape[-1]]
        else:
            shares = torch.exp(even(logits - logits.amax(-1, keepdim=True)))[:, : logits.shape[-1]]
            shares = shares / shares.sum(-1, keepdim=True)
        order = logits if layer.choice_bias is None else shares + layer.choice_bias
        # Stable: of equal ones the lower number.
        experts = torch.sort(order, dim=-1, descending=True, stable=True).indices[:, : e.chosen]
        weights = torch.zeros_like(shares).scatter(-1, experts, shares.gather(-1, experts))
        if e.is_normed:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=LEAST_SUM if e.is_even else 0)
        weights = weights * e.scale
        if layer.beside is not None:
            weights = weights * layer.beside.expert_scales
        for expert in experts.unique().tolist():
            weight = weights[:, expert, None]
            if self.config.arch.weighted_inputs:
                x = x + self._branch(part, taken * weight, expert)  # times 0 it gives nothing
            else:
                x = x + self._branch(part, taken, expert) * weight
        return x


def _gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Of scores [G, Q, H / G, S]; sinks [H]: one score more for each head, whose share goes nowhere."""
    if sinks is None:
        return torch.softmax(scores, -1)
    more = sinks.view(len(scores), 1, -1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, more], -1), -1)[..., :-1]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, neox: bool) -> Tensor:
    """The first 2 * half of x [rows, heads, D] in pairs (`twins.rotate`); cos, sin [rows, 1, half]."""
    half = cos.shape[-1]
    first, second = (slice(half), slice(half, 2 * half)) if neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    u, v = x[..., first], x[..., second]
    out = x.clone()
    out[..., first], out[..., second] = u * cos - v * sin, u * sin + v * cos
    return out
