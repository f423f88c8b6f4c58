"""Latent attention, as in DeepSeek V3.

Keys and values are expanded before attention, which is then that of other models, with as many key heads as query heads. All
key heads share their rotated columns. Values may be narrower than keys.

Source: transformers/models/deepseek_v3/modeling_deepseek_v3.py (5.23).

Shapes: R rows, D model width, N heads, H columns of a query or key head, V columns of a value head, F rotary frequencies.
"""

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.model.layer import Rows
from whimbrel.model.ops.attention import ScoreOptions, attend
from whimbrel.model.ops.linear import Linear, Norm
from whimbrel.model.ops.positions import apply_rotary
from whimbrel.model.parts import Parts
from whimbrel.types.card import Latent

_EPS: Final = 1e-6
"""Epsilon of the norms between two linear layers, whatever config.json says."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    latent: Latent
    num_heads: int
    dtype: torch.dtype
    query: tuple[Linear, Norm | None, Linear | None]
    """Linear layer, norm and second layer; or a layer alone."""
    key: tuple[Linear, Norm, Linear]
    out: Linear
    scores: ScoreOptions
    rotary: int
    """Index of the rotary embedding, of the model's."""

    def __call__(self, x_RD: Tensor, rows: Rows) -> Tensor:
        x_RD, mask, angles = x_RD.to(self.dtype), rows.lora_mask_RK, rows.angles[self.rotary]
        assert angles is not None
        cos, sin, interleaved = angles
        latent, num_rows, heads = self.latent, x_RD.shape[0], self.num_heads
        first, norm, second = self.query
        q = first(x_RD, mask)
        if norm is not None and second is not None:
            q = second(norm(q).to(x_RD.dtype), mask)
        q_RNH = q.view(num_rows, heads, latent.width)
        narrow, norm, expand = self.key
        both = narrow(x_RD, mask)
        inner = norm(both[:, : latent.key_rank]).to(x_RD.dtype)
        kv = expand(inner, mask).view(num_rows, heads, -1)
        k_plain, v_RNV = kv[..., : latent.plain_width], kv[..., latent.plain_width :]
        shared_R1F = both[:, None, latent.key_rank :]
        rotated = [
            apply_rotary(part, cos, sin, interleaved=interleaved) for part in (q_RNH[..., latent.plain_width :], shared_R1F)
        ]
        q_RNH = torch.cat((q_RNH[..., : latent.plain_width].float(), rotated[0]), dim=-1)
        k_RNH = torch.cat((k_plain.float(), rotated[1].expand(-1, heads, -1)), dim=-1)
        v_RNH = F.pad(v_RNV, (0, latent.width - latent.value_width))
        attended_RNH = attend(q_RNH, k_RNH, v_RNH, rows.layout, self.scores).view(num_rows, heads, latent.width)
        return self.out(attended_RNH[..., : latent.value_width].flatten(1), mask)


def load_latent(parts: Parts, latent: Latent, i: int, scores: ScoreOptions, rotary: int) -> LatentAttention:
    """Load the attention of one layer."""
    spec, at = parts.spec, f"layers.{i}.self_attn"
    width, heads, rank, key_rank, bias = spec.hidden_size, spec.num_heads, latent.query_rank, latent.key_rank, spec.qkv_bias

    def linear(name: str, rows: int, columns: int, *, bias: bool = False) -> Linear:
        return parts.linear([f"{at}.{name}"], [rows], columns, bias=bias)

    def norm(name: str, columns: int) -> Norm:
        return Norm(parts.take(f"{at}.{name}.weight", columns), None, _EPS, centred=False)

    if rank:
        first = linear("q_a_proj", rank, width, bias=bias)
        query = (first, norm("q_a_layernorm", rank), linear("q_b_proj", heads * latent.width, rank))
    else:
        query = (linear("q_proj", heads * latent.width, width), None, None)
    narrow = linear("kv_a_proj_with_mqa", key_rank + latent.rotary_width, width, bias=bias)
    expand = linear("kv_b_proj", heads * (latent.plain_width + latent.value_width), key_rank)
    out = linear("o_proj", width, heads * latent.value_width, bias=spec.out_bias)
    return LatentAttention(
        latent, heads, parts.dtype, query, (narrow, norm("kv_a_layernorm", key_rank), expand), out, scores, rotary
    )
