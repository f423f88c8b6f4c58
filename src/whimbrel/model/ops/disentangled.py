"""Disentangled attention (DeBERTa): contents meet relative positions, besides each other.

The score of a query and a key is query . key + query . position of the key + key . position of the query. A position is a row
of a table, which the distance from query to key chooses: the same row for both. A layer's tables are linear functions of one
table of the model, so they are computed once, when it is loaded. Source: arXiv:2006.03654 and
transformers/models/deberta_v2/modeling_deberta_v2.py (5.23).

Here are the tables, which our own kernel reads (`native/positions.h`), and the formula in PyTorch's operators. On a CPU that
runs seq by seq, as the bits of a product of several seqs depend on their number.

Shapes: B seqs, L tokens of a seq, K keys, Q queries, N heads, H head width, P rows of a table, M distances.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from whimbrel.model.kernels.structs import Positions, address
from whimbrel.types.batch_memory import MAX_MASK_ELEMENTS, QUERIES_AT_A_TIME
from whimbrel.types.card import Disentangled


@dataclass(frozen=True, eq=False)
class PositionTables:
    """Positions of keys and of queries in one layer, in float32. A table that is None has no scores."""

    keys_NPH: Tensor | None
    queries_NPH: Tensor | None
    row_M: Tensor
    """Row of each distance, query - key, in order; the middle one is 0. int32, on the device."""

    @property
    def num_rows(self) -> int:
        return next((each.shape[1] for each in (self.keys_NPH, self.queries_NPH) if each is not None), 0)

    @property
    def reach(self) -> int:
        """The largest distance with a row of its own; those beyond have its row."""
        return self.row_M.shape[0] // 2

    @cached_property
    def _structure(self) -> Positions:
        return Positions(address(self.keys_NPH), address(self.queries_NPH), self.num_rows, self.row_M.data_ptr(), self.reach)

    @property
    def address(self) -> int:
        """Address of the tables for our own kernels, as long as this object lives."""
        return ctypes.addressof(self._structure)


def row_of_distances(spec: Disentangled, max_length: int) -> Tensor:
    """Return the row of each distance from 1 - max_length to max_length - 1: one for each, or logarithmic ones beyond half.

    The steps are transformers', in its order and precision, as a distance may lie on the bound of two rows.
    """
    distances = torch.arange(1 - max_length, max_length)
    if spec.num_buckets:
        half = spec.num_buckets // 2
        far = torch.where(distances.abs() < half, half - 1, distances.abs())
        steps = torch.log(far / half) / torch.log(torch.tensor((spec.max_distance - 1) / half)) * (half - 1)
        distances = torch.where(far <= half, distances, ((steps.ceil() + half) * distances.sign()).long())
    return (distances + spec.span).clamp(0, 2 * spec.span - 1).int()


def attend_disentangled(q_BLNH: Tensor, k_BKNH: Tensor, v_BKNH: Tensor, tables: PositionTables, *, scale: float) -> Tensor:
    """Return softmax(scores) v of seqs of one length in float32, (B, L, N, H). The K keys are those of the first tokens."""
    num_seqs, length, num_heads, _ = q_BLNH.shape
    used = _used_rows(tables, length)
    step = 1
    if q_BLNH.is_cuda:
        step = max(1, MAX_MASK_ELEMENTS // (num_heads * length * (used.stop - used.start + QUERIES_AT_A_TIME)))
    out_BLNH = torch.empty_like(q_BLNH)
    for start in range(0, num_seqs, step):
        seqs = slice(start, start + step)
        q, k, v = (x[seqs].transpose(1, 2).contiguous() for x in (q_BLNH, k_BKNH, v_BKNH))
        weights = (weights @ v for weights in _weights(q, k, tables, used=used, scale=scale))
        out_BLNH[seqs] = torch.cat(list(weights), dim=2).transpose(1, 2)
    return out_BLNH


def _weights(q_BNLH: Tensor, k_BNKH: Tensor, tables: PositionTables, *, used: slice, scale: float) -> Iterator[Tensor]:
    """Yield the softmax of the scores of some queries at a time, (B, N, Q, K)."""
    length, num_keys = q_BNLH.shape[2], k_BNKH.shape[2]
    keys_K, queries_L = (torch.arange(count, device=q_BNLH.device) for count in (num_keys, length))
    of_keys_BNKP = None if tables.queries_NPH is None else k_BNKH @ tables.queries_NPH[:, used].transpose(1, 2)
    for start in range(0, length, QUERIES_AT_A_TIME):
        some = slice(start, start + QUERIES_AT_A_TIME)
        distances_QK = (queries_L[some, None] - keys_K).clamp(-tables.reach, tables.reach)
        q_BNQH, row_QK = q_BNLH[:, :, some], (tables.row_M[distances_QK + tables.reach] - used.start).long()
        scores_BNQK = q_BNQH @ k_BNKH.transpose(2, 3)
        shape = scores_BNQK.shape
        if tables.keys_NPH is not None:
            of_queries_BNQP = q_BNQH @ tables.keys_NPH[:, used].transpose(1, 2)
            scores_BNQK += of_queries_BNQP.gather(3, row_QK.expand(shape))
        if of_keys_BNKP is not None:
            row_KQ = row_QK.T.expand(*shape[:2], num_keys, shape[2])
            scores_BNQK += of_keys_BNKP.gather(3, row_KQ).transpose(2, 3)
        yield (scores_BNQK * scale).softmax(-1)


def _used_rows(tables: PositionTables, length: int) -> slice:
    """Return the rows that seqs of this length have. On a GPU, where to look would mean to wait, all rows."""
    if tables.row_M.is_cuda:
        return slice(0, tables.num_rows)
    farthest = min(length - 1, tables.reach)
    return slice(int(tables.row_M[tables.reach - farthest]), int(tables.row_M[tables.reach + farthest]) + 1)
