"""Attention over a ragged batch. The implementation depends on device, dtype and score options.

- CPU, no caps: our own kernel over the ragged batch, where there is one (`model/kernels`).
- Else on a CPU, and float32 on any device: SDPA over groups of equal length, in float32, which is faster there than bfloat16.
- Else on a CPU in bfloat16, seqs of 97 to 896 tokens, no mask: two matrix products and a softmax, faster than SDPA.
- Scores of relative positions: our own kernel, or the formula (`disentangled.py`).
- Capped scores: the plain formula, 256 queries at a time. SDPA runs long seqs with a bias in the same steps.
- GPU in half precision: the flash attention that PyTorch brings, over the ragged batch. It supports windows, but neither biases
  nor caps, nor heads wider than 256. It aligns the last keys with the last queries, so windows need all keys.
- There the other forms of scores up to 256 columns, and seqs after prefixes: our own kernel in Triton (`attention_ragged.py`).
  Each form has to pass a self-test on the device; else, and on cards before Ampere, groups of equal length are computed.
- Seqs after a prefix, and pieces of a long text, attend to kept keys too (`kept_keys.py`), with a mask of absolute positions.
  Behind a window they leave out the keys that none of their queries sees. After many kept keys a CPU needs no mask: attention
  to the kept ones and to the own ones are joined by the logarithms of their sums of exponentials.

Shapes: R rows, T tokens, B seqs, L tokens of a seq, Q queries, K keys (or key heads), N query heads, H head width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, Final, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.model.kernels.library import kernels, turned_off
from whimbrel.model.ops.attention_ragged import DeviceTiles, Variant, attend_ragged, follows_prefixes, variant_of
from whimbrel.model.ops.disentangled import PositionTables, attend_disentangled
from whimbrel.model.ops.kept_keys import AfterPrefixes, KeptKeys, KeySource
from whimbrel.model.ops.memory import is_out_of_memory
from whimbrel.model.ops.positions import Bias, alibi, relative
from whimbrel.types.arrays import Int64Array
from whimbrel.types.batch_memory import MAX_MASK_ELEMENTS, MAX_MASKED_KEYS, MAX_PRODUCT_LENGTH, QUERIES_AT_A_TIME


@dataclass(frozen=True, eq=False)
class AttentionLayout:
    """Layout of the seqs among the rows of a batch."""

    cu_seqlens: Tensor
    """B + 1 offsets, int32, on the device."""
    equal_length_groups: Sequence[tuple[int, int, int, int]]
    """(first token, number of seqs, length, attended tokens) of each run of seqs that are equal in the last two."""
    num_tokens: int
    max_seqlen: int
    num_attended_B: Tensor | None = None
    """Number of leading tokens of each seq that are attended to, int32, on the device; None: all."""
    adapters_R: Tensor | None = None
    """Index of each row's adapter, on the device, -1 for none; None: no row uses an adapter."""
    masks: dict[tuple[object, ...], Tensor] = field(default_factory=dict[tuple[object, ...], Tensor])
    """Cache of `_cached_mask` for this batch: layers with equal masks share them."""
    sources: Mapping[int, KeySource] = field(default_factory=dict[int, KeySource])
    """Sources of keys of groups that attend to more than their own rows, or whose keys are kept, by the group's first token.

    They run in order, so a group may attend to what one before it keeps."""
    tiles: list[DeviceTiles] = field(default_factory=list["DeviceTiles"])
    """Tiles of the ragged kernel, made by the first layer that needs them; empty before."""
    pieces: Sequence[tuple[slice, AttentionLayout]] = ()
    """Rows and layout of each piece of a text that every layer runs piece by piece; empty: all rows at once."""

    @cached_property
    def kernel_seqs(self) -> Int64Array:
        """The seqs as `Kernels.attend` takes them."""
        rows = [
            (start + i * length, length, start + i * length, keys, 0)
            for start, count, length, keys in self.equal_length_groups
            for i in range(count)
        ]
        return np.array(rows, np.int64).reshape(-1, 5)


@dataclass(frozen=True, slots=True, eq=False)
class ScoreOptions:
    scale: float
    """Above 0: kernels subtract the greatest product before they multiply."""
    causal: bool = False
    """Mask the tokens after each token."""
    window: int | None = None
    """Attention window: tokens before each token, and unless causal as many after it. None: all tokens."""
    softcap: float | None = None
    """Cap of the scores: softcap * tanh(scores / softcap)."""
    bias: Bias | None = None
    tables: PositionTables | None = None
    """Relative positions that contents are scored against; neither keys are kept nor scores masked then."""
    layer: int = 0
    """Number of the layer, by which keys are kept."""

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"attention scores are scaled by {self.scale}, which must be above 0")
        if self.tables is not None and (self.causal or self.window or self.softcap or self.bias):
            raise ValueError("attention to relative positions has no masks, caps or biases")

    @property
    def plain(self) -> bool:
        masked = self.causal or self.window is not None
        return not masked and self.softcap is None and self.bias is None and self.tables is None


LayerHook: TypeAlias = Callable[[], None] | None
"""Function that a model calls between any two layers, and between any two pieces of a layer; None: there is none."""
_Masks: TypeAlias = dict[tuple[object, ...], Tensor]

_PRODUCT_LENGTHS: Final = range(97, MAX_PRODUCT_LENGTH + 1)
_FLASH_DTYPES: Final = (torch.bfloat16, torch.float16)
_FLASH_STEP: Final = 8
"""Divisor of the head widths that flash attention takes."""
_MAX_FLASH_WIDTH: Final = 256
_MAX_FLASH_SEQS: Final = 65_535
"""Limit of seqs, each of which is a row of a launch's second dimension."""
_RAGGED_TOLERANCE: Final = 0.05
"""Limit of the difference in the self-test, whose values are about 1 and are rounded to bfloat16 on their way."""

_log = logging.getLogger("whimbrel")


def attend(q_RNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, layout: AttentionLayout, scores: ScoreOptions) -> Tensor:
    """Return softmax(scores) v within each seq, (R, N * H) in the dtype of v. Rows after the tokens are 0. K divides N."""
    if v_RKH.dtype in _FLASH_DTYPES and _has_flash(v_RKH.device):
        flash = _suits_flash(v_RKH, layout, scores)
        if _is_on_gpu(v_RKH) and (not flash or follows_prefixes(layout)):
            variant = variant_of(v_RKH, layout, scores)
            if variant is not None and _has_ragged(v_RKH.device, variant):
                return attend_ragged(q_RNH, k_RKH, v_RKH, layout, scores)
        if flash:
            return _attend_varlen(q_RNH, k_RKH, v_RKH, layout, scores)
    uncapped = scores.softcap is None and v_RKH.dtype in (torch.float32, torch.bfloat16)
    if uncapped and not v_RKH.is_cuda and kernels() is not None:
        return _attend_own(q_RNH, k_RKH, v_RKH, layout, scores)
    return _attend_runs(q_RNH, k_RKH, v_RKH, layout, scores)


def _attend_own(q_RNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, layout: AttentionLayout, scores: ScoreOptions) -> Tensor:
    own = kernels()
    assert own is not None
    dtype, seqs_B5 = v_RKH.dtype, layout.kernel_seqs
    q_RNH, k_RKH, v_RKH = (
        x if x.dtype == dtype and x.stride(-1) == 1 else x.to(dtype).contiguous() for x in (q_RNH, k_RKH, v_RKH)
    )
    out_RNH = v_RKH.new_empty(q_RNH.shape)
    out_RNH[layout.num_tokens :] = 0
    tables = None if scores.tables is None else scores.tables.address

    def attend_in(seqs_B5: Int64Array, k_XKH: Tensor, v_XKH: Tensor) -> None:
        band_ND = None if scores.bias is None else scores.bias.band(reach_of(seqs_B5))
        options: Any = {"scale": scores.scale, "causal": scores.causal, "window": scores.window, "tables": tables}
        own.attend(q_RNH, k_XKH, v_XKH, out_RNH, seqs_B5, band_ND=band_ND, **options)

    if not layout.sources:
        attend_in(seqs_B5, k_RKH, v_RKH)
        return out_RNH.flatten(1)
    number = 0
    for start, count, length, _ in layout.equal_length_groups:
        seqs = seqs_B5[number : number + count]
        number += count
        if (source := layout.sources.get(start)) is None:
            attend_in(seqs, k_RKH, v_RKH)
            continue
        rows = slice(start, start + count * length)
        k_BLKH, v_BLKH = source(scores.layer, *(x[rows].view(count, length, *x.shape[1:]) for x in (k_RKH, v_RKH)))
        attend_in(_with_keys(seqs, k_BLKH), k_BLKH[0], v_BLKH[0])
    return out_RNH.flatten(1)


def reach_of(seqs_B5: Int64Array) -> int:
    """Return a distance that no key has from a query."""
    return int(np.maximum(seqs_B5[:, 1] + seqs_B5[:, 4], seqs_B5[:, 3]).max(initial=1))


def _with_keys(seqs_B5: Int64Array, k_BLKH: Tensor) -> Int64Array:
    """Return the seqs with the keys in `k_BLKH`, which end with their own."""
    seqs_B5 = seqs_B5.copy()
    seqs_B5[:, 2] = np.arange(len(seqs_B5)) * (k_BLKH.stride(0) // k_BLKH.stride(1))
    seqs_B5[:, 3] = k_BLKH.shape[1]
    seqs_B5[:, 4] = k_BLKH.shape[1] - seqs_B5[:, 1]
    return seqs_B5


def _attend_runs(q_RNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, layout: AttentionLayout, scores: ScoreOptions) -> Tensor:
    num_heads, width = q_RNH.shape[1:]
    out_RNH = v_RKH.new_empty(q_RNH.shape)
    out_RNH[layout.num_tokens :] = 0
    products = v_RKH.dtype == torch.bfloat16 and not v_RKH.is_cuda and scores.plain and num_heads == v_RKH.shape[1]
    floats: list[Tensor] = []
    for start, count, length, keys in layout.equal_length_groups:
        rows = slice(start, start + count * length)
        out_BLNH = out_RNH[rows].view(count, length, num_heads, width)
        if products and keys == length in _PRODUCT_LENGTHS:
            for i, out_LNH in enumerate(out_BLNH):
                seq = slice(start + i * length, start + (i + 1) * length)
                out_LNH.copy_(_products(q_RNH[seq], k_RKH[seq], v_RKH[seq], scores.scale))
            continue
        # Once for all groups. With other widths, SDPA's bits would depend on the batch.
        floats = floats or [_pad_width(x.float(), 4) for x in (q_RNH, k_RKH, v_RKH)]
        q, k, v = (x[rows].view(count, length, *x.shape[1:]) for x in floats)
        if (source := layout.sources.get(start)) is not None:
            k, v = source(scores.layer, k, v)
        else:
            k, v = k[:, :keys], v[:, :keys]
        if scores.tables is not None:
            q, k, v = (x[..., :width] for x in (q, k, v))
            out_BLNH.copy_(attend_disentangled(q, k, v, scores.tables, scale=scores.scale))
            continue
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attended_BNLH = _attend_group(q, k, v, scores, layout.masks)
        out_BLNH.copy_(attended_BNLH[..., :width].transpose(1, 2))
    return out_RNH.flatten(1)


def _attend_group(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, scores: ScoreOptions, masks: _Masks) -> Tensor:
    num_kept = k_BKLH.shape[2] - q_BNLH.shape[2]
    if scores.causal and scores.window is not None and scores.bias is None and num_kept > scores.window:
        k_BKLH, v_BKLH = (x[:, :, num_kept - scores.window :] for x in (k_BKLH, v_BKLH))
    if scores.softcap is not None:
        return _capped(q_BNLH, k_BKLH, v_BKLH, scores)
    if num_kept > MAX_MASKED_KEYS and not q_BNLH.is_cuda and scores.window is None and scores.bias is None:
        return _joined(q_BNLH, k_BKLH, v_BKLH, num_kept, scores.scale)
    return _sdpa(q_BNLH, k_BKLH, v_BKLH, scores, masks)


def _joined(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, num_kept: int, scale: float) -> Tensor:
    """Attend to all kept keys, and causally to the own ones, on a CPU. Each part has the weight of its sum of exponentials."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # SDPA's own, which returns these sums too
    kept, own = slice(num_kept), slice(num_kept, None)
    kept_BNLH, kept_sums_BNL = flash(q_BNLH, k_BKLH[:, :, kept], v_BKLH[:, :, kept], scale=scale)
    own_BNLH, own_sums_BNL = flash(q_BNLH, k_BKLH[:, :, own], v_BKLH[:, :, own], is_causal=True, scale=scale)
    return torch.lerp(own_BNLH, kept_BNLH, torch.sigmoid(kept_sums_BNL - own_sums_BNL)[..., None])


def _pad_width(x_RNH: Tensor, step: int) -> Tensor:
    """Return heads of a width that `step` divides, with zeros added."""
    missing = -x_RNH.shape[-1] % step
    return F.pad(x_RNH, (0, missing)) if missing else x_RNH


def _sdpa(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, scores: ScoreOptions, masks: _Masks) -> Tensor:
    length, keys = q_BNLH.shape[2], k_BKLH.shape[2]
    before = max(0, keys - length)
    causal = scores.causal and scores.window is None and scores.bias is None and keys == length
    if not causal and not scores.plain:  # with a mask, SDPA's bits would depend on the batch
        q_BNLH, k_BKLH, v_BKLH = q_BNLH.contiguous(), k_BKLH.contiguous(), v_BKLH.contiguous()
    step = QUERIES_AT_A_TIME if scores.bias is not None and length > 2 * QUERIES_AT_A_TIME else length

    def mask(first: int) -> Tensor | None:
        bounds = (before + first, before + min(first + step, length), keys)
        mask_NQK = None if causal else _cached_mask(masks, scores, bounds, q_BNLH.device)
        # Four dimensions choose SDPA's fast kernel; with a bias its bits depend on the batch, those of plain products do not.
        return mask_NQK if mask_NQK is None or scores.bias is not None else mask_NQK[None]

    parts = [
        F.scaled_dot_product_attention(
            q_BNLH[:, :, first : first + step], k_BKLH, v_BKLH,
            attn_mask=mask(first),
            is_causal=causal and length > 1,
            scale=scores.scale,
            enable_gqa=q_BNLH.shape[1] != k_BKLH.shape[1],
        )
        for first in range(0, length, step)
    ]  # fmt: skip
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _cached_mask(masks: _Masks, scores: ScoreOptions, bounds: tuple[int, int, int], device: torch.device) -> Tensor | None:
    """Return the mask for the bounds (first, last, keys), cached for layers with equal masks unless it is too large."""
    key = (scores.causal, scores.window, scores.bias, bounds)
    if (cached := masks.get(key)) is not None:
        return cached
    mask = _mask(scores, *bounds, device)
    if mask is not None:
        whole, num_cached = mask.shape[0] * mask.shape[2] ** 2, sum(each.numel() for each in masks.values())
        if max(whole, num_cached + mask.numel()) <= MAX_MASK_ELEMENTS:
            masks[key] = mask
    return mask


def _mask(scores: ScoreOptions, first: int, last: int, num_keys: int, device: torch.device) -> Tensor | None:
    """Return bias and mask of queries `first` to `last` of a seq, (1 or N, last - first, keys); None: neither."""
    if scores.plain or (scores.causal and num_keys == 1 and scores.bias is None):
        return None
    bias = None if scores.bias is None else scores.bias(first, last, num_keys)
    if not scores.causal and scores.window is None:
        return bias
    mask_NQK = torch.zeros(1, last - first, num_keys, device=device) if bias is None else bias.clone()
    _hide(mask_NQK, scores, first, last)
    return mask_NQK


def _hide(scores_NQK: Tensor, scores: ScoreOptions, first: int, last: int) -> None:
    """Set the scores of the keys that queries `first` to `last` do not attend to. Further dimensions may come before."""
    if not scores.causal and scores.window is None:
        return
    num_keys, device = scores_NQK.shape[-1], scores_NQK.device
    seen = first if scores.window is None else 0  # all queries see the keys before
    keys_K, queries_Q = (torch.arange(*each, dtype=torch.int32, device=device) for each in ((seen, num_keys), (first, last)))
    ahead_QK = keys_K[None, :] - queries_Q[:, None]
    hidden_QK = ahead_QK > 0 if scores.causal else torch.zeros_like(ahead_QK, dtype=torch.bool)
    if scores.window is not None:
        hidden_QK |= ahead_QK.abs() > scores.window
    scores_NQK[..., seen:].masked_fill_(hidden_QK, -torch.inf)


def _capped(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, scores: ScoreOptions) -> Tensor:
    """Attend with capped scores. Keys are padded to 16: torch's vectorised tanh gives a remainder other bits."""
    cap = scores.softcap
    assert cap is not None
    num_heads, length = q_BNLH.shape[1:3]
    keys = k_BKLH.shape[2]
    before = max(0, keys - length)
    shared = num_heads // k_BKLH.shape[1]
    k, v = (F.pad(x, (0, 0, 0, -keys % 16)).repeat_interleave(shared, dim=1) for x in (k_BKLH, v_BKLH))
    parts: list[Tensor] = []
    for first in range(0, length, QUERIES_AT_A_TIME):
        last = min(length, first + QUERIES_AT_A_TIME)
        scores_BNQL = (q_BNLH[:, :, first:last] @ k.transpose(-1, -2)).mul_(scores.scale / cap).tanh_().mul_(cap)
        scores_BNQL[..., keys:] = -torch.inf
        if scores.bias is not None:
            scores_BNQL[..., :keys] += scores.bias(before + first, before + last, keys)
        _hide(scores_BNQL[..., :keys], scores, before + first, before + last)
        parts.append(scores_BNQL.softmax(-1) @ v)
    return torch.cat(parts, dim=2)


def _products(q_LNH: Tensor, k_LNH: Tensor, v_LNH: Tensor, scale: float) -> Tensor:
    """Attend in one seq by two products -> (L, N, H). The length is rounded up to 16: oneDNN makes a primitive per shape."""
    length, num_heads, width = v_LNH.shape
    rounded = length + -length % 16
    qkv_3NRH = v_LNH.new_empty(3, num_heads, rounded, width)
    for x_NRH, x_LNH in zip(qkv_3NRH, (q_LNH, k_LNH, v_LNH), strict=True):
        x_NRH[:, :length] = x_LNH.transpose(0, 1)
    qkv_3NRH[:, :, length:] = 0
    q, k, v = qkv_3NRH.unbind(0)
    scores_NRR = torch.baddbmm(q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=scale)
    scores_NRR[:, :, length:] = -torch.inf
    return torch.bmm(scores_NRR.softmax(-1), v)[:, :length].transpose(0, 1)


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


@cache
def _has_ragged(device: torch.device, variant: Variant) -> bool:
    """Return whether the ragged kernel can be compiled and agrees with the grouped formula. It says so in the log."""
    if turned_off():
        return False
    try:
        problem = ragged_problem(device, variant)
    except Exception as error:  # of an import, a compiler or a driver
        if is_out_of_memory(error):
            raise
        problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if problem is None:
        _log.info("Attention of %s runs in our kernel.", variant)
    else:
        _log.warning(
            "Attention of %s runs length by length, which is slower: our kernel fails its self-test (%s).", variant, problem
        )
    return problem is None


def ragged_problem(device: torch.device, variant: Variant) -> str | None:
    """Return what a self-test of the ragged kernel finds, on seqs with small and with large tiles; None: nothing."""
    lengths, num_kept = (150, 65, 16, 1), 70
    starts = [0, *accumulate(lengths)]
    x = torch.randn(starts[-1] + num_kept, 8, variant.width, generator=torch.Generator().manual_seed(0))
    x = x.to(device, variant.dtype)
    kept: KeptKeys = {0: (x[starts[-1] :, 4:6].clone(), x[starts[-1] :, 6:].clone())}
    layout = AttentionLayout(
        torch.tensor(starts, dtype=torch.int32, device=device),
        [(start, 1, length, length) for start, length in zip(starts, lengths, strict=False)],
        starts[-1],
        max(lengths),
        sources={starts[1]: AfterPrefixes([kept]), starts[2]: AfterPrefixes([kept])} if variant.after_prefixes else {},
    )
    bias = relative(torch.linspace(-2, 2, 32 * 4, device=device).view(32, 4), 128)
    scores = ScoreOptions(
        variant.width**-0.5,
        causal=variant.causal,
        window=50 if variant.window else None,
        softcap=2.0 if variant.capped else None,
        bias=(alibi(4, device) if variant.sloped else bias) if variant.biased else None,
    )
    q, k, v = x[:, :4], x[:, 4:6], x[:, 6:]
    found, expected = (each(q, k, v, layout, scores).float() for each in (attend_ragged, _attend_runs))
    worst = float((found - expected).abs().max())
    return None if worst <= _RAGGED_TOLERANCE else f"its values differ by {worst:.3g}"


@cache
def _has_flash(device: torch.device) -> bool:
    """Return whether a device has flash attention. On older GPUs Triton's products, too, have no tensor cores."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _suits_flash(v_RKH: Tensor, layout: AttentionLayout, scores: ScoreOptions) -> bool:
    is_aligned = scores.plain or layout.num_attended_B is None
    of_contents = scores.bias is None and scores.softcap is None and scores.tables is None
    fits = v_RKH.shape[-1] <= _MAX_FLASH_WIDTH and layout.cu_seqlens.shape[0] <= _MAX_FLASH_SEQS + 1
    return of_contents and is_aligned and fits


def _attend_varlen(q_RNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, layout: AttentionLayout, scores: ScoreOptions) -> Tensor:
    num_rows, width = q_RNH.shape[0], q_RNH.shape[2]
    q, k, v = (_pad_width(x[: layout.num_tokens].to(v_RKH.dtype), _FLASH_STEP) for x in (q_RNH, k_RKH, v_RKH))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    key_offsets, longest = layout.cu_seqlens, layout.max_seqlen
    if layout.sources:
        k, v, lengths = join_keys(k, v, layout, scores.layer)
        key_offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(q.device, non_blocking=True)
        longest = max(lengths)
    before = -1 if scores.window is None else scores.window
    after = 0 if scores.causal else before
    # PyTorch's public function around it lacks seqused_k in 2.11, and in every version launches one more kernel.
    out_TNH = torch.ops.aten._flash_attention_forward(
        q, k, v, layout.cu_seqlens, key_offsets, layout.max_seqlen, longest,
        0.0,
        (before, after) == (-1, 0),
        False,
        scale=scores.scale,
        window_size_left=before,
        window_size_right=after,
        seqused_k=layout.num_attended_B,
    )[0]  # fmt: skip
    out_TD, missing = out_TNH[..., :width].flatten(1), num_rows - layout.num_tokens
    return F.pad(out_TD, (0, 0, 0, missing)) if missing else out_TD  # which would copy all rows for none


def join_keys(k_TKH: Tensor, v_TKH: Tensor, layout: AttentionLayout, layer: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return the keys and values that each seq attends to, one seq after another, and their number in each seq."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    lengths: list[int] = []
    for start, count, length, _ in layout.equal_length_groups:
        k, v = (x[start : start + count * length].view(count, length, *x.shape[1:]) for x in (k_TKH, v_TKH))
        if (source := layout.sources.get(start)) is not None:
            k, v = source(layer, k, v)
        keys.append(k.flatten(0, 1))
        values.append(v.flatten(0, 1))
        lengths += [k.shape[1]] * count
    return torch.cat(keys), torch.cat(values), lengths
