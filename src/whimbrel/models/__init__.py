"""Model families. A family takes ragged rows and returns hidden states; it knows nothing of pooling or requests."""

from __future__ import annotations

from pathlib import Path

import torch

from whimbrel.card import Card
from whimbrel.models.bert import UNUSED, Bert
from whimbrel.models.weights import Weights


def load_model(folder: Path, card: Card, *, device: torch.device, dtype: torch.dtype, sha256: str | None = None) -> Bert:
    """Load the encoder of the checkpoint in `folder`. Raises CheckpointError naming file and tensor."""
    with Weights(folder, path=card.path, prefix=card.encoder.prefix, sha256=sha256) as weights:
        model = Bert(card.encoder, weights, device=device, dtype=dtype)
        weights.finish(UNUSED)
    return model
