"""Budgets of API keys: the arithmetic of buckets, and the counts of several processes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import budget_process
from budget_process import limited
from whimbrel.errors import RateLimited, TooLarge, Unavailable
from whimbrel.server.budgets import Bucket, Budgets, Usage, format_duration, give_places
from whimbrel.server.keys import ApiKey
from whimbrel.server.processes.shared_memory import allocate

SECOND = 10**9
MINUTE = 60 * SECOND


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: int = 5 * SECOND) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


def opened(clock: Any = None, **budgets: int) -> tuple[Budgets, Any]:
    """Return the budgets of one key, and a function that makes the usage of a request."""
    key = limited(**budgets)
    made = Budgets.of_one_process([key], clock or Clock())
    assert made is not None
    return made, lambda: made.usage(key)


def passes(usage: Usage) -> bool:
    try:
        usage.begin()
    except RateLimited:
        return False
    return True


# Buckets


@given(
    st.sampled_from([1, 2, 3, 7, 600, 10**6, 2**63 - 1]),
    st.sampled_from([MINUTE, 24 * 60 * MINUTE]),
    st.lists(st.tuples(st.integers(0, 3 * MINUTE), st.integers(1, 700)), max_size=40),
)
def test_a_bucket_is_exact(limit: int, period: int, steps: list[tuple[int, int]]) -> None:
    """A bucket admits what a reference admits that computes with fractions."""
    bucket, now, full_at, level = Bucket(limit, period, "x"), 10**15, 0, Fraction(limit)
    for pause, amount in steps:
        now += pause
        level = min(Fraction(limit), level + Fraction(pause * limit, period))
        wait = bucket.wait(full_at, now, amount)
        assert bucket.remaining(full_at, now) == level // 1
        assert (wait == 0) == (amount <= level)
        if amount <= limit and wait:  # the first nanosecond at which it fits
            assert level + Fraction((wait - 1) * limit, period) < amount <= level + Fraction(wait * limit, period)
        if wait == 0:
            full_at, level = bucket.take(full_at, now, amount), level - amount
        assert full_at < 2**127
    assert bucket.remaining(full_at, now + bucket.reset(full_at, now)) == limit


def test_what_is_given_back_is_there_again_and_never_more() -> None:
    bucket = Bucket(10, MINUTE, "x")
    full_at = bucket.take(bucket.take(0, 0, 4), 0, 6)
    assert bucket.remaining(full_at, 0) == 0
    assert bucket.remaining(bucket.give_back(full_at, 6), 0) == 6
    assert bucket.remaining(bucket.give_back(full_at, 10), 0) == 10
    assert bucket.remaining(bucket.give_back(full_at, 10), MINUTE) == 10


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0s"), (1, "1ms"), (20 * 10**6, "20ms"), (999_000_001, "1s"), (SECOND, "1s"), (1_500_000_000, "1.5s"), (8_640_000_000, "8.64s"),
        (6 * MINUTE, "6m0s"), (MINUTE + 12_005_000_000, "1m12.005s"), (60 * MINUTE, "1h0m0s"), (24 * 60 * MINUTE - 1, "24h0m0s"),
    ],
)  # fmt: skip
def test_durations_are_written_as_openai_writes_them(nanoseconds: int, text: str) -> None:
    assert format_duration(nanoseconds) == text


# One process


def test_a_bucket_holds_its_limit_and_refills_steadily() -> None:
    clock = Clock()
    _, usage = opened(clock, requests_per_minute=60)
    assert [passes(usage()) for _ in range(62)] == [True] * 60 + [False] * 2
    clock.now += SECOND
    assert [passes(usage()) for _ in range(2)] == [True, False]
    clock.now += 3600 * SECOND
    assert sum(passes(usage()) for _ in range(100)) == 60


def test_a_refusal_says_when_and_takes_nothing() -> None:
    clock = Clock()
    _, usage = opened(clock, requests_per_minute=2, tokens_per_minute=100)
    first = usage()
    first.begin()
    first.charge(90)
    for _ in range(3):
        second = usage()
        with pytest.raises(
            RateLimited, match=r"may use 100 tokens a minute, and this request has 30; try again in 12s"
        ) as told:
            second.charge(30)
        assert (told.value.retry_after, told.value.retry, told.value.code) == (12.0, None, "rate_limit_exceeded")
    clock.now += 12 * SECOND
    usage().charge(30)


def test_tokens_that_are_used_up_refuse_the_next_request_at_its_head() -> None:
    clock = Clock()
    _, usage = opened(clock, requests_per_minute=100, tokens_per_day=10)
    first = usage()
    first.begin()
    first.charge(10)
    refused = usage()
    with pytest.raises(RateLimited, match="which are used up; try again in 2h24m0s") as told:
        refused.begin()
    assert told.value.retry is False  # no client waits for hours
    assert dict(refused.headers())[b"x-ratelimit-remaining-requests"] == b"99"  # a refused request is not counted


def test_more_tokens_than_a_bucket_holds_never_fit() -> None:
    _, usage = opened(tokens_per_minute=10, tokens_per_day=5)
    with pytest.raises(TooLarge, match="6 tokens; the API key k may use 5 tokens a day"):
        usage().charge(6)
    usage().charge(5)


def test_headers_are_those_of_openai_of_the_bucket_with_the_least_left() -> None:
    clock = Clock()
    _, usage = opened(clock, requests_per_minute=60, tokens_per_minute=600, tokens_per_day=1000)
    one = usage()
    one.begin()
    one.charge(100)
    assert dict(one.headers()) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1s",
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"500",
        b"x-ratelimit-reset-tokens": b"10s",
    }
    clock.now += 2 * MINUTE
    two = usage()
    two.charge(600)
    clock.now += 2 * MINUTE
    three = usage()
    three.begin()
    assert dict(three.headers())[b"x-ratelimit-limit-tokens"] == b"1000"  # 302 of the day are fewer than 600 of the minute
    only = opened(requests_in_flight=1)[1]()
    only.begin()
    assert only.headers() == []


def test_requests_in_flight_end_once() -> None:
    _, usage = opened(requests_in_flight=2)
    first, second, third = usage(), usage(), usage()
    assert (passes(first), passes(second), passes(third)) == (True, True, False)
    third.end(give_back=True)  # it was never begun
    assert not passes(usage())
    first.end(give_back=False)
    first.end(give_back=False)
    assert (passes(usage()), passes(usage())) == (True, False)


def test_tokens_of_requests_that_the_server_failed_come_back() -> None:
    _, usage = opened(tokens_per_day=10)
    for give_back, left in ((True, b"10"), (False, b"0")):
        one = usage()
        one.begin()
        one.charge(10)
        one.end(give_back=give_back)
        one.end(give_back=give_back)
        then = usage()
        passes(then)
        assert dict(then.headers())[b"x-ratelimit-remaining-tokens"] == left


def test_keys_without_budgets_have_no_record() -> None:
    free, bound = limited(), limited(tokens_per_day=1)
    assert Budgets.of_one_process([free]) is None
    assert not free.has_budget
    assert bound.has_budget


# Several processes


@contextmanager
def processes(fd: int, number: int, tries: int, budgets: dict[str, int]) -> Generator[list[subprocess.Popen[str]]]:
    """Run processes that take from the budgets of one key, and wait until all are ready."""
    started = [
        subprocess.Popen(
            [sys.executable, budget_process.__file__, str(fd), str(number), str(column), str(tries), orjson.dumps(budgets).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[fd],
        )
        for column in range(number)
    ]  # fmt: skip
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def heard(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [
        ({"requests_per_minute": 15_000}, 15_000), ({"tokens_per_day": 45_000, "tokens_per_minute": 50_000}, 15_000),
        ({"requests_in_flight": 14_999}, 14_999),
    ],
)  # fmt: skip
def test_E13_two_workers_at_once_pass_exactly_the_budget(budgets: dict[str, int], expected: int) -> None:
    key = limited(**budgets)
    fd, _ = allocate(Budgets.memory_size([key], 3))
    with processes(fd, 3, 10_000, budgets) as started:
        for process in started:
            say(process)
        passed = [heard(process) for process in started]
    os.close(fd)
    assert sum(passed) == expected


def test_E14_requests_in_flight_of_a_process_that_was_killed_are_forgotten() -> None:
    key = limited(requests_in_flight=10, tokens_per_day=100)
    fd, memory = allocate(Budgets.memory_size([key], 2))
    ours = Budgets([key], memory, fd=fd, num_columns=2, column=1, clock=lambda: 10**15)

    def begin() -> Usage | None:
        usage = ours.usage(key)
        return usage if usage is not None and passes(usage) else None

    with processes(fd, 2, 7, {"requests_in_flight": 10, "tokens_per_day": 100}) as started:
        say(started[0])
        assert heard(started[0]) == 7
        assert [begin() is not None for _ in range(4)] == [True] * 3 + [False]
        started[0].kill()
        started[0].wait()
        ours.clear_column(0)
    more = [begin() for _ in range(8)]
    assert [each is not None for each in more] == [True] * 7 + [False]
    assert more[0] is not None
    assert dict(more[0].headers())[b"x-ratelimit-remaining-tokens"] == b"79"  # what it was charged stays taken
    os.close(fd)


def test_E14_a_process_that_is_stopped_with_a_lock_stops_nobody_for_long() -> None:
    key = limited(requests_per_minute=10)
    fd, memory = allocate(Budgets.memory_size([key]))
    holder = subprocess.Popen(
        [sys.executable, "-c", f"import fcntl, time; fcntl.lockf({fd}, fcntl.LOCK_EX, 1, 0); print(1, flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[fd],
    )  # fmt: skip
    assert heard(holder) == 1
    usage = Budgets([key], memory, fd=fd).usage(key)
    assert usage is not None
    start = time.monotonic()
    with pytest.raises(Unavailable, match="locked by another process"):
        usage.begin()
    assert time.monotonic() - start < 5
    usage.end(give_back=True)
    holder.kill()
    holder.communicate()
    usage.begin()  # the kernel has released it
    fcntl.lockf(fd, fcntl.LOCK_UN)
    os.close(fd)


def test_a_key_that_stays_is_counted_on() -> None:
    """Also under another limit: it is full at the same time. Keys that go keep their records."""
    clock = Clock(10**15)
    a, b, c = (ApiKey(name=name, digest=bytes(32), tokens_per_minute=60) for name in "abc")
    places = give_places([a, b], {})
    memory = bytearray(Budgets.memory_size("abc"))
    budgets = Budgets([a, b], memory, places=places, clock=clock)
    used = budgets.usage(a)
    assert used is not None
    used.begin()
    used.charge(30)
    places = give_places([c, b], places)
    assert places == {"a": 0, "b": 1, "c": 2}
    budgets.renew([c, b], places, memory)
    assert budgets.usage(a) is None
    used.end(give_back=False)  # its key has gone
    for limit, left in ((60, 30), (120, 60), (7, 3), (2**63 - 1, 2**62 - 1), (60, 30)):
        changed = replace(a, tokens_per_minute=limit)
        budgets.renew([changed], places, memory)
        usage = budgets.usage(changed)
        assert usage is not None
        usage.begin()
        assert dict(usage.headers())[b"x-ratelimit-remaining-tokens"] == b"%d" % left
        usage.end(give_back=False)


def test_G16_a_limit_that_changes_is_one_of_all_workers_at_any_time() -> None:
    """A worker that does not know the new limit yet reads the same time."""
    clock = Clock(10**15)
    key = limited(tokens_per_minute=60)
    memory = bytearray(Budgets.memory_size([key], 2))
    old = Budgets([key], memory, num_columns=2, clock=clock)
    new = Budgets([replace(key, tokens_per_minute=120)], memory, num_columns=2, column=1, clock=clock)
    for budgets, amount, left in ((old, 20, 40), (new, 20, 60), (old, 15, 15), (new, 30, 0)):
        usage = budgets.usage(key)
        assert usage is not None
        usage.begin()
        usage.charge(amount)
        assert dict(usage.headers())[b"x-ratelimit-remaining-tokens"] == b"%d" % left
    assert not passes(cast(Usage, old.usage(key)))


def test_the_memory_of_ten_thousand_keys_is_small() -> None:
    keys = [limited(tokens_per_day=1)] * 10_000
    assert Budgets.memory_size(keys, 16) <= 2 * 2**20
