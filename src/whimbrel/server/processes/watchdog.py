"""Sees which of the supervisor's children stand still.

An engine whose board has not been written for a while or whose batch takes too long, an engine that does not load again, a
worker whose event loop does not turn. If the watchdog itself has stood still (the machine slept), all have time to recover.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import Final

from whimbrel.server.processes.children import EngineChild, WorkerChild

_log = logging.getLogger("whimbrel")

TICK_SECONDS: Final = 0.25
"""Seconds between two checks."""
_SILENCE_SECONDS: Final = 20.0
"""Seconds without a sign of life after which a process counts as hung; fewer for an engine whose batches are shorter."""
_LEAST_SILENCE_SECONDS: Final = 5.0
"""Least seconds of silence after which an engine counts as hung."""
_LOAD_SECONDS: Final = 60.0
"""Seconds that a worker may take to start, and an engine to load again, unless ten times its last load is more."""


class Watchdog:
    """Call `tick` every `TICK_SECONDS`, and then ask `why` of every child."""

    def __init__(self, step_seconds: float) -> None:
        """A batch that takes longer than `step_seconds`, and ten times longer than the measured rate says, hangs."""
        self._step_seconds = step_seconds
        self._silence = min(_SILENCE_SECONDS, max(_LEAST_SILENCE_SECONDS, step_seconds))
        self._now = perf_counter()
        self._forgiven_until = 0.0

    def tick(self) -> None:
        """Look at the clock."""
        before, self._now = self._now, perf_counter()
        if self._now - before > 8 * TICK_SECONDS:
            _log.warning("the supervisor has stood still for %.1f s", self._now - before)
            self._forgiven_until = self._now + _SILENCE_SECONDS

    def hang_reason(self, child: EngineChild | WorkerChild) -> str | None:
        """Return the reason why a child counts as hung, or None."""
        if self._now < self._forgiven_until or child.process is None or child.process.returncode is not None:
            return None
        if isinstance(child, WorkerChild):
            return self._why_worker(child)
        return self._why_ready(child) if child.ready else self._why_loading(child)

    def _why_worker(self, worker: WorkerChild) -> str | None:
        limit = _SILENCE_SECONDS if worker.ready else _LOAD_SECONDS
        return f"it stood still for {limit:.0f} s" if self._now - worker.heard > limit else None

    def _why_ready(self, engine: EngineChild) -> str | None:
        board = engine.board
        if board is None or self._now - engine.ready_since < TICK_SECONDS:
            return None
        if self._now - max(board.last_beat, engine.ready_since) > self._silence:
            return f"it stood still for {self._silence:.0f} s"
        for flight in board.flights():
            lanes = engine.planned.plan.num_lanes if engine.planned is not None else 1
            usual = flight.num_tokens * lanes / board.rate if board.rate else 0.0  # the rate is that of all lanes
            limit = max(self._step_seconds, 10 * usual)
            if self._now - flight.started > limit:
                return f"a batch of {flight.num_tokens:,} tokens took longer than {limit:.0f} s"
        return None

    def _why_loading(self, engine: EngineChild) -> str | None:
        """The first time it may take as long as it wants: it may download, and somebody watches."""
        limit = max(_LOAD_SECONDS, 10 * engine.load_seconds)
        late = engine.ready_since > 0.0 and self._now - engine.begun > limit
        return f"it has been loading for {limit:.0f} s" if late else None
