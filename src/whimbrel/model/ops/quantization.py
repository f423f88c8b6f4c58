"""Linear layers that multiply 8-bit integers, with scales that follow from some texts run in float32.

Each layer first multiplies float32 and notes the largest magnitude of each of its inputs. `Quantization.finish` then rounds its
weights. An input that is often large is divided by a factor that its weights are multiplied with, so that neither side has
outliers: SmoothQuant, arXiv:2211.10438, with an exponent of 1/2. What rounded weights lose of the mean input is added to the
bias. At run time a row of x is rounded with a scale and a zero point
of its own. Sums of integers are exact, so a row has the same bits in any batch.

Shapes: R rows, I input and O output columns.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.model.activations import ACTIVATIONS, in_blocks
from whimbrel.model.kernels.library import kernels
from whimbrel.model.kernels.products import PackedLinear
from whimbrel.types.heads import Activation

_int_mm: Callable[[Tensor, Tensor], Tensor] = cast(Any, torch)._int_mm
_LEAST: Final = 1e-5
"""Magnitude that inputs and weights are taken to have at least."""


class Quantization:
    """The layers of a model that are to be quantised."""

    def __init__(self) -> None:
        self._layers: list[QuantizedLinear] = []

    def begin(self, weight_OI: Tensor, bias_O: Tensor | None, activation: Activation) -> QuantizedLinear:
        """Return a layer that multiplies float32 until `finish`. `activation` is one of `kernels.FUSED`."""
        layer = QuantizedLinear(weight_OI, bias_O, activation)
        self._layers.append(layer)
        return layer

    def finish(self) -> None:
        """Quantise all layers. No batch may run meanwhile."""
        for layer in self._layers:
            layer.quantize()
        self._layers.clear()


class QuantizedLinear:
    """Linear layer: activation(x @ weight.T + bias), in int8 after `quantize`. Before, all is float32, also the result."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, activation: Activation) -> None:
        self._parts: tuple[Tensor, Tensor | None, Activation] | None = (weight_OI.float(), bias_O, activation)
        self._largest_I = torch.zeros(weight_OI.shape[1])
        self._sum_I = torch.zeros(weight_OI.shape[1], dtype=torch.float64)
        self._num_rows = 0
        self._lock = Lock()
        self.product: Callable[[Tensor, torch.dtype], Tensor] | None = None
        """The product in int8; None before `quantize`."""

    def __call__(self, x_RI: Tensor, dtype: torch.dtype) -> Tensor:
        if self.product is not None:
            return self.product(x_RI, dtype)
        assert self._parts is not None
        weight_OI, bias_O, activation = self._parts
        x_RI = x_RI.float()
        if len(x_RI):
            with self._lock:  # of lanes
                self._largest_I = torch.maximum(self._largest_I, x_RI.abs().amax(0))
                self._sum_I += x_RI.double().sum(0)
                self._num_rows += len(x_RI)
        return ACTIVATIONS[activation](F.linear(x_RI, weight_OI, bias_O))

    def quantize(self) -> None:
        assert self._parts is not None
        weight_OI, bias_O, activation = self._parts
        smooth_I = smoothing(self._largest_I, weight_OI)
        bytes_OI, scale_O = to_bytes(weight_OI * smooth_I)
        if self._num_rows:
            lost_OI = weight_OI - bytes_OI * scale_O[:, None] / smooth_I
            lost_O = (lost_OI.double() @ (self._sum_I / self._num_rows)).float()
            bias_O = lost_O if bias_O is None else bias_O.float() + lost_O
        own = kernels()
        if own is not None and "int8" in own.kinds:
            self.product = PackedLinear(own, "int8", weight_OI, bias_O, activation, smooth_I=smooth_I)
        else:
            self.product = Int8Linear(weight_OI, bias_O, activation, smooth_I)
        self._parts = None


def to_bytes(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight as `PackedLinear` rounds it, (O, I) in int8, and the scale of each column."""
    most_O = weight_OI.abs().amax(1)
    scale_O = torch.where(most_O > 0, most_O / 127, 1)
    return (weight_OI / scale_O[:, None]).round().to(torch.int8), scale_O


def smoothing(largest_I: Tensor, weight_OI: Tensor) -> Tensor:
    """Return the factor of each input's weights: sqrt(largest input / largest weight), around 1. 1 where no text was run."""
    if not largest_I.any():
        return torch.ones_like(largest_I)
    factors_I = (largest_I.clamp(min=_LEAST) / weight_OI.abs().amax(0).clamp(min=_LEAST)).sqrt()
    return factors_I / factors_I.mean()


class Int8Linear:
    """Fallback of `PackedLinear` in int8, by PyTorch's operators: the same bits before the activation, but slowly."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, activation: Activation, smooth_I: Tensor) -> None:
        bytes_OI, self._scale_O = to_bytes(weight_OI.float() * smooth_I)
        self._weight_IO = bytes_OI.T.contiguous()
        self._sum_O = self._weight_IO.sum(0, dtype=torch.int32)
        self._factor_I = 1 / smooth_I
        self._bias_O = None if bias_O is None else bias_O.float()
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x_RI: Tensor, dtype: torch.dtype) -> Tensor:
        x_RI = x_RI.float() * self._factor_I
        low_R1, high_R1 = x_RI.amin(1, keepdim=True).clamp(max=0), x_RI.amax(1, keepdim=True).clamp(min=0)
        step_R1 = torch.where(high_R1 > low_R1, (high_R1 - low_R1) / 255, 1)
        zero_R1 = (-low_R1 / step_R1).round()
        byte_RI = (x_RI * (1 / step_R1) + zero_R1).clamp(0, 255).round() - 128
        # 128 less in each number of x
        product_RO = _int_mm(byte_RI.nan_to_num().to(torch.int8), self._weight_IO)
        exact_RO = product_RO - (zero_R1.nan_to_num().to(torch.int32) - 128) * self._sum_O
        out_RO = exact_RO.float() * (step_R1 * self._scale_O)
        out_RO = out_RO if self._bias_O is None else out_RO + self._bias_O
        out_RO = torch.where(x_RI.isfinite().all(1, keepdim=True), out_RO, torch.nan)
        return in_blocks(self._activation, out_RO).to(dtype)
