"""Latent attention, as in DeepSeek V3.

Keys and values are expanded before attention, which is then that of other models, with as many key heads as query heads. All
key heads share their rotated columns. Values may be narrower than keys.

Source: transformers/models/deepseek_v3/modeling_deepseek_v3.py (5.23).

Shapes: R rows, D model width, N heads, H columns of a query or key head, V columns of a value head, F rotary frequencies.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.model.layer import Mixer, Rows
from whimbrel.model.ops.attention import ScoreOptions, attend
from whimbrel.model.ops.linear import Linear, Norm
from whimbrel.model.ops.rowwise import apply_rotary
from whimbrel.model.parts import Parts
from whimbrel.types.card import Latent

_EPS: Final = 1e-6
"""Epsilon of the norms between two linear layers, whatever config.json says."""


def load_latent(parts: Parts, latent: Latent, i: int, scores: ScoreOptions, rotary: int) -> Mixer:
    """Load the attention of one layer. `rotary` is the index of its rotary embedding, of the model's."""
    spec, dtype, at = parts.spec, parts.dtype, f"layers.{i}.self_attn"
    width, heads, rank, key_rank, bias = spec.hidden_size, spec.num_heads, latent.query_rank, latent.key_rank, spec.qkv_bias

    def linear(name: str, rows: int, columns: int, *, bias: bool = False) -> Linear:
        return parts.linear([f"{at}.{name}"], [rows], columns, bias=bias)

    def norm(name: str, columns: int) -> Norm:
        return Norm(parts.take(f"{at}.{name}.weight", columns), None, _EPS, centred=False)

    if rank:
        narrow_q, norm_q = linear("q_a_proj", rank, width, bias=bias), norm("q_a_layernorm", rank)
        query = linear("q_b_proj", heads * latent.width, rank)
    else:
        narrow_q, norm_q, query = None, None, linear("q_proj", heads * latent.width, width)
    narrow = linear("kv_a_proj_with_mqa", key_rank + latent.rotary_width, width, bias=bias)
    norm_kv = norm("kv_a_layernorm", key_rank)
    expand = linear("kv_b_proj", heads * (latent.plain_width + latent.value_width), key_rank)
    out = linear("o_proj", width, heads * latent.value_width, bias=spec.out_bias)

    def attention(x_RD: Tensor, rows: Rows) -> Tensor:
        x_RD, mask, angles, num_rows = x_RD.to(dtype), rows.lora_mask_RK, rows.angles[rotary], x_RD.shape[0]
        assert angles is not None
        cos, sin, interleaved = angles
        inner = x_RD if narrow_q is None or norm_q is None else norm_q(narrow_q(x_RD, mask)).to(dtype)
        q_RNH = query(inner, mask).view(num_rows, heads, latent.width)
        both = narrow(x_RD, mask)
        kv = expand(norm_kv(both[:, :key_rank]).to(dtype), mask).view(num_rows, heads, -1)
        k_plain, v_RNV = kv[..., : latent.plain_width], kv[..., latent.plain_width :]
        q_rotated, k_rotated = (
            apply_rotary(part, cos, sin, interleaved=interleaved)
            for part in (q_RNH[..., latent.plain_width :], both[:, None, key_rank:])
        )
        q_RNH = torch.cat((q_RNH[..., : latent.plain_width].float(), q_rotated), dim=-1)
        k_RNH = torch.cat((k_plain.float(), k_rotated.expand(-1, heads, -1)), dim=-1)
        v_RNH = F.pad(v_RNV, (0, latent.width - latent.value_width))
        attended_RNH = attend(q_RNH, k_RNH, v_RNH, rows.layout, scores).view(num_rows, heads, latent.width)
        return out(attended_RNH[..., : latent.value_width].flatten(1), mask)

    return attention
