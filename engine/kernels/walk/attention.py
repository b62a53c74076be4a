"""Operations of attention: heads into the cache, scores and weighted sums in parts, parts into one."""

from __future__ import annotations

from engine.kernels.attention import BLOCK, PART, STATE
from engine.kernels.plan import LEAST_QUERIES, QUERY_TILE, SPLIT_ROWS
from engine.kernels.program import Stored
from engine.kernels.walk.instructions import (
    Record,
    activation_at,
    add_vector,
    cap_vector,
    centre_vector,
    compiled,
    copy_bytes,
    finish_state,
    fix_keys,
    fix_query,
    fix_values,
    fix_weights,
    gate_vector,
    int32_at,
    merge_states,
    norm_vector,
    put_int32,
    put_int64,
    rotate_neox,
    rotate_pairs,
    scale_values,
    scale_vector,
    scores_fixed,
    scores_floats,
    softmax,
    store_key_f16,
    store_key_f32,
    store_key_q8_0,
    store_value_f16,
    store_value_f32,
    store_value_q8_0,
    weigh_fixed,
    weigh_floats,
    widen_keys_q8_0,
    widen_values_q8_0,
)
from engine.kernels.walk.layers import activate_plain


@compiled
def cached(c: Record, op: Record, r: int, block: int, values: int, head: int) -> int:
    """Address of a KV head's keys (values = 0) or values (1) in a block of row r's conversation."""
    table = c.tables + int32_at(c.table_rows + 4 * r) * c.table_blocks * 4
    start = c.kv_memory + int32_at(table + 4 * block) * c.kv_block_bytes + op.kv_offset
    address: int = start + values * op.num_kv_heads * (op.kv_head_bytes + op.kv_scale_bytes) + head * op.kv_head_bytes
    return address


@compiled
def scales_of(op: Record, numbers: int, head: int) -> int:
    """Address of the scales of a KV head's keys or values: they follow the numbers of all heads."""
    address: int = numbers + (op.num_kv_heads - head) * op.kv_head_bytes + head * op.kv_scale_bytes
    return address


@compiled
def store(c: Record, op: Record, x: int, numbers: int, head: int, slot: int, values: int) -> None:
    """A head's key or value of one position into its slot of a block."""
    dim = op.head_dim
    if c.kv_stored == Stored.F16:
        if values:
            store_value_f16(x, numbers + slot * dim * 2, dim)
        else:
            store_key_f16(x, numbers + slot * 2, dim)
    elif c.kv_stored == Stored.F32:
        if values:
            store_value_f32(x, numbers + slot * dim * 4, dim)
        else:
            store_key_f32(x, numbers + slot * 4, dim)
    else:
        scales = scales_of(op, numbers, head)
        if values:
            store_value_q8_0(x, numbers + slot * dim, scales + slot * (op.kv_scale_bytes // BLOCK), dim)
        else:
            store_key_q8_0(x, numbers + slot, scales + slot * 2, dim)


@compiled
def as_floats(c: Record, op: Record, numbers: int, head: int, values: int, wide: int) -> int:
    """Address of a block's keys or values of a head in f32: where they are, or in `wide`."""
    if c.kv_stored == Stored.F32:
        return numbers
    if values:
        widen_values_q8_0(numbers, scales_of(op, numbers, head), wide, op.head_dim)
    else:
        widen_keys_q8_0(numbers, scales_of(op, numbers, head), wide, op.head_dim)
    return wide


@compiled
def norm_head(c: Record, op: Record, x: int, weight: int) -> None:
    if op.centred:
        centre_vector(x, weight, c.eps, op.head_dim)
    else:
        norm_vector(x, weight, c.eps, op.head_dim)


@compiled
def keep_value(c: Record, op: Record, r: int, x: int, head: int) -> None:
    """The value of a KV head of row r through its norm, and into the cache."""
    position = int32_at(c.positions + 4 * r)
    if op.v_norm:
        norm_vector(x, op.v_norm, c.eps, op.head_dim)
    numbers = cached(c, op, r, position // BLOCK, 1, head)
    store(c, op, x, numbers, head, position % BLOCK, 1)


@compiled
def heads(c: Record, op: Record, start: int, end: int) -> None:
    dim, keys = op.head_dim, op.num_kv_heads
    total = c.num_heads + op.stored_heads
    for i in range(start, end):
        r, h = i // total, i % total
        x, position = c.qkv + r * c.qkv_bytes + h * dim * 4, int32_at(c.positions + 4 * r)
        is_query, own = h < c.num_heads, h if h < c.num_heads else h - c.num_heads
        if op.bias:
            add_vector(x, op.bias + h * dim * 4, dim)
        if not is_query and own >= keys:
            keep_value(c, op, r, x, own - keys)
            continue
        if not is_query and op.stored_heads == keys:
            copy_bytes(x + keys * dim * 4, x, dim * 4)
            keep_value(c, op, r, x + keys * dim * 4, own)
        weight = op.q_norm if is_query else op.k_norm
        if weight and not op.late_norms:
            norm_head(c, op, x, weight + own * op.norm_bytes)
        table = position * op.half * 4
        if op.neox:
            rotate_neox(x, op.cos + table, op.sin + table, op.half)
        else:
            rotate_pairs(x, op.cos + table, op.sin + table, op.half)
        if weight and op.late_norms:
            norm_head(c, op, x, weight + own * op.norm_bytes)
        if is_query:
            scale_vector(x, op.q_scales + 4 * position if op.q_scales else c.scale, dim)
            if c.kv_stored == Stored.F16:
                fix_query(x, dim)
        else:
            store(c, op, x, cached(c, op, r, position // BLOCK, 0, own), own, position % BLOCK, 0)


@compiled
def keep(c: Record) -> None:
    """Move the wanted rows to the front. They ascend, so it is done in place."""
    for i in range(c.num_wanted):
        w = int32_at(c.wanted + 4 * i)
        copy_bytes(c.x + i * c.x_bytes, c.x + w * c.x_bytes, c.x_bytes)
        copy_bytes(c.qkv + i * c.qkv_bytes, c.qkv + w * c.qkv_bytes, c.qkv_bytes)
        copy_bytes(c.given + i * c.given_bytes, c.given + w * c.given_bytes, c.given_bytes)
        put_int32(c.positions + 4 * i, int32_at(c.positions + 4 * w))
        put_int32(c.table_rows + 4 * i, int32_at(c.table_rows + 4 * w))


@compiled
def first_seen(position: int, window: int) -> int:
    if window < 0:
        return position // -window * -window
    return max(0, position + 1 - window) if window else 0


@compiled
def first_seeing(c: Record, r: int, end: int, start: int) -> int:
    """First of the rows r..end of a conversation, whose positions ascend, that sees something from `start` on."""
    while r < end and int32_at(c.positions + 4 * r) < start:
        r += 1
    return r


@compiled
def last_seeing(c: Record, r: int, end: int, stop: int, window: int) -> int:
    """Behind the last of the rows r..end that sees something before `stop`."""
    while r < end and first_seen(int32_at(c.positions + 4 * (end - 1)), window) >= stop:
        end -= 1
    return end


@compiled
def places(c: Record, op: Record, tid: int) -> tuple[int, int, int, int, int, int]:
    """Where a thread has its scores, numbers of a block made ready, scales, addresses of queries and of states, states.

    Of scales there are those of a block's keys or values, what its values are multiplied with, and those of weights.
    There are as many states again, for the parts that follow the first.
    """
    scores = c.scratch + tid * c.scratch_bytes
    wide = scores + 4 * QUERY_TILE * PART
    scales = wide + 4 * BLOCK * op.head_dim
    queries = scales + 8 * BLOCK + 4 * QUERY_TILE
    return scores, wide, scales, queries, queries + 8 * QUERY_TILE, queries + 16 * QUERY_TILE


@compiled
def seen_blocks(c: Record, op: Record, r0: int, r1: int, start: int) -> tuple[int, int, int]:
    """Of the part from `start` on, what rows see: first block, the one behind the last, positions up to there."""
    low = max(0, first_seen(int32_at(c.positions + 4 * r0), op.window) - start) // BLOCK
    high = min(PART, int32_at(c.positions + 4 * (r1 - 1)) + 1 - start)
    return low, (high + BLOCK - 1) // BLOCK, high


@compiled
def seeing(c: Record, op: Record, r0: int, r1: int, start: int) -> tuple[int, int]:
    """Of the queries of rows r0..r1, those that see something of the block from `start` on: the first, how many."""
    group = c.num_heads // op.num_kv_heads
    a = first_seeing(c, r0, r1, start)
    return (a - r0) * group, (last_seeing(c, a, r1, start + BLOCK, op.window) - a) * group


@compiled
def score_part(c: Record, op: Record, tid: int, head: int, r0: int, r1: int, part: int) -> None:
    """Scores of rows r0..r1, a block of keys at a time, then their softmax."""
    scores, wide, scales, queries, states, _ = places(c, op, tid)
    start, first, group = part * PART, part * PART // BLOCK, c.num_heads // op.num_kv_heads
    low, blocks, _ = seen_blocks(c, op, r0, r1, start)
    for b in range(low, blocks):
        keys, last = cached(c, op, r0, first + b, 0, head), b == blocks - 1
        following = cached(c, op, r0, first + (low if last else b + 1), 1 if last else 0, head)
        i, n = seeing(c, op, r0, r1, start + b * BLOCK)
        q, out = queries + 8 * i, scores + (i * PART + b * BLOCK) * 4
        if c.kv_stored != Stored.F16:
            scores_floats(q, n, as_floats(c, op, keys, head, 0, wide), out, op.head_dim, following)
        else:
            fix_keys(keys, wide, scales, op.head_dim, following)
            scores_fixed(q, n, wide, scales, out, op.head_dim, following)
    for r in range(r0, r1):
        position, i = int32_at(c.positions + 4 * r), (r - r0) * group
        seen_from, seen_to = max(0, first_seen(position, op.window) - start), min(PART, position + 1 - start)
        if op.cap:
            b = seen_from // BLOCK
            n = (seen_to + BLOCK - 1) // BLOCK - b
            for k in range(i, i + group):
                cap_vector(scores + (k * PART + b * BLOCK) * 4, op.cap, n * BLOCK)
        softmax(scores + i * PART * 4, group, seen_from, seen_to, states + 8 * i, op.head_dim)


@compiled
def weigh_part(c: Record, op: Record, tid: int, head: int, r0: int, r1: int, part: int) -> None:
    """Values of a part times the weights of rows r0..r1 into their states, a block at a time."""
    weights, wide, scales, _, states, _ = places(c, op, tid)
    factors, of_weights, dim = scales + 4 * BLOCK, scales + 8 * BLOCK, op.head_dim
    start, first = part * PART, part * PART // BLOCK
    low, blocks, high = seen_blocks(c, op, r0, r1, start)
    for b in range(low, blocks):
        values, positions = cached(c, op, r0, first + b, 1, head), min(BLOCK, high - b * BLOCK)
        following = cached(c, op, r0, first + min(b + 1, blocks - 1), 1, head)
        i, n = seeing(c, op, r0, r1, start + b * BLOCK)
        into, row = states + 8 * i, weights + i * PART * 4
        if c.kv_stored != Stored.F16:
            floats = as_floats(c, op, values, head, 1, wide)
            weigh_floats(row + b * BLOCK * 4, n, floats, positions, into, dim, following)
        else:
            pairs = (positions + 1) // 2
            scale_values(values, positions, scales, factors, dim)
            fix_weights(row, n, b, scales, of_weights)
            fix_values(values, factors, wide, pairs, dim, following)
            weigh_fixed(row + b * BLOCK * 2, of_weights, n, wide, pairs, into, dim, following)


@compiled
def attend_part(c: Record, op: Record, tid: int, head: int, r0: int, r1: int, part: int, strip: int) -> None:
    """One softmax part of rows r0..r1 (one conversation) on one KV head.

    States go to the slots of the part (strip < 0), or where all parts of a strip of rows are one thread's, to its own
    states, those of row `strip` first. There, all but a row's first part are merged at once: the same formula in the
    same order either way.
    """
    group, state_bytes = c.num_heads // op.num_kv_heads, (STATE + op.head_dim) * 4
    start, split = part * PART, strip < 0
    r0 = first_seeing(c, r0, r1, start)
    r1 = last_seeing(c, r0, r1, start + PART, op.window)
    if r0 >= r1:
        return
    _, _, _, queries, states, mine = places(c, op, tid)
    spare, mine = mine + QUERY_TILE * state_bytes, mine + (r0 - strip) * group * state_bytes
    late = r0 if split else last_seeing(c, r0, r1, start, op.window)  # up to here rows have seen an earlier part
    for i in range((r1 - r0) * group):
        r, h = r0 + i // group, head * group + i % group
        put_int64(queries + 8 * i, c.qkv + r * c.qkv_bytes + h * op.head_dim * 4)
        place = c.states + ((r * c.num_heads + h) * c.state_slots + part) * state_bytes
        if not split:
            place = (spare if r < late else mine) + i * state_bytes
        put_int64(states + 8 * i, place)
    score_part(c, op, tid, head, r0, r1, part)
    weigh_part(c, op, tid, head, r0, r1, part)
    merge_states(mine, spare, (late - r0) * group, op.head_dim)


@compiled
def num_parts(c: Record, op: Record) -> int:
    """Softmax parts of the longest row that an operation works on."""
    return c.wanted_parts if op.wanted else c.num_parts


@compiled
def num_strips(c: Record, op: Record, rows: int) -> int:
    """Strips of rows, of about the same height, that share passes over a part.

    As few as QUERY_TILE allows, so that a block becomes integers seldom; but as many as keep the threads busy, if that
    leaves a strip LEAST_QUERIES, and the same number for each thread where strips are long.
    """
    group = c.num_heads // op.num_kv_heads
    most, least = max(1, QUERY_TILE // group), max(1, LEAST_QUERIES // group)
    each = op.num_kv_heads * (num_parts(c, op) if rows <= SPLIT_ROWS else 1)
    strips = min((rows + least - 1) // least, (2 * c.num_threads + each - 1) // each)
    strips = max(strips, (rows + most - 1) // most)
    while rows > SPLIT_ROWS and strips < rows and strips * each % c.num_threads:
        strips += 1
    return strips


@compiled
def attend(c: Record, op: Record, tid: int, rows: int, item: int, items: int) -> None:
    """One item: (strip of rows, KV head) and, for few rows, part. The longest come first."""
    split, parts = rows <= SPLIT_ROWS, num_parts(c, op)
    share = parts if split else 1
    j, strips = items - 1 - item, items // (op.num_kv_heads * share)
    strip, head = j // (op.num_kv_heads * share), j // share % op.num_kv_heads
    begin, end = strip * rows // strips, (strip + 1) * rows // strips
    for part in range(j % share, j % share + 1 if split else parts):
        r = begin
        while r < end:
            last = r + 1
            table = int32_at(c.table_rows + 4 * r)
            while last < end and int32_at(c.table_rows + 4 * last) == table:
                last += 1
            attend_part(c, op, tid, head, r, last, part, -1 if split else begin)
            r = last
    group, states = c.num_heads // op.num_kv_heads, places(c, op, tid)[5]
    for i in range(0 if split else (end - begin) * group):
        finish_head(c, op, begin + i // group, head * group + i % group, states + i * (STATE + op.head_dim) * 4)


@compiled
def finish_head(c: Record, op: Record, r: int, h: int, state: int) -> None:
    """The output of a head from the state of all parts."""
    dim, out = op.head_dim, c.attention + r * c.attention_bytes + h * op.head_dim * 4
    if op.sinks:
        merge_states(state, op.sinks + h * (STATE + dim) * 4, 1, dim)
    finish_state(state, out, dim)
    if op.gate:
        gate_vector(out, c.qkv + r * c.qkv_bytes + op.gate + h * dim * 4, dim)


@compiled
def merge(c: Record, op: Record, rows: int, start: int, end: int) -> None:
    """Quantize for the output matrix; for few rows, merge the parts in ascending order and divide by the sum before."""
    act = activation_at(c.activations, op.activation)
    dim, split = op.head_dim, rows <= SPLIT_ROWS
    state_bytes = (STATE + dim) * 4
    per_row = act.num_values // op.share
    for i in range(start, end):
        r, u = i // per_row, i % per_row
        position = int32_at(c.positions + 4 * r)
        for h in range(u * op.share // dim, (u + 1) * op.share // dim if split else 0):
            first = first_seen(position, op.window) // PART
            state = c.states + ((r * c.num_heads + h) * c.state_slots + first) * state_bytes
            for part in range(1, position // PART + 1 - first):
                merge_states(state, state + part * state_bytes, 1, dim)
            finish_head(c, op, r, h, state)
        count = op.share // act.unit
        activate_plain(act, r, c.attention + r * c.attention_bytes, 0, 0, u * count, count)
