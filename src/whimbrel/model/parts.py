"""Parts of a transformer, taken from its weights: linear layers with their adapters, norms and tables."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from whimbrel.model.adapters import Adapters
from whimbrel.model.families import FAMILIES, WeightRole
from whimbrel.model.ops.linear import Linear, LowRank, Norm
from whimbrel.model.ops.quantization import Quantization
from whimbrel.model.weights import Weights
from whimbrel.types.card import Encoder
from whimbrel.types.heads import Activation


class Parts:
    """The parts of one transformer while it is loaded. All methods raise CheckpointError."""

    def __init__(
        self, spec: Encoder, weights: Weights, device: torch.device, dtype: torch.dtype, quantization: Quantization | None
    ) -> None:
        """`dtype` is that of linear layers and of the table of words."""
        self.spec = spec
        self.weights = weights
        self.device = device
        self.dtype = dtype
        self.names = FAMILIES[spec.family].select(weights.has, "weight")
        self.adapters = Adapters(spec, self.names, weights, device=device, dtype=dtype)
        self.make_linear = partial(Linear, quantization=quantization)

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor on the device, in float32."""
        return self.weights.take(name, *shape, device=self.device)

    def table(self, name: str, rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.take(f"{name}.weight", rows, width).to(dtype).contiguous()

    def norm(self, name: str | None, width: int) -> Norm | None:
        if name is None:
            return None
        spec, weight = self.spec, self.take(f"{name}.weight", width)
        if spec.norm == "layer":
            return Norm(weight, self.take(f"{name}.bias", width) if spec.norm_bias else None, spec.norm_eps, centred=True)
        return Norm(weight + 1 if spec.norm == "rms_plus_one" else weight, None, spec.norm_eps, centred=False)

    def of_layer(
        self,
        role: WeightRole,
        i: int,
        rows: tuple[int, ...],
        columns: int,
        *,
        bias: bool,
        activation: Activation = "identity",
        order: Tensor | None = None,
        wide: bool = False,
    ) -> Linear:
        """Load a linear layer that the family names. `order` is that of its rows, if it is not the stored one."""
        low_rank = self.adapters.linear(role, i, rows, columns, order=order)
        names = self.names.for_layer(role, i)
        weight, biases = self._join(names, rows if len(names) == len(rows) else (sum(rows),), columns, bias=bias)
        if order is not None:
            weight, biases = weight[order], None if biases is None else biases[order]
        return self.make_linear(weight, biases, activation, low_rank, wide=wide)

    def linear(
        self, names: Sequence[str], rows: Sequence[int], columns: int, *, bias: bool = False, adapted: bool = True
    ) -> Linear:
        """Load one linear layer of tensors that lie below each other. Unless `adapted`, no adapter may change it."""
        low_rank: LowRank | None = self.adapters.named(names, rows, columns) if adapted else None
        return self.make_linear(*self._join(names, rows, columns, bias=bias), low_rank=low_rank)

    def _join(self, names: Sequence[str], rows: Sequence[int], columns: int, *, bias: bool) -> tuple[Tensor, Tensor | None]:
        named = list(zip(names, rows, strict=True))
        weight = torch.cat([self.take(f"{name}.weight", n, columns).to(self.dtype) for name, n in named])
        if not bias:
            return weight, None
        return weight, torch.cat([self.take(f"{name}.bias", n).to(self.dtype) for name, n in named])
