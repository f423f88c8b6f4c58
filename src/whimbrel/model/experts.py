"""A mixture of experts: several MLPs in a layer, of which each token goes through few, as a router says.

Source: NomicMoELayer in modeling_hf_nomic_bert.py of nomic-ai/nomic-bert-2048 on the hub, as vLLM has it too
(vllm/model_executor/models/bert_with_rope.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.model.ops.linear import Linear
from whimbrel.model.ops.row_blocks import round_up_rows
from whimbrel.model.weights import Weights
from whimbrel.types.card import Encoder


class Experts:
    """bias + the sum of weight * down(up(x)) over the experts that a token goes through.

    The weights are those that the router gives, a softmax over all experts: those of the few do not add up to 1. Rows of the
    same expert are gathered and run at once, and sums are in the order of the experts, so that a row has the same bits in any
    company. On a GPU the host waits for the number of rows of each.
    """

    def __init__(self, router: Linear, experts: Sequence[tuple[Linear, Linear]], bias_D: Tensor, per_token: int) -> None:
        self._router = router
        self._experts = experts
        self._bias_D = bias_D
        self._per_token = per_token

    def __call__(self, x_RD: Tensor) -> Tensor:
        """x in the dtype of the weights -> (R, D) in float32."""
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
    spec: Encoder, weights: Weights, names: tuple[str, str], num_experts: int, *, device: torch.device, dtype: torch.dtype
) -> Experts:
    """Those of a layer. `names` are the router's and what those of the experts begin with."""
    router, at = names
    width, inner = spec.hidden_size, spec.intermediate_size
    # Filled up, since a product of few columns has other bits with other numbers of rows.
    router_ED = F.pad(weights.take(f"{router}.weight", num_experts, width), (0, 0, 0, -num_experts % 16))
    up_EID, down_EID = (
        weights.take(f"{at}.mlp.{name}", num_experts * inner, width).view(num_experts, inner, width) for name in ("w1", "w2")
    )
    experts = [
        (
            Linear(up_EID[i].to(device, dtype), None, spec.activation),
            Linear(down_EID[i].T.contiguous().to(device, dtype), None),
        )
        for i in range(num_experts)
    ]
    bias_D = weights.take(f"{at}.bias", width).to(device)
    return Experts(Linear(router_ED.to(device, dtype), None), experts, bias_D, spec.experts_per_token)
