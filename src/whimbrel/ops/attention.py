"""Bidirectional attention over a ragged batch: one signature, the implementation chosen by device and dtype.

- CPU, and float32 anywhere: SDPA over runs of equal length, in float32. In bfloat16 SDPA is slower on CPUs below AMX.
- CPU in bfloat16, seqs of 97 to 511 tokens: two matrix products and a softmax, which beat SDPA there by a sixth.
- GPU in half precision: torch's variable-length flash attention.

`attend_reference` is the plain formula that both are tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

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


_PRODUCT_LENGTHS: Final = range(97, 512)


def attend(qkv_R3NH: Tensor, layout: Layout) -> Tensor:
    """softmax(q k' / sqrt(H)) v within each seq -> (R, N * H) in the dtype of qkv. Rows beyond the tokens are 0."""
    if qkv_R3NH.is_cuda and qkv_R3NH.dtype != torch.float32:
        return _attend_varlen(qkv_R3NH, layout)
    return _attend_runs(qkv_R3NH, layout)


def _attend_runs(qkv_R3NH: Tensor, layout: Layout) -> Tensor:
    num_rows, _, num_heads, width = qkv_R3NH.shape
    out_RNH = qkv_R3NH.new_empty(num_rows, num_heads, width)
    out_RNH[layout.num_tokens :] = 0
    products = qkv_R3NH.dtype == torch.bfloat16 and not qkv_R3NH.is_cuda
    for start, count, length in layout.runs:
        rows = slice(start, start + count * length)
        qkv_BL3NH = qkv_R3NH[rows].view(count, length, 3, num_heads, width)
        out_BLNH = out_RNH[rows].view(count, length, num_heads, width)
        if products and length in _PRODUCT_LENGTHS:
            for qkv_L3NH, out_LNH in zip(qkv_BL3NH, out_BLNH, strict=True):
                out_LNH.copy_(_products(qkv_L3NH))
        else:
            out_BLNH.copy_(_sdpa(qkv_BL3NH))
    return out_RNH.view(num_rows, num_heads * width)


def _sdpa(qkv_BL3NH: Tensor) -> Tensor:
    """Seqs of equal length, in float32 -> (B, L, N, H).

    Heads of a width that is no multiple of 4 are filled up with zeros: SDPA's bits would depend on the place in the batch.
    """
    width = qkv_BL3NH.shape[-1]
    q, k, v = F.pad(qkv_BL3NH.float(), (0, -width % 4)).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v, scale=width**-0.5)[..., :width].transpose(1, 2)


def _products(qkv_L3NH: Tensor) -> Tensor:
    """One seq by softmax(q k') v -> (L, N, H). The length is rounded up to 16, since oneDNN makes a primitive per shape."""
    length, _, num_heads, width = qkv_L3NH.shape
    rounded = length + -length % 16
    qkv_3NRH = qkv_L3NH.new_empty(3, num_heads, rounded, width)
    qkv_3NRH[:, :, :length] = qkv_L3NH.permute(1, 2, 0, 3)
    qkv_3NRH[:, :, length:] = 0
    q, k, v = qkv_3NRH.unbind(0)
    scores_NRR = torch.baddbmm(q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=width**-0.5)
    scores_NRR[:, :, length:] = -torch.inf
    return torch.bmm(scores_NRR.softmax(-1), v)[:, :length].transpose(0, 1)


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
