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
    """A matrix [N, K]."""

    def __init__(self, gguf: GGUFFile, name: str, form: Form, device: torch.device) -> None:
        info = gguf.tensors[name]
        self.num_rows, self.num_columns = info.shape
        self._type: TensorType | None = info.type if form == "blocks" else None
        raw = gguf.data(name).reshape(self.num_rows, row_bytes(info.type, self.num_columns))
        if form == "blocks":
            self._data = _to(raw, device)
        else:
            dtype = torch.float32 if form == "f32" else torch.float16
            self._data = torch.empty((self.num_rows, self.num_columns), dtype=dtype, device=device)
            for rows in self._strips():
                self._data[rows] = dequantize(info.type, _to(raw[rows], device)).to(dtype)
        gguf.forget(name)

    @property
    def num_bytes(self) -> int:
        return int(self._data.nbytes)

    def _strips(self) -> Iterator[slice]:
        count = max(1, STRIP // self.num_columns)
        return (slice(first, first + count) for first in range(0, self.num_rows, count))

    def rows(self, numbers: Tensor) -> Tensor:
        """Rows [T, K] f32 by number [T]."""
        found = self._data[numbers]
        return found.float() if self._type is None else dequantize(self._type, found)

    def times(self, x: Tensor) -> Tensor:
        """[T, N] f32 = x [T, K] f32 times the rows."""
        if self._type is None:
            return _product(x, self._data)
        strips = [dequantize(self._type, self._data[rows]).half() for rows in self._strips()]
        return _product(x, strips[0]) if len(strips) == 1 else torch.cat([_product(x, w) for w in strips], -1)


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
