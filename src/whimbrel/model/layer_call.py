"""Whole layers of a transformer in one call of our own kernels.

A call from Python costs some 17 microseconds with cold caches, which for one short text is a quarter of its time. The bits are
those of the calls that it stands for. `native/layer.h` runs it.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whimbrel.model.kernels import structs
from whimbrel.model.kernels.library import FUSED, KIND_NUMBERS, Kernels
from whimbrel.model.kernels.products import PackedLinear
from whimbrel.model.ops.attention import AttentionLayout, ScoreOptions, reach_of
from whimbrel.model.ops.linear import Norm
from whimbrel.model.ops.positions import Angles
from whimbrel.types.heads import Activation


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """Parts of a layer in the order in which they run. A norm may be None: there is none."""

    dtype: torch.dtype
    """That of numbers between products, float32 or bfloat16."""
    attention_in: Norm | None
    qkv: PackedLinear
    head_norm_NH: Tensor | None
    head_eps: float
    num_heads: int
    num_key_heads: int
    head_width: int
    scores: ScoreOptions
    rotary: int
    """Index of its angles among those that a call gets."""
    out: PackedLinear
    attention_out: Norm | None
    attention_inner_sum: Norm | None
    attention_sum: Norm | None
    mlp_in: Norm | None
    up: PackedLinear
    gate: Activation | None
    """Activation of the gate; None: `up` has no gate."""
    down: PackedLinear
    mlp_out: Norm | None
    mlp_sum: Norm | None


class LayerCall:
    """Layers that run in one call, one after another. Their parts must stay as they are, and all have the same bias."""

    def __init__(self, own: Kernels, layers: Sequence[LayerParts]) -> None:
        self._parts = layers  # their tensors must live on
        self._run = own.layers
        self._layers = (structs.Layer * len(layers))(*(_layer(own, parts) for parts in layers))
        self._address = ctypes.addressof(self._layers)
        self._bias = layers[0].scores.bias
        assert all(parts.scores.bias is self._bias for parts in layers)

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
        rotations = (structs.Rotation * len(angles))(*map(_rotation, angles))
        band_ND = None if self._bias is None else self._bias.band(reach_of(seqs_B5))
        batch = structs.Batch(
            num_rows, len(seqs_B5), seqs_B5.ctypes.data, ctypes.addressof(rotations), *structs.band_fields(band_ND)
        )
        failed = self._run(self._address, len(self._layers), x_RD.data_ptr(), ctypes.byref(batch), out_RD.data_ptr())
        if failed:
            raise MemoryError("a layer needs more memory than there is")
        return out_RD


def _layer(own: Kernels, parts: LayerParts) -> structs.Layer:
    scores = parts.scores
    assert scores.softcap is None
    return structs.Layer(
        parts.dtype == torch.bfloat16, _norm(parts.attention_in), parts.qkv.product,
        structs.address(parts.head_norm_NH), parts.head_eps,
        parts.num_heads, parts.num_key_heads, parts.head_width, KIND_NUMBERS[own.attention_kind(parts.dtype)],
        scores.scale, scores.causal, -1 if scores.window is None else scores.window,
        None if scores.tables is None else scores.tables.address, parts.rotary,
        parts.out.product, _norm(parts.attention_out), _norm(parts.attention_inner_sum), _norm(parts.attention_sum),
        _norm(parts.mlp_in), parts.up.product, -1 if parts.gate is None else FUSED[parts.gate],
        parts.down.product, _norm(parts.mlp_out), _norm(parts.mlp_sum),
    )  # fmt: skip


def _rotation(angles: Angles | None) -> structs.Rotation:
    return structs.Rotation() if angles is None else structs.rotation(*angles[:2])


def _norm(norm: Norm | None) -> structs.Norm:
    if norm is None:
        return structs.Norm()
    return structs.Norm(norm.weight_D.data_ptr(), structs.address(norm.bias_D), norm.eps, norm.centred)
