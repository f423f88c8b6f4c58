"""Configs of encoders: BERT and its descendants, DeBERTa, whose attention scores relative positions against contents, and T5.

Sources: transformers/models/*/configuration_*.py (5.23), modeling_deberta_v2.py, and Alibaba-NLP/new-impl on the hub
(gte-multilingual-base, gte-base-en-v1.5, snowflake-arctic-embed-m-v2.0); of T5, `_load_encoder_only_model` in
sentence_transformers/base/modules/transformer.py (6.2), by which a whole T5 is an encoder too. `hub_code.py` reads the dialects
of other code on the hub.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final, cast

from whimbrel.checkpoint.config import adapters, common, hub_code
from whimbrel.checkpoint.config.common import ACTIVATIONS, FULL, SLIDING, allow_auto_map
from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.types.card import Disentangled, Encoder, Layer, NeighbourLayer
from whimbrel.types.heads import Activation

DEBERTA: Final = ("deberta", "deberta_placed")
"""Families, without and with positions that are added to the embeddings."""
_KINDS: Final = ("c2p", "p2c")
_T5_TOKENS: Final = 2**15
"""Limit in tokens per text, unless a file states a lower one. T5 itself has none, as its distances have no end."""
_PROJECTIONS: Final[Mapping[str, tuple[Activation, bool]]] = {
    **{name: (activation, False) for name, activation in ACTIVATIONS.items()},
    **{f"gated-{name}": (activation, True) for name, activation in ACTIVATIONS.items()},
    "gated-gelu": ("gelu_tanh", True),  # so it was trained
}
"""Value of feed_forward_proj -> activation, and whether it gates."""


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
    """Read XLM-RoBERTa, also in the code of jina-embeddings-v3; with learned positions that has no adapters."""
    if config.data.get("position_embedding_type") == "rotary":
        return hub_code.read_jina_roberta(config)
    if "use_flash_attn" not in config.data:
        return read_roberta(config)
    allow_auto_map(config)
    config.require_values({"lora_adaptations": (None, []), "truncate_dim": (None,)})
    adapters.read_stacked_adapters(config)
    config.ignore(*hub_code.JINA_INERT)
    config.get("use_flash_attn", bool, True)
    return read_bert(config, "jina_reranker", after_padding=True)


def read_nomic(config: JsonFile) -> Encoder:
    if "n_embd" in config.data:
        return hub_code.read_hub_nomic(config)
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
    return replace(encoder, **adapters.name_adapter_folders(config))


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


def read_deberta(config: JsonFile) -> Encoder:
    """Read DeBERTa v2 and v3. Positions may be added to the embeddings too, and a convolution follow the first layer."""
    sizes = common.read_sizes(config)
    width = sizes["hidden_size"]
    config.ignore("cls_dropout", "legacy", "padding_idx", "pooler_dropout", "pooler_hidden_act")
    config.require_values({
        "attention_head_size": (sizes["head_width"], None), "conv_groups": (1, None), "relative_attention": (True,),
        **dict.fromkeys(("embedding_size", "pooler_hidden_size"), (width, None)),
    })  # fmt: skip
    if "relative_attention" not in config.data:
        raise config.error("is missing, which means false; must be true.", "relative_attention")
    placed = config.get("position_biased_input", bool, True)
    positions = common.read_positions(config)
    disentangled = _read_disentangled(config, positions["max_positions"])
    conv_width, conv_act = config.get("conv_kernel_size", int, 0), config.choice("conv_act", ACTIVATIONS, "tanh")
    if conv_width > 0 and conv_width % 2 == 0:
        raise config.error(f"must be odd, is {conv_width}.", "conv_kernel_size")
    return Encoder(
        family=DEBERTA[placed],
        **sizes,
        layers=(Layer(),) * common.read_depth(config),
        **positions,
        type_vocab_size=common.read_types(config, 0),
        norm_eps=config.get("layer_norm_eps", float, 1e-7),
        activation=config.choice("hidden_act", ACTIVATIONS, "gelu"),
        disentangled=disentangled,
        neighbours=NeighbourLayer(conv_width, conv_act) if conv_width > 0 else None,
        score_scale=(sizes["head_width"] * (1 + disentangled.of_keys + disentangled.of_queries)) ** -0.5,
    )


def _read_disentangled(config: JsonFile, max_positions: int) -> Disentangled:
    stated: object = config.data.get("pos_att_type")
    config.ignore("pos_att_type")
    kinds = [kind.strip() for kind in stated.lower().split("|")] if isinstance(stated, str) else stated
    if not isinstance(kinds, list) or not kinds or any(kind not in _KINDS for kind in cast(list[object], kinds)):
        raise config.error(f"must name {' or '.join(_KINDS)}, or both, is {stated!r:.80}.", "pos_att_type")
    buckets, distance = config.get("position_buckets", int, -1), config.get("max_relative_positions", int, -1)
    distance = distance if distance >= 1 else max_positions
    half = buckets // 2
    if buckets > 0 and (half < 2 or distance - 1 <= half < max_positions - 1):
        raise config.error(f"{buckets} are too few, or too many for distances up to {distance}.", "position_buckets")
    norms = [norm.strip() for norm in config.get("norm_rel_ebd", str, "none").lower().split("|")]
    if any(norm not in ("none", "layer_norm") for norm in norms):
        raise config.error(f"{'|'.join(norms)!r:.80} is not supported; supported: none, layer_norm.", "norm_rel_ebd")
    return Disentangled(
        of_keys="c2p" in kinds,
        of_queries="p2c" in kinds,
        max_distance=distance,
        num_buckets=max(0, buckets),
        shared=config.get("share_att_key", bool, False),
        normed="layer_norm" in norms,
    )


def read_t5(config: JsonFile, projection: str = "relu") -> Encoder:
    """Read T5 or mT5. `projection` is the default of feed_forward_proj."""
    config.get("is_encoder_decoder", bool, True)
    config.ignore("dropout_rate", "initializer_factor", "n_positions", "num_decoder_layers", "scale_decoder_outputs")
    activation, gated = config.choice("feed_forward_proj", _PROJECTIONS, projection)
    if config.get("is_gated_act", bool, gated) != gated:  # transformers repeats feed_forward_proj in two keys
        raise config.error(f"contradicts feed_forward_proj, by which it is {gated}.", "is_gated_act")
    if config.data.get("dense_act_fn") is not None:
        config.choice("dense_act_fn", {name: value for name, value in ACTIVATIONS.items() if value == activation})
    num_buckets = config.positive("relative_attention_num_buckets", 32)
    max_distance = config.positive("relative_attention_max_distance", 128)
    if num_buckets < 4 or num_buckets % 2:
        raise config.error(f"must be even and at least 4, is {num_buckets}.", "relative_attention_num_buckets")
    if not num_buckets // 4 < max_distance <= _T5_TOKENS:
        limits = f"from {num_buckets // 4 + 1:,} to {_T5_TOKENS:,} with {num_buckets} buckets"
        raise config.error(f"must be {limits}, is {max_distance:,}.", "relative_attention_max_distance")
    return Encoder(
        family="t5_gated" if gated else "t5",
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("d_model"),
        intermediate_size=config.positive("d_ff"),
        layers=(Layer(),) * common.read_depth(config, "num_layers"),
        num_heads=config.positive("num_heads"),
        head_width=config.positive("d_kv", 64),
        max_positions=_T5_TOKENS,
        pad_id=config.get("pad_token_id", int, 0),
        norm_eps=common.read_positive(config, "layer_norm_epsilon", 1e-6),
        norm="rms",
        activation=activation,
        gated=gated,
        positions="relative",
        num_buckets=num_buckets,
        max_distance=max_distance,
        score_scale=1.0,
        **common.biases(),
    )
