"""Linear layers and norms: our own kernels or prepacked oneDNN on CPUs, PyTorch's linear and row kernels on GPUs.

Norms are float32: in bfloat16 PyTorch's are three times slower on CPUs, and less exact. On a CPU a row has the same bits in any
number of rows: by construction in our kernels (`model/kernels`). oneDNN's products run in blocks of sizes whose bits agree
(`row_blocks.py`), found for each shape, dtype and epilogue when the first such layer is loaded. oneDNN makes a primitive per
number of rows, so few sizes also keep its cache small: each took 0.3 to 1.3 ms and about 0.7 MB on Zen 4.

Shapes: R rows, I input and O output columns, D model width, K LoRA columns, V entries of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.model.fallback.prepacked import EPILOGUES, packed_linear, prepacked_supported
from whimbrel.model.fallback.row_blocks import COARSE_SIZES, FINE_SIZES, MAX_BLOCK, RowBlocks, find_row_blocks
from whimbrel.model.fallback.trials import FEW_TERMS, Finding, begin, cancelling
from whimbrel.model.kernels import library as own
from whimbrel.model.kernels import structs
from whimbrel.model.kernels.products import PackedLinear, dtype_around_int8, product_kind
from whimbrel.model.ops.quantization import Quantization, QuantizedLinear
from whimbrel.model.ops.row_kernels import row_kernels
from whimbrel.types.heads import Activation

_COARSE_FROM: Final = 2**22
"""Weights of a product above which COARSE_SIZES are tried."""
_TRIAL_COLUMNS: Final = 64
"""Number of different columns of a trial's weight; the others repeat them."""
_TRIAL_FUSED: Final = 16
"""Least number of results that a trial compares."""


class Linear:
    """Linear layer: activation(x @ weight.T + bias) for x (R, in), with weight (out, in) and bias (out).

    x may have another dtype than the weight. The result has that of the weight, or with `wide` float32 where that is no slower.
    `low_rank` is added in calls with a LoRA mask. The activation is then never fused, so a row has the same bits in any batch.
    With `quantization` the layer multiplies float32 until that is done, and then 8-bit integers; CPUs only.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation = "identity",
        low_rank: LowRank | None = None,
        *,
        wide: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        self._dtype = self.out_dtype = weight.dtype
        self._low_rank = low_rank
        self._width, inner = weight.shape
        self._finding: Finding[RowBlocks] | None = None
        fused: Activation = activation if low_rank is None and activation in own.FUSED else "identity"
        self._own = _own_product(weight, bias, fused) if quantization is None else quantization.begin(weight, bias, fused)
        if self._own is not None:
            narrow = self._dtype if quantization is None else dtype_around_int8()
            self.out_dtype = torch.float32 if wide else narrow
        else:
            prepacked = prepacked_supported(weight.device)
            fused = activation if activation in EPILOGUES and prepacked and low_rank is None else "identity"
            kind = _Kind(self._width, inner, weight.dtype, bias is not None, fused, prepacked)
            self._product = kind.product(weight, bias)
            self._finding = begin(kind) if weight.device.type == "cpu" else None
            self._cover: Callable[[int], Sequence[tuple[int, int]]] = RowBlocks(()).cover
        self._after: Activation | None = None if fused == activation else activation

    def __call__(self, x_RI: Tensor, lora_mask_RK: Tensor | None = None) -> Tensor:
        out = self._in_blocks(x_RI.to(self._dtype)) if self._own is None else self._own(x_RI, self.out_dtype)
        if self._low_rank is not None and lora_mask_RK is not None:
            out += self._low_rank(x_RI, lora_mask_RK)
        return out if self._after is None else row_kernels(out).activate(out, self._after)

    @property
    def packed(self) -> PackedLinear | None:
        """Our own product, if it is all of this layer; None also if its weights are yet to be rounded to int8."""
        product = self._own.product if isinstance(self._own, QuantizedLinear) else self._own
        whole = self._low_rank is None and self._after is None
        return product if whole and isinstance(product, PackedLinear) else None

    def _in_blocks(self, x_RI: Tensor) -> Tensor:
        if (finding := self._finding) is not None:
            self._cover = lru_cache(maxsize=1024)(finding.result().cover)
            self._finding = None  # last: another lane may be in this branch
        num_rows = x_RI.shape[0]
        blocks = self._cover(num_rows)
        if len(blocks) == 1:
            missing = blocks[0][1] - num_rows
            return self._product(F.pad(x_RI, (0, 0, 0, missing)))[:num_rows] if missing else self._product(x_RI)
        out_RO = x_RI.new_empty(num_rows, self._width)
        for start, size in blocks:
            out_RO[start : start + size] = self._product(x_RI[start : start + size])
        return out_RO


def _own_product(weight: Tensor, bias: Tensor | None, activation: Activation) -> PackedLinear | None:
    kernels, kind = own.kernels(), product_kind(weight.dtype)
    if weight.device.type != "cpu" or kernels is None or kind not in kernels.kinds:
        return None
    return PackedLinear(kernels, kind, weight, bias, activation)


@dataclass(frozen=True, slots=True)
class _Kind:
    width: int
    inner: int
    dtype: torch.dtype
    has_bias: bool
    activation: Activation
    prepacked: bool

    def __str__(self) -> str:
        return f"the product of {self.inner:,} to {self.width:,} columns in {str(self.dtype).removeprefix('torch.')}"

    def product(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Return the product, for any number of rows at once."""
        if not self.prepacked:
            return partial(F.linear, weight=weight, bias=bias)
        return packed_linear(weight, bias, self.activation, num_rows=MAX_BLOCK)

    def find(self) -> RowBlocks:
        num_columns = min(self.width, _TRIAL_COLUMNS)
        num_trials = -(-_TRIAL_FUSED // self.width) if self.inner >= FEW_TERMS else 2 * _TRIAL_FUSED
        rows_RI, columns_CI = cancelling(num_trials, num_columns, self.inner)
        weight_OI = columns_CI.to(self.dtype).repeat(-(-self.width // num_columns), 1)[: self.width].contiguous()
        bias_O = torch.linspace(-0.1, 0.1, self.width, dtype=torch.float32).to(self.dtype) if self.has_bias else None
        product = self.product(weight_OI, bias_O)

        def bits(num_rows: int) -> bytes | None:
            results: list[bytes] = []
            for row_I in rows_RI.to(self.dtype):
                bits_RX = product(row_I.repeat(num_rows, 1)).view(torch.uint8)
                if not torch.equal(bits_RX, bits_RX[:1].expand_as(bits_RX)):
                    return None
                results.append(bits_RX[0].numpy().tobytes())
            return b"".join(results)

        return find_row_blocks(COARSE_SIZES if self.width * self.inner > _COARSE_FROM else FINE_SIZES, bits)


class LowRank:
    """LoRA adapters of a linear layer or a table: x A' B'.

    The K columns of x A' are the ranks of one adapter after another. Columns of adapters that are not a row's own are set to 0
    before the product with B. So one product serves rows of all adapters, and a row has the same bits in any batch.
    `up` is B, (out, parts * K), times the adapters' scale. `down` is A, (parts * K, in); for a table its rows, (entries, K).
    Source of the formula: LoRA, arXiv:2106.09685.
    """

    def __init__(self, down: Tensor, up: Tensor, *, table: bool = False) -> None:
        self._down = partial(F.embedding, weight=down) if table else Linear(down, None)
        self._up = Linear(up, None)

    def __call__(self, x: Tensor, lora_mask_RK: Tensor) -> Tensor:
        """Return the addition. `lora_mask_RK` is true where column k does not belong to the adapter of row r."""
        low_RK = self._down(x)
        low_RPK = low_RK.view(*lora_mask_RK.shape[:1], -1, lora_mask_RK.shape[1])
        return self._up(low_RPK.masked_fill(lora_mask_RK[:, None], 0).view(low_RK.shape))


def takes_any_rows(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether linear layers of this dtype run any number of rows without blocks, as those of our own kernels do."""
    kernels = own.kernels()
    return device.type == "cpu" and kernels is not None and product_kind(dtype) in kernels.kinds


def round_up_rows(num_rows: int) -> int:
    """Return the number of rows that a batch is padded to: one of FINE_SIZES, or a multiple of 32 above them."""
    step = 16 if num_rows <= 256 else 32
    return -(-num_rows // step) * step


def gate(x_RO: Tensor, activation: Activation) -> Tensor:
    """Return activation(first half) * second half of each row."""
    kernels = own.kernels_for(x_RO)
    if kernels is not None and activation in own.FUSED:
        return kernels.gate(x_RO, activation)
    return row_kernels(x_RO).gate(x_RO, activation)


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """Layer norm of x + added over the last dimension, or RMS norm unless `centred`; the result is float32.

    RMS norm is y / sqrt(mean(y^2) + eps) * weight of y = x + added. Its weight may have more dimensions.
    """

    weight_D: Tensor
    bias_D: Tensor | None
    eps: float
    centred: bool

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        weight, kernels = self.weight_D, own.kernels_for(x)
        # Strides do not matter to our kernels: a slice of one row is contiguous.
        of_rows = x.dtype == torch.float32 and weight.dim() == 1 and x.shape[1:] == weight.shape
        if kernels is not None and of_rows and (added is None or added.shape == x.shape):
            return kernels.norm(x, added, self.structure())
        return self._rows(x, added, torch.float32, keep_sum=False)[1]

    def and_sum(self, x_RD: Tensor, added_RD: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the sum in float32 and its norm in `dtype`."""
        return self._rows(x_RD, added_RD, dtype, keep_sum=True)

    def in_both(self, x_RD: Tensor, added_RD: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum in float32, and in `dtype`."""
        return self._rows(x_RD, added_RD, dtype, keep_sum=False)

    def _rows(self, x: Tensor, added: Tensor | None, dtype: torch.dtype, *, keep_sum: bool) -> tuple[Tensor, Tensor]:
        norm, weights = row_kernels(x).norm, (self.weight_D, self.bias_D)
        return norm(x, added, *weights, eps=self.eps, centred=self.centred, keep_sum=keep_sum, dtype=dtype)

    def structure(self) -> structs.Norm:
        """Return the norm for C++, for as long as this object lives."""
        return structs.Norm(self.weight_D.data_ptr(), structs.address(self.bias_D), self.eps, self.centred)
