"""Configs of DeBERTa v2 and v3, whose attention scores relative positions against contents.

Source: transformers/models/deberta_v2/{configuration,modeling}_deberta_v2.py (5.23).
"""

from typing import Final, cast

from whimbrel.checkpoint.config import common
from whimbrel.checkpoint.config.common import ACTIVATIONS
from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.types.card import Disentangled, Encoder, Layer, NeighbourLayer

DEBERTA: Final = ("deberta", "deberta_placed")
"""Families, without and with positions that are added to the embeddings."""
_KINDS: Final = ("c2p", "p2c")


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
