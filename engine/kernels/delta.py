"""Kernels of layers with a running state: the gated delta rule (Yang, Kautz and Hatamizadeh 2025) and what it needs.

A head keeps a matrix S [keys, values] that each token changes in place,

    S <- decay S;   S <- S + k (beta (v - S^T k))^T;   out = S^T q

so tokens are taken one by one, in order, whatever the chunks. The columns of S do not know each other: a call takes
DELTA_COLUMNS of them for one token, so that a stretch of S stays in L1 from token to token. `twins` says each kernel in
NumPy.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.kernels.ir import F32, I64, VF, Kernel, KernelBuilder, Value, fill
from engine.kernels.plan import DELTA_COLUMNS, TAPS
from engine.kernels.rows import inverse_rms_of, squares

CHANNELS = 16
"""Channels that a call of `convolve` takes."""
CHAINS = 4
"""Sums that run side by side: one alone would wait for each of its additions."""

LOG1P_TERMS = 9
"""Of the series of log(1 + u) = 2 artanh(u / (2 + u)) for 0 <= u <= 1: the next one adds less than 1e-9 of it."""


def silu(b: KernelBuilder, x: Value) -> Value:
    """x / (1 + exp(-x))."""
    return b.fdiv(x, b.fadd(fill(VF, 1.0), b.exp(b.fsub(fill(VF, -0.0), x))))


def _sigmoid(b: KernelBuilder, x: Value) -> Value:
    one = fill(VF, 1.0)
    return b.fdiv(one, b.fadd(one, b.exp(b.fsub(fill(VF, -0.0), x))))


def convolve(biased: bool) -> Kernel:
    """The kernel, with or without a bias for each channel."""

    def emit(
        b: KernelBuilder, x: Value, stride: Value, count: Value, taps: Value, before: Value, width: Value, bias: Value
    ) -> None:
        """x = silu(convolution + bias) of 16 channels of `count` rows, `stride` bytes apart, in place.

        taps [TAPS][width] f32, before [TAPS - 1][width] f32 (the rows before these, the oldest first) and bias are
        addresses of the channels' first number, `width` is in bytes. `before` becomes the last rows as they were.
        """
        x, taps, before, bias = (b.pointer(p) for p in (x, taps, before, bias))
        weights = [b.read(VF, taps, b.times(width, j)) for j in range(TAPS)]
        slots = [b.variable(b.read(VF, before, b.times(width, j))) for j in range(TAPS - 1)]
        with b.loop(count) as t:
            at = b.times(t, stride)
            rows = [*(b.get(slot, VF) for slot in slots), b.read(VF, x, at)]
            total = b.fmul(weights[0], rows[0])
            for weight, row in zip(weights[1:], rows[1:], strict=True):
                total = b.fmadd(weight, row, total)
            b.write(silu(b, b.fadd(total, b.read(VF, bias)) if biased else total), x, at)
            for slot, row in zip(slots, rows[1:], strict=True):
                b.store(row, slot)
        for j, slot in enumerate(slots):
            b.write(b.get(slot, VF), before, b.times(width, j))

    return emit


def mix(b: KernelBuilder, x: Value, stride: Value, count: Value, taps: Value, before: Value, width: Value) -> None:
    """In place of the first of three numbers u, g, v of each of 16 channels: g * convolution(u * v).

    g and v are `width` and twice that behind u; taps and before as `convolve` has them, before being products.
    """
    x, taps, before = (b.pointer(p) for p in (x, taps, before))
    weights = [b.read(VF, taps, b.times(width, j)) for j in range(TAPS)]
    slots = [b.variable(b.read(VF, before, b.times(width, j))) for j in range(TAPS - 1)]
    with b.loop(count) as t:
        at = b.times(t, stride)
        here = b.fmul(b.read(VF, x, at), b.read(VF, x, at, b.times(width, 2)))
        rows = [*(b.get(slot, VF) for slot in slots), here]
        total = b.fmul(weights[0], rows[0])
        for weight, row in zip(weights[1:], rows[1:], strict=True):
            total = b.fmadd(weight, row, total)
        b.write(b.fmul(b.read(VF, x, at, width), total), x, at)
        for slot, row in zip(slots, rows[1:], strict=True):
            b.store(row, slot)
    for j, slot in enumerate(slots):
        b.write(b.get(slot, VF), before, b.times(width, j))


def unit_vector(b: KernelBuilder, x: Value, eps: Value, factor: Value, n: Value) -> None:
    """x *= factor / sqrt(sum of squares + eps) for n floats; eps and factor are addresses of f32."""
    x = b.pointer(x)
    total = b.fadd(squares(b, x, n), b.read(F32, b.pointer(eps)))
    inverse = b.fdiv(b.read(F32, b.pointer(factor)), b.intrinsic("llvm.sqrt.f32", F32, total))
    spread = b.splat(inverse)
    with b.loop(b.sdiv(n, I64(16))) as i:
        at = b.times(i, 64)
        b.write(b.fmul(b.read(VF, x, at), spread), x, at)


def _log1p(b: KernelBuilder, u: Value) -> Value:
    """log(1 + u) for 0 <= u <= 1: 2 (s + s^3 / 3 + s^5 / 5 ...) with s = u / (2 + u)."""
    s = b.fdiv(u, b.fadd(u, fill(VF, 2.0)))
    square = b.fmul(s, s)
    total = fill(VF, 1 / (2 * LOG1P_TERMS - 1))
    for k in range(LOG1P_TERMS - 2, -1, -1):
        total = b.fmadd(total, square, fill(VF, 1 / (2 * k + 1)))
    return b.fmul(b.fadd(s, s), total)


def softplus(b: KernelBuilder, x: Value) -> Value:
    """log(1 + exp(x))."""
    positive = b.select(b.fcmp_ordered(">", x, fill(VF, 0.0)), x, fill(VF, 0.0))
    return b.fadd(positive, _log1p(b, b.exp(b.fsub(fill(VF, -0.0), b.magnitude(x)))))


def delta_gates(b: KernelBuilder, beta: Value, decay: Value, bias: Value, rate: Value, n: Value) -> None:
    """beta = sigmoid(beta), decay = exp(rate * softplus(decay + bias)) in place for n heads."""
    beta, decay, bias, rate = (b.pointer(p) for p in (beta, decay, bias, rate))
    with b.loop(b.sdiv(n, I64(16))) as i:
        at = b.times(i, 64)
        b.write(_sigmoid(b, b.read(VF, beta, at)), beta, at)
        x = b.fadd(b.read(VF, decay, at), b.read(VF, bias, at))
        b.write(b.exp(b.fmul(b.read(VF, rate, at), softplus(b, x))), decay, at)


def delta(b: KernelBuilder, state: Value, q: Value, k: Value, v: Value, decay: Value, beta: Value, n: Value) -> None:
    """One token of one head: DELTA_COLUMNS columns of the state [n][DELTA_COLUMNS] f32 and of v; v becomes the output.

    These columns lie together, since rows of a whole matrix are a power of two apart and would share few sets of L1.
    q and k [n] f32; decay and beta are addresses of an f32. Sums over n run in CHAINS chains, row i in chain i mod 4.
    """
    state, q, k, v = (b.pointer(p) for p in (state, q, k, v))
    factor, share = (b.broadcast(F32, b.pointer(p)) for p in (decay, beta))
    vectors = range(DELTA_COLUMNS // 16)

    def sums(body: Callable[[Value, Value, int, Value], Value]) -> list[Value]:
        chains = [[b.variable(fill(VF, 0.0)) for _ in vectors] for _ in range(CHAINS)]
        with b.loop(b.sdiv(n, I64(CHAINS))) as r:
            for j in range(CHAINS):
                i = b.sum(b.times(r, CHAINS), j)
                at = b.times(i, 4 * DELTA_COLUMNS)
                for c in vectors:
                    slot = chains[j][c]
                    b.store(body(i, at, c, b.get(slot, VF)), slot)
        found = [[b.get(slot, VF) for slot in chain] for chain in chains]
        return [b.fadd(b.fadd(found[0][c], found[1][c]), b.fadd(found[2][c], found[3][c])) for c in vectors]

    def project(i: Value, at: Value, c: int, total: Value) -> Value:
        return b.fmadd(b.read(VF, state, at, 64 * c), b.broadcast(F32, k, b.times(i, 4)), total)

    known = sums(project)
    change = [b.fmul(share, b.fsub(b.read(VF, v, 64 * c), b.fmul(factor, known[c]))) for c in vectors]

    def update(i: Value, at: Value, c: int, total: Value) -> Value:
        old = b.fmul(b.read(VF, state, at, 64 * c), factor)
        row = b.fmadd(b.broadcast(F32, k, b.times(i, 4)), change[c], old)
        b.write(row, state, at, 64 * c)
        return b.fmadd(row, b.broadcast(F32, q, b.times(i, 4)), total)

    for c, total in enumerate(sums(update)):
        b.write(total, v, 64 * c)


def norm_gated(b: KernelBuilder, x: Value, gate: Value, weight: Value, eps: Value, out: Value, n: Value) -> None:
    """out = x / rms(x) * weight * silu(gate) for n floats."""
    x, gate, weight, out = (b.pointer(p) for p in (x, gate, weight, out))
    factor = b.splat(inverse_rms_of(b, x, n, b.read(F32, b.pointer(eps))))
    with b.loop(b.sdiv(n, I64(16))) as i:
        at = b.times(i, 64)
        normed = b.fmul(b.fmul(b.read(VF, x, at), factor), b.read(VF, weight, at))
        b.write(b.fmul(normed, silu(b, b.read(VF, gate, at))), out, at)


def gate_vector(b: KernelBuilder, x: Value, gate: Value, n: Value) -> None:
    """x *= sigmoid(gate) for n floats."""
    x, gate = b.pointer(x), b.pointer(gate)
    with b.loop(b.sdiv(n, I64(16))) as i:
        at = b.times(i, 64)
        b.write(b.fmul(b.read(VF, x, at), _sigmoid(b, b.read(VF, gate, at))), x, at)


KERNELS: dict[str, Kernel] = {
    "convolve": convolve(False),
    "convolve_biased": convolve(True),
    "mix": mix,
    "unit_vector": unit_vector,
    "delta_gates": delta_gates,
    "delta": delta,
    "norm_gated": norm_gated,
    "gate_vector": gate_vector,
}
