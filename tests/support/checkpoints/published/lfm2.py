"""LFM2.5 encoders: config as on the hub except for sizes, the formula of their code, and the names of their tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoints.families import VOCABULARY
from checkpoints.published.blocks import (
    Config,
    Shapes,
    W,
    attention,
    head_rms,
    inverse_frequencies,
    linear,
    repeat,
    rms,
    rope,
    tensors,
)

LFM2: Config = {
    "architectures": ["Lfm2BidirectionalModel"],
    "auto_map": {"AutoModel": "modeling_lfm2_bidirectional.Lfm2BidirectionalModel"},
    "block_auto_adjust_ff_dim": True,
    "block_dim": 48,
    "block_ff_dim": 120,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 16,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 48,
    "conv_use_xavier_init": True,
    "dtype": "bfloat16",
    "eos_token_id": 7,
    "full_attn_idxs": None,
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 120,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 4,
    "num_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "tie_embedding": True,
    "tie_word_embeddings": True,
    "transformers_version": "4.56.2",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": VOCABULARY,
}


LFM2_ENCODER: Config = {
    "architectures": ["Lfm2BidirectionalForMaskedLM"],
    "auto_map": {
        "AutoModel": "modeling_lfm2_bidirectional.Lfm2BidirectionalModel",
        "AutoModelForMaskedLM": "modeling_lfm2_bidirectional.Lfm2BidirectionalForMaskedLM",
    },
    "use_cache": False,
}
"""Keys of LiquidAI/LFM2.5-Encoder-350M besides those of `LFM2`."""


def lfm2(w: W, c: Config, ids: Tensor, attended: int | None = None) -> Tensor:
    """Compute LFM2.5's encoder: convolutions and attention that see both ways. `attended` tokens are attended to."""
    heads, kv, eps = c["num_attention_heads"], c["num_key_value_heads"], c["norm_eps"]
    width = c["hidden_size"] // heads
    turns = inverse_frequencies(c["rope_parameters"]["rope_theta"], width)
    x = w["embed_tokens.weight"][ids]
    for i, kind in enumerate(c["layer_types"]):
        at = f"layers.{i}."
        y = rms(w, at + "operator_norm", x, eps)
        if kind == "conv":
            before, after, y = linear(w, at + "conv.in_proj", y).chunk(3, -1)
            taps, wide = w[at + "conv.conv.weight"], F.pad(before * y, (0, 0, 1, 1))
            y = sum(wide[tap : tap + len(x)] * taps[:, 0, tap] for tap in range(3))
            y = linear(w, at + "conv.out_proj", after * y)
        else:
            q, k, v = (linear(w, f"{at}self_attn.{part}_proj", y) for part in "qkv")
            q = rope(head_rms(w, at + "self_attn.q_layernorm", q, heads, eps), heads, turns)
            k = rope(head_rms(w, at + "self_attn.k_layernorm", k, kv, eps), kv, turns)
            k, v = (repeat(part, width, heads // kv) for part in (k, v))
            hidden = torch.zeros(len(x))
            hidden[attended or len(x) :] = -torch.inf
            y = linear(w, at + "self_attn.out_proj", attention(q, k, v, heads, hidden))
        x = x + y
        y = rms(w, at + "ffn_norm", x, eps)
        gate, up = (linear(w, f"{at}feed_forward.{part}", y) for part in ("w1", "w3"))
        x = x + linear(w, at + "feed_forward.w2", F.silu(gate) * up)
    return rms(w, "embedding_norm", x, eps)


def lfm2_names(c: Config) -> Shapes:
    d, inner, kv = c["hidden_size"], 80, c["hidden_size"] * c["num_key_value_heads"] // c["num_attention_heads"]
    shapes = tensors("embed_tokens", c["vocab_size"], d, bias=False) | tensors("embedding_norm", d, bias=False)
    for i, kind in enumerate(c["layer_types"]):
        at = f"layers.{i}."
        if kind == "conv":
            shapes |= tensors(at + "conv.in_proj", 3 * d, d, bias=False) | tensors(at + "conv.out_proj", d, d, bias=False)
            shapes |= {at + "conv.conv.weight": (d, 1, 3)}
        else:
            for part, out in (("q_proj", d), ("k_proj", kv), ("v_proj", kv), ("out_proj", d)):
                shapes |= tensors(f"{at}self_attn.{part}", out, d, bias=False)
            for part in "qk":
                shapes |= tensors(f"{at}self_attn.{part}_layernorm", d // c["num_attention_heads"], bias=False)
        shapes |= tensors(at + "feed_forward.w1", inner, d, bias=False) | tensors(at + "feed_forward.w3", inner, d, bias=False)
        shapes |= tensors(at + "feed_forward.w2", d, inner, bias=False)
        shapes |= tensors(at + "operator_norm", d, bias=False) | tensors(at + "ffn_norm", d, bias=False)
    return shapes
