"""Configs of BERT and its descendants, with bidirectional attention.

Sources: transformers/models/*/configuration_*.py (5.23), and Alibaba-NLP/new-impl on the hub (gte-multilingual-base,
gte-base-en-v1.5, snowflake-arctic-embed-m-v2.0). `hub_code.py` reads the dialects of other code on the hub.
"""

from dataclasses import replace
from functools import partial

from whimbrel.checkpoint.config import common
from whimbrel.checkpoint.config.adapters import name_adapter_folders, read_stacked_adapters
from whimbrel.checkpoint.config.common import ACTIVATIONS, FULL, SLIDING, allow_auto_map
from whimbrel.checkpoint.config.hub_code import JINA_INERT, read_hub_nomic, read_jina_roberta
from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.types.card import Encoder, Layer


def read_bert(config: JsonFile, family: str = "bert", *, after_padding: bool = False) -> Encoder:
    """Read BERT and models that share its config. `after_padding`: positions begin after the padding id."""
    config.require_values({"position_embedding_type": ("absolute", None)})
    config.ignore("cell", "emb_size", "pre_trained", "structure", "training")  # TinyBERT's, which no code reads
    return Encoder(
        family=family,
        **common.read_sizes(config),
        layers=(Layer(),) * common.read_depth(config),
        **common.read_positions(config, after_padding=after_padding),
        type_vocab_size=config.positive("type_vocab_size", 2),
        norm_eps=config.get("layer_norm_eps", float, 1e-12),
        activation=config.choice("hidden_act", ACTIVATIONS, "gelu"),
    )


read_roberta = partial(read_bert, family="roberta", after_padding=True)


def read_electra(config: JsonFile) -> Encoder:
    return replace(read_bert(config, "electra"), embedding_size=config.positive("embedding_size", 128))


def read_mpnet(config: JsonFile) -> Encoder:
    config.require_values({"relative_attention_num_buckets": (32,), "pad_token_id": (1,)})
    bert = read_bert(config, "mpnet", after_padding=True)
    num_buckets = config.get("relative_attention_num_buckets", int, 32)
    return replace(bert, type_vocab_size=0, positions="relative", num_buckets=num_buckets, max_distance=128)


def read_distilbert(config: JsonFile) -> Encoder:
    config.ignore("dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_")
    hidden_size, num_heads = config.positive("dim"), config.positive("n_heads")
    if hidden_size % num_heads:
        raise config.error(f"{num_heads} does not divide dim {hidden_size}.", "n_heads")
    return Encoder(
        family="distilbert",
        vocab_size=config.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.positive("hidden_dim"),
        layers=(Layer(),) * common.read_depth(config, "n_layers"),
        num_heads=num_heads,
        **common.read_positions(config),
        norm_eps=1e-12,
        activation=config.choice("activation", ACTIVATIONS, "gelu"),
    )


def read_xlm_roberta(config: JsonFile) -> Encoder:
    if config.data.get("position_embedding_type") == "rotary":
        return read_jina_roberta(config)
    return _jina_reranker(config) if "use_flash_attn" in config.data else read_roberta(config)


def _jina_reranker(config: JsonFile) -> Encoder:
    """Read XLM-RoBERTa in the code of jina-embeddings-v3, with learned positions and without adapters."""
    allow_auto_map(config)
    config.require_values({"lora_adaptations": (None, []), "truncate_dim": (None,)})
    read_stacked_adapters(config)
    config.ignore(*JINA_INERT)
    config.get("use_flash_attn", bool, True)
    return read_bert(config, "jina_reranker", after_padding=True)


def read_nomic(config: JsonFile) -> Encoder:
    if "n_embd" in config.data:
        return read_hub_nomic(config)
    return _rotary_bert(config, "nomic_bert", theta=1000.0, types=2, gated=True, biases=False)


def read_gte(config: JsonFile, theta: float) -> Encoder:
    """Read GTE, saved by transformers or by the original code."""
    allow_auto_map(config)
    config.require_values({"layer_norm_type": ("layer_norm", None), "position_embedding_type": ("rope", None)})
    config.require_values(dict.fromkeys(("logn_attention_clip1", "logn_attention_scale"), (False, None)))
    config.require_values({"pack_qkv": (True, None)})
    for key in ("unpad_inputs", "use_memory_efficient_attention"):
        config.get(key, bool, False)
    return _rotary_bert(config, "gte", theta=theta, types=1, gated=True, biases=True)


def _rotary_bert(config: JsonFile, family: str, *, theta: float, types: int, gated: bool, biases: bool) -> Encoder:
    """Read nomic_bert, gte and jina_embeddings_v3 of transformers: post-norm, rotary positions."""
    sizes = common.read_sizes(config)
    rotary = common.read_rotary(config, theta, sizes["head_width"])
    return Encoder(
        family=family,
        **sizes,
        layers=(Layer(rotary=rotary),) * common.read_depth(config),
        **common.read_positions(config),
        type_vocab_size=common.read_types(config, types),
        norm_eps=config.get("layer_norm_eps", float, 1e-12),
        activation=config.choice("hidden_act", ACTIVATIONS),
        positions="rotary",
        gated=gated,
        **dict(common.biases(attention=biases, mlp=biases), up_bias=biases and not gated),
    )


def read_jina_v3(config: JsonFile) -> Encoder:
    """Read jina-embeddings-v3 of transformers. Keys of the code on the hub, which transformers ignores, must agree."""
    encoder = _rotary_bert(config, "jina_embeddings_v3", theta=20_000.0, types=1, gated=False, biases=True)
    rotary = encoder.layers[0].rotary
    config.require_values({"position_embedding_type": ("rotary", None), "truncate_dim": (None,)})
    config.require_values({"rotary_emb_base": (rotary.theta if rotary else None, None)})
    return replace(encoder, **name_adapter_folders(config))


def read_modernbert(config: JsonFile) -> Encoder:
    config.ignore(*"""
        position_embedding_type layer_norm_eps classifier_activation classifier_bias classifier_dropout classifier_pooling
        cls_token_id decoder_bias deterministic_flash_attn embedding_dropout initializer_cutoff_factor mlp_dropout
        reference_compile repad_logits_with_grad sparse_pred_ignore_index sparse_prediction
    """.split())  # fmt: skip
    sizes, num_layers = common.read_sizes(config), common.read_depth(config)
    every = config.positive("global_attn_every_n_layers", 3)
    kinds = common.read_layer_types(config, num_layers, [FULL if i % every == 0 else SLIDING for i in range(num_layers)])
    full, sliding = config.get("global_rope_theta", float, 160_000.0), config.get("local_rope_theta", float, 10_000.0)
    window = config.positive("local_attention", 128) // 2
    return Encoder(
        family="modernbert",
        **sizes,
        layers=common.read_layers(config, kinds, {FULL: full, SLIDING: sliding}, sizes["head_width"], window=window),
        max_positions=config.positive("max_position_embeddings", 8192),
        pad_id=config.get("pad_token_id", int, 50283),
        norm_eps=config.get("norm_eps", float, 1e-5),
        norm_bias=config.get("norm_bias", bool, False),
        activation=config.choice("hidden_activation", ACTIVATIONS, "gelu"),
        positions="rotary",
        gated=True,
        **common.read_biases(config),
    )
