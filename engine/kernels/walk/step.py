"""The walk over a step's operations, compiled with Numba.

All arithmetic on values is in the kernels; here is only who does what. An operation's work is cut into pieces, which
threads claim one by one; the cut never shapes a result. An operation is over when all its pieces are done, whoever did
them: a thread that has no CPU just now holds up nothing but the piece it is at. The threads stay in compiled code for
the whole step: forking and joining them for every matrix product cost 5-6 % of decode.

Numba compiles this to LLVM IR, which is linked with the kernels into one object (`module_text`). Nothing here allocates
or raises; all memory is reached by address.
"""

from __future__ import annotations

from llvmlite import binding as llvm

from engine.kernels.core import kernels
from engine.kernels.ir import emit_module
from engine.kernels.plan import (
    DELTA_COLUMNS,
    FEW_ROWS,
    SPLIT_ROWS,
)
from engine.kernels.program import Op
from engine.kernels.target import Target
from engine.kernels.walk.attention import attend, heads, keep, merge, num_parts, num_strips
from engine.kernels.walk.experts import (
    add_shared,
    ask_for_experts,
    experts_down,
    experts_gated,
    gather,
    group,
    most_busy,
    route,
)
from engine.kernels.walk.instructions import (
    LINE,
    N,
    Record,
    activation_at,
    add_vector,
    atomic_add,
    atomic_load,
    compiled,
    context_at,
    highest_bit,
    int64_at,
    lowest_bit,
    nap,
    norm_vector,
    operation_at,
    pause,
    put_int64,
    swap_if,
)
from engine.kernels.walk.layers import (
    CAP_SHARE,
    add_norm,
    cap_row,
    embed,
    gate_given,
    gated_cuts,
    gated_few,
    gated_piece,
    give,
    lone,
    matmul,
    norm,
    num_groups,
    take,
)
from engine.kernels.walk.running_state import (
    convolve_rows,
    delta_rows,
    gate_norm_rows,
    norm_gated_rows,
    scan_gate_rows,
    unit_rows,
)

OWN_PIECES = 2
"""Of a thread, side by side, where weights are read from memory: so each reads one stream, and not every second piece
of one, whose first lines nobody has asked for. With eight, threads end no more together."""
MOST_BITS = 32
"""Pieces that fit a counter as bits."""
SPINS = 20_000
"""Looks at an operation's last pieces before a thread naps: some 0.1 ms, more than any piece of a decode step takes."""
PATIENCE = 400_000
"""Looks for a next step before a helper thread returns to sleep: a few milliseconds."""


@compiled
def num_units(c: Record, op: Record, rows: int) -> int:
    """Into how many units an operation's work can be cut."""
    code = op.code
    if code == Op.EMBED:
        return rows
    if code == Op.NORM or code == Op.TAKE:
        act = activation_at(c.activations, op.activation)
        return rows * (act.num_values // act.unit)
    if code == Op.MATMUL:
        return num_groups(c, op)
    if code == Op.HEADS:
        return rows * (c.num_heads + op.stored_heads)
    if code == Op.ATTEND:
        share = num_parts(c, op) if rows <= SPLIT_ROWS else 1
        return num_strips(c, op, rows) * op.num_kv_heads * share
    if code == Op.MERGE:
        return rows * (activation_at(c.activations, op.activation).num_values // op.share)
    if code == Op.GATED or code == Op.LONE:
        result = activation_at(c.activations, op.second)
        in_groups = code == Op.GATED and rows <= FEW_ROWS
        return result.num_values // (16 if in_groups else result.unit)
    if code == Op.ADD_NORM or code == Op.ADD_GATED:
        return rows * (c.hidden // 32)
    if code == Op.ROW_NORM or code == Op.ADD_BIAS or code == Op.GIVE:
        return rows
    if code == Op.GATE_GIVEN:
        result = activation_at(c.activations, op.second)
        return rows * (result.num_values // result.unit)
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
    if code == Op.CONVOLVE or code == Op.MIX:
        return op.count // 16
    if code == Op.UNIT:
        return rows * (2 * c.key_heads + 1)
    if code == Op.SCAN_GATES:
        return rows
    if code == Op.DELTA or code == Op.SCAN:
        return c.value_heads * (c.delta_dim // DELTA_COLUMNS)
    if code == Op.NORM_GATED or code == Op.GATE_NORM:
        return rows * (activation_at(c.activations, op.activation).num_values // op.share)
    return 1


@compiled
def is_stream(op: Record, rows: int) -> bool:
    """Whether reading weights from memory is most of an operation."""
    return rows <= FEW_ROWS and (op.code == Op.MATMUL or op.code == Op.GATED)


@compiled
def num_own(c: Record, op: Record, rows: int, units: int) -> int:
    """Pieces of each thread's own; 0: all are for whoever comes first."""
    # Some 256 groups each, so that the output head, which is long, ends evenly too.
    own = min(max(OWN_PIECES, units // (256 * c.num_threads)), MOST_BITS // c.num_threads)
    return own if is_stream(op, rows) and own * c.num_threads <= units else 0


@compiled
def num_pieces(c: Record, op: Record, rows: int, units: int) -> int:
    """Into how many pieces it is cut: enough that threads end together, not so many that claiming them shows."""
    own = num_own(c, op, rows, units)
    if own > 0:
        return own * c.num_threads
    if op.code == Op.ATTEND or op.code == Op.LONE or op.code == Op.EXPERTS_GATED:
        return units
    if op.code == Op.GATED and rows > FEW_ROWS:
        left = units % c.num_threads
        return units - left + left * gated_cuts(c, rows)
    if op.code == Op.GATED:
        return min(units, 2 * c.num_threads)
    if op.code == Op.MATMUL or op.code == Op.EXPERTS_DOWN:
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
    elif code == Op.GATED and rows <= FEW_ROWS:
        gated_few(c, op, rows, start, end)
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
        experts_down(c, op, tid, rows, start, end)
    elif code == Op.ADD_GATED:
        add_shared(c, op, start, end)
    elif code == Op.CONVOLVE or code == Op.MIX:
        convolve_rows(c, op, start, end)
    elif code == Op.UNIT:
        unit_rows(c, op, start, end)
    elif code == Op.SCAN_GATES:
        scan_gate_rows(c, op, start, end)
    elif code == Op.GATE_NORM:
        gate_norm_rows(c, op, start, end)
    elif code == Op.DELTA or code == Op.SCAN:
        delta_rows(c, op, start, end)
    elif code == Op.NORM_GATED:
        norm_gated_rows(c, op, start, end)
    elif code == Op.TAKE:
        take(c, op, start, end)
    elif code == Op.GIVE:
        give(c, op, tid, start, end)
    elif code == Op.GATE_GIVEN:
        gate_given(c, op, start, end)


# The counter of an operation: a word with the number of the step (upper half) and the pieces nobody has claimed, the
# number of pieces that are not done, how many pieces each thread has of its own, and the number of all pieces. Where
# threads have pieces of their own, the unclaimed ones are bits, else a count. Thread 0 sets all before a step. A thread
# that has fallen behind finds another step's number there, or nothing left, and stops. It must know that from the
# counter alone: once a step is over, what it ran on may already be the next one's. As long as a piece is not done the
# step is not over, so a claim that succeeds is always of the step that runs, what was read between is that step's, and
# from then on so are rows and units.
@compiled
def claim(counter: int, generation: int, tid: int) -> int:
    """Take a piece: its number, or -1 if none is left. A thread's own pieces first, then the last of the others'."""
    while True:
        seen = atomic_load(counter)
        left = seen & 0xFFFFFFFF
        if seen >> 32 != generation or left == 0:
            return -1
        own, pieces = int64_at(counter + 16), int64_at(counter + 24)
        if own == 0:
            if swap_if(counter, seen, seen - 1):
                return pieces - left
            continue
        mine = (left >> (tid * own)) & ((1 << own) - 1)
        piece = tid * own + lowest_bit(mine) if mine else highest_bit(left)
        if swap_if(counter, seen, seen - (1 << piece)):
            return piece


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
        piece = claim(counter, generation, tid)
        if piece >= 0:
            rows, pieces = num_op_rows(c, op), int64_at(counter + 24)
            units = num_units(c, op, rows)
            while piece >= 0:
                run(c, op, tid, rows, units, piece, pieces)
                atomic_add(counter + 8, -1)
                piece = claim(counter, generation, tid)
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
            units = num_units(c, op, rows) if rows > 0 else 0
            own = num_own(c, op, rows, units) if rows > 0 else 0
            pieces = num_pieces(c, op, rows, units) if rows > 0 else 0
            counter = c.counters + i * LINE
            put_int64(counter + 8, pieces)
            put_int64(counter + 16, own)
            put_int64(counter + 24, pieces)
            put_int64(counter, (generation << 32) + ((1 << pieces) - 1 if own > 0 else pieces))
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
