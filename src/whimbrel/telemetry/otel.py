"""OpenTelemetry spans: a server span for each finished request, with a child span for each stage.

It needs the extra `otel`. OpenTelemetry's own environment variables configure it: OTEL_EXPORTER_OTLP_ENDPOINT and
OTEL_EXPORTER_OTLP_HEADERS (destination), OTEL_TRACES_SAMPLER (sampling), OTEL_SERVICE_NAME (name, "whimbrel" by default).
Attributes hold no input text, key or path. The only value that a client chooses is the id of its request.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from whimbrel.errors import SetupError
from whimbrel.telemetry.trace import RequestFinished, subscribe

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Tracer

_PROBES: Final = frozenset(
    {"/health", "/health/live", "/health/ready", "/ping", "/metrics", "/v2/health/live", "/v2/health/ready"}
)
"""Routes without spans: monitoring calls them so often that their spans would hide the others."""


def start(processor: SpanProcessor | None = None) -> Callable[[], None]:
    """Start making spans. Return a function that stops it after the last span is sent.

    Spans go to `processor`, by default in batches by OTLP over HTTP. Raises SetupError.
    """
    check()
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    from whimbrel import __version__

    if processor is None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        processor = BatchSpanProcessor(OTLPSpanExporter())
    names = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "whimbrel"}
    provider = TracerProvider(resource=Resource.create({**names, "service.version": __version__}))
    provider.add_span_processor(processor)
    end_spans = subscribe(RequestFinished, partial(_add_span, provider.get_tracer("whimbrel", __version__)))

    def end() -> None:
        end_spans()
        provider.shutdown()

    return end


def check() -> None:
    """Raise SetupError if OpenTelemetry is missing or configured for another protocol."""
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        raise SetupError("spans need OpenTelemetry.", hint="pip install 'whimbrel[otel]'")
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        raise SetupError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; spans are sent by http/protobuf.",
            hint="unset it, and let OTEL_EXPORTER_OTLP_ENDPOINT name the collector's HTTP port (4318)",
        )


def _add_span(tracer: Tracer, request: RequestFinished) -> None:
    """Make the span of a request, and spans of its stages one after another from its start.

    Stages have a duration but no start, so the time between them goes to the end. Batches of one request may overlap, so
    stages are cut at the end of the request.
    """
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if request.route in _PROBES:
        return
    start = _nanoseconds(request.received)
    end = start + _nanoseconds(request.seconds)
    parent = TraceContextTextMapPropagator().extract({"traceparent": request.traceparent}, Context())
    name, attributes = f"{request.method} {request.route}", _attributes(request)
    span = tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=start)
    if request.is_server_error:
        span.set_status(Status(StatusCode.ERROR, request.error))
    at = start
    for stage, seconds in request.stages.items():
        child = tracer.start_span(stage, set_span_in_context(span, Context()), start_time=at)
        at = min(at + _nanoseconds(seconds), end)
        child.end(at)
    span.end(end)


def _attributes(request: RequestFinished) -> Mapping[str, str | int]:
    """Return a span's attributes, with the names of OpenTelemetry's semantic conventions where they exist."""
    attributes: dict[str, str | int] = {
        "http.request.method": request.method if request.method != "other" else "_OTHER",
        "http.route": request.route,
        "http.response.status_code": request.status,
        "error.type": request.error,
        "whimbrel.request_id": request.request_id,
        "whimbrel.outcome": request.outcome,
        "whimbrel.model": request.model,
        "whimbrel.texts": request.num_texts,
        "whimbrel.tokens": request.num_tokens,
        "whimbrel.truncated": request.num_truncated,
    }
    return {name: value for name, value in attributes.items() if value != ""}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
