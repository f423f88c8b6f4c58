"""The lanes' promises, batch by batch: a runner that stops at every launch until the test lets it go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scripted_runner import dense_wanted
from stepped_runner import Launch, Observer, Start, StepRunner, answer, bulk, error, job
from texts import TEXTS
from whimbrel import Engine
from whimbrel.checkpoint.locate import resolve_checkpoint
from whimbrel.engine.engine_request import BatchItems
from whimbrel.errors import ComputeError, DeadlineExceeded
from whimbrel.model.runner import Runner, probe
from whimbrel.types.batch import Batch, pack
from whimbrel.types.card import Card
from whimbrel.types.hardware import Hardware
from whimbrel.types.plan import Options, Plan, make_plan
from whimbrel.types.request import Request
from whimbrel.types.seq import Seq

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


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_no_query_overtakes_bulk_while_suspects_wait(num_lanes: int, runner: StepRunner, start: Start) -> None:
    lanes = start(num_lanes)
    first, suspects, query = bulk(1000), job(2000, suspects={0: 1}), job(3000)
    for added in (first, suspects, query):
        if added is suspects:
            running = runner.next()
        lanes.submit(added)
    assert runner.is_quiet()
    running.finish()
    for expected in ([2000], [3000]):
        launch = runner.next()
        assert launch.words == expected
        assert runner.is_quiet()
        launch.finish()
    assert [answer(one) for one in (first, suspects, query)] == [[1000], [2000], [3000]]


def test_a_query_that_ran_out_of_memory_beside_bulk_runs_alone_and_nothing_overtakes_before(
    runner: StepRunner, start: Start
) -> None:
    lanes = start(2)
    running: list[Launch] = []
    for word in (1000, 1001):
        lanes.submit(bulk(word))
        running.append(runner.next())
    lanes.submit(failed := job(2000))
    runner.next().fail(MemoryError("scripted"))
    lanes.submit(other := job(2001))
    for launch in running:
        assert runner.is_quiet()
        launch.finish()
    for expected in ([2000], [2001]):
        launch = runner.next()
        assert launch.words == expected
        assert runner.is_quiet()
        launch.finish()
    assert (answer(failed), answer(other)) == ([2000], [2001])


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


# Queries beside bulk


def test_a_query_overtakes_bulk(runner: StepRunner, start: Start) -> None:
    lanes = start()
    large = bulk(1000, 1001)
    lanes.submit(large)
    running = runner.next()
    query = job(2000)
    lanes.submit(query)
    overtaking = runner.next()
    assert (overtaking.words, overtaking.hook, overtaking.thread) == ([2000], None, "whimbrel-express")
    overtaking.finish()
    assert answer(query) == [2000]
    assert not large.future.done()
    running.finish()
    assert answer(large) == [1000, 1001]


def test_an_idle_lane_takes_a_query_beside_bulk(runner: StepRunner, start: Start) -> None:
    lanes = start(2)
    large, queries = bulk(1000), [job(2000), job(2001)]
    lanes.submit(large)
    running = runner.next()
    lanes.submit(queries[0])
    beside = runner.next()
    assert {running.thread, beside.thread} == {"whimbrel-lane-0", "whimbrel-lane-1"}
    lanes.submit(queries[1])  # no lane is idle now
    assert runner.next_finished().thread == "whimbrel-express"
    assert answer(queries[1]) == [2001]
    beside.finish()
    running.finish()
    assert (answer(queries[0]), answer(large)) == ([2000], [1000])


def test_a_query_leaves_a_lane_that_is_slow_to_wake_its_turn(
    runner: StepRunner, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = start(2)
    large, query = bulk(1000), job(2000)
    changed = lanes.dispatcher._changed  # pyright: ignore[reportPrivateUsage]
    with monkeypatch.context() as patched:
        wake = changed.notify
        patched.setattr(changed, "notify", lambda _=1: wake(1))  # the other lane sleeps on
        lanes.submit(large)
        running = runner.next()
        patched.setattr(changed, "notify", lambda _=1: None)
        lanes.submit(query)
        assert runner.is_quiet()
    with changed:
        changed.notify_all()
    assert runner.next_finished().thread != "whimbrel-express"
    assert answer(query) == [2000]
    running.finish()
    assert answer(large) == [1000]


def test_queries_that_waited_before_bulk_began_overtake_it(runner: StepRunner, start: Start) -> None:
    lanes = start(max_batch_tokens=400)
    first, large, queries = job(1999), bulk(1000), [job(2000 + number, size=100) for number in range(5)]
    lanes.submit(first)
    running = runner.next()
    for added in (large, *queries):
        lanes.submit(added)
    assert runner.is_quiet()  # queries alone run: the next ones take their turn
    running.finish()
    launch = runner.next_finished()
    assert (launch.words, launch.thread) == ([2000, 2001, 2002, 2003], "whimbrel-lane-0")
    launches = {launch.words[0]: launch for launch in (runner.next(), runner.next())}
    assert (launches[1000].thread, launches[2004].thread) == ("whimbrel-lane-0", "whimbrel-express")
    for launch in launches.values():
        launch.finish()
    assert [answer(each) for each in (first, large, *queries)] == [[1999], [1000], [2000], [2001], [2002], [2003], [2004]]


def test_what_overtakes_bulk_is_at_most_a_quarter_of_a_batch(runner: StepRunner, start: Start) -> None:
    lanes = start(max_batch_tokens=400)
    large = bulk(1000)
    lanes.submit(large)
    running = runner.next()
    queries = [job(2000 + number, size=50) for number in range(3)]
    lanes.submit(queries[0])
    overtaking = runner.next()
    for query in queries[1:]:
        lanes.submit(query)
    assert runner.is_quiet()  # one batch at a time
    overtaking.finish()
    overtaking = runner.next()
    assert overtaking.words == [2001, 2002]
    lanes.submit(third := job(2003, 2004, 2005, size=30))
    overtaking.finish()
    assert runner.next_finished().words == [2003, 2004, 2005]
    running.finish()
    assert [answer(query) for query in queries] == [[2000], [2001], [2002]]
    assert (answer(third), answer(large)) == ([2003, 2004, 2005], [1000])


def test_a_query_of_less_priority_waits_for_bulk(runner: StepRunner, start: Start) -> None:
    lanes = start()
    large, query = bulk(1000), job(2000, priority=1)
    lanes.submit(large)
    running = runner.next()
    lanes.submit(query)
    assert runner.is_quiet()
    running.finish()
    launch = runner.next_finished()
    assert (launch.words, launch.thread) == ([2000], "whimbrel-lane-0")
    assert answer(query) == [2000]


def test_a_query_overtakes_the_least_urgent_bulk(runner: StepRunner, start: Start) -> None:
    lanes = start(2)
    jobs = [bulk(1000), bulk(1001, priority=5), job(2000, priority=3)]
    launches: list[Launch] = []
    for each in jobs:
        lanes.submit(each)
        launches.append(runner.next())
    assert launches[-1].thread == "whimbrel-express"
    for launch in launches:
        launch.finish()
    assert [answer(each) for each in jobs] == [[1000], [1001], [2000]]


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_query_that_is_not_wanted_any_more_overtakes_nothing(how: str, runner: StepRunner, start: Start) -> None:
    lanes = start(max_batch_tokens=400)
    large, first = bulk(1000), job(2000)
    lanes.submit(large)
    running = runner.next()
    lanes.submit(first)
    overtaking = runner.next()
    late = job(2001, deadline=0.1 if how == "deadline" else None)
    lanes.submit(late)
    if how == "cancel":
        assert late.future.cancel()
    else:
        time.sleep(0.15)
    overtaking.finish()
    assert answer(first) == [2000]
    assert runner.is_quiet()
    assert how == "cancel" or isinstance(error(late), DeadlineExceeded)
    running.finish()
    assert answer(large) == [1000]


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


def test_a_text_in_pieces_gives_way_to_nothing_less_urgent(runner: StepRunner, start: Start) -> None:
    lanes = start(device="cuda:0", chunked_prefill=True, max_batch_tokens=100)
    runner.collect_gate.clear()
    early, long, query = job(1000, size=100, priority=5), job(1001, size=101), job(2000, priority=3)
    lanes.submit(early)
    runner.next_finished()  # launched, and still in flight
    lanes.submit(long)
    running = runner.next()
    assert running.hook is not None
    lanes.submit(query)
    running.do(running.hook)
    assert runner.is_quiet()
    running.finish()
    runner.collect_gate.set()
    assert runner.next_finished().words == [2000]
    assert [answer(each) for each in (early, long, query)] == [[1000], [1001], [2000]]


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


def test_a_query_that_fails_leaves_the_bulk_that_it_overtakes_alone(runner: StepRunner, start: Start) -> None:
    lanes = start()
    large, good, bad = bulk(1000), job(2000), job(2001)
    lanes.submit(large)
    running = runner.next()
    lanes.submit(bad)
    runner.next().fail(RuntimeError("scripted"))
    assert isinstance(error(bad), ComputeError)
    lanes.submit(good)
    assert runner.next_finished().words == [2000]
    assert answer(good) == [2000]
    running.finish()
    assert answer(large) == [1000]


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
    """On the real model, with queries that come while bulk runs; some of them overtake it."""
    observer = ThreadRecorder()
    with Engine(observer=lambda _: observer) as engine:
        texts = TEXTS[20:220]
        expected = engine.embed(texts)
        queries = [engine.embed(text) for text in texts[:10]]
        deadline = time.perf_counter() + 120
        while "whimbrel-express" not in observer.threads and time.perf_counter() < deadline:
            large = engine.submit(Request(texts))
            while not large.done():
                for text, vector in zip(texts[:10], queries, strict=True):
                    assert np.array_equal(engine.embed(text), vector)
            assert np.array_equal(large.result().dense, expected)
    assert "whimbrel-express" in observer.threads


class ThreadRecorder:
    """Notes the threads that launched batches."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def started(self, items: BatchItems) -> int:
        self.threads.add(threading.current_thread().name)
        return 0

    def resumed(self, slot: int) -> None: ...

    def ended(self, slot: int) -> None: ...


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
    overtaking = runner.next()
    assert list(observer.on_device.values()) == [[1000, 1001], [2000, 2001]]
    runner.collect_gate.clear()
    overtaking.finish()
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
