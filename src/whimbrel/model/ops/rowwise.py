"""Operations on rows between matrix products: residual sums with norms, rotations of heads, gates and activations.

Each is a plain formula here, in PyTorch's operators, which pass over memory several times. `rowwise_triton.py` has kernels that
pass once, and `row_kernels.py` chooses. Sums are float32. A row's bits depend on its own numbers alone.

Shapes: R rows, D columns, N heads, H head width, F rotary frequencies, O columns, twice those of a gate's result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.model.activations import ACTIVATIONS, in_blocks
from whimbrel.types.heads import Activation

Angles: TypeAlias = tuple[Tensor, Tensor, bool]
"""Cosines and sines, (R, F) each, and whether pairs of columns are interleaved."""


class NormRows(Protocol):
    def __call__(
        self,
        x: Tensor,
        added: Tensor | None,
        weight_D: Tensor,
        bias_D: Tensor | None,
        *,
        eps: float,
        centred: bool,
        keep_sum: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Return rows in float32 and rows in `dtype`: x + added and the norm of it, or unless `keep_sum` the norm twice."""
        ...


@dataclass(frozen=True, slots=True)
class RowKernels:
    norm: NormRows
    norm_and_rotate: Callable[[Tensor, Tensor | None, float, Angles | None], Tensor]
    """(x_RNH, weights of the RMS norm of each head, epsilon, angles) -> heads, in the dtype of x unless it is the formula."""
    gate: Callable[[Tensor, Activation], Tensor]
    """x_RO -> activation(first half) * second half of each row, in the dtype of x."""
    activate: Callable[[Tensor, Activation], Tensor]
    """x_RO -> activation(x), which may be written over x."""


def norm_rows(
    x: Tensor,
    added: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor | None,
    *,
    eps: float,
    centred: bool,
    keep_sum: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Compute `NormRows`. The weight may have more dimensions; an RMS norm is still over the last one."""
    x = x.float() if added is None else x + added  # in bfloat16 the bits of a mean would also depend on the number of rows
    if centred:
        normed = F.layer_norm(x, weight_D.shape, weight_D, bias_D, eps)
    elif x.is_cuda:  # where it is one kernel
        normed = F.rms_norm(x, x.shape[-1:], weight_D if weight_D.ndim == 1 else None, eps)
        normed = normed if weight_D.ndim == 1 else normed * weight_D
    else:
        normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight_D
    return x if keep_sum else normed, normed.to(dtype)


def apply_rotary(x_RNH: Tensor, cos_RF: Tensor, sin_RF: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate every head of every row by the angles of its position, in float32. Columns after 2 F stay unchanged."""
    width = 2 * cos_RF.shape[1]
    rotated, rest = x_RNH[..., :width].float(), x_RNH[..., width:]
    cos, sin = cos_RF[:, None], sin_RF[:, None]
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    pair = a * cos - b * sin, b * cos + a * sin
    out = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((out, rest.float()), dim=-1) if rest.shape[-1] else out


def norm_and_rotate_heads(x_RNH: Tensor, weight_NH: Tensor | None, eps: float, angles: Angles | None) -> Tensor:
    """Return the RMS norm of every head, unless there is no weight, rotated unless there are no angles, in float32."""
    if weight_NH is not None:
        options: Any = {"eps": eps, "centred": False, "keep_sum": False, "dtype": torch.float32}
        x_RNH, _ = norm_rows(x_RNH.float(), None, weight_NH, None, **options)
    return apply_rotary(x_RNH, *angles[:2], interleaved=angles[2]) if angles else x_RNH


def gate_rows(x_RO: Tensor, activation: Activation) -> Tensor:
    """Return activation(first half) * second half of each row."""
    gate, up = x_RO.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def activate_rows(x_RO: Tensor, activation: Activation) -> Tensor:
    """Return activation(x)."""
    return in_blocks(ACTIVATIONS[activation], x_RO)


FORMULAS: Final = RowKernels(norm_rows, norm_and_rotate_heads, gate_rows, activate_rows)
