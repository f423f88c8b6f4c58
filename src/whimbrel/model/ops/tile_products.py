"""Tile products of MaxSim on a CPU: document tokens times query tokens, in shapes that give a similarity the same bits.

Four ways are tried: numpy, whose OpenBLAS has kernels for small products on some processors; our own kernels; oneDNN; and
torch.mm, whose bits may depend on addresses on Intel's processors. The first that has shapes whose bits agree
(`row_blocks.py`) is used: a token may be anywhere in a product of any shape.

Shapes: T document tokens, Q query tokens, D width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from whimbrel.model.cpu import has_small_kernels
from whimbrel.model.fallback.prepacked import packed_linear, prepacked_supported
from whimbrel.model.fallback.row_blocks import RowBlocks, find_shapes
from whimbrel.model.fallback.trials import Finding, begin, cancelling
from whimbrel.model.kernels import library as kernels_library
from whimbrel.model.kernels.products import PackedLinear

Library: TypeAlias = Literal["numpy", "whimbrel", "onednn", "torch"]

_CPU: Final = torch.device("cpu")
_STEP: Final = 16
"""Step of both sides. Smaller products use matrix-vector kernels, or waste registers."""
_MAX_QUERY_TOKENS: Final = 64
"""Limit of query tokens in a product: the similarities stay in the cache together with the tile."""
_MAX_DOCUMENT_TOKENS: Final = 4096
_MAX_NUMBERS: Final = 2**19
"""Limit of elements of the document tokens in a product: 2 MiB, which stay in the cache of a core."""
_SMALL: Final = 10**6
"""Limit of multiplications of OpenBLAS's small products."""
_SIZES: Final = (16, 32, 64, 128, 256, 512, 1024, 2048)
_TRIALS: Final = 4


@dataclass(frozen=True, slots=True)
class TileProducts:
    """Shapes of products in which a similarity has the same bits."""

    rows: Mapping[int, RowBlocks]
    """Numbers of document tokens by the number of query tokens; without sizes if none were found."""
    library: Library = "torch"

    def __bool__(self) -> bool:
        return all(self.rows.values())

    def least(self, num_columns: int) -> int:
        return min(self.rows[num_columns].sizes, default=_STEP)

    def num_columns(self, num_tokens: int) -> int:
        """Return the number of query tokens in a block: the narrowest of those with the fewest blocks."""
        return min(self.rows, key=lambda columns: (-(-num_tokens // columns), columns))

    def multiply(self, x_TD: Tensor, query_DQ: Tensor, out_TQ: Tensor) -> None:
        """Compute out = x @ query for `least` rows or more. Float32, contiguous."""
        for start, size, count in _stacks(self.rows[query_DQ.shape[1]], len(x_TD)):
            rows = slice(start, start + size * count)
            MULTIPLY[self.library](x_TD[rows], query_DQ, out_TQ[rows], size)


def find_tile_products(width: int) -> Finding[TileProducts]:
    """Begin the search for products of vectors with this width."""
    suits = {
        "numpy": has_small_kernels() and _SMALL // (width * _STEP) >= _STEP,
        "whimbrel": kernels_library.kernels() is not None,
        "onednn": prepacked_supported(_CPU),
    }
    return begin(_Kind(width, tuple(library for library in MULTIPLY if suits.get(library, True))))


@dataclass(frozen=True, slots=True)
class _Kind:
    width: int
    libraries: tuple[Library, ...]

    def __str__(self) -> str:
        return f"MaxSim's product of vectors of {self.width:,} columns"

    def find(self) -> TileProducts:
        columns = range(_STEP, min(_MAX_QUERY_TOKENS, max(_STEP, _SMALL // (self.width * _STEP))) + 1, _STEP)
        for library in self.libraries:
            shapes = [(size, count) for count in columns for size in self._sizes(library, count)]
            if rows := find_shapes(shapes, partial(self._try, library)):
                return TileProducts(rows, library)
        return TileProducts(dict.fromkeys(columns, RowBlocks(())))

    def _sizes(self, library: Library, num_columns: int) -> list[int]:
        largest = min(_MAX_DOCUMENT_TOKENS, max(_STEP, _MAX_NUMBERS // self.width // _STEP * _STEP))
        if library == "numpy":
            largest = min(largest, max(_STEP, _SMALL // (self.width * num_columns) // _STEP * _STEP))
        return [*(size for size in _SIZES if size < largest), largest]

    def _try(self, library: Library, shape: tuple[int, int]) -> bytes | None:
        size, num_columns = shape
        product = TileProducts({num_columns: RowBlocks((size,))}, library)
        rows_ND, queries_QD = cancelling(_TRIALS, _STEP, self.width)
        out_TQ = torch.empty(size, num_columns, dtype=torch.float32)
        results: list[bytes] = []
        for row_D in rows_ND:
            product.multiply(row_D.repeat(size, 1), queries_QD[:1].repeat(num_columns, 1).T.contiguous(), out_TQ)
            if not (out_TQ == out_TQ[0, 0]).all():  # at any position of a token
                return None
            results.append(out_TQ[0, :1].numpy().tobytes())
        product.multiply(rows_ND[:1].repeat(size, 1), queries_QD.repeat(num_columns // _STEP, 1).T.contiguous(), out_TQ)
        if not (out_TQ.view(size, -1, _STEP) == out_TQ[0, :_STEP]).all():
            return None
        return b"".join([*results, out_TQ[0, :_STEP].numpy().tobytes()])


@lru_cache(maxsize=4096)
def _stacks(blocks: RowBlocks, num_rows: int) -> list[tuple[int, int, int]]:
    stacks: list[tuple[int, int, int]] = []
    for start, size in blocks.cover(num_rows, pad=False):
        first, last_size, count = stacks[-1] if stacks else (0, 0, 0)
        if size == last_size and start == first + size * count:
            stacks[-1] = (first, size, count + 1)
        else:
            stacks.append((start, size, 1))
    return stacks


def _multiply_stack(x_TD: Tensor, query_DQ: Tensor, out_TQ: Tensor, size: int) -> None:
    x, out = x_TD.numpy(), out_TQ.numpy()
    np.matmul(x.reshape(-1, size, x.shape[1]), query_DQ.numpy(), out=out.reshape(-1, size, out.shape[1]))


def _multiply_own(x_TD: Tensor, query_DQ: Tensor, out_TQ: Tensor, _: int) -> None:
    own = kernels_library.kernels()  # any number of rows has the same bits
    assert own is not None
    out_TQ.copy_(PackedLinear(own, "float32", query_DQ.T, None, "identity")(x_TD, torch.float32))


def _multiply_each(x_TD: Tensor, query_DQ: Tensor, out_TQ: Tensor, size: int) -> None:
    for start in range(0, len(x_TD), size):
        rows = slice(start, start + size)
        torch.mm(x_TD[rows], query_DQ, out=out_TQ[rows])


def _multiply_prepacked(x_TD: Tensor, query_DQ: Tensor, out_TQ: Tensor, size: int) -> None:
    product = packed_linear(query_DQ.T.contiguous(), num_rows=size)
    for start in range(0, len(x_TD), size):
        rows = slice(start, start + size)
        out_TQ[rows] = product(x_TD[rows])


MULTIPLY: Final[dict[Library, Callable[[Tensor, Tensor, Tensor, int], None]]] = {
    "numpy": _multiply_stack,
    "whimbrel": _multiply_own,
    "onednn": _multiply_prepacked,
    "torch": _multiply_each,
}
"""Products by library, the fastest first."""
