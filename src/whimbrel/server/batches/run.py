"""Run of a batch file: its lines are answered some at a time, and their answers are written in the order of the lines."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Final, ParamSpec, TypeVar

from whimbrel.server.batches.journal import Journal, Progress
from whimbrel.server.batches.reading import Line, LineReader

P = ParamSpec("P")
T = TypeVar("T")
_COMMIT_SECONDS: Final = 0.25
_COMMIT_BYTES: Final = 8 * 2**20
_LARGEST_KEPT: Final = 0.95
"""Part of the largest answer's size that remains with each answer that is smaller."""
_CHECK_SECONDS: Final = 0.25
"""Time between two looks whether the run shall stop."""


@dataclass(frozen=True, slots=True)
class Window:
    """Bounds of the lines that are in memory at a time. A line above the bytes is alone."""

    max_lines: int = 32
    max_bytes: int = 8 * 2**20
    max_answer_bytes: int = 64 * 2**20
    """Bound of the answers to these lines, by the largest that came lately."""


@dataclass(frozen=True, slots=True)
class Written:
    """The answer of a line as it is written: the file, and a line of it without its end."""

    file: str
    data: bytes
    good: bool


Answer = Callable[[Line], Awaitable[Written]]


async def run_lines(
    reader: LineReader,
    journal: Journal,
    answer: Answer,
    *,
    window: Window,
    stops: Callable[[], Awaitable[bool]] | None = None,
    tell: Callable[[Progress], None] = lambda progress: None,
) -> bool:
    """Answer the lines of a reader, which begins where the journal ends. Return whether all are done.

    `stops` says whether the run shall end early. `tell` gets the counts of the finished lines. However the run ends, the
    journal has the answers until then, unless it cannot be written to. Raises OSError, and what `answer` raises.
    """
    run = _Run(reader, journal, answer, window)
    try:
        while await run.fill():
            await asyncio.wait([run.running[0][1]], timeout=_CHECK_SECONDS)
            run.collect()
            tell(run.progress)
            if stops is not None and run.is_due(_CHECK_SECONDS) and await stops():
                return False
            if run.wants_commit:
                await run.commit()
        return True
    finally:
        await run.cancel()
        await run.commit()


class _Run:
    def __init__(self, reader: LineReader, journal: Journal, answer: Answer, window: Window) -> None:
        self.progress = journal.progress
        self.running: deque[tuple[Line, asyncio.Future[Written]]] = deque()
        self._reader = reader
        self._journal = journal
        self._answer = answer
        self._window = window
        self._read: deque[Line] = deque()
        self._is_over = False
        self._num_bytes = 0
        self._answers: dict[str, list[bytes]] = {}
        self._answer_bytes = 0
        self._largest = 0
        self._num_collected = 0
        self._committed = self._checked = perf_counter()

    async def fill(self) -> bool:
        """Start lines while there is room. Return whether any runs."""
        while len(self.running) < self._max_running() and (not self.running or self._num_bytes < self._window.max_bytes):
            if not self._read and not self._is_over:
                self._read.extend(await asyncio.to_thread(self._reader.take, self._window.max_lines, self._window.max_bytes))
                self._is_over = not self._read
            if not self._read:
                break
            line = self._read.popleft()
            self._num_bytes += len(line.raw)
            self.running.append((line, asyncio.ensure_future(self._answer(line))))
        return bool(self.running)

    def _max_running(self) -> int:
        """Return the number of lines that may run: few at first, while the size of answers is not known."""
        by_answers = self._window.max_answer_bytes // max(self._largest, 1)
        return max(1, min(self._window.max_lines, 1 + 2 * self._num_collected, by_answers))

    def collect(self) -> None:
        """Take the answers that are there, up to the first line that still runs."""
        while self.running and self.running[0][1].done():
            line, task = self.running[0]
            written = task.result()
            self.running.popleft()
            self._num_bytes -= len(line.raw)
            self._answers.setdefault(written.file, []).append(written.data + b"\n")
            self._answer_bytes += len(written.data)
            self._largest = max(len(written.data), int(self._largest * _LARGEST_KEPT))
            self._num_collected += 1
            self.progress = Progress(
                number=line.number,
                offset=line.end,
                completed=self.progress.completed + written.good,
                failed=self.progress.failed + (not written.good),
            )

    def is_due(self, seconds: float) -> bool:
        """Return whether the last look is so long ago, and note this one."""
        now = perf_counter()
        if now - self._checked < seconds:
            return False
        self._checked = now
        return True

    @property
    def wants_commit(self) -> bool:
        return self._answer_bytes > _COMMIT_BYTES or perf_counter() - self._committed > _COMMIT_SECONDS

    async def commit(self) -> None:
        answers: Mapping[str, list[bytes]] = self._answers
        self._answers, self._answer_bytes = {}, 0
        if answers:
            await in_thread(self._journal.commit, self.progress, answers)
        self._committed = perf_counter()

    async def cancel(self) -> None:
        tasks = [task for _, task in self.running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def in_thread(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run a function in a thread. Cancelled, wait for its end: what it writes to is not closed before."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *args, **options))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
