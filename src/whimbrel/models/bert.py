"""The BERT family: BERT, RoBERTa and XLM-RoBERTa. Post-norm encoder, learnt absolute positions, token types.

Returns hidden states; pooling is elsewhere. Residual stream and LayerNorm are float32, matrix products in the plan's dtype.
Source: transformers/models/bert/modeling_bert.py and roberta/modeling_roberta.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.card import Encoder
from whimbrel.models.weights import Weights
from whimbrel.ops.attention import Layout, attend
from whimbrel.ops.linear import Linear
from whimbrel.ops.norms import add_layer_norm, layer_norm

# What such checkpoints hold beside the encoder: heads of the pre-training task, and tables of constants.
UNUSED: Final = (r"pooler\..*", r"(.*\.)?embeddings\.(position_ids|token_type_ids)", r"cls\..*", r"lm_head\..*")


@dataclass(frozen=True, slots=True, eq=False)
class _Norm:
    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    qkv: Linear
    attention_out: Linear
    attention_norm: _Norm
    up: Linear
    down: Linear
    out_norm: _Norm


class Bert:
    """A loaded encoder of the BERT family."""

    def __init__(self, encoder: Encoder, weights: Weights, *, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = encoder
        self._device = device
        self._dtype = dtype
        width = encoder.hidden_size
        embeddings = {
            "word": encoder.vocab_size,
            "position": encoder.max_positions + encoder.position_offset,
            "token_type": encoder.type_vocab_size,
        }
        tables = {kind: weights.take(f"embeddings.{kind}_embeddings.weight", rows, width) for kind, rows in embeddings.items()}
        self._words = tables["word"].to(device, dtype)
        self._positions = tables["position"].to(device)
        self._types = tables["token_type"].to(device)
        self._norm = self._take_norm(weights, "embeddings.LayerNorm")
        self._layers = [self._take_layer(weights, f"encoder.layer.{i}.") for i in range(encoder.num_layers)]

    def __call__(
        self,
        ids_R: Tensor,
        positions_R: Tensor,
        type_ids_R: Tensor,
        layout: Layout,
        between_layers: Callable[[], None] | None = None,
    ) -> Tensor:
        """Hidden states of the last layer, (R, D) in float32. `between_layers` is called between any two layers."""
        eps, num_heads = self._spec.layer_norm_eps, self._spec.num_heads
        x_RD = F.embedding(ids_R, self._words).float()
        x_RD += F.embedding(positions_R, self._positions)
        x_RD += F.embedding(type_ids_R, self._types)
        x_RD = layer_norm(x_RD, self._norm.weight, self._norm.bias, eps)
        for number, layer in enumerate(self._layers):
            if between_layers is not None and number > 0:
                between_layers()
            qkv_R3NH = layer.qkv(x_RD.to(self._dtype)).view(x_RD.shape[0], 3, num_heads, -1)
            x = layer.attention_out(attend(qkv_R3NH, layout))
            x_RD = add_layer_norm(x_RD, x, layer.attention_norm.weight, layer.attention_norm.bias, eps)
            x = layer.down(layer.up(x_RD.to(self._dtype)))
            x_RD = add_layer_norm(x_RD, x, layer.out_norm.weight, layer.out_norm.bias, eps)
        return x_RD

    def _take_layer(self, weights: Weights, at: str) -> _Layer:
        width, inner = self._spec.hidden_size, self._spec.intermediate_size
        parts = [f"{at}attention.self.{part}" for part in ("query", "key", "value")]
        qkv_weight = torch.cat([weights.take(f"{part}.weight", width, width) for part in parts])
        qkv_bias = torch.cat([weights.take(f"{part}.bias", width) for part in parts])

        def linear(name: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
            return weights.take(f"{at}{name}.weight", rows, columns), weights.take(f"{at}{name}.bias", rows)

        return _Layer(
            qkv=self._linear(qkv_weight, qkv_bias),
            attention_out=self._linear(*linear("attention.output.dense", width, width)),
            attention_norm=self._take_norm(weights, f"{at}attention.output.LayerNorm"),
            up=Linear(*self._to(*linear("intermediate.dense", inner, width)), self._spec.activation),
            down=self._linear(*linear("output.dense", width, inner)),
            out_norm=self._take_norm(weights, f"{at}output.LayerNorm"),
        )

    def _to(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return weight.to(self._device, self._dtype), bias.to(self._device, self._dtype)

    def _linear(self, weight: Tensor, bias: Tensor) -> Linear:
        return Linear(*self._to(weight, bias))

    def _take_norm(self, weights: Weights, name: str) -> _Norm:
        width = self._spec.hidden_size
        return _Norm(*(weights.take(f"{name}.{part}", width).to(self._device) for part in ("weight", "bias")))
