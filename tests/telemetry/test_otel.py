"""Spans of finished requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from whimbrel.errors import SetupError
from whimbrel.telemetry import otel, trace
from whimbrel.telemetry.trace import RequestFinished


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    end = otel.start(SimpleSpanProcessor(exporter))
    yield exporter
    end()


def finish(**fields: Any) -> None:
    known: dict[str, Any] = {
        "request_id": "id-1",
        "method": "POST",
        "route": "/v1/embeddings",
        "path": "/v1/embeddings?key=s3cret",
    }
    trace.report(RequestFinished(**{**known, "client": "10.0.0.1", "status": 200, "outcome": "ok", "received": 1e9, **fields}))


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_is_a_span_with_its_stages_in_it(exporter: InMemorySpanExporter) -> None:
    finish(
        model="m", num_texts=2, num_tokens=9, num_truncated=1, seconds=1.0, stages={"read": 0.1, "queue": 0.25, "compute": 0.5}
    )
    spans = by_name(exporter)
    server = spans["POST /v1/embeddings"]
    assert server.kind is SpanKind.SERVER
    assert (server.start_time, server.end_time) == (10**18, 10**18 + 10**9)
    assert server.attributes == {
        "http.request.method": "POST", "http.route": "/v1/embeddings", "http.response.status_code": 200, "whimbrel.request_id": "id-1",
        "whimbrel.outcome": "ok", "whimbrel.model": "m", "whimbrel.texts": 2, "whimbrel.tokens": 9, "whimbrel.truncated": 1,
    }  # fmt: skip
    assert server.parent is None
    assert server.status.status_code is StatusCode.UNSET
    assert server.resource.attributes["service.name"] == "whimbrel"
    stages = [spans[name] for name in ("read", "queue", "compute")]
    assert [(span.start_time or 0) - 10**18 for span in stages] == [0, 100_000_000, 350_000_000]
    assert [(span.end_time or 0) - 10**18 for span in stages] == [100_000_000, 350_000_000, 850_000_000]
    assert all(span.parent == server.context for span in stages)


def test_stages_that_ran_at_once_stay_within_the_request(exporter: InMemorySpanExporter) -> None:
    finish(seconds=1.0, stages={"queue": 0.5, "compute": 2.0, "write": 0.1})
    ends = [(span.end_time or 0) - 10**18 for span in exporter.get_finished_spans()]
    assert ends == [500_000_000, 10**9, 10**9, 10**9]


def test_K6_the_client_s_span_is_the_parent(exporter: InMemorySpanExporter) -> None:
    finish(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", stages={"read": 0.1}, seconds=0.2)
    spans = by_name(exporter)
    parent = spans["POST /v1/embeddings"].parent
    assert parent is not None
    assert (parent.trace_id, parent.span_id) == (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    assert {span.context.trace_id for span in spans.values()} == {parent.trace_id}


def test_a_client_that_does_not_sample_is_heeded(exporter: InMemorySpanExporter) -> None:
    finish(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", stages={"read": 0.1})
    assert not exporter.get_finished_spans()


def test_errors_of_ours_are_errors(exporter: InMemorySpanExporter) -> None:
    finish(status=500, outcome="error", error="engine_crash")
    finish(status=404, outcome="not_found", error="model_not_found", method="other", route="other")
    ours, theirs = by_name(exporter).values()
    assert (ours.status.status_code, ours.status.description) == (StatusCode.ERROR, "engine_crash")
    assert theirs.status.status_code is StatusCode.UNSET
    assert theirs.attributes is not None
    assert theirs.attributes["error.type"] == "model_not_found"
    assert theirs.attributes["http.request.method"] == "_OTHER"


def test_H3_spans_hold_nothing_that_was_sent(exporter: InMemorySpanExporter) -> None:
    finish()
    assert not any("s3cret" in span.to_json() for span in exporter.get_finished_spans())


def test_probes_have_no_spans(exporter: InMemorySpanExporter) -> None:
    for route in ("/health", "/health/live", "/health/ready", "/metrics"):
        finish(route=route, method="GET")
    assert not exporter.get_finished_spans()


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "search")
    exporter = InMemorySpanExporter()
    end = otel.start(SimpleSpanProcessor(exporter))
    finish()
    end()
    finish()
    (span,) = exporter.get_finished_spans()
    assert span.resource.attributes["service.name"] == "search"


def test_what_is_in_the_way_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(SetupError, match="http/protobuf"):
        otel.check()
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    otel.check()
    monkeypatch.setattr(otel, "find_spec", lambda name: None)
    with pytest.raises(SetupError) as caught:
        otel.start()
    assert caught.value.hint == "pip install 'whimbrel[otel]'"
