"""A small vocabulary for writing kernels as LLVM IR.

A kernel is a Python function `def name(b, x, count, ...)` that receives a `KernelBuilder` and one i64 per parameter
(addresses, counts, byte strides) and emits straight IR. `emit_module` wraps several of them into one module of
`void name(i64, ...)` functions, which callers call with plain integers.

Vectors have 16 lanes on every machine; LLVM splits them where registers are narrower. A float operation rounds once
and nothing is contracted or reordered: what is written here is what is computed, and the NumPy twins say it again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

Value = Any
"""An SSA value. llvmlite has no types of its own to check against."""
Int = Any
"""An i64 SSA value or a Python int."""

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
POINTER = ir.PointerType()
LANES = 16
VF, VI, VB, VS = (ir.VectorType(F32, 16), ir.VectorType(I32, 16), ir.VectorType(I8, 64), ir.VectorType(I16, 32))
"""16 floats, 16 ints, 64 bytes and 32 shorts: the same 512 bits."""

Kernel = Callable[..., None]


def vector(element: Any, lanes: int) -> Any:
    return ir.VectorType(element, lanes)


def fill(vec: Any, value: float) -> Value:
    """A constant with the same value in each lane."""
    return ir.Constant(vec, [value] * vec.count)


class KernelBuilder(ir.IRBuilder):
    """An IRBuilder that speaks of addresses, lanes and loops."""

    def int64(self, x: Int) -> Value:
        return I64(x) if isinstance(x, int) else x

    def sum(self, *terms: Int) -> Value:
        """Sum of i64 values and Python ints; the ints are folded."""
        constant = sum(t for t in terms if isinstance(t, int))
        values = [t for t in terms if not isinstance(t, int)]
        if not values:
            return I64(constant)
        out = values[0]
        for v in values[1:]:
            out = self.add(out, v)
        return self.add(out, I64(constant)) if constant else out

    def times(self, x: Int, y: Int) -> Value:
        if isinstance(x, int) and isinstance(y, int):
            return I64(x * y)
        return self.mul(self.int64(x), self.int64(y))

    def larger_int(self, x: Value, y: Value) -> Value:
        """The larger of two i64."""
        return self.select(self.icmp_signed(">", x, y), x, y)

    def smaller(self, x: Value, y: Value) -> Value:
        """The smaller of two i64."""
        return self.select(self.icmp_signed("<", x, y), x, y)

    # ------------------------------------------------------------------ memory
    def pointer(self, address: Value) -> Value:
        return self.inttoptr(address, POINTER)

    def at(self, base: Value, *offsets: Int) -> Value:
        """base + offsets in bytes."""
        return self.gep(base, [self.sum(*offsets)], source_etype=I8)

    def read(self, kind: Any, base: Value, *offsets: Int) -> Value:
        x = self.load(self.at(base, *offsets) if offsets else base, typ=kind)
        x.align = 1
        return x

    def write(self, value: Value, base: Value, *offsets: Int) -> None:
        self.store(value, self.at(base, *offsets) if offsets else base).align = 1

    def variables(self, count: int, initial: Value) -> list[Value]:
        """Stack slots for loop-carried values; LLVM turns them into registers."""
        with self.goto_entry_block():
            slots = [self.alloca(initial.type) for _ in range(count)]
        for slot in slots:
            self.store(initial, slot)
        return slots

    def variable(self, initial: Value) -> Value:
        return self.variables(1, initial)[0]

    def scratch(self, kind: Any) -> Value:
        """Uninitialised stack memory of one type."""
        with self.goto_entry_block():
            slot = self.alloca(kind)
        slot.type = POINTER  # llvmlite would remember the element's type; memory here has none
        return slot

    def get(self, slot: Value, kind: Any) -> Value:
        return self.load(slot, typ=kind)

    def prefetch(self, address: Value, stays: bool = True) -> None:
        """Bring the cache line at `address` near, to be read: into L2 and L1, or past L2 unless it `stays`.

        The fence is no instruction. It keeps the prefetch at its place: LLVM gathers those of a block at its top, and
        the CPU then has nothing to fetch while it computes. Spread evenly, one-row products went from 33 to 41 GB/s.
        """
        self.fence("seq_cst", targetscope="singlethread")
        self.intrinsic("llvm.prefetch.p0", ir.VoidType(), address, I32(0), I32(3 if stays else 0), I32(1))

    # ------------------------------------------------------------------ lanes
    def splat(self, x: Value, lanes: int = LANES) -> Value:
        undefined = ir.Constant(ir.VectorType(x.type, lanes), ir.Undefined)
        return self.shuffle_vector(self.insert_element(undefined, x, I32(0)), undefined, fill(vector(I32, lanes), 0))

    def broadcast(self, kind: Any, base: Value, *offsets: Int) -> Value:
        """One value from memory in all 16 lanes."""
        return self.splat(self.read(kind, base, *offsets))

    def pick(self, x: Value, y: Value, lanes: Iterable[int]) -> Value:
        """Lanes of x followed by y, by number."""
        lanes = list(lanes)
        return self.shuffle_vector(x, y, ir.Constant(vector(I32, len(lanes)), lanes))

    def tree(self, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """Reduce the lanes in one fixed shape: halves onto each other, 8, 4, 2, 1."""
        half = x.type.count // 2
        while half:
            x = combine(self.pick(x, x, range(half)), self.pick(x, x, range(half, 2 * half)))
            half //= 2
        return self.extract_element(x, I32(0))

    def tree_of_each(self, vectors: Sequence[Value], combine: Callable[[Value, Value], Value]) -> Value:
        """Lane i = `tree` of vector i, for 16 vectors, by transposing them on the way."""
        width = LANES
        while width > 1:
            low = [g * width + i for g in range(LANES // width) for i in range(width // 2)]
            low += [LANES + i for i in low]
            high = [i + width // 2 for i in low]
            vectors = [
                combine(self.pick(p, q, low), self.pick(p, q, high))
                for p, q in zip(vectors[::2], vectors[1::2], strict=True)
            ]
            width //= 2
        return vectors[0]

    # ------------------------------------------------------------------ arithmetic
    def intrinsic(self, name: str, returns: Any, *args: Value) -> Value:
        declared = self.module.globals.get(name)
        if declared is None:
            declared = ir.Function(self.module, ir.FunctionType(returns, [a.type for a in args]), name)
        return self.call(declared, list(args))

    def fmadd(self, x: Value, y: Value, z: Value) -> Value:
        """x * y + z with one rounding."""
        suffix = f"v{x.type.count}f32" if isinstance(x.type, ir.VectorType) else "f32"
        return self.intrinsic(f"llvm.fma.{suffix}", x.type, x, y, z)

    def larger(self, x: Value, y: Value) -> Value:
        return self.select(self.fcmp_ordered(">", x, y), x, y)

    def round_even(self, x: Value) -> Value:
        return self.intrinsic(f"llvm.rint.v{x.type.count}f32", x.type, x)

    def magnitude(self, x: Value) -> Value:
        return self.intrinsic(f"llvm.fabs.v{x.type.count}f32", x.type, x)

    def halves(self, base: Value, *offsets: Int) -> Value:
        """16 f16 values from memory as f32."""
        return self.fpext(self.read(vector(F16, 16), base, *offsets), VF)

    def exp(self, x: Value, positive: bool = True) -> Value:
        """e**x of all lanes, clamped to -87..88, within 1 ulp: x = n ln 2 + r, a polynomial of degree 6 in r, 2**n.

        Unless x may be `positive`, the upper clamp is left out.
        ln 2 is split in two (Cody and Waite 1980). Ours, so that the bits are the same on every machine.
        """
        return self.exp_of_each([x], positive)[0]

    def exp_of_each(self, vectors: Sequence[Value], positive: bool = True) -> list[Value]:
        """`exp` of several vectors step by step in turn, since one alone is a long chain of instructions that wait."""
        kind = vectors[0].type
        ints = vector(I32, kind.count)

        def c(v: float) -> Value:
            return fill(kind, v)

        xs = [self.select(self.fcmp_ordered("<", x, c(-87.0)), c(-87.0), x) for x in vectors]
        if positive:
            xs = [self.select(self.fcmp_ordered(">", x, c(88.0)), c(88.0), x) for x in xs]
        products = [self.fmul(x, c(EXP_LOG2E)) for x in xs]
        ns = [self.round_even(x) for x in products]
        rs = [self.fmadd(n, c(EXP_LN2_HIGH), x) for n, x in zip(ns, xs, strict=True)]
        rs = [self.fmadd(n, c(EXP_LN2_LOW), r) for n, r in zip(ns, rs, strict=True)]
        ps = [c(EXP_COEFFICIENTS[0])] * len(rs)
        for k in EXP_COEFFICIENTS[1:]:
            ps = [self.fmadd(p, r, c(k)) for p, r in zip(ps, rs, strict=True)]
        powers = [self.shl(self.fptosi(n, ints), fill(ints, 23)) for n in ns]
        return [self.bitcast(self.add(self.bitcast(p, ints), n), kind) for p, n in zip(ps, powers, strict=True)]

    # ------------------------------------------------------------------ loops
    @contextmanager
    def loop(self, count: Int, start: Int = 0) -> Iterator[Value]:
        """for i in range(start, count): yields i as i64."""
        index = self.variable(self.int64(start))
        head = self.append_basic_block("loop")
        body = self.append_basic_block("body")
        done = self.append_basic_block("done")
        self.branch(head)
        self.position_at_end(head)
        i = self.get(index, I64)
        self.cbranch(self.icmp_signed("<", i, self.int64(count)), body, done)
        self.position_at_end(body)
        yield i
        self.store(self.add(i, I64(1)), index)
        self.branch(head)
        self.position_at_end(done)

    def greedy(self, count: Int, sizes: Sequence[int], body: Callable[[int, Value], None], start: Int = 0) -> None:
        """body(size, first) over start..count in the largest of `sizes` (descending, the last is 1) that fit."""
        done = self.variable(self.int64(start))
        for size in sizes:
            with self.loop(self.sdiv(self.sub(self.int64(count), self.get(done, I64)), I64(size))):
                first = self.get(done, I64)
                body(size, first)
                self.store(self.add(first, I64(size)), done)


EXP_LOG2E = 1.4426950216293335
EXP_LN2_HIGH, EXP_LN2_LOW = -0.693359375, 2.1219444170128554e-4
EXP_COEFFICIENTS = (
    1.3814540579915047e-3,
    8.36874544620514e-3,
    4.166838899254799e-2,
    1.666652113199234e-1,
    0.4999999403953552,
    1.0,
    1.0,
)
"""Highest power first. Of the polynomials that are 1 and rise by 1 at 0, the one with the smallest relative error on
|r| <= ln 2 / 2 (Remez; 3e-9), rounded to f32. e**0 is exactly 1, as merging softmax parts wants it."""


def emit_module(name: str, kernels: Mapping[str, Kernel], triple: str) -> str:
    """The text of an LLVM module with one `void name(i64, ...)` function for each kernel."""
    module = ir.Module(name)
    module.triple = triple
    for kernel_name, emit in kernels.items():
        num_args = len(inspect.signature(emit).parameters) - 1
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * num_args), kernel_name)
        builder = KernelBuilder(function.append_basic_block("entry"))
        emit(builder, *function.args)
        builder.ret_void()
    return str(module)
