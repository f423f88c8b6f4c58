"""Log lines: formats, redaction, throttling, and streams without a reader."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whimbrel.telemetry import logs, trace
from whimbrel.telemetry.logs import LogHandler, LogOptions, LogThrottle
from whimbrel.telemetry.trace import RequestFinished

log = logging.getLogger("whimbrel")

Start = Callable[..., Callable[[], list[str]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Configures logging; what it returns ends that and gives the lines."""
    ends: list[Callable[[], None]] = []

    def configure(log_format: Any = "plain", level: Any = "info", *, access: bool = False, **options: Any) -> Any:
        stream = io.StringIO()
        ends.append(logs.configure(LogOptions(log_format, level, access), stream=stream, **options))

        def lines() -> list[str]:
            ends.pop()()
            text = stream.getvalue()
            assert text == "" or text.endswith("\n")
            return text.split("\n")[:-1]

        return lines

    yield configure
    for end in ends:
        end()


def request(**fields: Any) -> RequestFinished:
    known: dict[str, Any] = {"request_id": "id-1", "method": "POST", "route": "/x", "path": "/x", "client": "10.0.0.1"}
    return RequestFinished(**{**known, "status": 200, "outcome": "ok", **fields})


def test_a_plain_line(start: Start) -> None:
    lines = start(process="worker-0")
    log.warning("the disk is %d%% full", 90, extra={"fields": {"disk": "a b", "free": 7, "path": "/x"}})
    (line,) = lines()
    when, rest = line.split(" ", 1)
    assert time.strptime(when[:19], "%Y-%m-%dT%H:%M:%S")
    assert rest == 'WARNING [worker-0] the disk is 90% full disk="a b" free=7 path=/x'


def test_a_json_line(start: Start) -> None:
    lines = start("json", process="worker-0")
    log.warning("the disk is %d%% full", 90, extra={"fields": {"request_id": "r", "free": 7}})
    try:
        raise ValueError("über\nlines")
    except ValueError:
        log.exception("failed")
    plain, failed = map(json.loads, lines())
    assert plain.pop("time")[19] == "."
    assert plain == {
        "level": "warning", "message": "the disk is 90% full", "process": "worker-0", "request_id": "r", "free": 7,
    }  # fmt: skip
    assert failed["traceback"].endswith("ValueError: über\nlines")


@pytest.mark.parametrize("log_format", ["plain", "json"])
def test_the_level(log_format: str, start: Start) -> None:
    lines = start(log_format, "warning")
    log.info("no")
    log.warning("yes")
    logging.getLogger("somebody.else").info("no")
    logging.getLogger("somebody.else").error("yes")
    assert ["yes" in line for line in lines()] == [True, True]
    log.error("nobody listens any more")


# Requests


def test_requests_are_logged_where_asked_for(start: Start) -> None:
    lines = start("json", "error", access=True)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    trace.report(request(model="m", num_texts=2, num_tokens=9, seconds=0.0123, traceparent=parent))
    trace.report(request(status=0, outcome="lost", error="lost"))
    first, second = map(json.loads, lines())
    first.pop("time")
    assert first == {
        "level": "info", "message": "request", "method": "POST", "path": "/x", "status": 200, "ms": 12.3, "outcome": "ok", "model": "m",
        "texts": 2, "tokens": 9, "client": "10.0.0.1", "request_id": "id-1", "trace_id": "0af7651916cd43dd8448eb211c80319c",
    }  # fmt: skip
    assert (second["status"], second["outcome"]) == (0, "lost")


def test_only_our_failures_are_logged_else(start: Start) -> None:
    lines = start()
    for status, outcome in ((200, "ok"), (400, "invalid"), (429, "overloaded"), (499, "client_gone")):
        trace.report(request(status=status, outcome=outcome))
    trace.report(request(status=500, outcome="error", error="engine_crash"))
    trace.report(request(status=200, outcome="error", error="internal_error"))
    first, second = lines()
    assert "WARNING answered 500 (engine_crash) method=POST path=/x status=500" in first
    assert "answered 200 (internal_error)" in second


# What never gets in


NASTY = "a\r\n2026-01-01 INFO forged\x1b[31m\x00\x7f\x9b\u2028\u202e\ud800\ufeff"


@pytest.mark.parametrize("log_format", ["plain", "json"])
@pytest.mark.parametrize("access", [False, True])
def test_H4_clients_cannot_forge_lines(log_format: str, access: bool, start: Start) -> None:
    lines = start(log_format, access=access)
    trace.report(request(path=NASTY, model=NASTY, request_id=NASTY, status=500, outcome="error", error=NASTY))
    log.info("got %s", NASTY)
    found = lines()
    assert len(found) == 2
    assert_printable(found)


@given(st.text())
def test_H4_no_text_makes_two_lines(text: str) -> None:
    for log_format in ("plain", "json"):
        stream = io.StringIO()
        end = logs.configure(LogOptions(log_format), stream=stream)
        log.error("%s", text, extra={"fields": {"path": text}})
        try:
            raise ValueError(text)
        except ValueError:
            log.exception("failed")
        end()
        lines = stream.getvalue().split("\n")[:-1]
        assert_printable(lines)
        if log_format == "json":
            assert json.loads(lines[0])["message"] == json.loads(lines[0])["path"] == text
            assert len(lines) == 2
        else:
            assert len([line for line in lines if not line.startswith("    ")]) == 2


def assert_printable(lines: list[str]) -> None:
    assert all(character.isprintable() or character == " " for line in lines for character in line if ord(character) < 0xA0)
    assert not set("".join(lines)) & set("\u2028\u2029\u202a\u202b\u202d\u202e\u2066\u2069\ufeff")
    "".join(lines).encode()


@pytest.mark.parametrize("log_format", ["plain", "json"])
def test_H3_keys_are_blotted_out(log_format: str, start: Start) -> None:
    lines = start(log_format, access=True, secrets=['s3cret"key', "other-key"])
    trace.report(request(path='/s3cret"key', request_id="other-key", model='s3cret"key'))
    log.error("the key is %s", 's3cret"key')
    try:
        raise ValueError("other-key")
    except ValueError:
        log.exception("failed")
    text = "\n".join(lines())
    assert "s3cret" not in text
    assert "other" not in text.replace("another", "")
    assert text.count("***") >= 5


# Storms


def test_K7_a_storm_is_cut_short(start: Start) -> None:
    lines = start()
    for number in range(1239):
        log.error("engine %d failed", number)
        log.info("all of these are written")
    trace.report(request(status=500, outcome="error", error="engine_crash"))
    found = lines()
    assert sum("all of these" in line for line in found) == 1239
    assert [line.split("ERROR   ")[1] for line in found if "ERROR" in line] == [
        f"engine {number} failed" for number in range(5)
    ]
    assert sum("engine_crash" in line for line in found) == 1  # another kind is not held back
    assert "and 1,234 more in 10 s: engine %d failed left_out=1234" in found[-1]


def test_K7_a_line_per_request_means_all_of_them(start: Start) -> None:
    lines = start(access=True)
    for _ in range(100):
        trace.report(request(status=500, outcome="error", error="engine_crash"))
    assert len(lines()) == 100


def test_K7_the_summary_comes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LogThrottle", lambda: LogThrottle(window=0.2))
    stream = io.StringIO()
    end = logs.configure(LogOptions(), stream=stream)
    for _ in range(9):
        log.error("again")
    deadline = time.monotonic() + 20
    while "and 4 more" not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.02)
    log.error("again")
    end()
    assert [line.split(" ", 2)[2].strip() for line in stream.getvalue().splitlines()] == [
        *["again"] * 5, "and 4 more in 0.2 s: again left_out=4", "again",
    ]  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.floats(0, 5)), max_size=200), st.integers(1, 4), st.integers(1, 6))
def test_a_storm_loses_count_of_nothing(events: list[tuple[str, float]], first: int, max_kinds: int) -> None:
    storm = LogThrottle(first=first, window=10.0, max_kinds=max_kinds)
    now, admitted, left_out = 0.0, 0, 0
    for kind, pause in events:
        now += pause
        left_out += sum(number for _, number in storm.flush_windows(now))
        admitted += storm.admits(kind, now)
    left_out += sum(number for _, number in storm.flush_windows(float("inf")))
    assert admitted + left_out == len(events)
    assert storm.flush_windows(float("inf")) == []


def test_a_storm_admits_the_first_of_each_window() -> None:
    storm = LogThrottle(first=2, window=10.0)
    assert [storm.admits("a", now) for now in (0.0, 1.0, 2.0, 9.9)] == [True, True, False, False]
    assert storm.flush_windows(9.9) == []
    assert storm.flush_windows(10.0) == [("a", 2)]
    assert [storm.admits("a", 10.0), storm.admits("b", 10.0)] == [True, True]


def test_a_storm_remembers_few_kinds() -> None:
    storm = LogThrottle(first=1, max_kinds=3)
    assert [storm.admits(str(kind), 0.0) for kind in range(9)] == [True] * 4 + [False] * 5
    assert storm.flush_windows(10.0) == [("", 5)]


# A reader who does not read


class Stuck(io.StringIO):
    """A pipe that is full until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, text: str) -> int:
        self.go.wait(60)
        return super().write(text)


def line(text: str) -> logging.LogRecord:
    return logging.LogRecord("whimbrel", logging.INFO, "", 0, text, None, None)


def test_nobody_waits_for_a_reader_and_what_is_lost_is_told() -> None:
    stream = Stuck()
    handler = LogHandler(logging.Formatter("%(message)s"), stream, max_lines=10)
    for number in range(100):
        handler.handle(line(str(number)))
    started = time.monotonic()
    handler.flush(0.2)
    assert 0.1 < time.monotonic() - started < 10
    stream.go.set()
    handler.flush(60)
    handler.handle(line("later"))
    handler.flush(60)
    handler.close()
    lines = stream.getvalue().splitlines()
    assert lines[-1] == "later"
    told = [line for line in lines if "lines were lost: nobody read them" in line]
    kept = [int(line) for line in lines[:-1] if line not in told]
    assert told
    assert kept == sorted(kept)
    assert 10 <= len(kept) == 100 - sum(int(line.split()[0]) for line in told)


def test_a_reader_who_has_left_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with suppress(BrokenPipeError), open(writing, "w") as stream:
        handler = LogHandler(logging.Formatter("%(message)s"), stream)
        for text in ("a", "b"):
            handler.handle(line(text))
            handler.flush(10)
        handler.close()
    assert capfd.readouterr().err == ""


def test_closing_does_not_wait_for_a_reader_who_does_not_read() -> None:
    stream = Stuck()
    handler = LogHandler(logging.Formatter("%(message)s"), stream, max_lines=3)
    for number in range(9):
        handler.handle(line(str(number)))
    started = time.monotonic()
    handler.close()
    assert time.monotonic() - started < 10
    stream.go.set()
    handler.flush(60)
    assert "lines were lost" in stream.getvalue()
