from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from whimbrel.scheduler import Scheduler
from whimbrel.types import Seq

REQUESTS = st.lists(st.lists(st.integers(1, 700), max_size=30), max_size=8)


def seqs(lengths: list[int]) -> list[Seq]:
    return [Seq(np.zeros(length, np.int32), index) for index, length in enumerate(lengths)]


def drain(scheduler: Scheduler, idle_lanes: int = 1) -> list[list[tuple[int, Seq]]]:
    batches: list[list[tuple[int, Seq]]] = []
    while batch := scheduler.take(idle_lanes):
        batches.append(batch)
    return batches


@given(REQUESTS, st.integers(1, 1000), st.integers(1, 8))
def test_every_seq_is_taken_once_and_batches_keep_the_budget(requests: list[list[int]], budget: int, lanes: int) -> None:
    scheduler = Scheduler(budget)
    for number, lengths in enumerate(requests):
        scheduler.add(number, seqs(lengths)) if lengths else None
    assert scheduler.queued_tokens == sum(map(sum, requests))
    batches = drain(scheduler, lanes)
    taken = Counter((number, seq.index) for batch in batches for number, seq in batch)
    assert taken == Counter((number, index) for number, lengths in enumerate(requests) for index in range(len(lengths)))
    assert all(len(batch) == 1 or sum(seq.ids.size for _, seq in batch) <= budget for batch in batches)
    assert scheduler.queued_tokens == 0


@given(REQUESTS, st.data())
def test_cancelled_seqs_are_never_taken(requests: list[list[int]], data: st.DataObject) -> None:
    scheduler = Scheduler(512)
    requests = [lengths for lengths in requests if lengths]
    for number, lengths in enumerate(requests):
        scheduler.add(number, seqs(lengths))
    gone = data.draw(st.sets(st.integers(0, 8)))
    for number in gone:
        scheduler.cancel(number)
        scheduler.cancel(number)
    assert {number for batch in drain(scheduler) for number, _ in batch} == set(range(len(requests))) - gone
    assert scheduler.queued_tokens == 0


def test_a_query_beside_a_large_request_is_in_the_next_batch() -> None:
    scheduler = Scheduler(512)
    scheduler.add(1, seqs([100] * 2048))
    scheduler.take()
    scheduler.add(2, seqs([10]))
    assert 2 in {number for number, _ in scheduler.take()}


def test_little_work_is_shared_between_idle_lanes() -> None:
    scheduler = Scheduler(512)
    scheduler.add(1, seqs([50] * 8))
    assert [len(batch) for batch in (scheduler.take(2), scheduler.take(1))] == [4, 4]


def test_a_text_longer_than_the_budget_runs_alone() -> None:
    scheduler = Scheduler(512)
    scheduler.add(1, seqs([5, 8000, 5]))
    assert [[seq.index for _, seq in batch] for batch in drain(scheduler)] == [[1], [0, 2]]
