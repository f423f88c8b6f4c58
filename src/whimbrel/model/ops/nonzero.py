"""Nonzero entries of rows over a vocabulary, found on the device, so that the zeros are not copied to the host.

The host does not wait for their number: there is room for as many as texts usually have. If there are more, which their
counts tell, the rows themselves must be copied.

Shapes: P rows, V entries of a row, Y of all rows, X places for nonzero entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from whimbrel.types.batch import offsets_of
from whimbrel.types.result import Sparse

_PER_ROW: Final = 512
"""Places for each row; a document of 512 tokens has some 300 entries."""
_LEAST: Final = 2**14


@dataclass(frozen=True, slots=True, eq=False)
class NonzeroEntries:
    counts_P: Tensor
    """Nonzero entries of each row, int32."""
    ids_X: Tensor
    """Columns of the entries, row after row, int32; after the last entry anything."""
    weights_X: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> NonzeroEntries:
        return NonzeroEntries(function(self.counts_P), function(self.ids_X), function(self.weights_X))

    def to_sparse(self) -> Sparse | None:
        """Return the entries, which must be on the host, or None if there were more than places."""
        offsets_P1 = offsets_of(self.counts_P.numpy())
        total = int(offsets_P1[-1])
        if total > self.ids_X.shape[0]:
            return None
        return Sparse(self.ids_X[:total].numpy(), self.weights_X[:total].numpy(), offsets_P1)


def find_nonzero(rows_PV: Tensor) -> NonzeroEntries:
    """Return the entries that are not 0, as NaN and infinity are not."""
    num_rows, width = rows_PV.shape
    mask_PV, size = rows_PV != 0, min(rows_PV.numel(), max(_LEAST, _PER_ROW * num_rows))
    dtype = torch.int32 if rows_PV.numel() < 2**31 else torch.int64
    running_Y = mask_PV.flatten().cumsum(0, dtype=dtype)
    number_X = torch.arange(1, size + 1, dtype=dtype, device=rows_PV.device)
    place_X = torch.searchsorted(running_Y, number_X).clamp_(max=max(rows_PV.numel() - 1, 0))  # the first with that sum
    counts_P = mask_PV.sum(1, dtype=torch.int32)
    return NonzeroEntries(counts_P, (place_X % max(width, 1)).int(), rows_PV.flatten()[place_X])
