"""Logging to stderr, plain or JSON, with one line per record and few lines in a storm of errors.

`configure` sets up logging for a process, libraries included. A request is logged when it ends: every one with `access`, else
those that failed on the server's side. Input texts and headers are never logged. API keys are replaced by ***, and characters
that could move a terminal's cursor or forge a line are escaped. No caller waits for the reader of the log.
"""

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from queue import Empty, Full, Queue
from typing import Any, Final, Literal, TextIO, TypeAlias, cast

from whimbrel.telemetry.trace import RequestFinished, subscribe

LogFormat: TypeAlias = Literal["plain", "json"]

_log = logging.getLogger("whimbrel")
_access_log = logging.getLogger("whimbrel.access")

_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Control characters, line and paragraph separators, and marks of the writing direction."""

KEY_PREFIX: Final = "whimbrel_"
"""The first letters of API keys that `whimbrel key` makes."""
_MADE_KEY: Final = re.compile(rf"{KEY_PREFIX}[0-9a-f]{{8,}}")


def redact_keys(text: str) -> str:
    """Return a text with *** in place of keys that `whimbrel key` has made, also of those that were cut."""
    return _MADE_KEY.sub("***", text) if KEY_PREFIX in text else text


@dataclass(frozen=True, slots=True)
class LogOptions:
    format: LogFormat = "plain"
    level: Literal["debug", "info", "warning", "error"] = "info"
    access: bool = False
    """Log a line for every request."""


def configure(
    options: LogOptions, *, process: str = "", secrets: Sequence[str] = (), stream: TextIO | None = None
) -> Callable[[], None]:
    """Start logging to `stream`, by default stderr. Return a function that stops it after the last line is written.

    Every line names `process`. `secrets` are API keys to replace by ***.
    """
    handler = LogHandler(_Formatter(options.format, process, secrets), stream or sys.stderr)
    root = logging.getLogger()
    root.addHandler(handler)
    end = ExitStack()
    for each in (_log, _access_log):
        end.callback(each.setLevel, each.level)
    _log.setLevel(options.level.upper())
    _access_log.setLevel(logging.INFO)  # whatever the level of other lines
    end.callback(handler.close)
    end.callback(root.removeHandler, handler)
    end.callback(subscribe(RequestFinished, _log_access if options.access else _log_failure))
    return end.close


def _log_access(request: RequestFinished) -> None:
    _access_log.info("request", extra={"fields": _fields(request)})


def _log_failure(request: RequestFinished) -> None:
    if request.is_server_error:
        _log.warning(f"answered {request.status} ({request.error})", extra={"fields": _fields(request)})


def _fields(request: RequestFinished) -> dict[str, object]:
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
    """Rate limit of log records: the first few of a kind pass in each window, and the rest are counted.

    It has no clock and no lock. Kinds beyond `max_kinds` share one window.
    """

    def __init__(self, *, first: int = 5, window: float = 10.0, max_kinds: int = 64) -> None:
        self.window = window
        self._first = first
        self._max_kinds = max_kinds
        self._kinds: dict[str, tuple[float, int]] = {}  # kind -> (its window's end, records in it)

    def admits(self, kind: str, now: float) -> bool:
        """Count a record and return True to write it. Call `flush_windows` first, or the count of an ended window is lost."""
        if kind not in self._kinds and len(self._kinds) >= self._max_kinds:
            kind = ""
        end, count = self._kinds.get(kind, (now + self.window, 0))
        if now >= end:
            end, count = now + self.window, 0
        self._kinds[kind] = end, count + 1
        return count < self._first

    def flush_windows(self, now: float) -> list[tuple[str, int]]:
        """Forget the kinds whose window has ended. Return those with suppressed records, and their number."""
        expired = [kind for kind, (end, _) in self._kinds.items() if now >= end]
        counts = [(kind, self._kinds.pop(kind)[1] - self._first) for kind in expired]
        return [(kind, num_suppressed) for kind, num_suppressed in counts if num_suppressed > 0]


class LogHandler(logging.Handler):
    """Handler that formats records and queues the lines for a thread that writes them, so that no caller waits for a reader.

    Lines that do not fit into the queue are counted, and the next line that is written says how many were lost. Warnings and
    errors pass a `LogThrottle`, where the message before its arguments is the kind. The thread writes without a handler: at
    exit `logging` locks and flushes every handler, and would wait for the reader.
    """

    def __init__(self, formatter: logging.Formatter, stream: TextIO, *, max_lines: int = 4096) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._lock: threading.RLock = cast(Any, self.lock)
        self._stream = stream
        self._throttle = LogThrottle()
        self._lines: Queue[str | None] = Queue(max_lines)
        """Lines to write; None is the end."""
        self._num_lost = 0
        threading.Thread(target=self._write_lines, name="whimbrel-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        self._summarise(now)
        if record.levelno < logging.WARNING or self._throttle.admits(str(record.msg), now):
            self._queue(record)

    def flush(self, timeout: float = 1.0) -> None:
        """Wait until all lines are written, at most `timeout` seconds."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, timeout)

    def close(self) -> None:
        with self._lock:
            self._summarise(float("inf"))
        self.flush()
        with suppress(Full):
            self._lines.put_nowait(None)
        super().close()

    def _queue(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except Full:
            self._num_lost += 1
        except Exception:
            self.handleError(record)

    def _summarise(self, now: float) -> None:
        for kind, num_suppressed in self._throttle.flush_windows(now):
            record = _record(f"and {num_suppressed:,} more in {self._throttle.window:g} s: {kind or 'of other kinds'}")
            record.fields = {"left_out": num_suppressed}
            self._queue(record)

    def _write_lines(self) -> None:
        num_told = 0
        while True:
            try:
                line = self._lines.get(timeout=self._throttle.window)
            except Empty:
                if self._lock.acquire(blocking=False):  # otherwise a caller is logging, and summarises
                    self._summarise(time.monotonic())
                    self._lock.release()
                continue
            if num_lost := self._num_lost - num_told:
                num_told += num_lost
                self._write(self.format(_record(f"{num_lost:,} lines were lost: nobody read them")))
            if line is not None:
                self._write(line)
            self._lines.task_done()
            if line is None:
                return

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):  # the reader has left, the disk is full or the stream is closed
            self._stream.write(line + "\n")
            self._stream.flush()


def flush() -> None:
    """Wait until all log lines are written, at most a second. Call it before a process ends itself."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogHandler):
            handler.flush()


def redact(secrets: Sequence[str]) -> None:
    """Replace these API keys by *** from now on, beside those that `configure` was given."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogHandler) and isinstance(handler.formatter, _Formatter):
            handler.formatter.redact(secrets)


def _record(text: str) -> logging.LogRecord:
    return logging.LogRecord(_log.name, logging.WARNING, "", 0, text, None, None)


class _Formatter(logging.Formatter):
    def __init__(self, log_format: LogFormat, process: str, secrets: Sequence[str]) -> None:
        super().__init__()
        self._write = _write_json if log_format == "json" else _write_plain
        self._process = process
        self._secrets: list[str] = []
        self.redact(secrets)

    def redact(self, secrets: Sequence[str]) -> None:
        self._secrets = [*self._secrets, *(secret for secret in secrets if secret and secret not in self._secrets)]

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
        if isinstance(value, str):
            for secret in self._secrets:
                value = value.replace(secret, "***")
            value = redact_keys(value)
        return value


def _write_json(line: Mapping[str, object]) -> str:
    # json escapes all unprintable characters but DEL
    return json.dumps(line, default=str).replace("\x7f", "\\u007f")


def _write_plain(line: Mapping[str, object]) -> str:
    fields = {name: value for name, value in line.items() if name not in ("time", "level", "message", "process", "traceback")}
    process = f" [{line['process']}]" if "process" in line else ""
    text = f"{line['time']} {str(line['level']).upper():<7}{process} {_escape(str(line['message']))}"
    text += "".join(f" {name}={_quote(value)}" for name, value in fields.items())
    # Indented, so that a line break in an exception's text cannot forge a record.
    for part in str(line.get("traceback", "")).splitlines():
        text += f"\n    {_escape(part)}"
    return text


def _quote(value: object) -> str:
    """Return a field's value, in quotes unless it is one plain word."""
    text = str(value)
    return _escape(json.dumps(text, ensure_ascii=False) if not text or re.search(r'[\s"=\\]', text) else text)


def _escape(text: str) -> str:
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
