"""From an architecture to the operations of its forward step (`kernels/program.py` says what each does)."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.buffers import LINE
from engine.config import UNSAID, ConvolutionSizes, DeltaSizes, ScanSizes
from engine.gguf_file import GGUFFile
from engine.kernels.dot import ActivationLayout, layout_for
from engine.kernels.formats import ROWS
from engine.kernels.kv_types import NUMBER_BYTES, runs_of
from engine.kernels.plan import TAPS
from engine.kernels.program import ACTIVATION, MATRIX, OPERATION, Gate, Op
from engine.kv_cache import BLOCK_SIZE
from engine.matrices import FeedForward, LayerMatrices
from engine.operands import Operands
from engine.pages import zeroed
from engine.weights import Matrix, load_vector

if TYPE_CHECKING:
    from engine.model import Model


_GATES = {"silu": Gate.SILU, "gelu": Gate.GELU, "clipped": Gate.CLIPPED, "relu2": 0}
"""How operations name an activation. LONE, which gates nothing, knows two: GELU, and 0 for relu2."""


class Program:
    """The operations of a step, and the arrays they point to."""

    def __init__(self, model: Model, gguf: GGUFFile) -> None:
        self._model, self._gguf = model, gguf
        self._config, self._layers, self._buffers = model.config, model.matrices, model.buffers
        self._at = Operands(gguf, model.config)
        c, layers = self._config, self._layers
        self._numbers = {id(m): n for n, m in enumerate(layers.all)}
        self._offsets = {
            id(m): offset for y in layers.layers for some in (y.qkv, y.router) for m, offset in _offsets(some)
        }
        self.matrices = np.array([self._matrix(m) for m in layers.all], MATRIX)
        dense = [y.dense for y in layers.layers if y.dense]
        experts = [y.experts for y in layers.layers if y.experts]
        readers_hidden = [layers.head] + [m for y in layers.layers for m in (*y.qkv, *y.router)]
        readers_hidden += [m for part in (*dense, *experts) for m in part.gate_up]
        readers_hidden += [*layers.given[1:], *(m for y in layers.layers for m in y.given[:1])]
        self._activations: list[tuple[int, ...]] = []
        rows, slots = model.max_rows, self._buffers.num_slots
        self._hidden = self._activation(c.hidden_size, readers_hidden, rows)
        outputs = [[y.output for n, y in enumerate(layers.layers) if c.has_state(n) == recalls] for recalls in (0, 1)]
        self._attended = self._activations_for(outputs[0])
        self._recalled = self._activation(outputs[1][0].num_columns, outputs[1], rows) if c.recurrent else 0
        self._gated = self._activations_for([part.down for part in dense])
        if c.layer_embedding_size:
            self._gated_given = self._activation(c.layer_embedding_size, [y.given[1] for y in layers.layers], rows)
        if c.experts:
            self._gathered = self._activation(c.hidden_size, [m for part in experts for m in part.gate_up], slots)
            self._expert_gated = self._activation(c.experts.ffn_size, [part.down for part in experts], slots)
        self.activations = np.array(self._activations, ACTIVATION)
        self._rope = {
            local: self._at.rope_tables(model.max_positions, local)
            for local in {c.is_local(n) for n in range(c.num_layers)}
        }
        self._q_scales: dict[bool, int] = {}
        """Of layers that are rotated and others, where queries at each position have a factor of their own."""
        for n in range(c.num_layers):
            if c.scores_grow(n) and c.is_rotated(n) not in self._q_scales:
                self._q_scales[c.is_rotated(n)] = self._at.keep(c.query_scales(model.max_positions, n))
        self._operations: list[dict[str, int]] = []
        self._build()
        self.operations = np.zeros(len(self._operations), OPERATION)
        for i, operation in enumerate(self._operations):
            for name, value in operation.items():
                self.operations[i][name] = value
        assert len(self.operations) * LINE <= self._buffers.counters.nbytes

    # ------------------------------------------------------------------ what operations point to
    def _matrix(self, m: Matrix) -> tuple[int, ...]:
        return (
            self._model.weights.memory.ctypes.data + m.offset,
            self._model.kernel_address(m, "matmul"),
            self._model.kernel_address(m, "dequantize_row"),
            m.group_bytes,
            m.num_groups,
            m.num_blocks,
            layout_for(m.fmt).span,
            self._offsets.get(id(m), 0),
        )

    def _activations_for(self, readers: list[Matrix]) -> dict[int, int]:
        """An activation for all matrices that take as many values, by that number."""
        widths = sorted({m.num_columns for m in readers})
        return {
            w: self._activation(w, [m for m in readers if m.num_columns == w], self._model.max_rows) for w in widths
        }

    def _activation(self, num_values: int, readers: list[Matrix], rows: int) -> int:
        """Number of a new activation in every layout that its readers multiply with."""
        spans = {layout_for(m.fmt).span for m in readers}
        unit = next(u for u in (256, 64, 32) if num_values % u == 0)
        record: list[int] = [num_values, unit]
        for span in (256, 32, 1):
            size = ActivationLayout(span).row_bytes(num_values)
            record += [self._at.keep(zeroed(rows * size)) if span in spans else 0, size]
        self._activations.append(tuple(record))
        return len(self._activations) - 1

    # ------------------------------------------------------------------ the operations
    def _add(self, code: Op, **values: int) -> None:
        self._operations.append({"code": int(code), "wanted": int(self._wanted), **values})

    def _build(self) -> None:
        c, b = self._config, self._buffers
        self._wanted = False
        factor = b.constants[2:].ctypes.data if c.embedding_factor != 1 else 0
        embedding = self._numbers[id(self._layers.embedding)]
        if self._layers.given:
            self._give(embedding, *self._layers.given)
        self._add(Op.EMBED, matrix=embedding, factor=factor)
        for n, layer in enumerate(self._layers.layers):
            self._layer(n, layer)
        self._take(c.arch.output_norm, c.logit_factor)
        self._multiply(self._hidden, (self._layers.head,), b.logits)
        self._add_bias("output", b.logits, self._layers.head.num_rows)
        if c.logit_cap:
            cap, out = b.constants[4:].ctypes.data, b.logits
            self._add(Op.CAP, cap=cap, out=out.ctypes.data, out_bytes=out.strides[0], count=out.shape[1])
        if c.unsaid_ids:
            unsaid = np.zeros(b.logits.shape[1], np.float32)
            unsaid[list(c.unsaid_ids)] = UNSAID
            out, address = b.logits, self._at.keep(unsaid)
            self._add(Op.ADD_BIAS, out=out.ctypes.data, out_bytes=out.strides[0], count=len(unsaid), bias=address)

    def _give(self, embedding: int, table: Matrix, projection: Matrix) -> None:
        """given = what gates a branch in each layer: the token's embedding for it, and one made of the stream's.

        That one is made of embeddings times the root of the hidden size, and divided by it: so of embeddings as they
        are. Their sum is divided by the root of 2.
        """
        c, b = self._config, self._buffers
        assert b.given is not None
        self._add(Op.EMBED, matrix=embedding)
        self._add(Op.NORM, activation=self._hidden)
        self._multiply(self._hidden, (projection,), b.given)
        self._add(
            Op.GIVE,
            matrix=self._numbers[id(table)],
            weight=self._at.scaled("per_layer_proj_norm.weight", c.layer_embedding_size, math.sqrt(0.5)),
            factor=b.constants[8:].ctypes.data,
            count=c.layer_embedding_size,
            share=c.num_layers,
        )

    def _take_given(self, n: int, layer: LayerMatrices) -> None:
        """x += what the branch makes of it that the token's embedding for this layer gates."""
        b, size = self._buffers, self._config.layer_embedding_size
        inward, outward = layer.given
        self._add(Op.NORM, activation=self._hidden)
        self._multiply(self._hidden, (inward,), b.branch)
        out = {"out": b.branch.ctypes.data, "out_bytes": b.branch.strides[0]}
        self._add(Op.GATE_GIVEN, second=self._gated_given, given_offset=4 * n * size, **out)
        self._into_stream(self._gated_given, outward, f"blk.{n}.post_norm", self._at.layer_scale(n))

    def _layer(self, n: int, layer: LayerMatrices) -> None:
        c = self._config
        self._take_for(f"blk.{n}.attn_norm")
        self._multiply(self._hidden, layer.qkv, self._buffers.qkv)
        if c.has_state(n):
            if c.delta is not None:
                self._recall(n, c.delta, layer)
            elif c.convolution is not None:
                self._mix(n, c.convolution)
            elif c.scan is not None:
                self._scan(n, c.scan)
            self._multiply(self._recalled, (layer.output,), self._buffers.x, add=1)
        else:
            self._attend(n, layer)
            activation = self._attended[layer.output.num_columns]
            self._into_stream(activation, layer.output, f"blk.{n}.post_attention_norm")
        if layer.experts and layer.dense and c.arch.experts_beside:
            self._experts_and_dense(n, layer, layer.experts, layer.dense)
        else:
            if not c.is_parallel:
                self._take_for(f"blk.{n}.{c.arch.ffn_norm}")
            if layer.experts:
                self._route(n, layer)
                self._experts(n, layer.experts, self._buffers.x, add=1)
            if layer.dense:
                self._dense(n, layer, layer.dense)
        if layer.given:
            self._take_given(n, layer)

    def _attend(self, n: int, layer: LayerMatrices) -> None:
        """activation = what attention gives."""
        c, b, heads = self._config, self._buffers, self._config.heads[n]
        if c.arch.whole_head_norms:
            self._whole_norm(f"blk.{n}.attn_q_norm", 0, c.num_heads * heads.dim)
            self._whole_norm(f"blk.{n}.attn_k_norm", c.num_heads * heads.dim, heads.keys)
        local = c.is_local(n)
        cache = self._cache(n)
        cos, sin = self._rope[local]
        self._add(
            Op.HEADS,
            bias=self._at.bias(n),
            **self._at.head_norms(n),
            q_scales=self._q_scales.get(c.is_rotated(n), 0),
            cos=cos,
            sin=sin,
            half=heads.rope_dim // 2 if c.is_rotated(n) else 0,
            neox=int(c.arch.neox_rope),
            stored_heads=heads.num_kv_heads * (0 if c.kv_layer(n) != n else 1 if heads.keys_are_values else 2),
            **cache,
        )
        # K and V of every row are in the cache; only the wanted rows need what comes after.
        self._keep_wanted(n)
        window = c.window if local else 0
        cap = b.constants[3:].ctypes.data if c.attention_cap else 0
        gate = self._offsets[id(layer.qkv[3])] if c.arch.delta_layers else 0
        sinks = self._at.sinks(n)
        self._add(Op.ATTEND, window=window, cap=cap, gate=gate, sinks=sinks, **cache)
        activation = self._attended[layer.output.num_columns]
        self._add(
            Op.MERGE,
            activation=activation,
            head_dim=heads.dim,
            window=window,
            share=self._share(activation, heads.dim),
            gate=gate,
            sinks=sinks,
        )

    def _cache(self, n: int) -> dict[str, int]:
        """Where the keys and values that a layer looks at lie in a block."""
        c, heads, kv_type = self._config, self._config.heads[n], self._model.kv_type
        return {
            "head_dim": heads.dim,
            "num_kv_heads": heads.num_kv_heads,
            "kv_offset": self._model.kv_layout.offsets[c.attention_layers.index(c.kv_layer(n))],
            "kv_head_bytes": BLOCK_SIZE * heads.dim * NUMBER_BYTES[kv_type],
            "kv_scale_bytes": BLOCK_SIZE * 2 * runs_of(heads.dim) if kv_type == "q8_0" else 0,
        }

    def _recall(self, n: int, sizes: DeltaSizes, layer: LayerMatrices) -> None:
        """activation = what the running state gives."""
        state_offset, taps = self._config.state_offset(n), self._at.taps(f"blk.{n}.ssm_conv1d.weight", sizes.channels)
        self._add(Op.CONVOLVE, weight=taps, state_offset=state_offset, count=sizes.channels)
        rates = (self._at.padded(f"blk.{n}.{name}", sizes.num_value_heads) for name in ("ssm_dt.bias", "ssm_a"))
        self._add(Op.UNIT, **dict(zip(("bias", "rate"), rates)))
        self._add(
            Op.DELTA,
            state_offset=state_offset + 4 * (TAPS - 1) * sizes.channels,
            interleaved=int(self._config.arch.interleaved_deltas),
        )
        self._keep_wanted(n)
        self._add(
            Op.NORM_GATED,
            activation=self._recalled,
            gate=self._offsets[id(layer.qkv[1])],
            weight=self._at.vector(f"blk.{n}.ssm_norm", sizes.head_dim),
            share=self._share(self._recalled, sizes.head_dim),
        )

    def _scan(self, n: int, sizes: ScanSizes) -> None:
        """activation = what a state space layer gives. A row has gates, then values, keys and queries, then steps."""
        block, at = f"blk.{n}.ssm", self._at
        state_offset, start = self._config.state_offset(n), {"qkv_offset": 4 * sizes.values}
        has_bias = f"{block}_conv1d.bias" in self._gguf.tensors
        bias = at.padded(f"{block}_conv1d.bias", sizes.channels) if has_bias else 0
        taps = at.taps(f"{block}_conv1d.weight", sizes.channels)
        self._add(Op.CONVOLVE, weight=taps, bias=bias, state_offset=state_offset, count=sizes.channels, **start)
        bias, rate = at.padded(f"{block}_dt.bias", sizes.num_heads), at.padded(f"{block}_a", sizes.num_heads, 1)
        self._add(Op.SCAN_GATES, bias=bias, rate=rate, **start)
        state_offset += 4 * (TAPS - 1) * sizes.channels
        self._add(Op.SCAN, state_offset=state_offset, skip=at.padded(f"{block}_d", sizes.num_heads, 1), **start)
        self._keep_wanted(n)
        group = sizes.values // sizes.num_groups
        weight, share = at.vector(f"{block}_norm", sizes.num_groups, group), self._share(self._recalled, group)
        self._add(Op.GATE_NORM, activation=self._recalled, weight=weight, count=group, share=share, **start)

    def _mix(self, n: int, sizes: ConvolutionSizes) -> None:
        """activation = what the convolution gives."""
        taps, out = self._at.taps(f"blk.{n}.shortconv.conv.weight", sizes.channels, sizes.taps), self._buffers.qkv
        self._add(Op.MIX, weight=taps, state_offset=self._config.state_offset(n), count=sizes.channels)
        self._keep_wanted(n)
        self._add(Op.TAKE, activation=self._recalled, out=out.ctypes.data, out_bytes=out.strides[0])

    def _keep_wanted(self, n: int) -> None:
        """Behind what all rows leave to later ones in the last layer that does so."""
        if n == self._config.last_remembered:
            self._wanted = True
            self._add(Op.KEEP)
            if self._config.is_parallel:
                self._take_for(f"blk.{n}.attn_norm")  # of the rows that are left, for the feed-forward layer

    def _share(self, activation: int, head_dim: int) -> int:
        """Values that are worked on together: whole heads, and whole units of the activation."""
        width, unit = self._activations[activation][:2]
        whole = math.lcm(unit, head_dim)
        return whole if width % whole == 0 else width

    def _dense(self, n: int, layer: LayerMatrices, part: FeedForward) -> None:
        """The feed-forward layer that every row passes."""
        gated = self._gated[part.down.num_columns]
        self._gate(Op.GATED if self._config.arch.gated else Op.LONE, self._hidden, gated, part, self._at.up_bias(n))
        if not self._config.has_shared_gate:
            scale = 0 if layer.given else self._at.layer_scale(n)
            self._into_stream(gated, part.down, f"blk.{n}.post_ffw_norm", scale)
            return
        out, router = self._buffers.branch, self._buffers.router
        self._multiply(gated, (part.down,), out)
        factor = router[0, router.shape[1] - 16 :].ctypes.data
        out_place = {"out": out.ctypes.data, "out_bytes": out.strides[0]}
        self._add(Op.ADD_GATED, **out_place, factor=factor, factor_bytes=router.strides[0])

    def _experts_and_dense(self, n: int, layer: LayerMatrices, experts: FeedForward, dense: FeedForward) -> None:
        """x += what the chosen experts and the feed-forward layer make of x side by side, each through norms."""
        c, b, block = self._config, self._buffers, f"blk.{n}"
        # The router's norm has no weights, but a scale of its own.
        scale = self._at.scaled(f"{block}.ffn_gate_inp.scale", c.hidden_size, c.hidden_size**-0.5)
        self._add(Op.NORM, activation=self._hidden, weight=scale)
        self._route(n, layer)
        self._take(f"{block}.pre_ffw_norm_2")
        self._experts(n, experts, b.branch, add=0)
        branch = {"out": b.branch.ctypes.data, "out_bytes": b.branch.strides[0]}
        weight = self._at.vector(f"{block}.post_ffw_norm_2", c.hidden_size)
        self._add(Op.ROW_NORM, count=c.hidden_size, weight=weight, **branch)
        self._take(f"{block}.{c.arch.ffn_norm}")
        gated = self._gated[dense.down.num_columns]
        self._gate(Op.GATED, self._hidden, gated, dense)
        self._multiply(gated, (dense.down,), b.beside)
        self._add_norm(b.beside, f"{block}.post_ffw_norm_1", b.branch)
        self._add_norm(b.branch, f"{block}.post_ffw_norm", b.x, 0 if layer.given else self._at.layer_scale(n))

    def _route(self, n: int, layer: LayerMatrices) -> None:
        """Which experts each row passes, and with which weights."""
        c, router = self._config, self._buffers.router
        assert c.experts
        self._multiply(self._hidden, layer.router, router)
        self._add_bias(f"blk.{n}.ffn_gate_inp", router, c.experts.count)
        scales = self._at.expert_scales(n, c.experts.count)
        place = {"out": router.ctypes.data, "out_bytes": router.strides[0]}
        self._add(Op.ROUTE, **place, expert_scales=scales, bias=self._at.choice_bias(n))

    def _experts(self, n: int, part: FeedForward, out: NDArray[np.float32], add: int) -> None:
        """out += (or =) what the chosen experts make of each row."""
        c = self._config
        assert c.experts
        # Its matrices are adjacent: gate and up, or one for both, and down.
        self._add(Op.GROUP, matrix=self._numbers[id(part.gate_up[0])], num_matrices=len(part.all))
        self._add(Op.GATHER, activation=self._hidden, second=self._gathered)
        biases = self._at.expert_biases(n, ("ffn_gate_exps", "ffn_up_exps"), c.experts.ffn_size)
        self._gate(Op.EXPERTS_GATED, self._gathered, self._expert_gated, part, biases)
        self._add(
            Op.EXPERTS_DOWN,
            activation=self._expert_gated,
            matrix=self._numbers[id(part.down)],
            num_matrices=1,
            out=out.ctypes.data,
            out_bytes=out.strides[0],
            add=add,
            weighted_inputs=int(c.arch.weighted_inputs),
            bias=self._at.expert_biases(n, ("ffn_down_exps",), c.hidden_size),
        )

    def _gate(self, op: Op, activation: int, second: int, part: FeedForward, bias: int = 0) -> None:
        self._add(
            op,
            activation=activation,
            second=second,
            matrix=self._numbers[id(part.gate_up[0])],
            activates=_GATES[self._config.arch.activation],
            weighted_inputs=int(op == Op.EXPERTS_GATED and self._config.arch.weighted_inputs),
            bias=bias,
        )

    def _take(self, norm: str, factor: float = 1.0) -> None:
        """activation = x through a norm, times a factor."""
        centred = int(self._config.arch.norm == "centred")
        self._add(Op.NORM, activation=self._hidden, weight=self._at.norm(norm, factor), centred=centred)

    def _take_for(self, norm: str) -> None:
        """activation = x as a branch takes it: through a norm where the architecture has one there."""
        if self._config.arch.pre_norms:
            self._take(norm)
        else:
            self._add(Op.NORM, activation=self._hidden)

    def _whole_norm(self, name: str, first: int, count: int) -> None:
        """A norm over `count` numbers of q, k and v from the first on, all heads together."""
        qkv = self._buffers.qkv
        self._add(
            Op.ROW_NORM,
            out=qkv.ctypes.data + 4 * first,
            out_bytes=qkv.strides[0],
            count=count,
            weight=self._at.vector(name, count),
        )

    def _multiply(self, activation: int, matrices: tuple[Matrix, ...], out: NDArray[np.float32], add: int = 0) -> None:
        first = self._numbers[id(matrices[0])]
        self._add(
            Op.MATMUL,
            activation=activation,
            matrix=first,
            num_matrices=len(matrices),
            out=out.ctypes.data,
            out_bytes=out.strides[0],
            add=add,
        )

    def _into_stream(self, activation: int, matrix: Matrix, post_norm: str, scale: int = 0) -> None:
        """x += matrix . activation, through a norm where the architecture has one. `scale`: as `_layer_scale`."""
        b, size = self._buffers, self._config.hidden_size
        name = matrix.name.removesuffix(".weight")
        if not self._config.arch.post_norms:
            self._multiply(activation, (matrix,), b.x, add=1)
            self._add_bias(name, b.x, size)
            return
        self._multiply(activation, (matrix,), b.branch)
        self._add_bias(name, b.branch, size)
        self._add_norm(b.branch, post_norm, b.x, scale)

    def _add_norm(self, out: NDArray[np.float32], norm: str, into: NDArray[np.float32], scale: int = 0) -> None:
        self._add(
            Op.ADD_NORM,
            out=out.ctypes.data,
            out_bytes=out.strides[0],
            weight=self._at.vector(norm, self._config.hidden_size),
            into=into.ctypes.data,
            into_bytes=into.strides[0],
            factor=scale,
        )

    def _add_bias(self, name: str, out: NDArray[np.float32], size: int) -> None:
        """out += the biases of a matrix, if it has any. Rows of `out` are whole vectors, and more is added nothing."""
        if f"{name}.bias" not in self._gguf.tensors:
            return
        bias = np.zeros(out.shape[1], np.float32)
        bias[:size] = load_vector(self._gguf, f"{name}.bias", size)
        address = self._at.keep(bias)
        self._add(Op.ADD_BIAS, out=out.ctypes.data, out_bytes=out.strides[0], count=len(bias), bias=address)


def _offsets(matrices: tuple[Matrix, ...]) -> list[tuple[Matrix, int]]:
    """Bytes where each matrix of a product begins in its row of outputs: side by side, in whole groups."""
    starts = accumulate((4 * ROWS * m.num_groups for m in matrices), initial=0)
    return list(zip(matrices, starts))
