"""What layers are made of: norms, and matrices with their biases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.torch_backend.matrices import DeviceMatrix


@dataclass(frozen=True, slots=True)
class Norm:
    """x / rms(x) * weight; centred: of x less its mean, and the bias is added."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool

    def __call__(self, x: Tensor) -> Tensor:
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return scaled if self.bias is None else scaled + self.bias


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix, or one for each expert, and the biases [experts or 1, rows], if it has some."""

    matrix: DeviceMatrix
    bias: Tensor | None

    def __call__(self, x: Tensor, expert: int = 0) -> Tensor:
        y = self.matrix.times(x, expert)
        return y if self.bias is None else y + self.bias[expert]


def even(x: Tensor) -> Tensor:
    """x [..., n] with zeros behind, so that each row is whole runs of 32 numbers.

    PyTorch computes exponentials 32 at a time, and what is left over one by one, with other bits in places: with an odd
    number of heads or experts it would show where in a tile a row lies.
    """
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 32))
