"""The forward step of `model.py` in plain NumPy, out of the kernels' twins: what the compiled step is held to.

It takes a conversation whole and from its start, keeps nothing, and reads the weights as the file has them; the rows
of a step, blocks, threads and layouts of `model.py` are what must not show. For tests and as documentation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.api import KVType
from engine.config import UNSAID, DeltaSizes, Experts, ModelConfig, ScanSizes
from engine.gguf_file import GGUFFile
from engine.kernels import twins
from engine.kernels.plan import DELTA_COLUMNS, TAPS
from engine.quant import row_bytes

Floats = NDArray[np.float32]
Cached = Floats | NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Step:
    """What a forward step leaves behind."""

    logits: Floats
    """[T, V]."""
    keys: tuple[Cached, ...]
    """Of each layer with keys [T, G, D], as the cache holds them; q8_0 as what it stands for."""
    values: tuple[Cached, ...]
    states: Floats
    """Running states [layers with such, layer_bytes / 4], as a slot holds them."""


class _Tensors:
    """A file's tensors by name."""

    def __init__(self, gguf: GGUFFile) -> None:
        self._gguf = gguf

    def __contains__(self, name: str) -> bool:
        return name in self._gguf.tensors

    def _rows(self, name: str) -> NDArray[np.uint8]:
        info = self._gguf.tensors[name]
        return self._gguf.data(name).reshape(-1, row_bytes(info.type, info.shape[-1]))

    def rows(self, name: str, numbers: Sequence[int]) -> Floats:
        """Rows of a matrix, dequantized."""
        return twins.dequantize_row(self._gguf.tensors[name].type, self._rows(name)[list(numbers)])

    def vector(self, name: str) -> Floats:
        only: Floats = self.rows(name, [0])[0]
        return only

    def taps(self, name: str, channels: int) -> Floats:
        """Of a convolution [TAPS, channels], with zeros in front where there are fewer."""
        found = self.rows(name, range(channels)).T
        taps = np.zeros((TAPS, channels), np.float32)
        taps[TAPS - len(found) :] = found
        return taps

    def head_norm(self, name: str) -> Floats:
        """[D], or [H, D] where each head has its own."""
        own = len(self._gguf.tensors[name].shape) > 1
        return self.rows(name, range(self._gguf.tensors[name].shape[0])) if own else self.vector(name)

    def multiply(self, name: str, x: Floats, expert: int = 0) -> Floats:
        """[T, N] f32 = x [T, K] times the rows of a matrix, or of one expert's matrix."""
        info, rows = self._gguf.tensors[name], self._rows(name)
        count = info.shape[0] if len(info.shape) == 3 else 1
        return twins.matmul(info.type, rows.reshape(count, -1, rows.shape[-1])[expert], x)

    def biased(self, matrix: str, x: Floats, expert: int = 0) -> Floats:
        """`multiply`, and the biases where the matrix has some."""
        y, bias = self.multiply(f"{matrix}.weight", x, expert), f"{matrix}.bias"
        return y + self.rows(bias, [expert])[0] if bias in self else y


def forward(gguf: GGUFFile, ids: Sequence[int], kv_type: KVType = "f16", context_size: int | None = None) -> Step:
    """Logits and cache of a conversation of T tokens, at positions 0 .. T-1.

    `context_size` is what the model is loaded for: the trained context by default.
    """
    c, t = ModelConfig.from_gguf(gguf), _Tensors(gguf)
    c = c.for_context(context_size or c.train_context_size)
    x = t.rows("token_embd.weight", ids)
    gates = _given(c, t, ids, x) if c.layer_embedding_size else None
    x = x * np.float32(c.embedding_factor)
    cache: dict[int, tuple[Cached, Cached]] = {}
    states = []
    for n in range(c.num_layers):
        if c.has_state(n):
            if c.delta:
                given, state = _recalled(c, c.delta, t, n, x)
            else:
                given, state = _scanned(c, c.scan, t, n, x) if c.scan else _mixed(c, t, n, x)
            states.append(state)
            x = x + t.multiply(f"blk.{n}.{'shortconv.out_proj' if c.convolution else 'ssm_out'}.weight", given)
            x = _feed_forward(c, t, n, _taken(c, t, f"blk.{n}.{c.arch.ffn_norm}", x), x)
            continue
        gate, q, *computed = _heads(c, t, n, x)
        if computed:
            k, v = computed
            cache[n] = twins.kept(k, kv_type), twins.kept(v, kv_type)
        keys, values = cache[c.kv_layer(n)]
        window = c.window if c.is_local(n) else 0
        sinks = t.vector(f"blk.{n}.attn_sinks.weight") if c.arch.sinks else None
        seen = twins.attention(q, keys, values, np.arange(len(ids)), window, c.attention_cap, sinks).reshape(
            len(ids), -1
        )
        if gate is not None:
            seen = seen * twins.sigmoid(gate)
        attended = _into_stream(c, t, f"blk.{n}.attn_output", f"blk.{n}.post_attention_norm", seen, x)
        norm = f"blk.{n}.{'attn_norm' if c.is_parallel else c.arch.ffn_norm}"
        if c.experts and c.has_experts(n) and c.arch.experts_beside:
            x = _experts_and_dense(c, c.experts, t, n, attended)
        else:
            x = _feed_forward(c, t, n, _taken(c, t, norm, x if c.is_parallel else attended), attended)
        if gates is not None:
            gated = twins.gelu(t.multiply(f"blk.{n}.inp_gate.weight", x), gates[:, n])
            x = _into_stream(c, t, f"blk.{n}.proj", f"blk.{n}.post_norm", gated, x)
        if f"blk.{n}.layer_output_scale.weight" in t:
            x = x * t.vector(f"blk.{n}.layer_output_scale.weight")
    normed = _normed(c, t, c.arch.output_norm, x, c.logit_factor)
    head = "output.weight" if "output.weight" in t else "token_embd.weight"
    all_keys, all_values = zip(*cache.values())
    logits = t.multiply(head, normed)
    if "output.bias" in t:
        logits = logits + t.vector("output.bias")
    found = np.stack(states) if states else np.zeros((0, 0), np.float32)
    logits = twins.capped(logits, c.logit_cap) if c.logit_cap else logits
    logits[:, list(c.unsaid_ids)] += np.float32(UNSAID)
    return Step(logits, all_keys, all_values, found)


def _given(c: ModelConfig, t: _Tensors, ids: Sequence[int], x: Floats) -> Floats:
    """[T, layers, size] f32: what gates a branch in each layer, of embeddings x [T, hidden]."""
    weight = t.vector("per_layer_proj_norm.weight") * np.float32(math.sqrt(0.5))
    shape = (len(ids), c.num_layers, c.layer_embedding_size)
    made = twins.normed(t.multiply("per_layer_model_proj.weight", x).reshape(shape), weight, c.norm_eps)
    own = t.rows("per_layer_token_embd.weight", ids).reshape(shape)
    return twins.fma32(own, np.float32(math.sqrt(c.layer_embedding_size / 2)), made)


def _recalled(c: ModelConfig, sizes: DeltaSizes, t: _Tensors, layer: int, x: Floats) -> tuple[Floats, Floats]:
    """What the running state of a layer gives [T, values], and the state after all rows, flat."""
    block, dim, heads, length = f"blk.{layer}", sizes.head_dim, sizes.num_value_heads, len(x)
    normed = _taken(c, t, f"{block}.attn_norm", x)
    mixed, gate = (t.multiply(f"{block}.{name}.weight", normed) for name in ("attn_qkv", "attn_gate"))
    if c.arch.interleaved_deltas:
        both = t.multiply(f"{block}.ssm_ba.weight", normed).reshape(length, sizes.num_key_heads, 2, -1)
        share, decay = (both[:, :, i].reshape(length, heads) for i in range(2))
    else:
        share, decay = (t.multiply(f"{block}.ssm_{name}.weight", normed) for name in ("beta", "alpha"))
    share = twins.sigmoid(share)
    decay = twins.exp(t.vector(f"{block}.ssm_a") * twins.softplus(decay + t.vector(f"{block}.ssm_dt.bias")))
    taps = t.taps(f"{block}.ssm_conv1d.weight", sizes.channels)
    seen, history = twins.convolve(mixed, taps, np.zeros((TAPS - 1, sizes.channels), np.float32))
    parts = np.split(seen, [sizes.keys, 2 * sizes.keys], axis=1)
    q, k, v = (part.reshape(length, -1, dim) for part in parts)
    q, k = twins.unit(q, c.norm_eps, dim**-0.5), twins.unit(k, c.norm_eps, 1.0)
    shared = heads // sizes.num_key_heads
    q, k = (np.repeat(y, shared, axis=1) if c.arch.interleaved_deltas else np.tile(y, (1, shared, 1)) for y in (q, k))
    given, state = twins.delta(q, k, v, decay, share, np.zeros((heads, dim, dim), np.float32))
    out = twins.norm_gated(given, gate.reshape(given.shape), t.vector(f"{block}.ssm_norm.weight"), c.norm_eps)
    return out.reshape(length, -1), _as_kept(history, state)


def _as_kept(history: Floats, state: Floats) -> Floats:
    """What the convolution saw last, and the state [H, K, V] as a slot has it, flat: columns that are worked on
    together lie together."""
    strips = state.reshape(*state.shape[:2], -1, DELTA_COLUMNS).swapaxes(1, 2)
    return np.concatenate([history.reshape(-1), strips.reshape(-1)])


def _scanned(c: ModelConfig, sizes: ScanSizes, t: _Tensors, layer: int, x: Floats) -> tuple[Floats, Floats]:
    """What a state space layer gives [T, values], and its state after all rows, flat."""
    block, heads, length = f"blk.{layer}.ssm", sizes.num_heads, len(x)
    made = t.multiply(f"{block}_in.weight", _taken(c, t, f"blk.{layer}.attn_norm", x))
    gate, mixed, step = np.split(made, [sizes.values, sizes.values + sizes.channels], axis=1)
    bias = t.vector(f"{block}_conv1d.bias") if f"{block}_conv1d.bias" in t else None
    taps = t.taps(f"{block}_conv1d.weight", sizes.channels)
    seen, history = twins.convolve(mixed, taps, np.zeros((TAPS - 1, sizes.channels), np.float32), bias)
    keys = sizes.num_groups * sizes.key_dim
    v, k, q = np.split(seen, [sizes.values, sizes.values + keys], axis=1)
    k, q = (np.repeat(y.reshape(length, sizes.num_groups, -1), heads // sizes.num_groups, axis=1) for y in (k, q))
    step = twins.softplus(step + t.vector(f"{block}_dt.bias"))
    rate, skip = (t.rows(f"{block}_{name}", range(heads))[:, 0] for name in ("a", "d"))
    state = np.zeros((heads, sizes.key_dim, sizes.head_dim), np.float32)
    v = v.reshape(length, heads, -1)
    given, state = twins.scan(q, k, v, twins.exp(rate * step), step, skip, state)
    gated = twins.gate_silu(given.reshape(length, sizes.num_groups, -1), gate.reshape(length, sizes.num_groups, -1))
    weight = t.rows(f"{block}_norm.weight", range(sizes.num_groups))
    return twins.normed(gated, weight, sizes.norm_eps).reshape(length, -1), _as_kept(history, state)


def _mixed(c: ModelConfig, t: _Tensors, layer: int, x: Floats) -> tuple[Floats, Floats]:
    """What a layer that is a convolution gives [T, channels], and its state after all rows, flat."""
    assert c.convolution
    block, channels = f"blk.{layer}.shortconv", c.convolution.channels
    parts = t.multiply(f"{block}.in_proj.weight", _taken(c, t, f"blk.{layer}.attn_norm", x))
    taps = t.taps(f"{block}.conv.weight", channels)
    given, history = twins.mix(parts, taps, np.zeros((TAPS - 1, channels), np.float32))
    return given, history.reshape(-1)


def _normed(c: ModelConfig, t: _Tensors, norm: str, x: Floats, factor: float = 1.0) -> Floats:
    weight = t.vector(f"{norm}.weight") * np.float32(factor)
    if c.arch.norm == "rms":
        return twins.normed(x, weight, c.norm_eps)
    bias = t.vector(f"{norm}.bias") * np.float32(factor) if f"{norm}.bias" in t else np.zeros_like(weight)
    return twins.centred(x, weight, bias, c.norm_eps)


def _taken(c: ModelConfig, t: _Tensors, norm: str, x: Floats) -> Floats:
    """The stream as a branch takes it."""
    return _normed(c, t, norm, x) if c.arch.pre_norms else x


def _heads(c: ModelConfig, t: _Tensors, layer: int, x: Floats) -> tuple[Floats | None, Floats, *tuple[Floats, ...]]:
    """Of a layer the gate [T, H D] f32, if it has one, q [T, H, D] f32 with the attention scale, k and v [T, G, D], if
    it has these."""
    normed, sizes = _taken(c, t, f"blk.{layer}.attn_norm", x), c.heads[layer]
    cos, sin = (table[:, None] for table in c.rope_tables(len(x), c.is_local(layer)))
    heads, names, gate = [], ["attn_q", "attn_k", "attn_v"], None
    fused = f"blk.{layer}.attn_qkv"
    if f"{fused}.weight" in t:
        ends = np.cumsum([c.num_heads * sizes.dim, sizes.keys])
        whole = t.multiply(f"{fused}.weight", normed)
        computed = np.split(whole + t.vector(f"{fused}.bias") if f"{fused}.bias" in t else whole, ends, axis=1)
    else:
        if c.kv_layer(layer) != layer:
            names = names[:1]
        tied = {"attn_v": "attn_k"} if sizes.keys_are_values else {}
        computed = [t.multiply(f"blk.{layer}.{tied.get(name, name)}.weight", normed) for name in names]
    if c.arch.delta_layers:  # each head of q is followed by its gate
        both = computed[0].reshape(len(x), c.num_heads, 2, sizes.dim)
        computed[0], gate = (both[:, :, i].reshape(len(x), -1) for i in range(2))
    for name, y in zip(names, computed, strict=True):
        if f"blk.{layer}.{name}.bias" in t:
            y = y + t.vector(f"blk.{layer}.{name}.bias")
        if not c.arch.whole_head_norms:
            y = y.reshape(len(x), -1, sizes.dim)
        norm = f"blk.{layer}.{name}_norm.weight"
        if norm in t and not c.arch.late_head_norms:
            y = _normed_heads(c, t, norm, y)
        y = y.reshape(len(x), -1, sizes.dim)
        if name == "attn_v" and c.arch.normed_values:
            y = twins.normed(y, np.ones(sizes.dim, np.float32), c.norm_eps)
        rotated = name != "attn_v" and c.is_rotated(layer)
        y = twins.rotate(y, cos, sin, c.arch.neox_rope) if rotated else y
        if name != "attn_v" and c.has_unit_heads(layer):
            y = twins.normed(y, np.ones(sizes.dim, np.float32), c.norm_eps)
        heads.append(_normed_heads(c, t, norm, y) if norm in t and c.arch.late_head_norms else y)
    q, *others = heads
    return gate, q * c.query_scales(len(x), layer)[:, None, None], *others


def _normed_heads(c: ModelConfig, t: _Tensors, norm: str, y: Floats) -> Floats:
    weight = t.head_norm(norm)
    return (
        twins.centred(y, weight, None, c.norm_eps) if c.arch.norm == "centred" else twins.normed(y, weight, c.norm_eps)
    )


def _feed_forward(c: ModelConfig, t: _Tensors, layer: int, normed: Floats, x: Floats) -> Floats:
    """x and what the experts, and what all rows pass, make of the normed stream."""
    block = f"blk.{layer}"
    if c.experts and c.has_experts(layer):
        x = _with_experts(c, c.experts, t, layer, normed, x)
    if c.has_shared_gate:
        factor = twins.sigmoid(t.multiply(f"{block}.ffn_gate_inp_shexp.weight", normed))
        y = t.multiply(f"{block}.ffn_down_shexp.weight", _inner(c, t, layer, "_shexp", normed))
        return twins.fma32(y, factor, x)
    if c.ffn_sizes[layer]:
        suffix = "_shexp" if c.has_experts(layer) else ""
        inner = _inner(c, t, layer, suffix, normed)
        return _into_stream(c, t, f"{block}.ffn_down{suffix}", f"{block}.post_ffw_norm", inner, x)
    return x


def _inner(
    c: ModelConfig, t: _Tensors, layer: int, suffix: str, normed: Floats, expert: int = 0, weight: Floats | None = None
) -> Floats:
    """What the matrix `ffn_down` takes. `weight` [T, 1]: what an expert takes its rows times."""
    block = f"blk.{layer}.ffn"
    if not c.arch.gated:
        up = t.multiply(f"{block}_up.weight", normed)
        name = f"{block}_up.bias"
        up = up + (t.vector(name) if name in t else np.zeros(c.ffn_sizes[layer], np.float32))
        return twins.lone_gelu(up) if c.arch.activation == "gelu" else twins.lone_relu2(up)
    if f"{block}_gate{suffix}.weight" in t:
        gate, up = (t.biased(f"{block}_{name}{suffix}", normed, expert) for name in ("gate", "up"))
    else:
        fused = "gate_up" if f"{block}_gate_up{suffix}.weight" in t else "up"
        gate, up = np.split(t.multiply(f"{block}_{fused}{suffix}.weight", normed, expert), 2, axis=1)
    if weight is not None:
        gate, up = gate * weight, up * weight
    return {"gelu": twins.gelu, "clipped": twins.clipped}.get(c.arch.activation, twins.silu)(gate, up)


def _experts_and_dense(c: ModelConfig, e: Experts, t: _Tensors, layer: int, x: Floats) -> Floats:
    """x and what the chosen experts and the feed-forward layer make of x side by side, each through norms."""
    block = f"blk.{layer}"
    scale = t.vector(f"{block}.ffn_gate_inp.scale") * np.float32(c.hidden_size**-0.5)
    routed = twins.normed(x, scale, c.norm_eps)
    taken = _normed(c, t, f"{block}.pre_ffw_norm_2", x)
    branch = _with_experts(c, e, t, layer, taken, np.zeros_like(x), routed)
    branch = _normed(c, t, f"{block}.post_ffw_norm_2", branch)
    dense = t.multiply(f"{block}.ffn_down.weight", _inner(c, t, layer, "", _normed(c, t, f"{block}.ffn_norm", x)))
    branch = branch + twins.branch_normed(dense, t.vector(f"{block}.post_ffw_norm_1.weight"), c.norm_eps)
    return x + twins.branch_normed(branch, t.vector(f"{block}.post_ffw_norm.weight"), c.norm_eps)


def _with_experts(
    c: ModelConfig, e: Experts, t: _Tensors, layer: int, normed: Floats, x: Floats, routed: Floats | None = None
) -> Floats:
    """x and what each row's experts make of it, added in the order of their numbers. `routed`: what the router takes,
    if that is not `normed`."""
    logits = t.biased(f"blk.{layer}.ffn_gate_inp", normed if routed is None else routed)
    name = f"blk.{layer}.exp_probs_b.bias"
    if e.is_even or name in t:
        bias = t.vector(name) if name in t else None
        experts, weights = twins.choose_biased(logits, e.chosen, e.is_even, e.is_normed, e.scale, bias)
    else:
        experts, weights = twins.choose(logits, e.chosen, e.is_normed, e.scale)
    if f"blk.{layer}.ffn_down_exps.scale" in t:
        weights = weights * t.vector(f"blk.{layer}.ffn_down_exps.scale")[experts]
    x = x.copy()
    for expert in range(e.count):
        rows, ranks = np.nonzero(experts == expert)
        if len(rows):
            weight = weights[rows, ranks, None]
            taken = weight if c.arch.weighted_inputs else None
            y = t.biased(
                f"blk.{layer}.ffn_down_exps", _inner(c, t, layer, "_exps", normed[rows], expert, taken), expert
            )
            x[rows] = twins.fma32(y, weight if taken is None else np.float32(1), x[rows])
    return x


def _into_stream(c: ModelConfig, t: _Tensors, matrix: str, post_norm: str, y: Floats, x: Floats) -> Floats:
    """x + matrix . y, through a norm where the architecture has one."""
    branch = t.multiply(f"{matrix}.weight", y)
    bias = t.vector(f"{matrix}.bias") if f"{matrix}.bias" in t else None
    if not c.arch.post_norms:
        return x + branch if bias is None else x + branch + bias
    branch = branch if bias is None else branch + bias
    return x + twins.branch_normed(branch, t.vector(f"{post_norm}.weight"), c.norm_eps)
