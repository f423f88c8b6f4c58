"""Attention to relative positions: our own kernel and PyTorch's operators against the formula, and its rows against transformers'."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from attention_cases import DEVICES, KINDS, make_heads, make_layout, make_position_scores
from references import attend_reference
from whimbrel.model.ops import attention
from whimbrel.model.ops.attention import ScoreOptions, attend
from whimbrel.model.ops.disentangled import row_of_distances
from whimbrel.types.card import Disentangled


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("width", [8, 20, 64])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("lengths", [[1], [7, 7, 7], [130, 97, 96, 33, 5, 1, 1], [640, 513, 257]])
@pytest.mark.sample(24)
def test_scores_of_positions_are_those_of_the_formula(
    lengths: list[int], kinds: str, width: int, dtype: torch.dtype, tolerance: float, device: str, *, own: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Texts are shorter and longer than the blocks of queries and keys, and than the distances with rows of their own."""
    if not own:
        monkeypatch.setattr(attention, "kernels", lambda: None)
    layout, scores = make_layout(lengths, device), make_position_scores(width, kinds, max_length=500, device=device)
    q, k, v = make_heads(layout.num_tokens + 5, width, dtype, device)
    out = attend(q, k, v, layout, scores).cpu().float()
    on_host = make_position_scores(width, kinds, max_length=500)
    expected = attend_reference(*(part.cpu().float() for part in (q, k, v)), make_layout(lengths), on_host)
    assert (out - expected).abs().max() <= tolerance
    assert not out[layout.num_tokens :].any()


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_seq_does_not_depend_on_its_batch(dtype: torch.dtype, *, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not own:
        monkeypatch.setattr(attention, "kernels", lambda: None)
    layout, scores = make_layout([697, 513, 513, 200, 112, 97, 97, 96, 64, 33, 33, 12, 7, 7, 1]), make_position_scores(32)
    qkv = make_heads(layout.num_tokens, 32, dtype)
    out = attend(*qkv, layout, scores)
    for start, end in itertools.pairwise(layout.cu_seqlens.tolist()):
        alone = attend(*(part[start:end].clone() for part in qkv), make_layout([end - start]), scores)
        assert torch.equal(alone, out[start:end])


def test_positions_matter() -> None:
    """Guard: both tables change the result, and distances of both signs have rows of their own."""
    layout = make_layout([40])
    q, k, v = make_heads(40, 16, torch.float32)
    found = [attend(q, k, v, layout, make_position_scores(16, kinds)) for kinds in KINDS]
    found.append(attend(q, k, v, layout, ScoreOptions(0.5 * 16**-0.5)))
    assert all((one - other).abs().max() > 0.1 for one, other in itertools.combinations(found, 2))
    row_M = row_of_distances(Disentangled(of_keys=True, of_queries=True, max_distance=40), 40)
    assert len(set(row_M.tolist())) == 79


@pytest.mark.parametrize(
    ("buckets", "max_distance", "length"),
    [(256, 512, 512), (256, 512, 900), (256, 1680, 1680), (12, 120, 120), (33, 90, 300), (0, 50, 80)],
)
def test_rows_are_those_of_transformers(buckets: int, max_distance: int, length: int) -> None:
    spec = Disentangled(of_keys=True, of_queries=True, max_distance=max_distance, num_buckets=buckets)
    tokens = torch.empty(length, 1)
    expected = build_relative_position(tokens, tokens, bucket_size=buckets or -1, max_position=max_distance)[0]
    row_M = row_of_distances(spec, length)
    for query in (0, length // 2, length - 1):
        found = row_M[query - torch.arange(length) + length - 1]
        assert torch.equal(found, (expected[query] + spec.span).clamp(0, 2 * spec.span - 1).int())


@pytest.mark.parametrize("options", [{"causal": True}, {"window": 5}, {"softcap": 2.0}])
def test_masks_and_caps_do_not_go_with_positions(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no masks, caps or biases"):
        ScoreOptions(1.0, tables=make_position_scores(8).tables, **options)  # pyright: ignore[reportArgumentType]
