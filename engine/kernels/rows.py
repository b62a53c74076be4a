"""Kernels on single rows: norms, activation functions, quantization, rotary embedding.

Each works on a stretch of one row, so that several threads can share even a single row. Lengths are multiples of 16
floats, those that are quantized multiples of the block. `twins` says each of them in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from llvmlite import ir

from engine.kernels.dot import ActivationLayout
from engine.kernels.ir import (
    F32,
    I8,
    I16,
    I32,
    I64,
    VF,
    VI,
    Int,
    Kernel,
    KernelBuilder,
    Value,
    fill,
    vector,
)

Source = Literal["plain", "norm", "centred", "silu", "gelu", "clipped", "lone_gelu", "lone_relu2"]
"""Where the values come from that `activate` quantizes."""
SOURCES: tuple[Source, ...] = get_args(Source)

GELU_LINEAR, GELU_CUBIC = 1.5957691216057308, 0.07135481627159595
"""2 sqrt(2 / pi) and that times 0.044715: gelu(x) ~ x / (1 + exp(-(linear x + cubic x^3))) (Hendrycks, Gimpel 2016)."""

CLIPPED_SLOPE, CLIP = 1.7020000219345093, 7.0
"""Of the gates of gpt-oss: 1.702 as f32, and where they are cut off."""

TOGETHER = 4
"""Vectors whose values are made side by side: an exponential is a long chain."""

TINY = 2.0**-120
"""Activations of a block that stays below this count as zeros: 127 / max |x| would leave f32's range."""


def _sum(b: KernelBuilder, x: Value, n: Int, add: Callable[[Value, Value], Value]) -> Value:
    """A sum over n floats: vector i goes to sum i mod 4 by add(vector, sum); the four, then the lanes, in pairs."""
    slots = b.variables(4, fill(VF, 0.0))
    vectors = b.sdiv(b.int64(n), I64(16))

    def take(i: int, first: Value) -> None:
        v = b.read(VF, x, b.times(first, 64), 64 * i)
        b.store(add(v, b.get(slots[i], VF)), slots[i])

    with b.loop(b.sdiv(vectors, I64(4))) as r:
        for i in range(4):
            take(i, b.times(r, 4))
    whole = b.times(b.sdiv(vectors, I64(4)), 4)
    for i in range(3):  # what is left of a length that is no multiple of 64
        with b.if_then(b.icmp_signed("<", b.sum(whole, i), vectors)):
            take(i, whole)
    s = [b.get(slot, VF) for slot in slots]
    return b.tree(b.fadd(b.fadd(s[0], s[1]), b.fadd(s[2], s[3])), b.fadd)


def _inverse_root(b: KernelBuilder, total: Value, n: Int, eps: Value) -> Value:
    """1 / sqrt(total / n + eps)."""
    mean = b.fdiv(total, b.sitofp(b.int64(n), F32))
    return b.fdiv(F32(1.0), b.intrinsic("llvm.sqrt.f32", F32, b.fadd(mean, eps)))


def squares(b: KernelBuilder, x: Value, n: Int) -> Value:
    """Sum of squares of n floats."""
    return _sum(b, x, n, lambda v, total: b.fmadd(v, v, total))


def inverse_rms_of(b: KernelBuilder, x: Value, n: Int, eps: Value) -> Value:
    """1 / sqrt(mean of squares + eps)."""
    return _inverse_root(b, squares(b, x, n), n, eps)


def _deviation(b: KernelBuilder, x: Value, n: Int, eps: Value) -> tuple[Value, Value]:
    """1 / sqrt(variance + eps), and the mean."""
    mean = b.fdiv(_sum(b, x, n, b.fadd), b.sitofp(b.int64(n), F32))
    spread = b.splat(mean)

    def add(v: Value, total: Value) -> Value:
        centred = b.fsub(v, spread)
        return b.fmadd(centred, centred, total)

    return _inverse_root(b, _sum(b, x, n, add), n, eps), mean


def inverse_rms(b: KernelBuilder, x: Value, n: Value, eps: Value, out: Value) -> None:
    """out f32 = 1 / sqrt(mean(x^2) + eps); eps is the address of an f32."""
    b.write(inverse_rms_of(b, b.pointer(x), n, b.read(F32, b.pointer(eps))), b.pointer(out))


def deviation(b: KernelBuilder, x: Value, n: Value, eps: Value, out: Value) -> None:
    """out [2] f32 = 1 / sqrt(variance(x) + eps) and mean(x); eps is the address of an f32."""
    inverse, mean = _deviation(b, b.pointer(x), n, b.read(F32, b.pointer(eps)))
    b.write(inverse, b.pointer(out))
    b.write(mean, b.pointer(out), 4)


def add_normed(b: KernelBuilder, y: Value, weight: Value, inverse: Value, out: Value, n: Value) -> None:
    """out += y * (inverse * weight) for n floats: a norm on the way into the residual stream."""
    y, weight, out = (b.pointer(p) for p in (y, weight, out))
    factor = b.broadcast(F32, b.pointer(inverse))
    with b.loop(b.sdiv(n, I64(16))) as i:
        at = b.times(i, 64)
        normed = b.fmul(b.read(VF, y, at), b.fmul(factor, b.read(VF, weight, at)))
        b.write(b.fadd(b.read(VF, out, at), normed), out, at)


def add_scaled(b: KernelBuilder, y: Value, factor: Value, out: Value, n: Value) -> None:
    """out += y * factor (the address of an f32), rounded once, for n floats."""
    y, out = b.pointer(y), b.pointer(out)
    k = b.broadcast(F32, b.pointer(factor))
    with b.loop(b.sdiv(n, I64(16))) as i:
        at = b.times(i, 64)
        b.write(b.fmadd(b.read(VF, y, at), k, b.read(VF, out, at)), out, at)


def add_gated(b: KernelBuilder, y: Value, gate: Value, out: Value, n: Value) -> None:
    """out += y * sigmoid(gate) (the address of an f32), rounded once, for n floats."""
    y, out, one = b.pointer(y), b.pointer(out), fill(VF, 1.0)
    negative = b.fsub(fill(VF, -0.0), b.broadcast(F32, b.pointer(gate)))
    k = b.fdiv(one, b.fadd(one, b.exp(negative)))
    with b.loop(b.sdiv(n, I64(16))) as i:
        at = b.times(i, 64)
        b.write(b.fmadd(b.read(VF, y, at), k, b.read(VF, out, at)), out, at)


def _gated(b: KernelBuilder, source: Source, gates: list[Value], ups: list[Value] | None) -> list[Value]:
    """silu(gate) * up or gelu(gate) * up, as gate / (1 + exp(-z)) * up; no `ups`: without them."""
    zs = gates
    if source != "silu":
        cubes = [b.fmul(b.fmul(gate, gate), gate) for gate in gates]
        pairs = zip(cubes, gates, strict=True)
        zs = [b.fmadd(cube, fill(VF, GELU_CUBIC), b.fmul(gate, fill(VF, GELU_LINEAR))) for cube, gate in pairs]
    powers = b.exp_of_each([b.fsub(fill(VF, -0.0), z) for z in zs])
    values = [b.fdiv(gate, b.fadd(fill(VF, 1.0), e)) for gate, e in zip(gates, powers, strict=True)]
    return values if ups is None else [b.fmul(v, up) for v, up in zip(values, ups, strict=True)]


def _clipped(b: KernelBuilder, gate: Value, up: Value) -> Value:
    """g / (1 + exp(-CLIPPED_SLOPE g)) * (u + 1) of g = gate, at most CLIP, and u = up between -CLIP and CLIP."""
    gate = b.select(b.fcmp_ordered(">", gate, fill(VF, CLIP)), fill(VF, CLIP), gate)
    up = b.select(b.fcmp_ordered(">", up, fill(VF, CLIP)), fill(VF, CLIP), up)
    up = b.select(b.fcmp_ordered("<", up, fill(VF, -CLIP)), fill(VF, -CLIP), up)
    z = b.fmul(gate, fill(VF, -CLIPPED_SLOPE))
    return b.fmul(b.fdiv(gate, b.fadd(fill(VF, 1.0), b.exp(z))), b.fadd(up, fill(VF, 1.0)))


def _lone(b: KernelBuilder, source: Source, x: Value) -> Value:
    """gelu(x), or the square of what of x is above 0 (So et al. 2021)."""
    if source == "lone_gelu":
        return _gated(b, source, [x], None)[0]
    positive = b.larger(x, fill(VF, 0.0))
    return b.fmul(positive, positive)


def activate(layout: ActivationLayout, source: Source) -> Kernel:
    """Quantize blocks first .. first + count of a row into an activation row of `blocks` blocks at dst.

    Or, where dst_bytes is not 0, block `first` of `count` rows, x_bytes apart in x and y, dst_bytes where they go.
    Two blocks of 256 are made side by side, since what their values are multiplied with is known late.

    The values are, with x and y addresses of the row's start:
        plain    x
        norm     x * inverse * y: y the weights, inverse the address of an f32
        centred  (x - mean) * inverse * y + bias: inverse the address of both f32 (`deviation`), the biases follow y
        silu, gelu, clipped    the gated activation of x and y
        lone_gelu, lone_relu2    the activation of x + y, where nothing is gated: y the biases
    Floats (span 1) are taken 32 at a time.
    """
    span = max(layout.span, 32)

    def emit(
        b: KernelBuilder, x: Value, y: Value, inverse: Value, dst: Value, first: Value, count: Value, blocks: Value,
        x_bytes: Value, dst_bytes: Value,
    ) -> None:  # fmt: skip
        x, y, dst = b.pointer(x), b.pointer(y), b.pointer(dst)
        normed = source in ("norm", "centred")
        factor = b.broadcast(F32, b.pointer(inverse)) if normed else None
        mean = b.broadcast(F32, b.pointer(inverse), 4) if source == "centred" else None
        biases = b.times(blocks, 4 * span)
        in_row = b.icmp_signed("==", dst_bytes, I64(0))
        step, along = b.select(in_row, I64(4 * span), x_bytes), b.zext(in_row, I64)

        def made(at: list[tuple[Value, int]]) -> list[Value]:
            """What is quantized, of vectors side by side: where there are exponentials, these are long chains."""
            vs = [b.read(VF, x, *place) for place in at]
            if source == "plain":
                return vs
            others = [b.read(VF, y, *place) for place in at]
            if source in ("silu", "gelu"):
                return _gated(b, source, vs, others)
            both = zip(vs, others, strict=True)
            if source == "norm":
                return [b.fmul(b.fmul(v, factor), w) for v, w in both]
            if source == "centred":
                shifts = [b.read(VF, y, biases, *place) for place in at]
                centred = [b.fmul(b.fsub(v, mean), factor) for v in vs]
                return [b.fmadd(v, w, shift) for v, w, shift in zip(centred, others, shifts, strict=True)]
            if source == "clipped":
                return [_clipped(b, v, w) for v, w in both]
            return [_lone(b, source, b.fadd(v, w)) for v, w in both]

        def body(num: int, r: Value) -> None:
            numbers = [b.sum(r, n) for n in range(num)]
            of_blocks: list[list[Value]] = [[] for _ in numbers]
            for n, values in zip(numbers, of_blocks, strict=True):
                start = b.sum(b.times(first, 4 * span), b.times(n, step))
                for i in range(0, span // 16, TOGETHER):
                    if num == 2 and source in ("silu", "gelu"):  # those that come next, from L2
                        for k in range(i, i + TOGETHER):
                            b.prefetch(b.at(x, start, b.times(step, num), 64 * k))
                            b.prefetch(b.at(y, start, b.times(step, num), 64 * k))
                    values += made([(start, 64 * k) for k in range(i, min(i + TOGETHER, span // 16))])
            places = [(b.at(dst, b.times(n, dst_bytes)), b.sum(first, b.times(n, along))) for n in numbers]
            if layout.span > 1:
                _quantize(b, layout, of_blocks, places, blocks)
                return
            for values, (row, s) in zip(of_blocks, places, strict=True):
                for i, v in enumerate(values):
                    b.write(v, row, b.times(s, 4 * span), 64 * i)

        b.greedy(count, (2, 1) if layout.span == 256 else (1,), body)

    return emit


def _magnitude(b: KernelBuilder, x: Value) -> Value:
    return b.intrinsic("llvm.abs.v16i32", VI, x, ir.Constant(ir.IntType(1), 1))


def _quantize(
    b: KernelBuilder, layout: ActivationLayout, of_blocks: list[list[Value]], places: list[tuple[Value, Value]],
    blocks: Value,
) -> None:  # fmt: skip
    """Symmetric int8 with scale max|x| / 127, rounded to even, and the sums the matmul tiles need.

    places: of each block, the activation row and the block's number there.
    """
    span = layout.span
    tops = []
    for values in of_blocks:
        sizes = [b.magnitude(v) for v in values]
        while len(sizes) > 1:
            sizes = [b.larger(p, q) for p, q in zip(sizes[::2], sizes[1::2], strict=True)]
        tops.append(b.tree(sizes[0], b.larger))
    for values, top, (dst, s) in zip(of_blocks, tops, places, strict=True):
        empty = b.fcmp_ordered("<", top, F32(TINY))
        factor = b.select(empty, F32(0.0), b.fdiv(F32(127.0), b.select(empty, F32(1.0), top)))
        scale = b.fdiv(top, F32(127.0))
        spread = b.splat(factor)
        levels = [b.fptosi(b.round_even(b.fmul(v, spread)), VI) for v in values]
        for i, q in enumerate(levels):
            b.write(b.trunc(q, vector(I8, 16)), dst, b.times(s, span), 16 * i)
        b.write(scale, dst, layout.after(b, blocks, 0), b.times(s, 4))
        if span == 32:
            total = b.intrinsic("llvm.vector.reduce.add.v16i32", I32, b.add(*levels))
            b.write(b.sub(I32(0), total), dst, layout.after(b, blocks, 4), b.times(s, 4))
            b.write(b.fmul(scale, b.sitofp(total, F32)), dst, layout.after(b, blocks, 8), b.times(s, 4))
            continue
        # The sum of 16 levels in the lower half of a lane, that of their magnitudes, never negative, in the upper one.
        both = [b.add(q, b.shl(_magnitude(b, q), fill(VI, 16))) for q in levels]
        summed = b.tree_of_each(both, b.add)
        sixteens = b.ashr(b.shl(summed, fill(VI, 16)), fill(VI, 16))
        loud = b.lshr(b.sub(summed, sixteens), fill(VI, 16))
        pairs = b.add(b.pick(sixteens, sixteens, range(0, 16, 2)), b.pick(sixteens, sixteens, range(1, 16, 2)))
        b.write(b.trunc(pairs, vector(I16, 8)), dst, layout.after(b, blocks, 4), b.times(s, 16))
        b.write(b.trunc(sixteens, vector(I16, 16)), dst, layout.after(b, blocks, 20), b.times(s, 32))
        loudest = b.intrinsic("llvm.vector.reduce.smax.v16i32", I32, loud)
        b.write(loudest, dst, layout.after(b, blocks, 52), b.times(s, 4))


# ---------------------------------------------------------------- one head of q, k or v
def add_vector(b: KernelBuilder, x: Value, y: Value, n: Value) -> None:
    """x += y for n floats."""
    x, y = b.pointer(x), b.pointer(y)
    with b.loop(b.sdiv(n, I64(16))) as i:
        at = b.times(i, 64)
        b.write(b.fadd(b.read(VF, x, at), b.read(VF, y, at)), x, at)


def scale_vector(b: KernelBuilder, x: Value, factor: Value, n: Value) -> None:
    """x *= factor (the address of an f32) for n floats."""
    x, k = b.pointer(x), b.broadcast(F32, b.pointer(factor))
    with b.loop(b.sdiv(n, I64(16))) as i:
        at = b.times(i, 64)
        b.write(b.fmul(b.read(VF, x, at), k), x, at)


def cap_vector(b: KernelBuilder, x: Value, cap: Value, n: Value) -> None:
    """x = cap * tanh(x / cap) in place for n floats; cap is the address of an f32. tanh(y) = 1 - 2 / (exp(2 y) + 1)."""
    x, k, one = b.pointer(x), b.broadcast(F32, b.pointer(cap)), fill(VF, 1.0)
    with b.loop(b.sdiv(n, I64(16))) as i:
        at = b.times(i, 64)
        y = b.fdiv(b.read(VF, x, at), k)
        tanh = b.fsub(one, b.fdiv(fill(VF, 2.0), b.fadd(b.exp(b.fadd(y, y)), one)))
        b.write(b.fmul(k, tanh), x, at)


def norm_vector(b: KernelBuilder, x: Value, weight: Value, eps: Value, n: Value) -> None:
    """x = x / rms(x) * weight in place for n floats."""
    x, weight = b.pointer(x), b.pointer(weight)
    factor = b.splat(inverse_rms_of(b, x, n, b.read(F32, b.pointer(eps))))
    with b.loop(b.sdiv(n, I64(16))) as i:
        at = b.times(i, 64)
        b.write(b.fmul(b.fmul(b.read(VF, x, at), factor), b.read(VF, weight, at)), x, at)


def centre_vector(b: KernelBuilder, x: Value, weight: Value, eps: Value, n: Value) -> None:
    """x = (x - mean(x)) / sqrt(variance(x) + eps) * weight in place for n floats."""
    x, weight = b.pointer(x), b.pointer(weight)
    factor, mean = (b.splat(v) for v in _deviation(b, x, n, b.read(F32, b.pointer(eps))))
    with b.loop(b.sdiv(n, I64(16))) as i:
        at = b.times(i, 64)
        b.write(b.fmul(b.fmul(b.fsub(b.read(VF, x, at), mean), factor), b.read(VF, weight, at)), x, at)


def rotate(neox: bool) -> Kernel:
    """Rotary embedding of one head in place (Su et al. 2021): pairs (d, d + half) if neox, else (2 d, 2 d + 1).

    cos and sin are addresses of `half` f32 for the row's position.
    """
    eight = vector(F32, 8)

    def emit(b: KernelBuilder, x: Value, cos: Value, sin: Value, half: Value) -> None:
        x, cos, sin = (b.pointer(p) for p in (x, cos, sin))
        with b.loop(b.sdiv(half, I64(8))) as i:
            at = b.times(i, 32)
            c, s = b.read(eight, cos, at), b.read(eight, sin, at)
            if neox:
                u, v = b.read(eight, x, at), b.read(eight, x, at, b.times(half, 4))
            else:
                both = b.read(VF, x, b.times(i, 64))
                u, v = b.pick(both, both, range(0, 16, 2)), b.pick(both, both, range(1, 16, 2))
            turned_u = b.fsub(b.fmul(u, c), b.fmul(v, s))
            turned_v = b.fadd(b.fmul(u, s), b.fmul(v, c))
            if neox:
                b.write(turned_u, x, at)
                b.write(turned_v, x, at, b.times(half, 4))
            else:
                b.write(b.pick(turned_u, turned_v, [j // 2 + 8 * (j % 2) for j in range(16)]), x, b.times(i, 64))
        with b.loop(half, b.times(b.sdiv(half, I64(8)), 8)) as i:  # StableLM 3B has 10 pairs
            at = b.times(i, 4)
            first, second = (at, b.sum(at, b.times(half, 4))) if neox else (b.times(at, 2), b.sum(b.times(at, 2), 4))
            c, s = b.read(F32, cos, at), b.read(F32, sin, at)
            u, v = b.read(F32, x, first), b.read(F32, x, second)
            b.write(b.fsub(b.fmul(u, c), b.fmul(v, s)), x, first)
            b.write(b.fadd(b.fmul(u, s), b.fmul(v, c)), x, second)

    return emit
