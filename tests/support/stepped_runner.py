"""A runner that stops at every launch until the test lets it go on, and requests for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from scripted_runner import EngineThreads, dense_job, vectors_of
from whimbrel.engine.engine_request import BatchItems, BatchObserver, Job
from whimbrel.types.batch import Batch
from whimbrel.types.seq import Seq


class Launch:
    """A batch that was launched and waits."""

    def __init__(self, batch: Batch, hook: Callable[[], None] | None) -> None:
        self.words: list[int] = batch.ids_T[batch.cu_seqlens[:-1] + 1].tolist()
        self.hook = hook
        self.vectors = vectors_of(batch)
        self.thread = threading.current_thread().name
        self._actions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def finish(self) -> None:
        """Let it be computed."""
        self._actions.put(None)

    def do(self, action: Callable[[], None]) -> None:
        """Call this in the lane's thread, and wait on."""
        self._actions.put(action)

    def fail(self, error: BaseException) -> None:
        def action() -> None:
            raise error

        self._actions.put(action)

    def run(self) -> None:
        while (action := self._actions.get(timeout=60)) is not None:
            action()


class StepRunner:
    """A runner under the test's hand. Its model is that of ScriptedRunner."""

    def __init__(self) -> None:
        self._launched: SimpleQueue[Launch] = SimpleQueue()
        self.collect_gate = threading.Event()
        self.collect_gate.set()

    def init_thread(self, *, urgent: bool = False) -> None: ...

    def launch(self, batch: Batch, wanted: Any, between_layers: Callable[[], None] | None = None) -> np.ndarray:
        launch = Launch(batch, between_layers)
        self._launched.put(launch)
        launch.run()
        return launch.vectors

    def collect(self, pending: np.ndarray) -> dict[str, np.ndarray]:
        assert self.collect_gate.wait(60)
        return {"dense": pending}

    def next(self) -> Launch:
        """The next batch that is launched."""
        return self._launched.get(timeout=60)

    def next_finished(self) -> Launch:
        """The next batch that is launched, let go."""
        launch = self.next()
        launch.finish()
        return launch

    def is_quiet(self, seconds: float = 0.2) -> bool:
        """True if nothing is launched for a while."""
        try:
            return not self._launched.get(timeout=seconds).words
        except Empty:
            return True


Start = Callable[..., EngineThreads]


def job(*words: int, size: int = 3, dimensions: int = 384, deadline: float | None = None, **fields: Any) -> Job:
    """A request of texts that begin with these words and have these numbers of tokens."""
    seqs = [Seq(np.array([101, word, *[102] * (size - 2)], np.int32), index) for index, word in enumerate(words)]
    late = {} if deadline is None else {"deadline": time.perf_counter() + deadline}
    return dense_job(seqs, dimensions, fill=-1.0, **late, **fields)


def bulk(*words: int, **fields: Any) -> Job:
    """One that is not small."""
    return job(*words, size=200, **fields)


def answer(job: Job) -> list[float]:
    """The words that the vectors of a job tell of."""
    return job.future.result(60).dense[:, 0].tolist()


def error(job: Job) -> BaseException | None:
    return job.future.exception(60)


class Observer(BatchObserver):
    """Keeps what an observer of batches is told."""

    def __init__(self) -> None:
        self.on_device: dict[int, list[int]] = {}
        self.history: list[list[int]] = []
        self._lock = threading.Lock()

    def started(self, items: BatchItems) -> int:
        with self._lock:
            slot = len(self.history)
            self.history.append([int(seq.ids[1]) for _, seq in items])
            self.on_device[slot] = self.history[-1]
            return slot

    def resumed(self, slot: int) -> None: ...

    def ended(self, slot: int) -> None:
        with self._lock:
            del self.on_device[slot]
