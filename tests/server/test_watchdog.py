"""The watchdog reports every process that stands still, and none that works."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from whimbrel.server.processes import children
from whimbrel.server.processes.children import TICK_SECONDS, EngineChild, Watchdog, WorkerChild
from whimbrel.server.processes.shared_memory import StatusBoard


class Clock:
    """Time under the test's hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(children, "perf_counter", lambda: self.now)

    def ask(self, dog: Watchdog, child: Any, seconds: float) -> str | None:
        """Return the first message within `seconds`."""
        for _ in range(int(seconds / TICK_SECONDS)):
            self.now += TICK_SECONDS
            dog.tick()
            if isinstance(child, EngineChild) and child.board is not None and child.name == "beats":
                child.board.beat(self.now, queued=0, small=0, rate=child.board.rate)
            if why := dog.hang_reason(child):
                return why
        return None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def engine(clock: Clock, *, rate: float = 0.0, num_lanes: int = 1, name: str = "beats") -> EngineChild:
    child = EngineChild(name)
    child.process = SimpleNamespace(returncode=None)  # pyright: ignore[reportAttributeAccessIssue]
    child.planned = SimpleNamespace(plan=SimpleNamespace(num_lanes=num_lanes))  # pyright: ignore[reportAttributeAccessIssue]
    child.board, _ = StatusBoard.create(4, 16)
    child.board.beat(clock.now, queued=0, small=0, rate=rate)
    child.ready, child.ready_since = True, clock.now
    return child


def worker(clock: Clock, *, ready: bool) -> WorkerChild:
    child = WorkerChild("worker-0")
    child.process = SimpleNamespace(returncode=None)  # pyright: ignore[reportAttributeAccessIssue]
    child.ready, child.last_message = ready, clock.now
    return child


def test_an_engine_that_beats_and_has_nothing_to_do_is_well(clock: Clock) -> None:
    assert clock.ask(Watchdog(1.0), engine(clock), 1000) is None


def test_a_batch_may_take_ten_times_what_it_usually_takes(clock: Clock) -> None:
    """The rate is that of all lanes together, and a batch runs on one."""
    child = engine(clock, rate=640.0, num_lanes=32)  # 20 tokens per second on each
    assert child.board is not None
    child.board.start(0, clock.now, [], 8192)
    assert clock.ask(Watchdog(60.0), child, 4000) is None
    assert "8,192 tokens took longer than 4096 s" in (clock.ask(Watchdog(60.0), child, 200) or "")


def test_a_batch_that_others_ran_in_the_midst_of_has_its_time_anew(clock: Clock) -> None:
    child = engine(clock)
    assert child.board is not None
    child.board.start(0, clock.now, [], 100)
    dog = Watchdog(60.0)
    for _ in range(10):
        assert clock.ask(dog, child, 50) is None
        child.board.restart(0, clock.now)
    assert "longer than 60 s" in (clock.ask(dog, child, 70) or "")


@pytest.mark.parametrize(("step_seconds", "limit"), [(0.1, 5), (7.0, 7), (60.0, 20)])
def test_an_engine_that_does_not_beat_stands_still(step_seconds: float, limit: int, clock: Clock) -> None:
    child = engine(clock, name="silent")
    before = clock.now
    assert clock.ask(Watchdog(step_seconds), child, 100) == f"it stood still for {limit} s"
    assert limit <= clock.now - before <= limit + 1


@pytest.mark.parametrize("step_seconds", [0.1, 60.0])
@pytest.mark.parametrize(("ready", "limit"), [(True, 20), (False, 60)])
def test_a_worker_that_is_silent_stands_still(ready: bool, limit: int, step_seconds: float, clock: Clock) -> None:
    child = worker(clock, ready=ready)
    before = clock.now
    assert clock.ask(Watchdog(step_seconds), child, 100) == f"it stood still for {limit} s"
    assert limit <= clock.now - before <= limit + 1


def test_an_engine_that_loads_for_the_first_time_may_take_its_time(clock: Clock) -> None:
    child = engine(clock)
    child.ready, child.ready_since, child.started_at = False, 0.0, clock.now
    assert clock.ask(Watchdog(60.0), child, 3600) is None


def test_an_engine_that_does_not_load_again_stands_still(clock: Clock) -> None:
    child = engine(clock)
    child.ready, child.started_at, child.load_seconds = False, clock.now, 10.0
    assert clock.ask(Watchdog(60.0), child, 99) is None
    assert clock.ask(Watchdog(60.0), child, 10) == "it has been loading for 100 s"


def test_who_has_slept_with_the_watchdog_has_time_to_wake_up(clock: Clock) -> None:
    dog = Watchdog(60.0)
    child = worker(clock, ready=True)
    clock.now += 3600
    assert clock.ask(dog, child, 19) is None
    assert clock.ask(dog, child, 2) == "it stood still for 20 s"


def test_the_dead_are_somebody_else_s_business(clock: Clock) -> None:
    child = worker(clock, ready=True)
    child.process = SimpleNamespace(returncode=-9)  # pyright: ignore[reportAttributeAccessIssue]
    assert clock.ask(Watchdog(60.0), child, 100) is None
