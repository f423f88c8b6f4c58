"""What waits and what is on its way: nobody is forgotten who waits for others to be done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes import dense_job
from whimbrel.checkpoint.reader import read_card
from whimbrel.engine.dispatcher import Dispatcher
from whimbrel.engine.job import Job
from whimbrel.engine.prepared import EngineRequest
from whimbrel.errors import ComputeError, DeadlineExceeded
from whimbrel.outputs.layout import ResultLayout
from whimbrel.outputs.pair_scoring import PairScoring, Part
from whimbrel.types.arrays import Float32Array
from whimbrel.types.hardware import Hardware
from whimbrel.types.plan import Options, make_plan
from whimbrel.types.seq import Seq


@pytest.fixture
def dispatch(minilm: Path) -> Dispatcher:
    card = read_card(minilm, "minilm")
    return Dispatcher(make_plan(Options(), card, Hardware(num_cores=1)), lambda: None)


def job(num_seqs: int, suspects: Sequence[int] = ()) -> Job:
    seqs = [Seq(np.zeros(5, np.int32), i) for i in range(num_seqs)]
    return dense_job(seqs, suspects=dict.fromkeys(suspects, num_seqs))


@pytest.mark.parametrize("lane_comes_first", [False, True])
def test_what_waits_for_suspects_that_are_answered_meanwhile_is_not_forgotten(
    lane_comes_first: bool, dispatch: Dispatcher
) -> None:
    again = job(1)
    dispatch.add(again)
    dispatch.batch_done(dispatch.take(), 5)  # pyright: ignore[reportArgumentType]
    suspects = job(2, suspects=[0, 1])
    dispatch.add(suspects)
    both = dispatch.take()
    assert both is not None
    assert both.kind == "suspect"
    dispatch.requeue(both, out_of_memory=False)
    dispatch.batch_done(both, 0)
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
    dispatch.batch_done(half, 0)
    if not lane_comes_first:
        lane.start()
    beside.join(10)
    assert turn == [True]
    dispatch.fail_all()
    lane.join(10)


@dataclass
class Pairs:
    """A matcher that has one part, which may run before anything is computed."""

    part: Part
    on_begin: Callable[[], object] = int
    scores: Float32Array = field(default_factory=lambda: np.ones(1, np.float32))
    matches: None = None
    kept: Container[int] = ()
    num_parts: int = 1

    def take_parts(self) -> list[Part]:
        self.on_begin()
        return [self.part]

    def add(self, rows_XD: Any, texts: Any, starts: Any, ends: Any) -> list[Part]:
        raise NotImplementedError


def pairs_job(matcher: Pairs, deadline: float = inf) -> Job:
    comparison = PairScoring("multi_vector", "maxsim", np.zeros(1, np.int32), np.ones(1, np.int32))
    prepared = EngineRequest(
        [], ResultLayout({}, 0), 0, 0, time.perf_counter(), 0.0, deadline=deadline, pair_scoring=comparison
    )
    return Job(Future(), prepared, np.empty(4, np.uint8), matcher)


def test_a_matcher_is_asked_for_parts_before_a_lane_may_add_to_it(dispatch: Dispatcher) -> None:
    """Afterwards it may have handed them out already, and they would run twice."""
    order: list[str] = []
    known = dispatch._scheduler.add
    dispatch._scheduler.add = lambda *args, **options: (order.append("queued"), known(*args, **options))[1]
    compared = pairs_job(Pairs(lambda: order.append("part"), lambda: order.append("begin")))
    dispatch.add(compared)
    compared.future.result(10)
    assert order == ["begin", "queued", "part"]
    dispatch.close()
    dispatch.join()


def test_the_last_answer_is_given_though_the_engine_closes_meanwhile(dispatch: Dispatcher) -> None:
    claim = dispatch.claim
    closing = threading.Thread(target=lambda: (dispatch.close(), dispatch.join()))

    def slowly(job: Job) -> bool:
        found = claim(job)
        if not closing.is_alive():
            closing.start()
            time.sleep(0.2)  # no job is left, so nothing keeps the engine open
        return found

    dispatch.claim = slowly
    compared = pairs_job(Pairs(lambda: None))
    dispatch.add(compared)
    assert compared.future.result(10).outputs.scores == [[1]]
    closing.join(10)
    assert not closing.is_alive()


def test_what_is_late_is_not_compared(dispatch: Dispatcher) -> None:
    gate, ran = threading.Event(), list[str]()
    first = pairs_job(Pairs(lambda: gate.wait(10) and ran.append("first")))  # pyright: ignore[reportArgumentType]
    late = pairs_job(Pairs(lambda: ran.append("late")), deadline=time.perf_counter() + 0.1)
    dispatch.add(first)  # holds the only thread that compares
    dispatch.add(late)
    time.sleep(0.1)
    gate.set()
    with pytest.raises(DeadlineExceeded):
        late.future.result(10)
    first.future.result(10)
    assert ran == ["first"]


def test_a_bug_in_what_becomes_of_scores_is_told_and_logged(dispatch: Dispatcher, caplog: pytest.LogCaptureFixture) -> None:
    compared = pairs_job(Pairs(lambda: None, scores=np.ones(3, np.float32)))  # for one pair
    dispatch.add(compared)
    with pytest.raises(ComputeError, match="could not be put together"):
        compared.future.result(10)
    dispatch.close()
    dispatch.join()
    assert "This is a bug" in caplog.text


def test_comparisons_of_several_requests_take_turns(dispatch: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one does not wait until all parts of a large one have run."""
    ran: list[str] = []
    first, may_go_on = threading.Event(), threading.Event()

    def compared(name: str, num_parts: int) -> Job:
        def part() -> None:
            ran.append(name)
            first.set()
            assert may_go_on.wait(10)

        matcher = Pairs(part, num_parts=num_parts)
        monkeypatch.setattr(matcher, "take_parts", lambda: [part] * num_parts)
        return pairs_job(matcher)

    large, small = compared("large", 20), compared("small", 1)
    dispatch.add(large)
    assert first.wait(10)
    dispatch.add(small)
    may_go_on.set()
    large.future.result(10)
    small.future.result(10)
    assert len(ran) == 21
    assert ran.index("small") <= 2
    dispatch.close()
    dispatch.join()
