"""Structures that C++ reads. Those of `native/structs.h` have the same names, members and types.

All members have 8 bytes, or are structures of such. A library tells the layout that it was compiled with.
"""

import ctypes
from typing import Any, Final

import torch
from torch import Tensor

_INT, _POINTER, _DOUBLE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
_TYPES: Final[dict[Any, str]] = {_INT: "int", _POINTER: "pointer", _DOUBLE: "double"}


class Weight(ctypes.Structure):
    _fields_ = (
        ("units", _POINTER), ("bias", _POINTER), ("scales", _POINTER), ("column_sums", _POINTER), ("factors", _POINTER),
        ("inner", _INT), ("columns", _INT),
    )  # fmt: skip


class Product(ctypes.Structure):
    _fields_ = (("kind", _INT), ("activation", _INT), ("weight", Weight))


class Norm(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("eps", _DOUBLE), ("centred", _INT))


class Rotation(ctypes.Structure):
    _fields_ = (("cos", _POINTER), ("sin", _POINTER), ("pairs", _INT))


class Positions(ctypes.Structure):
    _fields_ = (("keys", _POINTER), ("queries", _POINTER), ("count", _INT), ("rows", _POINTER), ("reach", _INT))


class Heads(ctypes.Structure):
    _fields_ = (("data", _POINTER), ("row_stride", _INT), ("head_stride", _INT))


class Attention(ctypes.Structure):
    _fields_ = (
        ("kind", _INT), ("narrow", _INT), ("q", Heads), ("k", Heads), ("v", Heads), ("out", _POINTER), ("out_stride", _INT),
        ("num_seqs", _INT), ("seqs", _POINTER), ("num_heads", _INT), ("num_key_heads", _INT), ("head_width", _INT),
        ("scale", _DOUBLE), ("causal", _INT), ("window", _INT), ("bias", _POINTER), ("bias_stride", _INT),
        ("positions", _POINTER),
    )  # fmt: skip


class Layer(ctypes.Structure):
    _fields_ = (
        ("narrow", _INT), ("attention_in", Norm), ("qkv", Product), ("head_norm", _POINTER), ("head_eps", _DOUBLE),
        ("num_heads", _INT), ("num_key_heads", _INT), ("head_width", _INT), ("attention_kind", _INT),
        ("score_scale", _DOUBLE), ("causal", _INT), ("window", _INT), ("positions", _POINTER), ("rotary", _INT),
        ("out", Product), ("attention_out", Norm), ("attention_inner_sum", Norm), ("attention_sum", Norm), ("mlp_in", Norm),
        ("up", Product), ("gate", _INT), ("down", Product), ("mlp_out", Norm), ("mlp_sum", Norm),
    )  # fmt: skip


class Batch(ctypes.Structure):
    _fields_ = (
        ("rows", _INT), ("num_seqs", _INT), ("seqs", _POINTER), ("rotations", _POINTER), ("bias", _POINTER),
        ("bias_stride", _INT),
    )  # fmt: skip


STRUCTS: Final = (Weight, Product, Norm, Rotation, Positions, Heads, Attention, Layer, Batch)


def layout() -> str:
    """Return a line for each member: name and size of its structure, its own name, type and offset."""
    return "".join(
        f"{struct.__name__} of {ctypes.sizeof(struct)} bytes: {name}, {_TYPES.get(kind, 'struct')} at {at}\n"
        for struct in STRUCTS
        for name, kind, at in ((field[0], field[1], getattr(struct, field[0]).offset) for field in struct._fields_)
    )


def heads(x_RNH: Tensor) -> Heads:
    """Return the rows of heads, each of which is contiguous."""
    return Heads(x_RNH.data_ptr(), x_RNH.stride(0), x_RNH.stride(1))


def rotation(angles: tuple[Tensor, Tensor, bool] | None) -> Rotation:
    """Return the angles of rows, cosines and sines that are not interleaved, or those that turn nothing."""
    return Rotation() if angles is None else Rotation(angles[0].data_ptr(), angles[1].data_ptr(), angles[0].shape[1])


def band_fields(band_ND: Tensor | None) -> tuple[int | None, int]:
    """Return the address of the first head's bias of distance 0, and the numbers from a head to the next."""
    if band_ND is None:
        return None, 0
    assert band_ND.dtype == torch.float32
    assert band_ND.is_contiguous()
    width = band_ND.shape[1]
    return band_ND.data_ptr() + width // 2 * band_ND.element_size(), width


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
