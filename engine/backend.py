"""What stands behind `LocalEngine`: where a model is computed.

Everything else - who runs, what is cached, sampling, speculation, grammars, files - is one and the same. The `cpu`
backend is this package's own kernels; `engine.torch_backend` computes with PyTorch.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.api import KVType
from engine.config import ModelConfig
from engine.errors import OutOfMemoryError, UsageError
from engine.gguf_file import GGUFFile
from engine.kv_cache import KVPool
from engine.kv_layout import KVLayout
from engine.memory import available_memory
from engine.model import Batch, LoadOptions, Model

BACKENDS: Final = ("cpu", "torch")
DEVICES: Final = ("auto", "cpu", "cuda", "mps")


class StepModel(Protocol):
    """A model in memory and its forward step. For one thread at a time."""

    config: ModelConfig
    kv_type: KVType
    kv_layout: KVLayout
    max_positions: int
    threads: int
    """Of the CPU; 0 where another device computes."""

    @property
    def kernels(self) -> str:
        """What computes, for people."""
        ...

    @property
    def numerics(self) -> int:
        """Another one where the same ids may give other bits of K and V (`kv_layout.Identity`)."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of 64 positions of K and V in all layers."""
        ...

    def new_pool(self, num_blocks: int, num_states: int = 0, num_checkpoints: int = 0) -> KVPool:
        """The memory for keys and values that it uses from here on, and for running states, if it has such layers.

        Raises OutOfMemoryError.
        """
        ...

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        """Run the rows; logits [W, V] of the wanted ones, which the next call may overwrite."""
        ...

    def close(self) -> None:
        """Free the memory. The model cannot be used after this."""
        ...


class Backend(Protocol):
    """Where models are loaded."""

    @property
    def name(self) -> str: ...

    @property
    def notices(self) -> tuple[str, ...]:
        """What a person should know of the choice."""
        ...

    def available_memory(self) -> int | None:
        """Bytes that weights and K/V may take; None where nothing says so."""
        ...

    def estimate(self, gguf: GGUFFile, kv_type: KVType) -> tuple[int, int]:
        """(bytes of weights in memory, bytes of a KV block) of a model that is not loaded yet.

        Raises UnsupportedModelError or ModelFileError.
        """
        ...

    def token_bytes(self, gguf: GGUFFile) -> int:
        """Bytes of weights that a single row touches."""
        ...

    def load(self, gguf: GGUFFile, options: LoadOptions) -> StepModel:
        """Raises UnsupportedModelError, ModelFileError or OutOfMemoryError."""
        ...


class CpuBackend:
    """The kernels of this package."""

    name = "cpu"
    notices = ()

    def available_memory(self) -> int | None:
        return available_memory()

    def estimate(self, gguf: GGUFFile, kv_type: KVType) -> tuple[int, int]:
        return Model.estimate(gguf, kv_type)

    def token_bytes(self, gguf: GGUFFile) -> int:
        return Model.token_bytes(gguf)

    def load(self, gguf: GGUFFile, options: LoadOptions) -> StepModel:
        free = available_memory()
        if not options.from_disk and free is not None and Model.estimate(gguf, options.kv_type)[0] > free // 2:
            # Large beside what is free: pages that the system may take back are better than memory of our own.
            with contextlib.suppress(OutOfMemoryError):  # the disk has no room for the file, and memory has
                return Model.load(gguf, replace(options, from_disk=True))
        return Model.load(gguf, options)


def open_backend(
    name: str,
    device: str,
    gguf: GGUFFile,
    kv_type: KVType,
    *,
    from_disk: bool = False,
    draft: GGUFFile | None = None,
) -> Backend:
    """The backend of this name, for a model, and for one that guesses for it.

    Raises UsageError, also for a device that is not there, and OutOfMemoryError for one that cannot hold them.
    """
    if name not in BACKENDS:
        raise UsageError(f"unknown backend {name!r}; choose from: {', '.join(BACKENDS)}")
    if device not in DEVICES:
        raise UsageError(f"unknown device {device!r}; choose from: {', '.join(DEVICES)}")
    if name == "cpu":
        if device not in ("auto", "cpu"):
            raise UsageError(f"the cpu backend computes on the CPU; device {device} needs --backend torch")
        return CpuBackend()
    if from_disk:
        raise UsageError("the torch backend holds all weights in memory; from-disk is for the cpu backend")
    from engine.torch_backend import open_torch

    return open_torch(device, gguf, kv_type, draft)
