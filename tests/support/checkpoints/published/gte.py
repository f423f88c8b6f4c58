"""GTE and Arctic: configs as on the hub except for sizes, the formula of their code, and the names of their tensors."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from checkpoints.families import VOCABULARY
from checkpoints.published.blocks import (
    Config,
    Shapes,
    W,
    attention,
    embed,
    inverse_frequencies,
    linear,
    norm,
    rope,
    tables,
    tensors,
)

NEW: Config = {
    "architectures": ["NewModel"],
    "attention_probs_dropout_prob": 0.0,
    "auto_map": {
        "AutoConfig": "Alibaba-NLP/new-impl--configuration.NewConfig",
        "AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel",
    },
    "classifier_dropout": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": 8192,
    "model_type": "new",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "pack_qkv": True,
    "pad_token_id": 1,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 8.0, "type": "ntk"},
    "rope_theta": 20000,
    "torch_dtype": "float16",
    "transformers_version": "4.39.1",
    "type_vocab_size": 1,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
    "vocab_size": VOCABULARY,
}


ARCTIC = NEW | {
    "architectures": ["GteModel"],
    "auto_map": {
        "AutoConfig": "configuration_hf_alibaba_nlp_gte.GteConfig",
        "AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel",
    },
    "matryoshka_dimensions": [16],
    "model_type": "gte",
    "rope_scaling": None,
    "rope_theta": 160000,
    "unpad_inputs": True,
    "use_memory_efficient_attention": True,
}


def new(w: W, c: Config, ids: Tensor) -> Tensor:
    heads, eps, inner = c["num_attention_heads"], c["layer_norm_eps"], c["intermediate_size"]
    width = c["hidden_size"] // heads
    turns = inverse_frequencies(c["rope_theta"], width)
    if c["rope_scaling"] and (factor := c["rope_scaling"]["factor"]) > 1:
        turns = inverse_frequencies(c["rope_theta"] * factor, width) / factor ** (2 / width)
    x = norm(w, "embeddings.LayerNorm", embed(w, ids), eps)
    for i in range(c["num_hidden_layers"]):
        at = f"encoder.layer.{i}."
        q, k, v = linear(w, at + "attention.qkv_proj", x).chunk(3, -1)
        attended = attention(rope(q, heads, turns), rope(k, heads, turns), v, heads)
        x = norm(w, at + "attn_ln", x + linear(w, at + "attention.o_proj", attended), eps)
        up, gate = linear(w, at + "mlp.up_gate_proj", x).split(inner, -1)
        x = norm(w, at + "mlp_ln", x + linear(w, at + "mlp.down_proj", F.gelu(gate) * up), eps)
    return x


def new_names(c: Config) -> Shapes:
    d, inner = c["hidden_size"], c["intermediate_size"]
    shapes = tables(c["vocab_size"], c["type_vocab_size"], d, "embeddings.LayerNorm")
    for i in range(c["num_hidden_layers"]):
        at = f"encoder.layer.{i}."
        shapes |= tensors(at + "attention.qkv_proj", 3 * d, d) | tensors(at + "attention.o_proj", d, d)
        shapes |= tensors(at + "mlp.up_gate_proj", 2 * inner, d, bias=False) | tensors(at + "mlp.down_proj", d, inner)
        shapes |= tensors(at + "attn_ln", d) | tensors(at + "mlp_ln", d)
    return shapes
