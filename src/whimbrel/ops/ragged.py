"""Reductions over the seqs of a flat tensor, once for the whole batch. Sums run in token order, so a seq's result does
not depend on what else is in the batch."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def segment_reduce(x_TD: Tensor, starts_B: Tensor, cu_seqlens: Tensor, how: Literal["sum", "max"]) -> Tensor:
    """Reduce tokens starts_B[i] to cu_seqlens[i + 1] of each seq i -> (B, D), in float32.

    An empty range gives 0 for "sum" and -inf for "max".
    """
    bounds = torch.stack((cu_seqlens[:-1], starts_B), dim=1).flatten()
    offsets = torch.cat((bounds, cu_seqlens[-1:]))
    return torch.segment_reduce(x_TD.float(), how, offsets=offsets.long(), axis=0)[1::2]


def normalize(x_BD: Tensor) -> Tensor:
    """Rows divided by their Euclidean norm; a row of zeros stays zero."""
    return F.normalize(x_BD, dim=-1)


def cut(x_BD: Tensor, dimensions_B: Tensor) -> Tensor:
    """Zero all but the first dimensions_B[i] columns of row i.

    Zeroed at full width rather than sliced, so that one batch may mix widths and a row's norm has the same bits in all.
    """
    columns = torch.arange(x_BD.shape[1], device=x_BD.device)
    return x_BD.masked_fill(columns >= dimensions_B[:, None], 0.0)
