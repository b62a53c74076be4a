"""Kernels of state space layers (Mamba 2, Dao and Gu 2024), which keep a running state as the delta rule does.

A head keeps a matrix S [keys, values] that each token changes in place,

    S <- decay S + k (step v)^T;   out = S^T q + skip v

with decay = exp(rate step). Its columns lie in strips of DELTA_COLUMNS (`delta.py` says why), and tokens are taken one
by one. `twins` says each kernel in NumPy.
"""

from __future__ import annotations

from engine.kernels.delta import CHAINS, silu, softplus
from engine.kernels.ir import F32, I64, VF, Kernel, KernelBuilder, Value, fill
from engine.kernels.plan import DELTA_COLUMNS


def scan_gates(b: KernelBuilder, step: Value, decay: Value, bias: Value, rate: Value, n: Value) -> None:
    """step = softplus(step + bias) in place, and decay = exp(rate * step), for n heads."""
    step, decay, bias, rate = (b.pointer(p) for p in (step, decay, bias, rate))
    with b.loop(b.sdiv(n, I64(16))) as i:
        at = b.times(i, 64)
        size = softplus(b, b.fadd(b.read(VF, step, at), b.read(VF, bias, at)))
        b.write(size, step, at)
        b.write(b.exp(b.fmul(b.read(VF, rate, at), size)), decay, at)


def scan(
    b: KernelBuilder, state: Value, q: Value, k: Value, v: Value, decay: Value, step: Value, skip: Value, n: Value
) -> None:
    """One token of one head: DELTA_COLUMNS columns of the state [n][DELTA_COLUMNS] f32 and of v; v becomes the output.

    q and k [n] f32; decay, step and skip are addresses of an f32. Sums over n run in CHAINS chains, row i in chain
    i mod 4.
    """
    state, q, k, v = (b.pointer(p) for p in (state, q, k, v))
    factor, size, past = (b.broadcast(F32, b.pointer(p)) for p in (decay, step, skip))
    vectors = range(DELTA_COLUMNS // 16)
    given = [b.read(VF, v, 64 * c) for c in vectors]
    change = [b.fmul(size, x) for x in given]
    chains = [[b.variable(fill(VF, 0.0)) for _ in vectors] for _ in range(CHAINS)]
    with b.loop(b.sdiv(n, I64(CHAINS))) as r:
        for j in range(CHAINS):
            i = b.sum(b.times(r, CHAINS), j)
            at = b.times(i, 4 * DELTA_COLUMNS)
            for c in vectors:
                old = b.fmul(b.read(VF, state, at, 64 * c), factor)
                row = b.fmadd(b.broadcast(F32, k, b.times(i, 4)), change[c], old)
                b.write(row, state, at, 64 * c)
                slot = chains[j][c]
                b.store(b.fmadd(row, b.broadcast(F32, q, b.times(i, 4)), b.get(slot, VF)), slot)
    for c in vectors:
        found = [b.get(chain[c], VF) for chain in chains]
        total = b.fadd(b.fadd(found[0], found[1]), b.fadd(found[2], found[3]))
        b.write(b.fmadd(past, given[c], total), v, 64 * c)


def gate_silu(b: KernelBuilder, x: Value, gate: Value, out: Value, n: Value) -> None:
    """out = x * silu(gate) for n floats."""
    x, gate, out = (b.pointer(p) for p in (x, gate, out))
    with b.loop(b.sdiv(n, I64(16))) as i:
        at = b.times(i, 64)
        b.write(b.fmul(b.read(VF, x, at), silu(b, b.read(VF, gate, at))), out, at)


KERNELS: dict[str, Kernel] = {"scan_gates": scan_gates, "scan": scan, "gate_silu": gate_silu}
