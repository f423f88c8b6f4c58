"""Checkpoints that came with code of their own: hidden states against the formula that their code computes.

transformers cannot load these layouts offline, so each formula is written out here, for one text, over weights under the names
that they have on the hub. Where transformers has the model too, it is asked as well.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_models import DECODER, ROBERTA, SIZES, VOCABULARY, assert_close, hidden, reference, rows, write
from torch import Tensor

from checkpoints import bert_tokenizer, edit_json, write_json
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError
from whimbrel.model.load import load_model

Shapes = dict[str, tuple[int, ...]]
W = dict[str, Tensor]
Config = dict[str, Any]

# Configs as they are on the hub, but for the sizes

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
JINA_BERT: Config = {
    "_name_or_path": "jinaai/jina-bert-implementation",
    "architectures": ["JinaBertForMaskedLM"],
    "attention_probs_dropout_prob": 0.0,
    "attn_implementation": "torch",
    "auto_map": {
        "AutoConfig": "jinaai/jina-bert-implementation--configuration_bert.JinaBertConfig",
        "AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel",
        "AutoModelForMaskedLM": "jinaai/jina-bert-implementation--modeling_bert.JinaBertForMaskedLM",
    },
    "classifier_dropout": None,
    "emb_pooler": "mean",
    "feed_forward_type": "geglu",
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 8192,
    "model_max_length": 8192,
    "model_type": "bert",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "position_embedding_type": "alibi",
    "torch_dtype": "float32",
    "transformers_version": "4.26.0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": VOCABULARY,
}
JINA_CODE = JINA_BERT | {"auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}}
JINA_ROBERTA: Config = {
    "architectures": ["XLMRobertaModel"],
    "attention_probs_dropout_prob": 0.1,
    "auto_map": {
        "AutoConfig": "jinaai/xlm-roberta-flash-implementation--configuration_xlm_roberta.XLMRobertaFlashConfig",
        "AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_xlm_roberta.XLMRobertaModel",
    },
    "bos_token_id": 0,
    "classifier_dropout": None,
    "emb_pooler": None,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "layer_norm_eps": 1e-05,
    "load_trained_adapters": False,
    "lora_adaptations": None,
    "lora_alpha": 1,
    "lora_dropout_p": 0.0,
    "lora_main_params_trainable": False,
    "lora_rank": 4,
    "matryoshka_dimensions": [16, 32],
    "max_position_embeddings": 8194,
    "model_type": "xlm-roberta",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "output_past": True,
    "pad_token_id": 1,
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.4",
    "truncate_dim": None,
    "type_vocab_size": 1,
    "use_cache": True,
    "use_flash_attn": True,
    "use_reentrant": False,
    "vocab_size": VOCABULARY,
}
INTERNLM2: Config = {
    "architectures": ["InternLM2ForCausalLM"],
    "attn_implementation": "eager",
    "auto_map": {
        "AutoConfig": "configuration_internlm2.InternLM2Config",
        "AutoModel": "modeling_internlm2.InternLM2ForCausalLM",
        "AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM",
    },
    "bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 32768,
    "model_type": "internlm2",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 2.0, "type": "dynamic"},
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.0",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}
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
"""Of LiquidAI/LFM2.5-Embedding-350M."""

# The formulas


def linear(w: W, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def norm(w: W, name: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def embed(w: W, ids: Tensor) -> Tensor:
    x = w["embeddings.word_embeddings.weight"][ids]
    return x + w["embeddings.token_type_embeddings.weight"][0] if "embeddings.token_type_embeddings.weight" in w else x


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, bias: Tensor | float = 0.0) -> Tensor:
    """Return softmax(q k' / sqrt(H) + bias) v, for (L, D) each."""
    q, k, v = (x.view(len(x), heads, -1).transpose(0, 1) for x in (q, k, v))
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + bias
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def rope(x: Tensor, heads: int, inverse: Tensor, *, interleaved: bool = False) -> Tensor:
    """Return x cos + rotate_half(x) sin on the first columns of each head."""
    length, width = len(x), 2 * len(inverse)
    angles = torch.outer(torch.arange(length).float(), inverse)
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    x = x.view(length, heads, -1)
    part = x[..., :width]
    if interleaved:
        half = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
    else:
        a, b = part.chunk(2, -1)
        half = torch.cat((-b, a), -1)
    turned = part * angles.cos()[:, None] + half * angles.sin()[:, None]
    return torch.cat((turned, x[..., width:]), -1).flatten(1)


def inverse_frequencies(theta: float, width: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, width, 2).float() / width)


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


def slopes(heads: int) -> list[float]:
    """Return the slopes of the ALiBi paper's code, for any number of heads."""
    power = 2 ** int(np.log2(heads))
    first = [2.0 ** (-8.0 * n / power) for n in range(1, power + 1)]
    return first if power == heads else first + slopes(2 * power)[::2][: heads - power]


def jina_bert(w: W, c: Config, ids: Tensor) -> Tensor:
    """Compute either implementation. The second has norms of queries and keys, and other norms and halves in the layer."""
    heads, eps, inner = c["num_attention_heads"], c["layer_norm_eps"], c["intermediate_size"]
    act = {"geglu": F.gelu, "reglu": F.relu, "original": F.gelu}[c["feed_forward_type"]]
    places = torch.arange(len(ids))
    bias = -torch.tensor(slopes(heads))[:, None, None] * (places[:, None] - places[None]).abs()
    x = norm(w, "embeddings.LayerNorm", embed(w, ids), eps)
    for i in range(c["num_hidden_layers"]):
        at = f"encoder.layer.{i}."
        q, k, v = (linear(w, f"{at}attention.self.{part}", x) for part in ("query", "key", "value"))
        is_code = at + "layer_norm_1.weight" in w
        if is_code:
            q, k = norm(w, at + "attention.self.layer_norm_q", q, eps), norm(w, at + "attention.self.layer_norm_k", k, eps)
        attended = linear(w, at + "attention.output.dense", attention(q, k, v, heads, bias))
        attended = norm(w, at + "attention.output.LayerNorm", attended + x, eps)
        if is_code:
            x = norm(w, at + "layer_norm_1", x + attended, eps)
            up, gate = linear(w, at + "mlp.up_gated_layer", x).split(inner, -1)
            x = norm(w, at + "layer_norm_2", x + linear(w, at + "mlp.down_layer", up * act(gate)), eps)
        elif c["feed_forward_type"] == "original":
            y = linear(w, at + "output.dense", act(linear(w, at + "intermediate.dense", attended)))
            x = norm(w, at + "output.LayerNorm", y + attended, eps)
        else:
            gate, up = linear(w, at + "mlp.gated_layers", attended).split(inner, -1)
            x = norm(w, at + "mlp.layernorm", linear(w, at + "mlp.wo", act(gate) * up) + attended, eps)
    return x


def jina_roberta(w: W, c: Config, ids: Tensor) -> Tensor:
    heads, eps = c["num_attention_heads"], c["layer_norm_eps"]
    turns = inverse_frequencies(c["rotary_emb_base"], c["hidden_size"] // heads)
    x = norm(w, "emb_ln", embed(w, ids), eps)
    for i in range(c["num_hidden_layers"]):
        at = f"encoder.layers.{i}."
        q, k, v = linear(w, at + "mixer.Wqkv", x).chunk(3, -1)
        attended = attention(rope(q, heads, turns), rope(k, heads, turns), v, heads)
        x = norm(w, at + "norm1", x + linear(w, at + "mixer.out_proj", attended), eps)
        approximate = "none" if c["hidden_act"] == "gelu" else "tanh"
        y = F.gelu(linear(w, at + "mlp.fc1", x), approximate=approximate)
        x = norm(w, at + "norm2", x + linear(w, at + "mlp.fc2", y), eps)
    return x


def rms(w: W, name: str, x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]


def repeat(x: Tensor, width: int, times: int) -> Tensor:
    """Repeat each head for the queries that share it."""
    return x.view(len(x), -1, width).repeat_interleave(times, 1).flatten(1)


def head_rms(w: W, name: str, x: Tensor, heads: int, eps: float) -> Tensor:
    return rms(w, name, x.view(len(x), heads, -1), eps).flatten(1)


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


def internlm2(w: W, c: Config, ids: Tensor) -> Tensor:
    """Compute InternLM2. Each key head follows its queries in one tensor, and its value follows it."""
    heads, kv, eps = c["num_attention_heads"], c["num_key_value_heads"], c["rms_norm_eps"]
    width, shared, length = c["hidden_size"] // heads, heads // kv, len(ids)
    turns = inverse_frequencies(c["rope_theta"], width)
    later = torch.full((length, length), -torch.inf).triu(1)
    x = w["tok_embeddings.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        at = f"layers.{i}."
        packed = linear(w, at + "attention.wqkv", rms(w, at + "attention_norm", x, eps)).view(length, kv, shared + 2, width)
        q, k, v = (packed[:, :, part].flatten(1) for part in (slice(shared), shared, shared + 1))
        q, k = rope(q, heads, turns), repeat(rope(k, kv, turns), width, shared)
        x = x + linear(w, at + "attention.wo", attention(q, k, repeat(v, width, shared), heads, later))
        y = rms(w, at + "ffn_norm", x, eps)
        gate, up = (linear(w, f"{at}feed_forward.{part}", y) for part in ("w1", "w3"))
        x = x + linear(w, at + "feed_forward.w2", F.silu(gate) * up)
    return rms(w, "norm", x, eps)


# The names


def tensors(name: str, out: int, inputs: int | None = None, *, bias: bool = True) -> Shapes:
    """Return the tensors of a linear layer or a norm."""
    weight = {f"{name}.weight": (out,) if inputs is None else (out, inputs)}
    return weight | ({f"{name}.bias": (out,)} if bias else {})


def tables(vocabulary: int, types: int, width: int, norm_name: str) -> Shapes:
    shapes = tensors("embeddings.word_embeddings", vocabulary, width, bias=False) | tensors(norm_name, width)
    return shapes | (tensors("embeddings.token_type_embeddings", types, width, bias=False) if types else {})


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


def new_names(c: Config) -> Shapes:
    d, inner = c["hidden_size"], c["intermediate_size"]
    shapes = tables(c["vocab_size"], c["type_vocab_size"], d, "embeddings.LayerNorm")
    for i in range(c["num_hidden_layers"]):
        at = f"encoder.layer.{i}."
        shapes |= tensors(at + "attention.qkv_proj", 3 * d, d) | tensors(at + "attention.o_proj", d, d)
        shapes |= tensors(at + "mlp.up_gate_proj", 2 * inner, d, bias=False) | tensors(at + "mlp.down_proj", d, inner)
        shapes |= tensors(at + "attn_ln", d) | tensors(at + "mlp_ln", d)
    return shapes


def jina_bert_names(c: Config) -> Shapes:
    d, inner = c["hidden_size"], c["intermediate_size"]
    shapes = tables(c["vocab_size"], c["type_vocab_size"], d, "embeddings.LayerNorm")
    for i in range(c["num_hidden_layers"]):
        at = f"encoder.layer.{i}."
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= tensors(f"{at}attention.{part}", d, d)
        shapes |= tensors(at + "attention.output.LayerNorm", d)
        if "qk-post-norm" in str(c["auto_map"]):
            for part in ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1", "layer_norm_2"):
                shapes |= tensors(at + part, d)
            shapes |= tensors(at + "mlp.up_gated_layer", 2 * inner, d, bias=False) | tensors(at + "mlp.down_layer", d, inner)
        elif c["feed_forward_type"] == "original":
            shapes |= tensors(at + "intermediate.dense", inner, d) | tensors(at + "output.dense", d, inner)
            shapes |= tensors(at + "output.LayerNorm", d)
        else:
            shapes |= tensors(at + "mlp.gated_layers", 2 * inner, d, bias=False) | tensors(at + "mlp.wo", d, inner)
            shapes |= tensors(at + "mlp.layernorm", d)
    return shapes


def jina_roberta_names(c: Config) -> Shapes:
    d, inner = c["hidden_size"], c["intermediate_size"]
    shapes = tables(c["vocab_size"], c["type_vocab_size"], d, "emb_ln")
    for i in range(c["num_hidden_layers"]):
        at = f"encoder.layers.{i}."
        shapes |= tensors(at + "mixer.Wqkv", 3 * d, d) | tensors(at + "mixer.out_proj", d, d)
        shapes |= tensors(at + "mlp.fc1", inner, d) | tensors(at + "mlp.fc2", d, inner)
        shapes |= tensors(at + "norm1", d) | tensors(at + "norm2", d)
    return shapes


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


def internlm2_names(c: Config) -> Shapes:
    d, inner, width = c["hidden_size"], c["intermediate_size"], c["hidden_size"] // c["num_attention_heads"]
    shapes = tensors("tok_embeddings", c["vocab_size"], d, bias=False) | tensors("norm", d, bias=False)
    for i in range(c["num_hidden_layers"]):
        at = f"layers.{i}."
        shapes |= tensors(at + "attention.wqkv", d + 2 * c["num_key_value_heads"] * width, d, bias=c["bias"])
        shapes |= tensors(at + "attention.wo", d, d, bias=c["bias"])
        shapes |= tensors(at + "feed_forward.w1", inner, d, bias=False) | tensors(at + "feed_forward.w3", inner, d, bias=False)
        shapes |= tensors(at + "feed_forward.w2", d, inner, bias=False)
        shapes |= tensors(at + "attention_norm", d, bias=False) | tensors(at + "ffn_norm", d, bias=False)
    return shapes


# The checkpoints

Formula = Callable[[W, Config, Tensor], Tensor]
Names = Callable[[Config], Shapes]

CASES: dict[str, tuple[Config, Names, Formula]] = {
    "nomic": (NOMIC, nomic_names, nomic),
    "nomic in both dialects": (NOMIC_TWICE, nomic_names, nomic),
    "nomic of another width": (NOMIC | {"n_inner": 300, "vocab_size": 401, "pad_vocab_size_multiple": 64}, nomic_names, nomic),
    "nomic of no stated width": (NOMIC | {"n_embd": 72, "n_inner": None}, nomic_names, nomic),
    "nomic with biases": (
        NOMIC | {"qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "activation_function": "geglu"},
        nomic_names,
        nomic,
    ),
    "nomic with other turns": (
        NOMIC
        | {"rotary_emb_interleaved": True, "rotary_emb_fraction": 0.5, "activation_function": "glu", "type_vocab_size": 0},
        nomic_names,
        nomic,
    ),
    "nomic with experts": (NOMIC_MOE, nomic_names, nomic),
    "nomic with experts in the middle": (
        NOMIC_MOE | {"moe_every_n_layers": 3, "num_experts": 3, "moe_top_k": 1, "n_inner": 50},
        nomic_names,
        nomic,
    ),
    "nomic ungated": (NOMIC_MOE | {"moe_every_n_layers": 0, "num_experts": 0}, nomic_names, nomic),
    "gte multilingual": (NEW, new_names, new),
    "gte of a larger model": (NEW | {"architectures": ["NewForTokenClassification"]}, new_names, new),
    "gte en": (
        NEW | {"type_vocab_size": 0, "rope_scaling": {"factor": 2.0, "type": "ntk"}, "rope_theta": 500000},
        new_names,
        new,
    ),
    "gte of factor 1": (NEW | {"rope_scaling": {"factor": 0.5, "type": "ntk"}}, new_names, new),
    "arctic": (ARCTIC, new_names, new),
    "jina v2": (JINA_BERT, jina_bert_names, jina_bert),
    "jina v2 with six heads": (
        JINA_BERT | {"num_attention_heads": 6, "feed_forward_type": "reglu"},
        jina_bert_names,
        jina_bert,
    ),
    "jina v2 ungated": (JINA_BERT | {"feed_forward_type": "original"}, jina_bert_names, jina_bert),
    "jina v2 for code": (JINA_CODE, jina_bert_names, jina_bert),
    "jina v2 for code with six heads": (JINA_CODE | {"num_attention_heads": 6}, jina_bert_names, jina_bert),
    "jina v3 without adapters": (JINA_ROBERTA, jina_roberta_names, jina_roberta),
    "jina colbert": (
        JINA_ROBERTA | {"architectures": ["ColBERTJinaRobertaModel"], "rotary_emb_base": 10000.0, "hidden_act": "gelu_new"},
        jina_roberta_names,
        jina_roberta,
    ),
    "lfm2.5": (LFM2, lfm2_names, lfm2),
    "lfm2.5 encoder": (LFM2 | LFM2_ENCODER, lfm2_names, lfm2),
    "internlm2": (INTERNLM2, internlm2_names, internlm2),
    "internlm2 with biases": (INTERNLM2 | {"bias": True, "num_key_value_heads": 1}, internlm2_names, internlm2),
}
AROUND: dict[str, tuple[str, Shapes]] = {
    "gte of a larger model": ("new.", {"classifier.weight": (1, 48), "classifier.bias": (1,)}),
    "jina v2": ("bert.", {"cls.predictions.bias": (VOCABULARY,), "pooler.dense.weight": (48, 48)}),
    "jina colbert": ("roberta.", {"linear.weight": (16, 48)}),
    "internlm2": ("model.", {"output.weight": (VOCABULARY, 48)}),
    "lfm2.5 encoder": ("lfm2.", {"lm_head.weight": (VOCABULARY, 48)}),
}
"""Prefix of the names in a larger model, and its other tensors."""


def draw(shapes: Shapes) -> W:
    """Return random weights, large enough that all matter."""
    generator = torch.Generator().manual_seed(7)

    def one(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = 0.2 * torch.randn(shape, generator=generator)
        return 1 + noise if len(shape) == 1 and name.endswith("weight") else noise

    return {name: one(name, shape) for name, shape in shapes.items()}


def save(folder: Path, case: str) -> tuple[Config, W]:
    config, names, _ = CASES[case]
    prefix, beside = AROUND.get(case, ("", {}))
    weights = draw(names(config))
    write_json(folder / "config.json", config)
    saved = {prefix + name: tensor for name, tensor in weights.items()} | draw(beside)
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)
    return config, weights


def save_tokenizer(folder: Path) -> None:
    bert_tokenizer().save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", model_max_length=100)


def expect(case: str, config: Config, weights: W) -> list[Any]:
    with torch.inference_mode():
        return [CASES[case][2](weights, config, torch.from_numpy(row).long()).numpy() for row in rows()]


@pytest.mark.parametrize("case", [case for case in CASES if case != "jina colbert"])  # its code for vectors is another class
def test_the_class_of_the_models_own_code_is_architecture_enough(case: str, tmp_path: Path) -> None:
    """Without `architectures` the class that `auto_map` names for vectors is read, or that of the model_type."""
    config, _ = save(tmp_path, case)
    expected = read_card(tmp_path, "m", pooling="mean")
    write_json(tmp_path / "config.json", {key: value for key, value in config.items() if key != "architectures"})
    code = config.get("auto_map", {})
    if "AutoModel" in code or not code:
        assert read_card(tmp_path, "m", pooling="mean") == expected
        return
    with pytest.raises(CheckpointError, match="auto_map: this checkpoint needs code of its own"):
        read_card(tmp_path, "m", pooling="mean")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(11)
def test_hidden_states(case: str, tmp_path: Path) -> None:
    """Hidden states are equal bit for bit in a batch and alone, and close to the formula."""
    config, weights = save(tmp_path, case)
    together = hidden(tmp_path, rows())
    assert_close(together, expect(case, config, weights))
    for row, expected in zip(rows(), together, strict=True):
        assert np.array_equal(hidden(tmp_path, [row])[0], expected)


@pytest.mark.bfloat16
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(6)
def test_half_precision_is_near(case: str, tmp_path: Path) -> None:
    config, weights = save(tmp_path, case)
    together = hidden(tmp_path, rows(), torch.bfloat16)
    for row, found in zip(rows()[::3], together[::3], strict=True):
        assert np.array_equal(hidden(tmp_path, [row], torch.bfloat16)[0], found)
    for found, expected in zip(together, expect(case, config, weights), strict=True):
        one, other = found.mean(0), expected.mean(0)
        assert one @ other / (np.linalg.norm(one) * np.linalg.norm(other)) > 0.995


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_gives_the_same(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config, weights = save(tmp_path, case)
    for found, expected in zip(hidden(tmp_path, rows(), dtype, "cuda"), expect(case, config, weights), strict=True):
        one, other = found.mean(0), expected.mean(0)
        assert one @ other / (np.linalg.norm(one) * np.linalg.norm(other)) > (0.9999 if dtype == torch.float32 else 0.995)


@pytest.mark.parametrize(
    ("case", "change"),
    [("nomic", {"rotary_emb_base": 10000}), ("nomic", {"rotary_emb_interleaved": True}), ("nomic", {"rotary_emb_fraction": 0.5}),
     ("nomic", {"activation_function": "geglu"}), ("nomic", {"layer_norm_epsilon": 0.1}), ("nomic with experts", {"moe_top_k": 1}), ("arctic", {"rope_theta": 10000}),
     ("gte multilingual", {"rope_scaling": None}), ("gte multilingual", {"rope_scaling": {"type": "ntk", "factor": 2.0}}),
     ("gte multilingual", {"hidden_act": "relu"}), ("jina v2", {"feed_forward_type": "reglu"}), ("jina v2", {"num_attention_heads": 6}),
     ("jina v2 for code", {"feed_forward_type": "reglu"}), ("jina v2 ungated", {"hidden_act": "relu"}),
     ("jina colbert", {"rotary_emb_base": 20000.0}), ("jina colbert", {"hidden_act": "gelu"})],
)  # fmt: skip
def test_what_the_config_says_matters(case: str, change: Config, tmp_path: Path) -> None:
    """Guard: the comparison with the formula would notice each of these."""
    save(tmp_path, case)
    before = hidden(tmp_path, rows())[-1]
    edit_json(tmp_path / "config.json", **change)
    assert np.abs(hidden(tmp_path, rows())[-1] - before).max() > 1e-4


@pytest.mark.parametrize(
    ("name", "config", "hub"),
    [
        ("NomicBert", SIZES | {"intermediate_size": 256}, NOMIC),
        ("Gte", SIZES | {"type_vocab_size": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 160000.0}}, ARCTIC),
        ("JinaEmbeddingsV3", ROBERTA, JINA_ROBERTA),
    ],
)
def test_transformers_agrees_with_the_formula(name: str, config: Config, hub: Config, tmp_path: Path) -> None:
    """A checkpoint that transformers saves, with the Hub's config of the same model, gives the formula's hidden states."""
    model = write(tmp_path, name, config)
    write_json(tmp_path / "config.json", hub)
    assert_close(hidden(tmp_path, rows()), reference(model, rows()))


def test_llama_bidirec(tmp_path: Path) -> None:
    model = write(tmp_path, "Llama", DECODER | {"is_causal": False})
    write_llama_bidirec(tmp_path)
    assert_close(hidden(tmp_path, rows(), pooling=None), reference(model, rows()))


def write_llama_bidirec(folder: Path, **changes: Any) -> None:
    edit_json(
        folder / "config.json", architectures=["LlamaBidirectionalModel"], model_type="llama_bidirec", is_causal=None,
        auto_map={"AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel",
                  "AutoConfig": "llama_bidirectional_model.LlamaBidirectionalConfig"},
        **{"pooling": "avg", "temperature": 1.0} | changes,
    )  # fmt: skip


@pytest.mark.parametrize(("stated", "mode"), [("avg", "mean"), ("cls", "cls"), ("last", "lasttoken"), (None, "mean")])
def test_llama_bidirec_says_how_it_is_pooled(stated: str | None, mode: str, tmp_path: Path) -> None:
    write(tmp_path, "Llama", DECODER)
    write_llama_bidirec(tmp_path, pooling=stated)
    assert read_card(tmp_path, "m").dense.modes == (mode,)
    with pytest.raises(CheckpointError, match=r"config\.json: pooling"):
        read_card(tmp_path, "m", pooling="mean")


def test_gte_qwen2_sees_both_ways(tmp_path: Path) -> None:
    model = write(tmp_path, "Qwen2", DECODER | {"is_causal": False})
    edit_json(tmp_path / "config.json", auto_map={"AutoModel": "modeling_qwen.Qwen2Model"})
    assert_close(hidden(tmp_path, rows()), reference(model, rows()))


def test_gte_qwen2_says_whether_it_sees_both_ways(tmp_path: Path) -> None:
    write(tmp_path, "Qwen2", DECODER)
    edit_json(tmp_path / "config.json", auto_map={"AutoModel": "Alibaba-NLP/gte-Qwen2-7B-instruct--modeling_qwen.Qwen2Model"})
    with pytest.raises(CheckpointError, match=r"config\.json: is_causal: is missing"):
        read_card(tmp_path, "m", pooling="lasttoken")
    for stated in (True, False):
        edit_json(tmp_path / "config.json", is_causal=stated)
        assert read_card(tmp_path, "m", pooling="lasttoken").encoder.causal is stated


@pytest.mark.parametrize(
    ("stated", "longest"),
    [
        ({"rotary_scaling_factor": None}, 8192),
        ({"rotary_scaling_factor": 2.0}, 2048),
        ({"rotary_scaling_factor": 2, "max_trained_positions": 9000}, 8192),
        ({}, 2048),
    ],
)
def test_nomic_takes_no_texts_whose_frequencies_would_change(stated: Config, longest: int, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    config = {key: value for key, value in NOMIC.items() if key != "rotary_scaling_factor"}
    write_json(tmp_path / "config.json", config | stated)
    assert read_card(tmp_path, "m", pooling="mean").encoder.max_positions == longest


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(3)
def test_every_tensor_is_asked_for(case: str, tmp_path: Path) -> None:
    """A checkpoint with a missing or an extra tensor is rejected with its name."""
    save(tmp_path, case)
    card = read_card(tmp_path, "m", pooling="mean")
    weights = load_file(tmp_path / "model.safetensors")

    def load(left: W) -> None:
        save_file(left, tmp_path / "model.safetensors", metadata={"format": "pt"})
        load_model(tmp_path, card, device=torch.device("cpu"), dtype=torch.float32)

    beside = AROUND.get(case, ("", {}))[1]
    for name in weights:
        left = {key: value for key, value in weights.items() if key != name}
        if name in beside:
            load(left)
            continue
        with pytest.raises(CheckpointError, match="missing"):
            load(left)
    with pytest.raises(CheckpointError, match=r"extra\.weight"):
        load(weights | {"extra.weight": torch.zeros(2)})


# What is refused

WRONG: list[tuple[str, Config, str]] = [
    ("nomic", {"num_experts": 8, "moe_every_n_layers": 2, "moe_top_k": 2}, "activation_function: a mixture of gated experts"),
    ("nomic", {"moe_every_n_layers": 2}, "moe_every_n_layers: is 2, with 1 of 0 experts"),
    ("nomic with experts", {"moe_every_n_layers": 1}, "moe_every_n_layers: is 1"),
    ("nomic with experts", {"moe_every_n_layers": 0}, "moe_every_n_layers: is 0"),
    ("nomic with experts", {"moe_top_k": 9}, "moe_every_n_layers: is 2, with 9 of 8 experts"),
    ("nomic with experts", {"num_shared_experts": 1}, "num_shared_experts"),
    ("nomic with experts", {"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights"),
    ("nomic with experts", {"expert_choice_router": True}, "expert_choice_router"),
    ("nomic with experts", {"ffn_div": 2}, "ffn_div"),
    ("nomic", {"activation_function": "relu"}, "activation_function"),
    ("nomic", {"prenorm": True}, "prenorm"),
    ("nomic", {"use_rms_norm": True}, "use_rms_norm"),
    ("nomic", {"causal": True}, "causal"),
    ("nomic", {"parallel_block": True}, "parallel_block"),
    ("nomic", {"norm_mlp": True}, "norm_mlp"),
    ("nomic", {"num_heads_kv": 2}, "num_heads_kv"),
    ("nomic", {"rotary_head_dim": True}, "rotary_head_dim"),
    ("nomic", {"rotary_emb_scale_base": 512}, "rotary_emb_scale_base"),
    ("nomic", {"rotary_emb_fraction": 0.0}, "rotary_emb_fraction"),
    ("nomic", {"rotary_emb_fraction": 1.5}, "rotary_emb_fraction"),
    ("nomic", {"rotary_emb_base": 0}, "rotary_emb_base"),
    ("nomic", {"rotary_scaling_factor": "2"}, "rotary_scaling_factor"),
    ("nomic", {"n_head": 5}, "n_head"),
    ("nomic", {"n_inner": -1}, "n_inner"),
    ("nomic", {"n_positions": 0}, "n_positions"),
    ("nomic", {"type_vocab_size": -1}, "type_vocab_size"),
    ("nomic", {"qkv_proj_bias": "no"}, "qkv_proj_bias"),
    ("nomic in both dialects", {"hidden_size": 96}, "hidden_size"),
    ("nomic in both dialects", {"intermediate_size": 3072}, "intermediate_size"),
    ("nomic in both dialects", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "rope_parameters"),
    ("gte multilingual", {"logn_attention_scale": True}, "logn_attention_scale"),
    ("gte multilingual", {"logn_attention_clip1": True}, "logn_attention_clip1"),
    ("gte multilingual", {"layer_norm_type": "rms_norm"}, "layer_norm_type"),
    ("gte multilingual", {"pack_qkv": False}, "pack_qkv"),
    ("gte multilingual", {"position_embedding_type": "absolute"}, "position_embedding_type"),
    ("gte multilingual", {"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.6}}, "mixed_b"),
    ("gte multilingual", {"rope_scaling": {"type": "ntk"}}, "factor"),
    ("gte multilingual", {"unpad_inputs": "yes"}, "unpad_inputs"),
    ("gte multilingual", {"architectures": ["NewModel", "BertModel"]}, "architectures"),
    ("gte multilingual", {"architectures": [["NewModel"]]}, "auto_map: this checkpoint needs code of its own; custom code is not run"),
    ("gte multilingual", {"architectures": ["NewForMine"]}, "auto_map"),
    ("gte multilingual", {"model_type": "gte"}, "model_type"),
    ("jina v2", {"position_embedding_type": "absolute"}, "position_embedding_type"),
    ("jina v2", {"feed_forward_type": "swiglu"}, "feed_forward_type"),
    ("jina v2", {"type_vocab_size": 0}, "type_vocab_size"),
    ("jina v3 without adapters", {"lora_adaptations": ["retrieval.query"]}, "load_trained_adapters"),
    ("jina v3 without adapters", {"load_trained_adapters": True}, "load_trained_adapters"),
    ("jina v3 without adapters", {"task_instructions": {"retrieval.query": "Represent: "}}, "task_instructions"),
    ("jina v3 without adapters", {"truncate_dim": 512}, "truncate_dim"),
    ("jina v3 without adapters", {"hidden_act": "relu"}, "hidden_act"),
    ("jina v3 without adapters", {"rotary_emb_base": -1.0}, "rotary_emb_base"),
    ("jina v3 without adapters", {"rotary_emb_scale_base": 512}, "rotary_emb_scale_base"),
    ("jina v3 without adapters", {"position_embedding_type": "alibi"}, "position_embedding_type"),
    ("jina colbert", {"position_embedding_type": "absolute"}, "position_embedding_type"),
    *((case, {"auto_map": {"AutoModel": ["modeling.Model", None]}}, "auto_map: AutoModel must be") for case in CASES),
    *((case, {"auto_map": "modeling.Model"}, "auto_map: must be dict") for case in CASES),
]  # fmt: skip


@pytest.mark.parametrize(("case", "change", "says"), WRONG, ids=[f"{case}: {says}" for case, _, says in WRONG])
def test_what_is_not_supported_is_refused(case: str, change: Config, says: str, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", CASES[case][0] | change)
    save_tokenizer(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        read_card(tmp_path, "m", pooling="mean")
    assert f"config.json: {says}" in str(caught.value) or (
        says in str(caught.value) and "config.json: rope" in str(caught.value)
    )


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Bert", SIZES),
        ("XLMRoberta", ROBERTA),
        ("NomicBert", SIZES),
        ("ModernBert", SIZES),
        ("Llama", DECODER),
        ("Qwen2", DECODER),
        ("Qwen3", DECODER | {"head_dim": 16, "is_causal": False}),
        ("Gemma3Text", DECODER | {"head_dim": 16}),
    ],
)
def test_other_checkpoints_with_code_of_their_own_are_refused(name: str, config: Config, tmp_path: Path) -> None:
    write(tmp_path, name, config)
    edit_json(tmp_path / "config.json", auto_map={"AutoModel": "modeling_mine.Model"})
    with pytest.raises(CheckpointError, match=r"config\.json: auto_map: .*custom code is not run"):
        read_card(tmp_path, "m", pooling="mean")


@pytest.mark.parametrize("case", ["jina v3 without adapters"])
def test_adapters_in_the_weights_are_refused(case: str, tmp_path: Path) -> None:
    """Tensors of adapters are rejected for every config."""
    _, weights = save(tmp_path, case)
    layer = "encoder.layers.0.mixer.Wqkv"
    weights[f"{layer}.parametrizations.weight.original"] = weights.pop(f"{layer}.weight")
    weights[f"{layer}.parametrizations.weight.0.lora_A"] = torch.zeros(2, 4, 48)
    weights[f"{layer}.parametrizations.weight.0.lora_B"] = torch.zeros(2, 144, 4)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    card = read_card(tmp_path, "m", pooling="mean")
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {layer}\.parametrizations\.weight\.0"):
        load_model(tmp_path, card, device=torch.device("cpu"), dtype=torch.float32)
