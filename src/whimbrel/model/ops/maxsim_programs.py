"""Programs of MaxSim on a device: which rows of queries and documents each of them compares, and the pairs that they add up to.

A program compares a block of one query's tokens with a stretch of one document. A document is split into stretches only where
there are too few pairs to fill a GPU, which changes no bit, as a maximum is exact. The size of a block depends on nothing but
its query: so a score, which adds up blocks, does not depend on the pairs beside it.

Shapes: P pairs, W programs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from whimbrel.model.ops.token_vectors import TokenVectors
from whimbrel.types.arrays import Int64Array, IntArray

_SHORT: Final = 32
_LONG: Final = 64
"""Query tokens of a block, for queries of up to 32 tokens and for all others."""
_PROGRAMS: Final = 4 * 132
"""Number of programs that fill the device; with more, documents are not split."""
_MIN_STRETCH: Final = 512


@dataclass(frozen=True, slots=True, eq=False)
class Programs:
    """The programs of all pairs whose queries have blocks of one size."""

    block_q: int
    pairs_P: Int64Array
    """The numbers of the pairs."""
    items_W4: Int64Array
    """First query token, their count, first document token and their count of each program."""
    groups_P4: Int64Array
    """First program, query tokens, blocks of them and stretches of the document of each pair. Its programs follow one another,
    block by block."""


def plan_programs(
    queries: TokenVectors, documents: TokenVectors, query_P: IntArray, document_P: IntArray, *, max_stretch: int | None = None
) -> Iterator[Programs]:
    """Yield the programs of the pairs that have tokens on both sides, for each size of a block.

    `max_stretch` limits the document tokens of a program.
    """
    q_P, x_P = queries.lengths[query_P], documents.lengths[document_P]
    q_start_P, x_start_P = queries.starts_N[query_P], documents.starts_N[document_P]
    has_tokens_P = (q_P > 0) & (x_P > 0)
    for block_q, mask_P in ((_SHORT, q_P <= _SHORT), (_LONG, q_P > _SHORT)):
        pairs_P = np.flatnonzero(has_tokens_P & mask_P)
        if pairs_P.size:
            pairs_P4 = np.stack([each[pairs_P] for each in (q_start_P, q_P, x_start_P, x_P)], axis=1)
            items_W4, groups_P4 = _split(pairs_P4, block_q, max_stretch)
            yield Programs(block_q, pairs_P, items_W4, groups_P4)


def _split(pairs_P4: Int64Array, block_q: int, max_stretch: int | None) -> tuple[Int64Array, Int64Array]:
    """Return the programs and groups of pairs of first query token, their count, first document token and their count."""
    q_start_P, q_P, x_start_P, x_P = (pairs_P4[:, column] for column in range(4))
    blocks_P = -(-q_P // block_q)
    num_stretches = max(1, -(-_PROGRAMS // int(blocks_P.sum())))
    stretch = max(_MIN_STRETCH, -(-int(x_P.max()) // num_stretches))
    stretch = stretch if max_stretch is None else min(stretch, max_stretch)
    stretches_P = -(-x_P // stretch)
    counts_P = blocks_P * stretches_P
    first_P = np.cumsum(counts_P) - counts_P
    pair_W = np.repeat(np.arange(q_P.size), counts_P)
    block_W, stretch_W = np.divmod(np.arange(pair_W.size) - first_P[pair_W], stretches_P[pair_W])
    block_W, stretch_W = block_W * block_q, stretch_W * stretch
    items = (
        q_start_P[pair_W] + block_W,
        np.minimum(q_P[pair_W] - block_W, block_q),
        x_start_P[pair_W] + stretch_W,
        np.minimum(x_P[pair_W] - stretch_W, stretch),
    )
    return np.stack(items, axis=1), np.stack((first_P, q_P, blocks_P, stretches_P), axis=1)
