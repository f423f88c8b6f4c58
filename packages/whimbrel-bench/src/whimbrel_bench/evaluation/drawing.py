"""Pictures of intervals in HTML: a dot and a line for each system, over one scale. Pure.

Positions are percentages, so a picture fits any width, and its colours are those of the page.
"""

from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, log10
from typing import Final

from whimbrel_bench.evaluation.intervals import Interval

_MAX_STEPS: Final = 5
"""Steps of a scale, about."""


def intervals_part(caption: str, rows: Sequence[tuple[str, Interval]], sign: str = "") -> str:
    """Return the picture of named intervals. `sign` is "+" if numbers are differences."""
    low, high = min(each.low for _, each in rows), max(each.high for _, each in rows)
    step, digits = _step(high - low)
    first, last = floor(low / step + 1e-6), ceil(high / step - 1e-6)
    last = max(last, first + 1)

    def place(value: float) -> str:
        return f"{100 * (value / step - first) / (last - first):.2f}%"

    ticks = {number: place(number * step) for number in range(first, last + 1)}
    grid = "".join(f'<line class="{"tick" if number else "zero"}" x1="{x}" x2="{x}" y2="100%"/>' for number, x in ticks.items())
    parts = [_row(name, each, place, grid, sign) for name, each in rows]
    zero = f"{0:.{digits}f}"
    labels = "".join(
        f'<text x="{x}" y="15">{f"{number * step:{sign}.{digits}f}" if number else zero}</text>' for number, x in ticks.items()
    )
    scale = f'<span></span><svg aria-hidden="true">{labels}</svg>'
    return f'<figure><figcaption>{escape(caption)}</figcaption><div class="intervals">{"".join(parts)}{scale}</div></figure>'


def _row(name: str, interval: Interval, place: Callable[[float], str], grid: str, sign: str) -> str:
    words = f"{interval.value:{sign}.4f}, 95 %: {interval.low:{sign}.4f} to {interval.high:{sign}.4f}"
    ends = f'x1="{place(interval.low)}" x2="{place(interval.high)}"'
    line = f'<line class="bar" {ends} y1="50%" y2="50%"/><circle cx="{place(interval.value)}" cy="50%" r="5"/>'
    return f'<span>{escape(name)}</span><svg role="img" aria-label="{escape(words)}">{grid}{line}</svg>'


def _step(span: float) -> tuple[float, int]:
    """Return the distance of two ticks, which is 1, 2 or 5 times a power of ten, and the digits to write it."""
    rough = max(span, 0.01) / _MAX_STEPS
    exponent = floor(log10(rough))
    factor = next((factor for factor in (1, 2, 5) if factor * 10.0**exponent >= rough), 10)
    exponent, factor = (exponent + 1, 1) if factor == 10 else (exponent, factor)
    return factor * 10.0**exponent, max(0, -exponent)
