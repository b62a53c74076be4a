"""Which tensors of a file are the matrices of a model, checked against its sizes."""

from __future__ import annotations

from dataclasses import dataclass

from engine.arch import ModelConfig
from engine.errors import UnsupportedModelError
from engine.gguf_file import GGUFFile
from engine.weights import Matrix


@dataclass(frozen=True, slots=True)
class LayerMatrices:
    """The matrices of one layer."""

    qkv: tuple[Matrix, ...]
    """Of q, k and v, or one for all."""
    output: Matrix
    gate_up: tuple[Matrix, ...]
    """Gate and up, or up alone where nothing is gated."""
    down: Matrix


def layer_vectors(c: ModelConfig) -> list[str]:
    """Tensors of a layer that may be there beside the matrices: norms and biases."""
    arch = c.arch
    norms = ["attn_q_norm", "attn_k_norm"]
    norms += [] if not arch.pre_norms else ["attn_norm"] if c.is_parallel else ["attn_norm", arch.ffn_norm]
    norms += ["post_attention_norm", "post_ffw_norm"] if arch.post_norms else []
    biases = ["attn_output", "ffn_down"] + ([] if arch.gated else ["ffn_up"])
    biases += [] if arch.whole_head_norms else ["attn_q", "attn_k", "attn_v", "attn_qkv"]
    biases += ["attn_norm", arch.ffn_norm] if arch.norm == "centred" else []
    return ["attn_rot_embd.weight", *(f"{n}.weight" for n in norms), *(f"{n}.bias" for n in biases)]


class ModelMatrices:
    """All matrices of a model, checked against its sizes."""

    def __init__(self, gguf: GGUFFile, c: ModelConfig) -> None:
        self.config = c
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

        def matrix(name: str, rows: int, columns: int, part: tuple[int, int] = (0, 1)) -> Matrix:
            return Matrix(gguf, f"{name}.weight", (rows, columns), part)

        def qkv(block: str) -> tuple[Matrix, ...]:
            if f"{block}.attn_qkv.weight" in gguf.tensors:
                return (matrix(f"{block}.attn_qkv", queries + 2 * keys, c.hidden_size),)
            rows = {"attn_q": queries, "attn_k": keys, "attn_v": keys}
            return tuple(matrix(f"{block}.{name}", rows[name], c.hidden_size) for name in rows)

        def gate_up(block: str) -> tuple[Matrix, ...]:
            if not c.arch.gated:
                return (matrix(f"{block}.ffn_up", c.ffn_size, c.hidden_size),)
            # One tensor has both, the gate first, where there is none for the gate.
            fused = f"{block}.ffn_gate.weight" not in gguf.tensors
            gate = "ffn_up" if fused else "ffn_gate"
            first, second = ((0, 2), (1, 2)) if fused else ((0, 1), (0, 1))
            return (
                matrix(f"{block}.{gate}", c.ffn_size, c.hidden_size, first),
                matrix(f"{block}.ffn_up", c.ffn_size, c.hidden_size, second),
            )

        self.embedding = matrix("token_embd", c.vocab_size, c.hidden_size)
        self.layers = [
            LayerMatrices(
                qkv(f"blk.{n}"),
                matrix(f"blk.{n}.attn_output", c.hidden_size, queries),
                gate_up(f"blk.{n}"),
                matrix(f"blk.{n}.ffn_down", c.hidden_size, c.ffn_size),
            )
            for n in range(c.num_layers)
        ]
        tied = "output.weight" not in gguf.tensors
        self.head = self.embedding if tied else matrix("output", c.vocab_size, c.hidden_size)
        self._check_all_is_read(gguf)

    def _check_all_is_read(self, gguf: GGUFFile) -> None:
        """Raise UnsupportedModelError for a tensor that a step would pass over: its results would silently be wrong."""
        c = self.config
        vectors = {f"blk.{n}.{v}" for n in range(c.num_layers) for v in layer_vectors(c)}
        read = {m.name for m in self.all} | vectors | {"output_norm.weight", "output_norm.bias", "output.bias"}
        read |= {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
        for name in gguf.tensors:
            if name not in read:
                shown = "".join(x for x in name if x.isprintable())[:64]
                raise UnsupportedModelError(
                    f"{gguf.path.name}: tensor {shown} is of a form of {c.architecture} that is not supported"
                )

    @property
    def all(self) -> list[Matrix]:
        found = [self.embedding] if self.head is self.embedding else [self.embedding, self.head]
        for layer in self.layers:
            found += [*layer.qkv, layer.output, *layer.gate_up, layer.down]
        return found
