"""Model families. A family takes ragged rows and returns hidden states; it knows nothing of pooling or requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from whimbrel.card import Card, Head
from whimbrel.models.families import FAMILIES
from whimbrel.models.heads import HeadFunction, load_head
from whimbrel.models.transformer import Transformer
from whimbrel.models.weights import Weights


def load_model(
    folder: Path, card: Card, *, device: torch.device, dtype: torch.dtype, sha256: str | None = None
) -> tuple[Transformer, Mapping[Head, HeadFunction]]:
    """Load the transformer of the checkpoint in `folder`, and its heads. Raises CheckpointError naming file and tensor."""
    names = FAMILIES[card.encoder.family]
    with Weights(folder, path=card.path, prefixes=names.prefixes, sha256=sha256) as weights:
        model = Transformer(card.encoder, weights, device=device, dtype=dtype)
        heads = {head: load_head(head, folder, weights, device) for output in card.outputs.values() for head in output.heads}
        weights.finish(names.unused)
    return model, heads
