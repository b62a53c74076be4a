"""What every kernel computes, in plain NumPy: the definition that compiled code is held to, bit for bit.

Each function says in f32, operation by operation and in the same order, what a kernel does; where a kernel has one
rounding (`fma32`), so has the twin. What a kernel may choose freely does not show here: tiles, lanes that are summed as
integers, the layout in memory, how work is split. Weights come as the file's own blocks. Nothing at run time uses this
package.

arithmetic.py     numbers as compiled code has them
products.py       quantized activations and matrix products (kernels: matmul.py, panel.py)
rows.py           norms, activation functions, rotation (kernels: rows.py)
routing.py        the choice of experts (kernels: routing.py)
attention.py      keys and values, attention (kernels: attention.py, fixed.py, kv_types.py)
running_state.py  convolutions, the gated delta rule, state spaces (kernels: delta.py, scan.py)
"""

from __future__ import annotations

from engine.kernels.twins.arithmetic import (
    exp,
    fma32,
    larger,
    tree,
)
from engine.kernels.twins.attention import (
    State,
    attention,
    finish,
    fixed_cached,
    fixed_points,
    fixed_query,
    fixed_scores,
    fixed_weigh,
    fixed_weights,
    from_q8_0,
    kept,
    merge,
    scores,
    softmax,
    to_half,
    to_q8_0,
    weigh,
)
from engine.kernels.twins.products import (
    Activations,
    activation_span,
    dequantize_row,
    matmul,
    quantize,
)
from engine.kernels.twins.routing import (
    choose,
    choose_biased,
)
from engine.kernels.twins.rows import (
    branch_normed,
    capped,
    centred,
    clipped,
    gelu,
    inverse_rms,
    lone_gelu,
    lone_relu2,
    normed,
    rotate,
    sigmoid,
    silu,
)
from engine.kernels.twins.running_state import (
    convolve,
    delta,
    gate_silu,
    mix,
    norm_gated,
    scan,
    softplus,
    unit,
)

__all__ = [
    "Activations",
    "State",
    "activation_span",
    "attention",
    "branch_normed",
    "capped",
    "centred",
    "choose",
    "choose_biased",
    "clipped",
    "convolve",
    "delta",
    "dequantize_row",
    "exp",
    "finish",
    "fixed_cached",
    "fixed_points",
    "fixed_query",
    "fixed_scores",
    "fixed_weigh",
    "fixed_weights",
    "fma32",
    "from_q8_0",
    "gate_silu",
    "gelu",
    "inverse_rms",
    "kept",
    "larger",
    "lone_gelu",
    "lone_relu2",
    "matmul",
    "merge",
    "mix",
    "norm_gated",
    "normed",
    "quantize",
    "rotate",
    "scan",
    "scores",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "to_half",
    "to_q8_0",
    "tree",
    "unit",
    "weigh",
]
