"""Pages of metrics: their samples, and the rates between two pages of one server. Pure.

docs/metrics.md lists the metrics. Requests of probes (/metrics, /health, ...) are left out, as this command sends them itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Final, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

PROBES: Final = frozenset({"/metrics", "/health", "/health/live", "/health/ready", "/ping", "/info", "/load"})
MEMORY: Final = "process_resident_memory_bytes"
_START: Final = "process_start_time_seconds"
_START_TOLERANCE: Final = 1.5
"""Seconds by which two workers may differ over the start of one process: each computes it from the system's clock."""

Series: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
"""Name of a sample, and its labels in order."""
Samples: TypeAlias = Mapping[Series, float]


@dataclass(frozen=True)
class Page:
    """Samples of one page of metrics, without the routes of probes."""

    samples: Samples
    started: float
    """Time at which the server started, in seconds since 1970; 0 if it does not say."""
    received: float
    """Time at which the page came, on a clock of seconds."""


def summed(samples: Samples, name: str, by: str = "", **labels: str) -> dict[str, float]:
    """Return the sums of a metric by the values of a label, over the samples that have `labels`."""
    sums: dict[str, float] = defaultdict(float)
    for (each, pairs), value in samples.items():
        if each == name and labels.items() <= (own := dict(pairs)).items():
            sums[own.get(by, "")] += value
    return dict(sums)


def together(parts: Iterable[Samples]) -> Samples:
    """Return the samples of several servers as those of one."""
    sums: dict[Series, float] = defaultdict(float)
    for series, value in (item for part in parts for item in part.items()):
        sums[series] += value
    return sums


def read_page(text: str, *, received: float) -> Page:
    """Return the samples of a page in Prometheus' text format. Raises ValueError if it has no metrics of Whimbrel."""
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except (ValueError, LookupError, AttributeError) as error:  # the parser's, for text of another kind
        raise ValueError(f"not in Prometheus' text format: {error}") from None
    if not any(sample.name.startswith("whimbrel_") for sample in samples):
        raise ValueError("no metrics of Whimbrel")
    known = [each for each in samples if isfinite(each.value) and each.labels.get("route") not in PROBES]
    starts = {sample.labels.get("process", ""): sample.value for sample in known if sample.name == _START}
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in known}
    return Page(found, starts.get("supervisor", min(starts.values(), default=0.0)), received)


def has_restarted(before: Page, after: Page) -> bool:
    """Return whether another life of the server made the second page."""
    return abs(after.started - before.started) > _START_TOLERANCE


def rates_between(before: Page, after: Page) -> Samples:
    """Return how much each sample rose per second between two pages. A server that restarted in between counts from zero."""
    seconds = max(after.received - before.received, 1e-6)
    old: Samples = {} if has_restarted(before, after) else before.samples
    rates: dict[Series, float] = {}
    for series, value in after.samples.items():
        risen = value - old.get(series, 0.0)
        rates[series] = (value if risen < 0 else risen) / seconds
    return rates


def quantile(q: float, buckets: Mapping[float, float]) -> float | None:
    """Return a quantile of a histogram, interpolated within its bucket, as Prometheus does.

    `buckets` has the number of observations up to each upper bound. Beyond the last finite bound, that bound is returned.
    A bound that only some of several servers have can count less than a lower one, and is left out. None if there are no
    observations.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0 or bounds[0] == inf:
        return None
    low, below = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] < below:
            continue
        if buckets[bound] >= q * total and buckets[bound] > below:
            return low if bound == inf else low + (bound - low) * (q * total - below) / (buckets[bound] - below)
        low, below = bound, buckets[bound]
    return low
