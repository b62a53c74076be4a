"""Which tensors of a file are the matrices of a model, checked against its sizes."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import DeltaSizes, ModelConfig
from engine.errors import UnsupportedModelError
from engine.gguf_file import GGUFFile, shown
from engine.weights import Matrix


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The matrices of a gated feed-forward layer, or of all experts."""

    gate_up: tuple[Matrix, ...]
    """Gate and up, or up alone where nothing is gated."""
    down: Matrix

    @property
    def all(self) -> list[Matrix]:
        return [*self.gate_up, self.down]


@dataclass(frozen=True, slots=True)
class LayerMatrices:
    """The matrices of one layer."""

    qkv: tuple[Matrix, ...]
    """Of q, k and v, or one for all, and of the gate of what attention gives. Of q and k where values are made as keys
    are, of q where a layer has neither. Of a layer with a running state: what goes through the convolution, its gate,
    and the two factors of each head. Of a layer that is a convolution, and of a state space layer: one for all that
    it takes."""
    output: Matrix
    dense: FeedForward | None
    """What every row passes: the feed-forward layer, or the shared one of the experts."""
    experts: FeedForward | None
    router: tuple[Matrix, ...]
    """Of the experts, and of the factor of a shared one where it has one. Empty: there are no experts."""
    given: tuple[Matrix, ...] = ()
    """Of the branch that a token's embedding for this layer gates: into it and out of it. Empty: there is none."""

    @property
    def all(self) -> list[Matrix]:
        """Each once; those of one product side by side, as operations take them."""
        feed_forward = [m for part in (self.dense, self.experts) if part for m in part.all]
        return [*self.qkv, self.output, *self.router, *feed_forward, *self.given]


_SCAN_VECTORS = ("conv1d.weight", "conv1d.bias", "dt.bias", "a", "d", "norm.weight")


def layer_vectors(c: ModelConfig) -> list[str]:
    """Tensors of a layer that may be there beside the matrices: norms and biases."""
    arch = c.arch
    norms = ["attn_q_norm", "attn_k_norm"]
    norms += [] if not arch.pre_norms else ["attn_norm"] if c.is_parallel else ["attn_norm", arch.ffn_norm]
    norms += ["post_attention_norm", "post_ffw_norm"] if arch.post_norms else []
    biases = ["attn_output", "ffn_down"] + ([] if arch.gated else ["ffn_up"])
    biases += [] if arch.whole_head_norms else ["attn_q", "attn_k", "attn_v", "attn_qkv"]
    biases += ["ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"] if c.experts else []
    norms += ["attn_sinks"] if arch.sinks else []
    biases += ["attn_norm", arch.ffn_norm] if arch.norm == "centred" else []
    norms += ["layer_output_scale"] if arch.layer_scales else []
    norms += ["post_norm"] if c.layer_embedding_size else []
    norms += ["pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"] if c.experts and arch.experts_beside else []
    biases += ["exp_probs_b"] if c.experts and (arch.shares != "soft" or arch.scattered_experts) else []
    others = ["ssm_conv1d.weight", "ssm_dt.bias", "ssm_a", "ssm_norm.weight"] if arch.delta_layers else []
    others += [f"ssm_{x}" for x in _SCAN_VECTORS] if arch.scans else []
    others += ["shortconv.conv.weight"] if arch.convolutions else []
    others += ["ffn_gate_inp.scale", "ffn_down_exps.scale"] if c.experts and arch.experts_beside else []
    return ["attn_rot_embd.weight", *others, *(f"{n}.weight" for n in norms), *(f"{n}.bias" for n in biases)]


class _Finder:
    """Finds matrices in a file by their names, and gives each the sizes it must have."""

    def __init__(self, gguf: GGUFFile, config: ModelConfig) -> None:
        self._gguf = gguf
        self._config = config

    def matrix(
        self, name: str, rows: int, columns: int, part: tuple[int, int] = (0, 1), experts: int = 0, run: int = 0
    ) -> Matrix:
        """The tensor `name` as a matrix [rows, columns], or a part of it: see `Matrix`."""
        return Matrix(self._gguf, f"{name}.weight", (rows, columns), part, experts, run)

    def _qkv(self, n: int) -> tuple[Matrix, ...]:
        c = self._config
        block, heads = f"blk.{n}", c.heads[n]
        queries, keys = c.num_heads * heads.dim, heads.keys
        if f"{block}.attn_qkv.weight" in self._gguf.tensors:
            return (self.matrix(f"{block}.attn_qkv", queries + 2 * keys, c.hidden_size),)
        rows = {"attn_q": queries, "attn_k": keys, "attn_v": keys}
        if heads.keys_are_values:
            del rows["attn_v"]
        if c.kv_layer(n) != n:
            rows = {"attn_q": queries}
        if not c.arch.delta_layers:
            return tuple(self.matrix(f"{block}.{name}", rows[name], c.hidden_size) for name in rows)
        # Each head of q is followed by its gate.
        q, gate = (self.matrix(f"{block}.attn_q", queries, c.hidden_size, (i, 2), run=heads.dim) for i in range(2))
        return (q, *(self.matrix(f"{block}.{name}", keys, c.hidden_size) for name in ("attn_k", "attn_v")), gate)

    def _delta(self, block: str, sizes: DeltaSizes) -> tuple[Matrix, ...]:
        c = self._config
        if f"{block}.ssm_in.weight" in self._gguf.tensors:
            raise UnsupportedModelError(
                f"{self._gguf.path.name}: tensor {block}.ssm_in.weight is of an old form of {c.architecture}; download "
                "or convert the model anew"
            )
        heads, shared = sizes.num_value_heads, sizes.num_value_heads // sizes.num_key_heads
        if c.arch.interleaved_deltas:
            factors = (self.matrix(f"{block}.ssm_ba", heads, c.hidden_size, (i, 2), run=shared) for i in range(2))
        else:
            factors = (self.matrix(f"{block}.ssm_{name}", heads, c.hidden_size) for name in ("beta", "alpha"))
        return (
            self.matrix(f"{block}.attn_qkv", sizes.channels, c.hidden_size),
            self.matrix(f"{block}.attn_gate", sizes.values, c.hidden_size),
            *factors,
        )

    def _branch(self, n: int) -> tuple[tuple[Matrix, ...], Matrix]:
        """What the first branch of a layer multiplies with, and what it ends with."""
        c = self._config
        block = f"blk.{n}"
        if c.delta is not None and c.has_state(n):
            return self._delta(block, c.delta), self.matrix(f"{block}.ssm_out", c.hidden_size, c.delta.values)
        if c.convolution is not None and c.has_state(n):
            inward = self.matrix(f"{block}.shortconv.in_proj", 3 * c.convolution.channels, c.hidden_size)
            return (inward,), self.matrix(f"{block}.shortconv.out_proj", c.hidden_size, c.convolution.channels)
        if c.scan is not None and c.has_state(n):
            inward = self.matrix(f"{block}.ssm_in", c.scan.rows, c.hidden_size)
            return (inward,), self.matrix(f"{block}.ssm_out", c.hidden_size, c.scan.values)
        return self._qkv(n), self.matrix(f"{block}.attn_output", c.hidden_size, c.num_heads * c.heads[n].dim)

    def _feed_forward(self, block: str, ffn_size: int, suffix: str = "", experts: int = 0) -> FeedForward:
        c = self._config
        down = self.matrix(f"{block}.ffn_down{suffix}", c.hidden_size, ffn_size, experts=experts)
        if not c.arch.gated:
            return FeedForward(
                (self.matrix(f"{block}.ffn_up{suffix}", ffn_size, c.hidden_size, experts=experts),), down
            )
        # One tensor has both, the gate first, where there is none for the gate.
        fused = f"{block}.ffn_gate{suffix}.weight" not in self._gguf.tensors
        both = "ffn_gate_up" if f"{block}.ffn_gate_up{suffix}.weight" in self._gguf.tensors else "ffn_up"
        gate, up = (both, both) if fused else ("ffn_gate", "ffn_up")
        first, second = ((0, 2), (1, 2)) if fused else ((0, 1), (0, 1))
        return FeedForward(
            (
                self.matrix(f"{block}.{gate}{suffix}", ffn_size, c.hidden_size, first, experts),
                self.matrix(f"{block}.{up}{suffix}", ffn_size, c.hidden_size, second, experts),
            ),
            down,
        )

    def layer(self, n: int) -> LayerMatrices:
        """All of layer n."""
        c = self._config
        block, dense, experts = f"blk.{n}", None, None
        router: tuple[Matrix, ...] = ()
        if c.experts and c.has_experts(n):
            experts = self._feed_forward(block, c.experts.ffn_size, "_exps", c.experts.count)
            router = (self.matrix(f"{block}.ffn_gate_inp", c.experts.count, c.hidden_size),)
            if c.has_shared_gate:
                router += (self.matrix(f"{block}.ffn_gate_inp_shexp", 1, c.hidden_size),)
        if c.ffn_sizes[n]:
            suffix = "_shexp" if experts and not c.arch.experts_beside else ""
            dense = self._feed_forward(block, c.ffn_sizes[n], suffix)
        given: tuple[Matrix, ...] = ()
        if size := c.layer_embedding_size:
            given = (
                self.matrix(f"{block}.inp_gate", size, c.hidden_size),
                self.matrix(f"{block}.proj", c.hidden_size, size),
            )
        return LayerMatrices(*self._branch(n), dense, experts, router, given)


class ModelMatrices:
    """All matrices of a model, checked against its sizes."""

    def __init__(self, gguf: GGUFFile, c: ModelConfig) -> None:
        self.config = c
        find = _Finder(gguf, c)
        self.embedding = find.matrix("token_embd", c.vocab_size, c.hidden_size)
        self.given: tuple[Matrix, ...] = ()
        """The embeddings of a token for each layer, and what the embedding of the stream adds to them."""
        if width := c.num_layers * c.layer_embedding_size:
            projection = find.matrix("per_layer_model_proj", width, c.hidden_size)
            self.given = find.matrix("per_layer_token_embd", c.vocab_size, width), projection
        self.layers = [find.layer(n) for n in range(c.num_layers)]
        tied = "output.weight" not in gguf.tensors
        self.head = self.embedding if tied else find.matrix("output", c.vocab_size, c.hidden_size)
        self._check_all_is_read(gguf)

    def _check_all_is_read(self, gguf: GGUFFile) -> None:
        """Raise UnsupportedModelError for a tensor that a step would pass over: its results would silently be wrong."""
        c = self.config
        vectors = {f"blk.{n}.{v}" for n in range(c.num_layers) for v in layer_vectors(c)}
        read = (
            {m.name for m in self.all} | vectors | {f"{c.arch.output_norm}.weight", "output_norm.bias", "output.bias"}
        )
        read |= {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
        read |= {"per_layer_proj_norm.weight"} if self.given else set()
        # Some converters leave what a layer has no use for in the file.
        sharing = [n for n in range(c.num_layers) if c.kv_layer(n) != n]
        read |= {f"blk.{n}.{name}.weight" for n in sharing for name in ("attn_k", "attn_v", "attn_k_norm")}
        spare = tuple(f"blk.{c.num_layers + n}." for n in range(c.num_spare_layers))
        for name in gguf.tensors:
            if name not in read and not name.startswith(spare):
                raise UnsupportedModelError(
                    f"{gguf.path.name}: tensor {shown(name)} is of a form of {c.architecture} that is not supported"
                )

    @property
    def token_bytes(self) -> int:
        """Bytes that a single row touches, with logits: one row of the embedding, the experts that it passes."""
        touched = self.head.num_bytes + self.embedding.group_bytes
        if self.given:
            touched += self.given[0].group_bytes + self.given[1].num_bytes
        for layer in self.layers:
            for m in layer.all:
                chosen = self.config.experts.chosen if self.config.experts and m.count > 1 else 1
                touched += m.num_bytes // m.count * chosen
        return touched

    @property
    def all(self) -> list[Matrix]:
        """Each once, in the order in which they are numbered and lie in memory."""
        found = [self.embedding] if self.head is self.embedding else [self.embedding, self.head]
        return [*found, *self.given, *(m for layer in self.layers for m in layer.all)]
