"""Routers of mixtures of experts: which experts a row passes, and with which weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.kernels.ir import LANES
from engine.kernels.routing import LARGEST, LEAST_SUM
from engine.kernels.twins.arithmetic import Floats, exp, tree
from engine.kernels.twins.rows import sigmoid


def choose(logits: Floats, chosen: int, of_chosen: bool, scale: float = 1.0) -> tuple[NDArray[np.int64], Floats]:
    """(experts [T, chosen], weights [T, chosen]) of router logits [T, experts]: the largest first, of equal ones the
    lower number; weights are e**logit / the sum of the chosen ones, or of all, * scale."""
    x = _finite(logits)
    experts = np.argsort(-x, axis=-1, kind="stable")[:, :chosen]
    shares = exp(x - np.take_along_axis(x, experts[:, :1], axis=-1))
    picked = np.take_along_axis(shares, experts, axis=-1)
    total = _shared(shares, experts if of_chosen else None)
    return experts, picked / total * np.float32(scale)


def choose_biased(
    logits: Floats, chosen: int, even: bool, of_chosen: bool, scale: float, bias: Floats | None
) -> tuple[NDArray[np.int64], Floats]:
    """`choose` by shares and bias [experts], or by the logits if there is none: shares are the softmax of the logits,
    or if `even` each one's sigmoid."""
    x = _finite(logits)
    grown = exp(x - x.max(axis=-1, keepdims=True))
    shares = sigmoid(x) if even else grown / _shared(grown)
    order = x if bias is None else _finite(shares + bias)
    experts = np.argsort(-order, axis=-1, kind="stable")[:, :chosen]
    picked = np.take_along_axis(shares, experts, axis=-1)
    total = np.maximum(_shared(shares, experts), np.float32(LEAST_SUM)) if of_chosen else np.float32(1)
    return experts, picked / total * np.float32(scale)


def _finite(logits: Floats) -> Floats:
    return np.clip(np.where(np.isnan(logits), -np.float32(LARGEST), logits), -np.float32(LARGEST), np.float32(LARGEST))


def _shared(shares: Floats, experts: NDArray[np.int64] | None = None) -> Floats:
    """[T, 1]: the sum of shares [T, experts], or only of the chosen experts [T, chosen]."""
    counted = np.zeros((len(shares), -(-shares.shape[-1] // LANES) * LANES), np.float32)
    if experts is None:
        counted[:, : shares.shape[-1]] = shares
    else:
        np.put_along_axis(counted, experts, np.take_along_axis(shares, experts, axis=-1), axis=-1)
    lanes = np.zeros((len(shares), LANES), np.float32)
    for vector in counted.reshape(len(shares), -1, LANES).swapaxes(0, 1):
        lanes = lanes + vector
    return tree(lanes, np.add)[:, None]
