"""Whole layers of a transformer in one call of our own kernels.

A call from Python costs some 17 microseconds with cold caches, which for one short text is a quarter of its time. The bits are
those of the calls that it stands for. The structures are those of `native/layer.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from whimbrel.model.ops.attention import AttentionLayout, ScoreOptions, reach_of
from whimbrel.model.ops.kernels import FUSED, KIND_NUMBERS, Kernels, PackedLinear, band_fields
from whimbrel.model.ops.linear import Norm
from whimbrel.model.ops.positions import Angles
from whimbrel.types.heads import Activation

_LONG, _POINTER, _DOUBLE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class _Product(ctypes.Structure):
    _fields_ = (
        ("kind", _LONG), ("activation", _LONG), ("units", _POINTER), ("bias", _POINTER), ("scales", _POINTER),
        ("column_sums", _POINTER), ("factors", _POINTER), ("inner", _LONG), ("columns", _LONG),
    )  # fmt: skip


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("eps", _DOUBLE), ("centred", _LONG))


class _Layer(ctypes.Structure):
    _fields_ = (
        ("narrow", _LONG), ("attention_in", _Norm), ("qkv", _Product), ("head_norm", _POINTER), ("head_eps", _DOUBLE),
        ("num_heads", _LONG), ("num_key_heads", _LONG), ("head_width", _LONG), ("attention_kind", _LONG),
        ("score_scale", _DOUBLE), ("causal", _LONG), ("window", _LONG), ("positions", _POINTER),
        ("rotary", _LONG), ("out", _Product),
        ("attention_out", _Norm), ("attention_inner_sum", _Norm), ("attention_sum", _Norm), ("mlp_in", _Norm), ("up", _Product),
        ("gate", _LONG), ("down", _Product), ("mlp_out", _Norm), ("mlp_sum", _Norm),
    )  # fmt: skip


class _Rotation(ctypes.Structure):
    _fields_ = (("cos", _POINTER), ("sin", _POINTER), ("pairs", _LONG))


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


_NO_NORM: Final = _Norm(None, None, 0.0, 0)


class LayerCall:
    """Layers that run in one call, one after another. Their parts must stay as they are, and all have the same bias."""

    def __init__(self, own: Kernels, layers: Sequence[LayerParts]) -> None:
        self._parts = layers  # their tensors must live on
        self._run = own.layers
        self._layers = (_Layer * len(layers))(*(_layer(own, parts) for parts in layers))
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
        rotations = (_Rotation * len(angles))(*map(_rotation, angles))
        band_ND = None if self._bias is None else self._bias.band(reach_of(seqs_B5))
        failed = self._run(
            self._address, len(self._layers), x_RD.data_ptr(), num_rows,
            len(seqs_B5), seqs_B5.ctypes.data, rotations, *band_fields(band_ND), out_RD.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError("a layer needs more memory than there is")
        return out_RD


def _layer(own: Kernels, parts: LayerParts) -> _Layer:
    scores = parts.scores
    assert scores.softcap is None
    return _Layer(
        parts.dtype == torch.bfloat16, _norm(parts.attention_in), _product(parts.qkv),
        None if parts.head_norm_NH is None else parts.head_norm_NH.data_ptr(), parts.head_eps,
        parts.num_heads, parts.num_key_heads, parts.head_width, KIND_NUMBERS[own.attention_kind(parts.dtype)],
        scores.scale, scores.causal, -1 if scores.window is None else scores.window,
        None if scores.tables is None else scores.tables.address, parts.rotary,
        _product(parts.out), _norm(parts.attention_out), _norm(parts.attention_inner_sum), _norm(parts.attention_sum),
        _norm(parts.mlp_in), _product(parts.up), -1 if parts.gate is None else FUSED[parts.gate],
        _product(parts.down), _norm(parts.mlp_out), _norm(parts.mlp_sum),
    )  # fmt: skip


def _rotation(angles: Angles | None) -> _Rotation:
    if angles is None:
        return _Rotation()
    cos_RF, sin_RF, _ = angles
    return _Rotation(cos_RF.data_ptr(), sin_RF.data_ptr(), cos_RF.shape[1])


def _product(linear: PackedLinear) -> _Product:
    return _Product(*linear.fields)


def _norm(norm: Norm | None) -> _Norm:
    if norm is None:
        return _NO_NORM
    bias = None if norm.bias_D is None else norm.bias_D.data_ptr()
    return _Norm(norm.weight_D.data_ptr(), bias, norm.eps, norm.centred)
