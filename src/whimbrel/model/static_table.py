"""Static embeddings: a table of token vectors, without layers or attention.

Lookups are float32, as a smaller dtype is no faster. Token i has the vector table[mapping[i]] * weights[i]. Tensor names are
those of Sentence Transformers' StaticEmbedding ("embedding.weight") and SparseStaticEmbedding ("weight", one column), and of
model2vec ("embeddings", and in newer checkpoints "mapping" and "weights").

Shapes: R rows, D columns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.checkpoint.tokenizer.contents import read_vocabulary
from whimbrel.errors import CheckpointError
from whimbrel.model.ops.attention import AttentionLayout
from whimbrel.model.weights import Weights
from whimbrel.types.card import Card, Encoder

_NAMES: Final = ("embedding.weight", "embeddings", "weight")


class IdfWeights:
    """Token weights from a JSON file, as `Weights`. Tokens that are not in the file have weight 0."""

    def __init__(self, folder: Path, card: Card) -> None:
        spec, file = card.encoder, JsonFile.read(folder, card.encoder.idf or "")
        ids, _ = read_vocabulary(folder / card.path, card.tokenizer, spec.vocab_size)
        self.file: str = file.name
        self._weight = torch.zeros(spec.vocab_size)
        for token in file.data:
            if token not in ids:
                raise file.error("this token is not in tokenizer.json.", token)
            self._weight[ids[token]] = file.get(token, float)

    def has(self, name: str) -> bool:
        return name == "weight"

    def stored(self, name: str) -> Tensor:
        return self._weight

    def take(self, name: str, *shape: int) -> Tensor:
        return self._weight


class StaticTable:
    """Loaded table. The id after the last token stands for a text without tokens; its vector is zero."""

    def __init__(self, spec: Encoder, weights: Weights | IdfWeights, device: torch.device) -> None:
        name = next((name for name in _NAMES if weights.has(name)), _NAMES[0])
        table = weights.stored(name)  # integers of a quantised table are used as they are
        table = weights.take(name, *table.shape) if table.is_floating_point() else table.float()
        if table.ndim == 1:
            table = table[:, None]
        mapping = weights.stored("mapping").long() if weights.has("mapping") else torch.arange(table.shape[0])
        if mapping.shape != (spec.vocab_size,) or not (mapping.is_meta or 0 <= mapping.min() <= mapping.max() < table.shape[0]):
            raise CheckpointError(f"names rows that {name} does not have.", file=weights.file, key="mapping")
        self._table = F.pad(table, (0, 0, 0, 1)).to(device)
        self._mapping = F.pad(mapping, (0, 1), value=table.shape[0]).to(device)
        self._weights = F.pad(weights.take("weights", spec.vocab_size), (0, 1)).to(device) if weights.has("weights") else None

    def __call__(
        self,
        ids_R: Tensor,
        positions_R: Tensor,
        type_ids_R: Tensor,
        layout: AttentionLayout,
        between_layers: Callable[[], None] | None = None,
    ) -> Tensor:
        x_RD = F.embedding(self._mapping[ids_R], self._table)
        return x_RD if self._weights is None else x_RD * self._weights[ids_R][:, None]
