"""Model families. A family takes ragged rows and returns hidden states; it knows nothing of pooling or requests."""

from __future__ import annotations

from pathlib import Path

import torch

from whimbrel.card import Card
from whimbrel.models.families import FAMILIES
from whimbrel.models.transformer import Transformer
from whimbrel.models.weights import Weights


def load_model(folder: Path, card: Card, *, device: torch.device, dtype: torch.dtype, sha256: str | None = None) -> Transformer:
    """Load the transformer of the checkpoint in `folder`. Raises CheckpointError naming file and tensor."""
    with Weights(folder, path=card.path, prefixes=FAMILIES[card.encoder.family].prefixes, sha256=sha256) as weights:
        return Transformer(card.encoder, weights, device=device, dtype=dtype)
