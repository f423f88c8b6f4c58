"""Loading of heads: functions from rows to rows, in float32.

The scores of all tokens for all entries of a vocabulary would be by far the largest tensor of a batch. So a decoder has blocks
of columns, and the scores of a block are pooled before the next block runs. Sources:
sentence_transformers/sparse_encoder/modules/{splade_pooling,sparse_auto_encoder}.py (6.2) and, for SPLADE,
splade/models/transformer_rep.py of naver/splade.

Shapes: R rows, I input columns, D columns, P texts, V vocabulary entries, W columns of a block, K largest latents.
"""

from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor

from whimbrel.model.activations import in_blocks
from whimbrel.model.ops.linear import Linear, Norm
from whimbrel.model.ops.quantization import Quantization
from whimbrel.model.pooling import HeadFunction, LoadedHead, guard_rows, normalize, segment_reduce
from whimbrel.model.spans import SpanScorer
from whimbrel.model.weights import Weights
from whimbrel.types.heads import Dense, DivideBy, Head, LayerNorm, LogitScore, MlmHead, Normalize, SpanHead, SparseAutoencoder

_BLOCK: Final = 4096
"""Columns of a block. Its scores for 512 tokens take 8 MiB in float32."""
_ALIGN: Final = 32  # leaves no remainder in torch's vectorised loops
_EPS: Final = 1e-5


def load_head(
    head: Head, folder: Path, main: Weights, device: torch.device, dtype: torch.dtype, *, quantization: Quantization | None
) -> LoadedHead:
    """Load a head. `main` are the model's weights; `dtype` and `quantization` apply to MlmHead only. Raises CheckpointError."""
    match head:
        case MlmHead():
            loaded = _decoder(head, main, device, dtype, quantization)
        case SparseAutoencoder():
            loaded = _sparse_autoencoder(head, folder, device)
        case LogitScore():
            loaded = _logit_score(head, main, device)
        case DivideBy():
            loaded = partial(torch.div, other=head.divisor)
        case SpanHead():
            loaded = SpanScorer(head, main, device)
        case Normalize():
            loaded = normalize
        case Dense() | LayerNorm():
            if head.source is None:
                loaded = _layer(head, main, device)
            else:
                with Weights(folder, path=head.source, allow_pickle=True) as weights:
                    loaded = _layer(head, weights, device)
                    weights.finish()
    return loaded


def _layer(head: Dense | LayerNorm, weights: Weights, device: torch.device) -> HeadFunction:
    prefix = f"{head.name}." if head.name else ""
    shape = (head.out_features, head.in_features) if isinstance(head, Dense) else (head.dimension,)
    weight = weights.take(f"{prefix}weight", *shape).to(device)
    bias = weights.take(f"{prefix}bias", shape[0]).to(device) if head.bias else None
    if isinstance(head, LayerNorm):
        return Norm(weight, bias, head.eps, centred=True)
    linear = Linear(weight, bias, head.activation)
    linear = linear if head.activation == "identity" else guard_rows(linear)
    if not head.residual:
        return linear
    if head.out_features == head.in_features:
        return lambda x_RI: linear(x_RI) + x_RI
    project = Linear(weights.take("residual.weight", *shape).to(device), None)
    return lambda x_RI: linear(x_RI) + project(x_RI)


def _logit_score(head: LogitScore, weights: Weights, device: torch.device) -> HeadFunction:
    ids = [head.true_id] if head.false_id is None else [head.true_id, head.false_id]
    rows_KD = weights.take_rows(f"{head.name}.weight", ids, head.vocab_size, head.in_features)
    weight = rows_KD[:1] if head.false_id is None else rows_KD[:1] - rows_KD[1:]
    return Linear(weight.to(device), None)


def _decoder(
    head: MlmHead, weights: Weights, device: torch.device, dtype: torch.dtype, quantization: Quantization | None
) -> LoadedHead:
    """Load a SPLADE decoder: rows (R, in) and the number of rows of each text -> (P, out) in float32.

    The rows of the texts are consecutive; further rows are ignored.
    """
    width = head.out_features
    name = head.table if head.table is not None and not weights.has(head.weight) else head.weight
    weight_VD = weights.take(name, width, head.in_features)
    bias_V = None
    if head.biases:
        bias_V = weights.take(next((each for each in head.biases if weights.has(each)), head.biases[0]), width)
    blocks: dict[int, Linear] = {}  # by the first entry of each
    for start in range(0, width, _BLOCK):
        block = slice(start, start + _BLOCK)
        bias = None if bias_V is None else bias_V[block].to(device, dtype)
        blocks[start] = Linear(weight_VD[block].to(device, dtype), bias, quantization=quantization)

    def saturate(x: Tensor) -> Tensor:
        x.relu_()
        for _ in range(head.num_logs):
            x.log1p_()
        return x

    def sums(scores_RW: Tensor, lengths_P: Tensor) -> Tensor:
        ends_P = lengths_P.cumsum(0)
        return segment_reduce(in_blocks(saturate, scores_RW.float()), ends_P - lengths_P, ends_P, "sum")

    def decode(x_RD: Tensor, lengths_P: Tensor) -> Tensor:
        pool = adjacent_max if head.strategy == "max" else sums
        x_RD = x_RD.to(dtype)
        rows_PV = torch.zeros((lengths_P.shape[0], width + -width % _ALIGN), device=x_RD.device)
        for start, block in blocks.items():
            scores_PW = pool(block(x_RD), lengths_P)
            rows_PV[:, start : start + scores_PW.shape[1]] = scores_PW
        if head.strategy == "max":  # after the maximum: the function is monotonic
            saturate(rows_PV)
        return rows_PV[:, :width]

    return decode


def _sparse_autoencoder(head: SparseAutoencoder, folder: Path, device: torch.device) -> HeadFunction:
    with Weights(folder, path=head.source, allow_pickle=True) as weights:
        # The tensor has two names; safetensors keeps the alphabetically first, a pickle both.
        name = "encoder.weight" if weights.has("encoder.weight") else "decoder.linear.weight"
        weight = weights.take(name, head.out_features, head.in_features).to(device)
        latent_bias = weights.take("latent_bias", head.out_features).to(device)
        pre_bias = weights.take("pre_bias", head.in_features).to(device)
        weights.finish(("stats_last_nonzero", r"decoder\..*"))
    linear = Linear(weight, latent_bias)

    def encode(x_RI: Tensor) -> Tensor:
        if head.normalize:
            x_RI = x_RI - x_RI.mean(-1, keepdim=True)
            x_RI = x_RI / (x_RI.std(-1, keepdim=True) + _EPS)
        latents_RV = linear(x_RI - pre_bias)
        values_RK, ids_RK = latents_RV.topk(head.k, dim=-1)
        return torch.zeros_like(latents_RV).scatter_(-1, ids_RK, values_RK.relu())

    return encode


def adjacent_max(x_TD: Tensor, lengths_P: Tensor) -> Tensor:
    """Return the maximum over the first lengths_P[0] tokens, the next lengths_P[1], and so on, (P, D); -inf without tokens.

    On CPUs torch's segment_reduce reads column by column and takes some 20 times as long. This reduces neighbors of equal
    length at once, and a batch has few different lengths.
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
