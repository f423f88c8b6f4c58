"""Parts that the formulas of published models share, and random weights for their names."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]


W = dict[str, Tensor]


Config = dict[str, Any]


def linear(w: W, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def norm(w: W, name: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def embed(w: W, ids: Tensor) -> Tensor:
    x = w["embeddings.word_embeddings.weight"][ids]
    return x + w["embeddings.token_type_embeddings.weight"][0] if "embeddings.token_type_embeddings.weight" in w else x


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, bias: Tensor | float = 0.0) -> Tensor:
    """Return softmax(q k' / sqrt(H) + bias) v, for (L, D) each."""
    q, k, v = (x.view(len(x), heads, -1).transpose(0, 1) for x in (q, k, v))
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + bias
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def rope(x: Tensor, heads: int, inverse: Tensor, *, interleaved: bool = False) -> Tensor:
    """Return x cos + rotate_half(x) sin on the first columns of each head."""
    length, width = len(x), 2 * len(inverse)
    angles = torch.outer(torch.arange(length).float(), inverse)
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    x = x.view(length, heads, -1)
    part = x[..., :width]
    if interleaved:
        half = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
    else:
        a, b = part.chunk(2, -1)
        half = torch.cat((-b, a), -1)
    turned = part * angles.cos()[:, None] + half * angles.sin()[:, None]
    return torch.cat((turned, x[..., width:]), -1).flatten(1)


def inverse_frequencies(theta: float, width: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, width, 2).float() / width)


def rms(w: W, name: str, x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]


def repeat(x: Tensor, width: int, times: int) -> Tensor:
    """Repeat each head for the queries that share it."""
    return x.view(len(x), -1, width).repeat_interleave(times, 1).flatten(1)


def head_rms(w: W, name: str, x: Tensor, heads: int, eps: float) -> Tensor:
    return rms(w, name, x.view(len(x), heads, -1), eps).flatten(1)


def tensors(name: str, out: int, inputs: int | None = None, *, bias: bool = True) -> Shapes:
    """Return the tensors of a linear layer or a norm."""
    weight = {f"{name}.weight": (out,) if inputs is None else (out, inputs)}
    return weight | ({f"{name}.bias": (out,)} if bias else {})


def tables(vocabulary: int, types: int, width: int, norm_name: str) -> Shapes:
    shapes = tensors("embeddings.word_embeddings", vocabulary, width, bias=False) | tensors(norm_name, width)
    return shapes | (tensors("embeddings.token_type_embeddings", types, width, bias=False) if types else {})


def draw_weights(shapes: Shapes) -> W:
    """Return random weights, large enough that all matter."""
    generator = torch.Generator().manual_seed(7)

    def one(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = 0.2 * torch.randn(shape, generator=generator)
        return 1 + noise if len(shape) == 1 and name.endswith("weight") else noise

    return {name: one(name, shape) for name, shape in shapes.items()}
