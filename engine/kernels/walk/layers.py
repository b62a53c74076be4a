"""Operations of every model: embeddings, norms, matrix products, the feed-forward layer."""

from __future__ import annotations

from typing import Any

from engine.kernels.plan import (
    GATED_ROWS,
)
from engine.kernels.program import Gate
from engine.kernels.walk.instructions import (
    LINE,
    Record,
    _kernel,
    activation_at,
    add_normed,
    add_scaled,
    add_vector,
    atomic_add,
    call4,
    call10,
    cap_vector,
    compiled,
    deviation,
    int32_at,
    inverse_rms,
    matrix_at,
    norm_vector,
    put_int64,
    scale_vector,
)

CAP_SHARE = 4096
"""Values of a row that one piece of CAP takes."""


@compiled
def embed(c: Record, op: Record, start: int, end: int) -> None:
    matrix = matrix_at(c.matrices, op.matrix)
    for r in range(start, end):
        row, x = int32_at(c.ids + 4 * r), c.x + r * c.x_bytes
        call4(matrix.row, matrix.address + row // 16 * matrix.group_bytes, row % 16, matrix.num_blocks, x)
        if op.factor:
            scale_vector(x, op.factor, c.hidden)


def _activation(source: str) -> Any:
    """A function that quantizes `count` units from `first` on of row r, in each layout that is wanted.

    x and y are addresses of the row's start; what they are depends on the source (`rows.activate`).
    """
    in_256, in_32, in_1 = (_kernel(f"{source}_{span}", 9) for span in (256, 32, 1))

    @compiled
    def activate(act: Record, r: int, x: int, y: int, inverse: int, first: int, count: int) -> None:
        if act.base_256:
            k = act.unit // 256
            in_256(x, y, inverse, act.base_256 + r * act.row_256, first * k, count * k, act.num_values // 256, 0, 0)
        k = act.unit // 32
        if act.base_32:
            in_32(x, y, inverse, act.base_32 + r * act.row_32, first * k, count * k, act.num_values // 32, 0, 0)
        if act.base_1:
            in_1(x, y, inverse, act.base_1 + r * act.row_1, first * k, count * k, act.num_values // 32, 0, 0)

    return activate


def _activation_of_rows(source: str, activate: Any) -> Any:
    """A function that does so with unit `first` of `rows` rows, x and y being x_bytes apart."""
    in_256 = _kernel(f"{source}_256", 9)

    @compiled
    def activate_rows(act: Record, r: int, rows: int, x: int, y: int, x_bytes: int, first: int) -> None:
        if act.unit == 256 and act.base_256 and not act.base_32 and not act.base_1:
            start, blocks = act.base_256 + r * act.row_256, act.num_values // 256
            in_256(x, y, 0, start, first, rows, blocks, x_bytes, act.row_256)
        else:
            for j in range(rows):
                activate(act, r + j, x + j * x_bytes, y + j * x_bytes, 0, first, 1)

    return activate_rows


activate_plain, activate_norm, activate_centred = map(_activation, ("plain", "norm", "centred"))
activate_silu, activate_gelu, activate_clipped = map(_activation, ("silu", "gelu", "clipped"))
silu_rows, gelu_rows = _activation_of_rows("silu", activate_silu), _activation_of_rows("gelu", activate_gelu)
clipped_rows = _activation_of_rows("clipped", activate_clipped)
activate_lone_gelu, activate_lone_relu2 = map(_activation, ("lone_gelu", "lone_relu2"))


@compiled
def norm(c: Record, op: Record, tid: int, i: int, end: int) -> None:
    act = activation_at(c.activations, op.activation)
    inverse = c.scratch + tid * c.scratch_bytes
    per_row = act.num_values // act.unit
    while i < end:
        r, first = i // per_row, i % per_row
        count = min(per_row - first, end - i)
        x = c.x + r * c.x_bytes
        if op.centred:
            deviation(x, c.hidden, c.eps, inverse)
            activate_centred(act, r, x, op.weight, inverse, first, count)
        elif op.weight:
            inverse_rms(x, c.hidden, c.eps, inverse)
            activate_norm(act, r, x, op.weight, inverse, first, count)
        else:
            activate_plain(act, r, x, 0, 0, first, count)
        i += count


@compiled
def take(c: Record, op: Record, i: int, end: int) -> None:
    act = activation_at(c.activations, op.activation)
    per_row = act.num_values // act.unit
    while i < end:
        r, first = i // per_row, i % per_row
        count = min(per_row - first, end - i)
        activate_plain(act, r, op.out + r * op.out_bytes, 0, 0, first, count)
        i += count


@compiled
def cap_row(op: Record, start: int, end: int) -> None:
    """Shares of CAP_SHARE values of rows."""
    per_row = (op.count + CAP_SHARE - 1) // CAP_SHARE
    for i in range(start, end):
        first = i % per_row * CAP_SHARE
        cap_vector(op.out + i // per_row * op.out_bytes + 4 * first, op.cap, min(CAP_SHARE, op.count - first))


@compiled
def add_norm(c: Record, op: Record, tid: int, i: int, end: int) -> None:
    inverse = c.scratch + tid * c.scratch_bytes
    per_row = c.hidden // 32
    while i < end:
        r, first = i // per_row, i % per_row
        count = min(per_row - first, end - i)
        y, at = op.out + r * op.out_bytes, first * 128
        into = op.into + r * op.into_bytes + at
        inverse_rms(y, c.hidden, c.eps, inverse)
        add_normed(y + at, op.weight + at, inverse, into, 32 * count)
        if op.factor:
            scale_vector(into, op.factor, 32 * count)
        i += count


@compiled
def give(c: Record, op: Record, tid: int, start: int, end: int) -> None:
    matrix, width = matrix_at(c.matrices, op.matrix), 4 * op.count
    embedded = c.scratch + tid * c.scratch_bytes
    for r in range(start, end):
        row, given = int32_at(c.ids + 4 * r), c.given + r * c.given_bytes
        call4(matrix.row, matrix.address + row // 16 * matrix.group_bytes, row % 16, matrix.num_blocks, embedded)
        for n in range(op.share):
            norm_vector(given + n * width, op.weight, c.eps, op.count)
            add_scaled(embedded + n * width, op.factor, given + n * width, op.count)


@compiled
def gate_given(c: Record, op: Record, i: int, end: int) -> None:
    result = activation_at(c.activations, op.second)
    per_row = result.num_values // result.unit
    while i < end:
        r, first = i // per_row, i % per_row
        count = min(per_row - first, end - i)
        activate_gelu(
            result, r, op.out + r * op.out_bytes, c.given + r * c.given_bytes + op.given_offset, 0, first, count
        )
        i += count


@compiled
def even_share(rows: int, most: int) -> int:
    """Rows of a stretch, where `rows` are cut into as few as have no more than about `most`, and all as many.

    Stretches of a dozen: a matrix product takes rows by four or six (`panel.py`), or by eight.
    """
    stretches = (rows + most - 1) // most
    return ((rows + stretches - 1) // stretches + 11) // 12 * 12


@compiled
def multiply(
    matrix: Record, act: Record, first: int, last: int, row: int, out: int, out_bytes: int, add: int, rows: int
) -> None:
    """Groups first..last of a matrix times `rows` activation rows from `row` on."""
    base, size = act.base_256, act.row_256
    if matrix.span == 32:
        base, size = act.base_32, act.row_32
    elif matrix.span == 1:
        base, size = act.base_1, act.row_1
    weights = matrix.address + first * matrix.group_bytes
    call10(
        matrix.multiply, weights, matrix.group_bytes, last - first, base + row * size, size,
        out + first * LINE, out_bytes, matrix.num_blocks, add, rows,
    )  # fmt: skip


@compiled
def num_groups(c: Record, op: Record) -> int:
    groups = 0
    for m in range(op.num_matrices):
        groups += matrix_at(c.matrices, op.matrix + m).num_groups
    return groups


@compiled
def matmul(c: Record, op: Record, rows: int, low: int, high: int) -> None:
    """Groups low..high of all matrices in one row."""
    act = activation_at(c.activations, op.activation)
    base = 0
    for m in range(op.num_matrices):
        matrix = matrix_at(c.matrices, op.matrix + m)
        first, last = max(0, low - base), min(matrix.num_groups, high - base)
        if first < last:
            multiply(matrix, act, first, last, 0, op.out + matrix.out_offset, op.out_bytes, op.add, rows)
        base += matrix.num_groups


@compiled
def gated(c: Record, op: Record, tid: int, row: int, rows: int, expert: int, strip: int) -> None:
    """A strip of outputs of `rows` rows from `row` on."""
    act = activation_at(c.activations, op.activation)
    result = activation_at(c.activations, op.second)
    gate, up = matrix_at(c.matrices, op.matrix), matrix_at(c.matrices, op.matrix + 1)
    unit = result.unit
    # Rows are an odd number of cache lines apart, or what products write of all of them would share a set of the cache.
    row_bytes, buffer = 8 * unit + LINE, c.scratch + tid * c.scratch_bytes
    first = expert * gate.num_groups + strip * unit // 16
    step = min(GATED_ROWS, even_share(rows, GATED_ROWS))
    r = row
    while r < row + rows:
        count = min(step, row + rows - r)
        # `multiply` adds the group's own offset, which a strip's buffer does not have.
        start = buffer - first * LINE
        multiply(gate, act, first, first + unit // 16, r, start, row_bytes, 0, count)
        multiply(up, act, first, first + unit // 16, r, start + 4 * unit, row_bytes, 0, count)
        for j in range(count if op.bias or op.weighted_inputs else 0):
            if op.bias:
                biases = op.bias + 4 * (2 * expert * result.num_values + strip * unit)
                add_vector(buffer + j * row_bytes, biases, unit)
                add_vector(buffer + j * row_bytes + 4 * unit, biases + 4 * result.num_values, unit)
            if op.weighted_inputs:
                scale_vector(buffer + j * row_bytes, c.slot_weights + 4 * (r + j), 2 * unit)
        x = buffer - strip * unit * 4
        if op.activates == Gate.GELU:
            gelu_rows(result, r, count, x, x + 4 * unit, row_bytes, strip)
        elif op.activates == Gate.CLIPPED:
            clipped_rows(result, r, count, x, x + 4 * unit, row_bytes, strip)
        else:
            silu_rows(result, r, count, x, x + 4 * unit, row_bytes, strip)
        r += step


@compiled
def gated_cuts(c: Record, rows: int) -> int:
    """Into how many stretches of rows a strip is cut that is left over when each thread has got as many as the others.

    Stretches of 48 rows at least: each unpacks the strip's weights anew.
    """
    return max(1, min(c.num_threads, rows // 48))


@compiled
def gated_piece(c: Record, op: Record, tid: int, rows: int, units: int, piece: int) -> None:
    """One strip of outputs for all rows, or for some where it is one of the last."""
    even = units // c.num_threads * c.num_threads
    strip, start, end = piece, 0, rows
    if piece >= even:
        cuts = gated_cuts(c, rows)
        strip, part = even + (piece - even) // cuts, (piece - even) % cuts
        start, end = part * rows // cuts, (part + 1) * rows // cuts
    gated(c, op, tid, start, end - start, 0, strip)


@compiled
def activate_gated(c: Record, op: Record, result: Record, rows: int, strip: int, count: int) -> None:
    """Strips of a few rows whose products are there."""
    for r in range(rows):
        x = c.products + 8 * r * result.num_values
        up = x + 4 * result.num_values
        if op.activates == Gate.GELU:
            activate_gelu(result, r, x, up, 0, strip, count)
        elif op.activates == Gate.CLIPPED:
            activate_clipped(result, r, x, up, 0, strip, count)
        else:
            activate_silu(result, r, x, up, 0, strip, count)


@compiled
def meet(c: Record, op: Record, result: Record, rows: int, first: int, last: int) -> None:
    """Groups first..last of a strip have their products. Who brings the last of them activates the strip."""
    groups = result.unit // 16
    strip = first // groups
    done = c.strip_groups + 8 * strip
    if atomic_add(done, last - first) + last - first == groups:
        put_int64(done, 0)
        activate_gated(c, op, result, rows, strip, 1)


@compiled
def gated_few(c: Record, op: Record, rows: int, first: int, end: int) -> None:
    """Groups first..end of a few rows: products with gate for as many as stay in L2, then with up, then their strips.

    Each change of the matrix is a new stream from memory, whose first lines nobody has asked for. Where a piece begins
    and ends is no strip's edge, or threads would not end together (35 strips for two).
    """
    act, result = activation_at(c.activations, op.activation), activation_at(c.activations, op.second)
    groups, row_bytes = result.unit // 16, 8 * result.num_values
    most = max(1, GATED_ROWS * 256 // (result.unit * rows)) * groups
    while first < end:
        last = min(end, first // groups * groups + most)
        for m in range(2):
            out = c.products + 4 * m * result.num_values
            multiply(matrix_at(c.matrices, op.matrix + m), act, first, last, 0, out, row_bytes, 0, rows)
            for r in range(rows if op.bias else 0):
                biases = op.bias + 4 * m * result.num_values + first * LINE
                add_vector(out + r * row_bytes + first * LINE, biases, 16 * (last - first))
        whole, past = (first + groups - 1) // groups, last // groups
        if first < min(last, whole * groups):
            meet(c, op, result, rows, first, min(last, whole * groups))
        if whole < past:
            activate_gated(c, op, result, rows, whole, past - whole)
        if whole <= past and past * groups < last:
            meet(c, op, result, rows, past * groups, last)
        first = last


@compiled
def lone(c: Record, op: Record, tid: int, rows: int, strip: int) -> None:
    act = activation_at(c.activations, op.activation)
    result = activation_at(c.activations, op.second)
    matrix, unit = matrix_at(c.matrices, op.matrix), result.unit
    row_bytes, buffer = 4 * unit, c.scratch + tid * c.scratch_bytes
    first = strip * unit // 16
    for r in range(0, rows, GATED_ROWS):
        count = min(GATED_ROWS, rows - r)
        multiply(matrix, act, first, first + unit // 16, r, buffer - first * LINE, row_bytes, 0, count)
        for j in range(count):
            x = buffer + j * row_bytes - strip * unit * 4
            if op.activates:
                activate_lone_gelu(result, r + j, x, op.bias, 0, strip, 1)
            else:
                activate_lone_relu2(result, r + j, x, op.bias, 0, strip, 1)
