"""The layers of a model that keep a running state or are convolutions, read from its file: which, and their sizes."""

from __future__ import annotations

import numpy as np

from engine.config import ConvolutionSizes, DeltaSizes, ScanSizes
from engine.config_rope import rotates_all_pairs
from engine.errors import ModelFileError
from engine.kernels.plan import DELTA_COLUMNS, TAPS
from engine.metadata_reader import MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH, MetadataReader


def _without_heads(reader: MetadataReader, layers: int, what: str) -> frozenset[int]:
    """The layers without KV heads; `what` they are is for the error. Some must have KV heads, all the same number."""
    counts = reader.counts("attention.head_count_kv", layers, most=MAX_WIDTH)
    found = frozenset(n for n in range(layers) if counts[n] == 0)
    unsupported = ""
    if not found or len(found) == layers:
        unsupported = f"layers of one kind only (some that are {what}, some with attention)"
    elif len(set(counts)) > 2:
        unsupported = "layers with different numbers of KV heads"
    reader.check_runs(unsupported)
    return found


def scan_sizes(reader: MetadataReader, layers: int) -> ScanSizes:
    """Sizes of the state space layers, which are those without KV heads."""
    inner, heads = (reader.integer(f"ssm.{name}", most=MAX_WIDTH) for name in ("inner_size", "time_step_rank"))
    sizes = ScanSizes(
        layers=_without_heads(reader, layers, "state space layers"),
        num_heads=heads,
        head_dim=inner // heads,
        num_groups=reader.integer("ssm.group_count", most=MAX_WIDTH),
        key_dim=reader.integer("ssm.state_size", most=MAX_WIDTH),
        norm_eps=reader.number("attention.layer_norm_rms_epsilon", None, least=0.0, most=1.0),
    )
    taps, groups = reader.integer("ssm.conv_kernel", most=MAX_WIDTH), sizes.num_groups
    if sizes.values != inner or heads % groups:
        raise ModelFileError(f"{reader.file}: {heads} heads in {groups} groups do not make layers of {inner}")
    unsupported = ""
    if taps != TAPS:
        unsupported = f"a convolution over {taps} tokens (only {TAPS})"
    elif sizes.head_dim % DELTA_COLUMNS or sizes.key_dim % 16 or sizes.key_dim > 1024:
        unsupported = (
            f"states of {sizes.key_dim} times {sizes.head_dim} numbers (multiples of 16 up to 1024, and of "
            f"{DELTA_COLUMNS})"
        )
    reader.check_runs(unsupported)
    return sizes


def convolution_sizes(reader: MetadataReader, layers: int, hidden: int) -> ConvolutionSizes:
    """Sizes of the short convolutions, which are the layers without KV heads."""
    taps = reader.integer("shortconv.l_cache", most=MAX_WIDTH)
    sizes = ConvolutionSizes(layers=_without_heads(reader, layers, "convolutions"), channels=hidden, taps=taps)
    unsupported = ""
    if taps > TAPS:
        unsupported = f"a convolution over {taps} tokens (at most {TAPS})"
    elif reader.integer("attention.sliding_window", 0, least=0, most=MAX_CONTEXT):
        unsupported = f"{reader.arch.name} with a sliding window"
    reader.check_runs(unsupported)
    return sizes


def delta_sizes(reader: MetadataReader, layers: int) -> DeltaSizes:
    """Sizes of the layers that follow the delta rule, and which layers these are."""
    marks = reader.value("attention.recurrent_layers")
    if marks is None:
        every = reader.integer("full_attention_interval", 4, most=MAX_LAYERS)
        marks = [(n + 1) % every != 0 for n in range(layers)]
    if not isinstance(marks, (list, np.ndarray)) or len(marks) < layers:
        raise reader.bad(
            "attention.recurrent_layers", f"must say for each of {layers} layers whether it keeps a running state"
        )
    sizes = DeltaSizes(
        layers=frozenset(n for n in range(layers) if marks[n]),
        num_key_heads=reader.integer("ssm.group_count", most=MAX_WIDTH),
        num_value_heads=reader.integer("ssm.time_step_rank", most=MAX_WIDTH),
        head_dim=reader.integer("ssm.state_size", most=MAX_WIDTH),
    )
    taps, inner = reader.integer("ssm.conv_kernel", most=MAX_WIDTH), reader.integer("ssm.inner_size", most=MAX_WIDTH)
    if inner != sizes.values or sizes.num_value_heads % sizes.num_key_heads:
        raise ModelFileError(
            f"{reader.file}: {sizes.num_key_heads} key heads and {sizes.num_value_heads} value heads of "
            f"{sizes.head_dim} do not make layers of {inner}"
        )
    unsupported = ""
    if not rotates_all_pairs(reader):
        unsupported = "pairs of a head that have no position in a text"
    elif taps != TAPS:
        unsupported = f"a convolution over {taps} tokens (only {TAPS})"
    elif sizes.head_dim % DELTA_COLUMNS or sizes.head_dim > 1024:
        unsupported = f"a state of {sizes.head_dim} numbers in a row (multiples of {DELTA_COLUMNS} up to 1024)"
    elif not sizes.layers or len(sizes.layers) == layers:
        unsupported = "layers of one kind only (some with a running state, some with attention)"
    reader.check_runs(unsupported)
    return sizes
