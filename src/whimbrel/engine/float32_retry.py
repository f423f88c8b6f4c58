"""Second opinions: texts whose vector was not finite, each to be run again alone, by a runner that is loaded for it.

A thread, started when it is needed, loads the runner, works while there are such texts, and then drops it: a second model
takes memory. Knows neither the engine's lock nor its answers; `run` does what is to be done with a text.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import Lock, Thread
from typing import TypeAlias

from whimbrel.engine.job import Job, RunnerProtocol
from whimbrel.types.seq import Seq

_log = logging.getLogger("whimbrel")

Run: TypeAlias = Callable[[Job, Seq, RunnerProtocol | None], None]
"""Runs a text with the second runner and answers; without one if it could not be loaded. Must not raise."""


class SecondOpinion:
    """The queue of such texts, and the thread that works on it."""

    def __init__(
        self, load: Callable[[], RunnerProtocol], run: Run, thread: Callable[[str, Callable[[], None]], Thread]
    ) -> None:
        """`thread` makes a thread of a name and a body."""
        self._load = load
        self._run = run
        self._make_thread = thread
        self._lock = Lock()
        self._queue: deque[tuple[Job, Seq]] = deque()
        self._thread: Thread | None = None

    def add(self, job: Job, seq: Seq) -> None:
        """Queue a text."""
        with self._lock:
            self._queue.append((job, seq))
            if self._thread is None:
                self._thread = self._make_thread("second", self._work)
                self._thread.start()

    def close(self) -> None:
        """Wait until all that was queued is answered; nothing may be queued meanwhile."""
        if (thread := self._thread) is not None:
            thread.join()

    def _work(self) -> None:
        runner = self._loaded()
        while (item := self._next()) is not None:
            self._run(*item, runner)

    def _next(self) -> tuple[Job, Seq] | None:
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            self._thread = None
            return None

    def _loaded(self) -> RunnerProtocol | None:
        try:
            runner = self._load()
            runner.init_thread()
        except BaseException as error:  # whatever it is, the texts get an answer
            _log.error("the second runner, for texts whose vector is not finite, could not be loaded", exc_info=error)
            return None
        return runner
