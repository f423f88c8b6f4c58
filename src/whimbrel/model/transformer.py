"""Transformer encoder or decoder, configured by a card's `Encoder`.

The residual stream and all norms are float32; matrix products are in the plan's dtype. `families.py` describes the parts of
each family; nothing here tests the family's name.

Sources: transformers/models/{bert,roberta,distilbert,electra,mpnet,deberta_v2,nomic_bert,gte,jina_embeddings_v3,modernbert,
eurobert,llama,qwen2,qwen3,mistral,gemma2,gemma3,lfm2,lfm2_moe,deepseek_v3,t5}/modeling_*.py (5.23); for JinaBERT, on the Hub,
jinaai/jina-bert-implementation, and jinaai/jina-bert-v2-qk-post-norm for checkpoints with norms of queries and keys.

Shapes: R rows, D model width, N query heads, K key heads or taps, H head width, F rotary frequencies. In LoRA tensors, K
columns of all adapters.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.errors import CheckpointError
from whimbrel.model.experts import load_experts
from whimbrel.model.kernels.library import kernels, kernels_for
from whimbrel.model.latent import load_latent
from whimbrel.model.layer import Attention, FeedForward, Layer, LayerCall, Mixer, Mlp, Rows, Stream, added
from whimbrel.model.ops.attention import AttentionLayout, LayerHook, ScoreOptions
from whimbrel.model.ops.disentangled import PositionTables, row_of_distances
from whimbrel.model.ops.linear import Norm
from whimbrel.model.ops.positions import Bias, alibi, frequencies, relative
from whimbrel.model.ops.quantization import Quantization
from whimbrel.model.ops.rowwise import Angles
from whimbrel.model.ops.short_conv import short_conv, with_neighbours
from whimbrel.model.parts import Parts
from whimbrel.model.weights import Weights
from whimbrel.types.card import Encoder, NeighbourLayer, Rotary
from whimbrel.types.card import Layer as LayerSpec


class Transformer:
    """Loaded transformer, called as `load.Model`."""

    def __init__(
        self, spec: Encoder, weights: Weights, *, device: torch.device, dtype: torch.dtype, quantization: Quantization | None
    ) -> None:
        """`quantization` takes all linear layers."""
        self._spec = spec
        parts = self._parts = Parts(spec, weights, device, dtype, quantization)
        names, width = parts.names, spec.embedding_size
        self._lora_columns_K = parts.adapters.lora_columns()
        self._words = self._word_table(spec.vocab_size, width)
        self._adapted_words = parts.adapters.table("words", spec.vocab_size, width)
        learned = spec.max_positions + spec.position_offset
        self._positions = parts.table(names.positions, learned, width) if names.positions else None
        self._types = parts.table(names.types, spec.type_vocab_size, width) if names.types and spec.type_vocab_size else None
        self._adapted_types = None if self._types is None else parts.adapters.table("types", spec.type_vocab_size, width)
        self._embedding_norm = parts.norm(names.embedding_norm, width)
        self._projection = None
        if width != spec.hidden_size:
            self._projection = parts.linear([names.projection or ""], [spec.hidden_size], width, bias=True)
        rotaries: list[Rotary | None] = []
        for layer in spec.layers:
            if layer.rotary not in rotaries:
                rotaries.append(layer.rotary)
        self._rotaries = [None if each is None else (*frequencies(each, device), each.interleaved) for each in rotaries]
        bias = self._bias()
        self._relative = self._relative_positions()
        self._layers = [self._layer(i, layer, bias, rotaries.index(layer.rotary)) for i, layer in enumerate(spec.layers)]
        self._final = parts.norm(names.final, spec.hidden_size)
        self._neighbours = None if spec.neighbours is None else self._load_neighbours(spec.neighbours)
        self.left_out = parts.adapters.finish()
        """Modules that adapters change and hidden states do not depend on."""
        del self._parts, self._relative
        self.join_parts()

    def join_parts(self) -> None:
        """Run each layer as one call, or all of them, where our own kernels have all parts. Weights in int8 must be rounded."""
        calls = [call for layer in self._layers if (call := layer.join_parts()) is not None]
        own, is_whole = kernels(), len(calls) == len(self._layers) and self._neighbours is None
        self._whole = None
        if own is not None and calls and is_whole:
            self._whole = LayerCall(own, [layer for call in calls for layer in call.layers], calls[0].bias)

    def __call__(
        self, ids_R: Tensor, positions_R: Tensor, type_ids_R: Tensor, layout: AttentionLayout, between_layers: LayerHook = None
    ) -> Tensor:
        """Return the hidden states of the last layer, (R, D) in float32. Layers are one call if nothing runs between."""
        lora_mask_RK = None  # else true at the columns of other adapters than a row's own
        if layout.adapters_R is not None and self._lora_columns_K is not None:
            lora_mask_RK = layout.adapters_R[:, None] != self._lora_columns_K
        x_RD = self._embed(ids_R, positions_R, type_ids_R, lora_mask_RK)
        angles = [rotary and _angles(positions_R, *rotary) for rotary in self._rotaries]
        rows = Rows(positions_R, layout, angles, lora_mask_RK)
        if self._whole is not None and between_layers is None and rows.suit_one_call:
            stream = Stream(self._whole(x_RD, layout, angles))
        else:
            stream = self._run_layers(x_RD, rows, between_layers)
        return stream.settle(self._final)

    def _run_layers(self, x_RD: Tensor, rows: Rows, between_layers: LayerHook) -> Stream:
        pieces, stream = [(part, rows.piece(part, piece)) for part, piece in rows.layout.pieces], Stream(x_RD)
        for number, layer in enumerate(self._layers):
            if between_layers is not None and number > 0:
                between_layers()
            for part, piece in pieces:  # in place and in order: a piece attends to the keys of those before it
                if between_layers is not None and part.start > 0:
                    between_layers()
                x_RD[part] = layer(Stream(x_RD[part]), piece).settle()
            if not pieces:
                stream = layer(stream, rows)
            if number == 0 and self._neighbours is not None:
                stream = Stream(self._neighbours(x_RD, stream.settle(), rows))
        return stream

    def _embed(self, ids_R: Tensor, positions_R: Tensor, type_ids_R: Tensor, lora_mask_RK: Tensor | None) -> Tensor:
        own = kernels_for(ids_R)
        if own is not None and lora_mask_RK is None and self._spec.embedding_scale == 1.0:
            positions = None if self._positions is None else (self._positions, positions_R)
            x_RD = own.embed(self._words, ids_R, positions, None if self._types is None else (self._types, type_ids_R))
        else:
            x_RD = self._sum_of_tables(ids_R, positions_R, type_ids_R, lora_mask_RK)
        x_RD = x_RD if self._embedding_norm is None else self._embedding_norm(x_RD)
        return x_RD if self._projection is None else self._projection(x_RD, lora_mask_RK).float()

    def _sum_of_tables(self, ids_R: Tensor, positions_R: Tensor, type_ids_R: Tensor, lora_mask_RK: Tensor | None) -> Tensor:
        x_RD = F.embedding(ids_R, self._words).float()
        if self._adapted_words is not None and lora_mask_RK is not None:
            x_RD += self._adapted_words(ids_R, lora_mask_RK)
        if self._spec.embedding_scale != 1.0:
            x_RD *= self._spec.embedding_scale
        if self._positions is not None:
            x_RD += F.embedding(positions_R, self._positions)
        if self._types is not None:
            x_RD += F.embedding(type_ids_R, self._types)
        if self._adapted_types is not None and lora_mask_RK is not None:
            x_RD += self._adapted_types(type_ids_R, lora_mask_RK)
        return x_RD

    # Loading

    def _layer(self, i: int, layer: LayerSpec, bias: Bias | None, rotary: int) -> Layer:
        parts, names = self._parts, self._parts.names

        def norm(name: str | None) -> Norm | None:
            return parts.norm(name and name.format(i=i), self._spec.hidden_size)

        return Layer(
            mix=self._convolution(i, layer.conv_width) if layer.conv_width else self._attention(i, layer, bias, rotary),
            mlp=load_experts(parts, i, layer.num_experts) if layer.num_experts else self._mlp(i),
            attention_in=norm(names.attention_in if i > 0 or names.first_attention_in else None),
            attention_out=norm(names.attention_out),
            attention_inner_sum=norm(names.attention_inner_sum),
            attention_sum=norm(names.attention_sum),
            mlp_in=norm(names.mlp_in),
            mlp_out=norm(names.mlp_out),
            mlp_sum=norm(names.mlp_sum),
            dtype=parts.dtype,
        )

    def _attention(self, i: int, layer: LayerSpec, bias: Bias | None, rotary: int) -> Mixer:
        spec, parts = self._spec, self._parts
        scale = spec.head_width**-0.5 if spec.score_scale is None else spec.score_scale
        tables = self._position_tables(i)
        scores = ScoreOptions(
            scale, causal=spec.causal, window=layer.window, softcap=spec.softcap, bias=bias, tables=tables, layer=i
        )
        if spec.latent is not None:
            return load_latent(parts, spec.latent, i, scores, rotary)
        queries, keys = spec.num_heads * spec.head_width, spec.num_kv_heads * spec.head_width
        order = _order_by_key(spec) if parts.names.qkv_by_key else None
        return Attention(
            parts.of_layer("qkv", i, (queries, keys, keys), spec.hidden_size, bias=spec.qkv_bias, order=order),
            parts.of_layer("out", i, (spec.hidden_size,), queries, bias=spec.out_bias, wide=True),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_width,
            scores,
            rotary,
            spec.norm_eps,
            self._head_norm(i),
            self._whole_norm(i),
        )

    def _convolution(self, i: int, width: int) -> Mixer:
        """Load a gated short convolution. It sees all tokens, also those that are not attended to."""
        spec, parts, columns, at = self._spec, self._parts, self._spec.hidden_size, f"layers.{i}.conv"
        gates = parts.linear([f"{at}.in_proj"], [3 * columns], columns, bias=spec.conv_bias)
        out = parts.linear([f"{at}.out_proj"], [columns], columns, bias=spec.conv_bias)
        taps_KD = parts.take(f"{at}.conv.weight", columns, 1, width)[:, 0].T.contiguous()
        bias_D = parts.take(f"{at}.conv.bias", columns) if spec.conv_bias else None

        def convolution(x_RD: Tensor, rows: Rows) -> Tensor:
            before_RD, after_RD, inner_RD = gates(x_RD, rows.lora_mask_RK).float().chunk(3, dim=-1)
            inner_RD = short_conv(before_RD * inner_RD, rows.positions_R, taps_KD, bias_D, causal=spec.causal)
            return out(after_RD * inner_RD, rows.lora_mask_RK)

        return convolution

    def _mlp(self, i: int) -> Mlp:
        spec, parts, inner = self._spec, self._parts, self._spec.intermediate_size
        order = torch.arange(2 * inner).roll(inner) if spec.gated and parts.names.up_first else None
        up = parts.of_layer(
            "up", i, (inner, inner) if spec.gated else (inner,), spec.hidden_size,
            bias=spec.up_bias, activation="identity" if spec.gated else spec.activation, order=order,
        )  # fmt: skip
        down = parts.of_layer("down", i, (spec.hidden_size,), inner, bias=spec.down_bias, wide=True)
        return FeedForward(up, down, spec.activation if spec.gated else None)

    def _word_table(self, rows: int, width: int) -> Tensor:
        """Load the table of words. Raises CheckpointError if copies of it differ."""
        weights, names = self._parts.weights, self._parts.names
        found = [name for name in (names.words, *names.word_copies) if weights.has(f"{name}.weight")] or [names.words]
        table = self._parts.table(found[0], rows, width, self._parts.dtype)
        for name in found[1:]:
            copy = self._parts.table(name, rows, width, table.dtype)
            if not table.is_meta and not torch.equal(copy, table):
                raise weights.error(f"differs from {found[0]}.weight, of which it must be a copy.", f"{name}.weight")
        return table

    def _head_norm(self, i: int) -> Tensor | None:
        """Return the weights of the RMS norms of query and key heads, those of a head's kind for each head."""
        spec, parts, names = self._spec, self._parts, self._parts.names
        if names.q_norm is None or names.k_norm is None or names.whole_norms:
            return None
        rows = [
            parts.take(f"{name.format(i=i)}.weight", spec.head_width).expand(heads, -1)
            for name, heads in ((names.q_norm, spec.num_heads), (names.k_norm, spec.num_kv_heads))
        ]
        return torch.cat(rows) + (1 if spec.norm == "rms_plus_one" else 0)

    def _whole_norm(self, i: int) -> Callable[[Tensor], Tensor] | None:
        """Return the layer norm of all queries of a row, and of all its keys, where a family has it."""
        parts, q_norm, k_norm = self._parts, self._parts.names.q_norm, self._parts.names.k_norm
        if q_norm is None or k_norm is None or not parts.names.whole_norms:
            return None
        width, eps = self._spec.num_heads * self._spec.head_width, self._spec.norm_eps
        weight_2D, bias_2D = (
            torch.stack([parts.take(f"{name.format(i=i)}.{kind}", width) for name in (q_norm, k_norm)])
            for kind in ("weight", "bias")
        )

        def norm(x_RNH: Tensor) -> Tensor:
            x_R2D = F.layer_norm(x_RNH.reshape(-1, 2, width), (width,), eps=eps)
            return (x_R2D * weight_2D + bias_2D).view(x_RNH.shape)

        return norm

    def _bias(self) -> Bias | None:
        spec, parts = self._spec, self._parts
        if spec.positions == "alibi":
            return alibi(spec.num_heads, parts.device)
        if spec.positions == "relative":
            return relative(parts.table(parts.names.relative or "", spec.num_buckets, spec.num_heads), spec.max_distance)
        return None

    def _relative_positions(self) -> tuple[Tensor, Tensor] | None:
        """Return the positions that contents are scored against, in order of distance, and the row of each distance."""
        spec, parts = self._spec, self._parts
        if spec.disentangled is None:
            return None
        positions_PD = parts.table(parts.names.relative or "", 2 * spec.disentangled.span, spec.hidden_size)
        if spec.disentangled.normed and (norm := parts.norm("encoder.LayerNorm", spec.hidden_size)) is not None:
            positions_PD = F.layer_norm(positions_PD, norm.weight_D.shape, norm.weight_D, norm.bias_D, norm.eps)
        return positions_PD, row_of_distances(spec.disentangled, spec.max_positions).to(parts.device)

    def _position_tables(self, i: int) -> PositionTables | None:
        """Return the positions of keys and queries in a layer. Adapters cannot change them."""
        spec, parts, names = self._spec, self._parts, self._parts.names
        if spec.disentangled is None or self._relative is None:
            return None
        of, is_shared = spec.disentangled, spec.disentangled.shared
        queries, keys, _ = names.for_layer("qkv", i)
        if spec.adapters and is_shared and parts.adapters.changes("qkv", i):
            message = (
                "these layers make relative positions too, which adapters cannot change; merge the adapter into the model."
            )
            raise CheckpointError(message, file="adapter_model.safetensors", key=queries)
        positions_PD, row_M = self._relative

        def table(own: str, shared: str) -> Tensor:
            name, width = shared if is_shared else f"encoder.layer.{i}.attention.self.{own}", spec.num_heads * spec.head_width
            weight, bias = parts.take(f"{name}.weight", width, spec.hidden_size), parts.take(f"{name}.bias", width)
            return F.linear(positions_PD, weight, bias).view(-1, spec.num_heads, spec.head_width).transpose(0, 1).contiguous()

        return PositionTables(
            table("pos_key_proj", keys) if of.of_keys else None,
            table("pos_query_proj", queries) if of.of_queries else None,
            row_M,
        )

    def _load_neighbours(self, spec: NeighbourLayer) -> Callable[[Tensor, Tensor, Rows], Tensor]:
        parts, at, width = self._parts, "encoder.conv", self._spec.hidden_size
        weight_DDK = parts.take(f"{at}.conv.weight", width, width, spec.width)
        bias = parts.take(f"{at}.conv.bias", width).to(parts.dtype)
        weight = weight_DDK.transpose(1, 2).reshape(width, -1).to(parts.dtype)
        linear, norm = parts.make_linear(weight, bias, spec.activation, wide=True), parts.norm(f"{at}.LayerNorm", width)
        return lambda embedded_RD, x_RD, rows: added(
            norm, x_RD, linear(with_neighbours(embedded_RD, rows.positions_R, spec.width))
        )


def _order_by_key(spec: Encoder) -> Tensor:
    """Return the stored rows of all queries, then of all keys, then of all values."""
    shared = spec.num_heads // spec.num_kv_heads
    rows_KSH = torch.arange((shared + 2) * spec.num_kv_heads * spec.head_width).view(-1, shared + 2, spec.head_width)
    return torch.cat([rows_KSH[:, :shared].flatten(), rows_KSH[:, shared].flatten(), rows_KSH[:, shared + 1].flatten()])


def _angles(positions_R: Tensor, turns_F: Tensor, scale: float, interleaved: bool) -> Angles:
    radians_RF = positions_R[:, None].float() * turns_F
    return radians_RF.cos() * scale, radians_RF.sin() * scale, interleaved
