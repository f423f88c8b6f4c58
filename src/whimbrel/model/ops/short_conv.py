"""Short convolution over the tokens of each seq, column by column; and rows with those of their neighbours, for any other.

Each token's row becomes a weighted sum of the rows of its neighbours. Neighbours in other seqs count as 0, so the seqs of a
batch stay apart without padding. Products and sums are rounded one by one, so a row has the same bits in any batch.

Shapes: R rows, D columns, K taps.
"""

import torch
from torch import Tensor


def short_conv(x_RD: Tensor, positions_R: Tensor, taps_KD: Tensor, bias_D: Tensor | None, *, causal: bool) -> Tensor:
    """Return the convolution in float32. The last tap belongs to the token itself, or unless causal the middle one.

    A neighbour belongs to the same seq if its position, counted from 0, is as far away as its row.
    """
    width = taps_KD.shape[0]
    own = width - 1 if causal else width // 2
    out_RD = x_RD * taps_KD[own]
    for tap in range(width):
        if (offset := tap - own) != 0:
            out_RD += (x_RD.roll(-offset, 0) * taps_KD[tap]).masked_fill_(_elsewhere(positions_R, offset), 0)
    return out_RD if bias_D is None else out_RD + bias_D


def with_neighbours(x_RD: Tensor, positions_R: Tensor, width: int) -> Tensor:
    """Return each row between those of its neighbours, `width` rows side by side: (R, width * D)."""
    offsets = range(-(width // 2), width // 2 + 1)
    rows = [x_RD.roll(-offset, 0).masked_fill_(_elsewhere(positions_R, offset), 0) if offset else x_RD for offset in offsets]
    return torch.cat(rows, 1)


def _elsewhere(positions_R: Tensor, offset: int) -> Tensor:
    """Return a column that tells of each row whether the one at this offset is not of the same seq."""
    return (positions_R.roll(-offset) - positions_R != offset)[:, None]
