"""Bulk run: files to files, with reading, computing and writing at the same time, and resumed where an earlier run ended.

One thread reads shards, one sends their requests by a few threads, one writes; the caller's thread waits, so that it can be
interrupted. The number of shards in memory is bounded. The first error ends all threads and is raised.
"""

import base64
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Event, Semaphore, Thread
from typing import Any, Final, Generic, Protocol, TypeVar

from whimbrel import __version__
from whimbrel.bulk.arrow import Schema, pa
from whimbrel.bulk.chunks import Chunking
from whimbrel.bulk.columns import NumberType, bytes_per_row, widths_of
from whimbrel.bulk.compute import PendingShard, TableForm, begin
from whimbrel.bulk.embedder import Embedder
from whimbrel.bulk.files import InputFile, find_files, state_of
from whimbrel.bulk.folder import DOUBLED, check_ours, clear, finished, has_manifest, locked, write_manifest, write_shard
from whimbrel.bulk.manifest import ColumnNames, Manifest, Shard, check_inputs, check_same, read_manifest
from whimbrel.bulk.output_files import OutputFormat
from whimbrel.bulk.rows import RowReader, ShardRows
from whimbrel.bulk.survey import Doubled, ShardLimits, hash_files, survey
from whimbrel.errors import SetupError

T = TypeVar("T")

_SHARD_ROWS: Final = 50_000
_INPUT_BYTES: Final = 2**26
_OUTPUT_BYTES: Final = 2**27
_SHARDS_COMPUTING: Final = 3
"""Shards between their first request and their last byte on disk."""

_END_SECONDS: Final = 10.0
"""Time that a thread has to end after an error. One that waits for a server may take longer; it writes nothing any more."""


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that a user says of a run, but its model."""

    inputs: Sequence[str]
    out: Path
    names: ColumnNames
    dtype: NumberType = "float32"
    format: OutputFormat = "parquet"
    chunking: Chunking | None = None
    shard_rows: int | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Options that change the output, for the manifest."""
    restart: bool = False
    verify: bool = False


@dataclass(slots=True)
class Totals:
    """Counts of a run's folder: of all its shards, also those of earlier runs."""

    shards: int = 0
    shards_done: int = 0
    rows: int = 0
    """Rows of the input, and lines that hold no row."""
    rows_before: int = 0
    """Those of shards that earlier runs had finished."""
    done: int = 0
    cut: int = 0
    refused: int = 0


class Watch(Protocol):
    """A reader of a run's progress. Any thread may call it."""

    def tell(self, text: str) -> None: ...
    def start(self, totals: Totals) -> None: ...
    def advance(self, rows: float, tokens: int) -> None: ...


def run(job: Job, load: Callable[[], AbstractContextManager[Embedder]], watch: Watch, totals: Totals) -> None:
    """Run a job, or go on with it. `totals` counts meanwhile. Raises WhimbrelError; what was written before stays."""
    files = find_files(job.inputs, without=job.out)
    with locked(job.out):
        if not has_manifest(job.out):
            check_ours(job.out)
        elif job.restart:
            clear(job.out)
        old = read_manifest(job.out)
        states = [state_of(file) for file in files]
        if old is not None:
            watch.tell(f"comparing {len(files):,} files with {job.out}")
            _check_same(job, old, files)
        with load() as embedder:
            if job.chunking is not None:
                embedder.check_chunks(job.chunking.tokens)
            manifest, doubled = _new_manifest(job, embedder, files, watch, old)
            if old is None:
                write_manifest(job.out, manifest, doubled)
            reader = RowReader(files, job.names, _schema_of(manifest), states)
            _run_shards(job, manifest, embedder=embedder, reader=reader, watch=watch, totals=totals)


def _about(job: Job) -> dict[str, Any]:
    """Return everything that a user says of a run, by the names in which a difference is told."""
    return {
        "whimbrel": __version__,
        "pyarrow": pa.__version__,
        **job.options,
        "text": list(job.names.text),
        "separator": job.names.separator,
        "id": job.names.id,
        "keep": None if job.names.keep is None else list(job.names.keep),
        "out_format": job.format,
        "dtype_out": job.dtype,
        "chunk": None if job.chunking is None else list(job.chunking),
        "shard_rows": job.shard_rows,
    }


def _check_same(job: Job, old: Manifest, files: list[InputFile]) -> None:
    """Raise SetupError if the job or its input differs from that of the manifest. The model is compared later."""
    about = _about(job)
    check_same(job.out, {name: value for name, value in old.options.items() if not name.startswith("model_")}, about)
    now = [(file.path, file.size, sha256) for file, sha256 in zip(files, hash_files(files), strict=True)]
    check_inputs(job.out, old.inputs, now)


def _new_manifest(
    job: Job, embedder: Embedder, files: list[InputFile], watch: Watch, old: Manifest | None
) -> tuple[Manifest, list[Doubled]]:
    """Return the manifest of a run, the old one if the model is the same, and rows with the id of another. Raises SetupError."""
    widths = widths_of(embedder.run(["a"]).outputs)
    if not widths:
        raise SetupError("the model gives none of the outputs that a run can write.")
    if job.format == "npy" and (ragged := [name for name in widths if name in ("sparse", "multi_vector")]):
        raise SetupError(f"an .npy file holds no {ragged[0]} vectors.", hint="--format parquet, or arrow")
    model = {f"model_{name}": value for name, value in embedder.settings.items()}
    outputs = widths | ({"labels": list(embedder.labels)} if "scores" in widths and embedder.labels else {})
    if old is not None:
        then = {name: value for name, value in old.options.items() if name.startswith("model_")}
        before = {"model": old.model, "revision": old.revision, "outputs": old.outputs, **then}
        check_same(job.out, before, {"model": embedder.model, "revision": embedder.revision, "outputs": outputs, **model})
        return old, []
    inputs, schema, doubled = survey(files, job.names, _limits(job, widths), watch.tell)
    _check_columns(TableForm(schema, job.names.id is not None, widths, job.dtype, job.chunking))
    if doubled:
        first = doubled[0]
        message = f"{len(doubled):,} rows have the id of an earlier row, the first of them row {first.row:,} of {first.path}"
        watch.tell(f"{message}; all are run, and {job.out}/{DOUBLED} names them")
    manifest = Manifest(
        model=embedder.model,
        revision=embedder.revision,
        options=_about(job) | model,
        schema=base64.b64encode(schema.serialize().to_pybytes()).decode(),
        outputs=outputs,
        inputs=tuple(inputs),
    )
    return manifest, doubled


def _limits(job: Job, widths: dict[str, int]) -> ShardLimits:
    """Return the bounds of a shard: fewer rows where outputs are wide, fewer bytes where each token has a vector."""
    rows = job.shard_rows or max(1, min(_SHARD_ROWS, _OUTPUT_BYTES // max(1, bytes_per_row(widths))))
    per_byte = widths.get("multi_vector", 1)  # a number of float32 for each dimension, and four bytes of text a token
    return ShardLimits(rows, min(_INPUT_BYTES, _OUTPUT_BYTES // per_byte))


def _check_columns(form: TableForm) -> None:
    names = form.schema.names
    for name in names:
        if names.count(name) > 1:
            message = f"the output would have two columns {name!r}: one of the input, and one of its own."
            raise SetupError(message, hint="name the columns to copy with --keep, or the ids with --id")


def _schema_of(manifest: Manifest) -> Schema:
    return pa.ipc.read_schema(pa.BufferReader(base64.b64decode(manifest.schema)))


def _run_shards(job: Job, manifest: Manifest, *, embedder: Embedder, reader: RowReader, watch: Watch, totals: Totals) -> None:
    shards = list(manifest.shards())
    records = finished(job.out, manifest, shards, verify=job.verify, tell=watch.tell)
    totals.shards, totals.shards_done = len(shards), len(records)
    totals.rows = sum(file.rows for file in manifest.inputs)
    totals.rows_before = sum(record.stop - record.start for record in records.values())
    for record in records.values():
        _count(totals, record)
    watch.start(totals)
    pending = [shard for shard in shards if shard.number not in records]
    if not pending:
        return
    widths = {name: width for name, width in manifest.outputs.items() if name != "labels"}
    form = TableForm(reader.schema, job.names.id is not None, widths, job.dtype, job.chunking)
    _Pipeline(job, form, embedder=embedder, reader=reader, watch=watch, totals=totals).run(pending)


def _count(totals: Totals, record: Any) -> None:
    totals.done += record.done
    totals.cut += record.cut
    totals.refused += record.refused


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


class _Pipeline:
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
        job = self._job
        while (pending := self._sent.get()) is not None:
            rows, result = pending.rows, pending.result()
            if self._ended.is_set():
                raise _Ended
            record = write_shard(job.out, rows.shard, rows.path, result, kind=job.format, vectors=self._form.vectors)
            _count(self._totals, record)
            self._totals.shards_done += 1
            self._room.release()
        self._end(None)
