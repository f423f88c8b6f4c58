"""hidden_RD + offsets -> vectors_BD: pooling, heads, the Matryoshka cut and normalisation, once for the whole batch.

Everything here is float32. Source of the modes: sentence_transformers/sentence_transformer/modules/pooling.py (6.2); an
excluded prompt (`include_prompt=False`) moves where a seq begins, except for "lasttoken".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from whimbrel.card import Card, Dense, Head, LayerNorm, PoolingMode
from whimbrel.models.weights import Weights
from whimbrel.ops.linear import Linear, round_rows
from whimbrel.ops.norms import layer_norm
from whimbrel.ops.ragged import cut, normalize, segment_reduce

_Pool = Callable[[Tensor, Tensor, Tensor], Tensor]


class Pooling:
    """The pooling and the heads of one checkpoint."""

    def __init__(self, folder: Path, card: Card, device: torch.device) -> None:
        self._modes = card.pooling.modes
        self._heads = [_load_head(folder, head, device) for head in card.head]

    def __call__(
        self, hidden_RD: Tensor, cu_seqlens: Tensor, prompt_tokens_B: Tensor, dimensions_B: Tensor, normalize_B: Tensor
    ) -> Tensor:
        """Vectors (B, D) in float32; columns from dimensions_B[i] on are zero in row i."""
        lengths_B = cu_seqlens.diff()
        starts_B = cu_seqlens[:-1] + torch.where(prompt_tokens_B < lengths_B, prompt_tokens_B, 0)
        x_BD = torch.cat([_POOLS[mode](hidden_RD, starts_B, cu_seqlens) for mode in self._modes], dim=-1)
        for head in self._heads:
            x_BD = head(x_BD)
        x_BD = cut(x_BD, dimensions_B)
        return torch.where(normalize_B[:, None], normalize(x_BD), x_BD)


def _first(x_TD: Tensor, starts_B: Tensor, cu_seqlens: Tensor) -> Tensor:
    return x_TD[starts_B]


def _last(x_TD: Tensor, starts_B: Tensor, cu_seqlens: Tensor) -> Tensor:
    return x_TD[cu_seqlens[1:] - 1]


def _max(x_TD: Tensor, starts_B: Tensor, cu_seqlens: Tensor) -> Tensor:
    return segment_reduce(x_TD, starts_B, cu_seqlens, "max")


def _mean(x_TD: Tensor, starts_B: Tensor, cu_seqlens: Tensor) -> Tensor:
    return segment_reduce(x_TD, starts_B, cu_seqlens, "sum") / (cu_seqlens[1:] - starts_B)[:, None]


def _mean_sqrt_len(x_TD: Tensor, starts_B: Tensor, cu_seqlens: Tensor) -> Tensor:
    return segment_reduce(x_TD, starts_B, cu_seqlens, "sum") / (cu_seqlens[1:] - starts_B)[:, None].float().sqrt()


def _weighted_mean(x_TD: Tensor, starts_B: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Token i of its seq (from 1, a left-out prompt counted) weighs i."""
    rows = torch.arange(x_TD.shape[0], device=x_TD.device, dtype=torch.int32)
    seq_R = torch.searchsorted(cu_seqlens[1:], rows, right=True).clamp_(max=starts_B.shape[0] - 1)
    weights_R1 = (rows - cu_seqlens[seq_R] + 1).float()[:, None]
    total_B1 = segment_reduce(weights_R1, starts_B, cu_seqlens, "sum")
    return segment_reduce(x_TD * weights_R1, starts_B, cu_seqlens, "sum") / total_B1


_POOLS: Final[Mapping[PoolingMode, _Pool]] = {
    "cls": _first,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}


def _load_head(folder: Path, head: Head, device: torch.device) -> Callable[[Tensor], Tensor]:
    if isinstance(head, Dense):
        return _load_dense(folder, head, device)
    if isinstance(head, LayerNorm):
        return _load_layer_norm(folder, head, device)
    return normalize


def _load_dense(folder: Path, head: Dense, device: torch.device) -> Callable[[Tensor], Tensor]:
    rows, columns = head.out_features, head.in_features
    with Weights(folder, path=head.path, allow_pickle=True) as weights:
        bias = weights.take("linear.bias", rows).to(device) if head.bias else None
        linear = Linear(weights.take("linear.weight", rows, columns).to(device), bias, head.activation)
        project = (
            Linear(weights.take("residual.weight", rows, columns).to(device), None)
            if head.residual and rows != columns
            else None
        )
        weights.finish()

    def dense(x_BI: Tensor) -> Tensor:
        num_rows = x_BI.shape[0]
        padded = torch.nn.functional.pad(x_BI, (0, 0, 0, round_rows(num_rows) - num_rows))
        y = linear(padded)
        if head.residual:
            y = y + (padded if project is None else project(padded))
        return y[:num_rows]

    return dense


def _load_layer_norm(folder: Path, head: LayerNorm, device: torch.device) -> Callable[[Tensor], Tensor]:
    with Weights(folder, path=head.path, allow_pickle=True) as weights:
        weight, bias = (weights.take(f"norm.{part}", head.dimension).to(device) for part in ("weight", "bias"))
        weights.finish()
    return lambda x: layer_norm(x, weight, bias, 1e-5)
