"""All weights of a model on a device, and the refusal of what this backend does not know.

An architecture is data (`arch.py`). Whatever a row of it or a file says that is not looked at here is refused by name:
a step that passed over it would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Final

import torch
from torch import Tensor

from engine.arch import ModelConfig
from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf_file import GGUFFile
from engine.torch_backend.matrices import DeviceMatrix, Form
from engine.weights import load_vector

_KNOWN_FACTS: Final = frozenset(
    (
        "name", "neox_rope", "activation", "pre_norms", "post_norms", "whole_head_norms", "scale_embedding",
        "local_layers", "window", "local_rope_base", "local_rope_scaling", "unrotated_layers", "wide_scale_layers",
        "soft_caps", "file_scales",
    )
)  # fmt: skip
"""Fields of ArchSpec that `model.py` obeys, or that ModelConfig has turned into numbers it obeys."""
_KNOWN_SIZES: Final = frozenset(
    (
        "name", "arch", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size",
        "train_context_size", "norm_eps", "embedding_factor", "attention_scale", "attention_cap", "logit_factor",
        "logit_cap", "rope_base", "rope_dim", "rope_scale", "rope_factors", "rope_long_factors", "rope_context", "yarn",
        "rope_magnitude", "window",
    )
)  # fmt: skip
"""Fields of ModelConfig that are obeyed. Any other one has to be 0, None or empty."""
_KNOWN_ACTIVATIONS: Final = ("silu", "gelu")


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer computes with; None where it has no such part."""

    attention_norm: Tensor | None
    qkv: tuple[DeviceMatrix, ...]
    """Of q, k and v, or one for all."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: DeviceMatrix
    post_attention_norm: Tensor | None
    ffn_norm: Tensor | None
    gate_up: tuple[DeviceMatrix, ...]
    """Of gate and up, or one for both."""
    down: DeviceMatrix
    post_ffw_norm: Tensor | None


def check_known(gguf: GGUFFile, config: ModelConfig) -> None:
    """Raises UnsupportedModelError for an architecture that says more than this backend looks at."""
    arch = config.arch
    unknown = [
        f.name
        for f in fields(arch)
        if f.name not in _KNOWN_FACTS and (f.default is MISSING or getattr(arch, f.name) != f.default)
    ]
    unknown += [f.name for f in fields(config) if f.name not in _KNOWN_SIZES and getattr(config, f.name)]
    if unknown or arch.activation not in _KNOWN_ACTIVATIONS:
        what = ", ".join(name.replace("_", " ") for name in unknown) or f"activation {arch.activation}"
        raise UnsupportedModelError(
            f"{gguf.path.name}: the torch backend does not know {arch.name} ({what}); --backend cpu runs it"
        )


class TorchWeights:
    """Raises UnsupportedModelError, ModelFileError or OutOfMemoryError."""

    def __init__(
        self,
        gguf: GGUFFile,
        config: ModelConfig,
        device: torch.device,
        form: Form,
        progress: Callable[[str, float], None] | None,
    ) -> None:
        check_known(gguf, config)
        self._gguf, self._config, self._device, self._form = gguf, config, device, form
        self._progress = progress or (lambda what, share: None)
        # Settings of the rotary embedding, which ModelConfig has read.
        self._read = {f"{n}.weight" for n in ("rope_freqs", "rope_factors_long", "rope_factors_short")}
        self._read |= {f"blk.{n}.attn_rot_embd.weight" for n in range(config.num_layers)}
        self.num_bytes = 0
        hidden = config.hidden_size
        self.embedding = self._matrix("token_embd", config.vocab_size, hidden)
        self.layers = [self._layer(n) for n in range(config.num_layers)]
        self.output_norm = self._vector("output_norm", hidden) * config.logit_factor
        tied = "output.weight" not in gguf.tensors
        self.head = self.embedding if tied else self._matrix("output", config.vocab_size, hidden)
        self._check_all_is_read()

    def _check_all_is_read(self) -> None:
        for name in self._gguf.tensors:
            if name not in self._read:
                shown = "".join(x for x in name if x.isprintable())[:64]
                raise UnsupportedModelError(
                    f"{self._gguf.path.name}: the torch backend does not know tensor {shown} of "
                    f"{self._config.arch.name}; --backend cpu may run it"
                )

    def _matrix(self, name: str, rows: int, columns: int) -> DeviceMatrix:
        name = f"{name}.weight"
        info = self._gguf.tensors.get(name)
        if info is None:
            raise ModelFileError(f"{self._gguf.path.name}: tensor {name} is missing")
        if info.shape != (rows, columns):
            raise ModelFileError(
                f"{self._gguf.path.name}: tensor {name} is {info.shape}, and the other sizes in the file ask for "
                f"{(rows, columns)}"
            )
        self._read.add(name)
        matrix = DeviceMatrix(self._gguf, name, self._form, self._device)
        self.num_bytes += matrix.num_bytes
        self._progress("loading weights", len(self._read) / len(self._gguf.tensors))
        return matrix

    def _vector(self, name: str, size: int, suffix: str = "weight") -> Tensor:
        self._read.add(f"{name}.{suffix}")
        return torch.from_numpy(load_vector(self._gguf, f"{name}.{suffix}", size)).to(self._device)

    def _layer(self, n: int) -> Layer:
        c, arch, block = self._config, self._config.arch, f"blk.{n}"
        hidden, dim = c.hidden_size, c.head_dim
        sizes = {"attn_q": c.num_heads * dim, "attn_k": c.num_kv_heads * dim, "attn_v": c.num_kv_heads * dim}

        def norm(name: str, there: bool, size: int = hidden) -> Tensor | None:
            return self._vector(f"{block}.{name}", size) if there else None

        def head_norm(name: str) -> Tensor | None:
            whole = arch.whole_head_norms
            there = whole or f"{block}.{name}_norm.weight" in self._gguf.tensors
            return norm(f"{name}_norm", there, sizes[name] if whole else dim)

        qkv = ["attn_qkv"] if f"{block}.attn_qkv.weight" in self._gguf.tensors else [*sizes]
        # One tensor has both, the gate first, where there is none for the gate.
        gate_up = ["ffn_gate", "ffn_up"] if f"{block}.ffn_gate.weight" in self._gguf.tensors else ["ffn_up"]
        return Layer(
            norm("attn_norm", arch.pre_norms),
            tuple(self._matrix(f"{block}.{name}", sizes.get(name, sum(sizes.values())), hidden) for name in qkv),
            self._qkv_bias(block, sizes),
            head_norm("attn_q"),
            head_norm("attn_k"),
            self._matrix(f"{block}.attn_output", hidden, sizes["attn_q"]),
            norm("post_attention_norm", arch.post_norms),
            norm("ffn_norm", arch.pre_norms),
            tuple(self._matrix(f"{block}.{name}", 2 * c.ffn_size // len(gate_up), hidden) for name in gate_up),
            self._matrix(f"{block}.ffn_down", hidden, c.ffn_size),
            norm("post_ffw_norm", arch.post_norms),
        )

    def _qkv_bias(self, block: str, sizes: dict[str, int]) -> Tensor | None:
        """[(H + 2 G) D], or None where q, k and v have no biases. With whole-head norms none are known."""
        found = [f"{block}.{name}" for name in sizes if f"{block}.{name}.bias" in self._gguf.tensors]
        if not found or self._config.arch.whole_head_norms:
            return None
        return torch.cat([self._vector(f"{block}.{name}", size, "bias") for name, size in sizes.items()])
