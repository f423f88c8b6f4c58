"""Position biases of attention scores: ALiBi, and relative positions in buckets.

Shapes: N heads, L keys, B buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Bias: TypeAlias = Callable[[int, int, int], Tensor]
"""(first, last, L) -> bias of the queries `first` to `last` of a seq, (N, last - first, L)."""


def alibi(num_heads: int, device: torch.device) -> Bias:
    """Return the ALiBi bias: minus the distance, times a slope per head."""
    slopes_N11 = alibi_slopes(num_heads).to(device)[:, None, None]
    return lambda first, last, length: -slopes_N11 * _distances(first, last, length, device).abs()


def relative(table_BN: Tensor) -> Bias:
    """Return a learned bias for each head and bucket of distances."""

    def bias(first: int, last: int, length: int) -> Tensor:
        distances = _distances(first, last, length, table_BN.device)
        return table_BN[_buckets(distances, table_BN.shape[0])].permute(2, 0, 1)

    return bias


def _distances(first: int, last: int, length: int, device: torch.device) -> Tensor:
    """Return the position of the key minus that of the query, (last - first, L)."""
    return torch.arange(length, device=device)[None, :] - torch.arange(first, last, device=device)[:, None]


def _buckets(distances: Tensor, num_buckets: int) -> Tensor:
    """Return buckets: one per small distance, logarithmic ones up to 128. The upper half is for keys after the query."""
    half = num_buckets // 2
    exact = half // 2
    far = distances.abs()
    log = torch.log(far.float().clamp(min=1) / exact) / math.log(128 / exact) * (half - exact)
    bucket = torch.where(far < exact, far, (exact + log.long()).clamp(max=half - 1))
    return bucket + (distances > 0) * half


def alibi_slopes(num_heads: int) -> Tensor:
    """Return a slope per head: a geometric sequence; after the last power of two, every other slope of the next sequence."""
    power = 2 ** math.floor(math.log2(num_heads))
    start = 2 ** (-8 / power)
    slopes = [start ** (n + 1) for n in range(power)]
    start = 2 ** (-4 / power)
    slopes += [start ** (2 * n + 1) for n in range(num_heads - power)]
    return torch.tensor(slopes)
