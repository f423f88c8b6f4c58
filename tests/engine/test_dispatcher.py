"""The queue, the finish pool, and that whoever waits for others to be done is not forgotten."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripted_runner import dense_job
from whimbrel.checkpoint.reader import read_card
from whimbrel.engine.dispatcher import Dispatcher
from whimbrel.engine.engine_request import EngineRequest, Job
from whimbrel.engine.finish_pool import FinishPool
from whimbrel.errors import ComputeError, DeadlineExceeded
from whimbrel.outputs.finishers import Step, make_finisher
from whimbrel.outputs.layout import ArraySlot, ResultLayout
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.requested import OutputSpec
from whimbrel.types.arrays import Float32Array
from whimbrel.types.hardware import Hardware
from whimbrel.types.plan import Options, make_plan
from whimbrel.types.scheduling import Scheduling
from whimbrel.types.seq import Seq


@pytest.fixture
def dispatcher(minilm: Path) -> Dispatcher:
    card = read_card(minilm, "minilm")
    return Dispatcher(make_plan(Options(), card, Hardware(num_cores=1)))


@pytest.fixture
def pool(dispatcher: Dispatcher) -> FinishPool:
    return FinishPool(dispatcher, 1, lambda: None)


def close(dispatcher: Dispatcher, pool: FinishPool) -> None:
    dispatcher.close()
    pool.close()


def job(num_seqs: int, suspects: Sequence[int] = ()) -> Job:
    seqs = [Seq(np.zeros(5, np.int32), i) for i in range(num_seqs)]
    return dense_job(seqs, suspects=dict.fromkeys(suspects, num_seqs))


@pytest.mark.parametrize("lane_comes_first", [False, True])
def test_what_waits_for_suspects_that_are_answered_meanwhile_is_not_forgotten(
    lane_comes_first: bool, dispatcher: Dispatcher
) -> None:
    suspects = job(2, suspects=[0, 1])
    dispatcher.submit(suspects)
    both = dispatcher.take()
    assert both is not None
    assert both.kind == "suspect"
    dispatcher.requeue(both, lower_budget=False)
    dispatcher.batch_done(both, 0)
    half = dispatcher.take()
    assert half is not None
    other, taken = job(1), list[Any]()
    dispatcher.submit(other)
    lane = threading.Thread(target=lambda: taken.append(dispatcher.take()), daemon=True)
    if lane_comes_first:
        lane.start()
        time.sleep(0.1)
    dispatcher.fail(suspects, ComputeError("scripted"))
    dispatcher.batch_done(half, 0)
    if not lane_comes_first:
        lane.start()
    lane.join(10)
    assert [item[0] for batch in taken for item in batch.items] == [other]
    dispatcher.fail_all()


@pytest.mark.parametrize("num_tokens", [5, 200])
def test_every_idle_lane_is_woken_for_its_share(num_tokens: int, minilm: Path) -> None:
    plan = make_plan(Options(max_batch_tokens=num_tokens), read_card(minilm, "minilm"), Hardware(num_cores=4))
    dispatcher, taken = Dispatcher(plan), list[Any]()
    lanes = [threading.Thread(target=lambda: taken.append(dispatcher.take()), daemon=True) for _ in range(4)]
    for lane in lanes:
        lane.start()
    time.sleep(0.1)
    dispatcher.submit(dense_job([Seq(np.zeros(num_tokens, np.int32), i) for i in range(4)]))
    for lane in lanes:
        lane.join(10)
    assert sorted(seq.index for batch in taken for _, seq in batch.items) == [0, 1, 2, 3]
    assert [len(batch.items) for batch in taken] == [1, 1, 1, 1]
    dispatcher.fail_all()


@dataclass
class Pairs:
    """A scorer that has one step, which may run before anything is computed."""

    step: Step
    on_begin: Callable[[], object] = int
    scores: Float32Array = field(default_factory=lambda: np.ones(1, np.float32))
    token_matches: None = None
    known_documents: Collection[int] = ()
    num_steps: int = 1

    def take_steps(self) -> list[Step]:
        self.on_begin()
        return [self.step]

    def add(self, rows_XD: Any, texts: Any, starts: Any, ends: Any) -> list[Step]:
        raise NotImplementedError


def pairs_job(scorer: Pairs, deadline: float = inf) -> Job:
    pairs = PairScoring("multi_vector", "maxsim", np.zeros(1, np.int32), np.ones(1, np.int32))
    slot = ArraySlot(OutputSpec("multi_vector", 4, True), 0, np.zeros(1, np.int64), None)
    layout = ResultLayout({"multi_vector": slot}, 0)
    request = EngineRequest([], layout, time.perf_counter(), finish=pairs, scheduling=Scheduling(deadline=deadline))
    memory = np.empty(request.response.num_bytes, np.uint8)
    finisher = make_finisher(layout, request.response, pairs, memory, num_seqs=0, make_scorer=lambda *_: scorer)
    return Job(Future(), request, finisher)


def test_a_finisher_is_asked_for_steps_before_a_lane_may_add_to_it(dispatcher: Dispatcher, pool: FinishPool) -> None:
    """Afterwards it may have handed them out already, and they would run twice."""
    order: list[str] = []
    known = dispatcher._scheduler.add
    dispatcher._scheduler.add = lambda *args, **options: (order.append("queued"), known(*args, **options))[1]
    compared = pairs_job(Pairs(lambda: order.append("part"), lambda: order.append("begin")))
    pool.submit(compared)
    compared.future.result(10)
    assert order == ["begin", "queued", "part"]
    close(dispatcher, pool)


def test_the_last_answer_is_given_though_the_engine_closes_meanwhile(dispatcher: Dispatcher, pool: FinishPool) -> None:
    claim = dispatcher._claim
    closing = threading.Thread(target=close, args=(dispatcher, pool))

    def slowly(job: Job) -> bool:
        found = claim(job)
        if not closing.is_alive():
            closing.start()
            time.sleep(0.2)  # no job is left, so nothing keeps the engine open
        return found

    dispatcher._claim = slowly
    compared = pairs_job(Pairs(lambda: None))
    pool.submit(compared)
    assert compared.future.result(10).outputs.scores == [[1]]
    closing.join(10)
    assert not closing.is_alive()


def test_what_is_late_is_not_compared(dispatcher: Dispatcher, pool: FinishPool) -> None:
    gate, ran = threading.Event(), list[str]()
    first = pairs_job(Pairs(lambda: gate.wait(10) and ran.append("first")))  # pyright: ignore[reportArgumentType]
    late = pairs_job(Pairs(lambda: ran.append("late")), deadline=time.perf_counter() + 0.1)
    pool.submit(first)  # holds the only thread that compares
    pool.submit(late)
    time.sleep(0.1)
    gate.set()
    with pytest.raises(DeadlineExceeded):
        late.future.result(10)
    first.future.result(10)
    assert ran == ["first"]


def test_a_bug_in_what_becomes_of_scores_is_told_and_logged(
    dispatcher: Dispatcher, pool: FinishPool, caplog: pytest.LogCaptureFixture
) -> None:
    compared = pairs_job(Pairs(lambda: None, scores=np.ones(3, np.float32)))  # for one pair
    pool.submit(compared)
    with pytest.raises(ComputeError, match="could not be put together"):
        compared.future.result(10)
    close(dispatcher, pool)
    assert "This is a bug" in caplog.text


def test_comparisons_of_several_requests_take_turns(
    dispatcher: Dispatcher, pool: FinishPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small one does not wait until all parts of a large one have run."""
    ran: list[str] = []
    first, may_go_on = threading.Event(), threading.Event()

    def compared(name: str, num_steps: int) -> Job:
        def part() -> None:
            ran.append(name)
            first.set()
            assert may_go_on.wait(10)

        matcher = Pairs(part, num_steps=num_steps)
        monkeypatch.setattr(matcher, "take_steps", lambda: [part] * num_steps)
        return pairs_job(matcher)

    large, small = compared("large", 20), compared("small", 1)
    pool.submit(large)
    assert first.wait(10)
    pool.submit(small)
    may_go_on.set()
    large.future.result(10)
    small.future.result(10)
    assert len(ran) == 21
    assert ran.index("small") <= 2
    close(dispatcher, pool)
