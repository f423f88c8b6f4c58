"""Checkpoints of models that came with code of their own, and the hidden states that their formulas give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints.encoders import bert_tokenizer
from checkpoints.families import VOCABULARY
from checkpoints.files import edit_json, write_json
from checkpoints.published.blocks import Config, Shapes, W, draw_weights
from checkpoints.published.gte import ARCTIC, NEW, new, new_names
from checkpoints.published.internlm2 import INTERNLM2, internlm2, internlm2_names
from checkpoints.published.jina import (
    JINA_BERT,
    JINA_CODE,
    JINA_ROBERTA,
    jina_bert,
    jina_bert_names,
    jina_roberta,
    jina_roberta_names,
)
from checkpoints.published.lfm2 import LFM2, LFM2_ENCODER, lfm2, lfm2_names
from checkpoints.published.nomic import NOMIC, NOMIC_MOE, NOMIC_TWICE, nomic, nomic_names
from hidden_states import random_ids

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


def write_published(folder: Path, case: str) -> tuple[Config, W]:
    config, names, _ = CASES[case]
    prefix, beside = AROUND.get(case, ("", {}))
    weights = draw_weights(names(config))
    write_json(folder / "config.json", config)
    saved = {prefix + name: tensor for name, tensor in weights.items()} | draw_weights(beside)
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)
    return config, weights


def save_tokenizer(folder: Path) -> None:
    bert_tokenizer().save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", model_max_length=100)


def published_states(case: str, config: Config, weights: W) -> list[Any]:
    with torch.inference_mode():
        return [CASES[case][2](weights, config, torch.from_numpy(row).long()).numpy() for row in random_ids()]


def write_llama_bidirec(folder: Path, **changes: Any) -> None:
    edit_json(
        folder / "config.json", architectures=["LlamaBidirectionalModel"], model_type="llama_bidirec", is_causal=None,
        auto_map={"AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel",
                  "AutoConfig": "llama_bidirectional_model.LlamaBidirectionalConfig"},
        **{"pooling": "avg", "temperature": 1.0} | changes,
    )  # fmt: skip
