"""MaxSim on a device by PyTorch's products: the reference of the Triton kernels, and their substitute where Triton is no help.

Rows of programs are gathered and padded, so it moves several times the bytes. Steps of programs of similar lengths bound the
memory. Products are in float32, whatever the dtype of the vectors.

Shapes: Q query tokens, T document tokens, P pairs, W programs, N blocks of queries, D width.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from whimbrel.model.ops.maxsim_programs import Programs
from whimbrel.model.ops.staging import put
from whimbrel.model.ops.token_vectors import TokenVectors
from whimbrel.types.batch import offsets_of

_STEP: Final = 2**24
"""Limit of gathered elements in a step, which are 64 MiB in float32; a step has at least one program."""


def maxima(queries: TokenVectors, documents: TokenVectors, programs: Programs, *, where: bool) -> tuple[Tensor, Tensor]:
    """Return the same as the function of this name in `maxsim_triton.py`."""
    device, block_q = documents.rows_TD.device, programs.block_q
    best_WQ = torch.empty(len(programs.items_W4), block_q, dtype=torch.float32, device=device)
    where_WQ = torch.empty(len(programs.items_W4) if where else 0, block_q, dtype=torch.int32, device=device)
    order_W = np.argsort(programs.items_W4[:, 3], kind="stable")
    first = 0
    while first < order_W.size:
        step = order_W[first : first + _num_programs(programs, order_W[first:], documents.width)]
        items_W4, chosen = programs.items_W4[step], put(step, device)
        starts = put(items_W4, device)
        q_WQD, _ = _gather(queries, starts[:, 0], starts[:, 1], block_q)
        x_WTD, has_token_WT = _gather(documents, starts[:, 2], starts[:, 3], int(items_W4[:, 3].max()))
        similarities = torch.bmm(q_WQD, x_WTD.mT).masked_fill_(~has_token_WT[:, None], -torch.inf)
        best, token = similarities.max(dim=2)
        best_WQ.index_copy_(0, chosen, best)
        if where:
            where_WQ.index_copy_(0, chosen, token.int())
        first += step.size
    return best_WQ, where_WQ


def add_up(best_WQ: Tensor, programs: Programs, sums: Tensor) -> None:
    """Write the sum of each pair's maxima to its place in `sums`."""
    _, q_P, blocks_P, stretches_P = programs.groups_P4.T
    device, num_blocks = best_WQ.device, int(blocks_P.sum())
    block_W = np.repeat(np.arange(num_blocks), np.repeat(stretches_P, blocks_P))
    before_N = (np.arange(num_blocks) - np.repeat(offsets_of(blocks_P)[:-1], blocks_P)) * programs.block_q
    counts_N = np.minimum(np.repeat(q_P, blocks_P) - before_N, programs.block_q)
    best_NQ = torch.full((num_blocks, programs.block_q), -torch.inf, dtype=torch.float32, device=device)
    best_NQ.scatter_reduce_(0, put(block_W, device)[:, None].expand_as(best_WQ), best_WQ, "amax")
    is_padding_NQ = torch.arange(programs.block_q, device=device) >= put(counts_N, device)[:, None]
    sums_N = best_NQ.masked_fill_(is_padding_NQ, 0.0).sum(dim=1)
    sums_P = torch.segment_reduce(sums_N, "sum", offsets=put(offsets_of(blocks_P), device))
    sums.index_copy_(0, put(programs.pairs_P, device), sums_P)


def _num_programs(programs: Programs, order_W: np.ndarray, width: int) -> int:
    """Return how many of the programs, from the shortest on, fit into a step when all are as long as the longest."""
    most = order_W[: _STEP // (width * programs.block_q) + 1]
    elements_W = np.arange(1, most.size + 1) * (programs.block_q + programs.items_W4[most, 3]) * width
    return max(1, int(np.searchsorted(elements_W, _STEP, "right")))


def _gather(vectors: TokenVectors, starts_W: Tensor, counts_W: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return rows of each program, (W, longest, D), and which of them are its own, (W, longest)."""
    index_L = torch.arange(longest, device=starts_W.device)
    is_own_WL = index_L < counts_W[:, None]
    rows_WL = starts_W[:, None] + torch.minimum(index_L, counts_W[:, None] - 1)
    return vectors.floats(rows_WL), is_own_WL
