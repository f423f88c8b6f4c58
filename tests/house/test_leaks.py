"""The leak detector finds planted leaks, in real processes and in made-up series, and nothing else."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from leaks import LIMITS, Family, Resources, Sample, Trend, trends
from waiting import wait_for

ROUNDS, REQUESTS = 14, 300
FLAT = dict.fromkeys(LIMITS, 10.0)


class Leaky:
    """tests/support/leaking_process.py, in a session of its own."""

    def __init__(self, what: str) -> None:
        command = [sys.executable, str(Path(__file__).parents[1] / "support/leaking_process.py"), what]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.family = Family(self.process.pid, "leaky")

    def do(self, requests: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{requests}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def end(self) -> None:
        with self.process:
            assert self.process.stdin is not None
            self.process.stdin.close()


def leaking(found: list[Trend]) -> set[tuple[str, str]]:
    return {(trend.process, trend.quantity) for trend in found if trend.leaks}


@pytest.mark.parametrize(
    ("what", "quantity"),
    [
        ("nothing", None), ("a little memory", None), ("memory", "memory, MiB"), ("threads", "threads"), ("sockets", "sockets"),
        ("memfds", "shared segments"), ("files", "other files"),
    ],
)  # fmt: skip
def test_a_planted_leak_is_found_in_a_real_process(what: str, quantity: str | None) -> None:
    leaky = Leaky(what)
    try:
        samples: list[Sample] = []
        for done in range(1, ROUNDS + 1):
            leaky.do(REQUESTS)
            samples.append(leaky.family.sample(done * REQUESTS))
    finally:
        leaky.end()
    assert leaking(trends(samples)) == ({("leaky", quantity)} if quantity else set())
    assert leaky.family.left() == []


@pytest.mark.parametrize("what", ["a shm file", "a child"])
def test_what_outlives_the_first_process_is_found(what: str) -> None:
    leaky = Leaky(what)
    leaky.do(1)
    names = {"leaky", "sleep-0"} if what == "a child" else {"leaky"}
    assert wait_for(lambda: set(leaky.family.sample(1).held) == names)
    leaky.end()
    (left,) = leaky.family.left()
    try:
        assert left.startswith("file /dev/shm/leaky-" if what == "a shm file" else "process ")
    finally:
        for path in leaky.family.shared_files:
            path.unlink(missing_ok=True)
        with suppress(ProcessLookupError):
            os.killpg(leaky.process.pid, signal.SIGKILL)
    assert wait_for(lambda: leaky.family.left() == [])


def test_a_process_keeps_its_name_when_it_is_started_again() -> None:
    program = "import subprocess, sys, time\nwhile True: subprocess.run(['sleep', '1000'])"
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as process:
        family = Family(process.pid, "first")
        try:
            assert wait_for(lambda: set(family.sample(0).held) == {"first", "sleep-0"})
            before = family.sample(0).held["sleep-0"].pid
            os.kill(before, signal.SIGKILL)
            assert wait_for(lambda: "sleep-0" in (held := family.sample(0).held) and held["sleep-0"].pid != before)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def series(amount: Callable[[int], float], quantity: str, *, life: Callable[[int], int] = lambda i: 1) -> list[Sample]:
    """Forty samples, 500 requests apart; one process whose life number i is `life(sample)`."""
    return [Sample(i * 500, {"engine-0": Resources(life(i), FLAT | {quantity: amount(i)})}) for i in range(40)]


MEMORY = "memory, MiB"
RNG = random.Random(7)
NOISE = [RNG.gauss(0, 1.5) for _ in range(40)]


@pytest.mark.parametrize(
    ("name", "samples", "leaks"),
    [
        ("flat", series(lambda i: 100, MEMORY), False),
        ("noise", series(lambda i: 100 + 5 * NOISE[i], MEMORY), False),
        ("a few odd samples", series(lambda i: 100 + 80 * (i in (22, 30, 39)), MEMORY), False),
        ("fills up in the first half", series(lambda i: min(i, 20) * 5, MEMORY), False),
        ("half of the limit", series(lambda i: 100 + i * 0.25, MEMORY), False),
        ("twice the limit", series(lambda i: 100 + i * 1.0, MEMORY), True),
        ("twice the limit under noise", series(lambda i: 100 + i * 1.0 + NOISE[i] / 3, MEMORY), True),
        ("fast in short lives", series(lambda i: 100 + i % 10 * 5, MEMORY, life=lambda i: i // 10), True),
        ("short lives that fill up when young", series(lambda i: min(i % 10, 3) * 9, MEMORY, life=lambda i: i // 10), False),
        ("other lives, other sizes", series(lambda i: i // 10 * 50, MEMORY, life=lambda i: i // 10), False),
        ("a socket now and then", series(lambda i: 10 + i // 6, "sockets"), True),
        ("threads once in a while", series(lambda i: 10 + i // 9, "threads"), True),
        ("a socket at each of two restarts of another", series(lambda i: 10 + (i > 15) + (i > 20), "sockets"), True),
        ("a file at the first of them", series(lambda i: 10 + (i > 2), "other files"), False),
        ("descriptors wander", series(lambda i: 10 + i % 3, "other files"), False),
        ("a pool still gains a little", series(lambda i: 10 + i // 6, "shared segments"), False),
        ("segments are lost", series(lambda i: 10 + i, "shared segments"), True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_made_up_series(name: str, samples: list[Sample], leaks: bool) -> None:
    assert bool(leaking(trends(samples))) == leaks, trends(samples)


def test_too_few_samples_say_nothing() -> None:
    with pytest.raises(ValueError, match="10 samples"):
        trends(series(lambda i: 1, MEMORY)[:10])
