"""Events reach their subscribers, and nothing else happens."""

from __future__ import annotations

import logging

import pytest

from whimbrel.telemetry import trace
from whimbrel.telemetry.trace import CounterEvent, GaugeEvent, HistogramEvent, RequestFinished, RequestStarted


def test_each_kind_of_event_reaches_its_subscribers() -> None:
    heard: list[object] = []
    kinds = (HistogramEvent, CounterEvent, GaugeEvent, RequestStarted, RequestFinished)
    ends = [trace.subscribe(kind, heard.append) for kind in kinds]
    record = RequestFinished("id", "GET", "/x", "/x", "", 200, "ok")
    trace.observe("queue", 0.5, model="m")
    trace.observe("batch_tokens", 12, model="m")
    trace.count("retries", 2, model="m")
    trace.gauge("queue_tokens", 7)
    trace.report(trace.RequestStarted("/x"))
    trace.report(record)
    assert heard == [
        HistogramEvent("queue", 0.5, "m"),
        HistogramEvent("batch_tokens", 12, "m"),
        CounterEvent("retries", 2, "m"),
        GaugeEvent("queue_tokens", 7),
        RequestStarted("/x"),
        record,
    ]
    for end in ends:
        end()
    trace.count("retries")
    assert len(heard) == 6


def test_a_stage_is_timed_and_told_of_also_when_it_fails() -> None:
    heard: list[HistogramEvent] = []
    end = trace.subscribe(HistogramEvent, heard.append)
    stages: dict[trace.Stage, float] = {}
    with pytest.raises(KeyError), trace.Timer("pack", model="m") as timed:
        raise KeyError
    with pytest.raises(KeyError), trace.Timer("read", into=stages) as noted:  # its request tells of it
        raise KeyError
    end()
    assert [(event.name, event.value, event.model) for event in heard] == [("pack", timed.seconds, "m")]
    assert stages == {"read": noted.seconds}
    assert min(timed.seconds, noted.seconds) > 0


def test_a_subscriber_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[CounterEvent] = []

    def fail(event: CounterEvent) -> None:
        raise ValueError("scripted")

    ends = trace.subscribe(CounterEvent, fail), trace.subscribe(CounterEvent, heard.append)
    with caplog.at_level(logging.ERROR, "whimbrel"):
        trace.count("halvings")
    for end in ends:
        end()
    assert len(heard) == 1
    assert "scripted" in caplog.text


def test_events_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        RequestFinished("id", "GET", "/x", "/x", "", 200, "ok").status = 500  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError):
        CounterEvent("retries").amount = 3  # pyright: ignore[reportAttributeAccessIssue]
