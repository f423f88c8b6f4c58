"""Bidirectional attention over a ragged batch: one signature, the implementation chosen by device and dtype.

- CPU, and float32 anywhere: SDPA over runs of equal length, in float32. In bfloat16 SDPA is slower on CPUs below AMX.
- GPU in half precision: torch's variable-length flash attention.

`attend_reference` is the plain formula that both are tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the seqs of a batch lie among its rows, on the host and on the device."""

    cu_seqlens: Tensor
    """B + 1 offsets, int32, on the device."""
    runs: Sequence[tuple[int, int, int]]
    """(first token, number of seqs, length) of neighbouring seqs of equal length."""
    num_tokens: int
    max_seqlen: int


def attend(qkv_R3NH: Tensor, layout: Layout) -> Tensor:
    """softmax(q k' / sqrt(H)) v within each seq -> (R, N * H) in the dtype of qkv. Rows beyond the tokens are 0."""
    if qkv_R3NH.is_cuda and qkv_R3NH.dtype != torch.float32:
        return _attend_varlen(qkv_R3NH, layout)
    return _attend_runs(qkv_R3NH, layout)


def _attend_runs(qkv_R3NH: Tensor, layout: Layout) -> Tensor:
    num_rows, _, num_heads, width = qkv_R3NH.shape
    # Heads of a width that is no multiple of 4 are filled up with zeros: SDPA's bits would depend on the place in the batch.
    filled = width + -width % 4
    qkv = F.pad(qkv_R3NH.float(), (0, filled - width))
    out_RNH = qkv.new_empty(num_rows, num_heads, filled)
    out_RNH[layout.num_tokens :] = 0
    for start, count, length in layout.runs:
        end = start + count * length
        q, k, v = qkv[start:end].view(count, length, 3, num_heads, filled).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, scale=width**-0.5)
        out_RNH[start:end].view(count, length, num_heads, filled).copy_(out.transpose(1, 2))
    return out_RNH[..., :width].reshape(num_rows, num_heads * width).to(qkv_R3NH.dtype)


def _attend_varlen(qkv_R3NH: Tensor, layout: Layout) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    num_rows, _, num_heads, width = qkv_R3NH.shape
    q, k, v = qkv_R3NH[: layout.num_tokens].unbind(1)
    longest = layout.max_seqlen
    out_TNH = varlen_attn(q, k, v, layout.cu_seqlens, layout.cu_seqlens, longest, longest)
    assert isinstance(out_TNH, Tensor)
    out_RD = qkv_R3NH.new_zeros(num_rows, num_heads * width)
    out_RD[: layout.num_tokens] = out_TNH.reshape(-1, num_heads * width)
    return out_RD


def attend_reference(qkv_R3NH: Tensor, layout: Layout) -> Tensor:
    """The formula itself, seq by seq in float32."""
    num_rows, _, num_heads, width = qkv_R3NH.shape
    out_RNH = torch.zeros(num_rows, num_heads, width)
    for start, end in pairwise(layout.cu_seqlens.numpy(force=True)):
        q, k, v = qkv_R3NH[start:end].float().unbind(1)
        scores = torch.einsum("qnh,knh->nqk", q, k) / width**0.5
        out_RNH[start:end] = torch.einsum("nqk,knh->qnh", scores.softmax(-1), v)
    return out_RNH.view(num_rows, num_heads * width).to(qkv_R3NH.dtype)
