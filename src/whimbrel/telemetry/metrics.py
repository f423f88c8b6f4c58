"""Prometheus metrics of a server, over all its processes.

Theory of operation. A server of one process counts in memory. In a server of several processes, each one calls `use_directory`
before it makes its Metrics. From then on it counts into its own files there (`series.py`). Any process can render the sums of
all files. Files carry the identity of the process in the server ("worker-0", "engine-0-1") instead of its pid, so a
restarted process continues the counters of the one before it. Its gauges, in a file of their own, go when it ends.

Labels come from fixed sets: route templates, served models, and the Literals of `trace.py`. docs/metrics.md lists every name.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections import Counter as Tally
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final, TypeAlias

from whimbrel.errors import SetupError
from whimbrel.telemetry import proc, trace
from whimbrel.telemetry.prometheus_text import Family, Kind, render
from whimbrel.telemetry.series import Key, Series, SeriesFile, add_up
from whimbrel.telemetry.trace import CounterEvent, GaugeEvent, HistogramEvent, RequestFinished, RequestStarted, subscribe

_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)

_REQUEST_STAGES: Final[tuple[trace.Stage, ...]] = ("receive", "read", "write")
"""Stages that are reported with the end of their request."""
_SIZES: Final[dict[trace.Size, tuple[str, tuple[int, ...]]]] = {
    "batch_tokens": ("Tokens in a batch.", tuple(2**power for power in range(4, 17))),
    "batch_seqs": ("Texts in a batch.", tuple(2**power for power in range(12))),
}
_COUNTS: Final[dict[trace.Count, tuple[str, str]]] = {
    "retries": ("request_retries", "Requests sent to another engine after theirs died."),
    "halvings": ("batch_halvings", "Batches split in halves after a failure."),
    "non_finite": ("non_finite", "Texts that failed because the model gave NaN or infinity for them."),
    "out_of_memory": ("out_of_memory", "Batches that ran out of device memory."),
    "engine_restarts": ("engine_restarts", "Engine processes restarted after they died or hung."),
    "worker_restarts": ("worker_restarts", "HTTP workers restarted after they died."),
    "dropped": ("dropped_requests", "Requests dropped before they were computed: the client left or the deadline passed."),
    "document_cache_hits": ("document_cache_hits", "Documents whose token vectors were in the cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prefixes of batches that were in the cache."),
    "prefix_cache_misses": ("prefix_cache_misses", "Prefixes of batches that had to be computed."),
    "connection_limit": ("connection_limit", "Times that all places for connections were taken, at most one a minute."),
    "idle_connections_closed": ("idle_connections_closed", "Idle connections closed to make room for new ones."),
    "document_cache_misses": ("document_cache_misses", "Documents whose token vectors had to be computed."),
}
_OF_SERVER: Final[tuple[trace.Count, ...]] = ("worker_restarts", "connection_limit", "idle_connections_closed")
"""Counts without a model."""
_GAUGES: Final[dict[trace.GaugeName, str]] = {
    "queue_tokens": "Tokens in the queue.",
    "queue_small_tokens": "Tokens in the queue that belong to small requests.",
    "engines_up": "Engines that are up.",
    "connections": "Open connections.",
    "prefix_cache_bytes": "Bytes of the cache of prefixes.",
    "max_batch_tokens": "Most tokens in a batch.",
    "memory_limit_bytes": "Memory of the machine or the container.",
}
_NUM_KEYS: Final = 1000
"""Keys that are counted under their own names: the first."""

_RECEIVED: Final = "whimbrel_requests_received_total"
_REQUESTS: Final = "whimbrel_requests_total"
_IN_FLIGHT: Final = "whimbrel_requests_in_flight"

DIRECTORY: Final = "WHIMBREL_METRICS_DIRECTORY"
"""Environment variable with the directory of the metrics."""

_IDENTITY: Final = re.compile(r"[a-z0-9-]+")  # "_" separates the parts of the files' names
_COUNTS_FILE, _GAUGES_FILE, _PID_FILE = "counts_{}.db", "gauges_{}.db", "{}.pid"
_FOLDER_PREFIX: Final = "whimbrel-metrics-"
_LOCK: Final = "lock"
_YOUNG_SECONDS: Final = 60.0
"""Least age of a directory to remove: a server may not have locked a younger one yet."""


@dataclass(frozen=True, slots=True)
class _OwnFiles:
    """The files of this process in the directory of the server's metrics."""

    folder: Path
    counts: SeriesFile
    gauges: SeriesFile


_own_files: _OwnFiles | None = None


@contextmanager
def directory() -> Generator[Path]:
    """Make a directory for the metrics of one server, and remove it at the end.

    Directories of killed servers are removed, too. Raises SetupError.
    """
    try:
        for old in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
            _remove_if_unused(old)
        made = tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX, ignore_cleanup_errors=True)
    except OSError as error:
        hint = "set TMPDIR to a folder that can be written to, e.g. /dev/shm"
        raise SetupError(f"there is no place for temporary files: {error.strerror or error}.", hint=hint) from None
    with made as folder, Path(folder, _LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until this process ends, however it ends
        yield Path(folder)


def _remove_if_unused(folder: Path) -> None:
    with suppress(OSError):  # it is locked or belongs to another user
        stat = folder.lstat()
        if stat.st_uid != os.getuid() or time.time() - stat.st_mtime < _YOUNG_SECONDS:
            return
        with open(os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def use_directory(path: Path, identity: str) -> None:
    """Keep the metrics of this process in `path`, beside those of the server's other processes. Call it before Metrics().

    `identity` names the process in the server, e.g. "worker-0". No two living processes may share one. Raises SetupError.
    """
    global _own_files  # noqa: PLW0603
    if not _IDENTITY.fullmatch(identity):
        raise ValueError(f"{identity!r}: an identity is made of a-z, 0-9 and -")
    os.environ[DIRECTORY] = str(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _remove_gauges(path, identity)
        counts, gauges = (SeriesFile(path / name.format(identity)) for name in (_COUNTS_FILE, _GAUGES_FILE))
        (path / _PID_FILE.format(identity)).write_text(str(os.getpid()))
    except OSError as error:
        raise SetupError(f"cannot keep metrics in {path}: {error.strerror or error}.") from None
    _own_files = _OwnFiles(path, counts, gauges)


def process_ended(identity: str) -> None:
    """Remove the gauges of a process of this server that has died. Its counters stay."""
    if _own_files is not None:
        _remove_gauges(_own_files.folder, identity)


def _remove_gauges(folder: Path, identity: str) -> None:
    for name in (_GAUGES_FILE, _PID_FILE):
        (folder / name.format(identity)).unlink(missing_ok=True)


class Metrics:
    """Metrics of the events of `trace.py`. A process has at most one if the server has several processes."""

    def __init__(self, models: Sequence[str] = (), keys: Sequence[str] = ()) -> None:
        """`models` are the served names whose counters start at zero, since a missing counter has no rate.

        `keys` are those of `name_keys`.
        """
        self.name_keys(keys)
        self._families: list[Family] = []
        self._counts_file = SeriesFile() if _own_files is None else _own_files.counts
        self._gauges_file = SeriesFile() if _own_files is None else _own_files.gauges
        counter, gauge = partial(self._add_family, "counter"), partial(self._add_family, "gauge")
        histogram = partial(self._add_family, "histogram", bounds=_SECONDS)
        self._received = counter(_RECEIVED, "Requests received.", "route")
        self._in_flight = gauge(_IN_FLIGHT, "Requests in progress.", "route")
        self._requests = counter(_REQUESTS, "Requests ended.", "route", "model", "outcome", "status")
        self._seconds = histogram(
            "whimbrel_request_seconds", "Seconds from the request's headers to the end of the response.", "route", "model"
        )
        self._stages = histogram("whimbrel_stage_seconds", "Seconds in each stage.", "stage", "model")
        self._texts = counter("whimbrel_texts_total", "Texts in answered requests.", "model")
        self._tokens = counter("whimbrel_tokens_total", "Tokens in answered requests.", "model")
        self._truncated = counter("whimbrel_truncated_texts_total", "Texts that were truncated.", "model")
        self._key_requests = counter("whimbrel_key_requests_total", "Requests ended, by API key.", "key", "model", "outcome")
        self._key_tokens = counter("whimbrel_key_tokens_total", "Tokens in answered requests, by API key.", "key", "model")
        self._sizes: dict[str, _Labelled] = {
            name: histogram(f"whimbrel_{name}", text, "model", bounds=bounds) for name, (text, bounds) in _SIZES.items()
        }
        self._counts = {name: counter(f"whimbrel_{key}_total", text, "model") for name, (key, text) in _COUNTS.items()}
        self._gauges = {name: gauge(f"whimbrel_{name}", text, "model") for name, text in _GAUGES.items()}
        of_models = [self._counts[name] for name in _COUNTS if name not in _OF_SERVER]
        for name in _OF_SERVER:
            self._counts[name]("")
        for model in models:
            for metric in (self._texts, self._tokens, self._truncated, *of_models, self._gauges["prefix_cache_bytes"]):
                metric(model)
        self._settle_lost_requests()
        self._unsubscribe = (
            subscribe(HistogramEvent, self._observe),
            subscribe(CounterEvent, lambda event: self._counts[event.name](event.model).add(event.amount)),
            subscribe(GaugeEvent, lambda event: self._gauges[event.name](event.model).set(event.value)),
            subscribe(RequestStarted, self._receive),
            subscribe(RequestFinished, self._finish),
        )

    def name_keys(self, keys: Sequence[str]) -> None:
        """Count by these names of API keys from now on. Those beyond the thousandth are counted together."""
        self._keys = frozenset(keys[:_NUM_KEYS])

    @property
    def shared(self) -> bool:
        """True if the page shows other processes of the server, too."""
        return _own_files is not None

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the page and its content type: OpenMetrics if `accept` names it, else Prometheus' text format."""
        series: dict[Key, Sequence[float]] = {**self._total(self._counts_file, _COUNTS_FILE)}
        series |= self._total(self._gauges_file, _GAUGES_FILE)
        for process, pid in _processes():
            series |= proc.read_process(process, pid)
        return render([*self._families, *proc.FAMILIES], series, accept)

    def num_in_flight(self, routes: Container[str]) -> int:
        gauges = self._total(self._gauges_file, _GAUGES_FILE)
        return int(sum(values[0] for key, values in gauges.items() if key[0] == _IN_FLIGHT and key[1] in routes))

    def close(self) -> None:
        for end in self._unsubscribe:
            end()

    def _observe(self, event: HistogramEvent) -> None:
        if (size := self._sizes.get(event.name)) is not None:
            size(event.model).observe(event.value)
        else:
            self._stages(event.name, event.model).observe(event.value)

    def _receive(self, event: RequestStarted) -> None:
        self._received(event.route).add()
        self._in_flight(event.route).add()

    def _finish(self, event: RequestFinished) -> None:
        model = event.model
        tenant = event.tenant
        key = tenant if tenant in self._keys else "other" if tenant else "none"
        self._requests(event.route, model, event.outcome, event.status).add()
        self._key_requests(key, model, event.outcome).add()
        self._in_flight(event.route).add(-1)
        if not event.yields:
            self._seconds(event.route, model).observe(event.seconds)
        for stage in _REQUEST_STAGES:
            if stage in event.stages:
                self._stages(stage, model).observe(event.stages[stage])
        if event.num_tokens:
            self._texts(model).add(event.num_texts)
            self._tokens(model).add(event.num_tokens)
            self._key_tokens(key, model).add(event.num_tokens)
            if event.num_truncated:
                self._truncated(model).add(event.num_truncated)

    def _add_family(self, kind: Kind, name: str, text: str, *labels: str, bounds: tuple[float, ...] = ()) -> _Labelled:
        family = Family(name, kind, text, labels, bounds)
        self._families.append(family)
        file = self._gauges_file if kind == "gauge" else self._counts_file
        return cache(lambda *values: Series(file.values((name, *map(str, values)), family.num_values), bounds))

    @staticmethod
    def _total(own: SeriesFile, name: str) -> Mapping[Key, Sequence[float]]:
        """Return the series of all processes' files of this name, or those of this process if it has no files."""
        return own.all() if _own_files is None else add_up(_own_files.folder.glob(name.format("*")))

    def _settle_lost_requests(self) -> None:
        """Count the requests that the last process of this identity left open as ended, with the outcome "lost"."""
        num_open: Tally[str] = Tally()
        for key, values in self._counts_file.all().items():
            if sign := {_RECEIVED: 1, _REQUESTS: -1}.get(key[0]):
                num_open[key[1]] += sign * int(values[0])
        for route, num_lost in num_open.items():
            if num_lost > 0:
                self._requests(route, "", "lost", 0).add(num_lost)
                self._key_requests("none", "", "lost").add(num_lost)


_Labelled: TypeAlias = Callable[..., Series]
"""A metric as a cached function from the values of its labels to the series."""


def _processes() -> Iterator[tuple[str, str]]:
    if _own_files is None:
        yield "server", "self"
        return
    for file in sorted(_own_files.folder.glob(_PID_FILE.format("*"))):
        with suppress(FileNotFoundError):  # the process has just died
            yield file.stem, file.read_text()
