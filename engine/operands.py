"""What operations point to: vectors of a file as kernels take them, each at an address that stays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.config import ModelConfig
from engine.errors import ModelFileError
from engine.gguf_file import GGUFFile
from engine.kernels.attention import STATE
from engine.kernels.plan import TAPS
from engine.quant import dequantize
from engine.weights import load_vector


class Operands:
    """The arrays of a program, which live as long as it does. Where a model has no such array its address is 0."""

    def __init__(self, gguf: GGUFFile, config: ModelConfig) -> None:
        self._gguf, self._config = gguf, config
        self._kept: list[NDArray[Any]] = []

    def keep(self, array: NDArray[Any]) -> int:
        """Address of an array that lives as long as the program."""
        self._kept.append(array)
        return int(array.ctypes.data)

    def vector(self, name: str, *shape: int) -> int:
        return self.keep(load_vector(self._gguf, f"{name}.weight", *shape))

    def scaled(self, name: str, size: int, factor: float) -> int:
        """Address of a vector times a factor."""
        return self.keep(load_vector(self._gguf, name, size) * np.float32(factor))

    def norm(self, name: str, factor: float = 1.0) -> int:
        """Address of the weights of a norm of the stream, times a factor; LayerNorm's biases are behind them."""
        size = self._config.hidden_size
        values = [load_vector(self._gguf, f"{name}.weight", size)]
        if self._config.arch.norm == "centred":
            given = f"{name}.bias" in self._gguf.tensors
            values.append(load_vector(self._gguf, f"{name}.bias", size) if given else np.zeros(size, np.float32))
        return self.keep(np.concatenate(values) * np.float32(factor))

    def padded(self, name: str, *shape: int) -> int:
        """Address of a vector filled up with zeros: kernels take 16 numbers at a time."""
        values = load_vector(self._gguf, name, *shape)
        return self.keep(np.concatenate([values, np.zeros(-len(values) % 16, np.float32)]))

    def taps(self, name: str, channels: int, taps: int = TAPS) -> int:
        """Address of the weights of a convolution, [TAPS, channels]: the file has those of a channel together.

        Where there are fewer than TAPS, zeros stand before them.
        """
        info, shape = self._gguf.tensors.get(name), (channels, taps)
        if info is None or info.shape != shape:
            found = "missing" if info is None else info.shape
            raise ModelFileError(f"{self._gguf.path.name}: tensor {name} is {found}, and should be {shape}")
        weights = np.zeros((TAPS, channels), np.float32)
        weights[TAPS - taps :] = dequantize(info.type, self._gguf.data(name)).reshape(shape).T
        return self.keep(weights)

    def bias(self, layer: int) -> int:
        """Address of the biases of q, k and v in a row; 0 if the model has none."""
        heads = self._config.heads[layer]
        sizes = {"q": self._config.num_heads * heads.dim, "k": heads.keys, "v": heads.keys}
        whole = f"blk.{layer}.attn_qkv.bias"
        if whole in self._gguf.tensors:
            return self.keep(load_vector(self._gguf, whole, sum(sizes.values())))
        names = {x: f"blk.{layer}.attn_{x}.bias" for x in sizes}
        if not any(name in self._gguf.tensors for name in names.values()):
            return 0
        return self.keep(np.concatenate([load_vector(self._gguf, names[x], sizes[x]) for x in sizes]))

    def up_bias(self, n: int) -> int:
        """Address of the bias of a layer that is not gated, zeros if there is none; 0 for gated ones."""
        if self._config.arch.gated:
            return 0
        name, size = f"blk.{n}.ffn_up.bias", self._config.ffn_sizes[n]
        given = name in self._gguf.tensors
        return self.keep(load_vector(self._gguf, name, size) if given else np.zeros(size, np.float32))

    def expert_biases(self, n: int, names: tuple[str, ...], size: int) -> int:
        """Address of the biases [experts, matrices, size] of these matrices, or 0 if the file has none."""
        experts, tensors = self._config.experts, [f"blk.{n}.{name}.bias" for name in names]
        if not experts or not any(name in self._gguf.tensors for name in tensors):
            return 0
        biases = [load_vector(self._gguf, name, experts.count, size).reshape(experts.count, size) for name in tensors]
        return self.keep(np.ascontiguousarray(np.stack(biases, axis=1)))

    def expert_scales(self, n: int, experts: int) -> int:
        """Address of what the weights of experts that stand beside a feed-forward layer are multiplied with, or 0."""
        name = f"blk.{n}.ffn_down_exps.scale"
        given = self._config.arch.experts_beside and name in self._gguf.tensors
        return self.keep(load_vector(self._gguf, name, experts)) if given else 0

    def head_norms(self, layer: int) -> dict[str, int]:
        """What HEADS has to know of norms: StableLM 2 and Command R+ have weights of q and k for each head."""
        c, dim = self._config, self._config.heads[layer].dim
        found = {"centred": int(c.arch.norm == "centred"), "late_norms": int(c.arch.late_head_norms)}
        for which, heads in (("q", c.num_heads), ("k", c.heads[layer].num_kv_heads)):
            name = f"blk.{layer}.attn_{which}_norm"
            info = self._gguf.tensors.get(f"{name}.weight")
            if info is None or c.arch.whole_head_norms:
                continue
            own = len(info.shape) > 1
            found[f"{which}_norm"] = self.vector(name, *((heads, dim) if own else (dim,)))
            found["norm_bytes"] = 4 * dim if own else 0
        if c.has_unit_heads(layer):
            found["q_norm"] = found["k_norm"] = self.keep(np.ones(dim, np.float32))
        if c.arch.normed_values:
            found["v_norm"] = self.keep(np.ones(dim, np.float32))
        return found

    def sinks(self, n: int) -> int:
        """Address of a softmax state [heads, STATE + head size] for each head: its score alone, and no values."""
        c, name = self._config, f"blk.{n}.attn_sinks"
        if not c.arch.sinks:
            return 0
        states = np.zeros((c.num_heads, STATE + c.heads[n].dim), np.float32)
        states[:, 0], states[:, 1] = load_vector(self._gguf, f"{name}.weight", c.num_heads), 1
        return self.keep(states)

    def choice_bias(self, n: int) -> int:
        """Address of what shares of experts [experts] get when some are chosen by them, or 0."""
        e, name = self._config.experts, f"blk.{n}.exp_probs_b.bias"
        return self.padded(name, e.count) if e and name in self._gguf.tensors else 0

    def layer_scale(self, n: int) -> int:
        """Address of what the stream is multiplied with behind a layer, or 0."""
        name = f"blk.{n}.layer_output_scale"
        given = self._config.arch.layer_scales and f"{name}.weight" in self._gguf.tensors
        return self.vector(name, 1) if given else 0

    def rope_tables(self, num_positions: int, local: bool) -> tuple[int, int]:
        """Addresses of cosines and sines."""
        cos, sin = self._config.rope_tables(num_positions, local)
        return self.keep(cos), self.keep(sin)
