"""What the machine can do at most: bytes read from memory, products of bytes and of floats made from registers.

No step can be faster than the slowest of these, so a measured rate is worth something beside them
(`goinfer_chat/bench/machine.py`). The kernels return sums, which nothing can skip and which NumPy can check.
"""

from __future__ import annotations

from llvmlite import ir

from engine.kernels.dot import dot4
from engine.kernels.ir import I32, I64, VB, VF, VI, Kernel, KernelBuilder, Value, emit_module, fill
from engine.kernels.target import Target

READ_BYTES = 1024
"""What `read_stream` takes at a time: its length must be a multiple of it."""
PREFETCH_BYTES = 8192
"""How far ahead it asks for lines."""
CHAINS = {"vnni": 12, "maddubs": 4, "sdot": 3}
"""Independent sums for each kind of dot product: enough to hide the latency of an instruction, few enough that sums and
operands stay in registers."""


def read_stream(b: KernelBuilder, start: Value, num_bytes: Value, out: Value) -> None:
    """out [16] i32 = the sum, modulo 2**32, of the 16-lane vectors i32 at `start`.

    Prefetched without staying in the caches: 3 % faster than as the weights are, and 9 % faster than without.
    """
    start, out = b.pointer(start), b.pointer(out)
    sums = b.variables(4, fill(VI, 0))
    with b.loop(b.sdiv(num_bytes, I64(READ_BYTES))) as i:
        at = b.at(start, b.times(i, READ_BYTES))
        for offset in range(0, READ_BYTES, 64):
            ahead = b.at(at, offset + PREFETCH_BYTES)
            b.intrinsic("llvm.prefetch.p0", ir.VoidType(), ahead, I32(0), I32(0), I32(1))
        for n, offset in enumerate(range(0, READ_BYTES, 64)):
            slot = sums[n % len(sums)]
            b.store(b.add(b.get(slot, VI), b.read(VI, at, offset)), slot)
    total = b.get(sums[0], VI)
    for slot in sums[1:]:
        total = b.add(total, b.get(slot, VI))
    b.write(total, out)


def dot_products(target: Target) -> Kernel:
    """out [chains, 16] i32 += in each lane, `count` times, the sum of four products of weights and activations.

    Parameters: weights u8 [64] up to 127, activations s8 [chains, 64], count, out. Every second round flips the lowest
    bit of each weight, or LLVM would take what stays the same out of the loop (AVX2 makes a product of several
    instructions).
    """
    chains = CHAINS[target.dot]

    def emit(b: KernelBuilder, weights: Value, activations: Value, count: Value, out: Value) -> None:
        weights, activations, out = (b.pointer(p) for p in (weights, activations, out))
        rows = [b.read(VB, activations, 64 * n) for n in range(chains)]
        weight = b.variable(b.read(VB, weights))
        sums = b.variables(chains, fill(VI, 0))
        with b.loop(count):
            w = b.get(weight, VB)
            for row, slot in zip(rows, sums, strict=True):
                b.store(dot4(b, target, False, b.get(slot, VI), w, row), slot)
            b.store(b.xor(w, fill(VB, 1)), weight)
        for n, slot in enumerate(sums):
            b.write(b.add(b.read(VI, out, 64 * n), b.get(slot, VI)), out, 64 * n)

    return emit


def float_products(target: Target) -> Kernel:
    """out [chains, 16] f32 = fma(x, y, out), `count` times. Parameters: x f32 [16], y f32 [chains, 16], count, out."""
    chains = CHAINS[target.dot]

    def emit(b: KernelBuilder, x: Value, y: Value, count: Value, out: Value) -> None:
        x, y, out = (b.pointer(p) for p in (x, y, out))
        factor = b.read(VF, x)
        rows = [b.read(VF, y, 64 * n) for n in range(chains)]
        sums = [b.variable(b.read(VF, out, 64 * n)) for n in range(chains)]
        with b.loop(count):
            for row, slot in zip(rows, sums, strict=True):
                b.store(b.fmadd(factor, row, b.get(slot, VF)), slot)
        for n, slot in enumerate(sums):
            b.write(b.get(slot, VF), out, 64 * n)

    return emit


def probe_module(target: Target) -> str:
    """IR of the module with all of them."""
    kernels = {
        "read_stream": read_stream,
        "dot_products": dot_products(target),
        "float_products": float_products(target),
    }
    return emit_module("probe", kernels, target.triple)
