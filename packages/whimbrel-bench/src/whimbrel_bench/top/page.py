"""Pages of metrics: their samples, and the rates between two pages of one server. Pure.

docs/metrics.md lists the metrics. Requests of probes (/metrics, /health, ...) are left out, as this command sends them itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Final, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

PROBES: Final = frozenset({"/metrics", "/health", "/health/live", "/health/ready", "/ping", "/info", "/load"})
MEMORY: Final = "process_resident_memory_bytes"
_PREFIX: Final = "whimbrel_"
_START: Final = "process_start_time_seconds"
_START_TOLERANCE: Final = 1.5
"""Seconds by which two workers may differ over the start of one process: each computes it from the system's clock."""
_BUCKETS: Final = ("whimbrel_stage_seconds_bucket", "whimbrel_request_seconds_bucket")

Series: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
"""Name of a sample, and its labels in order."""


@dataclass(frozen=True)
class Page:
    """Samples of one page of metrics, without the routes of probes."""

    samples: Mapping[Series, float]
    started: float
    """Time at which the server started, in seconds since 1970; 0 if it does not say."""
    received: float
    """Time at which the page came, on a clock of seconds."""

    def total(self, name: str) -> float | None:
        """Return the sum of a metric over its labels; None if the page does not have it."""
        found = [value for (each, _), value in self.samples.items() if each == name]
        return sum(found) if found else None

    def models(self) -> list[str]:
        """Return the models that have engines."""
        pairs = (dict(labels) for name, labels in self.samples if name == "whimbrel_engines_up")
        return sorted({each.get("model", "") for each in pairs} - {""})


@dataclass
class Rates:
    """Numbers of one server between two pages, or of several servers together. Rates are per second."""

    requests: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    """Ended requests by outcome."""
    counts: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    """Other counters by their name, without prefix and suffix."""
    buckets: dict[str, dict[float, float]] = field(default_factory=lambda: defaultdict[str, dict[float, float]](dict))
    """Counts of observations up to an upper bound in seconds, by stage and bound. The stage "request" is the whole request."""

    def add(self, other: Rates) -> None:
        """Add the rates of another server."""
        for own, theirs in ((self.requests, other.requests), (self.counts, other.counts)):
            for name, value in theirs.items():
                own[name] += value
        for stage, buckets in other.buckets.items():
            mine = self.buckets.get(stage, dict.fromkeys(buckets, 0.0))
            shared = mine.keys() & buckets.keys()  # another version may have other bounds
            self.buckets[stage] = {bound: mine[bound] + buckets[bound] for bound in shared}


def read_page(text: str, *, received: float) -> Page:
    """Return the samples of a page in Prometheus' text format. Raises ValueError if it has no metrics of Whimbrel."""
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except (ValueError, LookupError, AttributeError) as error:  # the parser's, for text of another kind
        raise ValueError(f"not in Prometheus' text format: {error}") from None
    if not any(sample.name.startswith(_PREFIX) for sample in samples):
        raise ValueError("no metrics of Whimbrel")
    known = [each for each in samples if isfinite(each.value) and each.labels.get("route") not in PROBES]
    starts = {sample.labels.get("process", ""): sample.value for sample in known if sample.name == _START}
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in known}
    return Page(found, starts.get("supervisor", min(starts.values(), default=0.0)), received)


def has_restarted(before: Page, after: Page) -> bool:
    """Return whether another life of the server made the second page."""
    return abs(after.started - before.started) > _START_TOLERANCE


def rates_between(before: Page, after: Page) -> Rates:
    """Return the rates between two pages. Counters of a server that restarted in between count from zero."""
    rates = Rates()
    seconds = max(after.received - before.received, 1e-6)
    old: Mapping[Series, float] = {} if has_restarted(before, after) else before.samples
    for (name, pairs), value in after.samples.items():
        risen = value - old.get((name, pairs), 0.0)
        rate = (value if risen < 0 else risen) / seconds
        labels = dict(pairs)
        if name == "whimbrel_requests_total":
            rates.requests[labels.get("outcome", "")] += rate
        elif name in _BUCKETS:
            buckets, bound = rates.buckets[labels.get("stage", "request")], float(labels.get("le", inf))
            buckets[bound] = buckets.get(bound, 0.0) + rate
        elif name.endswith("_total"):
            rates.counts[name.removeprefix(_PREFIX).removesuffix("_total")] += rate
    return rates


def quantile(q: float, buckets: Mapping[float, float]) -> float | None:
    """Return a quantile of a histogram, interpolated within its bucket, as Prometheus does.

    `buckets` has the number of observations up to each upper bound. Beyond the last finite bound, that bound is returned.
    None if there are no observations.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0 or bounds[0] == inf:
        return None
    low, below = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= q * total and buckets[bound] > below:
            return low if bound == inf else low + (bound - low) * (q * total - below) / (buckets[bound] - below)
        low, below = bound, buckets[bound]
    return low
