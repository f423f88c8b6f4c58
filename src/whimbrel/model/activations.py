"""Activations by name, in PyTorch's operators."""

from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.types.heads import Activation

ACTIVATIONS: Final[Mapping[Activation, Callable[[Tensor], Tensor]]] = {
    "identity": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def in_blocks(activation: Callable[[Tensor], Tensor], x_RO: Tensor) -> Tensor:
    """Return activation(x), computed on a multiple of 64 elements: torch's vectorised loops give a remainder other bits."""
    num_rows, width = x_RO.shape
    if num_rows * width % 64 == 0:
        return activation(x_RO)
    return activation(F.pad(x_RO, (0, 0, 0, -num_rows % 64)))[:num_rows]
