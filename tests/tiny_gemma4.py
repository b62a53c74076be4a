"""What tiny models of Gemma 4 have that no others have: see `tiny_models.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4:
    """All but every n-th layer see a window, and have heads of their own size."""

    every: int = 3
    local_dim: int = 32
    local_kv_heads: int = 2
    shared: int = 0
    """The last so many layers have no keys and values."""
    embedding: int = 0
    """Size of the embeddings for each layer; 0: there are none."""
    keys_are_values: bool = False
    """The layers that see everything have no matrix for values."""

    def is_local(self, layer: int) -> bool:
        return (layer + 1) % self.every != 0

    def keys(self, num_layers: int, head_dim: int, num_kv_heads: int, ffn: int) -> dict[str, Any]:
        """Metadata under the architecture's name."""
        local = [self.is_local(n) for n in range(num_layers)]
        return {
            "attention.sliding_window_pattern": local,
            "attention.shared_kv_layers": self.shared,
            "embedding_length_per_layer_input": self.embedding,
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "attention.key_length_swa": self.local_dim,
            "attention.value_length_swa": self.local_dim,
            "attention.head_count_kv": [self.local_kv_heads if x else num_kv_heads for x in local],
            "feed_forward_length": [ffn if self.has_keys(n, num_layers) else 2 * ffn for n in range(num_layers)],
            "rope.dimension_count": head_dim,
            "rope.dimension_count_swa": self.local_dim,
            "rope.freq_base_swa": 5000.0,
            "final_logit_softcapping": 2.0,
        }

    def has_keys(self, layer: int, num_layers: int) -> bool:
        return layer < num_layers - self.shared

    def block(self, layer: int, num_layers: int, hidden: int, heads: int, head_dim: int, kv_heads: int) -> Shapes:
        """What a layer has in place of what other architectures have, beside the feed-forward layer."""
        dim, groups = (self.local_dim, self.local_kv_heads) if self.is_local(layer) else (head_dim, kv_heads)
        found: Shapes = {
            "attn_q.weight": (heads * dim, hidden),
            "attn_q_norm.weight": (dim,),
            "attn_output.weight": (hidden, heads * dim),
            "layer_output_scale.weight": (1,),
        }
        if self.has_keys(layer, num_layers):
            found |= {"attn_k.weight": (groups * dim, hidden), "attn_k_norm.weight": (dim,)}
            if self.is_local(layer) or not self.keys_are_values:
                found["attn_v.weight"] = (groups * dim, hidden)
        if self.embedding:
            found |= {
                "inp_gate.weight": (self.embedding, hidden),
                "proj.weight": (hidden, self.embedding),
                "post_norm.weight": (hidden,),
            }
        return found

    def others(self, num_layers: int, hidden: int, vocab: int) -> Shapes:
        """Tensors that are of no layer."""
        size = num_layers * self.embedding
        if not size:
            return {}
        return {
            "per_layer_token_embd.weight": (vocab, size),
            "per_layer_model_proj.weight": (size, hidden),
            "per_layer_proj_norm.weight": (self.embedding,),
        }


def expert_shapes(hidden: int, experts: int, expert_ffn: int) -> Shapes:
    """Of the experts beside a feed-forward layer."""
    return {
        "ffn_gate_inp.weight": (experts, hidden),
        "ffn_gate_inp.scale": (hidden,),
        "ffn_gate_up_exps.weight": (experts, 2 * expert_ffn, hidden),
        "ffn_down_exps.weight": (experts, hidden, expert_ffn),
        "ffn_down_exps.scale": (experts,),
        "pre_ffw_norm_2.weight": (hidden,),
        "post_ffw_norm_1.weight": (hidden,),
        "post_ffw_norm_2.weight": (hidden,),
    }
