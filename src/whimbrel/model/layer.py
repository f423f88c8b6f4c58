"""A layer of a transformer, its parts, and layers that run in one call of our own kernels. `transformer.py` loads them.

Shapes: R rows, D model width, N query heads, K key heads, H head width, F rotary frequencies. In LoRA tensors, K columns of all
adapters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from whimbrel.model.fallback.row_blocks import MAX_BLOCK
from whimbrel.model.kernels import structs
from whimbrel.model.kernels.library import FUSED, KIND_NUMBERS, Kernels, kernels
from whimbrel.model.ops.attention import AttentionLayout, ScoreOptions, attend, reach_of
from whimbrel.model.ops.linear import Linear, Norm, gate
from whimbrel.model.ops.positions import Bias, norm_and_rotate
from whimbrel.model.ops.row_kernels import row_kernels
from whimbrel.model.ops.rowwise import FORMULAS, Angles
from whimbrel.types.heads import Activation


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of a batch besides their hidden states."""

    positions_R: Tensor
    layout: AttentionLayout
    angles: list[Angles | None]
    """Angles of each of the model's rotary embeddings, which may be None."""
    lora_mask_RK: Tensor | None

    @property
    def suit_one_call(self) -> bool:
        """True if joined parts have all that these rows need."""
        layout = self.layout
        plain = self.lora_mask_RK is None and not layout.sources and not layout.pieces
        return plain and self.positions_R.shape[0] == layout.num_tokens and not any(each and each[2] for each in self.angles)

    def piece(self, part: slice, layout: AttentionLayout) -> Rows:
        angles = [each and (each[0][part], each[1][part], each[2]) for each in self.angles]
        mask = self.lora_mask_RK
        return Rows(self.positions_R[part], layout, angles, None if mask is None else mask[part])


Mixer: TypeAlias = Callable[[Tensor, Rows], Tensor]
"""(normed rows, rows) -> rows: attention, or what stands in its place."""
Mlp: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]
"""(rows, LoRA mask as in `Linear`) -> rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Attention over heads of queries, keys and values."""

    qkv: Linear
    out: Linear
    num_heads: int
    num_kv_heads: int
    head_width: int
    scores: ScoreOptions
    rotary: int
    """Index of the rotary embedding, of the model's."""
    eps: float
    head_norm_NH: Tensor | None = None
    """Weights of the RMS norms of query and key heads."""
    whole_norm: Callable[[Tensor], Tensor] | None = None
    """Norm of all queries of a row, and of all its keys."""

    def __call__(self, x_RD: Tensor, rows: Rows) -> Tensor:
        scores, heads, angles = self.scores, self.num_heads + self.num_kv_heads, rows.angles[self.rotary]
        qkv_RD = self.qkv(x_RD, rows.lora_mask_RK)
        qkv_RNH = qkv_RD.view(x_RD.shape[0], heads + self.num_kv_heads, self.head_width)
        qk_RNH, v_RKH = qkv_RNH[:, :heads], qkv_RNH[:, heads:]
        if self.whole_norm is not None:
            qk_RNH = self.whole_norm(qk_RNH.float())
        if self.head_norm_NH is not None or angles is not None:
            if scores.softcap is not None:  # these attend in float32
                qk_RNH = qk_RNH.float()
            qk_RNH = norm_and_rotate(qk_RNH, self.head_norm_NH, self.eps, angles)
        q_RNH, k_RKH = qk_RNH[:, : self.num_heads], qk_RNH[:, self.num_heads :]
        return self.out(attend(q_RNH, k_RKH, v_RKH, rows.layout, scores), rows.lora_mask_RK)


@dataclass(frozen=True, slots=True, eq=False)
class FeedForward:
    """Two linear layers, with an activation between them, or a gate."""

    up: Linear
    down: Linear
    gate: Activation | None
    """Activation of the gate; None: `up` has an activation instead."""

    def __call__(self, x_RD: Tensor, lora_mask_RK: Tensor | None) -> Tensor:
        x = self.up(x_RD, lora_mask_RK)
        return self.down(x if self.gate is None else gate(x, self.gate), lora_mask_RK)


class LayerCall:
    """Layers that run in one call, one after another, with the bits of the calls that it stands for.

    A call from Python costs some 17 microseconds with cold caches, which for one short text is a quarter of its time.
    `native/layer.h` runs it.
    """

    def __init__(self, own: Kernels, layers: Sequence[structs.Layer], bias: Bias | None) -> None:
        """All layers have the same bias. Their parts must stay as they are, and outlive this object."""
        self._run = own.call.layers
        self.layers = (structs.Layer * len(layers))(*layers)
        self.bias = bias

    def __call__(self, x_RD: Tensor, layout: AttentionLayout, angles: Sequence[Angles | None]) -> Tensor:
        """Return the result for rows in float32, all of which belong to seqs of `layout`. Raises MemoryError.

        `angles` are those of each rotary embedding of the model, not interleaved.
        """
        num_rows = x_RD.shape[0]
        assert x_RD.dtype == torch.float32
        assert num_rows == layout.num_tokens
        x_RD = x_RD.contiguous()
        out_RD = torch.empty_like(x_RD)
        seqs_B5 = layout.kernel_seqs
        rotations = (structs.Rotation * len(angles))(*map(structs.rotation, angles))
        band_ND = None if self.bias is None else self.bias.band(reach_of(seqs_B5))
        batch = structs.Batch(
            num_rows, len(seqs_B5), seqs_B5.ctypes.data, ctypes.addressof(rotations), *structs.band_fields(band_ND)
        )
        if self._run(self.layers, len(self.layers), x_RD.data_ptr(), ctypes.byref(batch), out_RD.data_ptr()):
            raise MemoryError("a layer needs more memory than there is")
        return out_RD


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """Residual stream between two parts of layers. Its last sum may be yet to come, so that one kernel adds and norms."""

    x_RD: Tensor
    """float32."""
    added_RD: Tensor | None = None
    """Rows that are yet to be added to x."""
    narrow_RD: Tensor | None = None
    """x in the dtype of linear layers, where a kernel has written it too."""

    def settle(self, norm: Norm | None = None) -> Tensor:
        """Return the norm of the stream, or without one the stream itself, in float32."""
        if norm is not None:
            return norm(self.x_RD, self.added_RD)
        return self.x_RD if self.added_RD is None else self.x_RD + self.added_RD

    def read(self, norm: Norm | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the stream in float32 and, in `dtype`, its norm, or without one the stream."""
        if norm is not None:
            return norm.and_sum(self.x_RD, self.added_RD, dtype)
        x_RD = self.settle()
        return x_RD, x_RD.to(dtype) if self.narrow_RD is None else self.narrow_RD


@dataclass(slots=True, eq=False)
class Layer:
    """Attention and what follows it, each added to the residual stream. A norm that is None is none."""

    mix: Mixer
    mlp: Mlp
    attention_in: Norm | None
    attention_out: Norm | None
    attention_inner_sum: Norm | None
    """Norm of the sum of the residual stream and what attention adds, which is then added once more."""
    attention_sum: Norm | None
    mlp_in: Norm | None
    mlp_out: Norm | None
    mlp_sum: Norm | None
    dtype: torch.dtype
    """Dtype of the linear layers."""
    _call: LayerCall | None = field(default=None, init=False)

    def __call__(self, stream: Stream, rows: Rows) -> Stream:
        """Return the stream after this layer."""
        if self._call is not None and rows.suit_one_call:
            return Stream(self._call(stream.settle(), rows.layout, rows.angles))
        if row_kernels(stream.x_RD) is FORMULAS:
            return Stream(self._run(stream.settle(), rows))
        return self._run_in_kernels(stream, rows)

    def _run_in_kernels(self, stream: Stream, rows: Rows) -> Stream:
        """Run the layer with one kernel for each sum, the norm beside it and the rounding for the next linear layer."""
        x_RD, inner_RD = stream.read(self.attention_in, self.dtype)
        attended = _normed(self.attention_out, self.mix(inner_RD, rows))
        if self.attention_inner_sum is not None:
            attended = self.attention_inner_sum(x_RD, attended)
        x_RD, inner_RD = self._add(self.attention_sum, x_RD, attended).read(self.mlp_in, self.dtype)
        return self._add(self.mlp_sum, x_RD, _normed(self.mlp_out, self.mlp(inner_RD, rows.lora_mask_RK)))

    def _add(self, norm: Norm | None, x_RD: Tensor, added_RD: Tensor) -> Stream:
        if norm is None:
            return Stream(x_RD, added_RD)
        x_RD, narrow_RD = norm.in_both(x_RD, added_RD, self.dtype)
        return Stream(x_RD, narrow_RD=narrow_RD)

    def _run(self, x_RD: Tensor, rows: Rows) -> Tensor:
        attended = _normed(self.attention_out, self.mix(_normed(self.attention_in, x_RD), rows))
        if self.attention_inner_sum is not None:
            attended = self.attention_inner_sum(x_RD, attended)
        return self._feed_forward(added(self.attention_sum, x_RD, attended), rows.lora_mask_RK)

    def _feed_forward(self, x_RD: Tensor, lora_mask_RK: Tensor | None) -> Tensor:
        """Run the second half of a layer. On a CPU in blocks of rows, so that intermediate results stay in the cache."""
        if x_RD.is_cuda or x_RD.shape[0] <= MAX_BLOCK:
            return added(self.mlp_sum, x_RD, _normed(self.mlp_out, self.mlp(_normed(self.mlp_in, x_RD), lora_mask_RK)))
        out_RD = torch.empty_like(x_RD)
        for start in range(0, x_RD.shape[0], MAX_BLOCK):
            rows = slice(start, start + MAX_BLOCK)
            out_RD[rows] = self._feed_forward(x_RD[rows], None if lora_mask_RK is None else lora_mask_RK[rows])
        return out_RD

    def join_parts(self) -> LayerCall | None:
        """Run as one call from now on, where our own kernels have all parts, and return it; else None.

        Weights in int8 must be rounded by now.
        """
        own, mix, mlp = kernels(), self.mix, self.mlp
        if own is None or not isinstance(mix, Attention) or not isinstance(mlp, FeedForward):
            return None
        qkv, out, up, down = (each.packed for each in (mix.qkv, mix.out, mlp.up, mlp.down))
        if qkv is None or out is None or up is None or down is None:
            return None
        if mix.whole_norm is not None or mix.scores.softcap is not None or mlp.gate not in (None, *FUSED):
            return None
        scores, dtype = mix.scores, mix.qkv.out_dtype
        layer = structs.Layer(
            dtype == torch.bfloat16, _structure(self.attention_in), qkv.product, structs.address(mix.head_norm_NH), mix.eps,
            mix.num_heads, mix.num_kv_heads, mix.head_width, KIND_NUMBERS[own.attention_kind(dtype)],
            scores.scale, scores.causal, -1 if scores.window is None else scores.window,
            None if scores.tables is None else scores.tables.address, mix.rotary,
            out.product, *map(_structure, (self.attention_out, self.attention_inner_sum, self.attention_sum, self.mlp_in)),
            up.product, -1 if mlp.gate is None else FUSED[mlp.gate],
            down.product, _structure(self.mlp_out), _structure(self.mlp_sum),
        )  # fmt: skip
        self._call = LayerCall(own, [layer], scores.bias)
        return self._call


def _structure(norm: Norm | None) -> structs.Norm:
    return structs.Norm() if norm is None else norm.structure()


def _normed(norm: Norm | None, x_RD: Tensor) -> Tensor:
    return x_RD if norm is None else norm(x_RD)


def added(norm: Norm | None, x_RD: Tensor, added_RD: Tensor) -> Tensor:
    """Return the norm of a sum, or the sum itself."""
    return x_RD + added_RD if norm is None else norm(x_RD, added_RD)
