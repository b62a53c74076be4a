"""What the walk calls that Numba has no words for: memory by address, atomics, and the kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.program import ACTIVATION, CONTEXT, MATRIX, OPERATION

NAP_MICROSECONDS = 50
MADV_WILLNEED = 3
"""The same number on Linux and macOS."""
LINE = 64
N = types.intp
compiled: Any = njit(nogil=True, error_model="numpy", _nrt=False)  # type: ignore[call-overload]
"""Without the GIL, without exceptions for a division, without Numba's memory management."""
Record = Any
"""A typed view of memory; the fields are in program.py."""


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


_I1, _I8, _I32, _I64 = (ir.IntType(n) for n in (1, 8, 32, 64))
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
clear_bytes = _instruction(
    2,
    types.void,
    lambda b, target, n: b.call(
        _declare(b, "llvm.memset.p0.i64", ir.VoidType(), [_POINTER, _I8, _I64, ir.IntType(1)]),
        [b.inttoptr(target, _POINTER), _I8(0), n, ir.IntType(1)(0)],
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
lowest_bit = _instruction(1, N, lambda b, x: b.call(_declare(b, "llvm.cttz.i64", _I64, [_I64, _I1]), [x, _I1(1)]))
"""Number of the lowest bit that is set; one must be."""
highest_bit = _instruction(
    1, N, lambda b, x: b.sub(_I64(63), b.call(_declare(b, "llvm.ctlz.i64", _I64, [_I64, _I1]), [x, _I1(1)]))
)
"""Number of the highest bit that is set; one must be."""
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
scale_choices, choose_biased = _kernel("scale_choices", 4), _kernel("choose_biased", 9)
rotate_neox, rotate_pairs = _kernel("rotate_neox", 4), _kernel("rotate_pairs", 4)
store_key_f16, store_value_f16 = _kernel("store_key_f16", 3), _kernel("store_value_f16", 3)
store_key_f32, store_value_f32 = _kernel("store_key_f32", 3), _kernel("store_value_f32", 3)
store_key_q8_0, store_value_q8_0 = _kernel("store_key_q8_0", 4), _kernel("store_value_q8_0", 4)
widen_keys_q8_0, widen_values_q8_0 = _kernel("widen_keys_q8_0", 4), _kernel("widen_values_q8_0", 4)
convolve, convolve_biased, mix = _kernel("convolve", 7), _kernel("convolve_biased", 7), _kernel("mix", 6)
scan_gates, scan, gate_silu = _kernel("scan_gates", 5), _kernel("scan", 8), _kernel("gate_silu", 4)
unit_vector, delta_gates = _kernel("unit_vector", 4), _kernel("delta_gates", 5)
delta, norm_gated, gate_vector = _kernel("delta", 7), _kernel("norm_gated", 6), _kernel("gate_vector", 3)
scores_floats, weigh_floats, softmax = _kernel("scores_floats", 6), _kernel("weigh_floats", 7), _kernel("softmax", 6)
fix_query, fix_keys, scores_fixed = _kernel("fix_query", 2), _kernel("fix_keys", 5), _kernel("scores_fixed", 7)
scale_values, fix_weights = _kernel("scale_values", 5), _kernel("fix_weights", 5)
fix_values, weigh_fixed = _kernel("fix_values", 6), _kernel("weigh_fixed", 8)
merge_states, finish_state = _kernel("merge", 4), _kernel("finish", 3)
