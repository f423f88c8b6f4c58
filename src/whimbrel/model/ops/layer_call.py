"""A whole layer of a transformer in one call of our own kernels.

A call from Python costs some 17 microseconds with cold caches, which for one short text is a quarter of its time. The bits are
those of the calls that it stands for. The structures are those of `native/layer.h`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from whimbrel.model.ops.attention import AttentionLayout, ScoreOptions
from whimbrel.model.ops.kernels import FUSED, KIND_NUMBERS, Kernels, PackedLinear
from whimbrel.model.ops.linear import Norm
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
        ("score_scale", _DOUBLE), ("causal", _LONG), ("window", _LONG), ("out", _Product), ("attention_out", _Norm),
        ("attention_inner_sum", _Norm), ("attention_sum", _Norm), ("mlp_in", _Norm), ("up", _Product), ("gate", _LONG),
        ("down", _Product), ("mlp_out", _Norm), ("mlp_sum", _Norm),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """Parts of a layer in the order in which they run. A norm may be None: there is none."""

    attention_in: Norm | None
    qkv: PackedLinear
    head_norm_NH: Tensor | None
    head_eps: float
    num_heads: int
    num_key_heads: int
    head_width: int
    scores: ScoreOptions
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
    """A layer that runs in one call. Its parts must stay as they are."""

    def __init__(self, own: Kernels, parts: LayerParts, dtype: torch.dtype) -> None:
        """`dtype` is that of numbers between products, float32 or bfloat16."""
        scores = parts.scores
        assert scores.bias is None
        assert scores.softcap is None
        self._parts = parts  # its tensors must live on
        self._run = own.layer
        self._layer = _Layer(
            dtype == torch.bfloat16, _norm(parts.attention_in), _product(parts.qkv),
            None if parts.head_norm_NH is None else parts.head_norm_NH.data_ptr(), parts.head_eps,
            parts.num_heads, parts.num_key_heads, parts.head_width, KIND_NUMBERS[own.attention_kind(dtype)],
            scores.scale, scores.causal, -1 if scores.window is None else scores.window,
            _product(parts.out), _norm(parts.attention_out), _norm(parts.attention_inner_sum), _norm(parts.attention_sum),
            _norm(parts.mlp_in), _product(parts.up), -1 if parts.gate is None else FUSED[parts.gate],
            _product(parts.down), _norm(parts.mlp_out), _norm(parts.mlp_sum),
        )  # fmt: skip
        self._address = ctypes.addressof(self._layer)

    def __call__(self, x_RD: Tensor, layout: AttentionLayout, cos_RF: Tensor | None, sin_RF: Tensor | None) -> Tensor:
        """Return the layer's result for rows in float32, all of which belong to seqs of `layout`. Raises MemoryError."""
        assert x_RD.dtype == torch.float32
        assert len(x_RD) == layout.num_tokens
        x_RD = x_RD.contiguous()
        out_RD = torch.empty_like(x_RD)
        seqs_B5 = layout.kernel_seqs
        failed = self._run(
            self._address, x_RD.data_ptr(), len(x_RD), len(seqs_B5), seqs_B5.ctypes.data,
            None if cos_RF is None else cos_RF.data_ptr(), None if sin_RF is None else sin_RF.data_ptr(),
            0 if cos_RF is None else cos_RF.shape[1], out_RD.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError("a layer needs more memory than there is")
        return out_RD


def _product(linear: PackedLinear) -> _Product:
    return _Product(*linear.fields)


def _norm(norm: Norm | None) -> _Norm:
    if norm is None:
        return _NO_NORM
    bias = None if norm.bias_D is None else norm.bias_D.data_ptr()
    return _Norm(norm.weight_D.data_ptr(), bias, norm.eps, norm.centred)
