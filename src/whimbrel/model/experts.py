"""Mixture of experts: a router selects a few MLPs for each token.

Sources: NomicMoELayer in modeling_hf_nomic_bert.py of nomic-ai/nomic-bert-2048 on the Hub, and
vllm/model_executor/models/bert_with_rope.py; for gated experts
transformers/models/{deepseek_v3,lfm2_moe}/modeling_*.py (5.23).

Shapes: R rows, D model width, E experts, G groups, I inner width, O columns of the first product, K experts of a row, X = R K.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.model.activations import in_blocks
from whimbrel.model.layer import FeedForward, Mlp
from whimbrel.model.ops.linear import Linear, round_up_rows
from whimbrel.model.ops.row_kernels import row_kernels
from whimbrel.model.parts import Parts
from whimbrel.types.card import Routing

SumExperts: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x_RD, mask of each row's experts, their weights) -> weighted sums, in float32."""
_ALIGNED: Final = 8
"""Divisor of the widths that grouped products take in bfloat16."""


def load_experts(parts: Parts, i: int, num_experts: int) -> Mlp:
    """Load a layer of experts. Adapters may change the shared one alone.

    Sums are in the order of the experts, so on a CPU a row has the same bits in any batch. On a GPU without grouped products
    the host waits in each layer for the experts' numbers of rows.
    """
    spec, names = parts.spec, parts.names
    at = (names.experts or "").format(i=i)
    router_ED = parts.take(f"{(names.router or '').format(i=i)}.weight", num_experts, spec.hidden_size)
    # Padded: the bits of a product with few columns would depend on the number of rows.
    router_ED = F.pad(router_ED, (0, 0, 0, -num_experts % 16))
    if spec.routing is None:
        return _load_plain(parts, Linear(router_ED.to(parts.dtype), None), num_experts, at)
    correction_E = torch.zeros(num_experts, device=parts.device)
    if spec.routing.corrected:
        correction_E = parts.take((names.correction or "").format(i=i), num_experts)
    return _load_gated(parts, spec.routing, Linear(router_ED, None), correction_E, at)


def _load_plain(parts: Parts, router: Linear, num_experts: int, at: str) -> Mlp:
    """Return bias + the sum of weight * down(up(x)) over the experts of a token.

    The weights are the router's softmax over all experts, so those of the selected ones do not add up to 1.
    """
    spec, dtype, per_token = parts.spec, parts.dtype, parts.spec.experts_per_token
    width, inner = spec.hidden_size, spec.intermediate_size
    up_EID, down_EID = (
        parts.take(f"{at}.mlp.{name}", num_experts * inner, width).view(num_experts, inner, width) for name in ("w1", "w2")
    )
    bias_D = parts.take(f"{at}.bias", width)

    def activate(x_XI: Tensor) -> Tensor:
        return row_kernels(x_XI).activate(x_XI, spec.activation)

    def make(up_ID: Tensor, down_ID: Tensor) -> Mlp:
        up = parts.make_linear(up_ID.to(parts.device, dtype), None, spec.activation)
        return FeedForward(up, parts.make_linear(down_ID.T.contiguous().to(parts.device, dtype), None), gate=None)

    add: SumExperts
    if multiplies_in_groups(parts, width, inner):
        up_EDI = up_EID.to(dtype).transpose(1, 2)
        add = partial(add_in_groups, first_EDO=up_EDI, second_EID=down_EID.to(dtype), activate=activate, per_token=per_token)
    else:
        add = partial(_add_experts, experts=[make(*each) for each in zip(up_EID, down_EID, strict=True)])

    def run(x_RD: Tensor, _: Tensor | None) -> Tensor:
        x_RD = x_RD.to(dtype)
        weights_RE = router(x_RD)[:, :num_experts].float().softmax(-1)
        return add(x_RD, _largest(weights_RE, per_token), weights_RE) + bias_D

    return run


def _load_gated(parts: Parts, routing: Routing, router: Linear, correction_E: Tensor, at: str) -> Mlp:
    """Return the sum of weight * expert(x) over the experts of a token, + shared(x) if any."""
    activation, shared_name = parts.spec.activation, f"{at}.shared_experts"
    dtype, per_token = parts.dtype, parts.spec.experts_per_token

    def mlp(name: str, inner: int) -> Mlp:
        *first, last = (f"{name}.{layer}" for layer in parts.names.expert_layers)
        both = parts.linear(first, [inner, inner], parts.spec.hidden_size, adapted=name == shared_name)
        down = parts.linear([last], [parts.spec.hidden_size], inner, adapted=name == shared_name)

        def run(x_RD: Tensor, lora_mask_RK: Tensor | None) -> Tensor:
            both_RO = both(x_RD, lora_mask_RK)
            return down(row_kernels(both_RO).gate(both_RO, activation), lora_mask_RK)

        return run

    def activate(x_XO: Tensor) -> Tensor:
        return row_kernels(x_XO).gate(x_XO, activation)

    def stack(layers: Sequence[str], rows: int, columns: int) -> Tensor:
        """Return weights of all experts, of layers that lie below each other, transposed."""
        of_each = [[f"{at}.experts.{number}.{layer}.weight" for layer in layers] for number in range(num_experts)]
        taken = [torch.cat([parts.take(name, rows, columns).to(dtype) for name in names]) for names in of_each]
        return torch.stack(taken).transpose(1, 2)

    num_experts, inner, width = len(correction_E), routing.intermediate_size, parts.spec.hidden_size
    add: SumExperts
    if multiplies_in_groups(parts, width, inner):
        *first, last = parts.names.expert_layers
        first_EDO, second_EID = stack(first, inner, width), stack([last], width, inner)
        add = partial(add_in_groups, first_EDO=first_EDO, second_EID=second_EID, activate=activate, per_token=per_token)
    else:
        add = partial(_add_experts, experts=[mlp(f"{at}.experts.{number}", inner) for number in range(num_experts)])
    shared = mlp(shared_name, routing.shared_size) if routing.shared_size else None

    def run(x_RD: Tensor, lora_mask_RK: Tensor | None) -> Tensor:
        x_RD = x_RD.to(dtype)
        scores_RE = in_blocks(torch.sigmoid, router(x_RD.float()))[:, :num_experts]
        chosen_RE = _choose(scores_RE + correction_E, routing, per_token)
        weights_RE = scores_RE.masked_fill(~chosen_RE, 0)
        if routing.normalized:
            weights_RE = weights_RE / (weights_RE.sum(-1, keepdim=True) + routing.eps)
        out_RD = add(x_RD, chosen_RE, weights_RE * routing.scale)
        return out_RD if shared is None else out_RD + shared(x_RD, lora_mask_RK).float()

    return run


def _choose(scores_RE: Tensor, routing: Routing, count: int) -> Tensor:
    """Return the mask of the best experts in the best groups."""
    scores_RGE = scores_RE.view(len(scores_RE), routing.num_groups, -1)
    best_RG = _largest(scores_RGE.topk(2, dim=-1).values.sum(-1), routing.top_groups)
    return _largest(scores_RGE.masked_fill(~best_RG[..., None], -torch.inf).view(scores_RE.shape), count)


def _largest(scores_RE: Tensor, count: int) -> Tensor:
    """Return the mask of the largest scores of each row."""
    chosen_RE = torch.zeros_like(scores_RE, dtype=torch.bool)
    return chosen_RE.scatter_(1, scores_RE.topk(count, dim=-1).indices, value=True)


def multiplies_in_groups(parts: Parts, *widths: int) -> bool:
    """Return whether PyTorch multiplies the rows of all experts at once, and without a wait for their numbers."""
    has_kernel = parts.device.type == "cuda" and torch.cuda.get_device_capability(parts.device) >= (9, 0)
    return has_kernel and parts.dtype == torch.bfloat16 and not any(width % _ALIGNED for width in widths)


def add_in_groups(
    x_RD: Tensor,
    chosen_RE: Tensor,
    weights_RE: Tensor,
    *,
    first_EDO: Tensor,
    second_EID: Tensor,
    activate: Callable[[Tensor], Tensor],
    per_token: int,
) -> Tensor:
    """Compute `SumExperts` over rows sorted by expert. Their numbers stay on the device."""
    expert_RK = chosen_RE.int().topk(per_token, dim=-1).indices.sort(dim=-1).values
    order_X = expert_RK.flatten().argsort(stable=True)
    ends_E = chosen_RE.sum(0).cumsum(0).int()
    first_XO = F.grouped_mm(x_RD[order_X // per_token], first_EDO, offs=ends_E)
    out_XD = F.grouped_mm(activate(first_XO), second_EID, offs=ends_E)
    weighted_XD = torch.empty(out_XD.shape, dtype=torch.float32, device=x_RD.device)
    weighted_XD[order_X] = out_XD.float() * weights_RE.gather(1, expert_RK).flatten()[order_X, None]
    return weighted_XD.view(len(x_RD), per_token, -1).sum(1)


def _add_experts(x_RD: Tensor, chosen_RE: Tensor, weights_RE: Tensor, *, experts: Sequence[Mlp]) -> Tensor:
    out_RD = torch.zeros_like(x_RD, dtype=torch.float32)
    counts = cast(list[int], chosen_RE.sum(0).tolist())  # pyright: ignore[reportUnknownMemberType]
    rows_E = torch.split(torch.nonzero(chosen_RE.T)[:, 1], counts)
    for number, (expert, rows) in enumerate(zip(experts, rows_E, strict=True)):
        if rows.numel():
            own = F.pad(x_RD[rows], (0, 0, 0, round_up_rows(rows.numel()) - rows.numel()))
            out_RD[rows] += expert(own, None)[: rows.numel()].float() * weights_RE[rows, number, None]
    return out_RD
