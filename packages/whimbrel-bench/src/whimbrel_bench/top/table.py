"""Table of `whimbrel top`: the figures of servers, also as its JSON, their rows and total, and below them the stages. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whimbrel_bench.top.page import MEMORY, Samples, quantile, summed

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


def make_figures(levels: Samples, rates: Samples | None) -> Figures:
    """Return the figures of a page's samples and of the rates at which they rose, both of one server or of several together."""

    def level(name: str) -> float:
        return sum(summed(levels, f"whimbrel_{name}").values())

    memory = summed(levels, MEMORY)
    figures = Figures(
        queue_tokens=level("queue_tokens"),
        requests_in_flight=level("requests_in_flight"),
        engines_up=level("engines_up"),
        engine_restarts=level("engine_restarts_total"),
        worker_restarts=level("worker_restarts_total"),
        prefix_cache_bytes=level("prefix_cache_bytes"),
        memory_bytes=sum(memory.values()) if memory else None,
    )
    if rates is not None:

        def rate(name: str) -> float:
            return sum(summed(rates, f"whimbrel_{name}_total").values())

        def hit_ratio(cache: str) -> float | None:
            hits, misses = rate(f"{cache}_hits"), rate(f"{cache}_misses")
            return hits / (hits + misses) if hits + misses > 0 else None

        outcomes = summed(rates, "whimbrel_requests_total", "outcome")
        figures.requests_per_second = {name: rate for name, rate in outcomes.items() if rate > 0}
        figures.texts_per_second = rate("texts")
        figures.tokens_per_second = rate("tokens")
        figures.truncated_per_second = rate("truncated_texts")
        figures.latency_seconds = {stage: _latency(rates, stage) for stage in STAGES}
        figures.prefix_cache_hit_ratio = hit_ratio("prefix_cache")
        figures.document_cache_hit_ratio = hit_ratio("document_cache")
    return figures


def _latency(rates: Samples, stage: str) -> Latency:
    kind, labels = ("request", {}) if stage == "request" else ("stage", {"stage": stage})
    counts = summed(rates, f"whimbrel_{kind}_seconds_bucket", "le", **labels)
    buckets = {float(bound): count for bound, count in counts.items()}
    p50, p95, p99 = (quantile(q, buckets) for q in (0.5, 0.95, 0.99))
    return Latency(max(buckets.values(), default=0.0), p50, p95, p99)


# Rows

_STYLES: Final[Mapping[str, str]] = {"up": "green", "loading": "yellow", "unreachable": "red", "refused": "red"}
_WIDE: Final = 90
"""Columns from which stages and the rest are side by side."""
_LONGEST: Final = 60.0
"""Upper bound of the last bucket of times, in seconds."""


def render(servers: Sequence[ServerFigures], total: Figures, *, width: int) -> RenderableType:
    """Return the view of the servers and their total for a terminal of `width` columns."""
    parts: list[RenderableType] = [_servers(servers, total, width)]
    parts += [_text(f"{each.url}: {each.reason}", _STYLES[each.state]) for each in servers if each.reason]
    for each in (each for each in servers if each.models):
        version = f"Whimbrel {each.version}: " if each.version else ""
        parts += [_text(f"{each.url}  {version}{', '.join(each.models)}", "dim")]
    stages, rest = _stages(total.latency_seconds or {}), _rest(total)
    if width >= _WIDE:
        grid = Table.grid(padding=(0, 6))
        grid.add_row(stages, rest)
        parts += [Text(), grid]
    else:
        parts += [Text(), stages, Text(), rest]
    return Group(*parts)


_COLUMNS: Final[Sequence[tuple[str, int, Callable[[Figures], str]]]] = (
    ("REQ/S", 0, lambda each: number(_requests(each))),
    ("FAILED/S", 100, lambda each: number(_requests(each, "ok"))),
    ("TEXTS/S", 75, lambda each: number(each.texts_per_second)),
    ("TOKENS/S", 0, lambda each: number(each.tokens_per_second)),
    ("QUEUE", 0, lambda each: number(each.queue_tokens)),
    ("IN FLIGHT", 90, lambda each: number(each.requests_in_flight)),
    ("P50", 90, lambda each: time(_request(each).p50)),
    ("P99", 70, lambda each: time(_request(each).p99)),
    ("ENGINES", 110, lambda each: number(each.engines_up)),
)
"""Columns of the table of servers, the least width at which each is shown, and its text."""


def _servers(servers: Sequence[ServerFigures], total: Figures, width: int) -> Table:
    shown = [(name, text) for name, least, text in _COLUMNS if width >= least]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("SERVER", overflow="ellipsis", no_wrap=True, min_width=12)
    table.add_column("STATE", no_wrap=True)
    for name, _ in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for each in servers:
        cells = ["-" if each.figures is None else text(each.figures) for _, text in shown]
        name = each.url.partition("://")[2] or each.url
        table.add_row(_text(name), _text(each.state, _STYLES[each.state]), *map(_text, cells))
    if len(servers) > 1:
        num_up = sum(each.state == "up" for each in servers)
        cells = [text(total) for _, text in shown]
        table.add_row("total", f"{num_up} of {len(servers)} up", *cells, style="bold")
    return table


def _stages(latency: Mapping[str, Latency]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("STAGE", no_wrap=True)
    for name in ("PER S", "P50", "P95", "P99"):
        table.add_column(name, justify="right", no_wrap=True, min_width=7)
    for stage, each in latency.items():
        cells = (number(each.per_second), time(each.p50), time(each.p95), time(each.p99))
        table.add_row(stage, *cells, style="bold" if stage == "request" else "")
    return table


def _rest(total: Figures) -> Table:
    outcomes = total.requests_per_second
    rows = {
        "requests": "-"
        if outcomes is None
        else ", ".join(f"{name} {number(rate)}/s" for name, rate in outcomes.items()) or "none",
        "texts": f"{number(total.texts_per_second)}/s, {number(total.truncated_per_second)}/s truncated",
        "tokens": f"{number(total.tokens_per_second)}/s, {number(total.queue_tokens)} in the queue",
        "in flight": f"{number(total.requests_in_flight)} requests",
        "engines": f"{number(total.engines_up)} up, {number(total.engine_restarts)} restarts",
        "workers": f"{number(total.worker_restarts)} restarts",
        "prefix cache": f"{_share(total.prefix_cache_hit_ratio)} hits, {size(total.prefix_cache_bytes)}",
        "documents": f"{_share(total.document_cache_hit_ratio)} hits",
        "memory": size(total.memory_bytes),
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, text in rows.items():
        table.add_row(_text(name, "bold"), _text(text))
    return table


def number(value: float | None) -> str:
    """Return a number with three digits or more; "-" for None."""
    if value is None:
        return "-"
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.01 else "<0.01"


def time(seconds: float | None) -> str:
    """Return a time with its unit; "-" for None."""
    if seconds is None:
        return "-"
    if seconds >= _LONGEST:
        return f">{_LONGEST:.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def size(num_bytes: float | None) -> str:
    """Return a size in bytes with its unit; "-" for None."""
    if num_bytes is None:
        return "-"
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"


def _share(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0%}"


def _requests(figures: Figures, but: str = "") -> float | None:
    rates = figures.requests_per_second
    return None if rates is None else sum(rate for outcome, rate in rates.items() if outcome != but)


def _request(figures: Figures) -> Latency:
    return (figures.latency_seconds or {}).get("request", Latency(0.0, None, None, None))


def _text(text: str, style: str = "") -> Text:
    """Return text of a server without control characters, which could change the terminal."""
    return Text("".join(each if each.isprintable() else "?" for each in text), style=style)
