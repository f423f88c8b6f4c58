"""Row blocks: numbers of rows for which a product gives a row the same bits.

Theory of operation: a library chooses how to compute a product by its shape, and another order of summation gives other bits.
With AMX, oneDNN gives a row of 1,536 columns three results among 32, 64 and 512 rows. But a text must have the same vector
alone and in a batch. So each product is tried when a model is loaded, with equal rows for every candidate size. Sizes with
equal results form a class. One class is chosen, and every number of rows then runs in blocks of its sizes.

The choice depends on the classes only, never on a timing, so replicas and restarts agree.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Final

from whimbrel.types.batch_memory import MAX_BLOCK

FINE_SIZES: Final = (*range(16, 256, 16), *range(256, MAX_BLOCK + 1, 32))
"""Sizes of batches and of trials. At least 16 rows keep a lone token off matrix-vector kernels."""

COARSE_SIZES: Final = (16, 32, 64, 96, 128, 192, 256, 384, MAX_BLOCK)
"""Sizes of trials of large products: a third of the cost."""

_BLOCK_COST: Final = 64
"""Overhead of a call, in rows. Measured with AMX (768 to 3,072 columns, bfloat16), where it is highest."""
_COLUMNS_COST: Final = 32
"""Overhead of a block of columns, in columns: all rows are read once more."""


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Sizes of blocks that give a row the same bits, ascending; empty if there are none."""

    sizes: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.sizes)

    def cover(self, num_rows: int, *, pad: bool = True) -> tuple[tuple[int, int], ...]:
        """Return the blocks that cover `num_rows` rows at the least cost, as (first row, size).

        The last block overlaps the one before if the sizes do not add up. A single block may exceed `num_rows`; without
        `pad`, only below the smallest size. Without sizes, one block has all rows.
        """
        if not self.sizes or num_rows == 0:
            return ((0, num_rows),)
        sizes = self.sizes if pad else tuple(size for size in self.sizes if size <= num_rows) or self.sizes[:1]
        largest = sizes[-1]
        num_largest = max(0, num_rows - largest) // largest  # the rest, one to two times the largest, has a choice
        chosen = [largest] * num_largest + list(_cheapest(sizes, num_rows - num_largest * largest))
        starts = accumulate(chosen[:-1], initial=0)
        return tuple((max(0, min(start, num_rows - size)), size) for start, size in zip(starts, chosen, strict=True))


def find_row_blocks(candidates: Sequence[int], trial: Callable[[int], Hashable | None]) -> RowBlocks:
    """Try a product with all candidate sizes. Return the class of sizes that runs any number of rows at the least cost.

    `trial` multiplies N equal rows. It returns a value that is equal for equal bits, or None if the rows of the result differ.
    """
    return find_shapes([(size, 1) for size in candidates], lambda shape: trial(shape[0])).get(1, RowBlocks(()))


def find_shapes(
    candidates: Sequence[tuple[int, int]], trial: Callable[[tuple[int, int]], Hashable | None]
) -> dict[int, RowBlocks]:
    """Try a product with (rows, columns). Return the row blocks by number of columns, for those whose bits agree."""
    classes: dict[Hashable, dict[int, list[int]]] = {}
    for shape in sorted(candidates):
        if (result := trial(shape)) is not None:
            classes.setdefault(result, {}).setdefault(shape[1], []).append(shape[0])
    options = [{columns: RowBlocks(tuple(sizes)) for columns, sizes in each.items()} for each in classes.values()]
    widths = {columns for _, columns in candidates}

    def cost_per_row(blocks: RowBlocks) -> float:
        counts = (*FINE_SIZES, 2 * MAX_BLOCK, 4 * MAX_BLOCK)
        return sum(sum(size + _BLOCK_COST for _, size in blocks.cover(num_rows)) / num_rows for num_rows in counts)

    def cost(rows: dict[int, RowBlocks]) -> float:
        costs = {columns: cost_per_row(blocks) * (columns + _COLUMNS_COST) for columns, blocks in rows.items()}
        return sum(min(-(-each // columns) * cost for columns, cost in costs.items()) / each for each in widths)

    return min(options, key=cost, default=dict[int, RowBlocks]())


@lru_cache(maxsize=4096)
def _cheapest(sizes: tuple[int, ...], num_rows: int) -> tuple[int, ...]:
    """Return the sizes, descending, that add up to `num_rows` or more at the least cost."""
    rests, ahead = {0}, [num_rows]
    while ahead:
        if (rest := ahead.pop()) not in rests:
            rests.add(rest)
            ahead += [max(0, rest - size) for size in sizes]
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for rest in sorted(rests)[1:]:
        before = [best[max(0, rest - size)] for size in sizes]
        best[rest] = min((cost + size + _BLOCK_COST, (size, *more)) for size, (cost, more) in zip(sizes, before, strict=True))
    return tuple(sorted(best[num_rows][1], reverse=True))
