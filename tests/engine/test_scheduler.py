"""The scheduler's promises, over any requests: nothing lost, nothing twice, no tenant starved, nothing late or out of turn."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from whimbrel.engine.fair_queue import FairQueue
from whimbrel.engine.scheduler import ScheduledBatch, Scheduler
from whimbrel.types.batch import RowCount
from whimbrel.types.scheduling import Scheduling
from whimbrel.types.seq import Seq

LENGTHS = st.lists(st.integers(1, 700), min_size=1, max_size=30)


@dataclass(frozen=True)
class Asked:
    """A request, as `add` takes it."""

    lengths: list[int]
    priority: int = 0
    tenant: str = ""
    deadline: float = inf
    suspects: dict[int, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


ANY = st.builds(
    Asked,
    LENGTHS | st.lists(st.integers(1, 20), min_size=1, max_size=5),
    priority=st.integers(-1, 2),
    tenant=st.sampled_from("abc"),
    deadline=st.sampled_from([inf, inf, 5.0, 10.0]),
    suspects=st.dictionaries(st.integers(0, 35), st.integers(1, 4), max_size=3),
)
EQUAL = st.builds(Asked, LENGTHS, tenant=st.sampled_from("abc"))


def seqs(lengths: list[int]) -> list[Seq]:
    return [Seq(np.zeros(length, np.int32), index) for index, length in enumerate(lengths)]


def add(scheduler: Scheduler[int], job: int, asked: Asked) -> None:
    scheduling = Scheduling(asked.priority, asked.deadline, asked.tenant, suspects=asked.suspects)
    scheduler.add(job, seqs(asked.lengths), asked.tokens, scheduling)


def filled(budget: int, requests: list[Asked]) -> Scheduler[int]:
    scheduler = Scheduler[int](budget)
    for job, asked in enumerate(requests):
        add(scheduler, job, asked)
    return scheduler


def drain(scheduler: Scheduler[int], idle_lanes: int = 1, now: float = 0.0) -> list[ScheduledBatch[int]]:
    batches: list[ScheduledBatch[int]] = []
    while batch := scheduler.take(now, idle_lanes):
        batches.append(batch)
    return batches


def seqs_of(batches: list[ScheduledBatch[int]]) -> Counter[tuple[int, int]]:
    return Counter((job, seq.index) for batch in batches for job, seq in batch.items)


@given(st.lists(ANY, max_size=8), st.integers(1, 1000), st.integers(1, 8))
def test_every_seq_is_taken_once_and_batches_keep_the_budget(requests: list[Asked], budget: int, lanes: int) -> None:
    scheduler = filled(budget, requests)
    assert scheduler.queued_tokens == sum(asked.tokens for asked in requests)
    assert scheduler.small_tokens == sum(asked.tokens for asked in requests if asked.tokens <= budget // 4)
    batches = drain(scheduler, lanes)
    assert seqs_of(batches) == Counter(
        (job, index) for job, asked in enumerate(requests) for index in range(len(asked.lengths))
    )
    assert all(len(batch.items) == 1 or sum(seq.ids.size for _, seq in batch.items) <= budget for batch in batches)
    assert scheduler.queued_tokens == scheduler.small_tokens == scheduler.tokens_ahead(0) == 0
    assert scheduler.wake_at == inf


def test_a_shared_prefix_is_counted_once_in_a_batch() -> None:
    """Twelve pairs of 60 + 40 tokens fit into a budget of 540; other prefixes, and prefixes of other adapters, are their own."""
    ids = np.arange(100, dtype=np.int32)
    pairs = [Seq(ids, index, prefix_tokens=60) for index in range(14)]
    scheduler = Scheduler[int](540)
    scheduler.add(0, pairs, 1400)
    sizes = []
    while batch := scheduler.take(0.0):
        sizes.append(len(batch.items))
    assert sizes == [12, 2]
    others = [replace(pairs[0], adapter=0), replace(pairs[0], tower=1), replace(pairs[0], ids=ids + 1)]
    assert RowCount([*pairs, *others]).num_rows == 60 + 14 * 40 + 3 * 100
    assert RowCount([replace(pairs[0], prefix_tokens=0)] * 2).num_rows == 200


def test_a_batch_has_at_most_eight_tokens_for_each_that_it_may_compute() -> None:
    ids = np.arange(200, dtype=np.int32)
    scheduler = Scheduler[int](220)
    scheduler.add(0, [Seq(ids, index, prefix_tokens=199) for index in range(20)], 4000)
    batch = scheduler.take(0.0)
    assert batch is not None
    assert len(batch.items) == 8 * 220 // 200


@given(st.lists(ANY, max_size=8), st.sets(st.integers(0, 8)), st.integers(0, 3))
def test_cancelled_seqs_are_never_taken(requests: list[Asked], gone: set[int], taken_before: int) -> None:
    scheduler = filled(512, requests)
    for _ in range(taken_before):
        scheduler.take(0.0)
    for job in gone:
        scheduler.cancel(job)
        scheduler.cancel(job)
    assert {job for batch in drain(scheduler) for job, _ in batch.items} <= set(range(len(requests))) - gone
    assert scheduler.queued_tokens == scheduler.small_tokens == 0


@given(st.lists(ANY, max_size=8), st.sampled_from([4.9, 5.0, 12.0]), st.booleans())
def test_expired_work_is_never_taken_and_is_named_once(requests: list[Asked], now: float, ask_first: bool) -> None:
    scheduler = filled(512, requests)
    assert scheduler.wake_at == min((asked.deadline for asked in requests), default=inf)
    late = {job for job, asked in enumerate(requests) if asked.deadline <= now}
    named = scheduler.expire(now) if ask_first else []
    taken = {job for batch in drain(scheduler, now=now) for job, _ in batch.items}
    named += scheduler.expire(now)
    assert (taken, sorted(named)) == (set(range(len(requests))) - late, sorted(late))
    assert scheduler.expire(inf) == []


def test_what_a_job_has_left_at_its_deadline_is_dropped() -> None:
    scheduler = filled(512, [Asked([300, 300], deadline=7.0)])
    assert scheduler.take(6.0)
    assert scheduler.wake_at == 7.0
    assert scheduler.take(7.0) is None
    assert scheduler.expire(7.0) == [0]


def test_deadlines_of_jobs_that_are_gone_are_not_kept() -> None:
    scheduler = Scheduler[int](512)
    for job in range(10_000):
        add(scheduler, job, Asked([5], deadline=1e9 + job))
        assert scheduler.take(0.0)
    assert len(scheduler._deadlines) < 200  # pyright: ignore[reportPrivateUsage]


@given(st.lists(ANY, max_size=8))
def test_a_more_urgent_priority_runs_first(requests: list[Asked]) -> None:
    batches = drain(filled(512, requests))
    assert [batch.priority for batch in batches] == sorted(batch.priority for batch in batches)
    assert all(requests[job].priority == batch.priority for batch in batches for job, _ in batch.items)


@given(st.lists(ANY, max_size=8), st.integers(4, 1000))
def test_a_batch_holds_small_jobs_or_bulk_and_they_alternate(requests: list[Asked], budget: int) -> None:
    batches = drain(filled(budget, requests), idle_lanes=3)
    for batch in batches:
        for job, seq in batch.items:
            assert (batch.kind == "suspect") == (seq.index in requests[job].suspects)
            if batch.kind != "suspect":
                assert batch.kind == ("small" if requests[job].tokens <= budget // 4 else "bulk")
    for priority in {batch.priority for batch in batches}:
        kinds = [batch.kind for batch in batches if batch.priority == priority and batch.kind != "suspect"]
        both = 2 * min(kinds.count("small"), kinds.count("bulk"))
        assert all(left != right for left, right in pairwise(kinds[:both]))
        assert both == 0 or kinds[0] == "small"


@given(st.lists(ANY, max_size=8))
def test_suspects_run_first_and_in_batches_of_at_most_their_least_limit(requests: list[Asked]) -> None:
    batches = drain(filled(512, requests))
    for batch in batches:
        if batch.kind == "suspect":
            assert len(batch.items) <= min(requests[job].suspects[seq.index] for job, seq in batch.items)
    for priority in {batch.priority for batch in batches}:
        kinds = [batch.kind == "suspect" for batch in batches if batch.priority == priority]
        assert kinds == sorted(kinds, reverse=True)


def test_suspects_are_told_of_before_they_are_taken() -> None:
    scheduler = filled(512, [Asked([5]), Asked([9] * 3, suspects={1: 2, 2: 2}), Asked([9], priority=-1)])
    assert not scheduler.suspects_are_next
    assert scheduler.take(0.0)
    assert scheduler.suspects_are_next
    assert scheduler.take_small(0.0) is None
    taken = scheduler.take(0.0)
    assert taken is not None
    assert (taken.kind, [seq.index for _, seq in taken.items]) == ("suspect", [1, 2])
    assert not scheduler.suspects_are_next


@given(st.lists(EQUAL, min_size=1, max_size=6), st.lists(EQUAL, max_size=6))
def test_between_two_turns_everybody_who_waits_has_one(early: list[Asked], late: list[Asked]) -> None:
    """Owners among tenants, and jobs among their tenant's, also while more arrive: none starves."""
    scheduler = Scheduler[int](700)
    requests: list[Asked] = []
    left: dict[int, int] = {}
    turns: dict[str, list[tuple[str, set[str]]]] = defaultdict(list)

    def arrive(asked: Asked) -> None:
        left[len(requests)] = len(asked.lengths)
        add(scheduler, len(requests), asked)
        requests.append(asked)

    for asked in early:
        arrive(asked)
    while (batch := scheduler.take(0.0)) or late:
        for job, _ in batch.items if batch else ():
            same = {other for other in left if _is_small(requests[other]) == _is_small(requests[job])}
            tenants = {requests[other].tenant for other in same}
            turns[batch.kind if batch else ""].append((requests[job].tenant, tenants))
            left[job] -= 1
            if not left[job]:
                del left[job]
        if late:
            arrive(late.pop())
    for history in turns.values():
        _check_turns(history)


def _is_small(asked: Asked) -> bool:
    return asked.tokens <= 700 // 4


def _check_turns(history: list[tuple[Any, set[Any]]]) -> None:
    """Between two turns of one, each of those that waited all the while had exactly one."""
    last: dict[Any, int] = {}
    for place, (who, _) in enumerate(history):
        if who in last:
            between = Counter(other for other, _ in history[last[who] + 1 : place])
            always = set[Any].intersection(*(waiting for _, waiting in history[last[who] : place + 1]))
            assert who not in always or all(between[other] == 1 for other in always - {who})
        last[who] = place


@given(st.lists(st.tuples(st.lists(st.integers(1, 700), min_size=1, max_size=20), st.integers(0, 3)), min_size=1, max_size=12))
def test_no_job_of_an_owner_is_done_later_than_under_even_shares(arrivals: list[tuple[list[int], int]]) -> None:
    """Jobs come one after another, each after a number of served seqs; times are in tokens served."""
    waiting = FairQueue[int]()
    left: dict[int, float] = {}  # under even shares
    served, done, even = 0.0, dict[int, float](), dict[int, float]()

    def serve() -> None:
        nonlocal served
        job, seq = waiting.head()
        tokens: float = seq.ids.size
        while tokens > 1e-9 and left:  # in small steps of floats, which need not end at 0
            step = min(tokens / len(left), *left.values())
            tokens -= step * len(left)
            served += step * len(left)
            for other in list(left):
                left[other] -= step
                if left[other] <= 1e-6:
                    del left[other]
                    even[other] = served
        if waiting.pop():
            done[job] = served

    for job, (lengths, before) in enumerate(arrivals):
        for _ in range(before):
            if waiting.tokens:
                serve()
        waiting.add(job, "a", seqs(lengths), sum(lengths))
        left[job] = float(sum(lengths))
    while waiting.tokens:
        serve()
    assert set(done) == set(range(len(arrivals)))
    assert all(done[job] <= even.get(job, served) + 700 for job in done)


def test_jobs_that_are_cancelled_hold_up_nobody() -> None:
    """One tenant that is never idle, most of whose clients give up while they wait."""
    scheduler = Scheduler[Any](512)
    scheduler.add("large", seqs([200] * 40), 8000)
    left = batch = 0
    while left < 40:
        batch += 1
        scheduler.add(("kept", batch), seqs([200, 200]), 400)
        for number in range(4):
            scheduler.add(("gone", batch, number), seqs([200]), 200)
            scheduler.cancel(("gone", batch, number))
        taken = scheduler.take(0.0)
        assert taken is not None
        left += sum(job == "large" for job, _ in taken.items)
        assert batch < 2000


def test_jobs_that_are_cancelled_leave_nothing_behind() -> None:
    waiting = FairQueue[int]()
    waiting.add(-1, "", seqs([200]), 200)
    for job in range(10_000):
        waiting.add(job, "", seqs([200]), 200)
        waiting.discard(job, "")
    tenant = waiting._tenants[""]
    assert max(len(tenant.heap), len(tenant.virtual_work)) < 100
    assert tenant.num_active == len(tenant.queues) == 1


def test_equal_jobs_are_done_in_the_order_in_which_they_came() -> None:
    scheduler = filled(512, [Asked([135] * 8)] * 100)
    last = {job: place for place, batch in enumerate(drain(scheduler)) for job, _ in batch.items}
    assert [last[job] for job in range(100)] == sorted(last.values())
    assert last[0] <= 3


def most_tries(*, returns: bool) -> int:
    """Return the most tries of a request: 100 clients, each of which gives up after 30 s, asks again, and asks for the next when
    it has the answer. The engine computes one request per second. `returns`: requests say how long they have waited.
    """
    scheduler, tokens, patience = Scheduler[tuple[int, int, int]](512), 2000, 30
    waiting: dict[tuple[int, int, int], int] = {}  # (client, request, try) -> the second of this try

    def ask(client: int, request: int, tries: int, now: int) -> None:
        job = (client, request, tries)
        waiting[job] = now
        waited = tries * patience if returns else 0
        scheduler.add(job, seqs([100] * (tokens // 100)), tokens, head_start=waited * tokens)

    for client in range(100):
        ask(client, 0, 0, 0)
    most = 0
    for now in range(1, 1000):
        served = 0
        while served < tokens and (batch := scheduler.take(now)):
            served += sum(seq.ids.size for _, seq in batch.items)
        done = [job for job in waiting if job not in scheduler._entries]  # pyright: ignore[reportPrivateUsage]
        for client, request, tries in done:
            del waiting[client, request, tries]
            ask(client, request + 1, 0, now)
        for job, since in list(waiting.items()):
            if now - since >= patience:
                del waiting[job]
                scheduler.cancel(job)
                client, request, tries = job
                most = max(most, tries + 1)
                ask(client, request, tries + 1, now)
    return most


def test_a_caller_who_gives_up_and_comes_back_keeps_its_place() -> None:
    """A round takes 100 s, so everybody is served in the fourth try. Haystack's client, for one, has six of 30 s each."""
    assert most_tries(returns=True) <= 4
    assert most_tries(returns=False) > 6


def test_a_query_beside_a_large_request_is_in_the_next_batch() -> None:
    scheduler = filled(512, [Asked([100] * 2048)])
    scheduler.take(0.0)
    add(scheduler, 1, Asked([10]))
    batch = scheduler.take(0.0)
    assert batch is not None
    assert [job for job, _ in batch.items] == [1]


def test_small_jobs_may_overtake_what_is_less_urgent_or_equally_so() -> None:
    scheduler = filled(512, [Asked([100] * 9, priority=1), *[Asked([20], priority=1)] * 50])
    assert scheduler.small_tokens == 1000
    assert scheduler.take_small(0.0, 0) is None
    batch = scheduler.take_small(0.0, 1)
    assert batch is not None
    assert (batch.kind, len(batch.items)) == ("small", 6)  # a quarter of a batch
    add(scheduler, 99, Asked([100] * 9))
    assert scheduler.take_small(0.0, 1) is None
    assert scheduler.take_small(0.0, 0) is None


def test_what_overtakes_after_a_shortage_of_memory_is_as_small_as_other_batches() -> None:
    scheduler = filled(512, [Asked([100] * 9), *[Asked([20])] * 50])
    scheduler.out_of_memory(80)
    batch = scheduler.take_small(0.0, 0)
    assert batch is not None
    assert len(batch.items) == 2


def test_little_work_is_shared_between_idle_lanes() -> None:
    scheduler = filled(512, [Asked([50] * 8)])
    taken = (scheduler.take(0.0, 2), scheduler.take(0.0, 1))
    assert [len(batch.items) for batch in taken if batch] == [4, 4]


def test_a_text_longer_than_the_budget_runs_alone() -> None:
    batches = drain(filled(512, [Asked([5, 8000, 5])]))
    assert [[seq.index for _, seq in batch.items] for batch in batches] == [[1], [0, 2]]


@given(st.lists(ANY, max_size=8), st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(-1, 2))
def test_what_is_ahead_is_never_wildly_off(requests: list[Asked], lengths: list[int], priority: int) -> None:
    new = Asked(lengths, priority=priority, tenant="b")
    scheduler = filled(512, requests)
    waiting = scheduler.queued_tokens
    ahead = scheduler.tokens_ahead(new.tokens, priority, tenant="b")
    add(scheduler, 99, new)
    before = left = 0
    for batch in drain(scheduler):
        before += sum(seq.ids.size for _, seq in batch.items)
        left += sum(job == 99 for job, _ in batch.items)
        if left == len(lengths):
            break
    assert new.tokens <= ahead <= waiting + new.tokens
    # Owners take turns by seqs, not tokens: it may be off by the ratio of the lengths, and batches.
    lengths_of_all = [length for asked in (*requests, new) for length in asked.lengths]
    assert before <= max(lengths_of_all) / min(lengths_of_all) * ahead + 3 * 700
    more_urgent = sum(asked.tokens for asked in requests if asked.priority < priority)
    assert ahead >= more_urgent


def test_what_is_ahead_follows_the_policy() -> None:
    bulk = filled(512, [Asked([100] * 2048, tenant="a"), Asked([100] * 2048, tenant="b")])
    assert bulk.tokens_ahead(15) == 15 + 15 + 512  # a query: a batch of bulk, not all of it
    assert bulk.tokens_ahead(204_800, tenant="c") == 3 * 204_800
    assert bulk.tokens_ahead(1000, tenant="c") == 3 * 1000
    assert bulk.tokens_ahead(1000, tenant="a") == 1000 + 1000 + 2000
    assert bulk.tokens_ahead(1000, -1) == 1000
    assert bulk.tokens_ahead(1000, 1) == 1000 + 2 * 204_800
    queries = filled(512, [Asked([10], tenant="a")] * 10_000)
    assert queries.tokens_ahead(10, tenant="a") == 100_010
    assert queries.tokens_ahead(10, tenant="b") == 20
    assert queries.tokens_ahead(200, tenant="b") == 200 + 712


def test_out_of_memory_halves_the_budget_and_good_batches_raise_it() -> None:
    scheduler = Scheduler[int](512)
    scheduler.out_of_memory(512)
    assert scheduler.token_budget == 256
    scheduler.out_of_memory(256)
    scheduler.out_of_memory(256)  # the other half of the same batch
    assert scheduler.token_budget == 128
    add(scheduler, 0, Asked([20] * 30))
    assert [len(batch.items) for batch in drain(scheduler)] == [6] * 5
    for _ in range(31):
        scheduler.succeeded()
    assert scheduler.token_budget == 128
    scheduler.succeeded()
    assert scheduler.token_budget == 192
    for _ in range(1000):
        scheduler.succeeded()
    assert scheduler.token_budget == 512
    for _ in range(12):
        scheduler.out_of_memory(scheduler.token_budget)
    assert scheduler.token_budget == 16


def test_within_a_job_the_longest_run_first_but_for_those_that_others_wait_for() -> None:
    scheduler = Scheduler[int](10)
    scheduler.add(0, seqs([3, 5, 9, 7]), 24, first={0, 1})
    assert [seq.index for batch in drain(scheduler) for _, seq in batch.items] == [1, 0, 2, 3]
