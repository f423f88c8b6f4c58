"""Fallback for other architectures: transformers' model on ragged rows, with Whimbrel's attention and linear layers.

transformers lets a program register an attention function, which keeps the texts of a batch apart. The rest of the model sees
one row of all tokens, with the positions of each text. The residual stream is in the plan's dtype, as in transformers.

Shapes: R rows, N query heads, K key heads, H head width.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn

from whimbrel.model.fallback.trials import note_unstable
from whimbrel.model.ops.attention import AttentionLayout, ScoreOptions, attend
from whimbrel.model.ops.linear import Linear

hf: Final[Any] = transformers
"""transformers without types: most of it is untyped."""

ATTENTION_NAME: Final = "whimbrel"
"""Name of Whimbrel's attention in transformers."""
_INERT_ARGUMENTS: Final = frozenset({"dropout", "output_attentions", "position_ids", "use_cache"})


@dataclass(frozen=True, slots=True, eq=False)
class HFForward:
    """State of one forward pass, for the attention."""

    layout: AttentionLayout
    between_layers: Callable[[], None] | None = None
    attended: list[nn.Module] = field(default_factory=list[nn.Module])
    """Layers that have run."""


class HFModel:
    """Loaded model, called like `Transformer`."""

    def __init__(self, model: Any, *, has_types: bool) -> None:
        self._model = model
        self._has_types = has_types
        for name, module in model.named_modules():
            if type(module) in _LINEARS:
                _replace(module, *_LINEARS[type(module)](module))
            elif not isinstance(module, nn.Embedding):
                _note_products(name, module)

    def __call__(
        self,
        ids_R: Tensor,
        positions_R: Tensor,
        type_ids_R: Tensor,
        layout: AttentionLayout,
        between_layers: Callable[[], None] | None = None,
    ) -> Tensor:
        return self.run(ids_R, positions_R, type_ids_R, HFForward(layout, between_layers))

    def run(self, ids_R: Tensor, positions_R: Tensor, type_ids_R: Tensor, run: HFForward) -> Tensor:
        """Return the hidden states, with a state that the caller can inspect afterwards."""
        types = {"token_type_ids": type_ids_R[None].long()} if self._has_types else {}
        output = self._model(
            input_ids=ids_R[None].long(), position_ids=positions_R[None].long(), use_cache=False, whimbrel=run, **types
        )
        return output.last_hidden_state[0].float()


def _attend(
    module: nn.Module,
    q_1NRH: Tensor,
    k_1KRH: Tensor,
    v_1KRH: Tensor,
    attention_mask: Tensor | None,
    *,
    whimbrel: HFForward | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **more: object,
) -> tuple[Tensor, None]:
    """Attention function for transformers' layers. Raises TypeError for arguments that `attend` does not support."""
    unknown = [name for name, value in more.items() if value is not None and name not in _INERT_ARGUMENTS]
    causal: object = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if whimbrel is None or unknown or not isinstance(causal, bool):
        raise TypeError(f"its attention has a form of its own{': ' * bool(unknown)}{', '.join(unknown)}")
    if attention_mask is not None or q_1NRH.shape[-1] != v_1KRH.shape[-1] or (sliding_window or 1) < 1:
        raise TypeError("its attention has a mask, a window or a width of values of its own")
    if scaling is not None and not scaling > 0:
        raise TypeError(f"its attention multiplies scores by {scaling}")
    if whimbrel.attended and whimbrel.between_layers is not None:
        whimbrel.between_layers()
    whimbrel.attended.append(module)
    scores = ScoreOptions(
        q_1NRH.shape[-1] ** -0.5 if scaling is None else scaling,
        causal=causal,
        window=None if sliding_window is None else sliding_window - 1,
        softcap=softcap,
    )
    q_RNH, k_RKH, v_RKH = (x[0].transpose(0, 1) for x in (q_1NRH, k_1KRH, v_1KRH))
    return attend(q_RNH, k_RKH, v_RKH, whimbrel.layout, scores).view(1, *q_RNH.shape), None


hf.AttentionInterface.register(ATTENTION_NAME, _attend)

_LINEARS: Final[Mapping[type, Callable[[Any], tuple[Tensor, Tensor | None]]]] = {
    nn.Linear: lambda module: (module.weight.detach(), None if module.bias is None else module.bias.detach()),
    hf.pytorch_utils.Conv1D: lambda module: (module.weight.detach().T.contiguous(), module.bias.detach()),
}
"""Functions that return weight and bias, by class of linear layer."""


def _note_products(name: str, module: nn.Module) -> None:
    """Record weights that transformers multiplies itself, e.g. those of experts."""
    for weight, value in module.named_parameters(recurse=False):
        if value.ndim >= 2:
            layers = re.sub(r"\.\d+\.", ".*.", f"{name}.{weight}")
            note_unstable(f"transformers itself multiplies by {layers}, in numbers of rows that depend on the batch")


def _replace(module: nn.Module, weight_OI: Tensor, bias_O: Tensor | None) -> None:
    linear, width = Linear(weight_OI, bias_O), weight_OI.shape[0]

    def forward(x: Tensor) -> Tensor:
        return linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], width)

    module.forward = forward
    module.weight = nn.Parameter(torch.empty(0, dtype=weight_OI.dtype, device=weight_OI.device), requires_grad=False)
