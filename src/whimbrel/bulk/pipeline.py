"""Pipeline of a run: reading, computing and writing at the same time.

One thread reads shards, one sends their requests by a few threads, one writes; the caller's thread waits, so that it can be
interrupted. The number of shards in memory is bounded. The first error ends all threads and is raised.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition, Event, Semaphore, Thread
from typing import Final, Generic, Protocol, TypeVar

from whimbrel.bulk.compute import PendingShard, TableForm, begin
from whimbrel.bulk.embedder import Embedder
from whimbrel.bulk.folder import write_shard
from whimbrel.bulk.job import Job, Totals, Watch
from whimbrel.bulk.manifest import Shard
from whimbrel.bulk.rows import RowReader, ShardRows

T = TypeVar("T")

_SHARDS_COMPUTING: Final = 2
"""Shards between their first request and their last byte on disk."""

_END_SECONDS: Final = 10.0
"""Time that a thread has to end after an error. One that waits for a server may take longer; it writes nothing any more."""


class _Ended(Exception):
    """The pipeline has ended."""


class _Channel(Generic[T]):
    """A queue of one item between two threads, which an end of the pipeline wakes."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._changed = Condition()
        self._is_closed = False

    def put(self, item: T) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._items)
            if self._is_closed:
                raise _Ended
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._items)
            if self._is_closed:
                raise _Ended
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class ShardRunner(Protocol):
    """Computes and writes shards: the pipeline of this process, or one of many machines."""

    def run(self, shards: Sequence[Shard]) -> None:
        """Run shards, and return when all are on disk."""
        ...


class Pipeline:
    """The threads of a run."""

    def __init__(
        self, job: Job, form: TableForm, *, embedder: Embedder, reader: RowReader, watch: Watch, totals: Totals
    ) -> None:
        self._job = job
        self._form = form
        self._embedder = embedder
        self._reader = reader
        self._watch = watch
        self._totals = totals
        self._read: _Channel[ShardRows | None] = _Channel()
        self._sent: _Channel[PendingShard | None] = _Channel()
        self._room = Semaphore(_SHARDS_COMPUTING)
        self._ended = Event()
        self._error: BaseException | None = None
        self._requests = ThreadPoolExecutor(embedder.sizes.in_flight, thread_name_prefix="whimbrel-bulk")

    def run(self, shards: Sequence[Shard]) -> None:
        """Run shards, and return when all are on disk. Raises the first error of any thread."""
        steps = {"read": lambda: self._read_shards(shards), "send": self._send_shards, "write": self._write_shards}
        threads = [
            Thread(target=self._guarded, args=(step,), name=f"whimbrel-bulk-{name}", daemon=True)
            for name, step in steps.items()
        ]
        for thread in threads:
            thread.start()
        try:
            self._ended.wait()
        finally:
            self._end(None)
            self._embedder.stop()
            self._requests.shutdown(wait=False, cancel_futures=True)
            for thread in threads:
                thread.join(_END_SECONDS)
        if self._error is not None:
            raise self._error

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except _Ended:
            pass
        except BaseException as error:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if error is not None and self._error is None and not self._ended.is_set():
            self._error = error
        self._ended.set()
        self._read.close()
        self._sent.close()
        self._room.release()
        self._requests.shutdown(wait=False, cancel_futures=True)

    def _read_shards(self, shards: Sequence[Shard]) -> None:
        for rows in self._reader.read(shards):
            self._read.put(rows)
        self._read.put(None)

    def _send_shards(self) -> None:
        while (rows := self._read.get()) is not None:
            self._room.acquire()
            if self._ended.is_set():
                raise _Ended
            self._sent.put(begin(rows, self._form, self._embedder, self._requests, self._watch.advance))
        self._sent.put(None)

    def _write_shards(self) -> None:
        while self._write_next():
            self._room.release()
        self._end(None)

    def _write_next(self) -> bool:
        """Write a shard and let go of it. Returns whether there was one."""
        job, pending = self._job, self._sent.get()
        if pending is None:
            return False
        rows, result = pending.rows, pending.result()
        if self._ended.is_set():
            raise _Ended
        record = write_shard(job.out, rows.shard, rows.path, result, kind=job.format, vectors=self._form.vectors)
        self._totals.add(record)
        return True
