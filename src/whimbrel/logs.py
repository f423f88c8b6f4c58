"""Log lines on stderr: plain or JSON, one line per record whatever clients send, and short in a storm of errors.

`configure` sets up logging for a process; everything that is logged in it, by libraries too, comes out in one form. Requests
are logged from trace's Finished: each of them with `access`, else those that failed on our side. Texts and headers are never
logged, API keys are blotted out wherever they turn up, and what could move a terminal's cursor or forge a line is escaped.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TextIO, TypeAlias

from whimbrel.trace import Finished, subscribe

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
    handler = _Handler(_Form(options.format, process, secrets), stream)
    root = logging.getLogger()
    root.addHandler(handler)
    before = _log.level, _access_log.level
    _log.setLevel(options.level.upper())
    _access_log.setLevel(logging.INFO)  # who asks for it gets it, at any level
    end_requests = subscribe(Finished, _log_access if options.access else _log_failure)

    def end() -> None:
        end_requests()
        root.removeHandler(handler)
        handler.close()
        _log.setLevel(before[0])
        _access_log.setLevel(before[1])

    return end


def _log_access(request: Finished) -> None:
    _access_log.info("request", extra={"fields": _fields(request)})


def _log_failure(request: Finished) -> None:
    if request.status >= 500 or request.outcome == "error":
        _log.warning(f"answered {request.status} ({request.error})", extra={"fields": _fields(request)})


def _fields(request: Finished) -> dict[str, object]:
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


class Storm:
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

    def over(self, now: float) -> list[tuple[str, int]]:
        """Kinds whose window is over, and how many records were left out; they are forgotten."""
        ended = [kind for kind, (end, _) in self._kinds.items() if now >= end]
        counts = [(kind, self._kinds.pop(kind)[1] - self._first) for kind in ended]
        return [(kind, num_left_out) for kind, num_left_out in counts if num_left_out > 0]

    @property
    def window(self) -> float:
        """Seconds."""
        return self._window

    @property
    def holds_back(self) -> bool:
        """Whether records were left out that `over` will tell of."""
        return any(seen > self._first for _, seen in self._kinds.values())


class _Handler(logging.StreamHandler[TextIO]):
    """Writes records to a stream; warnings and errors through a Storm, by the text before its arguments are put in."""

    def __init__(self, form: _Form, stream: TextIO | None) -> None:
        super().__init__(stream)
        self.setFormatter(form)
        self._storm = Storm()
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
            self._arm()

    def close(self) -> None:
        with self._locked():
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._summarise(float("inf"))
        super().close()

    def _arm(self) -> None:
        """A storm that ends leaves nobody to tell how long it was: a timer does."""
        self._timer = threading.Timer(self._storm.window, self._ring)
        self._timer.daemon = True
        self._timer.start()

    def _ring(self) -> None:
        with self._locked():
            if self._timer is not None:  # closed meanwhile
                self._timer = None
                self._summarise(time.monotonic())
                if self._storm.holds_back:
                    self._arm()

    def _summarise(self, now: float) -> None:
        for kind, num_left_out in self._storm.over(now):
            text = f"and {num_left_out:,} more in {self._storm.window:g} s: {kind or 'of other kinds'}"
            record = logging.LogRecord(_log.name, logging.WARNING, "", 0, text, None, None)
            record.fields = {"left_out": num_left_out}
            super().emit(record)

    def _locked(self) -> threading.RLock:
        lock: Any = self.lock
        return lock


class _Form(logging.Formatter):
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
            "message": self._blot(record.getMessage()),
        }
        if self._process:
            line["process"] = self._process
        fields: Mapping[str, object] = getattr(record, "fields", {})
        line |= {name: self._blot(value) for name, value in fields.items()}
        if record.exc_info:
            line["traceback"] = self._blot(self.formatException(record.exc_info))
        return self._write(line)

    def _blot(self, value: object) -> object:
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
