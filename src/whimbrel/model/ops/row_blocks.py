"""Numbers of rows for which a product gives a row the same bits.

Theory of operation. A library chooses how to compute a product by its shape, and sums in another order have other bits: with
AMX, oneDNN gives a row of 1,536 columns other bits among 32 rows than among 64, and again others among 512. All are equally
exact, but a text must have the same vector alone and in a batch. So each product is tried when a model is loaded: for every
candidate size, with equal rows, whose results must be equal too, both within a block and between blocks of two sizes. Sizes
whose results are equal form a class. One class is chosen, and from then on every number of rows is run in blocks of its
sizes, of which the last may overlap the one before.

Which class is chosen follows from the classes alone, never from a timing, so that replicas and restarts agree. Nothing here
knows PyTorch or a processor: a product is a function.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Final, TypeAlias

Trial: TypeAlias = Callable[[int], Hashable | None]
"""Takes a number of rows, runs the product with so many equal rows, and returns a result that is equal for equal bits; None
where the rows of the result differ."""

ShapeTrial: TypeAlias = Callable[[tuple[int, int]], Hashable | None]
"""The same for a number of rows and of columns."""

MAX_BLOCK: Final = 512
"""The largest block: about as many rows as a batch of a CPU has. Larger ones would be no faster."""

FINE_SIZES: Final = (*range(16, 256, 16), *range(256, MAX_BLOCK + 1, 32))
"""The sizes that batches are rounded up to, and that a product is tried with. At least 16 rows keep a lone token off
matrix-vector kernels. Trying a product costs about as much as 5,000 rows of it do."""

COARSE_SIZES: Final = (16, 32, 64, 96, 128, 192, 256, 384, MAX_BLOCK)
"""For products so large that a trial takes long; about 1,700 rows."""

_BLOCK_COST: Final = 64
"""Rows that take as long as a call does besides its rows. Measured with AMX (768 to 3,072 columns, bfloat16), where it is
highest; a small block costs little elsewhere, but nothing is lost by large ones there."""
_COLUMNS_COST: Final = 32
"""The same for a block of columns, for which all rows are read once more."""


def round_up_rows(num_rows: int) -> int:
    """The number of rows that a batch of `num_rows` is filled up to: one of FINE_SIZES, or a multiple of 32 beyond them."""
    step = 16 if num_rows <= 256 else 32
    return -(-num_rows // step) * step


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Sizes of blocks that give a row the same bits, in ascending order; none if no such size was found."""

    sizes: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.sizes)

    def cover(self, num_rows: int, *, pad: bool = True) -> tuple[tuple[int, int], ...]:
        """The blocks that cover `num_rows` rows, as (first row, size), at the least cost.

        The last block overlaps the one before where the sizes do not add up. A single block may be larger than `num_rows`: then
        rows must be added. With `pad` False that happens only below the smallest size. Without sizes: one block of all rows.
        """
        if not self.sizes or num_rows == 0:
            return ((0, num_rows),)
        sizes = self.sizes if pad else tuple(size for size in self.sizes if size <= num_rows) or self.sizes[:1]
        return _cover(sizes, num_rows)


def find_row_blocks(candidates: Sequence[int], trial: Trial) -> RowBlocks:
    """Try a product with each of the `candidates`. Return the class of sizes that runs any number of rows at the least cost."""
    classes: dict[Hashable, list[int]] = {}
    for size in sorted(candidates):
        if (result := trial(size)) is not None:
            classes.setdefault(result, []).append(size)
    return min((RowBlocks(tuple(sizes)) for sizes in classes.values()), key=_total_cost, default=RowBlocks(()))


def find_shapes(candidates: Sequence[tuple[int, int]], trial: ShapeTrial) -> dict[int, RowBlocks]:
    """The same for a product whose columns are cut too: `candidates` are (rows, columns).

    Gives the numbers of rows by the number of columns, for those numbers of columns that agree with one another.
    """
    classes: dict[Hashable, dict[int, list[int]]] = {}
    for shape in sorted(candidates):
        if (result := trial(shape)) is not None:
            classes.setdefault(result, {}).setdefault(shape[1], []).append(shape[0])
    found = [{columns: RowBlocks(tuple(sizes)) for columns, sizes in each.items()} for each in classes.values()]
    wanted = {columns for _, columns in candidates}
    none: dict[int, RowBlocks] = {}
    return min(found, key=lambda each: _total_cost_of_shapes(each, wanted), default=none)


def _total_cost(blocks: RowBlocks) -> float:
    """The relative cost of all numbers of rows up to some thousand."""
    return sum(_cost(blocks.cover(num_rows)) / num_rows for num_rows in (*FINE_SIZES, 2 * MAX_BLOCK, 4 * MAX_BLOCK))


def _total_cost_of_shapes(rows: Mapping[int, RowBlocks], wanted: Iterable[int]) -> float:
    costs = {columns: _total_cost(blocks) * (columns + _COLUMNS_COST) for columns, blocks in rows.items()}
    return sum(min(-(-each // columns) * cost for columns, cost in costs.items()) / each for each in wanted)


def _cost(cover: tuple[tuple[int, int], ...]) -> int:
    return sum(size + _BLOCK_COST for _, size in cover)


@lru_cache(maxsize=4096)
def _cover(sizes: tuple[int, ...], num_rows: int) -> tuple[tuple[int, int], ...]:
    largest = sizes[-1]
    num_largest = max(0, num_rows - largest) // largest  # the rest, of one to two times the largest, is where choices are made
    chosen = [largest] * num_largest + list(_cheapest(sizes, num_rows - num_largest * largest))
    starts = accumulate(chosen[:-1], initial=0)
    return tuple((max(0, min(start, num_rows - size)), size) for start, size in zip(starts, chosen, strict=True))


@lru_cache(maxsize=4096)
def _cheapest(sizes: tuple[int, ...], num_rows: int) -> tuple[int, ...]:
    """The sizes, in descending order, that add up to `num_rows` or more at the least cost."""
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
