"""Prometheus metrics of a server process. Labels come from fixed sets, so their number is bounded."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from whimbrel.trace import Stage, subscribe
from whimbrel.types import Result

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """Counts what the app answers; listens to `trace` for the stages."""

    def __init__(self, queued_tokens: Callable[[], int]) -> None:
        disable_created_metrics()
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._requests = Counter(
            "whimbrel_requests_total", "Requests by route and HTTP status.", ["route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "whimbrel_request_seconds", "From body to answer.", ["route"], buckets=_SECONDS, registry=self._registry
        )
        self._stages = Histogram(
            "whimbrel_stage_seconds", "Time in each stage.", ["stage"], buckets=_SECONDS, registry=self._registry
        )
        self._texts = Counter("whimbrel_texts_total", "Texts answered.", registry=self._registry)
        self._tokens = Counter("whimbrel_tokens_total", "Tokens computed for answers.", registry=self._registry)
        self._truncated = Counter("whimbrel_truncated_texts_total", "Texts that were cut.", registry=self._registry)
        Gauge("whimbrel_queue_tokens", "Tokens that wait.", registry=self._registry).set_function(queued_tokens)
        self.close = subscribe(self._stage)

    def request(self, route: str, status: int, seconds: float) -> None:
        """A request was answered. `route` is a route's template, never a path as sent."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def result(self, result: Result) -> None:
        """What a successful request amounted to."""
        self._texts.inc(len(result.vectors_ND))
        self._tokens.inc(result.num_tokens)
        self._truncated.inc(result.num_truncated)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def _stage(self, stage: Stage, seconds: float) -> None:
        self._stages.labels(stage).observe(seconds)
