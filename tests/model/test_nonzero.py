"""Nonzero entries of rows over a vocabulary, found on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention_cases import DEVICES
from checkpoints.sparse import splade_layout, write_splade
from whimbrel import Engine
from whimbrel.model.ops import nonzero
from whimbrel.model.ops.nonzero import find_nonzero

TEXTS = ["", "a", "The whimbrel flies.", "Vogel " * 7, "far far away in a year " * 20]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(5, 33), (1, 1), (3, 1000), (0, 33)])
def test_entries(shape: tuple[int, int], device: str) -> None:
    """The entries are those that numpy finds, row after row; NaN, infinity and numbers below 0 too."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).relu()
    if x.numel() > 100:
        x[0], x[1, 7], x[1, 8], x[2, -1] = 0, torch.nan, -torch.inf, -3
    found = find_nonzero(x.to(device)).map(torch.Tensor.cpu).to_sparse()
    assert found is not None
    rows, ids = np.nonzero(x.numpy())
    np.testing.assert_array_equal(found.ids_X, ids)
    np.testing.assert_array_equal(found.weights_X, x.numpy()[rows, ids])
    np.testing.assert_array_equal(found.offsets_N1, np.searchsorted(rows, np.arange(shape[0] + 1)))
    assert (found.ids_X.dtype, found.weights_X.dtype, found.offsets_N1.dtype) == (np.int32, np.float32, np.int64)


def test_more_entries_than_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonzero, "_LEAST", 8)
    monkeypatch.setattr(nonzero, "_PER_ROW", 2)
    x = torch.zeros(5, 40)
    x[:2, :5] = 1
    assert (full := find_nonzero(x).to_sparse()) is not None
    assert full.ids_X.tolist() == [0, 1, 2, 3, 4] * 2
    x[4, 39] = 1
    assert find_nonzero(x).to_sparse() is None


@pytest.mark.parametrize("places", [2**14, 3])
def test_an_engine_copies_them_alone(places: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU finds them as a GPU does; rows are copied whole if there are more than places."""
    write_splade(tmp_path)
    splade_layout(tmp_path)
    monkeypatch.setattr(nonzero, "_LEAST", places)
    monkeypatch.setattr(nonzero, "_PER_ROW", min(places, 512))
    with Engine(str(tmp_path), dtype="float32") as engine:
        expected = engine.sparse(TEXTS)
        runner: Any = engine._lanes._runner
        launch, entries = runner.launch, list[Any]()

        def launched(*arguments: Any) -> Any:
            pending = launch(*arguments)
            entries.extend(pending.entries.values())
            return pending

        monkeypatch.setattr(runner, "launch", launched)
        monkeypatch.setattr(runner, "_finds_entries", True)
        found = engine.sparse(TEXTS)
    assert entries
    assert all((each.to_sparse() is None) == (places == 3) for each in entries)
    for name in ("ids_X", "weights_X", "offsets_N1"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
