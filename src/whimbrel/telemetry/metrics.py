"""Prometheus metrics of a server: a subscriber of trace, and the page that shows what all its processes counted.

Theory of operation. A server of one process counts in memory. A server of several calls `use_directory` in each of them
before it makes its Metrics: from then on each process writes its numbers into files of its own there (prometheus_client's
multiprocess mode), and whoever renders reads the files of all. Files are named by the process's place in the server
("worker-0", "engine-0-1"), not by its pid, so a process that is started again goes on where the last one stopped.

Labels come from fixed sets: routes are templates, models are those that are served, the rest are the Literals of trace.
docs/metrics.md lists every name.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections import Counter as Tally
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import prometheus_client.multiprocess
import prometheus_client.values
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from whimbrel.errors import SetupError
from whimbrel.telemetry.trace import (
    Count,
    CounterEvent,
    GaugeEvent,
    GaugeName,
    HistogramEvent,
    RequestFinished,
    RequestStarted,
    Size,
    Stage,
    subscribe,
)

_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)

_OF_REQUESTS: Final[tuple[Stage, ...]] = ("receive", "read", "write")
"""Stages that are told of with the end of their request, and not before."""
_SIZES: Final[dict[Size, tuple[str, tuple[int, ...]]]] = {
    "batch_tokens": ("Tokens in a batch.", tuple(2**power for power in range(4, 17))),
    "batch_seqs": ("Texts in a batch.", tuple(2**power for power in range(12))),
}
_COUNTS: Final[dict[Count, tuple[str, str]]] = {
    "retries": ("request_retries", "Requests sent again after their engine had died."),
    "halvings": ("batch_halvings", "Batches cut in halves because something in them failed."),
    "non_finite": ("non_finite", "Texts that failed because the model gave NaN or infinity for them."),
    "out_of_memory": ("out_of_memory", "Batches that did not fit into the device's memory."),
    "engine_restarts": ("engine_restarts", "Engine processes started again after they died or hung."),
    "worker_restarts": ("worker_restarts", "HTTP workers started again after they died."),
    "dropped": ("dropped_requests", "Requests dropped undone: the client had gone, or the deadline was over."),
    "document_cache_hits": ("document_cache_hits", "Documents to compare whose token vectors were kept."),
    "document_cache_misses": ("document_cache_misses", "Documents to compare whose token vectors had to be computed."),
}
_LEVELS: Final[dict[GaugeName, tuple[str, str]]] = {
    "queue_tokens": ("queue_tokens", "Tokens that wait."),
    "queue_small_tokens": ("queue_small_tokens", "Those of them that belong to small requests."),
    "engines_up": ("engines_up", "Engines that answer."),
}
M = TypeVar("M", Counter, Gauge, Histogram)

_RECEIVED: Final = "whimbrel_requests_received_total"
_REQUESTS: Final = "whimbrel_requests_total"

DIRECTORY: Final = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable that names the directory."""

_IDENTITY: Final = re.compile(r"[a-z0-9-]+")  # "_" separates the parts of the files' names
_FOLDER: Final = "whimbrel-metrics-"
_LOCK: Final = "lock"
_YOUNG_SECONDS: Final = 60.0
"""A server that has just made its directory may not have locked it yet."""
_FILE_BYTES: Final = 256 * 1024

_multiprocess: Any = prometheus_client.multiprocess  # these have no types
_values: Any = prometheus_client.values

_place: tuple[Path, str] | None = None
"""The directory of the server's metrics, and the identity of this process in it."""


@contextmanager
def directory() -> Generator[Path]:
    """A directory for the metrics of one server, for as long as it lives. Those of servers that were killed are removed.

    Raises SetupError.
    """
    try:
        for old in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
            _remove_if_dead(old)
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
    except OSError as error:
        hint = "set TMPDIR to a folder that can be written to, e.g. /dev/shm"
        raise SetupError(f"there is no place for temporary files: {error.strerror or error}.", hint=hint) from None
    with (folder / _LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until this process ends, however it ends
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_if_dead(folder: Path) -> None:
    try:
        about = folder.lstat()
        if about.st_uid != os.getuid() or time.time() - about.st_mtime < _YOUNG_SECONDS:
            return
        with open(os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # somebody lives there, or it is not ours
        return


def use_directory(path: Path, identity: str) -> None:
    """Keep this process's metrics in `path`, beside those of the server's other processes. Call it before Metrics().

    `identity` is the process's place in the server, e.g. "worker-0"; no two living processes may share one. It may have been
    that of a process that is dead: its counters go on. Raises SetupError.
    """
    global _place  # noqa: PLW0603
    if not _IDENTITY.fullmatch(identity):
        raise ValueError(f"{identity!r}: an identity is made of a-z, 0-9 and -")
    _place = path, identity
    os.environ[DIRECTORY] = str(path)
    _values.ValueClass = _values.MultiProcessValue(process_identifier=lambda: identity)
    try:
        path.mkdir(parents=True, exist_ok=True)
        process_ended(identity)
        for kind in ("counter", "histogram", "gauge_livesum"):
            _reserve(path / f"{kind}_{identity}.db")
        (path / f"{identity}.pid").write_text(str(os.getpid()))
    except OSError as error:
        raise SetupError(f"cannot keep metrics in {path}: {error.strerror or error}.") from None


def process_ended(identity: str) -> None:
    """A process of this server is dead: what it had under way or in its queue is no more. Its counters stay."""
    if _place is not None:
        _multiprocess.mark_process_dead(identity, str(_place[0]))
        (_place[0] / f"{identity}.pid").unlink(missing_ok=True)


def _reserve(file: Path) -> None:
    """Space on the disk for all that will be written: a write into a mapped file on a full disk would kill the process."""
    with file.open("ab") as stream:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(stream.fileno(), 0, _FILE_BYTES)


class Metrics:
    """Counts what trace tells. One per process, in a server of several processes."""

    def __init__(self, models: Sequence[str] = ()) -> None:
        """`models` are names of models whose counters are shown from the start, at zero."""
        disable_created_metrics()
        own = CollectorRegistry()
        counter = partial(_counter, own)
        gauge = partial(_gauge, own)
        histogram = partial(_histogram, own)
        self._received = counter(_RECEIVED, "Requests that came.", "route")
        self._in_flight = gauge("whimbrel_requests_in_flight", "Requests that have not ended.", "route")
        self._requests = counter(_REQUESTS, "Requests that ended.", "route", "model", "outcome", "status")
        self._seconds = histogram("whimbrel_request_seconds", "From headers to the end of the answer.", "route", "model")
        self._stages = histogram("whimbrel_stage_seconds", "Time in each stage.", "stage")
        self._texts = counter("whimbrel_texts_total", "Texts answered.", "model")
        self._tokens = counter("whimbrel_tokens_total", "Tokens computed for answers.", "model")
        self._truncated = counter("whimbrel_truncated_texts_total", "Texts that were cut.", "model")
        self._sizes: dict[str, _Labelled[Histogram]] = {
            name: histogram(f"whimbrel_{name}", text, "model", buckets=buckets) for name, (text, buckets) in _SIZES.items()
        }
        self._counts = {name: counter(f"whimbrel_{key}_total", text, "model") for name, (key, text) in _COUNTS.items()}
        self._levels = {name: gauge(f"whimbrel_{key}", text, "model") for name, (key, text) in _LEVELS.items()}
        of_models = [self._counts[name] for name in _COUNTS if name != "worker_restarts"]
        for model in models:  # a counter that is not there yet has no rate
            for metric in (self._texts, self._tokens, self._truncated, *of_models):
                metric(model)
        self._registry = own if _place is None else CollectorRegistry()
        if _place is not None:
            _multiprocess.MultiProcessCollector(self._registry, str(_place[0]))
            self._count_lost_requests(*_place)
        self._registry.register(_Processes())
        self._ends = (
            subscribe(HistogramEvent, self._observe),
            subscribe(CounterEvent, self._count),
            subscribe(GaugeEvent, self._set_level),
            subscribe(RequestStarted, self._receive),
            subscribe(RequestFinished, self._finish),
        )

    @property
    def shared(self) -> bool:
        """Whether other processes of the server count too."""
        return _place is not None

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type: OpenMetrics if the Accept header asks for it, else Prometheus' text format."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def close(self) -> None:
        """Count no more."""
        for end in self._ends:
            end()

    def _observe(self, event: HistogramEvent) -> None:
        if (size := self._sizes.get(event.name)) is not None:
            size(event.model).observe(event.value)
        else:
            self._stages(event.name).observe(event.value)

    def _count(self, event: CounterEvent) -> None:
        self._counts[event.name](event.model).inc(event.amount)

    def _set_level(self, event: GaugeEvent) -> None:
        self._levels[event.name](event.model).set(event.value)

    def _receive(self, event: RequestStarted) -> None:
        self._received(event.route).inc()
        self._in_flight(event.route).inc()

    def _finish(self, event: RequestFinished) -> None:
        model = event.model
        self._requests(event.route, model, event.outcome, event.status).inc()
        self._in_flight(event.route).dec()
        self._seconds(event.route, model).observe(event.seconds)
        for stage in _OF_REQUESTS:
            if stage in event.stages:
                self._stages(stage).observe(event.stages[stage])
        if event.num_tokens:
            self._texts(model).inc(event.num_texts)
            self._tokens(model).inc(event.num_tokens)
            if event.num_truncated:
                self._truncated(model).inc(event.num_truncated)

    def _count_lost_requests(self, path: Path, identity: str) -> None:
        """What the last process of this identity had under way when it died has ended, too: as "lost"."""
        open_: Tally[str] = Tally()
        file = path / f"counter_{identity}.db"
        for metric in _multiprocess.MultiProcessCollector.merge([str(file)]):
            for sample in metric.samples:
                if sample.name == _RECEIVED:
                    open_[sample.labels["route"]] += int(sample.value)
                elif sample.name == _REQUESTS:
                    open_[sample.labels["route"]] -= int(sample.value)
        for route, num_lost in open_.items():
            if num_lost > 0:
                self._requests(route, "", "lost", 0).inc(num_lost)


_Labelled: TypeAlias = Callable[..., M]
"""A metric: called with the values of its labels, it gives what counts. There are few, and they are kept."""


def _counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> _Labelled[Counter]:
    return cache(Counter(name, text, labels, registry=registry).labels)


def _gauge(registry: CollectorRegistry, name: str, text: str, *labels: str) -> _Labelled[Gauge]:
    return cache(Gauge(name, text, labels, registry=registry, multiprocess_mode="livesum").labels)


def _histogram(
    registry: CollectorRegistry, name: str, text: str, *labels: str, buckets: Sequence[float] = _SECONDS
) -> _Labelled[Histogram]:
    return cache(Histogram(name, text, labels, registry=registry, buckets=buckets).labels)


class _Processes(Collector):
    """Memory, CPU time and open files of the server's processes, read from /proc when asked."""

    def __init__(self) -> None:
        self._pid = ""
        self._collector = ProcessCollector(pid=lambda: self._pid, registry=None)

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for process, pid in self._processes():
            self._pid = pid
            for metric in self._collector.collect():
                into = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    into.add_sample(sample.name, {"process": process}, sample.value)
        return merged.values()

    def _processes(self) -> Iterator[tuple[str, str]]:
        if _place is None:
            yield "server", "self"
            return
        for file in sorted(_place[0].glob("*.pid")):
            try:
                yield file.stem, file.read_text()
            except FileNotFoundError:  # it died just now
                continue
