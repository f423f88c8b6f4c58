"""Plain formulas of operations that `model/ops` computes fast.

Shapes: R rows, L tokens of a seq, Q queries, K keys or taps, N query heads, H head width, T tokens, D columns.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor

from whimbrel.model.ops.attention import AttentionLayout, ScoreOptions, join_keys
from whimbrel.model.ops.disentangled import PositionTables


def attend_reference(q_RNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, layout: AttentionLayout, scores: ScoreOptions) -> Tensor:
    """Compute attention by the plain formula, seq by seq in float32."""
    num_rows, num_heads, width = q_RNH.shape
    out_RNH = torch.zeros(num_rows, num_heads, width)
    offsets = layout.cu_seqlens.numpy(force=True)
    k_XKH, v_XKH, lengths = join_keys(k_RKH, v_RKH, layout, scores.layer)
    num_keys = lengths if layout.num_attended_B is None else cast(list[int], layout.num_attended_B.tolist())  # pyright: ignore[reportUnknownMemberType]
    starts = [0, *accumulate(lengths)]
    for seq, (start, end) in enumerate(pairwise(offsets)):
        q, before = q_RNH[start:end].float(), lengths[seq] - (end - start)
        k, v = (x[starts[seq] :][: num_keys[seq]].float() for x in (k_XKH, v_XKH))
        k, v = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k, v))
        if scores.tables is not None:
            out_RNH[start:end] = attend_disentangled_reference(q, k, v, scores.tables, scores.scale)
            continue
        scores_NQK = torch.einsum("qnh,knh->nqk", q, k) * scores.scale
        if scores.softcap is not None:
            scores_NQK = scores.softcap * torch.tanh(scores_NQK / scores.softcap)
        if scores.bias is not None:
            scores_NQK = scores_NQK + scores.bias(before, lengths[seq], num_keys[seq])
        for query in range(end - start):
            for key in range(num_keys[seq]):
                ahead = key - before - query
                too_far = scores.window is not None and abs(ahead) > scores.window
                if too_far or (scores.causal and ahead > 0):
                    scores_NQK[:, query, key] = -torch.inf
        out_RNH[start:end] = torch.einsum("nqk,knh->qnh", scores_NQK.softmax(-1), v)
    return out_RNH.view(num_rows, num_heads * width).to(v_RKH.dtype)


def attend_disentangled_reference(q_LNH: Tensor, k_LNH: Tensor, v_LNH: Tensor, tables: PositionTables, scale: float) -> Tensor:
    """Compute attention in one seq by the plain formula, with each pair's position written out."""
    length = q_LNH.shape[0]
    out_LNH = torch.empty_like(q_LNH)
    for query in range(length):
        distances = (query - torch.arange(length)).clamp(-tables.reach, tables.reach)
        row_K = tables.row_M[distances + tables.reach].long()
        scores_NK = torch.einsum("nh,knh->nk", q_LNH[query], k_LNH)
        if tables.keys_NPH is not None:
            scores_NK += torch.einsum("nh,nkh->nk", q_LNH[query], tables.keys_NPH[:, row_K])
        if tables.queries_NPH is not None:
            scores_NK += torch.einsum("knh,nkh->nk", k_LNH, tables.queries_NPH[:, row_K])
        out_LNH[query] = torch.einsum("nk,knh->nh", (scores_NK * scale).softmax(-1), v_LNH)
    return out_LNH


def short_conv_reference(x_TD: Tensor, taps_KD: Tensor, bias_D: Tensor | None, *, causal: bool) -> Tensor:
    """Compute the convolution of one seq by torch's own, with zeros around it."""
    width, length = taps_KD.shape[0], x_TD.shape[0]
    padding = width - 1 if causal else width // 2
    out_1DT = torch.conv1d(x_TD.T[None], taps_KD.T[:, None], bias_D, padding=padding, groups=x_TD.shape[1])
    return out_1DT[0, :, :length].T
