"""The `torch` backend: the same GGUF files and the same blocks of K/V, computed by PyTorch on a GPU or a CPU.

Nothing outside of this package imports torch, and nothing here does before a model is asked for.
"""

from __future__ import annotations

from engine.api import KVType
from engine.backend import Backend
from engine.errors import UsageError
from engine.gguf_file import GGUFFile

INSTALL = "pip install 'goinfer-chat[torch]'"


def open_torch(device: str, gguf: GGUFFile, kv_type: KVType, draft: GGUFFile | None = None) -> Backend:
    """The backend for a model, and one that guesses for it, on `auto`, `cpu`, `cuda` or `mps`.

    Raises UsageError where torch or the device is missing, OutOfMemoryError where the device cannot hold the model.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UsageError(f"--backend torch needs PyTorch, which is not installed: {INSTALL}") from error
    from engine.torch_backend.device import choose

    return choose(device, gguf, kv_type, draft)
