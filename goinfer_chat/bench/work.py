"""What a token costs at least: bytes to read, products to make. Counted from the model file and its sizes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.config import ModelConfig
from engine.gguf_file import GGUFFile
from engine.quant import TensorType

_FLOATS = {TensorType.F32, TensorType.F16, TensorType.BF16}
_ONLY_WANTED = (
    "attn_output",
    "inp_gate",
    "proj",
    *(f"ffn_{name}{of}" for name in ("gate", "up", "down") for of in ("", "_exps", "_shexp")),
)


@dataclass(frozen=True, slots=True)
class Products:
    """Multiply-adds: of bytes, as quantized weights are multiplied, and of floats."""

    integer: int = 0
    floating: int = 0

    def plus(self, other: Products) -> Products:
        return Products(self.integer + other.integer, self.floating + other.floating)

    def times(self, factor: int) -> Products:
        return Products(factor * self.integer, factor * self.floating)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The least a step has to do, whatever computes it."""

    weight_bytes: int
    """Bytes of all matrices that a step of one row reads: the file's, without an embedding that is only looked up,
    and of experts those that a row passes."""
    of_row: Products
    """In matrices, for every row of a step."""
    of_wanted: Products
    """And for a row whose logits are wanted: what lies behind the last K and V, and the head."""
    config: ModelConfig

    @classmethod
    def of(cls, gguf: GGUFFile) -> Work:
        """Raises UnsupportedModelError or ModelFileError."""
        config = ModelConfig.from_gguf(gguf)
        tied = "output.weight" not in gguf.tensors
        last = {f"blk.{config.last_remembered}.{name}.weight" for name in _ONLY_WANTED}
        behind = tuple(f"blk.{n}." for n in range(config.last_remembered + 1, config.num_layers))
        looked_up = {"per_layer_token_embd.weight"} | (set() if tied else {"token_embd.weight"})
        weight_bytes, of_row, of_wanted = 0, Products(), Products()
        for name, tensor in gguf.tensors.items():
            if len(tensor.shape) < 2 or name in looked_up:
                continue
            count, num_bytes = math.prod(tensor.shape), tensor.nbytes
            if len(tensor.shape) == 3 and config.experts:
                # Of the experts a row passes these few.
                count = count // config.experts.count * config.experts.chosen
                num_bytes = num_bytes // config.experts.count * config.experts.chosen
            weight_bytes += num_bytes
            products = Products(floating=count) if tensor.type in _FLOATS else Products(integer=count)
            if name in last or name.startswith(("token_embd.", "output.", *behind)):
                of_wanted = of_wanted.plus(products)
            else:
                of_row = of_row.plus(products)
        return cls(weight_bytes=weight_bytes, of_row=of_row, of_wanted=of_wanted, config=config)

    def matrices(self, num_rows: int, num_wanted: int) -> Products:
        """Products of weights for `num_rows` rows, `num_wanted` of which give logits."""
        return self.of_row.times(num_rows).plus(self.of_wanted.times(num_wanted))

    def prompt_attention(self, num_tokens: int) -> Products:
        """Of queries with keys and of softmax weights with values, for a whole prompt with logits of its last token.

        They are of 16 bits, K and V being f16: each takes the place of two products of bytes.
        """
        c = self.config
        seen = 0
        for layer in self._attending:
            last = layer >= c.last_remembered
            rows = self._seen(layer, num_tokens) if last else self._seen_by_all(layer, num_tokens)
            seen += c.heads[layer].dim * rows
        return Products(integer=2 * 2 * c.num_heads * seen)

    def kv_bytes(self, depth: int) -> int:
        """Bytes of keys and values, in f16, that a row with `depth` positions before it reads, and of a running state.

        A step reads and writes the state, with however many rows.
        """
        c = self.config
        seen = sum(c.heads[layer].keys * self._seen(layer, depth) for layer in self._attending)
        return 2 * 2 * seen + 2 * c.state_bytes

    @property
    def _attending(self) -> list[int]:
        """Layers that look at keys and values, their own or those of others."""
        return [n for n in range(self.config.num_layers) if not self.config.has_state(n)]

    def _seen(self, layer: int, num_positions: int) -> int:
        """How many of these positions a layer looks at from the last one."""
        return min(num_positions, abs(self.config.window)) if self.config.is_local(layer) else num_positions

    def _seen_by_all(self, layer: int, num_tokens: int) -> int:
        """The same from each token of a prompt, summed."""
        ramp = self._seen(layer, num_tokens)
        return ramp * (ramp + 1) // 2 + (num_tokens - ramp) * ramp
