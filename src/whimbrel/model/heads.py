"""Loading of heads: functions from rows to rows, in float32.

Shapes: R rows, I input columns, D columns, P rows of an output.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from whimbrel.model.ops.linear import Linear
from whimbrel.model.ops.norms import layer_norm
from whimbrel.model.ops.ragged import normalize
from whimbrel.model.vocabulary_heads import load_sparse_code, load_vocabulary
from whimbrel.model.weights import Weights
from whimbrel.types.heads import Activation, Dense, DivideBy, Head, LayerNorm, LogitScore, MlmHead, Normalize, SparseAutoencoder

HeadFunction: TypeAlias = Callable[[Tensor], Tensor]
"""(R, in) -> (R, out), where R is a result of `round_up_rows`."""
LoadedHead: TypeAlias = Callable[..., Tensor]
"""HeadFunction; for an MlmHead, a `Decoder`."""


def load_head(head: Head, folder: Path, main: Weights, device: torch.device, dtype: torch.dtype) -> LoadedHead:
    """Load one head of the checkpoint in `folder`; `main` are the transformer's weights. Raises CheckpointError.

    `dtype` applies to MlmHead only, which is as large as an embedding table.
    """
    match head:
        case MlmHead():
            loaded = load_vocabulary(head, main, device, dtype)
        case SparseAutoencoder():
            loaded = load_sparse_code(head, folder, device)
        case LogitScore():
            loaded = _logit_score(head, main, device)
        case DivideBy():
            loaded = _divide(head)
        case Dense() | LayerNorm():
            loaded = _layer(head, folder, main, device)
        case Normalize():
            loaded = normalize
    return loaded


def _layer(head: Dense | LayerNorm, folder: Path, main: Weights, device: torch.device) -> HeadFunction:
    if head.source is None:
        return _load_layer(head, main, device)
    with Weights(folder, path=head.source, allow_pickle=True) as weights:
        loaded = _load_layer(head, weights, device)
        weights.finish()
    return loaded


def _load_layer(head: Dense | LayerNorm, weights: Weights, device: torch.device) -> HeadFunction:
    return _dense(head, weights, device) if isinstance(head, Dense) else _layer_norm(head, weights, device)


def _divide(head: DivideBy) -> HeadFunction:
    return lambda x_RD: x_RD / head.divisor


def _dense(head: Dense, weights: Weights, device: torch.device) -> HeadFunction:
    rows, columns = head.out_features, head.in_features
    weight = weights.take(_tensor_name(head.name, "weight"), rows, columns).to(device)
    bias = weights.take(_tensor_name(head.name, "bias"), rows).to(device) if head.bias else None
    linear = _with_activation(Linear(weight, bias, head.activation), head.activation)
    if not head.residual:
        return linear
    if rows == columns:
        return lambda x_RI: linear(x_RI) + x_RI
    project = Linear(weights.take("residual.weight", rows, columns).to(device), None)
    return lambda x_RI: linear(x_RI) + project(x_RI)


def _with_activation(linear: Linear, activation: Activation) -> HeadFunction:
    """Set rows to NaN whose input is not finite: most activations map infinity, and oneDNN's ReLU NaN, to finite values."""
    if activation == "identity":
        return linear
    return lambda x_RI: linear(x_RI).masked_fill_(~x_RI.isfinite().all(-1, keepdim=True), torch.nan)


def _layer_norm(head: LayerNorm, weights: Weights, device: torch.device) -> HeadFunction:
    weight = weights.take(_tensor_name(head.name, "weight"), head.dimension).to(device)
    bias = weights.take(_tensor_name(head.name, "bias"), head.dimension).to(device) if head.bias else None
    return lambda x_RD: layer_norm(x_RD, weight, bias, head.eps)


def _logit_score(head: LogitScore, weights: Weights, device: torch.device) -> HeadFunction:
    ids = [head.true_id] if head.false_id is None else [head.true_id, head.false_id]
    rows_KD = weights.take_rows(f"{head.name}.weight", ids, head.vocab_size, head.in_features)
    weight = rows_KD[:1] if head.false_id is None else rows_KD[:1] - rows_KD[1:]
    return Linear(weight.to(device), None)


def _tensor_name(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part
