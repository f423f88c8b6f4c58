"""Kernels of the operations of `rowwise.py` on a GPU. Each reads its rows once and writes its results once.

A program takes one row, or some heads or columns of one row. Numbers are float32 inside; half precision is read and written as
such. Widths and strides are constants of the compiled code, and rows begin at multiples of 16 bytes wherever the width lets
them. So the order of a sum depends on the model alone, neither on the number of rows nor on their place in memory. Loads and
stores are of 16 bytes where 8 divides the widths.

A row of a norm lies in one program's registers, so rows wider than `MAX_WIDTH` are left to the formulas, as is every activation
that is not in `_ACTIVATIONS`.

Shapes: R rows, D columns, N heads, H head width, F rotary frequencies, O columns.
"""

# Triton's language has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportCallIssue=false, reportUntypedFunctionDecorator=false, reportMissingImports=false

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from whimbrel.model.ops.rowwise import Angles, RowKernels, activate_rows, gate_rows, norm_and_rotate_heads, norm_rows
from whimbrel.types.heads import Activation

MAX_WIDTH: Final = 8192
"""Columns of the widest norm."""
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh")
_HEAD_ELEMENTS: Final = 2048
"""Elements of the heads of one program."""
_COLUMNS: Final = 1024
"""Columns of one program of an activation."""


@triton.jit
def _norm_kernel(  # noqa: PLR0917
    x_ptr,
    added_ptr,
    weight_ptr,
    bias_ptr,
    kept_ptr,
    out_ptr,
    eps,
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    ADDED_STRIDE: tl.constexpr,
    CENTRED: tl.constexpr,
    KEEP_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    x = tl.load(x_ptr + row * X_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
    if added_ptr is not None:
        x += tl.load(added_ptr + row * ADDED_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
    if KEEP_SUM:
        tl.store(kept_ptr + row * WIDTH + columns, x, mask=mask)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    if CENTRED:
        x = tl.where(mask, x - tl.sum(x, axis=0) / WIDTH, 0.0)
    variance = tl.sum(x * x, axis=0) / WIDTH + eps
    factor = tl.rsqrt(variance)
    if CENTRED:  # as in the formula, a variance that overflows is detected, and an RMS that does makes zeros
        factor = tl.where(variance < float("inf"), factor, float("nan"))
    x = x * factor * weight
    if bias_ptr is not None:
        x += tl.load(bias_ptr + columns, mask=mask, other=0.0)
    if kept_ptr is not None and not KEEP_SUM:
        tl.store(kept_ptr + row * WIDTH + columns, x, mask=mask)
    tl.store(out_ptr + row * WIDTH + columns, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_pairs(  # noqa: PLR0917
    heads_ptr, has_head, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr
):
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_F)[None, :]
        x = tl.load(heads_ptr + both, mask=has_head & (both < 2 * PAIRS), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (BLOCK_N, BLOCK_F, 2)))
    else:
        pairs = tl.arange(0, BLOCK_F)[None, :]
        mask = has_head & (pairs < PAIRS)
        a = tl.load(heads_ptr + pairs, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(heads_ptr + PAIRS + pairs, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_pairs(  # noqa: PLR0917
    heads_ptr, a, b, has_head, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr
):
    dtype = heads_ptr.dtype.element_ty
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_F)[None, :]
        x = tl.reshape(tl.join(a, b), (BLOCK_N, 2 * BLOCK_F))
        tl.store(heads_ptr + both, x.to(dtype), mask=has_head & (both < 2 * PAIRS))
    else:
        pairs = tl.arange(0, BLOCK_F)[None, :]
        mask = has_head & (pairs < PAIRS)
        tl.store(heads_ptr + pairs, a.to(dtype), mask=mask)
        tl.store(heads_ptr + PAIRS + pairs, b.to(dtype), mask=mask)


@triton.jit
def _heads_kernel(  # noqa: PLR0917
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    ANGLE_STRIDE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    has_head = heads < HEADS
    x_heads = x_ptr + row * ROW_STRIDE + heads * HEAD_STRIDE
    out_heads = out_ptr + row * (HEADS * WIDTH) + heads * WIDTH
    others = 2 * PAIRS + tl.arange(0, BLOCK_REST)[None, :]
    has_other = has_head & (others < WIDTH)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    if PAIRS > 0:
        a, b = _load_pairs(x_heads, has_head, PAIRS, INTERLEAVED, BLOCK_N, BLOCK_F)
        squares += tl.sum(a * a + b * b, axis=1)
    if 2 * PAIRS < WIDTH:
        rest = tl.load(x_heads + others, mask=has_other, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, axis=1)
    if weight_ptr is not None:
        weight_heads = weight_ptr + heads * WIDTH
        factor = tl.rsqrt(squares / WIDTH + eps)[:, None]
        if PAIRS > 0:
            weight_a, weight_b = _load_pairs(weight_heads, has_head, PAIRS, INTERLEAVED, BLOCK_N, BLOCK_F)
            a, b = a * factor * weight_a, b * factor * weight_b
        if 2 * PAIRS < WIDTH:
            rest = rest * factor * tl.load(weight_heads + others, mask=has_other, other=0.0)
    if PAIRS > 0:
        pairs = tl.arange(0, BLOCK_F)[None, :]
        cos = tl.load(cos_ptr + row * ANGLE_STRIDE + pairs, mask=pairs < PAIRS, other=0.0)
        sin = tl.load(sin_ptr + row * ANGLE_STRIDE + pairs, mask=pairs < PAIRS, other=0.0)
        _store_pairs(out_heads, a * cos - b * sin, b * cos + a * sin, has_head, PAIRS, INTERLEAVED, BLOCK_N, BLOCK_F)
    if 2 * PAIRS < WIDTH:
        tl.store(out_heads + others, rest.to(out_ptr.dtype.element_ty), mask=has_other)


@triton.jit
def _activation_kernel(  # noqa: PLR0917
    x_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    x = tl.load(x_ptr + row * X_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 is the sigmoid of 2 u, without the difference of near numbers
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        x = x / (1.0 + tl.exp(-x))
    if GATED:
        x *= tl.load(x_ptr + row * X_STRIDE + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, x.to(out_ptr.dtype.element_ty), mask=mask)


def norm(
    x: Tensor,
    added: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor | None,
    *,
    eps: float,
    centred: bool,
    keep_sum: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Compute `NormRows` for rows of up to `MAX_WIDTH` columns; others by the formula."""
    takes_x = x.ndim == 2 and x.shape[1] <= MAX_WIDTH and x.dtype in _DTYPES
    takes_added = added is None or (added.shape == x.shape and added.dtype in _DTYPES)
    takes_weights = weight_D.ndim == 1 and weight_D.is_contiguous() and (bias_D is None or bias_D.is_contiguous())
    if not (takes_x and takes_added and takes_weights):
        return norm_rows(x, added, weight_D, bias_D, eps=eps, centred=centred, keep_sum=keep_sum, dtype=dtype)
    num_rows, width = x.shape
    x_RD, added_RD = _rows(x), None if added is None else _rows(added)
    out_RD = torch.empty(num_rows, width, dtype=dtype, device=x.device)
    kept_RD = None
    if keep_sum:
        is_kept = added is None and x.dtype == torch.float32
        kept_RD = None if is_kept else torch.empty(num_rows, width, dtype=torch.float32, device=x.device)
    elif dtype != torch.float32:
        kept_RD = torch.empty(num_rows, width, dtype=torch.float32, device=x.device)
    if num_rows:
        block = triton.next_power_of_2(width)
        _launch(
            _norm_kernel, (num_rows, 1, 1), (x_RD, added_RD, weight_D, bias_D, kept_RD, out_RD, eps),
            (
                width, x_RD.stride(0), 0 if added_RD is None else added_RD.stride(0),
                centred, keep_sum and kept_RD is not None, block,
            ),
            num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    if kept_RD is not None:
        return kept_RD, out_RD
    return x if keep_sum else out_RD, out_RD


def norm_and_rotate(x_RNH: Tensor, weight_NH: Tensor | None, eps: float, angles: Angles | None) -> Tensor:
    """Return the RMS norm of every head, rotated, in a new tensor of the dtype of x. Strides of heads and rows are free."""
    if x_RNH.dtype not in _DTYPES:
        return norm_and_rotate_heads(x_RNH, weight_NH, eps, angles)
    if weight_NH is None and angles is None:
        return x_RNH
    num_rows, num_heads, width = x_RNH.shape
    x_RNH = _rows(x_RNH)
    cos_RF, sin_RF, interleaved = (None, None, False) if angles is None else (_rows(angles[0]), _rows(angles[1]), angles[2])
    if cos_RF is not None and sin_RF is not None and cos_RF.stride() != sin_RF.stride():
        cos_RF, sin_RF = cos_RF.contiguous(), sin_RF.contiguous()
    pairs, angle_stride = (0, 0) if cos_RF is None else (cos_RF.shape[1], cos_RF.stride(0))
    weight_NH = None if weight_NH is None else weight_NH.contiguous()
    out_RNH = x_RNH.new_empty(num_rows, num_heads, width)
    block_n = max(1, min(triton.next_power_of_2(num_heads), _HEAD_ELEMENTS // triton.next_power_of_2(width)))
    if num_rows:
        _launch(
            _heads_kernel, (num_rows, -(-num_heads // block_n), 1), (x_RNH, weight_NH, cos_RF, sin_RF, out_RNH, eps),
            (
                num_heads, width, pairs, x_RNH.stride(0), x_RNH.stride(1), angle_stride, interleaved,
                block_n, triton.next_power_of_2(max(pairs, 1)), triton.next_power_of_2(max(width - 2 * pairs, 1)),
            ),
            num_warps=4,
        )  # fmt: skip
    return out_RNH


def gate(x_RO: Tensor, activation: Activation) -> Tensor:
    """Return activation(first half) * second half of each row, rounded once; other activations by the formula."""
    if not _takes(x_RO, activation):
        return gate_rows(x_RO, activation)
    x_RO = _rows(x_RO)
    out_RI = x_RO.new_empty(x_RO.shape[0], x_RO.shape[1] // 2)
    _activate(x_RO, out_RI, activation, gated=True)
    return out_RI


def activate(x_RO: Tensor, activation: Activation) -> Tensor:
    """Write activation(x) over x, and return it; other activations by the formula."""
    if not _takes(x_RO, activation) or not x_RO.is_contiguous():
        return activate_rows(x_RO, activation)
    _activate(x_RO, x_RO, activation, gated=False)
    return x_RO


def _takes(x_RO: Tensor, activation: Activation) -> bool:
    return activation in _ACTIVATIONS and x_RO.ndim == 2 and x_RO.dtype in _DTYPES


def _activate(x_RO: Tensor, out_RI: Tensor, activation: Activation, *, gated: bool) -> None:
    num_rows, width = out_RI.shape
    if num_rows and width:
        grid = num_rows, -(-width // _COLUMNS), 1
        _launch(_activation_kernel, grid, (x_RO, out_RI), (width, x_RO.stride(0), activation, gated, _COLUMNS), num_warps=4)


_compiled: Final[dict[tuple[object, ...], Any]] = {}
"""Compiled kernels, by all that they were compiled for."""


def _launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Tensor | float | None, ...],
    constants: tuple[int | str, ...],
    *,
    num_warps: int,
) -> None:
    """Launch a kernel, at first through Triton, whose look at each argument takes the host longer than the launch, then not."""
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    types = [each.dtype if isinstance(each, Tensor) else each is None for each in arguments]
    key = (id(kernel), tensors[0].get_device(), *types, *constants)
    is_aligned = not any(each.data_ptr() % 16 for each in tensors)
    if is_aligned and (compiled := _compiled.get(key)) is not None:
        compiled[grid](*arguments, *constants)
        return
    compiled = kernel[grid](*arguments, *constants, num_warps=num_warps, enable_fp_fusion=True)
    if is_aligned and compiled is not None:  # the interpreter returns None
        _compiled[key] = compiled


def _rows(x: Tensor) -> Tensor:
    """Return x with adjacent columns, and at a multiple of 16 bytes, as the compiled code expects."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.contiguous().clone()


KERNELS: Final = RowKernels(norm, norm_and_rotate, gate, activate)
