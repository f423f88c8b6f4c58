"""Layouts, score options and heads for tests of attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from whimbrel.model.ops.attention import AttentionLayout, ScoreOptions
from whimbrel.model.ops.disentangled import PositionTables, row_of_distances
from whimbrel.model.ops.positions import Bias, alibi
from whimbrel.types.batch import equal_length_groups
from whimbrel.types.card import Disentangled

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_layout(lengths: list[int], device: str = "cpu", num_keys: list[int] | None = None) -> AttentionLayout:
    offsets = np.concatenate(([0], np.cumsum(sorted(lengths, reverse=True)))).astype(np.int32)
    keys = None if num_keys is None else torch.tensor(num_keys, dtype=torch.int32)
    found = equal_length_groups(offsets, None if keys is None else keys.numpy())
    keys = None if keys is None else keys.to(device)
    return AttentionLayout(torch.from_numpy(offsets).to(device), found, int(offsets[-1]), max(lengths), keys)


def _slopes(distances: torch.Tensor) -> torch.Tensor:
    slopes_N = torch.linspace(-0.5, 0.5, 4, device=distances.device)
    return slopes_N.view(-1, *[1] * distances.dim()) * distances.float() / 8


_bias = Bias(_slopes)


def on_device(scores: ScoreOptions, device: str) -> ScoreOptions:
    """Return the options with their bias on a device."""
    if (bias := scores.bias) is None:
        return scores
    there = torch.device(device)
    return replace(scores, bias=Bias(bias.of, there) if bias.slopes_N is None else alibi(len(bias.slopes_N), there))


SCORES: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window": 5},
    "no window": {"window": 0},
    "causal window": {"causal": True, "window": 9},
    "biased": {"bias": _bias},
    "biased by slopes": {"bias": alibi(4, torch.device("cpu"))},
    "biased causal": {"bias": _bias, "causal": True},
    "capped": {"softcap": 2.0},
    "capped causal window": {"softcap": 2.0, "causal": True, "window": 6},
}


KINDS = {"both": (True, True), "keys": (True, False), "queries": (False, True)}
"""Tables of positions of keys, and of queries."""


def make_position_scores(width: int, kinds: str = "both", max_length: int = 700, device: str = "cpu") -> ScoreOptions:
    spec = Disentangled(*KINDS[kinds], max_distance=max_length, num_buckets=64)
    generator = torch.Generator().manual_seed(2)
    keys, queries = (
        torch.randn(3, 2 * spec.span, width, generator=generator).to(device) if kind else None for kind in KINDS[kinds]
    )
    return ScoreOptions(0.5 * width**-0.5, tables=PositionTables(keys, queries, row_of_distances(spec, max_length).to(device)))


def make_heads(rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    x = torch.randn(rows, 9, width, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    return x.split((3, 3, 3), dim=1)
