"""Watchdog: finds the supervisor's children that hang.

An engine hangs if its status board stands still, if a batch takes too long, or if it does not load again. A worker hangs if its
event loop does not turn. If the watchdog itself stood still, because the machine slept, all children have time to recover.
"""

import logging
from time import perf_counter
from typing import Final

from whimbrel.server.processes.children import EngineChild, WorkerChild

_log = logging.getLogger("whimbrel")

TICK_SECONDS: Final = 0.25
_SILENCE_SECONDS: Final = 20.0
"""Seconds without a sign of life after which a process counts as hung; fewer for an engine with a shorter `step_seconds`."""
_MIN_SILENCE_SECONDS: Final = 5.0
_LOAD_SECONDS: Final = 60.0
"""Seconds that a worker may take to start, and an engine to load again, unless ten times its last load is more."""


class Watchdog:
    """Watchdog of all children. Call `tick` every `TICK_SECONDS`, and then `hang_reason` for every child."""

    def __init__(self, step_seconds: float) -> None:
        """A batch hangs if it takes longer than `step_seconds`, and ten times longer than at the measured throughput."""
        self._step_seconds = step_seconds
        self._silence = min(_SILENCE_SECONDS, max(_MIN_SILENCE_SECONDS, step_seconds))
        self._now = perf_counter()
        self._pardon_until = 0.0

    def tick(self) -> None:
        before, self._now = self._now, perf_counter()
        if self._now - before > 8 * TICK_SECONDS:
            _log.warning("the supervisor has stood still for %.1f s", self._now - before)
            self._pardon_until = self._now + _SILENCE_SECONDS

    def hang_reason(self, child: EngineChild | WorkerChild) -> str | None:
        """Return the reason why a child counts as hung, or None."""
        if self._now < self._pardon_until or child.process is None or child.process.returncode is not None:
            return None
        if isinstance(child, WorkerChild):
            limit = _SILENCE_SECONDS if child.ready else _LOAD_SECONDS
            return f"it stood still for {limit:.0f} s" if self._now - child.last_message > limit else None
        if child.ready:
            return self._engine_hang_reason(child)
        limit = max(_LOAD_SECONDS, 10 * child.load_seconds)
        loads_again = child.ready_since > 0.0  # the first load may take any time: it may download, and its progress is shown
        return f"it has been loading for {limit:.0f} s" if loads_again and self._now - child.started_at > limit else None

    def _engine_hang_reason(self, engine: EngineChild) -> str | None:
        board = engine.board
        if board is None or self._now - engine.ready_since < TICK_SECONDS:
            return None
        if self._now - max(board.last_beat, engine.ready_since) > self._silence:
            return f"it stood still for {self._silence:.0f} s"
        for batch in board.in_flight():
            lanes = engine.planned.plan.num_lanes if engine.planned is not None else 1
            expected = batch.num_tokens * lanes / board.rate if board.rate else 0.0  # the rate is that of all lanes
            limit = max(self._step_seconds, 10 * expected)
            if self._now - batch.started > limit:
                return f"a batch of {batch.num_tokens:,} tokens took longer than {limit:.0f} s"
        return None
