"""Arrays of a batch that go to a device in one copy, by a stand-in for the copy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from whimbrel.checkpoint.locate import resolve_checkpoint
from whimbrel.checkpoint.reader import read_card
from whimbrel.model.ops import staging
from whimbrel.model.runner import Runner
from whimbrel.outputs.layout import plan_layout
from whimbrel.outputs.requested import OutputSpec
from whimbrel.outputs.rows import RowSelection, select_rows
from whimbrel.types.batch import Batch, pack
from whimbrel.types.card import Card
from whimbrel.types.hardware import Hardware
from whimbrel.types.plan import Options, make_plan
from whimbrel.types.request import OutputName
from whimbrel.types.seq import Seq


@pytest.fixture(scope="module")
def card(minilm: Path) -> Card:
    return read_card(minilm, "all-MiniLM-L6-v2")


def batch_of(card: Card, words: int) -> tuple[Batch, Mapping[OutputName, RowSelection]]:
    seqs = [Seq(np.array([101, *range(2000, 2000 + words), 102], np.int32), 0), Seq(np.array([101, 1000, 102], np.int32), 1)]
    batch, layout = pack(seqs), plan_layout(card, seqs, [OutputSpec("dense", 384, True)])
    return batch, select_rows(card, batch, [layout] * 2)


def test_a_batch_takes_one_copy(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another is launched between its layers; the vectors stay the same."""
    runner = Runner(resolve_checkpoint(None), card, make_plan(Options(device="cpu"), card, Hardware(1)))
    first, second = batch_of(card, 5), batch_of(card, 3)
    expected = [runner.collect(runner.launch(*each))["dense"] for each in (first, second)]
    sizes: list[int] = []

    def put(array: NDArray[Any], _: torch.device) -> torch.Tensor:
        sizes.append(array.nbytes)
        return torch.from_numpy(array.copy())

    monkeypatch.setattr(staging, "put", put)
    monkeypatch.setattr(runner._staged, "_device", torch.device("cuda:0"))
    nested: list[Any] = []

    def between() -> None:
        if not nested:
            nested.append(None)
            nested[0] = runner.launch(*second)

    found = [runner.collect(runner.launch(*first, between))["dense"], runner.collect(nested[0])["dense"]]
    assert len(sizes) == 2
    assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))
    assert not runner._staged._staged
