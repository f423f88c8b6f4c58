"""Reductions over ranges of a flat tensor, once for the whole batch.

Sums run in token order, so a row does not depend on the rest of the batch.

Shapes: T tokens, P rows, D columns.
"""

from __future__ import annotations

from itertools import groupby
from typing import Final, Literal, cast

import torch
from torch import Tensor

_LEAST_NORM: Final = 1e-12
"""Least divisor, as in torch.nn.functional.normalize."""


def segment_reduce(x_TD: Tensor, starts_P: Tensor, ends_P: Tensor, how: Literal["sum", "max"]) -> Tensor:
    """Reduce tokens starts_P[i] to ends_P[i] for each i -> (P, D), in float32. The ranges are in order and disjoint.

    An empty range gives 0 for "sum" and -inf for "max".
    """
    offsets = torch.cat((starts_P.new_zeros(1), torch.stack((starts_P, ends_P), dim=1).flatten()))
    return torch.segment_reduce(x_TD.float(), how, offsets=offsets.long(), axis=0)[1::2]


def adjacent_max(x_TD: Tensor, lengths_P: Tensor) -> Tensor:
    """Return the maximum over the first lengths_P[0] tokens, the next lengths_P[1], and so on, (P, D) in the dtype of x.

    An empty range gives -inf. On CPUs torch's segment_reduce reads column by column and takes some 20 times as long. This
    reduces neighbors of equal length at once, and a batch has few different lengths.
    """
    if x_TD.device.type != "cpu":
        ends_P = lengths_P.cumsum(0)
        return segment_reduce(x_TD, ends_P - lengths_P, ends_P, "max").to(x_TD.dtype)
    max_PD = x_TD.new_full((lengths_P.shape[0], x_TD.shape[1]), -torch.inf)
    token = row = 0
    lengths = cast(list[int], lengths_P.tolist())  # pyright: ignore[reportUnknownMemberType]
    for length, group in groupby(lengths):
        count = len(list(group))
        if length:
            rows_NLD = x_TD[token : token + count * length].view(count, length, -1)
            torch.amax(rows_NLD, 1, out=max_PD[row : row + count])
        token, row = token + count * length, row + count
    return max_PD


def normalize(x_PD: Tensor) -> Tensor:
    """Divide rows by their Euclidean norm. A row of zeros stays zero; a row whose norm overflows becomes NaN."""
    norms_P1 = cast(Tensor, x_PD.norm(dim=-1, keepdim=True))  # pyright: ignore[reportUnknownMemberType]
    return x_PD / norms_P1.clamp_min(_LEAST_NORM).masked_fill(norms_P1.isinf(), torch.nan)


def truncate_columns(x_PD: Tensor, widths_P: Tensor) -> Tensor:
    """Zero all but the first widths_P[i] columns of row i.

    Columns are zeroed rather than sliced, so that one batch may mix widths and the bits of a row's norm do not depend on it.
    """
    columns = torch.arange(x_PD.shape[1], device=x_PD.device)
    return x_PD.masked_fill(columns >= widths_P[:, None], 0.0)
