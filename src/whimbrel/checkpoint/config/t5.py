"""Configs of T5 and mT5, of which only the encoder is run.

Sources: transformers/models/{t5,mt5}/configuration_*.py (5.23), and _load_encoder_only_model of
sentence_transformers/base/modules/transformer.py (6.2), by which a whole T5 is an encoder too.
"""

from collections.abc import Mapping
from typing import Final

from whimbrel.checkpoint.config import common
from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.types.card import Encoder, Layer
from whimbrel.types.heads import Activation

MAX_TOKENS: Final = 2**15
"""Limit in tokens per text, unless a file states a lower one. T5 itself has none, as its distances have no end."""
_PROJECTIONS: Final[Mapping[str, tuple[Activation, bool]]] = {
    **{name: (activation, False) for name, activation in common.ACTIVATIONS.items()},
    **{f"gated-{name}": (activation, True) for name, activation in common.ACTIVATIONS.items()},
    "gated-gelu": ("gelu_tanh", True),  # so it was trained
}
"""Value of feed_forward_proj -> activation, and whether it gates."""


def read_t5(config: JsonFile, projection: str = "relu") -> Encoder:
    """Read T5 or mT5. `projection` is the default of feed_forward_proj."""
    config.get("is_encoder_decoder", bool, True)
    config.ignore("dropout_rate", "initializer_factor", "n_positions", "num_decoder_layers", "scale_decoder_outputs")
    activation, gated = config.choice("feed_forward_proj", _PROJECTIONS, projection)
    _check_repeated(config, activation, gated=gated)
    num_buckets = config.positive("relative_attention_num_buckets", 32)
    max_distance = config.positive("relative_attention_max_distance", 128)
    if num_buckets < 4 or num_buckets % 2:
        raise config.error(f"must be even and at least 4, is {num_buckets}.", "relative_attention_num_buckets")
    if not num_buckets // 4 < max_distance <= MAX_TOKENS:
        limits = f"from {num_buckets // 4 + 1:,} to {MAX_TOKENS:,} with {num_buckets} buckets"
        raise config.error(f"must be {limits}, is {max_distance:,}.", "relative_attention_max_distance")
    return Encoder(
        family="t5_gated" if gated else "t5",
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("d_model"),
        intermediate_size=config.positive("d_ff"),
        layers=(Layer(),) * common.read_depth(config, "num_layers"),
        num_heads=config.positive("num_heads"),
        head_width=config.positive("d_kv", 64),
        max_positions=MAX_TOKENS,
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


def _check_repeated(config: JsonFile, activation: Activation, *, gated: bool) -> None:
    """Raise CheckpointError if the keys in which transformers repeats feed_forward_proj say something else."""
    if config.get("is_gated_act", bool, gated) != gated:
        raise config.error(f"contradicts feed_forward_proj, by which it is {gated}.", "is_gated_act")
    names = {name: value for name, value in common.ACTIVATIONS.items() if value == activation}
    if config.data.get("dense_act_fn") is not None:
        config.choice("dense_act_fn", names)
