"""Row blocks of artificial products whose bits depend on their rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whimbrel.model.fallback.row_blocks import COARSE_SIZES, FINE_SIZES, MAX_BLOCK, RowBlocks, find_row_blocks, find_shapes

SIZES = st.sets(st.integers(1, 40).map(lambda n: 16 * n), min_size=1).map(lambda sizes: tuple(sorted(sizes)))

PRODUCTS: dict[str, tuple[Callable[[int], Hashable | None], tuple[int, ...]]] = {
    "all agree": (lambda _: 0, FINE_SIZES),
    "AMX, 1,536 to 384 columns": (
        lambda rows: 0 if rows in (16, 32, 384) else 1 if rows < 384 else rows,
        tuple(size for size in FINE_SIZES if 32 < size < 384),
    ),
    "AMX, 768 to 768 columns": (lambda rows: rows <= 32, tuple(size for size in FINE_SIZES if size > 32)),
    "by the remainder of 64": (lambda rows: rows % 64, tuple(range(32, MAX_BLOCK, 64))),
    "only small ones": (lambda rows: 0 if rows <= 64 else rows, (16, 32, 48, 64)),
    "each its own": (lambda rows: rows, (96,)),
    "rows of a block differ from 48 on": (lambda rows: 0 if rows <= 32 else None, (16, 32)),
    "none": (lambda _: None, ()),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_one_class_of_sizes_is_chosen(product: str) -> None:
    trial, expected = PRODUCTS[product]
    found = find_row_blocks(FINE_SIZES, trial)
    assert found.sizes == expected
    assert bool(found) == bool(expected)
    assert find_row_blocks(FINE_SIZES[::-1], trial) == found


@given(st.dictionaries(st.sampled_from(COARSE_SIZES), st.none() | st.integers(0, 3)))
def test_only_sizes_that_agree_are_ever_run(results: dict[int, int | None]) -> None:
    blocks = find_row_blocks(tuple(results), results.__getitem__)
    assert bool(blocks) == any(result is not None for result in results.values())
    for num_rows in (1, 16, 100, 513, 2048) if blocks else ():
        ran = {results[size] for _, size in blocks.cover(num_rows)}
        assert len(ran) == 1
        assert None not in ran


@given(SIZES, st.integers(1, 5000), st.booleans())
def test_blocks_cover_every_row_and_nothing_beyond(sizes: tuple[int, ...], num_rows: int, pad: bool) -> None:
    blocks = RowBlocks(sizes).cover(num_rows, pad=pad)
    covered = 0
    for start, size in blocks:
        assert size in sizes
        assert 0 <= start <= covered
        covered = max(covered, start + size)
    assert covered == num_rows or (len(blocks) == 1 and covered > num_rows)
    if not pad and covered > num_rows:
        assert sizes[0] > num_rows


def test_a_size_that_agrees_is_one_block() -> None:
    for size in FINE_SIZES:
        assert RowBlocks(FINE_SIZES).cover(size) == ((0, size),)
    assert RowBlocks((48, 64, 256)).cover(16) == ((0, 48),)
    assert RowBlocks((48, 64, 256)).cover(512) == ((0, 256), (256, 256))
    assert RowBlocks((48, 64, 256)).cover(480) == ((0, 256), (224, 256))
    assert RowBlocks((512,)).cover(20) == ((0, 512),)
    assert RowBlocks((512,)).cover(20, pad=False) == ((0, 512),)
    assert RowBlocks((16, 512)).cover(48, pad=False) == ((0, 16), (16, 16), (32, 16))
    assert RowBlocks(()).cover(77) == ((0, 77),)
    assert RowBlocks((16,)).cover(0) == ((0, 0),)


def test_a_million_rows_are_covered_by_the_largest_blocks() -> None:
    blocks = RowBlocks(FINE_SIZES).cover(2**20 + 16)
    assert len(blocks) == 2049
    assert {size for _, size in blocks[:-1]} <= {512, 480}


def test_shapes_agree_in_both_directions() -> None:
    shapes = [(rows, columns) for columns in (16, 32, 48, 64) for rows in (16, 64, 256)]
    assert find_shapes(shapes, lambda _: 0) == {columns: RowBlocks((16, 64, 256)) for columns in (16, 32, 48, 64)}
    by_columns = find_shapes(shapes, lambda shape: shape[1] > 16)
    assert by_columns == {columns: RowBlocks((16, 64, 256)) for columns in (32, 48, 64)}
    by_rows = find_shapes(shapes, lambda shape: shape[0] > 16)
    assert by_rows == {columns: RowBlocks((64, 256)) for columns in (16, 32, 48, 64)}
    assert find_shapes(shapes, lambda shape: None if shape[1] != 48 else 0) == {48: RowBlocks((16, 64, 256))}
    assert find_shapes(shapes, lambda _: None) == {}
