"""Products whose bits depend on the number of rows, as with AMX, on any machine: `pytest --invented-products`.

The numbers are those of the real product with its terms in another order, which depends on the number of rows as oneDNN's sums
do on a Sapphire Rapids: 16, 32 and 384 rows give other bits than the other sizes, and 512 again others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from whimbrel.model.fallback import trials
from whimbrel.model.ops import linear, tile_products

_installed: dict[str, bool] = {}


def order(num_rows: int) -> int:
    """The order in which a product of this many rows adds its terms: 0 is that of the library."""
    return 1 if num_rows in (16, 32, 384) else 2 if num_rows >= 512 else 0


def install(patch: pytest.MonkeyPatch) -> None:
    """Let linear layers and MaxSim compute so, unless they do already."""
    found: dict[Any, Any] = {}
    patch.setattr(trials, "_found", found)
    if _installed:
        return
    patch.setitem(_installed, "yes", True)
    product = linear._Kind.product

    def turned_product(kind: linear._Kind, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        if weight.is_cuda:
            return product(kind, weight, bias)
        products = [product(kind, _turned(weight, 1, each), bias) for each in range(3)]
        return lambda x: products[order(len(x))](_turned(x, 1, order(len(x))))

    def turned_multiply(multiply: Callable[..., None]) -> Callable[..., None]:
        def turned(x_TD: Tensor, query_DQ: Tensor, out_TQ: Tensor, size: int) -> None:
            way = 2 if query_DQ.shape[1] == 16 else order(size)
            multiply(_turned(x_TD, 1, way), _turned(query_DQ, 0, way), out_TQ, size)

        return turned

    patch.setattr(linear._Kind, "product", turned_product)
    for library, multiply in tile_products.MULTIPLY.items():
        patch.setitem(tile_products.MULTIPLY, library, turned_multiply(multiply))


def _turned(x: Tensor, dim: int, way: int) -> Tensor:
    """Columns, or rows, in another order."""
    if way == 0:
        return x
    return x.flip(dim) if way == 1 else x.roll(x.shape[dim] // 3, dim).contiguous()
