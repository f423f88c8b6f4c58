"""Configs of architectures that transformers runs for Whimbrel."""

from __future__ import annotations

from typing import Any

from checkpoints.families import DECODER, ROBERTA, SIZES, VOCABULARY, YARN

Config = dict[str, Any]


MOBILE = SIZES | {"embedding_size": 24, "trigram_input": False, "intra_bottleneck_size": 32, "num_feedforward_networks": 2}


ENDS = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}


GPT2 = {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 120, "pad_token_id": 0}


CASES: dict[str, tuple[str, Config]] = {
    "albert": ("Albert", SIZES | {"embedding_size": 24, "num_hidden_groups": 2}),
    "data2vec": ("Data2VecText", ROBERTA),
    "ernie": ("Ernie", SIZES | {"use_task_id": True}),
    "gpt2": ("GPT2", GPT2 | {"bos_token_id": 2, "eos_token_id": 2}),
    "granite": ("Granite", DECODER | {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 3.0}),
    "ministral": ("Ministral", DECODER | {"sliding_window": 5, "head_dim": 12}),
    "ministral3": (
        "Ministral3",
        DECODER | {"head_dim": 12, "rope_parameters": YARN | {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}},
    ),
    "mobilebert": ("MobileBert", MOBILE),
    "modernbert decoder": ("ModernBertDecoder", SIZES | ENDS | {"local_attention": 8}),
    "olmo2": ("Olmo2", DECODER),
    "phi3": ("Phi3", DECODER | {"sliding_window": 5}),
    "phi3 both ways": ("Phi3", DECODER | {"is_causal": False}),
    "phi3 with a window that the check cuts": ("Phi3", DECODER | {"sliding_window": 40}),
    "roberta prelayernorm": ("RobertaPreLayerNorm", ROBERTA),
    "smollm3": ("SmolLM3", DECODER | {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5}),
    "xmod": ("Xmod", ROBERTA | {"languages": ["en_XX", "de_DE"], "default_language": "de_DE"}),
}
