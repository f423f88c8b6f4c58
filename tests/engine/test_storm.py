"""Everything at once: many threads, faults, suspects, deadlines, cancellation. Every request gets the one answer that is right."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripted_runner import EngineThreads, dense_job, response_of, vectors_of
from whimbrel.checkpoint.reader import read_card
from whimbrel.engine.engine_request import BatchItems, Job
from whimbrel.errors import ComputeError, DeadlineExceeded, NonFinite, OutOfMemory
from whimbrel.types.batch import Batch
from whimbrel.types.hardware import Hardware
from whimbrel.types.plan import Options, make_plan
from whimbrel.types.result import Result
from whimbrel.types.seq import Seq

RAISES, NO_MEMORY, NOT_FINITE, SHAPE = 100, 200, 300, 400
ERRORS = {RAISES: ComputeError, NO_MEMORY: OutOfMemory, NOT_FINITE: NonFinite, SHAPE: ComputeError}
SUSPECT = 1000
"""Words from here on are of suspects."""


class StormRunner:
    """Fails as the words of a batch say, takes a random time, and now and then is out of memory for large batches."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def init_thread(self, *, urgent: bool = False) -> None: ...

    def launch(self, batch: Batch, wanted: Any, between_layers: Callable[[], None] | None = None) -> np.ndarray:
        words = batch.ids_T[batch.cu_seqlens[:-1] + 1]
        for _ in range(2):
            time.sleep(self._random.random() / 1000)
            if between_layers:
                between_layers()
        if RAISES in words:
            raise RuntimeError("scripted")
        if NO_MEMORY in words or (batch.num_seqs > 3 and self._random.random() < 0.1):
            raise MemoryError("scripted")
        vectors = vectors_of(batch)
        vectors[words == NOT_FINITE] = np.nan
        return vectors[1:] if SHAPE in words else vectors

    def collect(self, pending: np.ndarray) -> dict[str, np.ndarray]:
        time.sleep(self._random.random() / 2000)
        return {"dense": pending}


class Watch:
    """A recorder that sees to it that suspects are alone, and few."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.on_device: dict[int, BatchItems] = {}
        self.wrong: list[str] = []
        self._slots = 0

    def started(self, items: BatchItems) -> int:
        with self._lock:
            self._slots += 1
            self.on_device[self._slots] = items
            among = [any(_suspect(one) for one in others) for others in self.on_device.values()]
            if any(among) and len(among) > 1:
                self.wrong.append("suspects are not alone")
            if any(_suspect(one) and len(items) > one[0].request.scheduling.suspects[one[1].index] for one in items):
                self.wrong.append("suspects are too many")
            return self._slots

    def resumed(self, slot: int) -> None: ...

    def ended(self, slot: int) -> None:
        with self._lock:
            del self.on_device[slot]


def _suspect(one: tuple[Job, Seq]) -> bool:
    return int(one[1].ids[1]) >= SUSPECT


def any_job(choose: random.Random) -> Job:
    count = choose.choice([1, 1, 1, 2, 5, 40])
    words = choose.choices(range(1, 99), k=count)
    if choose.random() < 0.2:
        words[choose.randrange(count)] = choose.choice([*ERRORS])
    suspects = {}
    if choose.random() < 0.1:
        words = [SUSPECT + word if word < 99 else word for word in words]
        suspects = {index: choose.randint(1, 3) for index, word in enumerate(words) if word >= SUSPECT}
    seqs = [Seq(np.array([101, word, *[102] * choose.randint(0, 20)], np.int32), index) for index, word in enumerate(words)]
    deadline = time.perf_counter() + choose.choice([0.001, 0.02, 60, 60, 60, 60])
    urgency = choose.choice([0, 0, 0, 1])
    return dense_job(seqs, priority=urgency, deadline=deadline, tenant=choose.choice("abc"), suspects=suspects)


def reuse_memory(job: Job, future: Future[Result]) -> None:
    """Write over the memory, as a tenant of shared memory may once a request is over."""
    if future.cancelled() or future.exception():
        response_of(job).fill(-7)


def check(job: Job) -> str:
    """True if the answer of a job is one that it may have."""
    if job.future.cancelled():
        return "cancelled"
    error = job.future.exception(120)
    words = [int(seq.ids[1]) for seq in job.request.seqs]
    if error is None:
        vectors = job.future.result().dense
        assert vectors[:, 0].tolist() == words
        assert vectors[:, 1].tolist() == [seq.ids.size for seq in job.request.seqs]
        assert not set(words) & set(ERRORS)
        return "answered"
    if isinstance(error, DeadlineExceeded):
        assert job.request.scheduling.deadline <= time.perf_counter()
        return "late"
    (culprit,) = set(words) & set(ERRORS)
    assert type(error) is ERRORS[culprit]
    return "failed"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sample(1)
def test_every_request_gets_the_one_answer_that_is_right(seed: int, minilm: Path) -> None:
    card = read_card(minilm, "all-MiniLM-L6-v2")
    plan = make_plan(Options(max_batch_tokens=128), card, Hardware(num_cores=4))
    watch = Watch()
    lanes = EngineThreads(StormRunner(seed), card, plan, watch)

    def client(number: int) -> list[Job]:
        choose, jobs = random.Random(seed * 100 + number), list[Job]()
        for _ in range(150):
            jobs.append(any_job(choose))
            try:
                lanes.submit(jobs[-1])
                jobs[-1].future.add_done_callback(partial(reuse_memory, jobs[-1]))
            except DeadlineExceeded:
                jobs.pop()
            if choose.random() < 0.1 and jobs:
                jobs[-1].future.cancel()
            time.sleep(choose.choice([0, 0, 0.002]))
        return jobs

    with ThreadPoolExecutor(4) as pool:
        jobs: list[Job] = [job for jobs in pool.map(client, range(4)) for job in jobs]
    outcomes = dict.fromkeys(("answered", "failed", "late", "cancelled"), 0)
    for job in jobs:
        outcomes[check(job)] += 1
    lanes.close()
    assert all((response_of(job) == -7).all() for job in jobs if job.future.cancelled() or job.future.exception())
    assert min(outcomes.values()) > 0
    assert (watch.wrong, watch.on_device) == ([], {})
    dispatch: Any = lanes.dispatcher
    assert (dispatch._jobs, dispatch._num_bytes, dispatch._in_flight, dispatch._scheduler.queued_tokens) == (set(), 0, 0, 0)
    assert (dispatch._overtakable, dispatch._num_idle) == ([], 0)
