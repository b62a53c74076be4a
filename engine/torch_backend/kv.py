"""Keys and values on a device: the blocks of `kv_cache.py` with the bytes of `kv_layout.py`, seen as tensors.

On the CPU the pool's own memory is used. Elsewhere the device has the blocks and the slots of running states, and a
file reads and writes them through copies; a block is the same bytes either way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.api import KVType
from engine.config import Heads
from engine.errors import OutOfMemoryError
from engine.kernels.kv_types import LARGEST_FLOAT, LARGEST_HALF, RUN, runs_of
from engine.kv_cache import BLOCK_SIZE, KVPool, StatePool


class _OnDevice:
    """A pool in a device's memory: `blocks` [num_blocks, block_bytes] u8. All of it is taken at once."""

    def _take(self, block_bytes: int, num_blocks: int, device: torch.device) -> None:
        """Raises OutOfMemoryError."""
        try:
            self.blocks = torch.zeros((num_blocks, block_bytes), dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise OutOfMemoryError(
                f"the KV cache needs {block_bytes * num_blocks / 2**20:,.0f} MiB on {device}, which it has not; choose "
                "a smaller context or fewer kept conversations"
            ) from error
        self._turn = threading.Lock()  # a file's blocks are read by several threads

    def _map(self) -> NDArray[np.uint8]:
        return np.empty((0, self.blocks.shape[1]), np.uint8)

    def read(self, block: int) -> NDArray[np.uint8]:
        with self._turn:
            copied: NDArray[np.uint8] = self.blocks[block].cpu().numpy()
        return copied

    @contextmanager
    def editing(self, block: int) -> Iterator[NDArray[np.uint8]]:
        memory = self.read(block)
        yield memory
        with self._turn:
            self.blocks[block] = torch.from_numpy(memory).to(self.blocks.device)

    def _copy(self, source: int, target: int) -> None:
        self.blocks[target] = self.blocks[source]


class DevicePool(_OnDevice, KVPool):
    """Raises OutOfMemoryError."""

    def __init__(self, block_bytes: int, num_blocks: int, device: torch.device) -> None:
        self._take(block_bytes, num_blocks, device)
        KVPool.__init__(self, block_bytes, num_blocks)


class DeviceStatePool(_OnDevice, StatePool):
    """Raises OutOfMemoryError."""

    def __init__(self, state_bytes: int, num_slots: int, most_checkpoints: int, device: torch.device) -> None:
        self._take(state_bytes, num_slots, device)
        StatePool.__init__(self, state_bytes, num_slots, most_checkpoints)


def memory_of(pool: KVPool) -> Tensor:
    """[num_blocks, block_bytes] u8 where the device computes."""
    return pool.blocks if isinstance(pool, _OnDevice) else torch.from_numpy(pool.memory)


class LayerStore:
    """The keys and values of one layer in a pool's blocks, from byte `start` of each on."""

    def __init__(self, heads: Heads, kv_type: KVType, pool: KVPool, start: int) -> None:
        self._kv_type = kv_type
        self._dim = heads.dim
        count, dim = heads.num_kv_heads, heads.dim
        memory = memory_of(pool)[:, start:]
        dtype = {"f16": torch.float16, "f32": torch.float32, "q8_0": torch.int8}[kv_type]
        runs = runs_of(dim) if kv_type == "q8_0" else 0
        size = count * dim * BLOCK_SIZE * dtype.itemsize
        scales = count * runs * BLOCK_SIZE * 2

        def part(first: int, num_bytes: int, kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
            return memory[:, first : first + num_bytes].view(kind).unflatten(-1, shape)

        self._keys = part(0, size, dtype, (count, dim, BLOCK_SIZE))
        self._values = part(size + scales, size, dtype, (count, BLOCK_SIZE, dim))
        if runs:
            self._key_scales = part(size, scales, torch.float16, (count, runs, BLOCK_SIZE))
            self._value_scales = part(2 * size + scales, scales, torch.float16, (count, BLOCK_SIZE, runs))

    def store(self, blocks: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k and v [T, G, D] f32 into slots [T] of blocks [T]."""
        for x, numbers, scales, is_keys in (
            (k, self._keys, "_key_scales", True),
            (v, self._values, "_value_scales", False),
        ):
            if self._kv_type == "q8_0":
                levels, factors = _to_q8_0(x)
                _put(numbers, blocks, slots, levels, is_keys)
                _put(getattr(self, scales), blocks, slots, factors, is_keys)
            else:
                limit = LARGEST_HALF if self._kv_type == "f16" else LARGEST_FLOAT
                _put(numbers, blocks, slots, x.clamp(-limit, limit).to(numbers.dtype), is_keys)

    def keys(self, blocks: Tensor) -> Tensor:
        """[G, D, S] f32 of the 64 S positions of blocks."""
        found = self._keys[blocks].float()
        if self._kv_type == "q8_0":
            scales = self._key_scales[blocks].float().repeat_interleave(RUN, 2)
            found = found * scales[:, :, : self._dim]
        return found.permute(1, 2, 0, 3).flatten(2)

    def values(self, blocks: Tensor) -> Tensor:
        """[G, S, D] f32."""
        found = self._values[blocks].float()
        if self._kv_type == "q8_0":
            scales = self._value_scales[blocks].float().repeat_interleave(RUN, 3)
            found = found * scales[..., : self._dim]
        return found.permute(1, 0, 2, 3).flatten(1, 2)


def _put(target: Tensor, blocks: Tensor, slots: Tensor, x: Tensor, is_keys: bool) -> None:
    """x [T, G, N] into target [blocks, G, N, 64] of keys or [blocks, G, 64, N] of values."""
    if is_keys:
        target[blocks, :, :, slots] = x
    else:
        target[blocks, :, slots] = x


def _to_q8_0(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [T, G, D] and f16 scales [T, G, runs] (`twins.to_q8_0`)."""
    dim = x.shape[-1]
    runs = torch.nn.functional.pad(x, (0, -dim % RUN)).unflatten(-1, (-1, RUN))
    scales = (runs.abs().amax(-1) / 127).clamp(max=LARGEST_HALF).half()
    divisor = torch.where(scales == 0, 1.0, scales.float())
    levels = torch.round(runs / divisor[..., None]).clamp(-127, 127).to(torch.int8)
    return levels.flatten(-2)[..., :dim], scales
