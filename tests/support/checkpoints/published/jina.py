"""Jina's BERT and XLM-RoBERTa: configs as on the hub except for sizes, the formulas of their code, and the names of their tensors."""

from __future__ import annotations

import numpy as np
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
