"""MaxSim on a GPU: one launch for all pairs of any requests, over flat token vectors.

Theory of operation: a program takes some tokens of one query and a stretch of one document. It reads the document's vectors in
blocks to their real end, and keeps the greatest similarity of each query token; similarities never leave the chip. A second
launch takes the maxima over stretches and the sum over tokens, in a fixed order. Documents are split into stretches if there
are too few pairs to fill the device. Programs read lengths, offsets and counts, so the compiled code depends only on the
dtypes, a few block shapes, and the alignment of the vectors. Aligned ones are loaded 16 bytes at a time. Offsets are int64.

Source of the scheme: flash-attention's tiling, as flash-maxsim (2605.29517) applies it to MaxSim.

Shapes: Q query tokens, T document tokens, P pairs, W programs, B blocks of query tokens, S stretches.
"""

# Triton's language has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportIndexIssue=false, reportCallIssue=false, reportUntypedFunctionDecorator=false, reportMissingImports=false

from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from whimbrel.model.ops.token_vectors import NO_MATCH, TokenVectors
from whimbrel.types.arrays import Float32Array, Int64Array, IntArray

_BLOCK_T: Final = 64
_MAX_BLOCK_D: Final = 128
_PROGRAMS: Final = 4 * 132
"""Number of programs that fill the device; with more, documents are not split."""
_MIN_STRETCH: Final = 512


@triton.jit
def _maxima_kernel(  # noqa: PLR0917
    q_ptr,
    x_ptr,
    items_ptr,
    best_ptr,
    where_ptr,
    width,
    q_stride,
    x_stride,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ONE_SLICE: tl.constexpr,
    BITS: tl.constexpr,
    WHERE: tl.constexpr,
):
    item = items_ptr + tl.program_id(0).to(tl.int64) * 4
    q_start, num_q = tl.load(item), tl.load(item + 1)
    x_start, num_x = tl.load(item + 2), tl.load(item + 3)
    rows = tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_D)
    q_rows = q_ptr + (q_start + rows)[:, None] * q_stride
    has_row = (rows < num_q)[:, None]
    q = tl.load(q_rows + columns[None, :], mask=has_row & (columns < width)[None, :], other=0.0)
    best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK_Q,), tl.int32)
    for begin in range(0, num_x, BLOCK_T):
        tokens = begin + tl.arange(0, BLOCK_T)
        has_token = tokens < num_x
        x_rows = (x_start + tokens) * x_stride
        similarities = tl.zeros((BLOCK_Q, BLOCK_T), tl.float32)
        for k in range(0, 1 if ONE_SLICE else width, BLOCK_D):
            at = k + columns
            has_column = at < width
            if not ONE_SLICE:
                q = tl.load(q_rows + at[None, :], mask=has_row & has_column[None, :], other=0.0)
            mask = has_column[:, None] & has_token[None, :]
            if BITS:
                packed = tl.load(x_ptr + x_rows[None, :] + (at // 8)[:, None], mask=mask, other=0)
                x = ((packed >> (7 - at % 8)[:, None]) & 1).to(tl.float32) * 2.0 - 1.0
            else:
                x = tl.load(x_ptr + x_rows[None, :] + at[:, None], mask=mask, other=0)
            similarities = tl.dot(q, x.to(q.dtype), similarities, input_precision="ieee")
        similarities = tl.where(has_token[None, :], similarities, float("-inf"))
        found = tl.max(similarities, axis=1)
        if WHERE:
            where = tl.where(found > best, (begin + tl.argmax(similarities, axis=1)).to(tl.int32), where)
        best = tl.maximum(best, found)
    out = tl.program_id(0).to(tl.int64) * BLOCK_Q + rows
    tl.store(best_ptr + out, best)
    if WHERE:
        tl.store(where_ptr + out, where)


@triton.jit
def _sum_kernel(best_ptr, groups_ptr, scores_ptr, BLOCK_Q: tl.constexpr):
    group = groups_ptr + tl.program_id(0).to(tl.int64) * 4
    first, num_q, num_blocks, num_stretches = tl.load(group), tl.load(group + 1), tl.load(group + 2), tl.load(group + 3)
    rows = tl.arange(0, BLOCK_Q)
    total = 0.0
    for block in range(num_blocks):
        best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        for stretch in range(num_stretches):
            item = first + block * num_stretches + stretch
            best = tl.maximum(best, tl.load(best_ptr + item * BLOCK_Q + rows))
        total += tl.sum(tl.where(block * BLOCK_Q + rows < num_q, best, 0.0))  # pyright: ignore[reportOperatorIssue]
    tl.store(scores_ptr + tl.program_id(0), total)


def maxsim_triton(queries: TokenVectors, documents: TokenVectors, query_P: IntArray, document_P: IntArray) -> Float32Array:
    """Return the sum of each pair, (P,) on the host; 0 if one side has no tokens. Runs on the device of the vectors."""
    scores_P = np.zeros(query_P.size, np.float32)
    pairs_P = _pairs_with_tokens(queries, documents, query_P, document_P)
    if not pairs_P.size:
        return scores_P
    query_P, document_P = query_P[pairs_P], document_P[pairs_P]
    best_WQ, _, _, groups_P4 = _maxima(queries, documents, query_P, document_P, where=False)
    scores = torch.empty(pairs_P.size, dtype=torch.float32, device=best_WQ.device)
    groups = torch.from_numpy(groups_P4).to(best_WQ.device, non_blocking=True)
    _sum_kernel[(pairs_P.size,)](best_WQ, groups, scores, BLOCK_Q=best_WQ.shape[1], num_warps=1)
    scores_P[pairs_P] = scores.cpu().numpy()
    return scores_P


def matches_triton(queries: TokenVectors, documents: TokenVectors, query_P: IntArray, document_P: IntArray) -> Float32Array:
    lengths_P = queries.lengths[query_P]
    matches_X2 = np.tile(np.array(NO_MATCH, np.float32), (int(lengths_P.sum()), 1))
    pairs_P = _pairs_with_tokens(queries, documents, query_P, document_P)
    if not pairs_P.size:
        return matches_X2
    ends_P = np.cumsum(lengths_P)[pairs_P]
    query_P, document_P = query_P[pairs_P], document_P[pairs_P]
    best, where, items_W4, groups_P4 = _maxima(queries, documents, query_P, document_P, where=True)
    best_WQ, where_WQ = best.cpu().numpy(), where.cpu().numpy()
    for (first, num_q, blocks, stretches), end, document in zip(
        groups_P4.tolist(), ends_P.tolist(), document_P.tolist(), strict=True
    ):
        programs = slice(first, first + blocks * stretches)
        before_SB = (items_W4[programs, 2] - documents.starts_N[document]).reshape(blocks, stretches)
        best_BSQ, where_BSQ = (each[programs].reshape(blocks, stretches, -1) for each in (best_WQ, where_WQ))
        chosen_B1Q = best_BSQ.argmax(axis=1, keepdims=True)
        token_BSQ = where_BSQ + before_SB[:, :, None]
        for column, each in enumerate((best_BSQ, token_BSQ)):
            matches_X2[end - num_q : end, column] = np.take_along_axis(each, chosen_B1Q, axis=1).reshape(-1)[:num_q]
    return matches_X2


def _pairs_with_tokens(queries: TokenVectors, documents: TokenVectors, query_P: IntArray, document_P: IntArray) -> Int64Array:
    return np.flatnonzero((queries.lengths[query_P] > 0) & (documents.lengths[document_P] > 0))


def _maxima(
    queries: TokenVectors, documents: TokenVectors, query_P: IntArray, document_P: IntArray, *, where: bool
) -> tuple[Tensor, Tensor, Int64Array, Int64Array]:
    """Return the greatest similarity of each query token of each program, (W, Q), and the programs and pairs of `_items`.

    With `where` also its position in the stretch, (W, Q). Queries have the documents' dtype in the product, if it is a float.
    """
    longest = int(queries.lengths[query_P].max())
    block_q = next((block for block in (16, 32, 64) if longest <= block), 128)
    items_W4, groups_P4 = _items(queries, documents, query_P, document_P, block_q)
    x_TD, width = documents.rows_TD, queries.width
    q_TD = queries.rows_TD if queries.rows_TD.is_floating_point() else queries.floats(slice(None))
    q_TD = q_TD.to(x_TD.dtype) if x_TD.is_floating_point() else q_TD
    best_WQ = torch.empty(len(items_W4), block_q, dtype=torch.float32, device=x_TD.device)
    where_WQ = torch.empty(len(items_W4) if where else 0, block_q, dtype=torch.int32, device=x_TD.device)
    items = torch.from_numpy(items_W4).to(x_TD.device, non_blocking=True)
    block_d = min(_MAX_BLOCK_D, max(16, triton.next_power_of_2(width)))
    _maxima_kernel[(len(items_W4),)](
        q_TD, x_TD, items, best_WQ, where_WQ, width, q_TD.stride(0), x_TD.stride(0),
        BLOCK_Q=block_q, BLOCK_T=_BLOCK_T, BLOCK_D=block_d, ONE_SLICE=width <= block_d,
        BITS=x_TD.dtype == torch.uint8, WHERE=where, num_warps=4, num_stages=3,
    )  # fmt: skip
    return best_WQ, where_WQ, items_W4, groups_P4


def _items(
    queries: TokenVectors, documents: TokenVectors, query_P: IntArray, document_P: IntArray, block_q: int
) -> tuple[Int64Array, Int64Array]:
    """Return the programs and the pairs.

    A program has first query token, count, first document token, count. A pair has first program, query tokens, blocks of query
    tokens, stretches of the document."""
    q_P, x_P = queries.lengths[query_P], documents.lengths[document_P]
    blocks_P = -(-q_P // block_q)
    num_stretches = max(1, -(-_PROGRAMS // int(blocks_P.sum())))
    stretch = max(_MIN_STRETCH, -(-int(x_P.max()) // num_stretches))
    stretches_P = -(-x_P // stretch)
    counts_P = blocks_P * stretches_P
    first_P = np.cumsum(counts_P) - counts_P
    pair_W = np.repeat(np.arange(query_P.size), counts_P)
    block_W, stretch_W = np.divmod(np.arange(pair_W.size) - first_P[pair_W], stretches_P[pair_W])
    block_W, stretch_W = block_W * block_q, stretch_W * stretch
    items = (
        queries.starts_N[query_P][pair_W] + block_W,
        np.minimum(q_P[pair_W] - block_W, block_q),
        documents.starts_N[document_P][pair_W] + stretch_W,
        np.minimum(x_P[pair_W] - stretch_W, stretch),
    )
    return np.stack(items, axis=1), np.stack((first_P, q_P, blocks_P, stretches_P), axis=1)
