"""Nomic's BERT: configs as on the hub except for sizes, the formula of its code, and the names of its tensors."""

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
    embed,
    inverse_frequencies,
    linear,
    norm,
    rope,
    tables,
    tensors,
)

NOMIC: Config = {
    "activation_function": "swiglu",
    "architectures": ["NomicBertModel"],
    "attn_pdrop": 0.0,
    "auto_map": {
        "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
        "AutoModelForMaskedLM": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertForPreTraining",
    },
    "bos_token_id": None,
    "causal": False,
    "dense_seq_output": True,
    "embd_pdrop": 0.0,
    "eos_token_id": None,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": 48,
    "n_head": 4,
    "n_inner": 256,
    "n_layer": 3,
    "n_positions": 8192,
    "pad_vocab_size_multiple": 8,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.0,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "torch_dtype": "float32",
    "transformers_version": "4.34.0",
    "type_vocab_size": 2,
    "use_cache": True,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "use_xentropy": True,
    "vocab_size": VOCABULARY,
}


NOMIC_MOE: Config = NOMIC | {
    "activation_function": "gelu",
    "add_pooling_layer": False,
    "expert_choice_router": False,
    "ffn_div": 1,
    "layer_norm_epsilon": 1e-05,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "moe_every_n_layers": 2,
    "moe_impl": "megablocks",
    "moe_normalize_expert_weights": False,
    "moe_resid_pdrop": 0.0,
    "moe_top_k": 2,
    "n_inner": 96,
    "n_layer": 4,
    "n_positions": 2048,
    "num_experts": 8,
    "num_shared_experts": 0,
    "pad_token_id": 1,
    "pad_vocab_size_multiple": 64,
    "qkv_proj_bias": True,
    "rotary_emb_base": 10000,
    "router_aux_loss_coef": 0.1,
    "type_vocab_size": 1,
}


NOMIC_TWICE = NOMIC | {
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 256,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
}


def nomic(w: W, c: Config, ids: Tensor) -> Tensor:
    heads, eps = c["n_head"], c["layer_norm_epsilon"]
    turns = inverse_frequencies(c["rotary_emb_base"], int(c["n_embd"] // heads * c["rotary_emb_fraction"]))
    gate = {"swiglu": F.silu, "geglu": F.gelu, "glu": torch.sigmoid}.get(c["activation_function"])
    x = norm(w, "emb_ln", embed(w, ids), eps)
    for i in range(c["n_layer"]):
        at = f"encoder.layers.{i}."
        q, k, v = linear(w, at + "attn.Wqkv", x).chunk(3, -1)
        q, k = (rope(part, heads, turns, interleaved=c["rotary_emb_interleaved"]) for part in (q, k))
        x = norm(w, at + "norm1", x + linear(w, at + "attn.out_proj", attention(q, k, v, heads)), eps)
        if gate is None and has_experts(c, i):
            x = norm(w, at + "norm2", x + nomic_experts(w, c, at + "mlp.", x), eps)
            continue
        y = (
            F.gelu(linear(w, at + "mlp.fc1", x))
            if gate is None
            else linear(w, at + "mlp.fc11", x) * gate(linear(w, at + "mlp.fc12", x))
        )
        x = norm(w, at + "norm2", x + linear(w, at + "mlp.fc2", y), eps)
    return x


def has_experts(c: Config, i: int) -> bool:
    return c["moe_every_n_layers"] > 0 and i % c["moe_every_n_layers"] == 1


def nomic_experts(w: W, c: Config, at: str, x: Tensor) -> Tensor:
    """Compute the experts token by token."""
    weights, experts = F.linear(x, w[at + "router.layer.weight"]).softmax(-1).topk(c["moe_top_k"], -1)
    up, down = (w[f"{at}experts.mlp.{name}"].view(c["num_experts"], c["n_inner"], c["n_embd"]) for name in ("w1", "w2"))
    rows = [
        sum(weight * (F.gelu(row @ up[e].T) @ down[e]) for weight, e in zip(*pair, strict=True))
        for row, *pair in zip(x, weights, experts, strict=True)
    ]
    return torch.stack([torch.as_tensor(row) for row in rows]) + w[at + "experts.bias"]


def nomic_names(c: Config) -> Shapes:
    d, multiple = c["n_embd"], c["pad_vocab_size_multiple"]
    inner = -(-(c["n_inner"] or int(8 * d / 3)) // 256) * 256
    shapes = tables(-(-c["vocab_size"] // multiple) * multiple, c["type_vocab_size"], d, "emb_ln")
    for i in range(c["n_layer"]):
        at = f"encoder.layers.{i}."
        shapes |= tensors(at + "attn.Wqkv", 3 * d, d, bias=c["qkv_proj_bias"])
        shapes |= tensors(at + "attn.out_proj", d, d, bias=c["qkv_proj_bias"])
        shapes |= tensors(at + "norm1", d) | tensors(at + "norm2", d)
        if c["activation_function"] == "gelu":
            shapes |= nomic_ungated_names(c, at + "mlp.", experts=has_experts(c, i))
            continue
        shapes |= tensors(at + "mlp.fc11", inner, d, bias=c["mlp_fc1_bias"])
        shapes |= tensors(at + "mlp.fc12", inner, d, bias=c["mlp_fc1_bias"])
        shapes |= tensors(at + "mlp.fc2", d, inner, bias=c["mlp_fc2_bias"])
    return shapes


def nomic_ungated_names(c: Config, at: str, *, experts: bool) -> Shapes:
    d, inner, num = c["n_embd"], c["n_inner"], c["num_experts"]
    if not experts:
        return tensors(at + "fc1", inner, d) | tensors(at + "fc2", d, inner)
    shapes: Shapes = {f"{at}router.layer.weight": (num, d), f"{at}experts.bias": (d,)}
    return shapes | {f"{at}experts.mlp.{name}": (num * inner, d) for name in ("w1", "w2")}
