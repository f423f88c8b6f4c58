"""Linear layers of our own kernels, and the numbers in which they multiply."""

import ctypes

import torch
from torch import Tensor

from whimbrel.model.kernels import library
from whimbrel.model.kernels.library import FUSED, KIND_NUMBERS, Kernels, Kind
from whimbrel.model.kernels.structs import Product, Weight, address
from whimbrel.types.heads import Activation


class PackedLinear:
    """Linear layer: activation(x @ weight.T + bias). x is float32 or bfloat16, whatever the product multiplies.

    int8: weights are rounded to 1/127 of the largest of their column, and a row of x to 1/255 of its range. `smooth_I` is
    multiplied with the weight's rows, and x divided by it, before both are rounded.
    """

    def __init__(
        self,
        own: Kernels,
        kind: Kind,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        activation: Activation,
        *,
        smooth_I: Tensor | None = None,
    ) -> None:
        self._linear = own.call.linear
        columns, self._inner = weight_OI.shape
        padded = -(-columns // own.panel) * own.panel
        number, quantized = KIND_NUMBERS[kind], kind == "int8"
        self._units = torch.empty(padded * own.call.units(number, self._inner), dtype=torch.int32)
        self._scales = torch.zeros(padded) if kind in ("int8", "float16") else None
        self._column_sums = torch.zeros(padded, dtype=torch.int32) if quantized else None
        self._bias = None if bias_O is None else torch.nn.functional.pad(bias_O.float(), (0, padded - columns))
        weight_OI = weight_OI.float().contiguous()
        self._factors = None
        if quantized:
            self._factors = torch.ones(self._inner) if smooth_I is None else 1 / smooth_I
            weight_OI = weight_OI if smooth_I is None else weight_OI * smooth_I
        parts = [address(part) for part in (self._units, self._bias, self._scales, self._column_sums, self._factors)]
        own.call.pack(number, weight_OI.data_ptr(), columns, self._inner, parts[0], parts[2], parts[3])
        self.product = Product(number, FUSED[activation], Weight(*parts, self._inner, columns))
        """The layer for C++. Its arrays live as long as this object."""
        self._columns = columns

    def __call__(self, x_RI: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the result in `dtype`, float32 or bfloat16. Raises MemoryError."""
        if x_RI.stride(-1) != 1:
            x_RI = x_RI.contiguous()
        rows, inner = x_RI.shape
        assert inner == self._inner
        assert x_RI.dtype in (torch.float32, torch.bfloat16)
        out_RO = torch.empty(rows, self._columns, dtype=dtype)
        if self._linear(
            ctypes.byref(self.product), x_RI.data_ptr(), x_RI.dtype == torch.bfloat16, x_RI.stride(0), rows,
            out_RO.data_ptr(), dtype == torch.bfloat16, self._columns,
        ):  # fmt: skip
            raise MemoryError("a product needs more memory than there is")
        return out_RO


def product_kind(dtype: torch.dtype) -> Kind | None:
    """Return the kind of our own product for weights of this dtype; None: there is none, or PyTorch's is better."""
    own = library.kernels()
    if own is None or dtype not in (torch.float32, torch.bfloat16):
        return None
    return "float32" if dtype == torch.float32 else own.narrow_kind()


def dtype_around_int8() -> torch.dtype:
    """Return the dtype of results of products in int8: bfloat16 where attention is faster in it than in float32."""
    own = library.kernels()
    return torch.float32 if own is None or own.attention_kind(torch.bfloat16) == "float32" else torch.bfloat16
