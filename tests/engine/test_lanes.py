"""The lanes' promises, batch by batch: a runner that stops at every launch until the test lets it go on."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from scripted_runner import EngineThreads, dense_job, dense_wanted, response_of, vectors_of
from texts import TEXTS
from whimbrel import Engine
from whimbrel.checkpoint.locate import resolve_checkpoint
from whimbrel.checkpoint.reader import read_card
from whimbrel.engine.engine_request import BatchItems, Job
from whimbrel.errors import ComputeError, DeadlineExceeded, NonFinite, OutOfMemory, Overloaded, Unavailable
from whimbrel.model.runner import Runner, probe
from whimbrel.types.batch import Batch, pack
from whimbrel.types.card import Card
from whimbrel.types.hardware import Hardware
from whimbrel.types.plan import Options, Plan, make_plan
from whimbrel.types.request import Request
from whimbrel.types.seq import Seq


class Launch:
    """A batch that was launched and waits."""

    def __init__(self, batch: Batch, hook: Callable[[], None] | None) -> None:
        self.words: list[int] = batch.ids_T[batch.cu_seqlens[:-1] + 1].tolist()
        self.hook = hook
        self.vectors = vectors_of(batch)
        self.thread = threading.current_thread().name
        self._actions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def finish(self) -> None:
        """Let it be computed."""
        self._actions.put(None)

    def do(self, action: Callable[[], None]) -> None:
        """Call this in the lane's thread, and wait on."""
        self._actions.put(action)

    def fail(self, error: BaseException) -> None:
        def action() -> None:
            raise error

        self._actions.put(action)

    def run(self) -> None:
        while (action := self._actions.get(timeout=60)) is not None:
            action()


class StepRunner:
    """A runner under the test's hand. Its model is that of ScriptedRunner."""

    def __init__(self) -> None:
        self._launched: SimpleQueue[Launch] = SimpleQueue()
        self.collect_gate = threading.Event()
        self.collect_gate.set()

    def init_thread(self) -> None: ...

    def launch(self, batch: Batch, wanted: Any, between_layers: Callable[[], None] | None = None) -> np.ndarray:
        launch = Launch(batch, between_layers)
        self._launched.put(launch)
        launch.run()
        return launch.vectors

    def collect(self, pending: np.ndarray) -> dict[str, np.ndarray]:
        assert self.collect_gate.wait(60)
        return {"dense": pending}

    def next(self) -> Launch:
        """The next batch that is launched."""
        return self._launched.get(timeout=60)

    def next_finished(self) -> Launch:
        """The next batch that is launched, let go."""
        launch = self.next()
        launch.finish()
        return launch

    def is_quiet(self, seconds: float = 0.2) -> bool:
        """True if nothing is launched for a while."""
        try:
            return not self._launched.get(timeout=seconds).words
        except Empty:
            return True


class Observer:
    """Keeps what an observer of batches is told."""

    def __init__(self) -> None:
        self.on_device: dict[int, list[int]] = {}
        self.history: list[list[int]] = []
        self._lock = threading.Lock()

    def started(self, items: BatchItems) -> int:
        with self._lock:
            slot = len(self.history)
            self.history.append([int(seq.ids[1]) for _, seq in items])
            self.on_device[slot] = self.history[-1]
            return slot

    def resumed(self, slot: int) -> None: ...

    def ended(self, slot: int) -> None:
        with self._lock:
            del self.on_device[slot]


@pytest.fixture(scope="module")
def card(minilm: Path) -> Card:
    return read_card(minilm, "all-MiniLM-L6-v2")


Start = Callable[..., EngineThreads]


@pytest.fixture
def runner() -> StepRunner:
    return StepRunner()


@pytest.fixture
def start(runner: StepRunner, card: Card) -> Iterator[Start]:
    """Start lanes on the runner; options are those of a plan, and of Lanes."""
    started: list[EngineThreads] = []

    def start(
        num_lanes: int = 1, *, observer: Any = None, device: str = "cpu", chunked_prefill: bool = False, **options: Any
    ) -> EngineThreads:
        plan = make_plan(Options(**options), card, Hardware(num_cores=num_lanes))
        lanes = EngineThreads(runner, card, replace(plan, device=device, chunked_prefill=chunked_prefill), observer)
        started.append(lanes)
        return lanes

    yield start
    for lanes in started:
        lanes.close()


def job(*words: int, size: int = 3, dimensions: int = 384, deadline: float | None = None, **fields: Any) -> Job:
    """A request of texts that begin with these words and have these numbers of tokens."""
    seqs = [Seq(np.array([101, word, *[102] * (size - 2)], np.int32), index) for index, word in enumerate(words)]
    late = {} if deadline is None else {"deadline": time.perf_counter() + deadline}
    return dense_job(seqs, dimensions, fill=-1.0, **late, **fields)


def bulk(*words: int, **fields: Any) -> Job:
    """One that is not small."""
    return job(*words, size=200, **fields)


def answer(job: Job) -> list[float]:
    """The words that the vectors of a job tell of."""
    return job.future.result(60).dense[:, 0].tolist()


def error(job: Job) -> BaseException | None:
    return job.future.exception(60)


# Suspects


def test_suspects_run_alone_and_few_at_a_time(runner: StepRunner, start: Start) -> None:
    lanes = start(2)
    first = bulk(1000)
    lanes.submit(first)
    running = runner.next()
    suspects = job(2000, 2001, 2002, 2003, suspects={0: 2, 1: 2, 2: 1})
    later = bulk(3000)
    lanes.submit(suspects)
    lanes.submit(later)
    assert runner.is_quiet()  # though a lane is idle: the device is not
    runner.collect_gate.clear()
    running.finish()
    assert runner.is_quiet()  # not collected yet
    runner.collect_gate.set()
    for expected in ([2000, 2001], [2002]):
        launch = runner.next()
        assert (launch.words, launch.hook) == (expected, None)
        assert runner.is_quiet()
        launch.finish()
    rest = [runner.next(), runner.next()]
    assert sorted(launch.words for launch in rest) == [[2003], [3000]]
    for launch in rest:
        launch.finish()
    assert answer(suspects) == [2000, 2001, 2002, 2003]
    assert (answer(first), answer(later)) == ([1000], [3000])


def test_halves_of_suspects_run_alone_too(runner: StepRunner, start: Start) -> None:
    lanes = start(2)
    suspects = job(2000, 2001, 2002, suspects={0: 3, 1: 3, 2: 3})
    other = bulk(3000)
    lanes.submit(suspects)
    lanes.submit(other)
    runner.next().fail(RuntimeError("scripted"))
    for expected in ([2000], [2001, 2002]):
        launch = runner.next()
        assert launch.words == expected
        assert runner.is_quiet()
        launch.finish()
    launch = runner.next()
    assert launch.words == [3000]
    launch.finish()
    assert answer(suspects) == [2000, 2001, 2002]


def test_no_query_slips_in_between_layers_while_suspects_wait(runner: StepRunner, start: Start) -> None:
    lanes = start(2)
    first, suspects, query = bulk(1000), job(2000, suspects={0: 1}), job(3000)
    for added in (first, suspects, query):
        if added is suspects:
            running = runner.next()
        lanes.submit(added)
    assert running.hook is not None
    running.do(running.hook)
    assert runner.is_quiet()
    running.finish()
    for expected in ([2000], [3000]):
        launch = runner.next()
        assert launch.words == expected
        launch.finish()
    assert [answer(one) for one in (first, suspects, query)] == [[1000], [2000], [3000]]


def test_suspects_that_are_cancelled_hold_up_nobody(runner: StepRunner, start: Start) -> None:
    lanes = start(2)
    first, suspects, later = bulk(1000), job(2000, suspects={0: 1}), bulk(3000)
    lanes.submit(first)
    running = runner.next()
    lanes.submit(suspects)
    lanes.submit(later)
    assert runner.is_quiet()
    assert suspects.future.cancel()
    launch = runner.next()
    assert launch.words == [3000]
    launch.finish()
    running.finish()
    assert (answer(first), answer(later)) == ([1000], [3000])


# Queries between the layers of bulk


def test_a_query_runs_between_the_layers_of_bulk(runner: StepRunner, start: Start) -> None:
    lanes = start()
    large = bulk(1000, 1001)
    lanes.submit(large)
    running = runner.next()
    assert running.hook is not None
    running.do(running.hook)  # nothing waits
    assert runner.is_quiet()
    query = job(2000)
    lanes.submit(query)
    running.do(running.hook)
    nested = runner.next()
    assert (nested.words, nested.hook, nested.thread) == ([2000], None, running.thread)
    nested.finish()
    assert answer(query) == [2000]
    assert not large.future.done()
    running.finish()
    assert answer(large) == [1000, 1001]


def test_at_most_one_batch_of_queries_runs_at_a_boundary(runner: StepRunner, start: Start) -> None:
    lanes = start(max_batch_tokens=400)
    large = bulk(1000)
    lanes.submit(large)
    running = runner.next()
    queries = [job(2000 + number, size=100) for number in range(6)]
    for query in queries:
        lanes.submit(query)
    assert running.hook is not None
    running.do(running.hook)
    nested = runner.next()
    assert len(nested.words) == 4
    nested.finish()
    assert runner.is_quiet()
    running.do(running.hook)
    nested = runner.next()
    assert len(nested.words) == 2
    nested.finish()
    running.finish()
    assert [answer(query) for query in queries] == [[2000 + number] for number in range(6)]
    assert answer(large) == [1000]


def test_a_query_of_less_priority_waits_for_bulk(runner: StepRunner, start: Start) -> None:
    lanes = start()
    large, query = bulk(1000), job(2000, priority=1)
    lanes.submit(large)
    running = runner.next()
    lanes.submit(query)
    assert running.hook is not None
    running.do(running.hook)
    assert runner.is_quiet()
    running.finish()
    launch = runner.next()
    assert (launch.words, launch.hook) == ([2000], None)  # and nothing runs between the layers of a query
    launch.finish()
    assert answer(query) == [2000]


def test_a_device_that_is_not_the_thread_is_not_interrupted(runner: StepRunner, start: Start) -> None:
    lanes = start(device="cuda:0")
    large = bulk(1000)
    lanes.submit(large)
    launch = runner.next()
    assert launch.hook is None
    launch.finish()
    assert answer(large) == [1000]


def test_a_text_in_pieces_gives_way_on_any_device(runner: StepRunner, start: Start) -> None:
    lanes = start(device="cuda:0", chunked_prefill=True, max_batch_tokens=100)
    long = job(1000, size=101)
    lanes.submit(long)
    running = runner.next()
    assert running.hook is not None
    running.do(running.hook)  # nothing waits
    assert runner.is_quiet()
    query = job(2000)
    lanes.submit(query)
    running.do(running.hook)
    assert runner.next_finished().words == [2000]
    assert answer(query) == [2000]
    running.finish()
    assert answer(long) == [1000]
    short = job(1001, size=100)  # no text above the budget: a batch that the device runs at once
    lanes.submit(short)
    launch = runner.next_finished()
    assert launch.hook is None
    assert answer(short) == [1001]


@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_the_rest_of_a_text_in_pieces_does_not_run_for_nobody(end: str, runner: StepRunner, start: Start) -> None:
    observer = Observer()
    lanes = start(chunked_prefill=True, max_batch_tokens=100, observer=observer)
    long = job(1000, size=101, deadline=0.2 if end == "deadline" else None)
    lanes.submit(long)
    running = runner.next()
    assert running.hook is not None
    if end == "cancel":
        long.future.cancel()
    else:
        time.sleep(0.25)
    running.do(running.hook)  # which ends the launch
    other = job(2000, size=101)
    lanes.submit(other)
    assert runner.next_finished().words == [2000]
    assert answer(other) == [2000]
    if end == "deadline":
        assert isinstance(error(long), DeadlineExceeded)
    lanes.close()
    assert not observer.on_device
    assert not lanes.dispatcher._jobs  # pyright: ignore


def test_a_text_that_fails_in_a_piece_runs_again_from_its_beginning(runner: StepRunner, start: Start) -> None:
    lanes = start(chunked_prefill=True, max_batch_tokens=100)
    long = job(1000, size=300)
    lanes.submit(long)
    runner.next().fail(MemoryError("scripted"))
    assert runner.next_finished().words == [1000]  # alone on the device
    assert answer(long) == [1000]


def test_a_query_that_fails_between_layers_leaves_bulk_alone(runner: StepRunner, start: Start) -> None:
    lanes = start()
    large, good, bad = bulk(1000), job(2000), job(2001)
    lanes.submit(large)
    running = runner.next()
    lanes.submit(good)
    lanes.submit(bad)
    assert running.hook is not None
    running.do(running.hook)
    runner.next().fail(RuntimeError("scripted"))
    running.finish()
    assert answer(large) == [1000]
    for _ in range(2):
        launch = runner.next()
        launch.finish() if launch.words == [2000] else launch.fail(RuntimeError("scripted"))
    assert answer(good) == [2000]
    assert isinstance(error(bad), ComputeError)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.bfloat16)])
def test_what_runs_between_layers_changes_no_bits(card: Card, dtype: str) -> None:
    plan = make_plan(Options(dtype=dtype), card, replace(probe(), num_cores=1, gpus=()))
    model = Runner(resolve_checkpoint(None), card, plan)
    model.init_thread()
    random = np.random.default_rng(5)

    def batch_of(*lengths: int) -> Batch:
        return pack([Seq(random.integers(1000, 20_000, length, np.int32), index) for index, length in enumerate(lengths)])

    def launch(batch: Batch, hook: Callable[[], None] | None = None) -> Any:
        return model.launch(batch, dense_wanted(batch), hook)

    large, small = batch_of(200, 100, 100, 17, 3), batch_of(12, 12, 9)
    expected = [model.collect(launch(batch))["dense"] for batch in (large, small)]
    nested: list[Any] = []
    interrupted = launch(large, lambda: nested.append(launch(small)))
    assert len(nested) == len(card.encoder.layers) - 1
    assert np.array_equal(model.collect(interrupted)["dense"], expected[0])
    assert all(np.array_equal(model.collect(pending)["dense"], expected[1]) for pending in nested)


@pytest.mark.extended
def test_queries_amid_bulk_have_the_bits_they_have_alone() -> None:
    """On the real model, with queries that come while bulk runs; some of them run between its layers."""
    observer = NestingRecorder()
    with Engine(observer=lambda _: observer) as engine:
        texts = TEXTS[20:220]
        expected = engine.embed(texts)
        queries = [engine.embed(text) for text in texts[:10]]
        deadline = time.perf_counter() + 120
        while not observer.nested and time.perf_counter() < deadline:
            large = engine.submit(Request(texts))
            while not large.done():
                for text, vector in zip(texts[:10], queries, strict=True):
                    assert np.array_equal(engine.embed(text), vector)
            assert np.array_equal(large.result().dense, expected)
    assert observer.nested


class NestingRecorder:
    """Counts the batches that were launched in a thread while it launched another."""

    def __init__(self) -> None:
        self.nested = 0
        self._threads: dict[int, int] = {}
        self._number = 0
        self._lock = threading.Lock()

    def started(self, items: BatchItems) -> int:
        with self._lock:
            self._number += 1
            bulk = {slot for slot, thread in self._threads.items() if thread == threading.get_ident()}
            self.nested += any(slot < 0 for slot in bulk) and sum(seq.ids.size for _, seq in items) <= 128
            slot = -self._number if sum(seq.ids.size for _, seq in items) > 128 else self._number
            self._threads[slot] = threading.get_ident()
            return slot

    def resumed(self, slot: int) -> None: ...

    def ended(self, slot: int) -> None:
        with self._lock:
            del self._threads[slot]


# The observer


def test_the_observer_is_told_of_every_batch_from_before_its_launch_until_it_is_collected(
    runner: StepRunner, start: Start
) -> None:
    observer = Observer()
    lanes = start(observer=observer)
    large, query = bulk(1000, 1001), job(2000, 2001)
    lanes.submit(large)
    running = runner.next()
    assert list(observer.on_device.values()) == [[1000, 1001]]
    lanes.submit(query)
    assert running.hook is not None
    running.do(running.hook)
    nested = runner.next()
    assert list(observer.on_device.values()) == [[1000, 1001], [2000, 2001]]
    runner.collect_gate.clear()
    nested.finish()
    running.fail(RuntimeError("scripted"))
    half = runner.next()
    assert list(observer.on_device.values()) == [[2000, 2001], [1000]]
    runner.collect_gate.set()
    half.finish()
    last = runner.next()
    assert last.words == [1001]
    last.finish()
    assert (answer(large), answer(query)) == ([1000, 1001], [2000, 2001])
    assert observer.history == [[1000, 1001], [2000, 2001], [1000], [1001]]
    lanes.close()
    assert observer.on_device == {}


# Deadlines and cancellation


def test_expired_work_does_not_run(runner: StepRunner, start: Start) -> None:
    lanes = start()
    first, late, half_done = bulk(1000), job(2000, deadline=1.0), bulk(3000, 3001, 3002, deadline=60)
    lanes.submit(first)
    running = runner.next()
    lanes.submit(late)
    time.sleep(1.1)
    running.finish()
    assert isinstance(error(late), DeadlineExceeded)
    lanes.submit(half_done)
    launch = runner.next()
    assert launch.words == [3000, 3001]
    launch.finish()
    launch = runner.next()
    launch.finish()
    assert answer(half_done) == [3000, 3001, 3002]
    with pytest.raises(DeadlineExceeded):
        lanes.submit(job(4000, deadline=-1))
    assert runner.is_quiet()
    assert lanes.dispatcher.load.queued_tokens == 0


@pytest.mark.parametrize("num_texts", [2, 3])
@pytest.mark.sample(1)
def test_what_is_left_of_a_request_at_its_deadline_does_not_run(num_texts: int, runner: StepRunner, start: Start) -> None:
    lanes = start()
    late = bulk(*range(1000, 1000 + num_texts), deadline=1.5)
    lanes.submit(late)
    launch = runner.next()
    time.sleep(1.6)
    launch.fail(RuntimeError("scripted"))  # its halves would run again, too
    failed = error(late)
    assert isinstance(failed, DeadlineExceeded)
    assert failed.retry is False
    assert runner.is_quiet()


def test_an_idle_lane_wakes_for_a_deadline(runner: StepRunner, start: Start) -> None:
    lanes = start(2)
    first, late = bulk(1000), job(2000, suspects={0: 1}, deadline=1.0)
    lanes.submit(first)
    running = runner.next()
    lanes.submit(late)  # waits for the device, and nothing happens there
    assert isinstance(error(late), DeadlineExceeded)
    assert not first.future.done()
    running.finish()
    assert answer(first) == [1000]


def test_nothing_is_written_into_the_vectors_of_a_request_that_is_over(runner: StepRunner, start: Start) -> None:
    lanes = start()
    gone = job(1000, 1001)
    lanes.submit(gone)
    launch = runner.next()
    assert gone.future.cancel()
    launch.finish()
    after = job(2000)
    lanes.submit(after)
    runner.next().finish()
    assert answer(after) == [2000]
    assert (response_of(gone) == -1).all()


def test_who_cancels_may_use_the_memory_of_the_vectors_at_once(runner: StepRunner, start: Start) -> None:
    writing, go_on = threading.Event(), threading.Event()

    class Slow(np.ndarray):
        def __setitem__(self, *item: Any) -> None:
            writing.set()
            assert go_on.wait(60)
            super().__setitem__(*item)

    lanes = start()
    gone = job(1000, 1001)
    gone.finisher._arrays["dense"] = response_of(gone).view(Slow)  # pyright: ignore
    lanes.submit(gone)
    runner.next().finish()
    assert writing.wait(60)
    cancelling = threading.Thread(target=gone.future.cancel)
    cancelling.start()
    cancelling.join(0.2)
    assert cancelling.is_alive()  # until the rows that are being written are there
    go_on.set()
    cancelling.join(60)
    assert gone.future.cancelled()


def test_the_memory_of_a_request_is_free_once_it_is_answered(runner: StepRunner, start: Start) -> None:
    """Counting references frees it, without waiting for the garbage collector."""
    lanes = start(2)
    gc.disable()
    try:
        for end in ("answer", "cancel"):
            lanes.submit(one := job(1000, 1001))
            vectors = weakref.ref(response_of(one))
            launch = runner.next()
            one.future.cancel() if end == "cancel" else None
            launch.finish()
            if end == "answer":
                wait([one.future], 60)
            del one, launch
            give_up = time.perf_counter() + 60
            while vectors() is not None and time.perf_counter() < give_up:
                time.sleep(0.01)
            assert vectors() is None, end
    finally:
        gc.enable()


# Admission


def test_a_query_is_admitted_while_only_bulk_fills_the_queue(runner: StepRunner, start: Start) -> None:
    lanes = start(max_queue_tokens=2000)
    jobs = [bulk(1000)]
    lanes.submit(jobs[0])
    running = runner.next()
    jobs += [bulk(*range(1000, 1009))]
    lanes.submit(jobs[-1])
    with pytest.raises(Overloaded, match="1,800 tokens wait already; the queue takes 2,000"):
        lanes.submit(bulk(*range(1000, 1009)))
    with pytest.raises(Overloaded):
        lanes.dispatcher.check_admission(2000, 0, "")
    jobs += [job(2000), bulk(*range(1000, 1010), priority=-1)]
    lanes.dispatcher.check_admission(1, 0, "")
    lanes.submit(jobs[-2])
    lanes.submit(jobs[-1])
    with pytest.raises(Overloaded):  # twice the bound is never exceeded
        lanes.submit(bulk(1, priority=-2))
    again = bulk(*range(1000, 1009))
    lanes.submit(again, admitted=True)
    jobs.append(again)
    running.finish()
    finish_all(runner, jobs)


def finish_all(runner: StepRunner, jobs: list[Job]) -> None:
    while not all(one.future.done() for one in jobs):
        try:
            runner._launched.get(timeout=0.1).finish()  # pyright: ignore[reportPrivateUsage]
        except Empty:
            continue


def test_the_queue_is_bounded_in_bytes_and_they_are_given_back(runner: StepRunner, start: Start) -> None:
    lanes = start(max_queue_bytes=20_000)
    jobs = [job(*range(1000, 1013), dimensions=384)]  # 13 x 1,536 bytes of vectors
    lanes.submit(jobs[0])
    running = runner.next()
    jobs += [bulk(2000)]  # nothing waits: it is admitted
    lanes.submit(jobs[-1])
    with pytest.raises(Overloaded, match="bytes") as caught:
        lanes.submit(bulk(2001))
    assert 1 <= caught.value.retry_after <= 60
    jobs += [job(2002)]  # a query, up to twice as much
    lanes.submit(jobs[-1])
    gone = bulk(2003)
    lanes.submit(gone, admitted=True)
    gone.future.cancel()
    running.finish()
    finish_all(runner, jobs)
    lanes.submit(bulk(1000))
    running = runner.next()
    lanes.submit(job(*range(1000, 1012)))
    lanes.submit(job(1000))
    assert lanes.dispatcher.load.queued_tokens == 39
    running.finish()
    for _ in range(1):
        runner.next().finish()


def test_a_request_that_would_wait_too_long_is_refused(runner: StepRunner, start: Start) -> None:
    lanes = start(max_queue_seconds=30.0)
    measured = bulk(1000)
    lanes.submit(measured)
    launch = runner.next()
    time.sleep(0.5)  # 200 tokens in half a second: at most 400 in one
    launch.finish()
    answer(measured)
    assert 0 < lanes.dispatcher.load.tokens_per_second <= 400
    running, waiting = bulk(1000), bulk(*range(1000, 1080))
    lanes.submit(running)
    launch = runner.next()
    lanes.submit(waiting)  # nothing waits: it is admitted
    with pytest.raises(Overloaded, match="the limit is 30 s") as caught:
        lanes.submit(bulk(*range(1000, 1080)))
    assert 25 <= caught.value.retry_after <= 60
    lanes.submit(query := job(2000))
    launch.finish()
    finish_all(runner, [running, waiting, query])
    lanes.dispatcher.reset_throughput()
    assert lanes.dispatcher.load.tokens_per_second == 0


# Faults


def test_out_of_memory_makes_batches_smaller_for_a_while(runner: StepRunner, start: Start) -> None:
    lanes = start(max_batch_tokens=512)
    first = job(*range(1000, 1016), size=32)
    lanes.submit(first)
    sizes: list[int] = []
    while not first.future.done():
        try:
            launch = runner._launched.get(timeout=0.1)  # pyright: ignore[reportPrivateUsage]
        except Empty:
            continue
        sizes.append(len(launch.words))
        launch.fail(MemoryError("scripted")) if len(launch.words) > 4 else launch.finish()
    assert (sizes, answer(first)) == ([16, 8, 8, 4, 4, 4, 4], list(range(1000, 1016)))
    second = job(*range(1000, 1016), size=32)
    lanes.submit(second)
    for _ in range(4):
        launch = runner.next()
        assert len(launch.words) == 4
        launch.finish()
    assert answer(second) == answer(first)
    for _ in range(40):  # 32 good batches raise it by an eighth of the plan's
        lanes.submit(one := job(1000))
        runner.next().finish()
        answer(one)
    lanes.submit(job(*range(1000, 1016), size=32))
    launch = runner.next()
    assert len(launch.words) == 6
    launch.finish()
    for _ in range(2):
        runner.next().finish()


def test_a_text_that_is_out_of_memory_alone_is_told_so(runner: StepRunner, start: Start) -> None:
    lanes = start(max_batch_tokens=512)
    alone = job(1000, 1001, size=300)
    lanes.submit(alone)
    runner.next().finish()
    for _ in range(2):  # the second time nothing runs beside it
        launch = runner.next()
        assert launch.words == [1001]
        launch.fail(MemoryError("scripted"))
    failed = error(alone)
    assert isinstance(failed, OutOfMemory)
    assert (failed.status, failed.retry, failed.param) == (507, False, "input[1]")
    assert "300 tokens" in str(failed)
    lanes.submit(again := job(*range(1000, 1005), size=100))
    assert len(runner.next_finished().words) == 5  # batches are as large as before
    assert answer(again) == list(range(1000, 1005))


def test_a_text_that_is_out_of_memory_beside_others_runs_again_alone(runner: StepRunner, start: Start) -> None:
    lanes = start(num_lanes=2, max_batch_tokens=512)
    lanes.submit(large := job(1000, size=400))
    lanes.submit(other := job(2000, size=400))
    first, second = runner.next(), runner.next()
    first.fail(MemoryError("scripted"))
    assert runner.is_quiet()
    second.finish()
    assert runner.next_finished().words == first.words
    assert answer(large) == [1000]
    assert answer(other) == [2000]


@pytest.mark.parametrize(
    "spoil",
    [lambda v: v[:-1], lambda v: v[:, :-1], lambda v: v.astype(np.float64), lambda v: v[0], lambda v: np.vstack([v, v])],
    ids=["rows", "columns", "dtype", "dimensions", "more"],
)
def test_vectors_of_a_wrong_shape_are_nobodys(spoil: Callable[[Any], Any], runner: StepRunner, start: Start) -> None:
    lanes = start()
    bad, good = job(1000), job(2000, 2001, 2002)
    lanes.submit(first := bulk(3000))
    running = runner.next()
    lanes.submit(bad)
    lanes.submit(good)
    running.finish()
    while not (bad.future.done() and good.future.done()):
        try:
            launch = runner._launched.get(timeout=0.1)  # pyright: ignore[reportPrivateUsage]
        except Empty:
            continue
        if 1000 in launch.words:
            launch.vectors = spoil(launch.vectors)
        launch.finish()
    assert type(error(bad)) is ComputeError
    assert answer(good) == [2000, 2001, 2002]
    assert answer(first) == [3000]


def nan_in(launch: Launch, *words: int) -> None:
    for row, word in enumerate(launch.words):
        if word in words:
            launch.vectors[row, 7] = np.nan
    launch.finish()


def test_a_row_that_is_not_finite_is_an_error_for_its_request_alone(runner: StepRunner, start: Start) -> None:
    lanes = start()
    bad, good = job(1000, 1001), job(2000)
    lanes.submit(first := bulk(3000))
    running = runner.next()
    lanes.submit(bad)
    lanes.submit(good)
    running.finish()
    nan_in(runner.next(), 1001)
    failed = error(bad)
    assert isinstance(failed, NonFinite)
    assert (failed.status, failed.code, failed.retry, failed.param) == (500, "non_finite", False, "input[1]")
    assert "--dtype float32" in failed.message
    assert (answer(good), answer(first)) == ([2000], [3000])
    assert runner.is_quiet()


def test_a_bug_of_the_collector_leaves_nobody_waiting(
    runner: StepRunner, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = start()
    lanes.submit(bad := job(1000))
    launch = runner.next()
    lanes.submit(waiting := bulk(2000))
    monkeypatch.setattr(lanes.finishing, "deliver", lambda *_: 1 / 0)
    launch.finish()
    wait([bad.future], 60)
    assert isinstance(error(bad), Unavailable)
    assert isinstance(error(waiting), Unavailable)
    assert not lanes.dispatcher.is_open
    runner.next().finish()


def test_F7_a_lost_device_ends_the_engine(runner: StepRunner, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Waiting requests are told, and for the observer the texts stay on the device, as if the process had died."""
    observer = Observer()
    lanes = start(observer=observer)
    lanes.submit(bad := bulk(1000))
    launch = runner.next()
    lanes.submit(waiting := bulk(2000))
    launch.fail(Unavailable("cuda:0 is lost."))
    assert isinstance(error(bad), Unavailable)
    assert isinstance(error(waiting), Unavailable)
    assert not lanes.dispatcher.is_open
    assert list(observer.on_device.values()) == [launch.words]
    assert "cuda:0 is lost. The engine ends." in caplog.text
    assert "bug" not in caplog.text


def test_what_is_asked_more_urgently_runs_first(runner: StepRunner, start: Start) -> None:
    lanes = start()
    lanes.submit(first := bulk(1000))
    running = runner.next()
    jobs = [bulk(2000, priority=1), bulk(2001), bulk(2002, priority=-1)]
    for one in jobs:
        lanes.submit(one)
    running.finish()
    order = [runner.next_finished().words for _ in range(3)]
    assert order == [[2002], [2001], [2000]]
    assert answer(first) == [1000]


def test_a_plan_says_how_long_the_queue_may_be(card: Card) -> None:
    hardware = Hardware(num_cores=1)
    plan: Plan = make_plan(Options(max_queue_seconds=2.5, max_queue_bytes=10), card, hardware)
    assert (plan.max_queue_seconds, plan.max_queue_bytes) == (2.5, 10)
    assert make_plan(Options(), card, hardware).max_queue_seconds > 1e9


# What a device says when its memory is full


def says(error: Exception) -> Callable[..., Any]:
    def model(*_: Any) -> Any:
        raise error

    return model


def allocate_too_much(*_: Any) -> Any:
    return torch.empty(2**55, dtype=torch.uint8)


@pytest.mark.parametrize(
    "model",
    [
        allocate_too_much,
        says(torch.OutOfMemoryError("CUDA out of memory")),
        says(MemoryError()),
        says(RuntimeError("std::bad_alloc")),
        says(RuntimeError("CUDA error: out of memory")),
        says(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
        says(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
    ],
)
def test_whatever_a_device_says_out_of_memory_is_one_error(model: Any, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Runner(resolve_checkpoint(None), card, make_plan(Options(device="cpu"), card, Hardware(1)))
    batch = pack([Seq(np.array([101, 1000, 102], np.int32), 0)])
    arguments = batch, dense_wanted(batch)
    emptied: list[bool] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr("torch.cuda.synchronize", lambda _: None)
    monkeypatch.setattr(loaded._forward, "_models", [model])
    with pytest.raises(MemoryError):
        loaded.launch(*arguments)
    assert not emptied
    monkeypatch.setattr(loaded, "_device", torch.device("cuda:0"))
    with pytest.raises(MemoryError):
        loaded.launch(*arguments)
    assert emptied
    monkeypatch.setattr(loaded._forward, "_models", [says(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))])
    with pytest.raises(RuntimeError, match="shapes"):
        loaded.launch(*arguments)
