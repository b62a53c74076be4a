"""Quantized activations, and matrix products with the blocks of a file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.kernels.rows import TINY
from engine.kernels.twins.arithmetic import Floats, fma32
from engine.quant import TensorType, block_shape, dequantize, unpack


@dataclass(frozen=True, slots=True)
class Activations:
    """Rows of K activations in blocks of `span` that share a scale."""

    q: NDArray[np.int8]
    """[..., K]: -127..127."""
    scales: Floats
    """[..., K / span]."""

    @property
    def span(self) -> int:
        return int(self.q.shape[-1] // self.scales.shape[-1])

    def sums(self, run: int) -> NDArray[np.int32]:
        """Sums of `run` neighbours: int32 [..., K / run]."""
        sums: NDArray[np.int32] = self.q.reshape(*self.q.shape[:-1], -1, run).sum(axis=-1, dtype=np.int32)
        return sums

    def loudest(self) -> NDArray[np.int32]:
        """The largest sum of the magnitudes of 16 neighbours in each block: int32 [..., K / span]."""
        loud = np.abs(self.q.astype(np.int32)).reshape(*self.scales.shape, -1, 16).sum(axis=-1, dtype=np.int32)
        largest: NDArray[np.int32] = loud.max(axis=-1)
        return largest


def quantize(x: Floats, span: int) -> Activations:
    """Symmetric int8 of x [..., K]: scale = max |x| / 127 in each block, rounded half to even (`rows.activate`).

    All are 0 in a block without a value that reaches TINY.
    """
    blocks = x.reshape(*x.shape[:-1], -1, span)
    top = np.abs(blocks).max(axis=-1)
    empty = top < np.float32(TINY)
    factor = np.where(empty, np.float32(0), np.float32(127) / np.where(empty, np.float32(1), top))
    q = np.rint(blocks * factor[..., None]).astype(np.int8)
    return Activations(q.reshape(x.shape), top / np.float32(127))


def activation_span(type: TensorType) -> int:
    """Activations that are quantized together for weights of this type; 1: they stay f32."""
    return block_shape(type)[0]


def matmul(type: TensorType, raw: NDArray[np.uint8], x: Floats) -> Floats:
    """[T, N] f32 = x [T, K] f32, quantized as `quantize` does, times the rows of raw [N, row bytes] (`matmul.matmul`).

    Block by block in ascending order; inside a block everything is an exact integer.
    """
    span = activation_span(type)
    if span == 1:
        return _matmul_floats(dequantize(type, raw), x)
    activations, parts = quantize(x, span), unpack(type, raw)
    run = span // parts.scales.shape[-1]
    weights = parts.q * np.repeat(parts.scales, run, axis=-1).astype(np.float64)  # [N, blocks, span], integers
    values = activations.q.reshape(len(x), -1, span).astype(np.float64)
    sums = activations.sums(run).reshape(len(x), -1, span // run).astype(np.float64)
    total = np.zeros((len(x), len(raw)), np.float32)
    for block, scale in enumerate(activations.scales.T[..., None]):
        d, m = parts.d[:, block], None if parts.m is None else parts.m[:, block]
        # f64 holds these integers (below 2**31) exactly, in whatever order they are added.
        value = d * (values[:, block] @ weights[:, block].T).astype(np.float32)
        if m is not None and parts.mins is not None:
            value = value - m * (sums[:, block] @ parts.mins[:, block].T.astype(np.float64)).astype(np.float32)
        total = fma32(value, scale, total)
        if m is not None and parts.mins is None:
            total = fma32(m, scale * sums[:, block].astype(np.float32), total)
    return total


def _matmul_floats(weights: Floats, x: Floats) -> Floats:
    """Even and odd k are summed apart in ascending order, then together."""
    halves = [np.zeros((len(x), len(weights)), np.float32) for _ in range(2)]
    for k in range(x.shape[-1]):
        halves[k % 2] = fma32(weights[:, k], x[:, k, None], halves[k % 2])
    return halves[0] + halves[1]


def dequantize_row(type: TensorType, raw: NDArray[np.uint8]) -> Floats:
    """[..., K] f32 of raw [..., row bytes] (`matmul.dequantize_row`)."""
    return dequantize(type, raw)
