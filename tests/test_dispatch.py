"""What waits and what is on its way: nobody is forgotten who waits for others to be done."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fakes import dense_job
from whimbrel.cards.reader import read_card
from whimbrel.dispatch import Dispatch
from whimbrel.plan import Hardware, Options, make_plan
from whimbrel.types import Seq
from whimbrel.work import Job


@pytest.fixture
def dispatch(minilm: Path) -> Dispatch:
    card = read_card(minilm, "minilm")
    return Dispatch(make_plan(Options(), card, Hardware(num_cores=1, cpu_bfloat16=False)), lambda: None)


def job(num_seqs: int, suspects: Sequence[int] = ()) -> Job:
    seqs = [Seq(np.zeros(5, np.int32), i) for i in range(num_seqs)]
    return dense_job(seqs, suspects=dict.fromkeys(suspects, num_seqs))


@pytest.mark.parametrize("lane_comes_first", [False, True])
def test_what_waits_for_suspects_that_are_answered_meanwhile_is_not_forgotten(
    lane_comes_first: bool, dispatch: Dispatch
) -> None:
    again = job(1)
    dispatch.add(again)
    dispatch.done(dispatch.take(), 5)  # pyright: ignore[reportArgumentType]
    suspects = job(2, suspects=[0, 1])
    dispatch.add(suspects)
    both = dispatch.take()
    assert both is not None
    assert both.kind == "suspect"
    dispatch.put_back(both, out_of_memory=False)
    dispatch.done(both, 0)
    half = dispatch.take()
    assert half is not None
    turn: list[bool] = []
    beside = threading.Thread(target=lambda: turn.append(dispatch.begin_beside(again)), daemon=True)
    lane = threading.Thread(target=dispatch.take, daemon=True)
    beside.start()
    time.sleep(0.1)
    if lane_comes_first:
        lane.start()
    assert dispatch.claim(suspects)
    dispatch.done(half, 0)
    if not lane_comes_first:
        lane.start()
    beside.join(10)
    assert turn == [True]
    dispatch.abandon()
    lane.join(10)
