"""InternLM2: config as on the hub except for sizes, the formula of its code, and the names of its tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoints.families import VOCABULARY
from checkpoints.published.blocks import Config, Shapes, W, attention, inverse_frequencies, linear, repeat, rms, rope, tensors

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
