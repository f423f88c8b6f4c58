"""Attention on a GPU over a ragged batch, with all forms of scores: masks, windows, caps and biases of distances.

Theory of operation: a program computes one head of one tile of queries (`attention_tiles.py`). It reads the seq's keys in
blocks, from the first that a query of the tile sees to the last. It keeps each query's greatest score, sum of exponentials and
weighted sum of values; scores never leave the chip. Kept keys come first, from a tensor of their own, which seqs may share.
Products have the inputs' dtype, sums are float32, exponentials have base 2. A bias is read from its band, a value for each head
and distance, or computed from the slope of its head.

A query's result depends on its seq alone: blocks begin at the first key, or where the window of the tile does, and nothing is
split by the size of the batch. Rows after the last one of a tile or of the keys are never read; the last one stands for them.
A query without keys gets 0. Widths that are no power of two are masked; the compiled code depends on width, dtype and options.

Source of the scheme: Dao, "FlashAttention-2" (2307.08691).

Shapes: R rows, P rows of kept keys, N query heads, K key heads, H head width, W tiles, D distances.
"""

# Triton's language has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportUntypedFunctionDecorator=false, reportMissingImports=false

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from whimbrel.model.ops.attention_tiles import LARGE_TILE, MAX_WIDTH, SMALL_TILE, STEP, suits

_STEP = tl.constexpr(STEP)
"""Unit of the strides that the kernel gets, which tells the compiler that addresses are aligned."""
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _add_block(  # noqa: PLR0917
    q,
    sums,
    best,
    total,
    k_ptr,
    v_ptr,
    k_row,
    v_row,
    band_ptr,
    slope,
    at,
    end,
    ahead,
    columns,
    scale,
    cap,
    window,
    WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    BIASED: tl.constexpr,
    SLOPED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the block of keys from `at` on. Without MASKED all queries see all of them; else `end` is the end of the keys.

    `ahead` is the position of key 0 minus those of the queries.
    """
    keys = at + tl.arange(0, BLOCK_N)
    rows = tl.minimum(keys, end - 1) if MASKED else keys
    rows = rows.to(tl.int64)[:, None]
    k_at = k_ptr + rows * (k_row * _STEP) + columns[None, :]
    v_at = v_ptr + rows * (v_row * _STEP) + columns[None, :]
    k = tl.load(k_at, mask=(columns < WIDTH)[None, :], other=0.0) if WIDTH < BLOCK_H else tl.load(k_at)
    v = tl.load(v_at, mask=(columns < WIDTH)[None, :], other=0.0) if WIDTH < BLOCK_H else tl.load(v_at)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAPPED:  # scale holds 2 / cap, cap the base's logarithm: tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = cap - 2.0 * cap / (tl.exp2(scores * scale) + 1.0)
    elif BIASED or SLOPED:
        scores = scores * scale
    distances = ahead[:, None] + keys[None, :]
    if BIASED:
        seen = ahead[:, None] + tl.minimum(keys, end - 1)[None, :] if MASKED else distances
        scores += tl.load(band_ptr + seen) * _LOG2_E
    if SLOPED:
        scores -= tl.abs(distances).to(tl.float32) * slope
    if MASKED:
        visible = (keys < end)[None, :]
        if CAUSAL:
            visible = visible & (distances <= 0)
        if WINDOW:
            visible = visible & (distances >= -window)
            if not CAUSAL:
                visible = visible & (distances <= window)
        scores = tl.where(visible, scores, float("-inf"))
    found = tl.max(scores, axis=1)
    if not (CAPPED or BIASED or SLOPED):
        found *= scale
    higher = tl.maximum(best, found)
    zero = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weights = tl.exp2((scores if CAPPED or BIASED or SLOPED else scores * scale) - zero[:, None])
    kept = tl.exp2(best - zero)
    total = total * kept + tl.sum(weights, axis=1)
    sums = tl.dot(weights.to(v.dtype), v, sums * kept[:, None], input_precision="ieee")
    return sums, higher, total


@triton.jit(
    do_not_specialize=["num_heads", "heads_per_key", "q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "kept_k_row",
                       "kept_k_head", "kept_v_row", "kept_v_head", "band_row", "band_middle", "window"]
)  # fmt: skip
def attend_kernel(  # noqa: C901, PLR0915, PLR0917
    q_ptr,
    k_ptr,
    v_ptr,
    kept_k_ptr,
    kept_v_ptr,
    band_ptr,
    tiles_ptr,
    out_ptr,
    num_heads,
    heads_per_key,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    kept_k_row,
    kept_k_head,
    kept_v_row,
    kept_v_head,
    band_row,
    band_middle,
    scale,
    cap,
    window,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    BIASED: tl.constexpr,
    SLOPED: tl.constexpr,
    KEPT: tl.constexpr,
):
    head = tl.program_id(0) % num_heads
    key_head = (head // heads_per_key).to(tl.int64)
    tile = tiles_ptr + (tl.program_id(0) // num_heads).to(tl.int64) * 8
    first_row, num_queries, first_position = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    first_key, num_keys, num_kept = tl.load(tile + 3).to(tl.int64), tl.load(tile + 4), tl.load(tile + 6)
    queries = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_H)
    rows = tl.minimum(queries, num_queries - 1)
    q_at = q_ptr + (first_row + rows)[:, None] * (q_row * _STEP) + head.to(tl.int64) * (q_head * _STEP) + columns[None, :]
    q = tl.load(q_at, mask=(columns < WIDTH)[None, :], other=0.0) if WIDTH < BLOCK_H else tl.load(q_at)
    sums = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if BIASED:
        band_ptr += head.to(tl.int64) * band_row + band_middle
    slope = tl.load(band_ptr + head) * _LOG2_E if SLOPED else 0.0

    # Keys that some query of the tile may see, of the kept ones and of the own ones.
    last_position = first_position + num_queries - 1
    begin = 0
    end = num_kept + num_keys
    if WINDOW:
        begin = tl.maximum(first_position - window, 0)
        end = tl.minimum(end, last_position + window + 1)
    if CAUSAL:
        end = tl.minimum(end, last_position + 1)
    if KEPT:
        kept_at = tl.load(tile + 5).to(tl.int64)
        kept_k_at = kept_k_ptr + kept_at * (kept_k_row * _STEP) + key_head * (kept_k_head * _STEP)
        kept_v_at = kept_v_ptr + kept_at * (kept_v_row * _STEP) + key_head * (kept_v_head * _STEP)
        kept_end = tl.minimum(end, num_kept)
        ahead = -(first_position + rows)
        for at in range(begin, kept_end, BLOCK_N):
            sums, best, total = _add_block(
                q, sums, best, total, kept_k_at, kept_v_at, kept_k_row, kept_v_row, band_ptr, slope, at, kept_end, ahead,
                columns, scale, cap, window, WIDTH, BLOCK_H, BLOCK_N, CAUSAL, WINDOW, CAPPED, BIASED, SLOPED, True,
            )  # fmt: skip
    own_begin = tl.maximum(begin - num_kept, 0)
    own_end = tl.maximum(end - num_kept, 0)
    ahead = num_kept - (first_position + rows)
    k_at = k_ptr + first_key * (k_row * _STEP) + key_head * (k_head * _STEP)
    v_at = v_ptr + first_key * (v_row * _STEP) + key_head * (v_head * _STEP)
    seen_by_all = own_begin
    if not WINDOW:
        seen_by_all = own_end
        if CAUSAL:
            seen_by_all = tl.minimum(seen_by_all, first_position - num_kept + 1)
        seen_by_all = seen_by_all // BLOCK_N * BLOCK_N
        for at in range(0, seen_by_all, BLOCK_N):
            sums, best, total = _add_block(
                q, sums, best, total, k_at, v_at, k_row, v_row, band_ptr, slope, at, own_end, ahead, columns,
                scale, cap, window, WIDTH, BLOCK_H, BLOCK_N, CAUSAL, WINDOW, CAPPED, BIASED, SLOPED, False,
            )  # fmt: skip
    for at in range(seen_by_all, own_end, BLOCK_N):
        sums, best, total = _add_block(
            q, sums, best, total, k_at, v_at, k_row, v_row, band_ptr, slope, at, own_end, ahead, columns,
            scale, cap, window, WIDTH, BLOCK_H, BLOCK_N, CAUSAL, WINDOW, CAPPED, BIASED, SLOPED, True,
        )  # fmt: skip

    out = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = out_ptr + ((first_row + queries)[:, None] * num_heads + head) * WIDTH + columns[None, :]
    has_row = (queries < num_queries)[:, None]
    if WIDTH < BLOCK_H:
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=has_row & (columns < WIDTH)[None, :])
    else:
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=has_row)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the blocks of one launch, which decide registers and shared memory."""

    block_n: int
    num_warps: int
    num_stages: int


def shape_of(block_m: int, block_h: int) -> Shape:
    """Return the sizes for a tile. All fit in the 99 KiB that a block may have on the smaller cards from Ampere on."""
    if block_m == SMALL_TILE:
        return Shape(64 if block_h <= 128 else 32, 1 if block_h <= 64 else 2, 2)
    return Shape(64 if block_h <= 128 else 32, 4 if block_h <= 128 else 8, 2)


def attend_triton(
    q_RNH: Tensor,
    own: tuple[Tensor, Tensor],
    out_RNH: Tensor,
    tiles_W8: Tensor,
    num_small: int,
    *,
    kept: tuple[Tensor, Tensor] | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    band_ND: Tensor | None,
    slopes_N: Tensor | None,
) -> None:
    """Write softmax(scores) v of the rows of all tiles. STEP divides the width, which is at most MAX_WIDTH.

    `own` and `kept` are keys and values, (R, K, H) and (P, K, H). All suit the kernel; `tiles_W8` is on their device. Rows of
    no tile stay as they are.
    """
    num_heads, width = q_RNH.shape[1:]
    assert width % STEP == 0
    assert width <= MAX_WIDTH
    block_h = max(16, triton.next_power_of_2(width))
    tensors = q_RNH, *own, *(kept or own)
    assert all(x.shape[2] == width and suits(x) for x in tensors)
    strides = [stride // STEP for x in tensors for stride in x.stride()[:2]]
    bias = next((each for each in (band_ND, slopes_N) if each is not None), out_RNH)  # one pointer for each
    for block_m, tiles in ((SMALL_TILE, tiles_W8[:num_small]), (LARGE_TILE, tiles_W8[num_small:])):
        if not len(tiles):
            continue
        shape = shape_of(block_m, block_h)
        attend_kernel[(len(tiles) * num_heads,)](
            *tensors, bias, tiles, out_RNH, num_heads, num_heads // own[0].shape[1], *strides,
            0 if band_ND is None else band_ND.stride(0), 0 if band_ND is None else band_ND.shape[1] // 2,
            scale * _LOG2_E.value if softcap is None else 2 * scale / softcap * _LOG2_E.value,
            0.0 if softcap is None else softcap * _LOG2_E.value,
            0 if window is None else min(window, 2**30),
            WIDTH=width, BLOCK_M=block_m, BLOCK_N=shape.block_n, BLOCK_H=block_h,
            CAUSAL=causal, WINDOW=window is not None, CAPPED=softcap is not None,
            BIASED=band_ND is not None, SLOPED=slopes_N is not None, KEPT=kept is not None,
            num_warps=shape.num_warps, num_stages=shape.num_stages,
        )  # fmt: skip
