"""Token vectors of several texts in one array, and the scores of a document without tokens.

Shapes: T tokens, N texts, D width.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from whimbrel.types.arrays import Int64Array

EMPTY: Final = -1e9
"""Score of a document without tokens: finite, and below any score of vectors."""

NO_MATCH: Final = (0.0, -1.0)
"""Greatest similarity and token index for a document without tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenVectors:
    """Vectors of several texts in one array: text i has rows starts_N[i] to ends_N[i]."""

    rows_TD: Tensor
    """Float32, float16, bfloat16, int8, or uint8 of 8 columns each, highest bit first; bit 0 means -1."""
    starts_N: Int64Array
    ends_N: Int64Array

    def __len__(self) -> int:
        return self.starts_N.size

    @property
    def width(self) -> int:
        return self.rows_TD.shape[1] * (8 if self.rows_TD.dtype == torch.uint8 else 1)

    @property
    def lengths(self) -> Int64Array:
        return self.ends_N - self.starts_N

    def of_text(self, text: int) -> Tensor:
        return self.floats(slice(int(self.starts_N[text]), int(self.ends_N[text])))

    def floats(self, rows: slice | Tensor) -> Tensor:
        x_TD = self.rows_TD[rows]
        if x_TD.dtype != torch.uint8:
            return x_TD.float()
        shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=x_TD.device)
        return ((x_TD[..., None] >> shifts) & 1).flatten(-2).float() * 2 - 1
