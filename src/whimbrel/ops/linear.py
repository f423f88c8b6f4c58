"""Linear layers: prepacked oneDNN with a fused activation on CPUs, torch's own elsewhere.

oneDNN makes a primitive per number of rows (0.3 to 1.3 ms and about 0.7 MB each, measured on Zen 4). A ragged batch has
any number of rows, so `round_rows` keeps them to few; the rows added are computed and never read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final, cast

# Read once, when oneDNN makes its first primitive. The default of 1,024 would let the cache grow to most of a GB.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.heads import Activation

ACTIVATIONS: Final[Mapping[Activation, Callable[[Tensor], Tensor]]] = {
    "identity": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}

# Activations that oneDNN applies in the epilogue: (attribute, algorithm).
_EPILOGUES: Final[Mapping[Activation, tuple[str, str]]] = {
    "identity": ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
}

_ROW_STEP: Final = 16


def round_rows(num_rows: int) -> int:
    """The next multiple of 16; of a sixteenth of the power of two below, from 512 on.

    At least 16 rows also keep a lone token off oneDNN's matrix-vector kernels, whose bits differ.
    """
    step = max(_ROW_STEP, 1 << max(num_rows - 1, 0).bit_length() >> 5)
    return -(-num_rows // step) * step


def prepacked_supported(device: torch.device) -> bool:
    """Whether this build of torch has the oneDNN calls that `Linear` uses."""
    ops = cast(object, torch.ops.mkldnn)
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and hasattr(ops, "_linear_pointwise")


class Linear:
    """activation(x @ weight.T + bias) for x of (R, in): weight (out, in) and bias (out) in the dtype of x.

    `low_rank` is what adapters add to the product. It is added where a call says which rows are `foreign` to which; the
    activation is then never fused, so that a row has the same bits beside rows with adapters and without.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activation: Activation = "identity", low_rank: LowRank | None = None
    ) -> None:
        self._bias = bias
        self._prepacked = prepacked_supported(weight.device)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 512) if self._prepacked else weight
        self._low_rank = low_rank
        fused = _EPILOGUES.get(activation) if self._prepacked and low_rank is None else None
        self._epilogue = fused or _EPILOGUES["identity"]
        self._after = ACTIVATIONS["identity" if fused else activation]

    def __call__(self, x_RI: Tensor, foreign_RK: Tensor | None = None) -> Tensor:
        if self._prepacked:
            name, algorithm = self._epilogue
            out = torch.ops.mkldnn._linear_pointwise(x_RI, self._weight, self._bias, name, [], algorithm)
        else:
            out = F.linear(x_RI, self._weight, self._bias)
        if self._low_rank is not None and foreign_RK is not None:
            out += self._low_rank(x_RI, foreign_RK)
        return in_whole_blocks(self._after, out)


class LowRank:
    """What low-rank adapters add to the product of a linear layer or to the rows of a table: x A' B'.

    The matrices of all adapters lie side by side: K columns of x A' are the adapters' ranks one after another, and those of
    adapters that are not a row's own are set to 0 before they are multiplied with B. So one product serves rows of all
    adapters in any order, costs what a single adapter of rank K would, and gives a row the same bits in any company.
    `up` is B, (out, parts * K), with the adapters' scale in it. `down` is A, (parts * K, in), of a linear layer; of a table it
    is the rows, (entries, K). Source of the formula: LoRA, arXiv:2106.09685.
    """

    def __init__(self, down: Tensor, up: Tensor, *, table: bool = False) -> None:
        self._table = down if table else None
        self._down = None if table else Linear(down, None)
        self._up = Linear(up, None)

    def __call__(self, x: Tensor, foreign_RK: Tensor) -> Tensor:
        """x: (R, in), or the entries (R) of a table. `foreign_RK` is true where column k is not of row r's adapter."""
        if self._down is not None:
            low_RK = self._down(x)
        else:
            assert self._table is not None
            low_RK = F.embedding(x, self._table)
        low_RPK = low_RK.view(*foreign_RK.shape[:1], -1, foreign_RK.shape[1])
        return self._up(low_RPK.masked_fill(foreign_RK[:, None], 0).view(low_RK.shape))


def in_whole_blocks(activation: Callable[[Tensor], Tensor], x_RO: Tensor) -> Tensor:
    """activation(x), on a multiple of 32 elements: torch's vectorised loops treat what is left over with other bits."""
    num_rows, width = x_RO.shape
    if num_rows * width % 32 == 0:
        return activation(x_RO)
    return activation(F.pad(x_RO, (0, 0, 0, -num_rows % 32)))[:num_rows]
