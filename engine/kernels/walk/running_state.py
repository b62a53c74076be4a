"""Operations of layers with a running state (Gated DeltaNet, Mamba 2, short convolutions), which go from row to row."""

from __future__ import annotations

from engine.kernels.plan import (
    DELTA_COLUMNS,
    TAPS,
)
from engine.kernels.program import Op
from engine.kernels.walk.instructions import (
    LINE,
    Record,
    activation_at,
    compiled,
    convolve,
    convolve_biased,
    copy_bytes,
    delta,
    delta_gates,
    gate_silu,
    int32_at,
    mix,
    norm_gated,
    norm_vector,
    scan,
    scan_gates,
    unit_vector,
)
from engine.kernels.walk.layers import activate_plain


@compiled
def conversation_end(c: Record, r: int, end: int) -> int:
    """The row behind those of row r's conversation, at most `end`."""
    table, last = int32_at(c.table_rows + 4 * r), r + 1
    while last < end and int32_at(c.table_rows + 4 * last) == table:
        last += 1
    return last


@compiled
def slot_of(c: Record, r: int, segment: int) -> int:
    """Address of the slot that a segment of the rows of row r's conversation runs on."""
    place = c.state_table + 8 * (int32_at(c.table_rows + 4 * r) * c.num_segments + segment)
    address: int = c.state_memory + int32_at(place) * c.state_bytes
    return address


@compiled
def segment_end(c: Record, first: int, last: int, segment: int) -> int:
    """The row behind a segment of rows first..last, all those of a conversation."""
    place = c.state_table + 8 * (int32_at(c.table_rows + 4 * first) * c.num_segments + segment)
    return min(last, first + int32_at(place + 4))


@compiled
def num_channels(c: Record) -> int:
    channels: int = (2 * c.key_heads + c.value_heads) * c.delta_dim
    return channels


@compiled
def convolve_rows(c: Record, op: Record, start: int, end: int) -> None:
    """Strips of 16 channels, each through all rows."""
    width = 4 * op.count
    for i in range(start, end):
        at, first = i * LINE, 0
        while first < c.num_rows:
            last, r, segment = conversation_end(c, first, c.num_rows), first, 0
            while r < last:
                state, until = slot_of(c, first, segment) + op.state_offset + at, segment_end(c, first, last, segment)
                if segment > 0:
                    before = slot_of(c, first, segment - 1) + op.state_offset + at
                    for j in range(TAPS - 1):
                        copy_bytes(state + j * width, before + j * width, LINE)
                x = c.qkv + r * c.qkv_bytes + op.qkv_offset + at
                if until > r and op.code == Op.MIX:
                    mix(x, c.qkv_bytes, until - r, op.weight + at, state, width)
                elif until > r and op.bias:
                    convolve_biased(x, c.qkv_bytes, until - r, op.weight + at, state, width, op.bias + at)
                elif until > r:
                    convolve(x, c.qkv_bytes, until - r, op.weight + at, state, width, 0)
                r, segment = until, segment + 1
            first = last


@compiled
def factors_of(c: Record, r: int) -> int:
    """Address of what row r has for each value head: a share, and 16 numbers' room further a decay."""
    address: int = c.qkv + r * c.qkv_bytes + 4 * (num_channels(c) + c.value_heads * c.delta_dim)
    return address


@compiled
def decay_offset(c: Record) -> int:
    return (c.value_heads + 15) // 16 * LINE


@compiled
def unit_rows(c: Record, op: Record, start: int, end: int) -> None:
    heads = 2 * c.key_heads
    for i in range(start, end):
        r, h = i // (heads + 1), i % (heads + 1)
        if h < heads:
            factor = c.delta_scale if h < c.key_heads else c.one
            unit_vector(c.qkv + r * c.qkv_bytes + h * c.delta_dim * 4, c.eps, factor, c.delta_dim)
        else:
            shares, decays = factors_of(c, r), factors_of(c, r) + decay_offset(c)
            delta_gates(shares, decays, op.bias, op.rate, decay_offset(c) // 4)


@compiled
def delta_run(c: Record, op: Record, head: int, column: int, state: int, first: int, last: int) -> None:
    """Rows first..last of a conversation on some columns of a head's state."""
    dim = c.delta_dim
    key = head // (c.value_heads // c.key_heads) if op.interleaved else head % c.key_heads
    for r in range(first, last):
        x, share = c.qkv + r * c.qkv_bytes, factors_of(c, r) + 4 * head
        q, k = x + key * dim * 4, x + (c.key_heads + key) * dim * 4
        v = x + ((2 * c.key_heads + head) * dim + column) * 4
        delta(state, q, k, v, share + decay_offset(c), share, dim)


@compiled
def steps_of(c: Record, op: Record, r: int) -> int:
    """Address of what row r of a state space layer has for each head: a step, and 16 numbers' room further a decay."""
    address: int = c.qkv + r * c.qkv_bytes + op.qkv_offset
    address += 4 * (c.value_heads * c.delta_dim + 2 * c.key_heads * c.key_dim)
    return address


@compiled
def scan_gate_rows(c: Record, op: Record, start: int, end: int) -> None:
    for r in range(start, end):
        steps = steps_of(c, op, r)
        scan_gates(steps, steps + decay_offset(c), op.bias, op.rate, decay_offset(c) // 4)


@compiled
def scan_run(c: Record, op: Record, head: int, column: int, state: int, first: int, last: int) -> None:
    """Rows first..last of a conversation on some columns of a head's state. A row has values, keys and queries."""
    group, values = head // (c.value_heads // c.key_heads), c.value_heads * c.delta_dim
    for r in range(first, last):
        x, step = c.qkv + r * c.qkv_bytes + op.qkv_offset, steps_of(c, op, r) + 4 * head
        k = x + (values + group * c.key_dim) * 4
        q, v = k + c.key_heads * c.key_dim * 4, x + (head * c.delta_dim + column) * 4
        scan(state, q, k, v, step + decay_offset(c), step, op.skip + 4 * head, c.key_dim)


@compiled
def gate_norm_rows(c: Record, op: Record, start: int, end: int) -> None:
    """Shares of rows: what the heads give, gated and normed, quantized for the output matrix."""
    act = activation_at(c.activations, op.activation)
    per_row = act.num_values // op.share
    for i in range(start, end):
        r, u = i // per_row, i % per_row
        x, out = c.qkv + r * c.qkv_bytes, c.attention + r * c.attention_bytes
        for first in range(u * op.share, (u + 1) * op.share, op.count):
            gate_silu(x + op.qkv_offset + 4 * first, x + 4 * first, out + 4 * first, op.count)
            norm_vector(out + 4 * first, op.weight + 4 * first, c.inner_eps, op.count)
        count = op.share // act.unit
        activate_plain(act, r, out, 0, 0, u * count, count)


@compiled
def delta_rows(c: Record, op: Record, start: int, end: int) -> None:
    """Strips of DELTA_COLUMNS columns of the state of a value head, one after the other, each through all rows."""
    strips, size = c.delta_dim // DELTA_COLUMNS, c.key_dim * DELTA_COLUMNS * 4
    for i in range(start, end):
        head, column, first, at = i // strips, i % strips * DELTA_COLUMNS, 0, op.state_offset + i * size
        while first < c.num_rows:
            last, r, segment = conversation_end(c, first, c.num_rows), first, 0
            while r < last:
                state, until = slot_of(c, first, segment) + at, segment_end(c, first, last, segment)
                if segment > 0:
                    copy_bytes(state, slot_of(c, first, segment - 1) + at, size)
                if op.code == Op.SCAN:
                    scan_run(c, op, head, column, state, r, until)
                else:
                    delta_run(c, op, head, column, state, r, until)
                r, segment = until, segment + 1
            first = last


@compiled
def norm_gated_rows(c: Record, op: Record, start: int, end: int) -> None:
    """Shares of rows: what their heads give, normed and gated, quantized for the output matrix."""
    act = activation_at(c.activations, op.activation)
    dim = c.delta_dim
    per_row = act.num_values // op.share
    for i in range(start, end):
        r, u = i // per_row, i % per_row
        x, out = c.qkv + r * c.qkv_bytes, c.attention + r * c.attention_bytes
        for h in range(u * op.share // dim, (u + 1) * op.share // dim):
            v = x + (2 * c.key_heads + h) * dim * 4
            norm_gated(v, x + op.gate + h * dim * 4, op.weight, c.eps, out + h * dim * 4, dim)
        count = op.share // act.unit
        activate_plain(act, r, out, 0, 0, u * count, count)
