"""Static embeddings: a table of token vectors, without layers or attention.

Lookups are float32, as a smaller dtype is no faster. Token i has the vector table[mapping[i]] * weights[i]. Tensor names are
those of Sentence Transformers' StaticEmbedding ("embedding.weight") and SparseStaticEmbedding ("weight", one column), and of
model2vec ("embeddings", and in newer checkpoints "mapping" and "weights").

Shapes: R rows, D columns, V entries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.checkpoint.tokenizer.contents import read_vocabulary
from whimbrel.errors import CheckpointError
from whimbrel.model.weights import Weights
from whimbrel.types.card import Card, Encoder

_NAMES: Final = ("embedding.weight", "embeddings", "weight")


def read_idf(folder: Path, card: Card) -> Tensor:
    """Return the weights of tokens from a JSON file, 0 for tokens that are not in it. Raises CheckpointError."""
    spec, file = card.encoder, JsonFile.read(folder, card.encoder.idf or "")
    ids, _ = read_vocabulary(folder / card.path, card.tokenizer, spec.vocab_size)
    weight_V = torch.zeros(spec.vocab_size)
    for token in file.data:
        if token not in ids:
            raise file.error("this token is not in tokenizer.json.", token)
        weight_V[ids[token]] = file.get(token, float)
    return weight_V


def load_static_table(spec: Encoder, weights: Weights, device: torch.device) -> StaticTable:
    """Load a table with its mapping and weights, if there are any. Raises CheckpointError."""
    name = next((name for name in _NAMES if weights.has(name)), _NAMES[0])
    table = weights.stored(name)  # integers of a quantised table are used as they are
    table = weights.take(name, *table.shape) if table.is_floating_point() else table.float()
    mapping = weights.stored("mapping").long() if weights.has("mapping") else torch.arange(len(table))
    if mapping.shape != (spec.vocab_size,) or not (mapping.is_meta or 0 <= mapping.min() <= mapping.max() < len(table)):
        raise CheckpointError(f"names rows that {name} does not have.", file=weights.file, key="mapping")
    return StaticTable(table, mapping, weights.take("weights", spec.vocab_size) if weights.has("weights") else None, device)


class StaticTable:
    """Loaded table. The id after the last token stands for a text without tokens; its vector is zero."""

    def __init__(self, table: Tensor, mapping_V: Tensor, weight_V: Tensor | None, device: torch.device) -> None:
        table_VD = table if table.ndim == 2 else table[:, None]
        self._table = F.pad(table_VD, (0, 0, 0, 1)).to(device)
        self._mapping = F.pad(mapping_V, (0, 1), value=len(table_VD)).to(device)
        self._weights = None if weight_V is None else F.pad(weight_V, (0, 1)).to(device)

    def __call__(self, ids_R: Tensor, *_: object) -> Tensor:
        x_RD = F.embedding(self._mapping[ids_R], self._table)
        return x_RD if self._weights is None else x_RD * self._weights[ids_R][:, None]
