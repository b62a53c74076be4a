"""Weight matrices on a device, in one of three forms, and the product with rows of activations.

- `f32`: dequantized, exact. The form of the reference, on the CPU.
- `f16`: dequantized and rounded to half precision.
- `blocks`: the file's own bytes, dequantized to f16 a strip at a time whenever they are multiplied. It takes the least
  memory and costs time in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from engine.gguf_file import GGUFFile
from engine.quant import TensorType, row_bytes
from engine.torch_backend.dequantize import dequantize

Form = Literal["f32", "f16", "blocks"]

STRIP = 1 << 24
"""Weights dequantized at a time: a few hundred MB of intermediate results."""


class DeviceMatrix:
    """A matrix [N, K], or one for each expert."""

    def __init__(self, gguf: GGUFFile, name: str, form: Form, device: torch.device) -> None:
        info = gguf.tensors[name]
        # A matrix of one row is stored as a vector.
        *experts, rows, columns = info.shape if len(info.shape) > 1 else (1, *info.shape)
        self._strip = max(1, STRIP // columns)
        self._type: TensorType | None = info.type if form == "blocks" else None
        raw = gguf.data(name).reshape(*experts, rows, row_bytes(info.type, columns))
        if form == "blocks":
            data = _to(raw, device)
        else:
            dtype = torch.float32 if form == "f32" else torch.float16
            data = torch.empty((*experts, rows, columns), dtype=dtype, device=device)
            flat, raw = data.view(-1, columns), raw.reshape(-1, raw.shape[-1])
            for some in self._strips(len(flat)):
                flat[some] = dequantize(info.type, _to(raw[some], device)).to(dtype)
        self._data = data if experts else data[None]
        gguf.forget(name)

    @property
    def num_bytes(self) -> int:
        return int(self._data.nbytes)

    def _strips(self, num_rows: int) -> Iterator[slice]:
        return (slice(first, first + self._strip) for first in range(0, num_rows, self._strip))

    def rows(self, numbers: Tensor) -> Tensor:
        """Rows [T, K] f32 by number [T]."""
        found = self._data[0, numbers]
        return found.float() if self._type is None else dequantize(self._type, found)

    def times(self, x: Tensor, expert: int = 0) -> Tensor:
        """[T, N] f32 = x [T, K] f32 times the rows."""
        data = self._data[expert]
        if self._type is None:
            return _product(x, data)
        strips = [dequantize(self._type, data[some]).half() for some in self._strips(len(data))]
        return torch.cat([_product(x, w) for w in strips], -1)


def _product(x: Tensor, w: Tensor) -> Tensor:
    """In half precision a row is brought near 1 by a power of two, so that nothing overflows on the way in or out."""
    if w.dtype is torch.float32:
        return torch.nn.functional.linear(x, w)
    top = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scale = torch.exp2(torch.floor(torch.log2(top)))
    return torch.nn.functional.linear((x / scale).half(), w).float() * scale


def _to(raw: np.ndarray, device: torch.device) -> Tensor:
    # A copy: the file is mapped read-only, which torch does not know.
    return torch.from_numpy(np.array(raw)).to(device)
