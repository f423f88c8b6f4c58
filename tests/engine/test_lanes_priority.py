"""Requests that yield to all others, such as the lines of batch files: shown by the order of launches, never by a clock."""

from __future__ import annotations

import pytest

from stepped_runner import Launch, Start, StepRunner, answer, bulk, error, job
from whimbrel.engine.engine_request import Job
from whimbrel.errors import Overloaded
from whimbrel.server.app.own_requests import LOWEST
from whimbrel.types.scheduling import ORDINARY


def lines(count: int, size: int = 100) -> list[Job]:
    """Return lines of a batch file, each a text of its own."""
    return [job(1000 + number, size=size, priority=LOWEST) for number in range(count)]


def words_until(runner: StepRunner, count: int) -> list[int]:
    """Let batches run until this number of texts was launched. Return the words that they begin with."""
    words: list[int] = []
    while len(words) < count:
        words += runner.next_finished().words
    return words


def test_J21_no_line_of_a_batch_starts_while_another_request_waits(runner: StepRunner, start: Start) -> None:
    lanes = start(max_batch_tokens=400)
    waiting = lines(12)
    lanes.submit(waiting[0])
    running = runner.next()
    for each in waiting[1:]:
        lanes.submit(each)
    others = [bulk(2000, 2001, 2002), bulk(2003, 2004)]
    for each in others:
        lanes.submit(each)
    running.finish()
    assert sorted(words_until(runner, 5)) == [2000, 2001, 2002, 2003, 2004]
    launch = runner.next()
    assert launch.words == [1001, 1002, 1003, 1004]  # 400 tokens, all that the next request waits for
    lanes.submit(query := bulk(2005))
    launch.finish()
    assert runner.next_finished().words == [2005]
    assert sorted(words_until(runner, 7)) == list(range(1005, 1012))
    assert [answer(each) for each in (*others, query)] == [[2000, 2001, 2002], [2003, 2004], [2005]]
    assert [answer(each) for each in waiting] == [[1000 + number] for number in range(12)]


def test_J21_a_query_waits_for_no_batch_of_lines_on_a_cpu(runner: StepRunner, start: Start) -> None:
    lanes = start(2, max_batch_tokens=400)
    waiting, running = lines(12), list[Launch]()
    for each in waiting[:2]:
        lanes.submit(each)
        running.append(runner.next())
    for each in waiting[2:]:
        lanes.submit(each)
    for number in range(3):  # both lanes stay busy
        lanes.submit(query := job(2000 + number))
        launch = runner.next_finished()
        assert (launch.words, launch.thread) == ([2000 + number], "whimbrel-express")
        assert answer(query) == [2000 + number]
    assert runner.is_quiet()  # no line overtakes another
    for launch in running:
        launch.finish()
    words_until(runner, 10)
    assert [answer(each) for each in waiting] == [[1000 + number] for number in range(12)]


def test_J21_a_query_waits_for_two_batches_of_lines_on_a_gpu(runner: StepRunner, start: Start) -> None:
    lanes = start(device="cuda", max_batch_tokens=400)
    waiting = lines(20)
    runner.collect_gate.clear()
    for each in waiting[:2]:
        lanes.submit(each)
        runner.next_finished()
    for each in waiting[2:]:
        lanes.submit(each)
    assert runner.is_quiet()  # a lane has two batches in flight
    lanes.submit(query := job(2000))
    runner.collect_gate.set()
    assert runner.next_finished().words == [2000]
    assert answer(query) == [2000]
    words_until(runner, 18)
    assert [answer(each) for each in waiting] == [[1000 + number] for number in range(20)]


@pytest.mark.parametrize("failure", [RuntimeError("scripted"), MemoryError()], ids=["error", "memory"])
def test_J21_lines_that_failed_together_run_again_after_other_requests(
    failure: BaseException, runner: StepRunner, start: Start
) -> None:
    lanes = start(max_batch_tokens=400)
    (first, *rest), other = lines(5), bulk(2000)
    lanes.submit(first)
    running = runner.next()
    for each in rest:
        lanes.submit(each)
    running.finish()
    launch = runner.next()
    assert len(launch.words) == 4
    lanes.submit(other)
    launch.fail(failure)
    assert runner.next_finished().words == [2000]
    launch = runner.next()
    assert launch.words == [1001, 1002]
    lanes.submit(again := bulk(2001))
    launch.finish()
    assert runner.next_finished().words == [2001]
    assert runner.next_finished().words == [1003, 1004]
    assert [answer(each) for each in (other, again, *rest)] == [[2000], [2001], [1001], [1002], [1003], [1004]]


def test_J21_a_line_that_ran_out_of_memory_alone_runs_again_after_other_requests(runner: StepRunner, start: Start) -> None:
    lanes = start(2)
    (line,), other = lines(1), [bulk(2000), bulk(2001), bulk(2002)]
    lanes.submit(line)
    failing = runner.next()
    lanes.submit(other[0])
    running = runner.next()
    for each in other[1:]:
        lanes.submit(each)
    failing.fail(MemoryError())  # it would be alone on the device
    assert words_until(runner, 2) == [2001, 2002]
    assert runner.is_quiet()
    running.finish()
    runner.next().fail(MemoryError())
    assert isinstance(error(line), Exception)
    assert [answer(each) for each in other] == [[2000], [2001], [2002]]


def test_J21_lines_take_no_room_in_the_queue_from_other_requests(runner: StepRunner, start: Start) -> None:
    lanes = start(max_queue_tokens=2000)
    lanes.submit(first := bulk(999))
    running = runner.next()
    waiting = [bulk(*range(1000, 1009), priority=LOWEST)]
    lanes.submit(waiting[0])
    with pytest.raises(Overloaded, match="1,800 tokens wait already"):
        lanes.submit(bulk(*range(1000, 1009), priority=LOWEST))
    others = [bulk(*range(2000, 2009)), bulk(2009)]
    for each in others:
        lanes.dispatcher.check_admission(10, ORDINARY)
        lanes.submit(each)
    load = lanes.dispatcher.load
    assert (load.queued_tokens, load.ordinary_tokens, load.ordinary_small_tokens) == (3800, 2000, 0)
    with pytest.raises(Overloaded, match="2,000 tokens wait already; the queue takes 2,000"):
        lanes.submit(bulk(*range(2010, 2019)))
    running.finish()
    assert words_until(runner, 10) != []
    words_until(runner, 9)
    assert answer(first) == [999]
    assert [answer(each) for each in (*others, *waiting)] == [list(range(2000, 2009)), [2009], list(range(1000, 1009))]
    assert lanes.dispatcher.load.ordinary_tokens == 0
