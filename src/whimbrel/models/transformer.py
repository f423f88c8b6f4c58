"""Every transformer that Whimbrel runs itself: an encoder or a decoder, as its spec says.

Ragged rows in, hidden states out; pooling is elsewhere. The residual stream and all norms are float32, matrix products in the
plan's dtype. What a family has and where its norms lie is in `families`; nothing here asks for a family by name.
Sources: transformers/models/{bert,roberta,distilbert,electra,mpnet,nomic_bert,gte,jina_embeddings_v3,modernbert,llama,qwen2,
qwen3,mistral,gemma2,gemma3}/modeling_*.py (5.23); of JinaBERT, the code on the hub that its checkpoints name:
jinaai/jina-bert-implementation, and jinaai/jina-bert-v2-qk-post-norm for those with norms of queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.card import Encoder, Layer, Rotary
from whimbrel.models.families import FAMILIES, Names
from whimbrel.models.weights import Weights
from whimbrel.ops.attention import Layout, Scores, attend
from whimbrel.ops.linear import ACTIVATIONS, Linear
from whimbrel.ops.norms import layer_norm, rms_norm
from whimbrel.ops.rotary import frequencies, turn

_Norm: TypeAlias = Callable[[Tensor], Tensor]
_Bias: TypeAlias = Callable[[int, int, int], Tensor]
_Angles: TypeAlias = tuple[Tensor, Tensor, bool]
"""Cosines and sines, (R, F) each, and whether pairs of columns are interleaved."""


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    qkv: Linear
    out: Linear
    up: Linear
    """Up to the inner width; gate and up at once if gated."""
    down: Linear
    attention_in: _Norm
    attention_out: _Norm
    attention_inner_sum: _Norm | None
    attention_sum: _Norm
    mlp_in: _Norm
    mlp_out: _Norm
    mlp_sum: _Norm
    head_norm: _Norm | None
    """Of the heads of queries and keys."""
    scores: Scores
    rotary: int
    """Which of the model's; -1: none."""


class Transformer:
    """A loaded model."""

    def __init__(self, spec: Encoder, weights: Weights, *, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        self._names = _names_in(weights, spec.family)
        self._weights = weights
        self._device = device
        self._dtype = dtype
        names, width = self._names, spec.embedding_size
        self._words = self._table(names.words, spec.vocab_size, width).to(dtype)
        learned = spec.max_positions + spec.position_offset
        self._positions = self._table(names.positions, learned, width) if names.positions else None
        self._types = self._table(names.types, spec.type_vocab_size, width) if names.types and spec.type_vocab_size else None
        self._embedding_norm = self._norm(names.embedding_norm, width)
        self._projection = (
            None
            if width == spec.hidden_size
            else Linear(*self._join([names.projection or ""], [spec.hidden_size], width, bias=True))
        )
        rotaries: list[Rotary] = []
        for layer in spec.layers:
            if layer.rotary is not None and layer.rotary not in rotaries:
                rotaries.append(layer.rotary)
        self._rotaries = [(*frequencies(rotary, device), rotary.interleaved) for rotary in rotaries]
        bias = self._bias()
        self._layers = [
            self._layer(i, layer, bias, -1 if layer.rotary is None else rotaries.index(layer.rotary))
            for i, layer in enumerate(spec.layers)
        ]
        self._final = self._norm(names.final, spec.hidden_size)
        del self._weights

    def __call__(
        self,
        ids_R: Tensor,
        positions_R: Tensor,
        type_ids_R: Tensor,
        layout: Layout,
        between_layers: Callable[[], None] | None = None,
    ) -> Tensor:
        """Hidden states of the last layer, (R, D) in float32. `between_layers` is called between any two layers."""
        x_RD = self._embed(ids_R, positions_R, type_ids_R)
        angles = [_angles(positions_R, *rotary) for rotary in self._rotaries]
        for number, layer in enumerate(self._layers):
            if between_layers is not None and number > 0:
                between_layers()
            attended = self._attend(
                layer, layer.attention_in(x_RD), layout, angles[layer.rotary] if layer.rotary >= 0 else None
            )
            attended = layer.attention_out(attended)
            if layer.attention_inner_sum is not None:
                attended = layer.attention_inner_sum(x_RD + attended)
            x_RD = layer.attention_sum(x_RD + attended)
            x_RD = layer.mlp_sum(x_RD + layer.mlp_out(self._mlp(layer, layer.mlp_in(x_RD))))
        return self._final(x_RD)

    def _embed(self, ids_R: Tensor, positions_R: Tensor, type_ids_R: Tensor) -> Tensor:
        x_RD = F.embedding(ids_R, self._words).float()
        if self._spec.embedding_scale != 1.0:
            x_RD *= self._spec.embedding_scale
        if self._positions is not None:
            x_RD += F.embedding(positions_R, self._positions)
        if self._types is not None:
            x_RD += F.embedding(type_ids_R, self._types)
        x_RD = self._embedding_norm(x_RD)
        return x_RD if self._projection is None else self._projection(x_RD.to(self._dtype)).float()

    def _attend(self, layer: _Layer, x_RD: Tensor, layout: Layout, angles: _Angles | None) -> Tensor:
        spec = self._spec
        heads = spec.num_heads + spec.num_kv_heads
        qkv_RNH = layer.qkv(x_RD.to(self._dtype)).view(x_RD.shape[0], heads + spec.num_kv_heads, spec.head_width)
        qk_RNH, v_RKH = qkv_RNH[:, :heads], qkv_RNH[:, heads:]
        if layer.head_norm is not None:
            qk_RNH = layer.head_norm(qk_RNH.float())
        if angles is not None:
            cos, sin, interleaved = angles
            qk_RNH = turn(qk_RNH, cos, sin, interleaved=interleaved)
        q_RNH, k_RKH = qk_RNH[:, : spec.num_heads], qk_RNH[:, spec.num_heads :]
        return layer.out(attend(q_RNH, k_RKH, v_RKH, layout, layer.scores))

    def _mlp(self, layer: _Layer, x_RD: Tensor) -> Tensor:
        x = layer.up(x_RD.to(self._dtype))
        if self._spec.gated:
            gate, up = x.chunk(2, dim=-1)
            x = ACTIVATIONS[self._spec.activation](gate) * up
        return layer.down(x)

    # Loading

    def _layer(self, i: int, layer: Layer, bias: _Bias | None, rotary: int) -> _Layer:
        spec, names, width = self._spec, self._names, self._spec.hidden_size
        queries, keys = spec.num_heads * spec.head_width, spec.num_kv_heads * spec.head_width
        qkv_rows = (queries, keys, keys) if len(names.qkv) == 3 else (queries + 2 * keys,)

        def norm(name: str | None) -> _Norm:
            return self._norm(name and name.format(i=i), width)

        def linear(parts: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool) -> Linear:
            return Linear(*self._join([part.format(i=i) for part in parts], rows, columns, bias=bias))

        return _Layer(
            qkv=linear(names.qkv, qkv_rows, width, spec.qkv_bias),
            out=linear((names.out,), (width,), queries, spec.out_bias),
            up=self._up([part.format(i=i) for part in names.up]),
            down=linear((names.down,), (width,), spec.intermediate_size, spec.down_bias),
            attention_in=norm(names.attention_in if i > 0 or names.first_attention_in else None),
            attention_out=norm(names.attention_out),
            attention_inner_sum=norm(names.attention_inner_sum) if names.attention_inner_sum else None,
            attention_sum=norm(names.attention_sum),
            mlp_in=norm(names.mlp_in),
            mlp_out=norm(names.mlp_out),
            mlp_sum=norm(names.mlp_sum),
            head_norm=self._head_norm(i),
            scores=Scores(
                spec.head_width**-0.5 if spec.score_scale is None else spec.score_scale,
                causal=spec.causal,
                window=layer.window,
                softcap=spec.softcap,
                bias=bias,
            ),
            rotary=rotary,
        )

    def _up(self, parts: Sequence[str]) -> Linear:
        spec = self._spec
        inner = spec.intermediate_size
        if not spec.gated:
            return Linear(*self._join(parts, (inner,), spec.hidden_size, bias=spec.up_bias), spec.activation)
        weight, bias = self._join(
            parts, (inner, inner) if len(parts) == 2 else (2 * inner,), spec.hidden_size, bias=spec.up_bias
        )
        if self._names.up_first:
            weight = weight.roll(inner, 0)
            bias = None if bias is None else bias.roll(inner, 0)
        return Linear(weight, bias)

    def _join(self, parts: Sequence[str], rows: Sequence[int], columns: int, *, bias: bool) -> tuple[Tensor, Tensor | None]:
        """Weights one below the other, and their biases."""
        weight = torch.cat([self._weights.take(f"{part}.weight", n, columns) for part, n in zip(parts, rows, strict=True)])
        if not bias:
            return weight.to(self._device, self._dtype), None
        biases = torch.cat([self._weights.take(f"{part}.bias", n) for part, n in zip(parts, rows, strict=True)])
        return weight.to(self._device, self._dtype), biases.to(self._device, self._dtype)

    def _table(self, name: str, rows: int, width: int) -> Tensor:
        return self._weights.take(f"{name}.weight", rows, width).to(self._device)

    def _norm(self, name: str | None, width: int) -> _Norm:
        if name is None:
            return _same
        eps = self._spec.norm_eps
        weight = self._weights.take(f"{name}.weight", width).to(self._device)
        if self._spec.norm == "layer":
            bias = self._weights.take(f"{name}.bias", width).to(self._device) if self._spec.norm_bias else None
            return lambda x: layer_norm(x, weight, bias, eps)
        if self._spec.norm == "rms_plus_one":
            weight = weight + 1
        return lambda x: rms_norm(x, weight, eps)

    def _head_norm(self, i: int) -> _Norm | None:
        """Queries and keys in one go: each head has the row of its kind."""
        spec, names = self._spec, self._names
        if names.q_norm is None or names.k_norm is None:
            return None
        if names.whole_norms:
            return self._whole_norm([name.format(i=i) for name in (names.q_norm, names.k_norm)])
        rows = [
            self._weights.take(f"{name.format(i=i)}.weight", spec.head_width).expand(heads, -1)
            for name, heads in ((names.q_norm, spec.num_heads), (names.k_norm, spec.num_kv_heads))
        ]
        weight_NH = torch.cat(rows).to(self._device) + (1 if spec.norm == "rms_plus_one" else 0)
        return lambda x: rms_norm(x, weight_NH, spec.norm_eps)

    def _whole_norm(self, parts: Sequence[str]) -> _Norm:
        """LayerNorms of the queries of all heads, and of their keys."""
        width, eps = self._spec.num_heads * self._spec.head_width, self._spec.norm_eps
        weight_2D, bias_2D = (
            torch.stack([self._weights.take(f"{part}.{kind}", width) for part in parts]).to(self._device)
            for kind in ("weight", "bias")
        )

        def norm(x_RNH: Tensor) -> Tensor:
            x_R2D = F.layer_norm(x_RNH.reshape(-1, 2, width), (width,), eps=eps)
            return (x_R2D * weight_2D + bias_2D).view(x_RNH.shape)

        return norm

    def _bias(self) -> _Bias | None:
        """What is added to scores for the distance of query and key."""
        spec = self._spec
        if spec.positions == "alibi":
            slopes_N11 = alibi_slopes(spec.num_heads).to(self._device)[:, None, None]
            return lambda first, last, length: -slopes_N11 * _distances(first, last, length, self._device).abs()
        if spec.positions == "relative":
            table_BN = self._table(self._names.relative or "", spec.num_buckets, spec.num_heads)

            def bias(first: int, last: int, length: int) -> Tensor:
                distances = _distances(first, last, length, self._device)
                return table_BN[_buckets(distances, spec.num_buckets)].permute(2, 0, 1)

            return bias
        return None


def _angles(positions_R: Tensor, turns_F: Tensor, scale: float, interleaved: bool) -> _Angles:
    radians_RF = positions_R[:, None].float() * turns_F
    return radians_RF.cos() * scale, radians_RF.sin() * scale, interleaved


def _names_in(weights: Weights, family: str) -> Names:
    """Of the family, or of its twin if the checkpoint is one."""
    names = FAMILIES[family]
    if names.twin is not None and not weights.has(f"{names.down.format(i=0)}.weight"):
        return names.twin
    return names


def _distances(first: int, last: int, length: int, device: torch.device) -> Tensor:
    """Position of the key less that of the query, (last - first, L), for the queries from `first` to `last`."""
    return torch.arange(length, device=device)[None, :] - torch.arange(first, last, device=device)[:, None]


def _buckets(distances: Tensor, num_buckets: int) -> Tensor:
    """Small distances have a bucket each, larger ones share by their logarithm, up to 128. The upper half is for keys ahead."""
    half = num_buckets // 2
    exact = half // 2
    far = distances.abs()
    log = torch.log(far.float().clamp(min=1) / exact) / math.log(128 / exact) * (half - exact)
    bucket = torch.where(far < exact, far, (exact + log.long()).clamp(max=half - 1))
    return bucket + (distances > 0) * half


def alibi_slopes(num_heads: int) -> Tensor:
    """One slope per head: a geometric sequence; beyond the last power of two, every other slope of the next sequence."""
    power = 2 ** math.floor(math.log2(num_heads))
    start = 2 ** (-8 / power)
    slopes = [start ** (n + 1) for n in range(power)]
    start = 2 ** (-4 / power)
    slopes += [start ** (2 * n + 1) for n in range(num_heads - power)]
    return torch.tensor(slopes)
