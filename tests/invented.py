"""Products whose bits depend on the number of rows, as with AMX, on any machine: `pytest --invented-products`.

The numbers are those of the real product, moved by a unit in the last place or two, which depends on the number of rows as
oneDNN's sums do on a Sapphire Rapids: 16 and 32 rows give other bits than 48, and these others than 512.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from whimbrel.ops import linear, tile_products, trials

_INTEGERS: Final = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def offset(num_rows: int) -> int:
    """By how many units in the last place a product of this many rows is off."""
    return 1 if num_rows in (16, 32, 384) else 2 if num_rows >= 512 else 0


def install(patch: pytest.MonkeyPatch) -> None:
    """Let linear layers and MaxSim compute so."""
    product = linear._Kind.product

    def moved(kind: linear._Kind, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        real = product(kind, weight, bias)
        return lambda x: _move(real(x), offset(len(x)))

    def moved_multiply(multiply: Callable[..., None]) -> Callable[..., None]:
        def both(x_TD: Tensor, query_DQ: Tensor, out_TQ: Tensor, size: int) -> None:
            multiply(x_TD, query_DQ, out_TQ, size)
            _move(out_TQ, offset(size) + (query_DQ.shape[1] == 16))

        return both

    patch.setattr(linear._Kind, "product", moved)
    for name in ("_multiply_stack", "_multiply_each"):
        patch.setattr(tile_products, name, moved_multiply(getattr(tile_products, name)))
    found: dict[Any, Any] = {}
    patch.setattr(trials, "_found", found)


def _move(x: Tensor, units: int) -> Tensor:
    """Numbers but zeros and what is not finite, moved away from 0."""
    if units and not x.is_cuda:
        x.view(_INTEGERS[x.dtype]).add_((x.isfinite() & (x != 0)) * units)
    return x
