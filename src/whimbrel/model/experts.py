"""Mixture of experts: a router selects a few MLPs for each token.

Source: NomicMoELayer in modeling_hf_nomic_bert.py of nomic-ai/nomic-bert-2048 on the Hub, and
vllm/model_executor/models/bert_with_rope.py.

Shapes: R rows, D model width, E experts, I inner width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.model.ops.linear import Linear, round_up_rows
from whimbrel.model.weights import Weights
from whimbrel.types.card import Encoder


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
        out_RD = torch.zeros_like(x_RD, dtype=torch.float32)
        for number, (up, down) in enumerate(self._experts):
            rows = chosen_RE[:, number].nonzero()[:, 0]
            if rows.numel():
                own = F.pad(x_RD[rows], (0, 0, 0, round_up_rows(rows.numel()) - rows.numel()))
                out_RD[rows] += down(up(own))[: rows.numel()].float() * weights_RE[rows, number, None]
        return out_RD + self._bias_D


def load_experts(
    spec: Encoder, weights: Weights, names: Sequence[str], num_experts: int, *, device: torch.device, dtype: torch.dtype
) -> Experts:
    router, at = names  # the name of the router, the prefix of the experts
    width, inner = spec.hidden_size, spec.intermediate_size
    # Padded: the bits of a product with few columns would depend on the number of rows.
    router_ED = F.pad(weights.take(f"{router}.weight", num_experts, width), (0, 0, 0, -num_experts % 16))
    up_EID, down_EID = (
        weights.take(f"{at}.mlp.{name}", num_experts * inner, width).view(num_experts, inner, width) for name in ("w1", "w2")
    )
    experts = [
        (Linear(up_ID.to(device, dtype), None, spec.activation), Linear(down_ID.T.contiguous().to(device, dtype), None))
        for up_ID, down_ID in zip(up_EID, down_EID, strict=True)
    ]
    bias_D = weights.take(f"{at}.bias", width).to(device)
    return Experts(Linear(router_ED.to(device, dtype), None), experts, bias_D, spec.experts_per_token)
