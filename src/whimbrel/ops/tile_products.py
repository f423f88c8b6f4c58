"""Products of document tokens with query tokens on a CPU, in shapes that give a similarity the same bits.

Two libraries are at hand: numpy, whose OpenBLAS has kernels for small products on some processors, and PyTorch. Which one is
taken follows from the processor; in which shapes it is asked is found out for each width of vectors, as for linear layers
(row_blocks.py), but for both sides: a query token meets a document token anywhere in a product of any of these shapes.

Shapes: T document tokens, Q query tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from whimbrel.ops.cpu import has_small_kernels
from whimbrel.ops.row_blocks import RowBlocks, find_shapes
from whimbrel.ops.trials import Finding, begin, cancelling

_STEP: Final = 16
"""The step of both sides. Smaller products are of a matrix and a vector, or waste registers."""
_MAX_QUERY_TOKENS: Final = 64
"""The most query tokens that meet a tile at a time: their similarities stay in the cache with it."""
_MAX_DOCUMENT_TOKENS: Final = 4096
_MAX_NUMBERS: Final = 2**19
"""The most numbers in the document tokens of a product: two megabytes, which stay in the cache of a core."""
_SMALL: Final = 10**6
"""The most multiplications of a product that is small to OpenBLAS."""
_SIZES: Final = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Document tokens of a product that are tried, besides as many as a product has at most."""
_TRIALS: Final = 4


@dataclass(frozen=True, slots=True)
class TileProducts:
    """Shapes in which a similarity has the same bits."""

    rows: Mapping[int, RowBlocks]
    """By the number of query tokens: numbers of document tokens. Without any where no such shapes were found."""
    small: bool
    """Whether numpy computes them, in a stack, or PyTorch, one by one."""

    def __bool__(self) -> bool:
        return all(self.rows.values())

    def least(self, num_columns: int) -> int:
        """The least number of document tokens that a product may have."""
        return min(self.rows[num_columns].sizes, default=_STEP)

    def num_columns(self, num_tokens: int) -> int:
        """The number of query tokens in a block: for the fewest blocks, and among those the narrowest."""
        return min(self.rows, key=lambda columns: (-(-num_tokens // columns), columns))

    def multiply(self, x_TD: Tensor, query_DQ: Tensor, out_TQ: Tensor) -> None:
        """out = x @ query, for `least` rows or more and query tokens as `rows` has them. All float32 and contiguous."""
        for start, size, count in _stacks(self.rows[query_DQ.shape[1]], len(x_TD)):
            rows = slice(start, start + size * count)
            multiply = _multiply_stack if self.small else _multiply_each
            multiply(x_TD[rows], query_DQ, out_TQ[rows], size)


def find_tile_products(width: int) -> Finding[TileProducts]:
    """The products for vectors of this width."""
    return begin(_Kind(width, has_small_kernels() and _SMALL // (width * _STEP) >= _STEP))


@dataclass(frozen=True, slots=True)
class _Kind:
    """The product of a tile with query tokens, by the width of the vectors; `small`: rather by numpy."""

    width: int
    small: bool

    def __str__(self) -> str:
        return f"MaxSim's product of vectors of {self.width:,} columns"

    def find(self) -> TileProducts:
        """Try numbers of document tokens and of query tokens."""
        columns = range(_STEP, min(_MAX_QUERY_TOKENS, max(_STEP, _SMALL // (self.width * _STEP))) + 1, _STEP)
        shapes = [(size, count) for count in columns for size in self._sizes(count)]
        if rows := find_shapes(shapes, self._try):
            return TileProducts(rows, self.small)
        return _Kind(self.width, False).find() if self.small else TileProducts(dict.fromkeys(columns, RowBlocks(())), False)

    def _sizes(self, num_columns: int) -> list[int]:
        largest = min(_MAX_DOCUMENT_TOKENS, max(_STEP, _MAX_NUMBERS // self.width // _STEP * _STEP))
        if self.small:
            largest = min(largest, max(_STEP, _SMALL // (self.width * num_columns) // _STEP * _STEP))
        return [*(size for size in _SIZES if size < largest), largest]

    def _try(self, shape: tuple[int, int]) -> bytes | None:
        size, num_columns = shape
        product = TileProducts({num_columns: RowBlocks((size,))}, self.small)
        rows_ND, queries_QD = cancelling(_TRIALS, _STEP, self.width)
        out_TQ = torch.empty(size, num_columns, dtype=torch.float32)
        found: list[bytes] = []
        for row_D in rows_ND:
            product.multiply(row_D.repeat(size, 1), queries_QD[:1].repeat(num_columns, 1).T.contiguous(), out_TQ)
            if not (out_TQ == out_TQ[0, 0]).all():  # wherever a token lies
                return None
            found.append(out_TQ[0, :1].numpy().tobytes())
        product.multiply(rows_ND[:1].repeat(size, 1), queries_QD.repeat(num_columns // _STEP, 1).T.contiguous(), out_TQ)
        if not (out_TQ.view(size, -1, _STEP) == out_TQ[0, :_STEP]).all():
            return None
        return b"".join([*found, out_TQ[0, :_STEP].numpy().tobytes()])


@lru_cache(maxsize=4096)
def _stacks(blocks: RowBlocks, num_rows: int) -> list[tuple[int, int, int]]:
    """(first row, size, count) of neighbouring blocks of equal size that cover some rows without overlapping."""
    stacks: list[tuple[int, int, int]] = []
    for start, size in blocks.cover(num_rows, pad=False):
        first, last_size, count = stacks[-1] if stacks else (0, 0, 0)
        if size == last_size and start == first + size * count:
            stacks[-1] = (first, size, count + 1)
        else:
            stacks.append((start, size, 1))
    return stacks


def _multiply_stack(x_TD: Tensor, query_DQ: Tensor, out_TQ: Tensor, size: int) -> None:
    """out = x @ query, `size` rows at a time, by numpy."""
    x, out = x_TD.numpy(), out_TQ.numpy()
    np.matmul(x.reshape(-1, size, x.shape[1]), query_DQ.numpy(), out=out.reshape(-1, size, out.shape[1]))


def _multiply_each(x_TD: Tensor, query_DQ: Tensor, out_TQ: Tensor, size: int) -> None:
    """The same by PyTorch."""
    for start in range(0, len(x_TD), size):
        rows = slice(start, start + size)
        torch.mm(x_TD[rows], query_DQ, out=out_TQ[rows])
