"""The walk over a step's operations, compiled with Numba.

All arithmetic on values is in the kernels; here is only who does what. An operation's work is cut into pieces, which
threads claim one by one; the cut never shapes a result. An operation is over when all its pieces are done, whoever did
them: a thread that has no CPU just now holds up nothing but the piece it is at. The threads stay in compiled code for
the whole step: forking and joining them for every matrix product cost 5-6 % of decode.

Numba compiles this to LLVM IR, which is linked with the kernels into one object (`module_text`). Nothing here allocates
or raises; all memory is reached by address.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.attention import BLOCK, PART, STATE
from engine.kernels.core import kernels
from engine.kernels.ir import emit_module
from engine.kernels.plan import (
    DELTA_COLUMNS,
    DOWN_GROUPS,
    GATED_ROWS,
    L2_BYTES,
    QUERY_TILE,
    SPLIT_ROWS,
    TAPS,
)
from engine.kernels.program import ACTIVATION, CONTEXT, MATRIX, OPERATION, Gate, Op, Stored
from engine.kernels.target import Target

SPINS = 20_000
"""Looks at an operation's last pieces before a thread naps: some 0.1 ms, more than any piece of a decode step takes."""
NAP_MICROSECONDS = 50
MADV_WILLNEED = 3
"""The same number on Linux and macOS."""
PATIENCE = 400_000
"""Looks for a next step before a helper thread returns to sleep: a few milliseconds."""

CAP_SHARE = 4096
"""Values of a row that one piece of CAP takes."""

LINE = 64
N = types.intp
compiled: Any = njit(nogil=True, error_model="numpy", _nrt=False)  # type: ignore[call-overload]
"""Without the GIL, without exceptions for a division, without Numba's memory management."""
Record = Any
"""A typed view of memory; the fields are in program.py."""


# ---------------------------------------------------------------- what Numba has no words for
def _instruction(num_args: int, returns: Any, emit: Callable[..., Any]) -> Any:
    """An intrinsic with `num_args` integer parameters that emits its own IR."""

    def typed(typing_context: Any, *args: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            result = emit(builder, *values)
            return context.get_dummy_value() if returns is types.void else result

        return returns(*[N] * num_args), codegen

    # Numba wants to see named parameters.
    names = ["typing_context", *(f"a{i}" for i in range(num_args))]
    typed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    )
    return intrinsic(typed)


_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_POINTER = ir.PointerType()


def _declare(builder: Any, name: str, returns: Any, args: list[Any]) -> Any:
    found = builder.module.globals.get(name)
    return found or ir.Function(builder.module, ir.FunctionType(returns, args), name)


def _load(width: Any) -> Callable[..., Any]:
    def emit(b: Any, address: Any) -> Any:
        value = b.load(b.inttoptr(address, _POINTER), typ=width)
        return value if width is _I64 else b.sext(value, _I64)

    return emit


def _call_address(b: Any, function: Any, *args: Any) -> Any:
    kind = ir.FunctionType(ir.VoidType(), [_I64] * len(args))
    return b.call(b.inttoptr(function, kind.as_pointer()), list(args))


def _compare_and_swap(b: Any, address: Any, old: Any, new: Any) -> Any:
    """1 if the word was `old` and is `new`."""
    pair = b.cmpxchg(b.inttoptr(address, _I64.as_pointer()), old, new, "seq_cst", "seq_cst")
    return b.zext(b.extract_value(pair, 1), _I64)


def _pause(b: Any) -> Any:
    """Tell the CPU that this is a spin loop."""
    if b.module.triple.startswith(("aarch64", "arm64")):
        return b.call(_declare(b, "llvm.aarch64.hint", ir.VoidType(), [_I32]), [_I32(1)])
    return b.call(_declare(b, "llvm.x86.sse2.pause", ir.VoidType(), []), [])


def _record(dtype: Any) -> Any:
    """A typed view of record `index` of the array at an address."""
    kind = numba.from_dtype(dtype)

    @intrinsic
    def at(typing_context: Any, address: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            place = builder.add(values[0], builder.mul(values[1], _I64(dtype.itemsize)))
            return builder.inttoptr(place, context.get_value_type(kind))

        return kind(N, N), codegen

    return at


context_at, operation_at, matrix_at, activation_at = (_record(d) for d in (CONTEXT, OPERATION, MATRIX, ACTIVATION))
int32_at = _instruction(1, N, _load(_I32))
int64_at = _instruction(1, N, _load(_I64))
put_int32 = _instruction(2, types.void, lambda b, address, x: b.store(b.trunc(x, _I32), b.inttoptr(address, _POINTER)))
put_int64 = _instruction(2, types.void, lambda b, address, x: b.store(x, b.inttoptr(address, _POINTER)))
copy_bytes = _instruction(
    3,
    types.void,
    lambda b, target, source, n: b.call(
        _declare(b, "llvm.memmove.p0.p0.i64", ir.VoidType(), [_POINTER, _POINTER, _I64, ir.IntType(1)]),
        [b.inttoptr(target, _POINTER), b.inttoptr(source, _POINTER), n, ir.IntType(1)(0)],
    ),
)
atomic_add = _instruction(
    2, N, lambda b, address, x: b.atomic_rmw("add", b.inttoptr(address, _I64.as_pointer()), x, "seq_cst")
)
swap_if = _instruction(3, N, _compare_and_swap)
atomic_load = _instruction(1, N, lambda b, address: b.load_atomic(b.inttoptr(address, _I64.as_pointer()), "acquire", 8))
pause = _instruction(0, types.void, _pause)
nap = _instruction(0, types.void, lambda b: b.call(_declare(b, "usleep", _I32, [_I32]), [_I32(NAP_MICROSECONDS)]))
will_need = _instruction(
    2,
    types.void,
    lambda b, address, n: b.call(
        _declare(b, "madvise", _I32, [_POINTER, _I64, _I32]), [b.inttoptr(address, _POINTER), n, _I32(MADV_WILLNEED)]
    ),
)
see_resident = _instruction(
    2,
    types.void,
    lambda b, address, seen: b.call(
        _declare(b, "mincore", _I32, [_POINTER, _I64, _POINTER]),
        [b.inttoptr(address, _POINTER), _I64(1), b.inttoptr(seen, _POINTER)],
    ),
)
call4 = _instruction(5, types.void, _call_address)
call10 = _instruction(11, types.void, _call_address)


def _kernel(name: str, num_args: int) -> Any:
    """A kernel of the core module, called by name."""

    def emit(b: Any, *args: Any) -> Any:
        return b.call(_declare(b, name, ir.VoidType(), [_I64] * num_args), list(args))

    return _instruction(num_args, types.void, emit)


inverse_rms, deviation = _kernel("inverse_rms", 4), _kernel("deviation", 4)
add_normed = _kernel("add_normed", 5)
add_vector, scale_vector = _kernel("add_vector", 3), _kernel("scale_vector", 3)
norm_vector, centre_vector = _kernel("norm_vector", 4), _kernel("centre_vector", 4)
cap_vector = _kernel("cap_vector", 3)
add_scaled, add_gated, choose = _kernel("add_scaled", 4), _kernel("add_gated", 4), _kernel("choose", 7)
rotate_neox, rotate_pairs = _kernel("rotate_neox", 4), _kernel("rotate_pairs", 4)
store_key_f16, store_value_f16 = _kernel("store_key_f16", 3), _kernel("store_value_f16", 3)
store_key_f32, store_value_f32 = _kernel("store_key_f32", 3), _kernel("store_value_f32", 3)
store_key_q8_0, store_value_q8_0 = _kernel("store_key_q8_0", 4), _kernel("store_value_q8_0", 4)
widen_keys_q8_0, widen_values_q8_0 = _kernel("widen_keys_q8_0", 4), _kernel("widen_values_q8_0", 4)
convolve, unit_vector, delta_gates = _kernel("convolve", 6), _kernel("unit_vector", 4), _kernel("delta_gates", 5)
delta, norm_gated, gate_vector = _kernel("delta", 7), _kernel("norm_gated", 6), _kernel("gate_vector", 3)
scores_floats, weigh_floats, softmax = _kernel("scores_floats", 6), _kernel("weigh_floats", 7), _kernel("softmax", 6)
fix_query, fix_keys, scores_fixed = _kernel("fix_query", 2), _kernel("fix_keys", 5), _kernel("scores_fixed", 7)
scale_values, fix_weights = _kernel("scale_values", 5), _kernel("fix_weights", 5)
fix_values, weigh_fixed = _kernel("fix_values", 6), _kernel("weigh_fixed", 7)
merge_state, finish_state = _kernel("merge", 3), _kernel("finish", 3)


# ---------------------------------------------------------------- operations
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
    in_256, in_32, in_1 = (_kernel(f"{source}_{span}", 7) for span in (256, 32, 1))

    @compiled
    def activate(act: Record, r: int, x: int, y: int, inverse: int, first: int, count: int) -> None:
        if act.base_256:
            k = act.unit // 256
            in_256(x, y, inverse, act.base_256 + r * act.row_256, first * k, count * k, act.num_values // 256)
        k = act.unit // 32
        if act.base_32:
            in_32(x, y, inverse, act.base_32 + r * act.row_32, first * k, count * k, act.num_values // 32)
        if act.base_1:
            in_1(x, y, inverse, act.base_1 + r * act.row_1, first * k, count * k, act.num_values // 32)

    return activate


activate_plain, activate_norm, activate_centred = map(_activation, ("plain", "norm", "centred"))
activate_silu, activate_gelu, activate_clipped = map(_activation, ("silu", "gelu", "clipped"))
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
        inverse_rms(y, c.hidden, c.eps, inverse)
        add_normed(y + at, op.weight + at, inverse, c.x + r * c.x_bytes + at, 32 * count)
        i += count


@compiled
def even_share(rows: int, most: int) -> int:
    """Rows of a stretch, where `rows` are cut into as few as have no more than about `most`, and all as many.

    Stretches of a dozen: a matrix product takes rows by six (`panel.py`), or by eight.
    """
    stretches = (rows + most - 1) // most
    return ((rows + stretches - 1) // stretches + 11) // 12 * 12


@compiled
def multiply(
    matrix: Record, act: Record, first: int, last: int, row: int, out: int, out_bytes: int, add: int, rows: int
) -> None:
    """Groups first..last of a matrix times `rows` activation rows from `row` on, in blocks of rows that fit L2."""
    base, size = act.base_256, act.row_256
    if matrix.span == 32:
        base, size = act.base_32, act.row_32
    elif matrix.span == 1:
        base, size = act.base_1, act.row_1
    step = even_share(rows, max(1, L2_BYTES // size))
    weights = matrix.address + first * matrix.group_bytes
    r = 0
    while r < rows:  # a range with a step that is not constant would bring in Numba's code for raising errors
        call10(
            matrix.multiply, weights, matrix.group_bytes, last - first, base + (row + r) * size, size,
            out + r * out_bytes + first * LINE, out_bytes, matrix.num_blocks, add, min(step, rows - r),
        )  # fmt: skip
        r += step


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
    row_bytes, buffer = 8 * unit, c.scratch + tid * c.scratch_bytes
    first = expert * gate.num_groups + strip * unit // 16
    step = min(GATED_ROWS, even_share(rows, GATED_ROWS))
    r = row
    while r < row + rows:
        count = min(step, row + rows - r)
        # `multiply` adds the group's own offset, which a strip's buffer does not have.
        start = buffer - first * LINE
        multiply(gate, act, first, first + unit // 16, r, start, row_bytes, 0, count)
        multiply(up, act, first, first + unit // 16, r, start + 4 * unit, row_bytes, 0, count)
        for j in range(count):
            if op.bias:
                biases = op.bias + 4 * (2 * expert * result.num_values + strip * unit)
                add_vector(buffer + j * row_bytes, biases, unit)
                add_vector(buffer + j * row_bytes + 4 * unit, biases + 4 * result.num_values, unit)
            x = buffer + j * row_bytes - strip * unit * 4
            if op.activates == Gate.GELU:
                activate_gelu(result, r + j, x, x + 4 * unit, 0, strip, 1)
            elif op.activates == Gate.CLIPPED:
                activate_clipped(result, r + j, x, x + 4 * unit, 0, strip, 1)
            else:
                activate_silu(result, r + j, x, x + 4 * unit, 0, strip, 1)
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


# ---------------------------------------------------------------- mixtures of experts
@compiled
def route(c: Record, op: Record, start: int, end: int) -> None:
    for r in range(start, end):
        at = 4 * r * c.num_chosen
        logits = op.out + r * op.out_bytes
        choose(logits, c.num_experts, c.num_chosen, c.expert_sum, c.expert_scale, c.choices + at, c.choice_weights + at)


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
def experts_down(c: Record, op: Record, tid: int, low: int, high: int) -> None:
    """Groups low..high of all experts: whoever has them adds up their outputs, expert by expert."""
    act, matrix = activation_at(c.activations, op.activation), matrix_at(c.matrices, op.matrix)
    buffer = c.scratch + tid * c.scratch_bytes
    for g in range(low, high, DOWN_GROUPS):
        groups, n = min(DOWN_GROUPS, high - g), 0
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
                    add_scaled(buffer + j * row_bytes, c.slot_weights + 4 * (s + j), out, groups * 16)
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


# ---------------------------------------------------------------- attention
@compiled
def cached(c: Record, op: Record, r: int, block: int, values: int, head: int) -> int:
    """Address of a KV head's keys (values = 0) or values (1) in a block of row r's conversation."""
    table = c.tables + int32_at(c.table_rows + 4 * r) * c.table_blocks * 4
    start = c.kv_memory + int32_at(table + 4 * block) * c.kv_block_bytes + op.kv_offset
    address: int = start + values * c.num_kv_heads * (c.kv_head_bytes + c.kv_scale_bytes) + head * c.kv_head_bytes
    return address


@compiled
def scales_of(c: Record, numbers: int, head: int) -> int:
    """Address of the scales of a KV head's keys or values: they follow the numbers of all heads."""
    address: int = numbers + (c.num_kv_heads - head) * c.kv_head_bytes + head * c.kv_scale_bytes
    return address


@compiled
def store(c: Record, x: int, numbers: int, head: int, slot: int, values: int) -> None:
    """A head's key or value of one position into its slot of a block."""
    dim = c.head_dim
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
        scales = scales_of(c, numbers, head)
        if values:
            store_value_q8_0(x, numbers + slot * dim, scales + slot * (c.kv_scale_bytes // BLOCK), dim)
        else:
            store_key_q8_0(x, numbers + slot, scales + slot * 2, dim)


@compiled
def as_floats(c: Record, numbers: int, head: int, values: int, wide: int) -> int:
    """Address of a block's keys or values of a head in f32: where they are, or in `wide`."""
    if c.kv_stored == Stored.F32:
        return numbers
    if values:
        widen_values_q8_0(numbers, scales_of(c, numbers, head), wide, c.head_dim)
    else:
        widen_keys_q8_0(numbers, scales_of(c, numbers, head), wide, c.head_dim)
    return wide


@compiled
def norm_head(c: Record, op: Record, x: int, weight: int) -> None:
    if op.centred:
        centre_vector(x, weight, c.eps, c.head_dim)
    else:
        norm_vector(x, weight, c.eps, c.head_dim)


@compiled
def heads(c: Record, op: Record, start: int, end: int) -> None:
    dim = c.head_dim
    total = c.num_heads + 2 * c.num_kv_heads
    for i in range(start, end):
        r, h = i // total, i % total
        x, position = c.qkv + r * c.qkv_bytes + h * dim * 4, int32_at(c.positions + 4 * r)
        is_query, is_value = h < c.num_heads, h >= c.num_heads + c.num_kv_heads
        if op.bias:
            add_vector(x, op.bias + h * dim * 4, dim)
        if not is_value:
            weight, own = (op.q_norm, h) if is_query else (op.k_norm, h - c.num_heads)
            if weight and not op.late_norms:
                norm_head(c, op, x, weight + own * op.norm_bytes)
            table = position * op.half * 4
            if op.neox:
                rotate_neox(x, op.cos + table, op.sin + table, op.half)
            else:
                rotate_pairs(x, op.cos + table, op.sin + table, op.half)
            if weight and op.late_norms:
                norm_head(c, op, x, weight + own * op.norm_bytes)
        slot = position % BLOCK
        if is_query:
            scale_vector(x, op.q_scales + 4 * position if op.q_scales else c.scale, dim)
            if c.kv_stored == Stored.F16:
                fix_query(x, dim)
        else:
            values = 1 if is_value else 0
            head = h - c.num_heads - values * c.num_kv_heads
            store(c, x, cached(c, op, r, position // BLOCK, values, head), head, slot, values)


@compiled
def keep(c: Record) -> None:
    """Move the wanted rows to the front. They ascend, so it is done in place."""
    for i in range(c.num_wanted):
        w = int32_at(c.wanted + 4 * i)
        copy_bytes(c.x + i * c.x_bytes, c.x + w * c.x_bytes, c.x_bytes)
        copy_bytes(c.qkv + i * c.qkv_bytes, c.qkv + w * c.qkv_bytes, c.qkv_bytes)
        put_int32(c.positions + 4 * i, int32_at(c.positions + 4 * w))
        put_int32(c.table_rows + 4 * i, int32_at(c.table_rows + 4 * w))


@compiled
def first_seen(position: int, window: int) -> int:
    return max(0, position + 1 - window) if window else 0


@compiled
def attend_part(c: Record, op: Record, tid: int, head: int, r0: int, r1: int, part: int, split: int) -> None:
    """One softmax part of rows r0..r1 (one conversation) on one KV head.

    The state goes to its slot, or (not split, and not the row's first part) is merged into slot 0 at once: the same
    formula in the same order either way.
    """
    dim, window = c.head_dim, op.window
    group = c.num_heads // c.num_kv_heads
    state_bytes = (STATE + dim) * 4
    weights = c.scratch + tid * c.scratch_bytes
    wide = weights + 4 * QUERY_TILE * PART
    spare = wide + 4 * BLOCK * dim
    queries = spare + QUERY_TILE * state_bytes
    states = queries + QUERY_TILE * 8
    scales = states + QUERY_TILE * 8  # of a block's keys or values, and what its values are multiplied with
    slots = c.state_slots if split else 1
    start = part * PART
    while r0 < r1 and int32_at(c.positions + 4 * r0) < start:  # rows of one conversation ascend
        r0 += 1
    while r0 < r1 and first_seen(int32_at(c.positions + 4 * (r1 - 1)), window) >= start + PART:
        r1 -= 1
    n = (r1 - r0) * group
    if n <= 0:
        return
    for i in range(n):
        r, h = r0 + i // group, head * group + i % group
        late = not split and first_seen(int32_at(c.positions + 4 * r), window) // PART < part
        slot = part if split else 0
        put_int64(queries + 8 * i, c.qkv + r * c.qkv_bytes + h * dim * 4)
        place = c.states + ((r * c.num_heads + h) * slots + slot) * state_bytes
        put_int64(states + 8 * i, spare + i * state_bytes if late else place)
    low = max(0, first_seen(int32_at(c.positions + 4 * r0), window) - start) // BLOCK
    high = min(PART, int32_at(c.positions + 4 * (r1 - 1)) + 1 - start)
    blocks, first = (high + BLOCK - 1) // BLOCK, start // BLOCK
    in_floats = c.kv_stored != Stored.F16
    for b in range(low, blocks):
        keys = cached(c, op, r0, first + b, 0, head)
        last = b == blocks - 1
        following = cached(c, op, r0, first + (low if last else b + 1), 1 if last else 0, head)
        if in_floats:
            scores_floats(queries, n, as_floats(c, keys, head, 0, wide), weights + b * BLOCK * 4, dim, following)
        else:
            fix_keys(keys, wide, scales, dim, following)
            scores_fixed(queries, n, wide, scales, weights + b * BLOCK * 4, dim, following)
    for i in range(n):
        if op.cap:
            cap_vector(weights + (i * PART + low * BLOCK) * 4, op.cap, (blocks - low) * BLOCK)
        position = int32_at(c.positions + 4 * (r0 + i // group))
        seen_from = max(0, first_seen(position, window) - start)
        seen_to = min(PART, position + 1 - start)
        softmax(weights + i * PART * 4, seen_from, seen_to, blocks * BLOCK, int64_at(states + 8 * i), dim)
    for b in range(low, blocks):
        values, positions = cached(c, op, r0, first + b, 1, head), min(BLOCK, high - b * BLOCK)
        following = cached(c, op, r0, first + min(b + 1, blocks - 1), 1, head)
        if in_floats:
            floats = as_floats(c, values, head, 1, wide)
            weigh_floats(weights + b * BLOCK * 4, n, floats, positions, states, dim, following)
        else:
            pairs = (positions + 1) // 2
            scale_values(values, positions, scales, scales + BLOCK * 4, dim)
            fix_weights(weights, n, b, scales, states)
            fix_values(values, scales + BLOCK * 4, wide, pairs, dim, following)
            weigh_fixed(weights + b * BLOCK * 2, n, wide, pairs, states, dim, following)
    for i in range(n):
        r, h = r0 + i // group, head * group + i % group
        place = c.states + ((r * c.num_heads + h) * slots) * state_bytes
        if not split and int64_at(states + 8 * i) != place:
            merge_state(place, int64_at(states + 8 * i), dim)


@compiled
def query_rows(c: Record) -> int:
    """Rows that share a pass over a part."""
    return max(1, QUERY_TILE // (c.num_heads // c.num_kv_heads))


@compiled
def num_parts(c: Record, op: Record) -> int:
    """Softmax parts of the longest row that an operation works on."""
    return c.wanted_parts if op.wanted else c.num_parts


@compiled
def attend(c: Record, op: Record, tid: int, rows: int, item: int, items: int) -> None:
    """One item: (strip of rows, KV head) and, for few rows, part. The longest come first."""
    split, tall, parts = rows <= SPLIT_ROWS, query_rows(c), num_parts(c, op)
    share = parts if split else 1
    j = items - 1 - item
    strip, head = j // (c.num_kv_heads * share), j // share % c.num_kv_heads
    for part in range(j % share, j % share + 1 if split else parts):
        r, end = strip * tall, min(rows, (strip + 1) * tall)
        while r < end:
            last = r + 1
            table = int32_at(c.table_rows + 4 * r)
            while last < end and int32_at(c.table_rows + 4 * last) == table:
                last += 1
            attend_part(c, op, tid, head, r, last, part, split)
            r = last


@compiled
def merge(c: Record, op: Record, rows: int, start: int, end: int) -> None:
    """Merge the parts in ascending order, divide by the sum, quantize for the output matrix."""
    act = activation_at(c.activations, op.activation)
    dim, split = c.head_dim, rows <= SPLIT_ROWS
    state_bytes, slots = (STATE + dim) * 4, c.state_slots if split else 1
    per_row = act.num_values // op.share
    for i in range(start, end):
        r, u = i // per_row, i % per_row
        position, out = int32_at(c.positions + 4 * r), c.attention + r * c.attention_bytes
        for h in range(u * op.share // dim, (u + 1) * op.share // dim):
            state = c.states + (r * c.num_heads + h) * slots * state_bytes
            if split:
                first = first_seen(position, op.window) // PART
                state += first * state_bytes
                for part in range(1, position // PART + 1 - first):
                    merge_state(state, state + part * state_bytes, dim)
            if op.sinks:
                merge_state(state, op.sinks + h * state_bytes, dim)
            finish_state(state, out + h * dim * 4, dim)
            if op.gate:
                gate_vector(out + h * dim * 4, c.qkv + r * c.qkv_bytes + op.gate + h * dim * 4, dim)
        count = op.share // act.unit
        activate_plain(act, r, out, 0, 0, u * count, count)


# ---------------------------------------------------------------- layers with a running state
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
    width = 4 * num_channels(c)
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
                if until > r:
                    convolve(c.qkv + r * c.qkv_bytes + at, c.qkv_bytes, until - r, op.weight + at, state, width)
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
def delta_rows(c: Record, op: Record, start: int, end: int) -> None:
    """Strips of DELTA_COLUMNS columns of the state of a value head, one after the other, each through all rows."""
    strips, size = c.delta_dim // DELTA_COLUMNS, c.delta_dim * DELTA_COLUMNS * 4
    for i in range(start, end):
        head, column, first, at = i // strips, i % strips * DELTA_COLUMNS, 0, op.state_offset + i * size
        while first < c.num_rows:
            last, r, segment = conversation_end(c, first, c.num_rows), first, 0
            while r < last:
                state, until = slot_of(c, first, segment) + at, segment_end(c, first, last, segment)
                if segment > 0:
                    copy_bytes(state, slot_of(c, first, segment - 1) + at, size)
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


# ---------------------------------------------------------------- the step
@compiled
def num_units(c: Record, op: Record, rows: int) -> int:
    """Into how many units an operation's work can be cut."""
    code = op.code
    if code == Op.EMBED:
        return rows
    if code == Op.NORM:
        act = activation_at(c.activations, op.activation)
        return rows * (act.num_values // act.unit)
    if code == Op.MATMUL:
        return num_groups(c, op)
    if code == Op.HEADS:
        return rows * (c.num_heads + 2 * c.num_kv_heads)
    if code == Op.ATTEND:
        share = num_parts(c, op) if rows <= SPLIT_ROWS else 1
        tall = query_rows(c)
        return (rows + tall - 1) // tall * c.num_kv_heads * share
    if code == Op.MERGE:
        return rows * (activation_at(c.activations, op.activation).num_values // op.share)
    if code == Op.GATED or code == Op.LONE:
        result = activation_at(c.activations, op.second)
        return result.num_values // result.unit
    if code == Op.ADD_NORM or code == Op.ADD_GATED:
        return rows * (c.hidden // 32)
    if code == Op.ROW_NORM or code == Op.ADD_BIAS:
        return rows
    if code == Op.CAP:
        return rows * ((op.count + CAP_SHARE - 1) // CAP_SHARE)
    if code == Op.ROUTE:
        return rows
    if code == Op.GATHER:
        return rows * c.num_chosen
    if code == Op.EXPERTS_GATED:
        result = activation_at(c.activations, op.second)
        return most_busy(c, rows) * (result.num_values // result.unit)
    if code == Op.EXPERTS_DOWN:
        return num_groups(c, op)
    if code == Op.CONVOLVE:
        return num_channels(c) // 16
    if code == Op.UNIT:
        return rows * (2 * c.key_heads + 1)
    if code == Op.DELTA:
        return c.value_heads * (c.delta_dim // DELTA_COLUMNS)
    if code == Op.NORM_GATED:
        return rows * (activation_at(c.activations, op.activation).num_values // op.share)
    return 1


@compiled
def num_pieces(c: Record, op: Record, rows: int, units: int) -> int:
    """Into how many pieces it is cut: enough that threads end together, not so many that claiming them shows."""
    if op.code == Op.ATTEND or op.code == Op.LONE or op.code == Op.EXPERTS_GATED:
        return units
    if op.code == Op.GATED:
        left = units % c.num_threads
        return units - left + left * gated_cuts(c, rows)
    if op.code == Op.MATMUL or op.code == Op.EXPERTS_DOWN:
        # At most 256 groups each, so that the output head, which is long, ends evenly too.
        return min(units, max(2 * c.num_threads, (units + 255) // 256))
    return min(units, c.num_threads if rows == 1 else 2 * c.num_threads)


@compiled
def run(c: Record, op: Record, tid: int, rows: int, units: int, piece: int, pieces: int) -> None:
    """Do one piece."""
    code = op.code
    start, end = piece * units // pieces, (piece + 1) * units // pieces
    if code == Op.EMBED:
        embed(c, op, start, end)
    elif code == Op.NORM:
        norm(c, op, tid, start, end)
    elif code == Op.MATMUL:
        matmul(c, op, rows, start, end)
    elif code == Op.HEADS:
        heads(c, op, start, end)
    elif code == Op.KEEP:
        keep(c)
    elif code == Op.ATTEND:
        attend(c, op, tid, rows, piece, pieces)
    elif code == Op.MERGE:
        merge(c, op, rows, start, end)
    elif code == Op.GATED:
        gated_piece(c, op, tid, rows, units, piece)
    elif code == Op.LONE:
        lone(c, op, tid, rows, piece)
    elif code == Op.ADD_BIAS:
        for r in range(start, end):
            add_vector(op.out + r * op.out_bytes, op.bias, op.count)
    elif code == Op.ADD_NORM:
        add_norm(c, op, tid, start, end)
    elif code == Op.ROW_NORM:
        for r in range(start, end):
            norm_vector(op.out + r * op.out_bytes, op.weight, c.eps, op.count)
    elif code == Op.CAP:
        cap_row(op, start, end)
    elif code == Op.ROUTE:
        route(c, op, start, end)
    elif code == Op.GROUP:
        group(c, rows)
        if c.page_bytes:
            ask_for_experts(c, op, tid)
    elif code == Op.GATHER:
        gather(c, op, start, end)
    elif code == Op.EXPERTS_GATED:
        experts_gated(c, op, tid, rows, piece, pieces)
    elif code == Op.EXPERTS_DOWN:
        experts_down(c, op, tid, start, end)
    elif code == Op.ADD_GATED:
        add_shared(c, op, start, end)
    elif code == Op.CONVOLVE:
        convolve_rows(c, op, start, end)
    elif code == Op.UNIT:
        unit_rows(c, op, start, end)
    elif code == Op.DELTA:
        delta_rows(c, op, start, end)
    elif code == Op.NORM_GATED:
        norm_gated_rows(c, op, start, end)


# The counter of an operation: a word with the number of the step (upper half) and of the pieces nobody has claimed, and
# a word with the number of pieces that are not done. Thread 0 sets both before a step. A thread that has fallen behind
# finds another step's number there, or nothing left, and stops. It must know that from the counter alone: once a step
# is over, what it ran on may already be the next one's. As long as a piece is not done the step is not over, so a claim
# that succeeds is always of the step that runs, and from then on rows and units are those of that step.
@compiled
def claim(counter: int, generation: int) -> int:
    """Take a piece: how many were left, this one included; 0: none."""
    while True:
        seen = atomic_load(counter)
        left = seen & 0xFFFFFFFF
        if seen >> 32 != generation or left == 0:
            return 0
        if swap_if(counter, seen, seen - 1):
            return left


@compiled
def all_done(counter: int, generation: int) -> bool:
    """Wait until an operation's pieces are done. False if that was long ago: another step runs."""
    spins = 0
    while atomic_load(counter + 8) > 0:
        if atomic_load(counter) >> 32 != generation:
            return False
        spins += 1
        if spins < SPINS:
            pause()
        else:
            nap()
    return True


@compiled
def num_op_rows(c: Record, op: Record) -> int:
    """Rows that an operation works on in this step; 0: it is left out."""
    if not op.wanted:
        return c.num_rows
    if c.num_wanted == 0:
        return 0
    return c.num_rows if op.code == Op.KEEP else c.num_wanted


@compiled
def work(c: Record, tid: int, generation: int) -> None:
    """One thread's part of one step."""
    for i in range(c.num_operations):
        op, counter = operation_at(c.operations, i), c.counters + i * LINE
        left = claim(counter, generation)
        if left > 0:
            rows = num_op_rows(c, op)
            units = num_units(c, op, rows)
            pieces = num_pieces(c, op, rows, units)
            while left > 0:
                run(c, op, tid, rows, units, pieces - left, pieces)
                atomic_add(counter + 8, -1)
                left = claim(counter, generation)
        if not all_done(counter, generation):
            return


@compiled
def step(address: int, tid: int, seen: int) -> int:
    """Thread 0: run one step. Others: steps as they come, `seen` being the last one, until none comes for a while.

    Returns the number of the last step seen.
    """
    c = context_at(address, 0)
    if tid == 0:
        generation = atomic_load(c.generation) + 1
        for i in range(c.num_operations):
            op = operation_at(c.operations, i)
            rows = num_op_rows(c, op)
            pieces = num_pieces(c, op, rows, num_units(c, op, rows)) if rows > 0 else 0
            put_int64(c.counters + i * LINE + 8, pieces)
            put_int64(c.counters + i * LINE, (generation << 32) + pieces)
        atomic_add(c.generation, 1)
        work(c, 0, generation)
        return generation
    idle = 0
    while idle < PATIENCE:
        generation = atomic_load(c.generation)
        if generation > seen:
            work(c, tid, generation)
            seen = generation
            idle = 0
        else:
            idle += 1
            pause()
    return seen


STEP = "goinfer_step"
"""Name of the compiled function: i64 (i64 context, i64 thread, i64 seen)."""


def module_text(target: Target) -> str:
    """IR of the core module: the walk, and the kernels it calls."""
    kernel_text = emit_module("kernels", kernels(target), target.triple)
    for name in kernels(target):
        # Numba links what it compiles at once and must find the names; the real functions are linked in below.
        llvm.add_symbol(name, 1)
    step.compile((N, N, N))
    library = step.overloads[(N, N, N)].library
    native = step.overloads[(N, N, N)].fndesc.llvm_func_name
    wrapper = (
        f'declare i32 @"{native}"(ptr, ptr, i64, i64, i64)\n'
        f"define i64 @{STEP}(i64 %c, i64 %t, i64 %s) {{\n"
        "  %r = alloca i64\n  %e = alloca ptr\n"
        f'  %x = call i32 @"{native}"(ptr %r, ptr %e, i64 %c, i64 %t, i64 %s)\n'
        "  %done = load i64, ptr %r\n"
        "  ret i64 %done\n}\n"
    )
    module = llvm.parse_assembly(library.get_llvm_str())
    module.link_in(llvm.parse_assembly(f'target triple = "{module.triple}"\n' + kernel_text))
    module.link_in(llvm.parse_assembly(f'target triple = "{module.triple}"\n' + wrapper))
    for function in module.functions:
        # All but the entry is ours alone: unused parts (Numba's wrapper for Python) are dropped, small ones inlined.
        if not function.is_declaration and function.name != STEP:
            function.linkage = "internal"
    return str(module)
