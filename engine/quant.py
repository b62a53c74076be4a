"""The block formats of GGUF weights, as plain NumPy: what each byte means.

A row of K weights is K / span blocks; a block is `span` small integers and the scales that give them back their
size. `unpack` returns those parts as they are, `dequantize` the weights. Both are definitions: the compiled kernels
are compared with them bit by bit. Source of the layouts: ggml's ggml-common.h and ggml-quants.c (block_q4_0 ...).

One layout idea covers every format: a stretch of packed bytes is cut into groups, and inside a group the lowest bits
of all its bytes come first, then the next lowest bits of all of them, and so on (`_fields`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int16]
Floats = NDArray[np.float32]


class TensorType(IntEnum):
    """The tensor types this engine runs, with ggml's numbers and names."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30
    MXFP4 = 39


_BLOCK_SHAPES: Final[Mapping[TensorType, tuple[int, int]]] = MappingProxyType(
    {
        TensorType.F32: (1, 4),
        TensorType.F16: (1, 2),
        TensorType.BF16: (1, 2),
        TensorType.Q4_0: (32, 2 + 16),
        TensorType.Q4_1: (32, 2 + 2 + 16),
        TensorType.Q5_0: (32, 2 + 4 + 16),
        TensorType.Q5_1: (32, 2 + 2 + 4 + 16),
        TensorType.Q8_0: (32, 2 + 32),
        TensorType.Q2_K: (256, 16 + 64 + 2 + 2),
        TensorType.Q3_K: (256, 32 + 64 + 12 + 2),
        TensorType.Q4_K: (256, 2 + 2 + 12 + 128),
        TensorType.Q5_K: (256, 2 + 2 + 12 + 32 + 128),
        TensorType.Q6_K: (256, 128 + 64 + 16 + 2),
        TensorType.IQ4_NL: (32, 2 + 16),
        TensorType.IQ4_XS: (256, 2 + 2 + 4 + 128),
        TensorType.MXFP4: (32, 1 + 16),
    }
)

IQ4_VALUES: Final[tuple[int, ...]] = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the 16 codes of IQ4_NL and IQ4_XS stand for (kvalues_iq4nl of ggml)."""
MXFP4_VALUES: Final[tuple[int, ...]] = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice what the 16 codes of MXFP4 stand for: floats of 4 bits, E2M1 (Open Compute Project, Microscaling Formats)."""


def block_shape(type: TensorType) -> tuple[int, int]:
    """(values per block, bytes per block)."""
    return _BLOCK_SHAPES[type]


def row_bytes(type: TensorType, num_values: int) -> int:
    """Bytes of a row of `num_values` weights, which must be whole blocks."""
    span, size = _BLOCK_SHAPES[type]
    assert num_values % span == 0, f"{num_values} values are not whole blocks of {type.name}"
    return num_values // span * size


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """The parts of n blocks, each of `span` values in `subs` equal runs that share a scale.

    A weight of run s is:

        d * scales[s] * q                      mins and m None
        d * scales[s] * q - m * mins[s]        Q2_K, Q4_K, Q5_K (m is dmin)
        d * q + m                              Q4_1, Q5_1 (scales 1, mins None)

    The products are exact in f32: d and m have 11 significant bits, scales * q at most 12. So a weight is the exact
    value rounded once, in whatever order the products are made and with or without fma.
    """

    q: Ints
    """[..., n, span]: offset already applied, code already looked up."""
    scales: Ints
    """[..., n, subs]; 1 for formats without scales of their own."""
    mins: Ints | None
    """[..., n, subs]."""
    d: Floats
    """[..., n]."""
    m: Floats | None
    """[..., n]: dmin of the K formats, the minimum of Q4_1 and Q5_1."""


def _fields(packed: Bytes, bits: int, group: int) -> Ints:
    """The `bits`-wide fields of packed bytes [..., b]: [..., b * 8 / bits].

    Every `group` bytes give, lowest bits first, runs of `group` fields.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    *outer, size = packed.shape
    groups = packed.reshape(*outer, size // group, 1, group)
    fields = (groups >> shifts) & np.uint8((1 << bits) - 1)
    return fields.reshape(*outer, size * 8 // bits).astype(np.int16)


def _half(blocks: Bytes, offset: int) -> Floats:
    """The float16 at byte `offset` of each block, widened (exact)."""
    return np.ascontiguousarray(blocks[..., offset : offset + 2]).view("<f2")[..., 0].astype(np.float32)


def _simple(q: Ints, d: Floats, m: Floats | None = None) -> Unpacked:
    return Unpacked(q=q, scales=np.ones((*d.shape, 1), np.int16), mins=None, d=d, m=m)


def _q4_0(b: Bytes) -> Unpacked:
    """d, 16 bytes of 4 bits: q in -8..7."""
    return _simple(_fields(b[..., 2:], 4, 16) - np.int16(8), _half(b, 0))


def _q4_1(b: Bytes) -> Unpacked:
    """d, m, 16 bytes of 4 bits: q in 0..15."""
    return _simple(_fields(b[..., 4:], 4, 16), _half(b, 0), _half(b, 2))


def _five_bits(high: Bytes, low: Bytes) -> Ints:
    """32 values 0..31: the fifth bits in order in 4 bytes, the rest as in Q4_0."""
    return _fields(low, 4, 16) | (_fields(high, 1, 1) << np.int16(4))


def _q5_0(b: Bytes) -> Unpacked:
    """d, 4 bytes of fifth bits, 16 bytes of 4 bits: q in -16..15."""
    return _simple(_five_bits(b[..., 2:6], b[..., 6:]) - np.int16(16), _half(b, 0))


def _q5_1(b: Bytes) -> Unpacked:
    """d, m, 4 bytes of fifth bits, 16 bytes of 4 bits: q in 0..31."""
    return _simple(_five_bits(b[..., 4:8], b[..., 8:]), _half(b, 0), _half(b, 2))


def _q8_0(b: Bytes) -> Unpacked:
    """d, 32 int8."""
    return _simple(b[..., 2:].view(np.int8).astype(np.int16), _half(b, 0))


def _q2_k(b: Bytes) -> Unpacked:
    """16 bytes (scale low, min high, 4 bits each), 64 bytes of 2 bits, d, dmin: 16 runs of 16, q in 0..3."""
    return Unpacked(
        q=_fields(b[..., 16:80], 2, 32),
        scales=(b[..., :16] & np.uint8(15)).astype(np.int16),
        mins=(b[..., :16] >> np.uint8(4)).astype(np.int16),
        d=_half(b, 80),
        m=_half(b, 82),
    )


def _q3_k(b: Bytes) -> Unpacked:
    """32 bytes of third bits, 64 bytes of 2 bits, 12 bytes of 6-bit scales, d: 16 runs of 16, q in -4..3.

    The 16 scales, less 32: low 4 bits in the first 8 bytes, high 2 bits in the last 4.
    """
    scales = _fields(b[..., 96:104], 4, 8) | (_fields(b[..., 104:108], 2, 4) << np.int16(4))
    return Unpacked(
        q=(_fields(b[..., 32:96], 2, 32) | (_fields(b[..., :32], 1, 32) << np.int16(2))) - np.int16(4),
        scales=scales - np.int16(32),
        mins=None,
        d=_half(b, 108),
        m=None,
    )


def _scales_and_mins(packed: Bytes) -> tuple[Ints, Ints]:
    """The 8 scales and 8 mins, 6 bits each, of the 12 bytes in Q4_K and Q5_K.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 mins 0-3 in their low 6 bits; their top 2 bits belong to scales 4-7 and
    mins 4-7, whose low 4 bits are the low and high halves of bytes 8-11.
    """
    first = packed[..., :8]
    low, top = (first & np.uint8(63)).astype(np.int16), (first >> np.uint8(6)).astype(np.int16) << np.int16(4)
    rest = _fields(packed[..., 8:], 4, 4) | top
    scales = np.concatenate([low[..., :4], rest[..., :4]], axis=-1)
    mins = np.concatenate([low[..., 4:], rest[..., 4:]], axis=-1)
    return scales, mins


def _q4_k(b: Bytes) -> Unpacked:
    """d, dmin, 12 bytes of scales and mins, 128 bytes of 4 bits: 8 runs of 32, q in 0..15."""
    scales, mins = _scales_and_mins(b[..., 4:16])
    return Unpacked(q=_fields(b[..., 16:], 4, 32), scales=scales, mins=mins, d=_half(b, 0), m=_half(b, 2))


def _q5_k(b: Bytes) -> Unpacked:
    """d, dmin, 12 bytes of scales and mins, 32 bytes of fifth bits, 128 bytes of 4 bits: 8 runs of 32, q in 0..31."""
    scales, mins = _scales_and_mins(b[..., 4:16])
    q = _fields(b[..., 48:], 4, 32) | (_fields(b[..., 16:48], 1, 32) << np.int16(4))
    return Unpacked(q=q, scales=scales, mins=mins, d=_half(b, 0), m=_half(b, 2))


def _q6_k(b: Bytes) -> Unpacked:
    """128 bytes of 4 bits, 64 bytes of 2 more bits, 16 int8 scales, d: 16 runs of 16, q in -32..31."""
    q = _fields(b[..., :128], 4, 64) | (_fields(b[..., 128:192], 2, 32) << np.int16(4))
    scales = np.ascontiguousarray(b[..., 192:208]).view(np.int8).astype(np.int16)
    return Unpacked(q=q - np.int16(32), scales=scales, mins=None, d=_half(b, 208), m=None)


def _iq4_codes(packed: Bytes) -> Ints:
    codebook: Ints = np.array(IQ4_VALUES, np.int16)
    return codebook[_fields(packed, 4, 16)]


def _iq4_nl(b: Bytes) -> Unpacked:
    """d, 16 bytes of 4-bit codes."""
    return _simple(_iq4_codes(b[..., 2:]), _half(b, 0))


def power_of_two(codes: Bytes) -> NDArray[np.uint16]:
    """2**(e - 128) for scales e of MXFP4 (E8M0, half of it) as the upper half of an f32: exact."""
    wide = codes.astype(np.uint16)
    subnormal = np.uint16(0x20) << np.minimum(wide, 1)
    scales: NDArray[np.uint16] = np.where(wide < 2, subnormal, (wide - np.uint16(1)) << np.uint16(7))
    return scales


def _mxfp4(b: Bytes) -> Unpacked:
    """A power of two, 16 bytes of 4-bit codes."""
    codebook: Ints = np.array(MXFP4_VALUES, np.int16)
    scale = (power_of_two(b[..., 0]).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _simple(codebook[_fields(b[..., 1:], 4, 16)], scale)


def _iq4_xs(b: Bytes) -> Unpacked:
    """d, 2 bytes of high scale bits, 4 bytes of low ones, 128 bytes of 4-bit codes: 8 runs of 32, scales -32..31."""
    scales = _fields(b[..., 4:8], 4, 1) | (_fields(b[..., 2:4], 2, 1) << np.int16(4))
    return Unpacked(q=_iq4_codes(b[..., 8:]), scales=scales - np.int16(32), mins=None, d=_half(b, 0), m=None)


_UNPACKERS: Final[Mapping[TensorType, Callable[[Bytes], Unpacked]]] = MappingProxyType(
    {
        TensorType.Q4_0: _q4_0,
        TensorType.Q4_1: _q4_1,
        TensorType.Q5_0: _q5_0,
        TensorType.Q5_1: _q5_1,
        TensorType.Q8_0: _q8_0,
        TensorType.Q2_K: _q2_k,
        TensorType.Q3_K: _q3_k,
        TensorType.Q4_K: _q4_k,
        TensorType.Q5_K: _q5_k,
        TensorType.Q6_K: _q6_k,
        TensorType.IQ4_NL: _iq4_nl,
        TensorType.IQ4_XS: _iq4_xs,
        TensorType.MXFP4: _mxfp4,
    }
)


@np.errstate(over="ignore", invalid="ignore")  # a damaged file's infinities and NaNs are values like others here
def unpack(type: TensorType, raw: Bytes) -> Unpacked:
    """The parts of the blocks in raw uint8 [..., n * bytes per block]; not for F32, F16 and BF16."""
    assert type in _UNPACKERS, f"{type.name} has no blocks"
    assert raw.dtype == np.uint8
    size = _BLOCK_SHAPES[type][1]
    assert raw.shape[-1] % size == 0, f"{raw.shape[-1]} bytes are not whole blocks of {type.name}"
    blocks = np.ascontiguousarray(raw).reshape(*raw.shape[:-1], raw.shape[-1] // size, size)
    return _UNPACKERS[type](blocks)


def _dequantize_floats(type: TensorType, raw: Bytes) -> Floats:
    """F32 as it is, F16 and BF16 widened: exact."""
    raw = np.ascontiguousarray(raw)
    if type is TensorType.BF16:
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    stored: NDArray[Any] = raw.view("<f4" if type is TensorType.F32 else "<f2")
    return stored.astype(np.float32)


@np.errstate(over="ignore", invalid="ignore")
def dequantize(type: TensorType, raw: Bytes) -> Floats:
    """The weights [..., K] f32 of raw uint8 [..., row_bytes(type, K)]; the formulas are at `Unpacked`."""
    assert raw.dtype == np.uint8
    if type not in _UNPACKERS:
        return _dequantize_floats(type, raw)
    parts = unpack(type, raw)
    span, subs = parts.q.shape[-1], parts.scales.shape[-1]
    runs = parts.q.reshape(*parts.scales.shape, span // subs).astype(np.float32)
    step = parts.d[..., None] * parts.scales.astype(np.float32)
    values: Floats = step[..., None] * runs
    if parts.m is not None and parts.mins is not None:
        values -= (parts.m[..., None] * parts.mins.astype(np.float32))[..., None]
    elif parts.m is not None:
        values += parts.m[..., None, None]
    return values.reshape(*raw.shape[:-1], parts.d.shape[-1] * span)
