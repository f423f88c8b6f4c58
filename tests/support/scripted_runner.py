"""A runner in place of the model whose answers, waits and errors a test scripts by words in a text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import whimbrel.model.runner
from whimbrel import Engine
from whimbrel.engine.dispatcher import Dispatcher
from whimbrel.engine.engine_request import BatchObserver, EngineRequest, Job
from whimbrel.engine.finish_pool import FinishPool
from whimbrel.engine.lanes import Lanes
from whimbrel.outputs.finishers import RowsFinisher
from whimbrel.outputs.layout import plan_layout
from whimbrel.outputs.merge import ReturnRows
from whimbrel.outputs.requested import OutputSpec
from whimbrel.outputs.rows import select_rows
from whimbrel.types.batch import Batch
from whimbrel.types.card import Card, Output
from whimbrel.types.plan import Plan
from whimbrel.types.request import Request
from whimbrel.types.scheduling import Scheduling
from whimbrel.types.seq import Seq


class ScriptedRunner:
    """A model whose vector of a text is (its first word's id, its number of tokens, 1, 1, ...). Some words are scripted.

    "gate" holds its batch until `gate` is set, "error" and "fatal" make it raise, "infinity" gives a non-finite row.
    `collect_gate` holds the collector.
    """

    gate: threading.Event
    collect_gate: threading.Event
    launched: list[int]
    seen: threading.Semaphore
    barrier: threading.Barrier | None = None
    unstable: Sequence[str] = ()
    GATE, ERROR, FATAL, INFINITY, COLLECT_ERROR, BOTH = 4796, 7561, 10611, 15579, 6000, 6001

    def __init__(self, *_: Any) -> None: ...

    def init_thread(self, *, urgent: bool = False) -> None: ...

    def launch(self, batch: Batch, wanted: Any, between_layers: Callable[[], None] | None = None) -> np.ndarray:
        assert wanted["dense"].activated_P.size == batch.num_seqs
        self.launched.append(batch.num_seqs)
        self.seen.release()
        ids = set(batch.ids_T.tolist())
        if self.GATE in ids:
            assert self.gate.wait(30)
        if self.ERROR in ids:
            raise RuntimeError("scripted")
        if self.FATAL in ids:
            raise SystemExit
        if self.BOTH in ids and self.barrier is not None:
            self.barrier.wait(30)
            raise RuntimeError("scripted, in both lanes at once")
        return vectors_of(batch, infinity=self.INFINITY)

    def collect(self, pending: np.ndarray) -> dict[str, np.ndarray]:
        assert self.collect_gate.wait(30)
        if self.COLLECT_ERROR in pending[:, 0]:
            raise RuntimeError("scripted")
        return {"dense": pending}


def vectors_of(batch: Batch, *, infinity: int | None = None) -> np.ndarray:
    """Return the vectors of the scripted model."""
    starts = batch.cu_seqlens[:-1]
    vectors = np.ones((batch.num_seqs, 384), np.float32)
    vectors[:, 0] = batch.ids_T[np.minimum(starts + 1, batch.num_tokens - 1)]
    vectors[:, 1] = np.diff(batch.cu_seqlens)
    vectors[vectors[:, 0] == infinity, 5] = np.inf
    return vectors


class EngineThreads:
    """The dispatcher, the finish pool and the lanes of an engine that runs a scripted runner."""

    def __init__(self, runner: Any, card: Card, plan: Plan, observer: BatchObserver | None = None) -> None:
        self.dispatcher = Dispatcher(plan)
        self.finishing = FinishPool(self.dispatcher, plan.num_lanes, runner.init_thread)
        self.lanes = Lanes(runner, card, plan, self.dispatcher, self.finishing, observer=observer or BatchObserver())
        self.submit = self.finishing.submit

    def close(self) -> None:
        """End them, as an engine does."""
        self.lanes.close()
        self.finishing.close()


def dense_job(seqs: Sequence[Seq], width: int = 384, *, fill: float = 0.0, **scheduling: Any) -> Job:
    """A request for the dense vectors of MiniLM; `scheduling` are fields of Scheduling."""
    card: Any = SimpleNamespace(all_outputs={"dense": Output(384, modes=("mean",), activation="normalize")})
    layout = plan_layout(card, seqs, [OutputSpec("dense", width, True)])
    request = EngineRequest(seqs, layout, time.perf_counter(), scheduling=Scheduling(**scheduling))
    memory = np.empty(layout.num_bytes, np.uint8)
    memory.view(np.float32).fill(fill)
    return Job(Future(), request, RowsFinisher(layout, memory, ReturnRows(), num_seqs=len(seqs)))


def response_of(job: Job) -> np.ndarray:
    """The memory of a job's vectors."""
    return job.finisher._arrays["dense"]  # pyright: ignore


def dense_wanted(batch: Batch) -> dict[Any, Any]:
    """The dense vectors of all seqs of a batch."""
    card: Any = SimpleNamespace(all_outputs={"dense": Output(384, modes=("mean",), activation="normalize")})
    return select_rows(card, batch, [plan_layout(card, [], [OutputSpec("dense", 384, True)])] * batch.num_seqs)


def install(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedRunner]:
    """Make engines run a ScriptedRunner. Returns its class, which holds its state."""

    class Runner(ScriptedRunner):
        gate = threading.Event()
        collect_gate = threading.Event()
        launched: list[int] = []  # noqa: RUF012
        seen = threading.Semaphore(0)

    Runner.collect_gate.set()
    monkeypatch.setattr(whimbrel.model.runner, "Runner", Runner)
    return Runner


def ids(*words: int) -> Any:
    """A request of texts of one word."""
    return Request([np.array([101, word, 102], np.int64) for word in words])


def block(engine: Engine, runner: type[ScriptedRunner]) -> list[Future[Any]]:
    """Occupy every lane until `gate` is set, with bulk that is more urgent than what it would let overtake."""
    runner.launched.clear()
    futures: list[Future[Any]] = []
    for lane in range(engine.plan.num_lanes):
        futures.append(engine.submit(Request([np.full(200, runner.GATE, np.int64)]), Scheduling(priority=-1)))
        while len(runner.launched) <= lane:
            assert runner.seen.acquire(timeout=30)
    return futures
