"""Runner of batches: one process of a server validates them, has their lines answered after all other requests, and publishes.

Theory of operation. The process that holds the lock of the folder runs batches; when it dies, another gets the lock. Each step
of a batch begins with what the disk says and ends with a record on the disk, so any step may be repeated. A batch of each
owner runs at a time, the oldest first, and owners beside each other. Lines are sent with the lowest priority, few at a time. A
line that the server has no room for, or no budget, is sent again later, and of several such lines of a batch one at a time.

It knows no HTTP and no models: `ask` answers lines.
"""

import asyncio
import errno
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from whimbrel.server.batches import lines
from whimbrel.server.batches.journal import Journal, Progress, read_progress
from whimbrel.server.batches.lines import LineAnswer, LineError
from whimbrel.server.batches.reading import Line, LineReader
from whimbrel.server.batches.records import MAX_REQUESTS, BatchRecord, BatchState, Problem, Status, new_id, now
from whimbrel.server.batches.run import Window, Written, in_thread, run_lines
from whimbrel.server.batches.store import ERRORS, INPUT, OUTPUT, Store
from whimbrel.server.keys import ApiKey

_log = logging.getLogger("whimbrel")

_POLL_SECONDS: Final = 0.5
_SWEEP_SECONDS: Final = 60.0
_AGAIN_SECONDS: Final = 5.0
"""Time until the end of a batch is written again, where the disk had no room for it."""
_LONGEST_PAUSE: Final = 60.0
_ROOM_SECONDS: Final = 5.0
"""Time between two looks at the room that all files take."""
_MAX_PROBLEMS: Final = 100
_MAX_OWNERS: Final = 8
"""Owners whose batches run beside each other."""
_CHUNK: Final = 1000
_NOT_RUN: Final[dict[str, tuple[str, str]]] = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed, since the batch was cancelled."),
}


class Ask(Protocol):
    async def __call__(self, path: str, body: bytes, *, request_id: str, key: ApiKey | None = None) -> LineAnswer: ...


class KeyGone(Exception):
    """The key that made a batch is no key of the server any more."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The part of a server that its batches use."""

    ask: Ask
    find_key: Callable[[str], ApiKey | None]
    """Return the key of an owner, None if the server needs none. Raises KeyGone."""
    window: Callable[[], Window]
    max_line_bytes: int


class _Failed(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(code=code, message=message)


@dataclass(slots=True)
class BatchRunner:
    store: Store
    serving: Serving
    _ended: set[str] = field(default_factory=set[str])
    """Batches that are known to have ended."""
    _tasks: dict[str, tuple[str, asyncio.Task[None]]] = field(default_factory=dict[str, "tuple[str, asyncio.Task[None]]"])
    """Batch -> its owner and its task."""
    _running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run batches from now on, once no other process does."""
        self._running = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """End the lines that run. Their batches go on in another process, or after the next start."""
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running

    async def _run(self) -> None:
        while True:
            try:
                with self.store.running() as holds:
                    if holds:
                        await self._run_all()
            except Exception as error:
                _log.error("the folder of batches: %s", error, exc_info=not isinstance(error, OSError))
                await asyncio.sleep(_AGAIN_SECONDS)
            await asyncio.sleep(_POLL_SECONDS)

    async def _run_all(self) -> None:
        """Run the batches that are there, and those that come, until this is cancelled."""
        swept = -_SWEEP_SECONDS
        try:
            while True:
                moment = asyncio.get_running_loop().time()
                try:
                    if moment - swept >= _SWEEP_SECONDS:
                        swept = moment
                        await in_thread(self.store.sweep)
                    await self._begin_next()
                except (OSError, ValueError) as error:
                    _log.error("the folder of batches: %s", error)
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            tasks = [task for _, task in self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks.clear()

    async def _begin_next(self) -> None:
        """Begin batches whose turn it is, and those that are to end without a turn."""
        self._tasks = {batch_id: each for batch_id, each in self._tasks.items() if not each[1].done()}
        for record in await asyncio.to_thread(self.store.unfinished, self._ended):
            if record.id in self._tasks:
                continue
            busy = {owner for owner, _ in self._tasks.values()}
            has_turn = record.owner not in busy and len(busy) < _MAX_OWNERS
            if has_turn or await asyncio.to_thread(self._is_over, record):
                self._tasks[record.id] = record.owner, asyncio.ensure_future(self._work(record))

    def _is_over(self, record: BatchRecord) -> bool:
        return record.expires_at <= now() or self.store.cancelled_at(record.id) is not None

    async def _work(self, record: BatchRecord) -> None:
        """Bring a batch to its end, whatever happens to it."""
        try:
            ended = await self._to_end(record, await asyncio.to_thread(self.store.state, record.id))
        except (_Failed, KeyGone, OSError) as error:
            ended = _failed(await asyncio.to_thread(self._last_state, record), _problem(error))
            _log.warning("batch %s failed: %s", record.id, ended.problems[0].message)
        except Exception as error:
            _log.error("batch %s failed. This is a bug.", record.id, exc_info=error)
            ended = _failed(await asyncio.to_thread(self._last_state, record), _problem(error))
        await self._end(record, ended)

    def _last_state(self, record: BatchRecord) -> BatchState:
        try:
            return self.store.state(record.id)
        except (OSError, ValueError):
            return BatchState()

    async def _end(self, record: BatchRecord, state: BatchState) -> None:
        """Write the last state, with the room that the batch's own answers took if there is no other."""
        while True:
            try:
                await in_thread(self.store.write_state, record.id, state)
                break
            except OSError:
                with suppress(OSError):
                    await asyncio.to_thread((self.store.batch_folder(record.id) / ERRORS).unlink, missing_ok=True)
                    await asyncio.to_thread((self.store.batch_folder(record.id) / OUTPUT).unlink, missing_ok=True)
                    await in_thread(self.store.write_state, record.id, state)
                    break
                await asyncio.sleep(_AGAIN_SECONDS)
        with suppress(OSError):
            await in_thread(self.store.drop_work, record.id)

    async def _to_end(self, record: BatchRecord, state: BatchState) -> BatchState:
        async def save(**changes: Any) -> BatchState:
            saved = msgspec.structs.replace(state, **changes)
            await in_thread(self.store.write_state, record.id, saved)
            return saved

        if state.status == "validating":
            self.serving.find_key(record.owner)
            total, problems = await asyncio.to_thread(validate, self.store, record, self.serving.max_line_bytes)
            if problems:
                return msgspec.structs.replace(state, status="failed", ended_at=now(), problems=tuple(problems), total=total)
            state = await save(status="in_progress", in_progress_at=now(), total=total)
        if state.status == "in_progress":
            outcome = await self._answer_lines(record, state)
            sizes = read_progress(self.store.batch_folder(record.id)).sizes
            state = await save(
                status="finalizing",
                outcome=outcome,
                finalizing_at=now(),
                output_file_id=new_id("file-") if sizes.get(OUTPUT) else None,
                error_file_id=new_id("file-") if sizes.get(ERRORS) else None,
            )
        for name, file_id in ((OUTPUT, state.output_file_id), (ERRORS, state.error_file_id)):
            if file_id is not None:
                await in_thread(self.store.publish, record, name, file_id)
        return msgspec.structs.replace(state, status=state.outcome or "completed", ended_at=now())

    async def _answer_lines(self, record: BatchRecord, state: BatchState) -> Status:
        """Have lines answered until all are, or the batch is cancelled or expires. Return the status that it will have."""
        journal = await in_thread(Journal, self.store.batch_folder(record.id), (OUTPUT, ERRORS))
        outcome: Status = "completed"
        clock = asyncio.get_running_loop().time
        others, looked = 0, -_ROOM_SECONDS

        async def stops() -> bool:
            nonlocal outcome, others, looked
            if clock() - looked >= _ROOM_SECONDS:  # other batches grow too
                others = await asyncio.to_thread(self.store.used) - sum(journal.progress.sizes.values())
                looked = clock()
            if await asyncio.to_thread(self.store.cancelled_at, record.id) is not None:
                outcome = "cancelled"
            elif now() >= record.expires_at:
                outcome = "expired"
            elif others + sum(journal.progress.sizes.values()) > self.store.limits.max_bytes:
                most = self.store.limits.max_bytes
                raise _Failed("no_room", f"with the answers so far, all files have more than {most:,} bytes, the limit.")
            return outcome != "completed"

        try:
            start = journal.progress
            path = self.store.batch_folder(record.id) / INPUT
            most = self.serving.max_line_bytes
            with LineReader(path, max_bytes=most, number=start.number, offset=start.offset) as reader:
                window = self._window(record)
                if not await stops():
                    answer = partial(self._answer, record, asyncio.Lock())
                    await run_lines(reader, journal, answer, window=window, stops=stops)
            if outcome != "completed":
                await in_thread(_fill, journal, path, record, outcome, most)
            return outcome
        finally:
            journal.close()

    def _window(self, record: BatchRecord) -> Window:
        """Return the bounds of the lines that run at a time: half of the requests in flight that a key may have, at most."""
        window, key = self.serving.window(), self.serving.find_key(record.owner)
        if key is None or key.requests_in_flight is None:
            return window
        return Window(max(1, min(window.max_lines, key.requests_in_flight // 2)), window.max_bytes)

    async def _answer(self, record: BatchRecord, gate: asyncio.Lock, line: Line) -> Written:
        line_id = lines.id_of(record.id, line.number)
        try:
            request = _request(line, self.serving.max_line_bytes)
        except LineError as error:  # the file was validated, by another version perhaps
            custom_id, answer = error.custom_id, lines.refusal(error, line.number)
        else:
            custom_id = request.custom_id
            answer = lines.readable(await self._patiently(record, gate, request, line_id))
        return Written(
            OUTPUT if answer.is_good else ERRORS, lines.render_for_openai(line_id, custom_id, answer), answer.is_good
        )

    async def _patiently(self, record: BatchRecord, gate: asyncio.Lock, request: lines.BatchLine, line_id: str) -> LineAnswer:
        """Return the answer to a line. Of the lines that may succeed later, the one that holds the gate is sent again."""
        clock = asyncio.get_running_loop().time

        async def ask() -> tuple[LineAnswer, float]:
            key = self.serving.find_key(record.owner)
            answer = await self.serving.ask(request.url, bytes(request.body), request_id=line_id, key=key)
            return answer, clock() + min(answer.retry_after or 0.0, _LONGEST_PAUSE)

        answer, again = await ask()
        if answer.retry_after is not None:
            async with gate:
                while answer.retry_after is not None:
                    await asyncio.sleep(again - clock())
                    answer, again = await ask()
        return answer


def validate(store: Store, record: BatchRecord, max_line_bytes: int) -> tuple[int, list[Problem]]:
    """Return the number of requests of a batch, and the faults of its lines: at most a hundred."""
    problems: list[Problem] = []
    total, seen = 0, set[int]()
    with LineReader(store.batch_folder(record.id) / INPUT, max_bytes=max_line_bytes) as reader:
        for line in reader:
            total += 1
            if total > MAX_REQUESTS:
                text = f"the file has more than {MAX_REQUESTS:,} requests, the limit. Split it."
                return total, [Problem(code="too_many_requests", message=text)]
            try:
                request = _request(line, max_line_bytes)
                if request.url != record.endpoint:
                    text = f"url is {request.url[:100]!r}, and the endpoint of the batch is {record.endpoint}."
                    raise LineError("mismatched_endpoint", text, "url")
                digest = int.from_bytes(blake2b(request.custom_id.encode(), digest_size=8).digest(), "big")
                if digest in seen:
                    raise LineError("duplicate_custom_id", f"custom_id {request.custom_id[:100]!r} is not unique.", "custom_id")
                seen.add(digest)
            except LineError as error:
                problems.append(Problem(code=error.code, message=error.message, line=line.number, param=error.param))
                if len(problems) == _MAX_PROBLEMS:
                    break
    if not total:
        problems.append(Problem(code="empty_file", message="the file has no requests."))
    return total, problems


def _request(line: Line, max_bytes: int) -> lines.BatchLine:
    if line.is_too_long:
        raise LineError("request_too_large", f"the line has {line.size:,} bytes; the limit is {max_bytes:,}.")
    return lines.parse_line(line.raw)


def _fill(journal: Journal, path: Path, record: BatchRecord, outcome: Status, max_bytes: int) -> None:
    """Write an error for each request that was not run."""
    code, message = _NOT_RUN[outcome]
    progress = journal.progress
    with LineReader(path, max_bytes=max_bytes, number=progress.number, offset=progress.offset) as reader:
        while found := reader.take(_CHUNK, 2**23):
            written: list[bytes] = []
            for line in found:
                try:
                    custom_id = _request(line, max_bytes).custom_id
                except LineError as error:
                    custom_id = error.custom_id
                written.append(lines.render_not_run(lines.id_of(record.id, line.number), custom_id, code, message) + b"\n")
            progress = Progress(
                number=found[-1].number, offset=found[-1].end, completed=progress.completed, failed=progress.failed + len(found)
            )
            journal.commit(progress, {ERRORS: written})


def _problem(error: Exception) -> Problem:
    """Return what a client is told of a batch that failed."""
    match error:
        case _Failed():
            return error.problem
        case KeyGone():
            return Problem(code="invalid_api_key", message="the API key of the batch is no key here any more.")
        case OSError():
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full" if full else error.strerror or str(error)
            code = "disk_full" if full else "io_error"
            return Problem(code=code, message=f"the answers could not be written: {reason}.")
        case _:
            return Problem(code="internal_error", message=f"{type(error).__name__} in Whimbrel. This is a bug.")


def _failed(state: BatchState, problem: Problem) -> BatchState:
    return msgspec.structs.replace(
        state, status="failed", ended_at=now(), problems=(problem,), output_file_id=None, error_file_id=None
    )
