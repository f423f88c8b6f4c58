"""Heads with sparse rows over a vocabulary: SPLADE's decoder and the encoder of a sparse autoencoder.

The scores of all tokens for all entries would be by far the largest tensor of a batch, so it is never built. The decoder is
stored in blocks of columns, and the scores of each block are pooled before the next block runs. Sources: sentence_transformers/
sparse_encoder/modules/{splade_pooling,sparse_auto_encoder}.py (6.2) and, for SPLADE, splade/models/transformer_rep.py of
naver/splade.

Shapes: R rows, P texts, V vocabulary entries, W columns of a block, I input columns, K largest latents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from whimbrel.model.ops.linear import Linear, in_blocks
from whimbrel.model.ops.ragged import adjacent_max, segment_reduce
from whimbrel.model.weights import Weights
from whimbrel.types.heads import MlmHead, SparseAutoencoder

_BLOCK: Final = 4096
"""Columns of a block. Its scores for 512 tokens take 8 MiB in float32."""
_ALIGN: Final = 32
"""Multiple of columns that leaves no remainder in torch's vectorised loops."""
_EPS: Final = 1e-5


class Decoder:
    """SPLADE decoder: rows (R, in) and the number of rows of each text -> (P, out) in float32.

    The rows of the texts are consecutive; further rows are ignored. `blocks` score consecutive ranges of entries.
    """

    def __init__(self, head: MlmHead, blocks: Sequence[Linear], dtype: torch.dtype) -> None:
        self._head = head
        self._blocks = blocks
        self._dtype = dtype

    def __call__(self, x_RD: Tensor, lengths_P: Tensor) -> Tensor:
        width = self._head.out_features
        pool = self._max if self._head.strategy == "max" else self._sum
        x_RD = x_RD.to(self._dtype)
        rows_PV = torch.zeros((lengths_P.shape[0], width + -width % _ALIGN), device=x_RD.device)
        for number, block in enumerate(self._blocks):
            scores_PW = pool(block(x_RD), lengths_P)
            rows_PV[:, number * _BLOCK : number * _BLOCK + scores_PW.shape[1]] = scores_PW
        if self._head.strategy == "max":  # after the maximum: the function is monotonic
            self._saturate(rows_PV)
        return rows_PV[:, :width]

    def _max(self, scores_RW: Tensor, lengths_P: Tensor) -> Tensor:
        return adjacent_max(scores_RW, lengths_P)

    def _sum(self, scores_RW: Tensor, lengths_P: Tensor) -> Tensor:
        ends_P = lengths_P.cumsum(0)
        return segment_reduce(in_blocks(self._saturate, scores_RW.float()), ends_P - lengths_P, ends_P, "sum")

    def _saturate(self, x: Tensor) -> Tensor:
        x.relu_()
        for _ in range(self._head.num_logs):
            x.log1p_()
        return x


def load_vocabulary(head: MlmHead, weights: Weights, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Load a decoder from the transformer's weights. Raises CheckpointError."""
    rows, columns = head.out_features, head.in_features
    name = head.table if head.table is not None and not weights.has(head.weight) else head.weight
    weight_VD = weights.take(name, rows, columns)
    bias_V = None
    if head.biases:
        bias_V = weights.take(next((each for each in head.biases if weights.has(each)), head.biases[0]), rows)
    blocks: list[Linear] = []
    for start in range(0, rows, _BLOCK):
        block = slice(start, start + _BLOCK)
        bias = None if bias_V is None else bias_V[block].to(device, dtype)
        blocks.append(Linear(weight_VD[block].to(device, dtype), bias))
    return Decoder(head, blocks, dtype)


def load_sparse_code(head: SparseAutoencoder, folder: Path, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Load the encoder of a sparse autoencoder. Raises CheckpointError."""
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
