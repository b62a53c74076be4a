"""Operations of mixtures of experts: which experts a row takes, and their products, grouped by expert."""

from __future__ import annotations

from engine.kernels.plan import (
    DOWN_GROUPS,
    GATED_ROWS,
)
from engine.kernels.walk.instructions import (
    LINE,
    Record,
    activation_at,
    add_gated,
    add_scaled,
    add_vector,
    choose,
    choose_biased,
    clear_bytes,
    compiled,
    copy_bytes,
    int32_at,
    matrix_at,
    put_int32,
    scale_choices,
    see_resident,
    will_need,
)
from engine.kernels.walk.layers import gated, multiply


@compiled
def route(c: Record, op: Record, start: int, end: int) -> None:
    for r in range(start, end):
        at = 4 * r * c.num_chosen
        logits = op.out + r * op.out_bytes
        ids, weights = c.choices + at, c.choice_weights + at
        if op.bias or c.even_experts:
            choose_biased(
                logits, c.num_experts, c.num_chosen, c.even_experts, c.expert_sum, c.expert_scale, op.bias, ids, weights
            )
        else:
            choose(logits, c.num_experts, c.num_chosen, c.expert_sum, c.expert_scale, ids, weights)
        if op.expert_scales:
            scale_choices(weights, ids, op.expert_scales, c.num_chosen)


@compiled
def is_resident(address: int, spare: int) -> bool:
    """Whether a page is in memory. `spare`: four bytes to write to."""
    put_int32(spare, 0)
    see_resident(address, spare)
    return int32_at(spare) & 1 == 1


@compiled
def ask_for_experts(c: Record, op: Record, tid: int) -> None:
    """Have the system read the chosen experts' weights from the disk, all at once instead of page by page.

    Where an expert's first page and its middle one are in memory it is not asked: asking costs some 10 us.
    """
    spare, n = c.scratch + tid * c.scratch_bytes, 0
    e = int32_at(c.busy_experts)
    while e >= 0:
        for m in range(op.num_matrices):
            matrix = matrix_at(c.matrices, op.matrix + m)
            size = matrix.num_groups * matrix.group_bytes
            page = (matrix.address + e * size) // c.page_bytes * c.page_bytes
            middle = page + size // 2 // c.page_bytes * c.page_bytes
            if not (is_resident(page, spare) and is_resident(middle, spare)):
                will_need(page, matrix.address + (e + 1) * size - page)
        n += 1
        e = int32_at(c.busy_experts + 4 * n)


@compiled
def group(c: Record, rows: int) -> None:
    """Count each expert's rows, then give out the slots in the order of rows."""
    pairs = rows * c.num_chosen
    for e in range(c.num_experts):
        put_int32(c.expert_ends + 4 * e, 0)
    for i in range(pairs):
        counter = c.expert_ends + 4 * int32_at(c.choices + 4 * i)
        put_int32(counter, int32_at(counter) + 1)
    slot, busy = 0, 0
    for e in range(c.num_experts):
        count = int32_at(c.expert_ends + 4 * e)
        put_int32(c.expert_slots + 4 * e, slot)
        put_int32(c.expert_ends + 4 * e, slot)  # rises to its end below
        if count > 0:
            put_int32(c.busy_experts + 4 * busy, e)
            busy += 1
        slot += count
    for n in range(busy, c.num_experts + 1):
        put_int32(c.busy_experts + 4 * n, -1)
    for i in range(pairs):
        end = c.expert_ends + 4 * int32_at(c.choices + 4 * i)
        s = int32_at(end)
        put_int32(c.slot_rows + 4 * s, i // c.num_chosen)
        put_int32(c.slot_weights + 4 * s, int32_at(c.choice_weights + 4 * i))
        put_int32(end, s + 1)


@compiled
def gather(c: Record, op: Record, start: int, end: int) -> None:
    act, target = activation_at(c.activations, op.activation), activation_at(c.activations, op.second)
    for s in range(start, end):
        r = int32_at(c.slot_rows + 4 * s)
        if target.base_256:
            copy_bytes(target.base_256 + s * act.row_256, act.base_256 + r * act.row_256, act.row_256)
        if target.base_32:
            copy_bytes(target.base_32 + s * act.row_32, act.base_32 + r * act.row_32, act.row_32)
        if target.base_1:
            copy_bytes(target.base_1 + s * act.row_1, act.base_1 + r * act.row_1, act.row_1)


@compiled
def most_busy(c: Record, rows: int) -> int:
    """Experts that may have slots: how many do is known only when the step runs."""
    return min(c.num_experts, rows * c.num_chosen)


@compiled
def experts_gated(c: Record, op: Record, tid: int, rows: int, item: int, items: int) -> None:
    """One item: a strip of outputs of one expert."""
    strips = items // most_busy(c, rows)
    e = int32_at(c.busy_experts + 4 * (item // strips))
    if e >= 0:
        first = int32_at(c.expert_slots + 4 * e)
        gated(c, op, tid, first, int32_at(c.expert_ends + 4 * e) - first, e, item % strips)


@compiled
def experts_down(c: Record, op: Record, tid: int, rows: int, low: int, high: int) -> None:
    """Groups low..high of all experts: whoever has them adds up their outputs, expert by expert."""
    act, matrix = activation_at(c.activations, op.activation), matrix_at(c.matrices, op.matrix)
    buffer = c.scratch + tid * c.scratch_bytes
    for g in range(low, high, DOWN_GROUPS):
        groups, n = min(DOWN_GROUPS, high - g), 0
        if not op.add:
            for r in range(rows):
                clear_bytes(op.out + r * op.out_bytes + g * LINE, groups * LINE)
        e = int32_at(c.busy_experts)
        while e >= 0:
            first, s, end = e * matrix.num_groups + g, int32_at(c.expert_slots + 4 * e), int32_at(c.expert_ends + 4 * e)
            while s < end:
                count = min(GATED_ROWS, end - s)
                start, row_bytes = buffer - first * LINE, groups * LINE
                multiply(matrix, act, first, first + groups, s, start, row_bytes, 0, count)
                for j in range(count):
                    if op.bias:
                        add_vector(buffer + j * row_bytes, op.bias + 4 * (e * c.hidden + g * 16), groups * 16)
                    out = op.out + int32_at(c.slot_rows + 4 * (s + j)) * op.out_bytes + g * LINE
                    weight = c.one if op.weighted_inputs else c.slot_weights + 4 * (s + j)
                    add_scaled(buffer + j * row_bytes, weight, out, groups * 16)
                s += count
            n += 1
            e = int32_at(c.busy_experts + 4 * n)


@compiled
def add_shared(c: Record, op: Record, i: int, end: int) -> None:
    per_row = c.hidden // 32
    while i < end:
        r, first = i // per_row, i % per_row
        count = min(per_row - first, end - i)
        at = first * 128
        y, gate = op.out + r * op.out_bytes + at, op.factor + r * op.factor_bytes
        add_gated(y, gate, c.x + r * c.x_bytes + at, 32 * count)
        i += count
