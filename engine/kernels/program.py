"""A forward step as data: a list of operations that one compiled loop walks (`walk/step.py`).

The model builds the list once from its architecture (`engine/operations.py`); what changes from step to step (rows,
positions, block tables) lies in the `CONTEXT` and in the arrays it points to. Adding an architecture means another
list, not another loop. All records are plain memory shared with compiled code: addresses and counts as int64.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Op(IntEnum):
    """What an operation does. All threads share each, and the next begins when it is done."""

    EMBED = 0
    """x = rows of the embedding matrix, times `factor` if given."""
    NORM = 1
    """activation = quantized norm of x, or x as it is if no weight is given. A norm: x / rms(x) * weight, or if
    `centred` (x - mean) / deviation * weight + bias, the biases behind the weights."""
    MATMUL = 2
    """out = (or +=) activation times `num_matrices` matrices that share it."""
    HEADS = 3
    """Bias, norm and rotation of the heads of q and k; k and v go to the cache."""
    KEEP = 4
    """From here on only the wanted rows go on."""
    ATTEND = 5
    """Attention of q to the cache; of few rows, its softmax states in parts."""
    MERGE = 6
    """activation = quantized attention output, of few rows made of its states."""
    GATED = 7
    """second activation = quantized act(gate) * up, a strip of outputs at a time while it is in L2."""
    ADD_NORM = 8
    """into += out / rms(out) * weight, then times `factor` if given."""
    ROW_NORM = 9
    """out = out / rms(out) * weight over `count` values of a row."""
    CAP = 10
    """out = cap * tanh(out / cap) of `count` values of a row."""
    LONE = 11
    """second activation = quantized act(outputs + bias): a feed-forward layer without a gate, in strips as GATED."""
    ADD_BIAS = 12
    """out += bias over `count` values of a row."""
    ROUTE = 13
    """Which experts each row passes and with which weights, from the router's products in `out`."""
    GROUP = 14
    """The (row, expert) pairs sorted by expert, and for each expert by row: a slot for each."""
    GATHER = 15
    """second activation, a row for each slot, = the activation's rows."""
    EXPERTS_GATED = 16
    """GATED of each expert's slots with its matrices."""
    EXPERTS_DOWN = 17
    """out += (or =) weight * (activation times the expert's matrix), for each row the experts in ascending order."""
    ADD_GATED = 18
    """x += out * sigmoid(the f32 at `factor`, `factor_bytes` from row to row)."""
    CONVOLVE = 19
    """Queries, keys and values of a layer with a running state through its convolution, which goes on: `count` channels
    of qkv."""
    UNIT = 20
    """Of such a layer, q and k get unit length, and each value head its two factors."""
    DELTA = 21
    """The state of each value head takes in the rows in their order; v becomes what it gives."""
    NORM_GATED = 22
    """activation = quantized norm of what each value head gives, times the SiLU of a gate."""
    GIVE = 23
    """given = stretches of `count` values of it, each through a norm, + a row of the matrix times `factor`."""
    GATE_GIVEN = 24
    """second activation = quantized gelu(out) times the layer's stretch of what is given."""
    MIX = 25
    """Of a layer that is a convolution: `count` numbers of qkv = gate * convolution(what comes in), which goes on."""
    TAKE = 26
    """activation = quantized `out`."""
    SCAN_GATES = 27
    """Of a state space layer, each head gets its step and its decay."""
    SCAN = 28
    """The state of each head takes in the rows in their order; v becomes what it gives."""
    GATE_NORM = 29
    """activation = quantized norms of stretches of `count` of what the heads give times the SiLU of a gate."""


class Gate(IntEnum):
    """The activation of a gate (`rows.activate`)."""

    SILU = 0
    GELU = 1
    CLIPPED = 2


class Stored(IntEnum):
    """How the cache has its numbers (`kv_types.py`)."""

    F16 = 0
    F32 = 1
    Q8_0 = 2


def _record(*names: str) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names])


OPERATION = _record(
    "code",
    "wanted",  # 1: runs on the wanted rows only, and not at all when there are none
    "activation",  # index of the activation read (NORM, MERGE, TAKE: written)
    "second",  # GATED, LONE, GATE_GIVEN: index of the activation written
    "matrix",  # index of the first matrix
    "num_matrices",
    "out",  # address of the output [rows, ...] f32
    "out_bytes",  # bytes of an output row
    "add",  # 1: add to the output, 0: put it there
    "into",  # ADD_NORM: address of what is added to [rows, ...] f32
    "into_bytes",
    "count",  # ROW_NORM, CAP, ADD_BIAS, GIVE: values of a row, or of a stretch of it; CONVOLVE, MIX: channels;
    # GATE_NORM: values of a stretch
    "weight",  # address of a norm's weights
    "centred",  # 1: norms are LayerNorm, 0: of the root mean square
    "cap",  # ATTEND, CAP: address of an f32; ATTEND: 0 if scores have no cap
    "factor",  # address of an f32, or 0
    "factor_bytes",
    "activates",  # GATED: of Gate; LONE: 1: GELU, 0: the square of what is above 0
    "bias",  # HEADS: address of the bias of q, k and v, or 0; LONE, ADD_BIAS, EXPERTS_DOWN: of the outputs';
    # EXPERTS_GATED: of gate's and up's, expert by expert; ROUTE: what shares get when experts are chosen by them, or 0;
    # CONVOLVE: of the channels, or 0
    "sinks",  # ATTEND, MERGE: address of a softmax state for each head that is merged last, or 0
    "q_norm",  # HEADS: address of the norm's weights, or 0
    "k_norm",
    "late_norms",  # HEADS: 1: behind the rotation
    "norm_bytes",  # HEADS: from one head's weights to the next one's; 0: all have the same
    "q_scales",  # HEADS: address of a table [positions] f32 that queries are multiplied with; 0: all with the same
    "cos",  # HEADS: addresses of tables [positions, half] f32
    "sin",
    "half",  # rotated pairs of a head
    "neox",
    "head_dim",  # HEADS, ATTEND, MERGE: of this layer
    "num_kv_heads",
    "stored_heads",  # HEADS: keys and values of a row that are stored; num_kv_heads: values are made as keys are; or 0
    "v_norm",  # HEADS: address of the norm's weights, or 0
    "kv_offset",  # bytes of the keys from the start of a KV block; the values follow them
    "kv_head_bytes",  # of the numbers of a KV head in a block, keys or values
    "kv_scale_bytes",  # of their scales; 0: there are none
    "window",  # ATTEND: positions a row sees, itself included; below 0: those from the last multiple of it on; 0: all
    "share",  # values of a share of work, where a row is shared; GIVE: stretches of a row
    "gate",  # ATTEND, MERGE: bytes in a row of qkv where the gates of what attention gives start, 0: there are none;
    # NORM_GATED
    "state_offset",  # CONVOLVE, DELTA, MIX, SCAN: bytes of this layer's state from the start of a slot
    "given_offset",  # GATE_GIVEN: bytes of this layer's stretch
    "skip",  # SCAN: address of a factor for each head, with which a value is added to what the state gives
    "qkv_offset",  # CONVOLVE, SCAN_GATES, SCAN, GATE_NORM: bytes in a row of qkv where the channels start
    "expert_scales",  # ROUTE: address of a factor for each expert, or 0
    "weighted_inputs",  # EXPERTS_GATED, EXPERTS_DOWN: 1: experts take rows times their weight, 0: it is their outputs'
    "rate",  # UNIT, SCAN_GATES: address of the value heads' rates of decay; `bias` is that of their biases
    "interleaved",  # DELTA: 1: neighbouring value heads share a key head
)

MATRIX = _record(
    "address",  # first group
    "multiply",  # address of the format's matmul kernel
    "row",  # address of its dequantize_row kernel
    "group_bytes",
    "num_groups",  # of one expert, where there are several
    "num_blocks",
    "span",
    "out_offset",  # bytes in the output row where this matrix's outputs start
)

ACTIVATION = _record(
    "num_values",
    "unit",  # values that are quantized together at least: a multiple of each span in use
    "base_256",  # address of row 0 in the layout of span 256, or 0 if no matrix wants it
    "row_256",  # bytes of a row
    "base_32",
    "row_32",
    "base_1",
    "row_1",
)

CONTEXT = _record(
    "operations",
    "num_operations",
    "matrices",
    "activations",
    # the model
    "hidden",
    "num_heads",
    "eps",  # address of an f32
    "scale",  # address of an f32: what q is multiplied with
    "kv_memory",
    "kv_block_bytes",
    "kv_stored",  # of Stored
    # layers with a running state
    "key_heads",
    "value_heads",
    "delta_dim",  # of a value
    "key_dim",
    "inner_eps",  # address of an f32: of norms within these layers
    "one",  # address of an f32
    "delta_scale",  # address of an f32: what q of unit length is multiplied with
    "state_memory",
    "state_bytes",  # of a slot
    # the rows of this step
    "num_rows",
    "num_wanted",
    "num_parts",  # softmax parts of the row with the largest position
    "wanted_parts",  # of the wanted rows
    "ids",  # int32 [rows]
    "positions",
    "table_rows",
    "wanted",
    "tables",  # int32 [tables, table_blocks]
    "table_blocks",
    "state_table",  # int32 [tables, segments, 2]: a slot, and up to which of the table's rows the state runs on it
    "num_segments",
    # buffers
    "x",  # f32 [rows, x_bytes / 4]: the residual stream
    "x_bytes",
    "qkv",
    "qkv_bytes",
    "attention",
    "attention_bytes",
    "given",  # f32 [rows, given_bytes / 4]: what gates a branch in each layer
    "given_bytes",
    "states",
    "state_slots",  # parts a query may have
    "scratch",
    "scratch_bytes",  # of one thread
    "products",  # f32 [FEW_ROWS, 2, num_values]: of a few rows with gate and with up
    "strip_groups",  # int64 [strips]: of a strip in which pieces meet, how many have products; 0 between operations
    # mixtures of experts
    "num_experts",
    "num_chosen",  # experts that a row passes
    "expert_sum",  # 1: weights are divided by the sum of those of the chosen experts, 0: of all
    "even_experts",  # 1: an expert's share is the sigmoid of its logit, 0: the softmax
    "expert_scale",  # address of an f32: what they are multiplied with then
    "choices",  # int32 [rows, num_chosen]: experts, the best first
    "choice_weights",  # f32 [rows, num_chosen]
    "expert_slots",  # int32 [num_experts + 1]: an expert's first slot
    "expert_ends",  # int32 [num_experts]: behind its last slot
    "busy_experts",  # int32 [num_experts + 1]: the experts that have slots, ascending, then -1
    "slot_rows",  # int32 [rows * num_chosen]
    "slot_weights",  # f32 [rows * num_chosen]
    "page_bytes",  # of the system, where weights are read from the disk when they are needed; 0: they are in memory
    # the threads
    "num_threads",
    "generation",  # address of a counter: steps started
    "counters",  # one cache line for each operation (`walk/step.py`, `claim`)
)
