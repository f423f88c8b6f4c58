"""Mixture of experts: a router selects a few MLPs for each token.

Sources: NomicMoELayer in modeling_hf_nomic_bert.py of nomic-ai/nomic-bert-2048 on the Hub, and
vllm/model_executor/models/bert_with_rope.py; for gated experts
transformers/models/{deepseek_v3,lfm2_moe}/modeling_*.py (5.23).

Shapes: R rows, D model width, E experts, G groups, I inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.model.adapters import Adapters
from whimbrel.model.ops.activations import ACTIVATIONS, in_blocks
from whimbrel.model.ops.linear import Linear, round_up_rows
from whimbrel.model.ops.quantization import Quantization
from whimbrel.model.weights import Weights
from whimbrel.types.card import Encoder, Routing


class Experts:
    """Layer of experts: bias + the sum of weight * down(up(x)) over the experts of a token.

    The weights are the router's softmax over all experts, so those of the selected ones do not add up to 1. Sums are in the
    order of the experts, so a row has the same bits in any batch. On a GPU the host waits for each expert's number of rows.
    """

    def __init__(self, router: Linear, experts: Sequence[tuple[Linear, Linear]], bias_D: Tensor, per_token: int) -> None:
        self._router = router
        self._experts = experts
        self._bias_D = bias_D
        self._per_token = per_token

    def __call__(self, x_RD: Tensor) -> Tensor:
        weights_RE = self._router(x_RD)[:, : len(self._experts)].float().softmax(-1)
        chosen_RE = torch.zeros_like(weights_RE, dtype=torch.bool)
        chosen_RE.scatter_(1, weights_RE.topk(self._per_token, dim=-1).indices, value=True)
        experts = [_chain(up, down) for up, down in self._experts]
        return _add_experts(x_RD, experts, chosen_RE, weights_RE) + self._bias_D


def _chain(up: Linear, down: Linear) -> Callable[[Tensor], Tensor]:
    return lambda x_RD: down(up(x_RD))


def _add_experts(x_RD: Tensor, experts: Sequence[Callable[[Tensor], Tensor]], chosen_RE: Tensor, weights_RE: Tensor) -> Tensor:
    out_RD = torch.zeros_like(x_RD, dtype=torch.float32)
    for number, expert in enumerate(experts):
        rows = chosen_RE[:, number].nonzero()[:, 0]
        if rows.numel():
            own = F.pad(x_RD[rows], (0, 0, 0, round_up_rows(rows.numel()) - rows.numel()))
            out_RD[rows] += expert(own)[: rows.numel()].float() * weights_RE[rows, number, None]
    return out_RD


def load_experts(
    spec: Encoder,
    weights: Weights,
    *,
    names: Sequence[str],
    num_experts: int,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
) -> Experts:
    router, at = names  # the name of the router, the prefix of the experts
    width, inner = spec.hidden_size, spec.intermediate_size
    # Padded: the bits of a product with few columns would depend on the number of rows.
    router_ED = F.pad(weights.take(f"{router}.weight", num_experts, width), (0, 0, 0, -num_experts % 16))
    up_EID, down_EID = (
        weights.take(f"{at}.mlp.{name}", num_experts * inner, width).view(num_experts, inner, width) for name in ("w1", "w2")
    )
    experts = [
        (
            Linear(up_ID.to(device, dtype), None, spec.activation, quantization=quantization),
            Linear(down_ID.T.contiguous().to(device, dtype), None, quantization=quantization),
        )
        for up_ID, down_ID in zip(up_EID, down_EID, strict=True)
    ]
    bias_D = weights.take(f"{at}.bias", width).to(device)
    return Experts(Linear(router_ED.to(device, dtype), None), experts, bias_D, spec.experts_per_token)


class _Mlp(Protocol):
    """MLP of rows; the mask is that of `Linear`."""

    def __call__(self, x_RD: Tensor, lora_mask_RK: Tensor | None) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class GatedExperts:
    """Layer of gated experts: the sum of weight * expert(x) over the experts of a token, in their order, + shared(x) if any."""

    router: Linear
    correction_E: Tensor
    experts: Sequence[Callable[[Tensor], Tensor]]
    shared: _Mlp | None
    routing: Routing
    per_token: int

    def __call__(self, x_RD: Tensor, lora_mask_RK: Tensor | None) -> Tensor:
        scores_RE = in_blocks(torch.sigmoid, self.router(x_RD.float()))[:, : len(self.experts)]
        chosen_RE = self._choose(scores_RE + self.correction_E)
        weights_RE = scores_RE.masked_fill(~chosen_RE, 0)
        if self.routing.normalized:
            weights_RE = weights_RE / (weights_RE.sum(-1, keepdim=True) + self.routing.eps)
        out_RD = _add_experts(x_RD, self.experts, chosen_RE, weights_RE * self.routing.scale)
        return out_RD if self.shared is None else out_RD + self.shared(x_RD, lora_mask_RK).float()

    def _choose(self, scores_RE: Tensor) -> Tensor:
        """Return the mask of the best experts in the best groups."""
        routing = self.routing
        scores_RGE = scores_RE.view(len(scores_RE), routing.num_groups, -1)
        groups_RG = scores_RGE.topk(2, dim=-1).values.sum(-1)
        left_RG = torch.ones_like(groups_RG, dtype=torch.bool)
        left_RG.scatter_(1, groups_RG.topk(routing.top_groups, dim=-1).indices, value=False)
        scores_RE = scores_RGE.masked_fill(left_RG[..., None], -torch.inf).view(scores_RE.shape)
        chosen_RE = torch.zeros_like(scores_RE, dtype=torch.bool)
        return chosen_RE.scatter_(1, scores_RE.topk(self.per_token, dim=-1).indices, value=True)


def load_gated_experts(
    spec: Encoder,
    weights: Weights,
    *,
    names: Sequence[str],
    layers: Sequence[str],
    num_experts: int,
    device: torch.device,
    dtype: torch.dtype,
    adapters: Adapters,
    quantization: Quantization | None = None,
) -> GatedExperts:
    """Load a layer of experts. Adapters may change the shared one alone."""
    router, at, correction = names  # the name of the router, the prefix of the experts, the correction
    width, routing = spec.hidden_size, spec.routing
    assert routing is not None
    act, shared_name = ACTIVATIONS[spec.activation], f"{at}.shared_experts"

    def mlp(name: str, inner: int) -> _Mlp:
        *first, last = (f"{name}.{layer}" for layer in layers)
        both = Linear(
            torch.cat([weights.take(f"{part}.weight", inner, width) for part in first]).to(device, dtype),
            None,
            low_rank=adapters.named(first, [inner, inner], width) if name == shared_name else None,
            quantization=quantization,
        )
        down = Linear(
            weights.take(f"{last}.weight", width, inner).to(device, dtype),
            None,
            low_rank=adapters.named([last], [width], inner) if name == shared_name else None,
            quantization=quantization,
        )

        def run(x_RD: Tensor, lora_mask_RK: Tensor | None) -> Tensor:
            gate, up = both(x_RD, lora_mask_RK).chunk(2, dim=-1)
            return down(act(gate) * up, lora_mask_RK)

        return run

    router_ED = F.pad(weights.take(f"{router}.weight", num_experts, width), (0, 0, 0, -num_experts % 16))
    correction_E = (weights.take(correction, num_experts) if routing.corrected else torch.zeros(num_experts)).to(device)
    experts = [
        partial(mlp(f"{at}.experts.{number}", routing.intermediate_size), lora_mask_RK=None) for number in range(num_experts)
    ]
    shared = mlp(shared_name, routing.shared_size) if routing.shared_size else None
    return GatedExperts(Linear(router_ED.to(device), None), correction_E, experts, shared, routing, spec.experts_per_token)
