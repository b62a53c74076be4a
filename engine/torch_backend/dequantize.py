"""The block formats of `engine/quant.py` in torch, on whatever device the bytes are. Bit for bit the same weights.

What the bytes mean is said there. Products and sums are separate operations here, so nothing is contracted to an fma.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from engine.quant import IQ4_VALUES, MXFP4_VALUES, TensorType, block_shape


@dataclass(frozen=True, slots=True)
class _Parts:
    """As `quant.Unpacked`: q [..., span], scales and mins [..., subs] or None, d and m [...] f32 or None."""

    q: Tensor
    d: Tensor
    scales: Tensor | None = None
    mins: Tensor | None = None
    m: Tensor | None = None


def _fields(packed: Tensor, bits: int, group: int) -> Tensor:
    """The `bits`-wide fields of packed bytes [..., b]: [..., b * 8 / bits] i16 (`quant._fields`)."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    groups = packed.unflatten(-1, (-1, 1, group))
    return ((groups >> shifts) & ((1 << bits) - 1)).flatten(-3).to(torch.int16)


def _half(blocks: Tensor, offset: int) -> Tensor:
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16)[..., 0].float()


def _signed(b: Tensor) -> Tensor:
    return b.contiguous().view(torch.int8).to(torch.int16)


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    return _fields(low, 4, 16) | (_fields(high, 1, 1) << 4)


def _scales_and_mins(packed: Tensor) -> tuple[Tensor, Tensor]:
    first = packed[..., :8]
    low, top = (first & 63).to(torch.int16), (first >> 6).to(torch.int16) << 4
    rest = _fields(packed[..., 8:], 4, 4) | top
    return torch.cat([low[..., :4], rest[..., :4]], -1), torch.cat([low[..., 4:], rest[..., 4:]], -1)


def _iq4(packed: Tensor) -> Tensor:
    return torch.tensor(IQ4_VALUES, dtype=torch.int16, device=packed.device)[_fields(packed, 4, 16).long()]


def _q2_k(b: Tensor) -> _Parts:
    scales, mins = (b[..., :16] & 15).to(torch.int16), (b[..., :16] >> 4).to(torch.int16)
    return _Parts(_fields(b[..., 16:80], 2, 32), _half(b, 80), scales, mins, _half(b, 82))


def _q3_k(b: Tensor) -> _Parts:
    scales = _fields(b[..., 96:104], 4, 8) | (_fields(b[..., 104:108], 2, 4) << 4)
    q = _fields(b[..., 32:96], 2, 32) | (_fields(b[..., :32], 1, 32) << 2)
    return _Parts(q - 4, _half(b, 108), scales - 32)


def _q4_k(b: Tensor) -> _Parts:
    return _Parts(_fields(b[..., 16:], 4, 32), _half(b, 0), *_scales_and_mins(b[..., 4:16]), _half(b, 2))


def _q5_k(b: Tensor) -> _Parts:
    q = _fields(b[..., 48:], 4, 32) | (_fields(b[..., 16:48], 1, 32) << 4)
    return _Parts(q, _half(b, 0), *_scales_and_mins(b[..., 4:16]), _half(b, 2))


def _q6_k(b: Tensor) -> _Parts:
    q = _fields(b[..., :128], 4, 64) | (_fields(b[..., 128:192], 2, 32) << 4)
    return _Parts(q - 32, _half(b, 208), _signed(b[..., 192:208]))


def _mxfp4(b: Tensor) -> _Parts:
    codes = _fields(b[..., 1:], 4, 16).long()
    exponent = b[..., 0].to(torch.int32)
    # 2**(exponent - 128): the first two are subnormal.
    bits = torch.where(exponent < 2, 0x200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return _Parts(torch.tensor(MXFP4_VALUES, dtype=torch.int16, device=b.device)[codes], bits.view(torch.float32))


def _iq4_xs(b: Tensor) -> _Parts:
    scales = _fields(b[..., 4:8], 4, 1) | (_fields(b[..., 2:4], 2, 1) << 4)
    return _Parts(_iq4(b[..., 8:]), _half(b, 0), scales - 32)


_PARTS: Final[Mapping[TensorType, Callable[[Tensor], _Parts]]] = MappingProxyType(
    {
        TensorType.Q4_0: lambda b: _Parts(_fields(b[..., 2:], 4, 16) - 8, _half(b, 0)),
        TensorType.Q4_1: lambda b: _Parts(_fields(b[..., 4:], 4, 16), _half(b, 0), m=_half(b, 2)),
        TensorType.Q5_0: lambda b: _Parts(_five_bits(b[..., 2:6], b[..., 6:]) - 16, _half(b, 0)),
        TensorType.Q5_1: lambda b: _Parts(_five_bits(b[..., 4:8], b[..., 8:]), _half(b, 0), m=_half(b, 2)),
        TensorType.Q8_0: lambda b: _Parts(_signed(b[..., 2:]), _half(b, 0)),
        TensorType.Q2_K: _q2_k,
        TensorType.Q3_K: _q3_k,
        TensorType.Q4_K: _q4_k,
        TensorType.Q5_K: _q5_k,
        TensorType.Q6_K: _q6_k,
        TensorType.IQ4_NL: lambda b: _Parts(_iq4(b[..., 2:]), _half(b, 0)),
        TensorType.IQ4_XS: _iq4_xs,
        TensorType.MXFP4: _mxfp4,
    }
)


def dequantize(type: TensorType, raw: Tensor) -> Tensor:
    """The weights [N, K] f32 of raw rows [N, row bytes] u8."""
    if type is TensorType.F32:
        return raw.view(torch.float32)
    if type is TensorType.F16:
        return raw.view(torch.float16).float()
    if type is TensorType.BF16:
        return raw.view(torch.bfloat16).float()
    parts = _PARTS[type](raw.unflatten(-1, (-1, block_shape(type)[1])))
    q = parts.q.float()
    if parts.scales is None:
        values = parts.d[..., None] * q
    else:
        subs = parts.scales.shape[-1]
        step = parts.d[..., None] * parts.scales.float()
        values = (step[..., None] * q.unflatten(-1, (subs, -1))).flatten(-2)
    if parts.m is not None and parts.mins is not None:
        low = parts.m[..., None] * parts.mins.float()
        values = (values.unflatten(-1, (low.shape[-1], -1)) - low[..., None]).flatten(-2)
    elif parts.m is not None:
        values = values + parts.m[..., None]
    return values.flatten(-2)
