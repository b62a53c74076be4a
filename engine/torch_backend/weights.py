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

from engine.config import ConvolutionSizes, DeltaSizes, ModelConfig, ScanSizes
from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf_file import GGUFFile
from engine.kernels.plan import TAPS
from engine.torch_backend.delta import Mix, Recurrence, Scan
from engine.torch_backend.matrices import DeviceMatrix, Form
from engine.torch_backend.parts import Linear, Norm
from engine.weights import load_vector

_KNOWN_FACTS: Final = frozenset(
    (
        "name", "models", "neox_rope", "activation", "gated", "norm", "pre_norms", "post_norms", "parallel",
        "ffn_norm", "whole_head_norms", "late_head_norms", "scale_embedding", "local_layers", "window",
        "local_rope_base", "local_rope_scaling", "local_rotation", "rope_sections", "unrotated_layers",
        "wide_scale_layers", "soft_caps", "file_scales", "logits_multiplied", "temperatures", "experts",
        "normed_experts", "shared_expert", "sinks", "shares", "scattered_experts", "weighted_inputs", "chunks",
        "unit_heads", "unrotated_growth", "output_norm", "scans", "rotation_said", "known_scales", "convolutions",
        "delta_layers", "interleaved_deltas", "layer_sizes", "shared_keys", "normed_values", "unscaled_scores",
        "logit_cap", "layer_embeddings", "layer_scales", "experts_beside",
    )
)  # fmt: skip
"""Fields of ArchSpec that `model.py` obeys, or that ModelConfig has turned into numbers it obeys."""
_KNOWN_SIZES: Final = frozenset(
    (
        "name", "arch", "num_layers", "hidden_size", "num_heads", "heads", "ffn_sizes", "experts",
        "vocab_size", "train_context_size", "norm_eps", "embedding_factor", "attention_scale", "attention_cap",
        "logit_factor", "logit_cap", "rope_base", "rope_scale", "rope_factors", "rope_long_factors",
        "rope_context", "score_growth", "yarn", "rope_magnitude", "window", "local", "is_parallel", "delta",
        "convolution", "scan", "is_unrotated",
        "num_spare_layers", "local_rope_base", "num_shared_layers", "layer_embedding_size",
        "unsaid_ids",
    )
)  # fmt: skip
"""Fields of ModelConfig that are obeyed. Any other one has to be 0, None or empty."""
_KNOWN_WORDS: Final = {
    "activation": ("silu", "gelu", "relu2", "clipped"),
    "norm": ("rms", "centred"),
    "experts": ("no", "maybe", "yes"),
    "shared_expert": ("no", "maybe", "gated", "plain"),
    "shares": ("soft", "even", "file"),
}
"""Of the facts that are words, those that are obeyed."""


@dataclass(frozen=True, slots=True)
class FeedForward:
    """What every row passes, or the experts."""

    gate_up: tuple[Linear, ...]
    """Of gate and up, or one for both; of up alone where nothing is gated."""
    down: Linear


@dataclass(frozen=True, slots=True)
class Attention:
    """What a layer with keys and values has of its own."""

    qkv: tuple[Linear, ...]
    """Of q, k and v, or one for all; of q and k where values are made as keys are; of q where a layer has neither.

    Where other layers have a running state, each head of q is followed by a gate.
    """
    q_norm: Norm | None
    k_norm: Norm | None
    v_norm: Norm | None
    sinks: Tensor | None
    """A score more for each head [H]."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Norms of experts that stand beside what every row passes."""

    of_router: Norm
    before: Norm
    behind: Norm
    behind_dense: Norm
    expert_scales: Tensor
    """Factors of the experts' weights [experts] f32."""


@dataclass(frozen=True, slots=True)
class Given:
    """A branch that a token's embedding for the layer gates."""

    inward: Linear
    outward: Linear
    norm: Norm | None


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer computes with; None where it has no such part."""

    attention_norm: Norm | None
    mixer: Attention | Recurrence | Mix | Scan
    """Where a row learns of those before it."""
    output: Linear
    post_attention_norm: Norm | None
    ffn_norm: Norm | None
    dense: FeedForward | None
    experts: FeedForward | None
    router: Linear | None
    choice_bias: Tensor | None
    """What shares of experts get when some are chosen by them [experts]; None: they are chosen by their logits."""
    shared_gate: DeviceMatrix | None
    post_ffw_norm: Norm | None
    beside: Beside | None
    given: Given | None
    scale: Tensor | None
    """What the stream is multiplied with behind the layer [1]."""


def check_known(gguf: GGUFFile, config: ModelConfig) -> None:
    """Raises UnsupportedModelError for an architecture that says more than this backend looks at."""
    arch = config.arch
    unknown = [
        f.name
        for f in fields(arch)
        if f.name not in _KNOWN_FACTS and (f.default is MISSING or getattr(arch, f.name) != f.default)
    ]
    unknown += [f.name for f in fields(config) if f.name not in _KNOWN_SIZES and getattr(config, f.name)]
    unknown += [
        f"{name} {getattr(arch, name)}" for name in _KNOWN_WORDS if getattr(arch, name) not in _KNOWN_WORDS[name]
    ]
    if unknown:
        what = ", ".join(name.replace("_", " ") for name in unknown)
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
        # Some converters leave what a layer has no use for in the file.
        sharing = [n for n in range(config.num_layers) if config.kv_layer(n) != n]
        self._read |= {f"blk.{n}.{name}.weight" for n in sharing for name in ("attn_k", "attn_v", "attn_k_norm")}
        self.num_bytes = 0
        hidden = config.hidden_size
        self.embedding = self._matrix("token_embd", config.vocab_size, hidden)
        self.given: tuple[DeviceMatrix, Linear, Norm] | None = None
        """Embeddings of a token for each layer, what is added to them, and the norm of that."""
        if size := config.layer_embedding_size:
            width = config.num_layers * size
            table = self._matrix("per_layer_token_embd", config.vocab_size, width)
            norm = Norm(self._vector("per_layer_proj_norm.weight", size), None, config.norm_eps, centred=False)
            self.given = table, self._linear("per_layer_model_proj", width, hidden), norm
        self.layers = [self._layer(n) for n in range(config.num_layers)]
        self.output_norm = self._norm(config.arch.output_norm, factor=config.logit_factor)
        tied = "output.weight" not in gguf.tensors
        head = self.embedding if tied else self._matrix("output", config.vocab_size, hidden)
        bias = self._bias("output", config.vocab_size)
        self.head = Linear(head, None if bias is None else bias[None])
        self._check_all_is_read()

    def _check_all_is_read(self) -> None:
        c = self._config
        spare = tuple(f"blk.{c.num_layers + n}." for n in range(c.num_spare_layers))  # for guesses; they are not run
        for name in self._gguf.tensors:
            if name not in self._read and not name.startswith(spare):
                shown = "".join(x for x in name if x.isprintable())[:64]
                raise UnsupportedModelError(
                    f"{self._gguf.path.name}: the torch backend does not know tensor {shown} of "
                    f"{self._config.arch.name}; --backend cpu may run it"
                )

    # ------------------------------------------------------------------ tensors
    def _has(self, name: str) -> bool:
        return name in self._gguf.tensors

    def _matrix(self, name: str, rows: int, columns: int, experts: int = 0, form: Form | None = None) -> DeviceMatrix:
        name = f"{name}.weight"
        info = self._gguf.tensors.get(name)
        if info is None:
            raise ModelFileError(f"{self._gguf.path.name}: tensor {name} is missing")
        shape = (experts, rows, columns) if experts else (rows, columns)
        if info.shape not in (shape, shape[1:] if rows == 1 else shape):
            raise ModelFileError(
                f"{self._gguf.path.name}: tensor {name} is {info.shape}, and the other sizes in the file ask for "
                f"{shape}"
            )
        self._read.add(name)
        matrix = DeviceMatrix(self._gguf, name, form or self._form, self._device)
        self.num_bytes += matrix.num_bytes
        self._progress("loading weights", len(self._read) / len(self._gguf.tensors))
        return matrix

    def _vector(self, name: str, *shape: int) -> Tensor:
        self._read.add(name)
        return torch.from_numpy(load_vector(self._gguf, name, *shape)).reshape(shape).to(self._device)

    def _bias(self, name: str, *shape: int) -> Tensor | None:
        return self._vector(f"{name}.bias", *shape) if self._has(f"{name}.bias") else None

    def _linear(self, name: str, rows: int, columns: int, experts: int = 0, form: Form | None = None) -> Linear:
        bias = self._bias(name, *((experts, rows) if experts else (rows,)))
        matrix = self._matrix(name, rows, columns, experts, form)
        return Linear(matrix, None if bias is None else bias.view(-1, rows))

    def _norm(self, name: str, factor: float = 1.0) -> Norm:
        size, centred = self._config.hidden_size, self._config.arch.norm == "centred"
        bias = self._bias(name, size) if centred else None
        weight = self._vector(f"{name}.weight", size) * factor
        return Norm(weight, None if bias is None else bias * factor, self._config.norm_eps, centred)

    def _head_norm(self, name: str, heads: int, dim: int) -> Norm | None:
        """Over each head, whose weights may be its own (StableLM 2, Command R+), or over all together."""
        c, name = self._config, f"{name}_norm.weight"
        if c.arch.whole_head_norms:
            return Norm(self._vector(name, heads * dim), None, c.norm_eps, centred=False)
        info = self._gguf.tensors.get(name)
        if info is None:
            return None
        weight = self._vector(name, *((heads, dim) if len(info.shape) > 1 else (dim,)))
        return Norm(weight, None, c.norm_eps, c.arch.norm == "centred")

    def _post_norm(self, name: str) -> Norm | None:
        c = self._config
        if not c.arch.post_norms:
            return None
        return Norm(self._vector(f"{name}.weight", c.hidden_size), None, c.norm_eps, centred=False)

    # ------------------------------------------------------------------ layers
    def _layer(self, n: int) -> Layer:
        c, arch, block = self._config, self._config.arch, f"blk.{n}"
        hidden, e = c.hidden_size, c.experts if c.has_experts(n) else None
        if c.delta is not None and c.has_state(n):
            mixer: Attention | Recurrence | Mix | Scan = self._recurrence(n, c.delta)
            output = self._linear(f"{block}.ssm_out", hidden, c.delta.values)
        elif c.convolution is not None and c.has_state(n):
            mixer = self._mix(n, c.convolution)
            output = self._linear(f"{block}.shortconv.out_proj", hidden, c.convolution.channels)
        elif c.scan is not None and c.has_state(n):
            mixer = self._scan(n, c.scan)
            output = self._linear(f"{block}.ssm_out", hidden, c.scan.values)
        else:
            mixer = self._attention(n)
            output = self._linear(f"{block}.attn_output", hidden, c.num_heads * c.heads[n].dim)
        suffix = "_shexp" if e and not arch.experts_beside else ""
        has_scale = arch.layer_scales and self._has(f"{block}.layer_output_scale.weight")
        return Layer(
            self._norm(f"{block}.attn_norm") if arch.pre_norms else None,
            mixer,
            output,
            self._post_norm(f"{block}.post_attention_norm"),
            self._norm(f"{block}.{arch.ffn_norm}") if arch.pre_norms and not c.is_parallel else None,
            self._feed_forward(block, suffix, c.ffn_sizes[n]) if c.ffn_sizes[n] else None,
            self._feed_forward(block, "_exps", e.ffn_size, e.count) if e else None,
            # Which experts are chosen hangs on little: exact, whatever the others are.
            self._linear(f"{block}.ffn_gate_inp", e.count, hidden, form="f32") if e else None,
            self._bias(f"{block}.exp_probs_b", e.count) if e else None,
            self._matrix(f"{block}.ffn_gate_inp_shexp", 1, hidden, form="f32") if c.has_shared_gate else None,
            self._post_norm(f"{block}.post_ffw_norm"),
            self._beside(block, e.count) if e and arch.experts_beside else None,
            self._given(block, c.layer_embedding_size) if c.layer_embedding_size else None,
            self._vector(f"{block}.layer_output_scale.weight", 1) if has_scale else None,
        )

    def _beside(self, block: str, experts: int) -> Beside:
        hidden, scales = self._config.hidden_size, f"{block}.ffn_down_exps.scale"
        scale = self._vector(f"{block}.ffn_gate_inp.scale", hidden) * hidden**-0.5
        return Beside(
            Norm(scale, None, self._config.norm_eps, centred=False),
            self._norm(f"{block}.pre_ffw_norm_2"),
            self._norm(f"{block}.post_ffw_norm_2"),
            self._norm(f"{block}.post_ffw_norm_1"),
            self._vector(scales, experts) if self._has(scales) else torch.ones(experts, device=self._device),
        )

    def _given(self, block: str, size: int) -> Given:
        hidden = self._config.hidden_size
        inward, outward = self._linear(f"{block}.inp_gate", size, hidden), self._linear(f"{block}.proj", hidden, size)
        return Given(inward, outward, self._post_norm(f"{block}.post_norm"))

    def _attention(self, n: int) -> Attention:
        c, block, heads = self._config, f"blk.{n}", self._config.heads[n]
        queries = c.num_heads * heads.dim
        sizes = {"attn_q": queries * (2 if c.arch.delta_layers else 1), "attn_k": heads.keys, "attn_v": heads.keys}
        if heads.keys_are_values:
            del sizes["attn_v"]
        if c.kv_layer(n) != n:
            sizes = {"attn_q": queries}
        qkv = ["attn_qkv"] if self._has(f"{block}.attn_qkv.weight") else [*sizes]
        ones = torch.ones(heads.dim, device=self._device)
        plain = Norm(ones, None, c.norm_eps, centred=False)
        unit = plain if c.has_unit_heads(n) else None
        return Attention(
            tuple(self._linear(f"{block}.{name}", sizes.get(name, sum(sizes.values())), c.hidden_size) for name in qkv),
            unit or self._head_norm(f"{block}.attn_q", c.num_heads, heads.dim),
            unit or (self._head_norm(f"{block}.attn_k", heads.num_kv_heads, heads.dim) if "attn_k" in sizes else None),
            plain if c.arch.normed_values else None,
            self._vector(f"{block}.attn_sinks.weight", c.num_heads) if c.arch.sinks else None,
        )

    def _scan(self, n: int, sizes: ScanSizes) -> Scan:
        block, heads = f"blk.{n}.ssm", sizes.num_heads
        groups = sizes.num_groups, sizes.values // sizes.num_groups
        return Scan(
            sizes,
            sorted(sizes.layers).index(n),
            # Its steps add up from token to token: exact, whatever the others are.
            self._linear(f"{block}_in", sizes.rows, self._config.hidden_size, form="f32"),
            self._vector(f"{block}_conv1d.weight", sizes.channels, TAPS).T.contiguous(),
            self._bias(f"{block}_conv1d", sizes.channels),
            self._vector(f"{block}_dt.bias", heads),
            self._vector(f"{block}_a", heads, 1)[:, 0],
            self._vector(f"{block}_d", heads, 1),
            Norm(self._vector(f"{block}_norm.weight", *groups), None, sizes.norm_eps, centred=False),
        )

    def _mix(self, n: int, sizes: ConvolutionSizes) -> Mix:
        block = f"blk.{n}.shortconv"
        taps = torch.zeros(TAPS, sizes.channels, device=self._device)
        taps[TAPS - sizes.taps :] = self._vector(f"{block}.conv.weight", sizes.channels, sizes.taps).T
        number = sorted(sizes.layers).index(n)
        return Mix(number, self._linear(f"{block}.in_proj", 3 * sizes.channels, self._config.hidden_size), taps)

    def _recurrence(self, n: int, sizes: DeltaSizes) -> Recurrence:
        c, block, heads = self._config, f"blk.{n}", sizes.num_value_heads
        factors = {"ba": 2 * heads} if c.arch.interleaved_deltas else {"beta": heads, "alpha": heads}
        return Recurrence(
            sizes,
            sorted(sizes.layers).index(n),
            c.arch.interleaved_deltas,
            self._linear(f"{block}.attn_qkv", sizes.channels, c.hidden_size),
            self._linear(f"{block}.attn_gate", sizes.values, c.hidden_size),
            # What they say adds up from token to token: exact, whatever the others are.
            tuple(self._linear(f"{block}.ssm_{x}", rows, c.hidden_size, form="f32") for x, rows in factors.items()),
            self._vector(f"{block}.ssm_conv1d.weight", sizes.channels, TAPS).T.contiguous(),
            self._vector(f"{block}.ssm_dt.bias", heads),
            self._vector(f"{block}.ssm_a", heads),
            Norm(self._vector(f"{block}.ssm_norm.weight", sizes.head_dim), None, c.norm_eps, centred=False),
        )

    def _feed_forward(self, block: str, suffix: str, size: int, experts: int = 0) -> FeedForward:
        names = ["ffn_gate", "ffn_up"] if self._config.arch.gated else ["ffn_up"]
        rows, hidden = size, self._config.hidden_size
        if self._config.arch.gated and not self._has(f"{block}.ffn_gate{suffix}.weight"):
            # One tensor has both, the gate first.
            names = ["ffn_gate_up" if self._has(f"{block}.ffn_gate_up{suffix}.weight") else "ffn_up"]
            rows = 2 * size
        return FeedForward(
            tuple(self._linear(f"{block}.{name}{suffix}", rows, hidden, experts) for name in names),
            self._linear(f"{block}.ffn_down{suffix}", hidden, size, experts),
        )
