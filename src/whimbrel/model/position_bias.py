"""What is added to the scores of attention for the distance of query and key: ALiBi, and relative positions in buckets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Bias: TypeAlias = Callable[[int, int, int], Tensor]
"""(first, last, L) -> what is added for the queries from `first` to `last` of a seq, (N, last - first, L)."""


def alibi(num_heads: int, device: torch.device) -> Bias:
    """Minus the distance, times a slope for each head."""
    slopes_N11 = alibi_slopes(num_heads).to(device)[:, None, None]
    return lambda first, last, length: -slopes_N11 * _distances(first, last, length, device).abs()


def relative(table_BN: Tensor) -> Bias:
    """A learned number for each head and bucket of distances."""

    def bias(first: int, last: int, length: int) -> Tensor:
        distances = _distances(first, last, length, table_BN.device)
        return table_BN[_buckets(distances, table_BN.shape[0])].permute(2, 0, 1)

    return bias


def _distances(first: int, last: int, length: int, device: torch.device) -> Tensor:
    """Position of the key less that of the query, (last - first, L), for the queries from `first` to `last`."""
    return torch.arange(length, device=device)[None, :] - torch.arange(first, last, device=device)[:, None]


def _buckets(distances: Tensor, num_buckets: int) -> Tensor:
    """Small distances have a bucket each, larger ones share by their logarithm, up to 128. The upper half is for keys ahead."""
    half = num_buckets // 2
    exact = half // 2
    far = distances.abs()
    log = torch.log(far.float().clamp(min=1) / exact) / math.log(128 / exact) * (half - exact)
    bucket = torch.where(far < exact, far, (exact + log.long()).clamp(max=half - 1))
    return bucket + (distances > 0) * half


def alibi_slopes(num_heads: int) -> Tensor:
    """One slope per head: a geometric sequence; beyond the last power of two, every other slope of the next sequence."""
    power = 2 ** math.floor(math.log2(num_heads))
    start = 2 ** (-8 / power)
    slopes = [start ** (n + 1) for n in range(power)]
    start = 2 ** (-4 / power)
    slopes += [start ** (2 * n + 1) for n in range(num_heads - power)]
    return torch.tensor(slopes)
