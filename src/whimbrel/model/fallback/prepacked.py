"""Linear layers with prepacked weights: oneDNN calls that PyTorch keeps private, their self-test and their fallback.

PyTorch makes these calls for its own compiler and may change them in any version. This module alone names them. A self-test
compares them with the public operators once per process. If they are missing, fail or compute something else, callers use the
public operators, which are slower and right.

Shapes: R rows, I input and O output columns.
"""

import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Final, cast

# Read once, when oneDNN makes its first primitive. The default of 1,024 would let the cache grow to most of a GB.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.model.activations import ACTIVATIONS
from whimbrel.types.heads import Activation

TRIED_VERSIONS: Final = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""Minor versions of PyTorch that passed the tests of numbers. CI runs the oldest, that of all its tests, and the newest."""

EPILOGUES: Final[Mapping[Activation, tuple[str, str]]] = {
    "identity": ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
}
"""Activations that oneDNN applies in the epilogue: (attribute, algorithm)."""

_TOLERANCES: Final = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def packed_linear(
    weight_OI: Tensor, bias_O: Tensor | None = None, activation: Activation = "identity", *, num_rows: int
) -> Callable[[Tensor], Tensor]:
    """Return the function x (R, I) -> activation(x @ weight.T + bias) (R, O), for an activation in EPILOGUES.

    The weight is copied into the layout that oneDNN prefers for `num_rows` rows; x may have any number.
    """
    packed: Tensor = _mkldnn()._reorder_linear_weight(weight_OI, num_rows)
    attribute, algorithm = EPILOGUES[activation]
    pointwise: Callable[..., Tensor] = _mkldnn()._linear_pointwise
    return partial(pointwise, W=packed, B=bias_O, attr=attribute, scalars=[], algorithm=algorithm)


def prepacked_supported(device: torch.device) -> bool:
    """Return whether `device` has prepacked weights that have passed the self-test."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and prepacked_problem() is None


@cache
def prepacked_problem() -> str | None:
    """Return what the self-test found wrong with the private calls, or None, also for a build without oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return None
    dtypes = [torch.float32, *([torch.bfloat16] if onednn_bfloat16() else [])]
    try:
        differing = [
            f"{activation} in {str(dtype).removeprefix('torch.')}"
            for dtype in dtypes
            for activation in EPILOGUES
            for has_bias in (False, True)
            if not _agrees(dtype, activation, has_bias=has_bias)
        ]
    except Exception as error:  # a private call may raise anything in another version
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return f"other results for {differing[0]}" if differing else None


def onednn_bfloat16() -> bool:
    """Return whether oneDNN computes in bfloat16 on this processor."""
    query = getattr(_mkldnn(), "_is_mkldnn_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and query is not None and bool(query())


def version_note(version: str, problem: str | None) -> str:
    """Return a warning about a PyTorch `version` whose self-test found `problem`, or "" for a tried version without one."""
    if problem is not None:
        return f"its private calls fail the self-test ({problem}), so slower public ones are used"
    return "" if version.startswith(tuple(f"{tried}." for tried in TRIED_VERSIONS)) else "untried version; self-test passed"


def _agrees(dtype: torch.dtype, activation: Activation, *, has_bias: bool) -> bool:
    x_RI = torch.linspace(-2, 2, 3 * 48).sin().view(3, 48).to(dtype)
    weight_OI = torch.linspace(-9, 9, 32 * 48).cos().view(32, 48).to(dtype)
    bias_O = torch.linspace(-1, 1, 32).to(dtype) if has_bias else None
    found_RO = packed_linear(weight_OI, bias_O, activation, num_rows=4)(x_RI)
    bias = None if bias_O is None else bias_O.float()
    expected_RO = ACTIVATIONS[activation](F.linear(x_RI.float(), weight_OI.float(), bias))
    tolerance = _TOLERANCES[dtype]
    return found_RO.dtype == dtype and torch.allclose(found_RO.float(), expected_RO, rtol=tolerance, atol=tolerance)


def _mkldnn() -> Any:
    return cast(Any, torch.ops.mkldnn)
