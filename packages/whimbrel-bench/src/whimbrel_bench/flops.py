"""Arithmetic of a model per token, counted from the shapes of its weights.

It counts the products of each token with weight matrices, of which a layer's time mostly consists. Attention's own products
are not counted, so a share of the peak is a lower bound. For models whose weights are not all used for each token there is no
number.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from whimbrel.checkpoint.summary import weight_shapes

if TYPE_CHECKING:
    from whimbrel.types.card import Card

_NOT_PER_TOKEN: Final = ("embed", "pooler", "classifier", "score", "lm_head")
"""Parts of names of weights that are looked up, or used once per text or not at all."""


def flops_per_token(folder: Path, card: Card) -> float | None:
    """Return the FLOP of one token's products with weights, or None for a model in which they cannot be counted by shape."""
    layers = card.encoder.layers
    if card.towers or not layers or any(layer.num_experts for layer in layers) or "sparse" in card.outputs:
        return None
    shapes = weight_shapes([*folder.glob("*.safetensors")])
    if shapes is None:
        return None
    tables = {card.encoder.vocab_size, card.encoder.max_positions}
    return 2.0 * sum(
        prod(shape)
        for name, shape in shapes
        if len(shape) == 2 and shape[0] not in tables and not any(part in name for part in _NOT_PER_TOKEN)
    )
