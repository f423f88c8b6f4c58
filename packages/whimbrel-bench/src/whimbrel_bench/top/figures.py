"""Figures of servers, as `whimbrel top` shows them and prints them as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from whimbrel_bench.top.page import Page, Rates, count, gauge, memory, quantile

State: TypeAlias = Literal["up", "loading", "unreachable", "refused"]
"""States of a server. refused: it answers, but not with its metrics."""

STAGES: Final = ("receive", "read", "tokenize", "queue", "pack", "compute", "collect", "write", "request")
"""Stages of a request in order, and the whole request."""


class Latency(msgspec.Struct, frozen=True):
    """Times of a stage over the interval, in seconds. None: nothing was measured."""

    per_second: float
    p50: float | None
    p95: float | None
    p99: float | None


class Figures(msgspec.Struct):
    """Numbers of one server, or of several together. What needs two pages is None until there are two."""

    requests_per_second: dict[str, float] | None = None
    """Ended requests by outcome."""
    texts_per_second: float | None = None
    tokens_per_second: float | None = None
    truncated_per_second: float | None = None
    queue_tokens: float = 0.0
    requests_in_flight: float = 0.0
    latency_seconds: dict[str, Latency] | None = None
    """Times by stage; "request" is the whole request."""
    engines_up: float = 0.0
    engine_restarts: float = 0.0
    """Restarts since the server started."""
    worker_restarts: float = 0.0
    prefix_cache_hit_ratio: float | None = None
    """Share of lookups in the interval that found something; None without lookups."""
    prefix_cache_bytes: float = 0.0
    document_cache_hit_ratio: float | None = None
    memory_bytes: float | None = None
    """Resident memory of all processes."""


class ServerFigures(msgspec.Struct):
    """State and figures of one server."""

    url: str
    state: State
    reason: str = ""
    """Explanation of any state but "up"."""
    version: str = ""
    models: list[str] = []
    seconds: float | None = None
    """Time between the two pages of the rates."""
    figures: Figures | None = None


def make_figures(pages: Sequence[Page], rates: Rates | None) -> Figures:
    """Return the figures of the latest page of each server, and of their rates together."""

    def gauges(name: str) -> float:
        return sum(gauge(page, name) for page in pages)

    def counts(name: str) -> float:
        return sum(count(page, name) for page in pages)

    sizes = [size for page in pages if (size := memory(page)) is not None]
    figures = Figures(
        queue_tokens=gauges("whimbrel_queue_tokens"),
        requests_in_flight=gauges("whimbrel_requests_in_flight"),
        engines_up=gauges("whimbrel_engines_up"),
        engine_restarts=counts("whimbrel_engine_restarts_total"),
        worker_restarts=counts("whimbrel_worker_restarts_total"),
        prefix_cache_bytes=gauges("whimbrel_prefix_cache_bytes"),
        memory_bytes=sum(sizes) if sizes else None,
    )
    if rates is not None:
        figures.requests_per_second = {name: rate for name, rate in rates.requests.items() if rate > 0}
        figures.texts_per_second = rates.counts["texts"]
        figures.tokens_per_second = rates.counts["tokens"]
        figures.truncated_per_second = rates.counts["truncated_texts"]
        figures.latency_seconds = {stage: _latency(rates, stage) for stage in STAGES}
        figures.prefix_cache_hit_ratio = _hit_ratio(rates, "prefix_cache")
        figures.document_cache_hit_ratio = _hit_ratio(rates, "document_cache")
    return figures


def _latency(rates: Rates, stage: str) -> Latency:
    buckets = rates.buckets.get(stage, {})
    p50, p95, p99 = (quantile(q, buckets) for q in (0.5, 0.95, 0.99))
    return Latency(max(buckets.values(), default=0.0), p50, p95, p99)


def _hit_ratio(rates: Rates, cache: str) -> float | None:
    hits, misses = rates.counts[f"{cache}_hits"], rates.counts[f"{cache}_misses"]
    return hits / (hits + misses) if hits + misses > 0 else None
