"""Which device computes, in which form it has the weights, and what its bits depend on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import torch

from engine.api import KVType
from engine.backend import StepModel
from engine.errors import OutOfMemoryError, UsageError
from engine.gguf_file import GGUFFile
from engine.kv_layout import MAKERS, numerics_of
from engine.memory import available_memory
from engine.model import LoadOptions
from engine.torch_backend.matrices import Form
from engine.torch_backend.sizes import block_bytes, least_bytes, weight_bytes

_RESERVED: Final = 768 * 2**20
"""Of a GPU, for what is not weights or K/V: the libraries' own memory, one step's activations, dequantized strips."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device and the fixed sizes of the work on it."""

    torch: torch.device
    forms: tuple[Form, ...]
    """Of weights, the best first: the first that fits is taken."""
    rows: int
    """Rows that go through the model together, always so many: what is missing is filled up."""
    queries: int
    """Of these, how many attend together."""
    own_memory: bool
    """Whether a CPU reads it through copies only."""

    @property
    def title(self) -> str:
        """Such as "NVIDIA H200"."""
        return str(torch.cuda.get_device_name(self.torch) if self.torch.type == "cuda" else self.torch.type)

    def available_memory(self) -> int | None:
        if self.torch.type == "cuda":
            return int(torch.cuda.mem_get_info(self.torch)[0]) - _RESERVED
        if self.torch.type == "mps":
            return int(torch.mps.recommended_max_memory()) - int(torch.mps.driver_allocated_memory()) - _RESERVED
        return available_memory()

    def synchronize(self) -> None:
        """Wait for what it has been told to do."""
        if self.torch.type == "cuda":
            torch.cuda.synchronize(self.torch)
        elif self.torch.type == "mps":
            torch.mps.synchronize()

    def numerics(self, form: Form) -> int:
        """Of K and V computed here: equal for two processes only where nothing is known that may change bits."""
        facts = [torch.__version__, self.title, form, self.rows, self.queries]
        if self.torch.type == "cpu":
            facts += [torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()]
        digest = hashlib.sha256(repr(facts).encode()).digest()
        return numerics_of(MAKERS.index(f"torch, {self.torch.type}"), int.from_bytes(digest[:3], "little"))


def device(name: str) -> Device:
    """`cpu`, `cuda` or `mps`. Raises UsageError where there is none."""
    if name == "cpu":
        # Rows that are filled up cost as much as others here: few.
        return Device(torch=torch.device("cpu"), forms=("f32",), rows=16, queries=8, own_memory=False)
    there = torch.cuda.is_available() if name == "cuda" else torch.backends.mps.is_available()
    if not there:
        why = {
            "cuda": "this PyTorch was built without CUDA" if torch.version.cuda is None else "no GPU is seen by CUDA",
            "mps": "there is no Apple GPU, or this PyTorch cannot use it",
        }
        raise UsageError(f"device {name} cannot be used: {why[name]}; --device cpu computes on the CPU")
    if name == "cuda":
        # Sums in half precision would depend on how a product is split.
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_tf32 = False
    # A GPU reads all weights for one row as for 64, so that rows that are filled up cost it little.
    return Device(torch=torch.device(name), forms=("f16", "blocks"), rows=64, queries=16, own_memory=True)


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """A device, and the form in which it holds the model."""

    device: Device
    form: Form
    notices: tuple[str, ...] = ()
    name = "torch"

    def available_memory(self) -> int | None:
        return self.device.available_memory()

    def estimate(self, gguf: GGUFFile, kv_type: KVType) -> tuple[int, int]:
        return weight_bytes(gguf, self.form), block_bytes(gguf, kv_type)

    def token_bytes(self, gguf: GGUFFile) -> int:
        return self.estimate(gguf, "f16")[0]

    def load(self, gguf: GGUFFile, options: LoadOptions) -> StepModel:
        assert not options.from_disk
        from engine.torch_backend.model import TorchModel

        return TorchModel(gguf, self.device, self.form, options)


def choose(name: str, gguf: GGUFFile, kv_type: KVType, draft: GGUFFile | None = None) -> TorchBackend:
    """For a model, and one that guesses for it; `auto` takes a GPU that holds them, else the CPU.

    Raises UsageError for a device that is not there, OutOfMemoryError for one that cannot hold the model.
    """
    if name != "auto":
        found = device(name)
        form = _form(found, gguf, kv_type, draft)
        if form is None and found.torch.type != "cpu":
            needed, free = _needed(found.forms[-1], gguf, kv_type, draft) / 1e9, (found.available_memory() or 0) / 1e9
            beside = f" with {draft.path.name} beside it" if draft else ""
            raise OutOfMemoryError(
                f"{gguf.path.name}{beside} would take {needed:,.1f} GB of the memory of {found.title} even with its "
                f"weights as in the file, and {max(free, 0):,.1f} GB are free; choose a smaller model, or --backend cpu"
            )
        return TorchBackend(found, form or "f32")
    why = "there is no GPU that PyTorch can use"
    for kind in ("cuda", "mps"):
        try:
            found = device(kind)
        except UsageError:
            continue
        form = _form(found, gguf, kv_type, draft)
        if form is not None:
            return TorchBackend(found, form)
        why = f"{found.title} has no room for the model"
    return TorchBackend(device("cpu"), "f32", (f"{why}: PyTorch computes on the CPU; --backend cpu is faster there",))


def _form(found: Device, gguf: GGUFFile, kv_type: KVType, draft: GGUFFile | None) -> Form | None:
    """The first form of the weights that leaves room for a small context."""
    free = found.available_memory()
    return next((f for f in found.forms if free is None or _needed(f, gguf, kv_type, draft) <= free), None)


def _needed(form: Form, gguf: GGUFFile, kv_type: KVType, draft: GGUFFile | None) -> int:
    return least_bytes(gguf, form, kv_type) + (least_bytes(draft, form, "f16") if draft else 0)
