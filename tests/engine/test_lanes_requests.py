"""The lanes' promises to requests: deadlines, cancellation, memory and admission."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import wait
from queue import Empty
from typing import Any

import numpy as np
import pytest

from scripted_runner import response_of
from stepped_runner import Start, StepRunner, answer, bulk, error, job
from whimbrel.engine.engine_request import Job
from whimbrel.errors import DeadlineExceeded, Overloaded
from whimbrel.types.scheduling import ORDINARY


def test_expired_work_does_not_run(runner: StepRunner, start: Start) -> None:
    lanes = start()
    first, late, half_done = bulk(1000), bulk(2000, deadline=1.0), bulk(3000, 3001, 3002, deadline=60)
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


def test_a_query_is_admitted_while_only_bulk_fills_the_queue(runner: StepRunner, start: Start) -> None:
    lanes = start(max_queue_tokens=2000)
    jobs = [bulk(1000, priority=-1)]  # nothing overtakes it
    lanes.submit(jobs[0])
    running = runner.next()
    jobs += [bulk(*range(1000, 1009))]
    lanes.submit(jobs[-1])
    with pytest.raises(Overloaded, match="1,800 tokens wait already; the queue takes 2,000"):
        lanes.submit(bulk(*range(1000, 1009)))
    with pytest.raises(Overloaded):
        lanes.dispatcher.check_admission(2000, ORDINARY)
    jobs += [job(2000), bulk(*range(1000, 1010), priority=-1)]
    lanes.dispatcher.check_admission(1, ORDINARY)
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
    lanes.submit(bulk(1000, priority=-1))
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
