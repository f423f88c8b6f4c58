"""Fast paths against their plain references, with the same bits in any batch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from attention_cases import DEVICES, SCORES, _bias, make_layout, on_device
from references import attend_reference, short_conv_reference
from whimbrel.model.activations import ACTIVATIONS
from whimbrel.model.fallback.row_blocks import FINE_SIZES
from whimbrel.model.head_functions import adjacent_max
from whimbrel.model.ops import attention
from whimbrel.model.ops.attention import ScoreOptions, attend
from whimbrel.model.ops.linear import Linear, LowRank, Norm, round_up_rows
from whimbrel.model.ops.short_conv import short_conv
from whimbrel.model.pooling import normalize, segment_reduce, truncate_columns
from whimbrel.types.heads import Activation


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize(
    "lengths", [[1], [7, 7, 7], [300, 64, 64, 33, 5, 1, 1], [17] * 40, [129, 129, 97, 96], [900, 896, 600, 511]]
)
@pytest.mark.parametrize("width", [8, 32, 64])
def test_attention(lengths: list[int], width: int, dtype: torch.dtype, tolerance: float, device: str) -> None:
    check_attention(lengths, 4, ScoreOptions(width**-0.5), width, dtype, tolerance, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("what", SCORES)
def test_attention_with_what_decoders_need(
    what: str, num_kv_heads: int, dtype: torch.dtype, tolerance: float, device: str
) -> None:
    check_attention([40, 40, 33, 17, 2, 1], num_kv_heads, ScoreOptions(0.3, **SCORES[what]), 16, dtype, tolerance, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["all", "causal", "biased", "capped"])
def test_attention_to_the_first_tokens_alone(what: str, dtype: torch.dtype, device: str) -> None:
    """Expansion tokens of a query attend, but no token attends to them."""
    lengths, num_keys = [200, 32, 32, 32, 9, 1], [200, 5, 5, 32, 1, 1]
    check_attention(lengths, 4, ScoreOptions(0.3, **SCORES[what]), 16, dtype, 2e-2, device, num_keys)


def test_a_bias_over_a_long_text() -> None:
    """Long seqs are computed 256 queries at a time."""
    check_attention([520, 520, 513, 512], 4, ScoreOptions(0.3, bias=_bias), 16, torch.float32, 3e-6, "cpu")


def check_attention(
    lengths: list[int],
    num_kv_heads: int,
    scores: ScoreOptions,
    width: int,
    dtype: torch.dtype,
    tolerance: float,
    device: str,
    num_keys: list[int] | None = None,
) -> None:
    layout = make_layout(lengths, device, num_keys)
    rows = round_up_rows(layout.num_tokens) + 16
    x = torch.randn(rows, 4 + 2 * num_kv_heads, width, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    qkv = x.split((4, num_kv_heads, num_kv_heads), dim=1)
    out = attend(*qkv, layout, on_device(scores, device)).cpu()
    expected = attend_reference(*(part.cpu() for part in qkv), layout, scores)
    assert out.shape == (rows, 4 * width)
    assert out.dtype == dtype
    allowed = 2 * tolerance if device == "cuda" and dtype == torch.float32 else tolerance  # there sums have other orders
    assert (out.float() - expected.float()).abs().max() <= allowed
    assert not out[layout.num_tokens :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", SCORES)
def test_attention_of_a_seq_does_not_depend_on_its_batch(what: str, dtype: torch.dtype) -> None:
    lengths = [897, 896, 896, 513, 513, 511, 200, 200, 200, 112, 97, 64, 64, 64, 33, 33, 12, 7, 7, 7, 1]
    layout, scores = make_layout(lengths), ScoreOptions(32**-0.5, **SCORES[what])
    qkv = torch.randn(layout.num_tokens, 12, 32).to(dtype).split((4, 4, 4), dim=1)
    out = attend(*qkv, layout, scores)
    offsets = layout.cu_seqlens.tolist()
    for start, end in itertools.pairwise(offsets):
        alone = attend(*(part[start:end].clone() for part in qkv), make_layout([end - start]), scores)
        assert torch.equal(alone, out[start:end])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), pytest.param(torch.bfloat16, 6e-2, marks=pytest.mark.bfloat16)]
)
def test_linear(activation: Activation, dtype: torch.dtype, tolerance: float, device: str) -> None:
    x, weight, bias = torch.randn(48, 64), torch.randn(96, 64) / 8, torch.randn(96)
    x, weight, bias = (tensor.to(dtype) for tensor in (x, weight, bias))
    expected = ACTIVATIONS[activation](F.linear(x.float(), weight.float(), bias.float()))
    out = Linear(weight.to(device), bias.to(device), activation)(x.to(device)).cpu()
    assert out.dtype == dtype
    assert (out.float() - expected).abs().max() <= tolerance


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.bfloat16)])
@pytest.mark.parametrize(
    ("inner", "outer"), [(384, 1152), (384, 384), (1536, 384), (384, 1536), (768, 3072), (3072, 768), (48, 20), (1024, 64)]
)
@pytest.mark.sample(6)
def test_a_row_has_the_same_bits_in_any_number_of_rows(inner: int, outer: int, dtype: torch.dtype) -> None:
    linear = Linear((torch.randn(outer, inner) / inner**0.5).to(dtype), torch.randn(outer).to(dtype), "gelu")
    x = torch.randn(640, inner).to(dtype)
    expected = linear(x)
    for rows in (16, 32, 48, 64, 80, 112, 128, 240, 256, 368, 496, 512, 576):
        for start in (0, 5, 64):
            assert torch.equal(linear(x[start : start + rows].clone()), expected[start : start + rows])


@given(st.integers(1, 100_000))
def test_round_rows_makes_few_sizes_and_little_waste(rows: int) -> None:
    rounded = round_up_rows(rows)
    assert rows <= rounded <= rows + (15 if rows <= 256 else 31)
    assert rounded in FINE_SIZES if rounded <= 512 else rounded % 32 == 0
    assert round_up_rows(rounded) == rounded


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("width", "has_bias"), [(1, False), (3, False), (3, True), (4, True), (5, False)])
def test_short_convolutions(width: int, causal: bool, has_bias: bool, device: str) -> None:
    """Each seq is convolved by itself, bit for bit, whatever lies beside it."""
    torch.manual_seed(0)
    lengths = [7, 1, 2, 1, 12, 3]
    x_RD, taps_KD = torch.randn(32, 6, device=device), torch.randn(width, 6, device=device)
    x_RD[sum(lengths) :] = torch.nan
    bias_D = torch.randn(6, device=device) if has_bias else None
    positions_R = torch.cat([*map(torch.arange, lengths), torch.zeros(32 - sum(lengths))]).int().to(device)
    found = short_conv(x_RD, positions_R, taps_KD, bias_D, causal=causal)
    start = 0
    for length in lengths:
        seq = slice(start, start + length)
        expected = short_conv_reference(x_RD[seq], taps_KD, bias_D, causal=causal)
        torch.testing.assert_close(found[seq], expected)
        alone = short_conv(x_RD[seq], positions_R[seq], taps_KD, bias_D, causal=causal)
        assert torch.equal(alone, found[seq])
        start += length


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "added"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.float32), (torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize("shape", [(48,), (4, 16)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, added: torch.dtype | None, device: str) -> None:
    """The result is float32, 0 for zeros, and NaN in a row with infinity."""
    weight, x = torch.randn(shape), torch.randn(33, *shape).to(dtype) * 100
    more = None if added is None else torch.randn(33, *shape).to(added)
    if more is None:
        x[3], x[4, ..., 0] = 0, torch.inf
    total = x.double() if more is None else x.double() + more
    expected = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    norm = Norm(weight.to(device), None, 1e-6, centred=False)
    found = norm(x.to(device), None if more is None else more.to(device)).cpu()
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_max(dtype: torch.dtype, device: str) -> None:
    lengths = [7, 7, 7, 1, 1, 0, 12, 7]
    x = torch.randn(50, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[3, 5] = torch.nan
    out = adjacent_max(x.to(device), torch.tensor(lengths, device=device)).cpu()
    assert out.dtype == dtype
    for row, part in zip(out, x[: sum(lengths)].split(lengths), strict=True):
        expected = part.amax(0) if len(part) else torch.full((33,), -torch.inf, dtype=dtype)
        assert torch.equal(row.nan_to_num(nan=9.0), expected.nan_to_num(nan=9.0))


@pytest.mark.parametrize("device", DEVICES)
def test_segment_reduce(device: str) -> None:
    x = torch.randn(40, 6)
    ranges = [(2, 7), (7, 8), (30, 30)]
    starts, ends = (torch.tensor(column, dtype=torch.int32) for column in zip(*ranges, strict=True))
    for how in ("sum", "max"):
        out = segment_reduce(x.to(device), starts.to(device), ends.to(device), how)
        assert out.is_contiguous()  # else the bits of an activation of its rows depend on their number
        out = out.cpu()
        expected: list[Any] = [x[a:b].sum(0) if how == "sum" else x[a:b].amax(0) for a, b in ranges[:2]]
        assert torch.allclose(out[:2], torch.stack(expected), atol=1e-6)
        assert (out[2] == (0 if how == "sum" else -torch.inf)).all()


def test_cut_and_normalize_mix_widths() -> None:
    x = torch.randn(3, 10)
    out = normalize(truncate_columns(x, torch.tensor([10, 4, 1], dtype=torch.int32)))
    for row, width in enumerate((10, 4, 1)):
        assert torch.allclose(out[row, :width], x[row, :width] / x[row, :width].norm())
        assert not out[row, width:].any()
    assert not normalize(torch.zeros(2, 4)).any()


@pytest.mark.parametrize("what", ["window", "biased", "causal window"])
def test_layers_that_mask_alike_share_masks(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask is built once per batch. Large masks are not cached, with the same result."""
    monkeypatch.setattr(attention, "kernels", lambda: None)  # which need no masks
    made: list[int] = []
    make = attention._mask
    monkeypatch.setattr(attention, "_mask", lambda *args: made.append(1) or make(*args))
    lengths = [520, 40, 40, 17]
    qkv = torch.randn(round_up_rows(sum(lengths)), 12, 16).split((4, 4, 4), dim=1)
    layout, scores = make_layout(lengths), [ScoreOptions(0.3, **SCORES[what]) for _ in range(3)]
    found = [attend(*qkv, layout, each) for each in scores]
    num_masks = len(made)
    assert num_masks == len(layout.masks) < 3 * num_masks
    attend(*qkv, layout, replace(scores[0], window=3))
    assert len(made) == 2 * num_masks
    monkeypatch.setattr(attention, "MAX_MASK_ELEMENTS", 4 * 40 * 40)
    layout = make_layout(lengths)
    assert all(torch.equal(attend(*qkv, layout, each), found[0]) for each in (*scores, scores[0]))
    assert sum(mask.numel() for mask in layout.masks.values()) <= 4 * 40 * 40
    assert len(made) > 3 * num_masks


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.bfloat16)])
@pytest.mark.parametrize("activation", ["gelu", "identity"])
def test_low_rank_additions_in_any_company(activation: Activation, dtype: torch.dtype) -> None:
    """Two adapters of rank 3, and rows without one: a row has the same bits beside any others."""
    torch.manual_seed(3)
    a, b = torch.randn(2, 3, 48) / 7, torch.randn(2, 80, 3)
    weight, bias = torch.randn(80, 48) / 7, torch.randn(80)
    down, up = F.pad(a.reshape(6, 48), (0, 0, 0, 10)).to(dtype), F.pad(torch.cat([b[0], b[1]], dim=1), (0, 10)).to(dtype)
    linear = Linear(weight.to(dtype), bias.to(dtype), activation, LowRank(down, up))
    x, adapters = torch.randn(64, 48).to(dtype), torch.arange(64) % 3 - 1
    foreign = adapters[:, None] != torch.arange(16) // 3
    found = linear(x, foreign)
    merged = torch.stack([weight, *(weight + b @ a)])[adapters + 1]
    expected = ACTIVATIONS[activation](torch.einsum("roi,ri->ro", merged, x.float()) + bias)
    assert (found.float() - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 0.1)
    order = torch.randperm(64)
    assert torch.equal(linear(x[order], foreign[order]), found[order])
    assert torch.equal(linear(x[16:32], foreign[16:32]), found[16:32])
    assert torch.equal(linear(x)[adapters < 0], found[adapters < 0])
