"""Chart of throughput against latency as SVG, without any library: a line per server, median solid and percentile dashed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, isfinite, log10
from typing import Final

from whimbrel_bench.sweep import Point

COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours that people with any kind of colour vision tell apart. Source: Okabe and Ito, Color Universal Design (2008)."""
WIDTH: Final = 860
HEIGHT: Final = 460
_LEFT: Final = 80
_RIGHT: Final = 24
_TOP: Final = 24
_BOTTOM: Final = 64
_ROW: Final = 22


def servers(points: Sequence[Point]) -> dict[str, str]:
    """Return a colour for each server, in the order of their first points."""
    names = dict.fromkeys(point.server for point in points)
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}


def nice_ticks(most: float, count: int = 6) -> list[float]:
    """Return round numbers from 0 to at least `most`, at most about `count` of them."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / count
    power = 10.0 ** floor(log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [step * i for i in range(ceil(most / step - 1e-9) + 1)]


def log_ticks(least: float, most: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten that enclose both numbers."""
    steps = [factor * 10.0**power for power in range(floor(log10(least)), ceil(log10(most)) + 1) for factor in (1, 2, 5)]
    low = max((each for each in steps if each <= least), default=steps[0])
    high = min((each for each in steps if each >= most), default=steps[-1])
    return [each for each in steps if low <= each <= high] if high > low else [low, 2 * low]


def chart(points: Sequence[Point], percentile: str) -> str:
    """Return the SVG of the points. `percentile` names the dashed lines."""
    across = nice_ticks(max(point.throughput for point in points))
    up = log_ticks(min(point.median for point in points), max(point.high for point in points))
    base, top = HEIGHT - _BOTTOM, _TOP

    def x(value: float) -> float:
        return _LEFT + value / across[-1] * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        share = (log10(value) - log10(up[0])) / (log10(up[-1]) - log10(up[0]))
        return base - share * (base - top)

    colours = servers(points)
    parts = [*_grid(across, up, x, y), *_axes()]
    for name, colour in colours.items():
        own = sorted((point for point in points if point.server == name), key=lambda point: point.rate)
        parts += _line(own, [(x(point.throughput), y(point.median)) for point in own], colour)
        parts += _line(own, [(x(point.throughput), y(point.high)) for point in own], colour, dash="6 4")
    parts += _legend(colours, percentile)
    height = HEIGHT + _ROW * len(colours) + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="Throughput against latency" font-family="system-ui, sans-serif" font-size="13">'
        + "".join(parts)
        + "</svg>"
    )


Scale = Callable[[float], float]


def _grid(across: Sequence[float], up: Sequence[float], x: Scale, y: Scale) -> list[str]:
    base = HEIGHT - _BOTTOM
    parts: list[str] = []
    for value in across:
        parts.append(f'<line class="grid" x1="{x(value):.1f}" y1="{_TOP}" x2="{x(value):.1f}" y2="{base}"/>')
        parts.append(text(x(value), base + 18, f"{value:,g}", anchor="middle"))
    for value in up:
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y(value):.1f}" x2="{WIDTH - _RIGHT}" y2="{y(value):.1f}"/>')
        parts.append(text(_LEFT - 8, y(value) + 4, f"{value:,g}", anchor="end"))
    return parts


def _axes() -> list[str]:
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    turned = f'transform="rotate(-90 20 {middle:.0f})"'
    return [
        text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - _BOTTOM + 42, "answered requests per second", anchor="middle"),
        text(20, middle, "latency in ms (logarithmic)", anchor="middle", more=turned),
    ]


def _line(own: Sequence[Point], places: Sequence[tuple[float, float]], colour: str, *, dash: str = "") -> list[str]:
    """Return the line of one server, with what a mouse shows at each point."""
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    style = f' stroke-dasharray="{dash}"' if dash else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{style}/>']
    for (a, b), point in zip(places, own, strict=True):
        fill = "none" if dash else colour
        title = f"<title>{escape(describe(point))}</title>"
        parts.append(
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{fill}" stroke="{colour}" stroke-width="2">{title}</circle>'
        )
    return parts


def describe(point: Point) -> str:
    """Return a point in words."""
    rate = f"{point.rate:g} requests/s offered" if isfinite(point.rate) else "all requests at once"
    failed = f", {point.failed:,} failed" if point.failed else ""
    latency = f"median {point.median:,.1f} ms, high {point.high:,.1f} ms"
    return f"{point.server}: {rate}, {point.throughput:,.1f} answered, {latency}{failed}"


def _legend(colours: dict[str, str], percentile: str) -> list[str]:
    parts: list[str] = []
    for number, (name, colour) in enumerate(colours.items()):
        y = HEIGHT + number * _ROW
        for start, dash in ((_LEFT, ""), (_LEFT + 110, ' stroke-dasharray="6 4"')):
            parts.append(f'<line x1="{start}" y1="{y}" x2="{start + 34}" y2="{y}" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(text(_LEFT + 42, y + 4, "median"))
        parts.append(text(_LEFT + 152, y + 4, f"p{percentile}"))
        parts.append(text(_LEFT + 210, y + 4, name, more='font-weight="bold"'))
    return parts


def text(x: float, y: float, words: str, *, anchor: str = "start", more: str = "") -> str:
    """Return words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'
