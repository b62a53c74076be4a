"""How quantized weights lie in memory, and how a kernel takes them apart.

A group is 16 weight rows side by side. Its blocks are the file's blocks in the same precision, their bytes in an order
in which one 64-byte load brings the same four of each of the 16 rows (`permute` also moves bits within a block):

    group  = record 0, record 1, ...
    record = words of its blocks | meta of its blocks

A record holds one block, or two where one would not end at a cache line. The words (the packed small integers) start at
a line, the meta (scales and the like) follow behind them: a product reads its weights as one stream, which one row
needs to be as fast as the memory (Q4_1: 23 GB/s where the meta of a group lay together behind its words, 31 so). Both
consist of segments: a segment (offset, size, unit) is `size` bytes at `offset` of the file's block, cut into units of 4
or 2 bytes; unit u of row r lies at (u * 16 + r) * unit. See docs/kernels.md for a drawing.

In a block, one sub-block is a run of consecutive k with a scale of its own: 32 or 16 values of a K-quant, all 32 of
the simple formats. `vector` gives its weights, 64 unsigned bytes at a time: four consecutive k for each row.
Sub-blocks are taken `unroll` at a time, so that shifts that repeat are constants: a shift by a variable costs more.
The value of a weight is d * scale * (byte - bias) - dmin * min, or d * (byte - bias) + m for the simple formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from engine.kernels.ir import F16, I16, I32, I64, VB, VF, VI, Int, KernelBuilder, Value, fill, vector
from engine.kernels.target import Target
from engine.quant import IQ4_VALUES, MXFP4_VALUES, TensorType, block_shape, power_of_two

ROWS = 16
"""Weight rows of a group: the lanes of a vector."""

Segment = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Sub:
    """Sub-block number i * unroll + part of a block: i is known when the kernel runs, part when it is made."""

    i: Value
    unroll: int
    part: int

    def index(self, b: KernelBuilder) -> Value:
        return b.sum(b.times(self.i, self.unroll), self.part)


Vector = Callable[[KernelBuilder, "Group", Sub, int], Value]
Factor = Callable[[KernelBuilder, "Group", Sub], Value]


@dataclass(frozen=True, slots=True)
class Group:
    """Addresses of one group's block while it is taken apart."""

    words: Value
    meta: Value
    scratch: Value
    """Memory for four vectors that `prepare` fills once a block."""
    target: Target


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """One tensor type as the kernels see it."""

    type: TensorType
    words: tuple[Segment, ...]
    meta: tuple[Segment, ...]
    sub_size: int = 32
    vector: Vector | None = None
    """(b, group, sub, q) -> 64 bytes: values 4 q .. 4 q + 3 of a sub-block. None: the weights are floats."""
    unroll: int = 1
    prepare: Callable[[KernelBuilder, Group], None] = lambda b, g: None
    scale: Factor | None = None
    """Scale of a sub-block as <16 x i32>; None: the format has one scale a block."""
    minimum: Factor | None = None
    """Min of a sub-block as <16 x i32>, not negative."""
    scale_at: int = 0
    """Offset in the meta of the f16 d (2-byte units) or of the pair d, dmin or d, m (4-byte units)."""
    scale_is_bf16: bool = False
    """d is the upper half of an f32: a power of two that f16 need not reach."""
    has_second: bool = False
    """Whether d shares its word with a second f16: dmin or m."""
    bias: int = 0
    """What bytes are above their weights: 0 or a power of two."""
    bits: int = 4
    """Of a weight byte, unless it is `wide`."""
    wide: bool = False
    """Whether weight bytes go beyond 127. Then bias is 128 and their signed form is byte - 128."""
    light: bool = False
    """Whether vectors are taken from words by so few instructions that each tile of several rows does it anew, two
    sub-blocks at a time, which lie in the same words (`panel.py`)."""
    panel_rows: int = 40
    """From how many activation rows on it is cheaper to unpack weights into a panel (`panel.py`), measured on Zen 5."""
    asks_twice: bool = False
    """Whether a single row prefetches each line twice: Q6_K and Q8_0 have 93 % of the bandwidth then, and 87 if not;
    of Q4_K, Q4_1 and Q5_0 it is the other way round (`matmul.py`)."""
    permute: Callable[[NDArray[np.uint8]], NDArray[np.uint8]] | None = field(default=None, compare=False)
    """Reorders bits inside the blocks before they are laid out; a block may become larger."""

    @property
    def span(self) -> int:
        """Values of a block; floats are taken 32 at a time."""
        return 32 if self.vector is None else block_shape(self.type)[0]

    @property
    def block_bytes(self) -> int:
        """Bytes of `span` values in the file."""
        values, size = block_shape(self.type)
        return size * (self.span // values)

    @property
    def largest(self) -> int:
        """No weight byte is larger, nor in its signed form further from 0."""
        return 128 if self.wide else (1 << self.bits) - 1

    @property
    def loudest(self) -> int:
        """Of the sums of the magnitudes of 16 activations: up to this one, the sum of a sub-block fits 16 bits."""
        weight = max(self.bias, self.largest - self.bias)
        return 32767 // (weight * self.sub_size // 16)

    @property
    def num_subs(self) -> int:
        return self.span // self.sub_size

    def vectors(self, b: KernelBuilder, group: Group, sub: Sub) -> list[Value]:
        """All weights of a sub-block."""
        assert self.vector is not None
        return [self.vector(b, group, sub, q) for q in range(self.sub_size // 4)]

    def fixed(self, index: int) -> Sub:
        """A sub-block whose number is known when the kernel is made."""
        return Sub(I64(index // self.unroll), self.unroll, index % self.unroll)

    @property
    def words_bytes(self) -> int:
        return ROWS * sum(size for _, size, _ in self.words)

    @property
    def meta_bytes(self) -> int:
        return ROWS * sum(size for _, size, _ in self.meta)

    @property
    def record_blocks(self) -> int:
        """Blocks of a record; the last record of a group may hold fewer."""
        return 2 if (self.words_bytes + self.meta_bytes) % 64 else 1

    def place(self, b: KernelBuilder, group: Value, num_blocks: Value, s: Value) -> tuple[Value, Value]:
        """Addresses of the words and of the meta of block s of a group."""
        words, meta = self.words_bytes, self.meta_bytes
        if self.record_blocks == 1:
            record = b.at(group, b.times(s, words + meta))
            return record, b.at(record, words)
        odd = b.and_(s, I64(1))
        record = b.at(group, b.times(b.sub(s, odd), words + meta))
        whole = b.icmp_signed("<", b.or_(s, I64(1)), num_blocks)
        first_meta = b.select(whole, I64(2 * words), I64(words))
        return b.at(record, b.times(odd, words)), b.at(record, first_meta, b.times(odd, meta))

    def group_bytes(self, num_blocks: int) -> int:
        """Bytes of one group, rounded up to a cache line so that the next one starts at a line too."""
        return -(-num_blocks * (self.words_bytes + self.meta_bytes) // 64) * 64


def lay_out(fmt: WeightFormat, raw: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Write rows of blocks as the file has them into groups.

    raw: uint8 [N, num_blocks * block_bytes]; out: uint8 [ceil(N / 16), group_bytes]. Missing rows are zeros.
    """
    num_blocks = raw.shape[1] // fmt.block_bytes
    groups = out.shape[0]
    if groups * ROWS != raw.shape[0]:
        raw = np.concatenate([raw, np.zeros((groups * ROWS - raw.shape[0], raw.shape[1]), np.uint8)])
    blocks = raw.reshape(groups, ROWS, num_blocks, fmt.block_bytes)
    if fmt.permute is not None:
        blocks = fmt.permute(blocks)
    whole = num_blocks - num_blocks % fmt.record_blocks
    end = whole * (fmt.words_bytes + fmt.meta_bytes)
    _fill_records(fmt, blocks[:, :, :whole], out[:, :end], fmt.record_blocks)
    _fill_records(fmt, blocks[:, :, whole:], out[:, end : end + fmt.words_bytes + fmt.meta_bytes], 1)


def _fill_records(fmt: WeightFormat, blocks: NDArray[np.uint8], out: NDArray[np.uint8], per_record: int) -> None:
    """Records of `per_record` blocks each. blocks: uint8 [groups, 16, N, block_bytes]; out: uint8 [groups, bytes]."""
    groups, _, num_blocks, _ = blocks.shape
    if num_blocks == 0:
        return
    records = num_blocks // per_record
    blocks = blocks.reshape(groups, ROWS, records, per_record, blocks.shape[-1])
    out = out.reshape(groups, records, per_record * (fmt.words_bytes + fmt.meta_bytes))
    start = 0
    for segments in (fmt.words, fmt.meta):
        size = ROWS * sum(s for _, s, _ in segments)
        area = out[:, :, start : start + per_record * size].reshape(groups, records, per_record, size)
        at = 0
        for offset, length, unit in segments:
            shape = (groups, ROWS, records, per_record, length // unit, unit)
            target = area[..., at : at + ROWS * length].reshape(groups, records, per_record, length // unit, ROWS, unit)
            target[...] = blocks[..., offset : offset + length].reshape(shape).transpose(0, 2, 3, 4, 1, 5)
            at += ROWS * length
        start += per_record * size


# ---------------------------------------------------------------- pieces of `vector`
def _shift(b: KernelBuilder, x: Value, amount: Int) -> Value:
    """Logical right shift of each 32-bit lane by a count that is a constant or an i64."""
    if isinstance(amount, int):
        return b.lshr(x, fill(VI, amount)) if amount else x
    return b.lshr(x, b.splat(b.trunc(amount, I32)))


def _and(b: KernelBuilder, x: Value, byte: int) -> Value:
    """Mask each byte of 32-bit lanes."""
    return b.and_(x, fill(VI, byte * 0x01010101))


def _bits(b: KernelBuilder, word: Value, shift: Int, mask: int, up: int = 0) -> Value:
    """((byte >> shift) & mask) << up in each byte."""
    x = _and(b, _shift(b, word, shift), mask)
    return b.shl(x, fill(VI, up)) if up else x


def _word(b: KernelBuilder, g: Group, index: Int, base: int = 0) -> Value:
    """A word of a block, of all 16 rows, in a segment that starts `base` words in."""
    return b.read(VI, g.words, b.times(index, 64), 64 * base)


_IQ4_BYTES = [v + 128 for v in IQ4_VALUES]
_MXFP4_BYTES = [v + 16 for v in MXFP4_VALUES]


def _lookup(b: KernelBuilder, table: list[int], codes: Value, target: Target) -> Value:
    """The bytes of a table that 64 codes 0..15 stand for."""
    if target.dot == "vnni":
        return b.intrinsic("llvm.x86.avx512.pshuf.b.512", VB, ir.Constant(VB, table * 4), codes)
    width = 32 if target.dot == "maddubs" else 16
    name = "llvm.x86.avx2.pshuf.b" if width == 32 else "llvm.aarch64.neon.tbl1.v16i8"
    small = vector(VB.element, width)
    parts = [
        b.intrinsic(name, small, ir.Constant(small, table * (width // 16)), b.pick(codes, codes, range(o, o + width)))
        for o in range(0, 64, width)
    ]
    while len(parts) > 1:
        width *= 2
        parts = [b.pick(x, y, range(width)) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


# ---------------------------------------------------------------- the simple formats: 32 values, one scale
def _nibble(b: KernelBuilder, g: Group, q: int, first: Int = 0) -> Value:
    """Of 32 values in four words: byte j holds value j in its low and value j + 16 in its high bits."""
    return _bits(b, _word(b, g, b.sum(first, q % 4)), 4 * (q // 4), 15)


def _q4_0(b: KernelBuilder, g: Group, sub: Sub, q: int) -> Value:
    return b.bitcast(_nibble(b, g, q), VB)


def _q5_0(b: KernelBuilder, g: Group, sub: Sub, q: int) -> Value:
    # The fifth bits come first in the meta; `_spread_fifth_bits` put bit 4w + j at bit w of byte j.
    return b.bitcast(b.or_(_nibble(b, g, q), _bits(b, b.read(VI, g.meta), q, 1, 4)), VB)


def _spread_fifth_bits(offset: int) -> Callable[[NDArray[np.uint8]], NDArray[np.uint8]]:
    def permute(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
        out = blocks.copy()
        bits = np.unpackbits(blocks[..., offset : offset + 4], axis=-1, bitorder="little")
        bits = bits.reshape(*bits.shape[:-1], 8, 4).swapaxes(-1, -2)
        out[..., offset : offset + 4] = np.packbits(bits.reshape(*bits.shape[:-2], 32), axis=-1, bitorder="little")
        return out

    return permute


def _q8_0(b: KernelBuilder, g: Group, sub: Sub, q: int) -> Value:
    """Signed bytes in the file; + 128 makes them unsigned."""
    return b.bitcast(b.xor(_word(b, g, q), fill(VI, -0x7F7F7F80)), VB)


def _iq4_nl(b: KernelBuilder, g: Group, sub: Sub, q: int) -> Value:
    return _lookup(b, _IQ4_BYTES, _q4_0(b, g, sub, q), g.target)


def _mxfp4(b: KernelBuilder, g: Group, sub: Sub, q: int) -> Value:
    return _lookup(b, _MXFP4_BYTES, _q4_0(b, g, sub, q), g.target)


def _widen_power_of_two(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The scale of MXFP4, one byte, in two."""
    scales = power_of_two(blocks[..., :1]).astype("<u2").view(np.uint8)
    return np.concatenate([scales, blocks[..., 1:]], axis=-1)


# ---------------------------------------------------------------- the K-quants: 256 values in sub-blocks
def _byte_of(b: KernelBuilder, base: Value, sub: Sub, *offset: int) -> Value:
    """Byte number `sub` of the four-byte words that start at base + offset, as <16 x i32>."""
    if sub.unroll % 4 == 0:
        word = b.read(VI, base, b.times(sub.i, 16 * sub.unroll), 64 * (sub.part // 4), *offset)
        return b.and_(_shift(b, word, 8 * (sub.part % 4)), fill(VI, 255))
    index = sub.index(b)
    word = b.read(VI, base, b.times(b.lshr(index, I64(2)), 64), *offset)
    return b.and_(_shift(b, word, b.times(b.and_(index, I64(3)), 8)), fill(VI, 255))


def _q4_k(b: KernelBuilder, g: Group, sub: Sub, q: int) -> Value:
    """Word q of pair `sub` / 2: in the low bits when `sub` is even, in the high bits when it is odd."""
    word = _word(b, g, b.sum(b.times(sub.i, 4 * sub.unroll), 8 * (sub.part // 2) + q))
    return b.bitcast(_bits(b, word, 4 * (sub.part % 2), 15), VB)


def _q5_k(b: KernelBuilder, g: Group, sub: Sub, q: int) -> Value:
    """As Q4_K; bit `sub` of byte j of the second segment is the fifth bit of value j."""
    bit = sub.part if sub.unroll == 8 else sub.index(b)
    low = b.bitcast(_q4_k(b, g, sub, q), VI)
    return b.bitcast(b.or_(low, _bits(b, _word(b, g, q, base=32), bit, 1, 4)), VB)


def _k_scales(b: KernelBuilder, g: Group) -> None:
    """Unpack 8 scales and 8 mins of 6 bits from 12 bytes: scratch = scales 0-3, 4-7, mins 0-3, 4-7."""
    first, second, third = (b.read(VI, g.meta, 64 * w) for w in (1, 2, 3))
    unpacked = (
        _bits(b, first, 0, 63),
        b.or_(_bits(b, third, 0, 15), b.and_(_shift(b, first, 2), fill(VI, 0x30303030))),
        _bits(b, second, 0, 63),
        b.or_(_bits(b, third, 4, 15), b.and_(_shift(b, second, 2), fill(VI, 0x30303030))),
    )
    for n, x in enumerate(unpacked):
        b.write(x, g.scratch, 64 * n)


def _k_scale(b: KernelBuilder, g: Group, sub: Sub) -> Value:
    return _byte_of(b, g.scratch, sub)


def _k_min(b: KernelBuilder, g: Group, sub: Sub) -> Value:
    return _byte_of(b, g.scratch, sub, 128)


def _sixteens(b: KernelBuilder, sub: Sub) -> tuple[Value, Int, int]:
    """Sub-block 8 n + 2 j + s of 16 values: half n of the block, bit pair j, 16-value half s."""
    if sub.unroll == 8:
        return sub.i, sub.part // 2, sub.part % 2
    assert sub.unroll == 2
    return b.lshr(sub.i, I64(2)), b.and_(sub.i, I64(3)), sub.part


def _q6_k(b: KernelBuilder, g: Group, sub: Sub, q: int) -> Value:
    """Low bits: nibble j / 2 of word 16 n + 8 (j & 1) + 4 s + q; high bits: pair j of word 8 n + 4 s + q."""
    n, j, s = _sixteens(b, sub)
    high = _word(b, g, b.sum(b.times(n, 8), 4 * s + q), base=32)
    if isinstance(j, int):
        odd, nibble = j & 1, j // 2 * 4
        high = _bits(b, high, 2 * j, 3, 4)
    else:
        odd, nibble = b.and_(j, I64(1)), b.times(b.lshr(j, I64(1)), 4)
        # One rotation brings pair j to bits 4 and 5 of each byte, whichever way it has to go.
        turn = b.splat(b.trunc(b.sub(b.times(j, 2), I64(4)), I32))
        high = _and(b, b.intrinsic("llvm.fshr.v16i32", VI, high, high, turn), 0x30)
    low = _word(b, g, b.sum(b.times(n, 16), b.times(odd, 8), 4 * s + q))
    return b.bitcast(b.or_(_bits(b, low, nibble, 15), high), VB)


def _q6_k_scale(b: KernelBuilder, g: Group, sub: Sub) -> Value:
    """Signed bytes."""
    return b.ashr(b.shl(_byte_of(b, g.meta, sub), fill(VI, 24)), fill(VI, 24))


def _q2_k(b: KernelBuilder, g: Group, sub: Sub, q: int) -> Value:
    n, j, s = _sixteens(b, sub)
    return b.bitcast(_bits(b, _word(b, g, b.sum(b.times(n, 8), 4 * s + q)), b.times(j, 2), 3), VB)


def _q2_k_scale(b: KernelBuilder, g: Group, sub: Sub) -> Value:
    return b.and_(_byte_of(b, g.meta, sub, 64), fill(VI, 15))


def _q2_k_min(b: KernelBuilder, g: Group, sub: Sub) -> Value:
    return b.lshr(_byte_of(b, g.meta, sub, 64), fill(VI, 4))


def _q3_k(b: KernelBuilder, g: Group, sub: Sub, q: int) -> Value:
    """Two low bits as Q2_K; bit 4 n + j of byte l of the second segment is the third."""
    n, j, s = _sixteens(b, sub)
    high = _bits(b, _word(b, g, 4 * s + q, base=16), b.sum(b.times(n, 4), j), 1, 2)
    return b.bitcast(b.or_(b.bitcast(_q2_k(b, g, sub, q), VI), high), VB)


def _q3_k_scales(b: KernelBuilder, g: Group) -> None:
    """16 scales of 6 bits from 12 bytes: four low bits in the first two words, two high bits in the third."""
    words = [b.read(VI, g.meta, 64 * w) for w in range(3)]
    for q in range(4):
        low = _bits(b, words[q & 1], 4 * (q >> 1), 15)
        b.write(b.or_(low, _bits(b, words[2], 2 * q, 3, 4)), g.scratch, 64 * q)


def _q3_k_scale(b: KernelBuilder, g: Group, sub: Sub) -> Value:
    return b.sub(_byte_of(b, g.scratch, sub), fill(VI, 32))


def _iq4_xs(b: KernelBuilder, g: Group, sub: Sub, q: int) -> Value:
    codes = _nibble(b, g, q, b.times(sub.index(b), 4))
    return _lookup(b, _IQ4_BYTES, b.bitcast(codes, VB), g.target)


def _iq4_xs_scale(b: KernelBuilder, g: Group, sub: Sub) -> Value:
    """Four low bits from a word, two high bits from the 16 that follow d."""
    four, two = b.times(sub.index(b), 4), b.times(sub.index(b), 2)
    low = b.and_(_shift(b, b.read(VI, g.meta, 64), four), fill(VI, 15))
    high = b.zext(b.read(vector(I16, 16), g.meta, 32), VI)
    high = b.shl(b.and_(_shift(b, high, two), fill(VI, 3)), fill(VI, 4))
    return b.sub(b.or_(low, high), fill(VI, 32))


def pairs_of(b: KernelBuilder, g: Group, fmt: WeightFormat, factor: Factor) -> list[Value]:
    """A block's scales or mins as i16, two sub-blocks a lane: what is multiplied with pairs of sums of activations."""
    pairs = []
    for i in range(0, fmt.num_subs, 2):
        low, high = (factor(b, g, fmt.fixed(n)) for n in (i, i + 1))
        pairs.append(b.or_(b.and_(low, fill(VI, 0xFFFF)), b.shl(high, fill(VI, 16))))
    return pairs


def block_scales(b: KernelBuilder, fmt: WeightFormat, meta: Value) -> tuple[Value, Value | None]:
    """d and, where the format has one, dmin or m: <16 x f32>."""
    if fmt.scale_is_bf16:
        upper = b.zext(b.read(vector(I16, 16), meta, fmt.scale_at), VI)
        return b.bitcast(b.shl(upper, fill(VI, 16)), VF), None
    if not fmt.has_second:
        return b.halves(meta, fmt.scale_at), None
    word = b.read(VI, meta, fmt.scale_at)
    short, half = vector(I16, 16), vector(F16, 16)
    d = b.fpext(b.bitcast(b.trunc(word, short), half), VF)
    return d, b.fpext(b.bitcast(b.trunc(b.lshr(word, fill(VI, 16)), short), half), VF)


_T = TensorType
FORMATS: Mapping[TensorType, WeightFormat] = MappingProxyType(
    {
        f.type: f
        for f in (
            WeightFormat(type=_T.F32, words=((0, 128, 4),), meta=()),
            WeightFormat(type=_T.F16, words=((0, 64, 2),), meta=()),
            WeightFormat(type=_T.BF16, words=((0, 64, 2),), meta=()),
            WeightFormat(type=_T.Q4_0, words=((2, 16, 4),), meta=((0, 2, 2),), vector=_q4_0, bias=8, panel_rows=44),
            WeightFormat(
                type=_T.Q4_1, words=((4, 16, 4),), meta=((0, 4, 4),), vector=_q4_0, has_second=True, panel_rows=44
            ),
            WeightFormat(
                type=_T.Q5_0, bits=5, words=((6, 16, 4),), meta=((2, 4, 4), (0, 2, 2)), vector=_q5_0, bias=16,
                scale_at=64, permute=_spread_fifth_bits(2),
            ),
            WeightFormat(
                type=_T.Q5_1, bits=5, words=((8, 16, 4),), meta=((4, 4, 4), (0, 4, 4)), vector=_q5_0,
                has_second=True, scale_at=64, permute=_spread_fifth_bits(4),
            ),
            WeightFormat(
                type=_T.Q8_0, words=((2, 32, 4),), meta=((0, 2, 2),), vector=_q8_0, bias=128, wide=True,
                panel_rows=44, asks_twice=True,
            ),
            WeightFormat(
                type=_T.IQ4_NL, words=((2, 16, 4),), meta=((0, 2, 2),), vector=_iq4_nl, bias=128, wide=True,
                panel_rows=44,
            ),
            WeightFormat(
                type=_T.MXFP4, bits=5, words=((2, 16, 4),), meta=((0, 2, 2),), vector=_mxfp4, bias=16,
                scale_is_bf16=True, permute=_widen_power_of_two,
            ),
            WeightFormat(
                type=_T.Q2_K, bits=2, words=((16, 64, 4),), meta=((80, 4, 4), (0, 16, 4)), sub_size=16, vector=_q2_k,
                unroll=2, scale=_q2_k_scale, minimum=_q2_k_min, has_second=True, panel_rows=10,
            ),
            WeightFormat(
                type=_T.Q3_K, bits=3, words=((32, 64, 4), (0, 32, 4)), meta=((96, 12, 4), (108, 2, 2)), sub_size=16,
                vector=_q3_k, unroll=2, prepare=_q3_k_scales, scale=_q3_k_scale, scale_at=192, bias=4,
                panel_rows=5,
            ),
            WeightFormat(
                type=_T.Q4_K, words=((16, 128, 4),), meta=((0, 4, 4), (4, 12, 4)), vector=_q4_k, unroll=2,
                prepare=_k_scales, scale=_k_scale, minimum=_k_min, has_second=True, light=True, panel_rows=5,
            ),
            WeightFormat(
                type=_T.Q5_K, bits=5, words=((48, 128, 4), (16, 32, 4)), meta=((0, 4, 4), (4, 12, 4)), vector=_q5_k,
                unroll=2, prepare=_k_scales, scale=_k_scale, minimum=_k_min, has_second=True, panel_rows=8,
            ),
            WeightFormat(
                type=_T.Q6_K, bits=6, words=((0, 128, 4), (128, 64, 4)), meta=((192, 16, 4), (208, 2, 2)), sub_size=16,
                vector=_q6_k, unroll=2, scale=_q6_k_scale, scale_at=256, bias=32, panel_rows=5,
                asks_twice=True,
            ),
            WeightFormat(
                type=_T.IQ4_XS, words=((8, 128, 4),), meta=((0, 2, 2), (2, 2, 2), (4, 4, 4)), vector=_iq4_xs,
                scale=_iq4_xs_scale, bias=128, wide=True, panel_rows=24,
            ),
        )
    }
)  # fmt: skip
"""All tensor types the kernels multiply."""
