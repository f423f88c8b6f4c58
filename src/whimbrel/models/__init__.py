"""Model families. A family takes ragged rows and returns hidden states; it knows nothing of pooling or requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from whimbrel.card import Card, Head, Normalize
from whimbrel.errors import CheckpointError
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


def blame_weights(folder: Path, card: Card) -> CheckpointError:
    """Why a model that was loaded gives no finite numbers: the tensors that hold others. Reads all weights again."""
    heads = [head for output in card.outputs.values() for head in output.heads if not isinstance(head, Normalize)]
    found: list[tuple[str, str]] = []
    for path in dict.fromkeys([card.path, *(head.source for head in heads if head.source is not None)]):
        with Weights(folder, path=path, allow_pickle=True) as weights:
            found += weights.not_finite()
    if found:
        file, name = found[0]
        more = f"; so do {', '.join(name for _, name in found[1:4])}" if len(found) > 1 else ""
        return CheckpointError(f"holds NaN or infinity{more}{' and others' if len(found) > 4 else ''}.", file=file, key=name)
    return CheckpointError(
        "gives NaN or infinity though all its weights are finite.", file=f"{card.path}/config.json".lstrip("/")
    )
