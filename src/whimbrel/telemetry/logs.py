"""Log lines on stderr: plain or JSON, one line per record whatever clients send, and short in a storm of errors.

`configure` sets up logging for a process; everything that is logged in it, by libraries too, comes out in one form. Requests
are logged from trace's Finished: each of them with `access`, else those that failed on our side. Texts and headers are never
logged, API keys are blotted out wherever they turn up, and what could move a terminal's cursor or forge a line is escaped.
"""

from __future__ import annotations

import atexit
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from queue import Full, Queue
from typing import Any, Final, Literal, TextIO, TypeAlias

from whimbrel.telemetry.trace import RequestFinished, subscribe

LogFormat: TypeAlias = Literal["plain", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

_log = logging.getLogger("whimbrel")
_access_log = logging.getLogger("whimbrel.access")

_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Control characters, line and paragraph separators, and what turns the direction of writing."""


@dataclass(frozen=True, slots=True)
class LogOptions:
    """What the user said about logs."""

    format: LogFormat = "plain"
    level: LogLevel = "info"
    access: bool = False
    """A line per request."""


def configure(
    options: LogOptions, *, process: str = "", secrets: Sequence[str] = (), stream: TextIO | None = None
) -> Callable[[], None]:
    """Log to `stream` (stderr) from now on. Returns the function that ends it and writes what is still to be written.

    process: its place in the server, put on every line.
    secrets: API keys; replaced by *** where they turn up.
    """
    handler = _Handler(_Formatter(options.format, process, secrets), stream)
    root = logging.getLogger()
    root.addHandler(handler)
    before = _log.level, _access_log.level
    _log.setLevel(options.level.upper())
    _access_log.setLevel(logging.INFO)  # who asks for it gets it, at any level
    end_requests = subscribe(RequestFinished, _log_access if options.access else _log_failure)

    def end() -> None:
        end_requests()
        root.removeHandler(handler)
        handler.close()
        _log.setLevel(before[0])
        _access_log.setLevel(before[1])

    return end


def _log_access(request: RequestFinished) -> None:
    _access_log.info("request", extra={"fields": _fields(request)})


def _log_failure(request: RequestFinished) -> None:
    if request.status >= 500 or request.outcome == "error":
        _log.warning(f"answered {request.status} ({request.error})", extra={"fields": _fields(request)})


def _fields(request: RequestFinished) -> dict[str, object]:
    """What is worth knowing of a request, without its empty fields."""
    fields: dict[str, object] = {
        "method": request.method,
        "path": request.path,
        "status": request.status,
        "ms": round(request.seconds * 1e3, 2),
        "outcome": request.outcome,
        "error": request.error,
        "model": request.model,
        "texts": request.num_texts,
        "tokens": request.num_tokens,
        "truncated": request.num_truncated,
        "client": request.client,
        "request_id": request.request_id,
        "trace_id": request.traceparent[3:35],
    }
    return {name: value for name, value in fields.items() if value or name == "status"}


class LogThrottle:
    """Which records are written in a storm of them: the first few of a kind in each window; the rest are counted. Pure."""

    def __init__(self, *, first: int = 5, window: float = 10.0, max_kinds: int = 64) -> None:
        self._first = first
        self._window = window
        self._max_kinds = max_kinds
        self._kinds: dict[str, tuple[float, int]] = {}  # kind -> (its window's end, records in it)

    def admits(self, kind: str, now: float) -> bool:
        """Whether a record is written. Ask `over` first, or what was left out of its last window is forgotten."""
        if kind not in self._kinds and len(self._kinds) >= self._max_kinds:
            kind = ""  # of too many kinds, the newest are one
        end, seen = self._kinds.get(kind, (now + self._window, 0))
        if now >= end:
            end, seen = now + self._window, 0
        self._kinds[kind] = end, seen + 1
        return seen < self._first

    def flush_windows(self, now: float) -> list[tuple[str, int]]:
        """Kinds whose window is over, and how many records were left out; they are forgotten."""
        ended = [kind for kind, (end, _) in self._kinds.items() if now >= end]
        counts = [(kind, self._kinds.pop(kind)[1] - self._first) for kind in ended]
        return [(kind, num_left_out) for kind, num_left_out in counts if num_left_out > 0]

    @property
    def window(self) -> float:
        """Seconds."""
        return self._window

    @property
    def is_suppressing(self) -> bool:
        """Whether records were left out that `over` will tell of."""
        return any(seen > self._first for _, seen in self._kinds.values())


class NonBlockingStream:
    """A stream that nobody waits for: a thread writes what is handed over; while nobody reads, what does not fit is counted.

    A terminal that was stopped and a pipe that nobody reads would otherwise stop event loops, lanes and the supervisor.
    """

    def __init__(self, stream: TextIO, tell: Callable[[int], str], *, max_lines: int = 4096) -> None:
        """`tell` makes the line that says how many lines were lost."""
        self._stream = stream
        self._tell = tell
        self._lines: Queue[str] = Queue(max_lines)
        self._lost = 0
        threading.Thread(target=self._write, name="whimbrel-log", daemon=True).start()
        atexit.register(self.wait)

    def write(self, text: str) -> None:
        try:
            self._lines.put_nowait(text)
        except Full:
            self._lost += 1

    def flush(self) -> None:
        """What `logging` calls after each line; the thread does it."""

    def wait(self, seconds: float = 1.0) -> None:
        """Until all is written, but no longer."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, seconds)

    def _write(self) -> None:
        while True:
            text = self._lines.get()
            lost, self._lost = self._lost, 0
            with suppress(OSError, ValueError):  # nobody is there to read any more, or it is closed
                self._stream.write(f"{self._tell(lost)}\n{text}" if lost else text)
                self._stream.flush()
            self._lines.task_done()


_sinks: Final[set[NonBlockingStream]] = set()


def flush() -> None:
    """Wait, for a second at most, until what was logged is written; to be called before a process ends itself."""
    for sink in list(_sinks):
        sink.wait()


class _Handler(logging.StreamHandler[Any]):
    """Writes records to a stream; warnings and errors through a Storm, by the text before its arguments are put in."""

    def __init__(self, form: _Formatter, stream: TextIO | None) -> None:
        self._sink: NonBlockingStream | None = None
        if stream is None:
            self._sink = NonBlockingStream(
                sys.stderr, lambda lost: form.format(_record(f"{lost:,} lines were lost: nobody read them"))
            )
            _sinks.add(self._sink)
        super().__init__(self._sink or stream)
        self.setFormatter(form)
        self._storm = LogThrottle()
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:
            super().emit(record)
            return
        now = time.monotonic()
        self._summarise(now)
        if self._storm.admits(str(record.msg), now):
            super().emit(record)
        elif self._timer is None:
            self._start_timer()

    def close(self) -> None:
        with self._locked():
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._summarise(float("inf"))
        super().close()
        if self._sink is not None:
            self._sink.wait()
            _sinks.discard(self._sink)

    def _start_timer(self) -> None:
        """A storm that ends leaves nobody to tell how long it was: a timer does."""
        self._timer = threading.Timer(self._storm.window, self._on_timer)
        self._timer.daemon = True
        self._timer.start()

    def _on_timer(self) -> None:
        with self._locked():
            if self._timer is not None:  # closed meanwhile
                self._timer = None
                self._summarise(time.monotonic())
                if self._storm.is_suppressing:
                    self._start_timer()

    def _summarise(self, now: float) -> None:
        for kind, num_left_out in self._storm.flush_windows(now):
            text = f"and {num_left_out:,} more in {self._storm.window:g} s: {kind or 'of other kinds'}"
            record = _record(text)
            record.fields = {"left_out": num_left_out}
            super().emit(record)

    def _locked(self) -> threading.RLock:
        lock: Any = self.lock
        return lock


def _record(text: str) -> logging.LogRecord:
    return logging.LogRecord(_log.name, logging.WARNING, "", 0, text, None, None)


class _Formatter(logging.Formatter):
    """A record as one line."""

    def __init__(self, form: LogFormat, process: str, secrets: Sequence[str]) -> None:
        super().__init__()
        self._write = _write_json if form == "json" else _write_plain
        self._process = process
        self._secrets = [secret for secret in secrets if secret]

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": self._redact(record.getMessage()),
        }
        if self._process:
            line["process"] = self._process
        fields: Mapping[str, object] = getattr(record, "fields", {})
        line |= {name: self._redact(value) for name, value in fields.items()}
        if record.exc_info:
            line["traceback"] = self._redact(self.formatException(record.exc_info))
        return self._write(line)

    def _redact(self, value: object) -> object:
        """Without API keys."""
        if isinstance(value, str):
            for secret in self._secrets:
                value = value.replace(secret, "***")
        return value


def _write_json(line: Mapping[str, object]) -> str:
    # ASCII only, so that nothing unprintable leaves; DEL is the one such character in ASCII that json lets through.
    return json.dumps(line, default=str).replace("\x7f", "\\u007f")


def _write_plain(line: Mapping[str, object]) -> str:
    rest = {name: value for name, value in line.items() if name not in ("time", "level", "message", "process", "traceback")}
    process = f" [{line['process']}]" if "process" in line else ""
    text = f"{line['time']} {str(line['level']).upper():<7}{process} {_escape(str(line['message']))}"
    text += "".join(f" {name}={_quote(value)}" for name, value in rest.items())
    # Indented, since the text of an exception may hold line breaks, and no line of it may look like a record.
    for part in str(line.get("traceback", "")).splitlines():
        text += f"\n    {_escape(part)}"
    return text


def _quote(value: object) -> str:
    """A field's value, in quotes where it would not read as one word."""
    text = str(value)
    return _escape(json.dumps(text, ensure_ascii=False) if not text or re.search(r'[\s"=\\]', text) else text)


def _escape(text: str) -> str:
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
