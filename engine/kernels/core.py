"""The kernels every model needs, by the names the walk calls them."""

from __future__ import annotations

from engine.kernels import attention, delta, fixed, kv_types, routing, rows, scan
from engine.kernels.dot import ActivationLayout
from engine.kernels.ir import Kernel
from engine.kernels.target import Target


def kernels(target: Target) -> dict[str, Kernel]:
    """All kernels of the core module."""
    activations = {
        f"{source}_{span}": rows.activate(ActivationLayout(span), source)
        for source in rows.SOURCES
        for span in (256, 32, 1)
    }
    return {
        **activations,
        **delta.KERNELS,
        **scan.KERNELS,
        "inverse_rms": rows.inverse_rms,
        "deviation": rows.deviation,
        "add_normed": rows.add_normed,
        "add_scaled": rows.add_scaled,
        "add_gated": rows.add_gated,
        "choose": routing.choose,
        "choose_biased": routing.choose_biased,
        "scale_choices": routing.scale_choices,
        "add_vector": rows.add_vector,
        "scale_vector": rows.scale_vector,
        "norm_vector": rows.norm_vector,
        "centre_vector": rows.centre_vector,
        "cap_vector": rows.cap_vector,
        "rotate_neox": rows.rotate(True),
        "rotate_pairs": rows.rotate(False),
        "store_key_f16": kv_types.store_key_f16,
        "store_value_f16": kv_types.store_value_f16,
        "store_key_f32": kv_types.store_key_f32,
        "store_value_f32": kv_types.store_value_f32,
        "store_key_q8_0": kv_types.store_key_q8_0,
        "store_value_q8_0": kv_types.store_value_q8_0,
        "widen_keys_q8_0": kv_types.widen_keys_q8_0,
        "widen_values_q8_0": kv_types.widen_values_q8_0,
        **fixed.kernels(target),
        "scores_floats": attention.scores(target.query_tiles),
        "weigh_floats": attention.weigh(target.query_tiles),
        "softmax": attention.softmax(target),
        "merge": attention.merge,
        "finish": attention.finish,
    }
