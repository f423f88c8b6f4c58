"""MaxSim on a GPU by Triton: one launch for all pairs of any requests, over flat token vectors.

Theory of operation: a program takes some tokens of one query and a stretch of one document. It reads the document's vectors in
blocks to their real end; similarities never leave the chip. Document tokens are the rows of its products. So half precision
runs on whole tiles of the tensor cores, also for queries of 32 tokens. Each lane of the program keeps the maxima of the rows
that it sees; they meet once, at the end. A second launch takes the maxima over stretches and the sum over tokens,
in a fixed order. Programs read lengths, offsets and counts, so the compiled code depends only on the dtypes, a few block
shapes, and the alignment of the vectors. Aligned ones are loaded 16 bytes at a time. Offsets are int64.

Products are those of the queries' dtype with sums in float32; float32 itself is multiplied exactly, without tensor cores.

Source of the scheme: flash-attention's tiling, as flash-maxsim (2605.29517) applies it to MaxSim.

Shapes: Q query tokens, T document tokens, P pairs, W programs, D width.
"""

# Triton's language has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportUntypedFunctionDecorator=false, reportMissingImports=false

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from whimbrel.model.ops.maxsim_programs import Programs
from whimbrel.model.ops.staging import put
from whimbrel.model.ops.token_vectors import TokenVectors

_BLOCK_T: Final = 64
_MAX_BLOCK_D: Final = 128
_MAX_BLOCK_D_FLOAT32: Final = 32
"""Columns of a slice: without tensor cores a program holds both sides of its products in registers."""


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


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
    queries = tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_D)
    q_rows = q_ptr + (q_start + queries)[None, :] * q_stride
    has_query = (queries < num_q)[None, :]
    q = tl.load(q_rows + columns[:, None], mask=has_query & (columns < width)[:, None], other=0.0)
    best = tl.full((BLOCK_T, BLOCK_Q), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK_T, BLOCK_Q), tl.int32)
    for begin in range(0, num_x, BLOCK_T):
        tokens = begin + tl.arange(0, BLOCK_T)
        has_token = (tokens < num_x)[:, None]
        x_rows = x_ptr + (x_start + tokens)[:, None] * x_stride
        similarities = tl.zeros((BLOCK_T, BLOCK_Q), tl.float32)
        for k in range(0, 1 if ONE_SLICE else width, BLOCK_D):
            at = k + columns
            has_column = at < width
            if not ONE_SLICE:
                q = tl.load(q_rows + at[:, None], mask=has_query & has_column[:, None], other=0.0)
            mask = has_token & has_column[None, :]
            if BITS:
                packed = tl.load(x_rows + (at // 8)[None, :], mask=mask, other=0)
                x = ((packed >> (7 - at % 8)[None, :]) & 1).to(tl.float32) * 2.0 - 1.0
            else:
                x = tl.load(x_rows + at[None, :], mask=mask, other=0)
            similarities = tl.dot(x.to(q.dtype), q, similarities, input_precision="ieee")
        similarities = tl.where(has_token, similarities, float("-inf"))
        if WHERE:
            where = tl.where(similarities > best, tokens.to(tl.int32)[:, None], where)
        best = _maximum(best, similarities)
    greatest = tl.reduce(best, 0, _maximum)
    out = tl.program_id(0).to(tl.int64) * BLOCK_Q + queries
    tl.store(best_ptr + out, greatest)
    if WHERE:
        first = tl.min(tl.where(best == greatest[None, :], where, 2147483647), axis=0)
        tl.store(where_ptr + out, first)


@triton.jit
def _sum_kernel(best_ptr, pairs_ptr, groups_ptr, sums_ptr, BLOCK_Q: tl.constexpr):
    group = groups_ptr + tl.program_id(0).to(tl.int64) * 4
    first, num_q, num_blocks, num_stretches = tl.load(group), tl.load(group + 1), tl.load(group + 2), tl.load(group + 3)
    rows = tl.arange(0, BLOCK_Q)
    total = 0.0
    for block in range(num_blocks):
        best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        for stretch in range(num_stretches):
            item = first + block * num_stretches + stretch
            best = _maximum(best, tl.load(best_ptr + item * BLOCK_Q + rows))
        total += tl.sum(tl.where(block * BLOCK_Q + rows < num_q, best, 0.0))  # pyright: ignore[reportOperatorIssue]
    tl.store(sums_ptr + tl.load(pairs_ptr + tl.program_id(0)), total)


def maxima(queries: TokenVectors, documents: TokenVectors, programs: Programs, *, where: bool) -> tuple[Tensor, Tensor]:
    """Return the greatest similarity of each query token of each program, (W, Q), and with `where` its first token, (W, Q).

    Tokens are counted in the program's stretch. Past a program's query tokens the numbers have no meaning.
    """
    x_TD, width, num_programs = documents.rows_TD, queries.width, len(programs.items_W4)
    q_TD = queries.rows_TD if queries.rows_TD.is_floating_point() else queries.floats(slice(None))
    if x_TD.is_floating_point():  # else its numbers are exact in any float
        q_TD = q_TD.to(torch.promote_types(q_TD.dtype, x_TD.dtype))
    best_WQ = torch.empty(num_programs, programs.block_q, dtype=torch.float32, device=x_TD.device)
    where_WQ = torch.empty(num_programs if where else 0, programs.block_q, dtype=torch.int32, device=x_TD.device)
    is_float32 = q_TD.dtype == torch.float32
    most, num_warps = (_MAX_BLOCK_D_FLOAT32, programs.block_q // 8) if is_float32 else (_MAX_BLOCK_D, 4)
    block_d = min(most, max(16, triton.next_power_of_2(width)))
    _maxima_kernel[(num_programs,)](
        q_TD, x_TD, put(programs.items_W4, x_TD.device), best_WQ, where_WQ, width, q_TD.stride(0), x_TD.stride(0),
        BLOCK_Q=programs.block_q, BLOCK_T=_BLOCK_T, BLOCK_D=block_d, ONE_SLICE=width <= block_d,
        BITS=x_TD.dtype == torch.uint8, WHERE=where, num_warps=num_warps, num_stages=3,
    )  # fmt: skip
    return best_WQ, where_WQ


def add_up(best_WQ: Tensor, programs: Programs, sums: Tensor) -> None:
    """Write the sum of each pair's maxima to its place in `sums`."""
    groups_P4, pairs_P = (put(each, best_WQ.device) for each in (programs.groups_P4, programs.pairs_P))
    _sum_kernel[(len(pairs_P),)](best_WQ, pairs_P, groups_P4, sums, BLOCK_Q=programs.block_q, num_warps=1)
