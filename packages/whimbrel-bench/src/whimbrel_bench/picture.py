"""Pictures of a sweep: one self-contained HTML page, SVG, and PNG by matplotlib (`whimbrel[bench]`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any, Final

from whimbrel.errors import SetupError
from whimbrel_bench.chart import chart, servers
from whimbrel_bench.results import Result, word
from whimbrel_bench.sweep import Point, points

SUFFIXES: Final = (".png", ".svg", ".html")
_STYLE: Final = """
:root { color-scheme: light dark; --ink: #24292f; --paper: #ffffff; --line: #d0d7de; }
@media (prefers-color-scheme: dark) { :root { --ink: #d1d7e0; --paper: #151b23; --line: #3d444d; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto; max-width: 920px;
       padding: 0 1rem; }
svg { max-width: 100%; height: auto; } svg text { fill: var(--ink); } svg .grid { stroke: var(--line); }
.table { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.75rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
"""
_SVG_STYLE: Final = (
    "<style>text { fill: #57606a } .grid { stroke: #d0d7de } @media (prefers-color-scheme: dark) "
    "{ text { fill: #9198a1 } .grid { stroke: #3d444d } }</style>"
)
_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Throughput against latency</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>
<body><h1>Throughput against latency</h1>
<p>Further right and lower is better. Each point is a run at one rate: point at it for its numbers.
Latency counts from the moment for which a request was scheduled.</p>
{svg}
<ul>{facts}</ul>
<div class="table"><table><thead><tr>{heads}</tr></thead>
<tbody>{rows}</tbody></table></div>
</body></html>
"""


def check_path(path: Path) -> None:
    """Raise SetupError for a picture that could not be written, before anything is measured."""
    if path.suffix.lower() not in SUFFIXES:
        raise SetupError(
            f"cannot draw {path.suffix or path.name}.", hint=f"--picture takes paths that end in {', '.join(SUFFIXES)}"
        )
    if path.suffix.lower() == ".png":
        try:
            import_module("matplotlib.pyplot")
        except ImportError as error:
            raise SetupError(
                f"a PNG needs matplotlib ({error}).", hint="pip install 'whimbrel[bench]', or take .html or .svg"
            ) from None


def draw(path: Path, results: Sequence[Result], about: Mapping[str, str]) -> None:
    """Write the picture of results in the format of the path's suffix. Raises SetupError."""
    found = points(results)
    if not found:
        raise SetupError(f"{path} is not drawn: no request was answered.")
    percentile = word(max(results[0].setting.percentiles))
    suffix = path.suffix.lower()
    if suffix == ".png":
        _draw_png(path, found, percentile, about)
        return
    svg = chart(found, percentile)
    content = page(svg, results, percentile, about) if suffix == ".html" else svg.replace(">", f">{_SVG_STYLE}", 1)
    path.write_text(content, encoding="utf-8")


def page(svg: str, results: Sequence[Result], percentile: str, about: Mapping[str, str]) -> str:
    """Return an HTML page that fetches nothing."""
    facts = "".join(f"<li>{escape(name)}: {escape(value)}</li>" for name, value in about.items())
    head = ["server", "offered/s", "answered/s", "tokens/s", "median ms", f"p{percentile} ms", "failed"]
    rows: list[str] = []
    for result in results:
        ms, rate = result.milliseconds(), result.setting.request_rate
        cells = [
            result.setting.server or result.setting.model,
            f"{rate:g}" if isfinite(rate) else "all at once",
            f"{result.request_throughput:,.1f}",
            f"{result.token_throughput:,.0f}",
            f"{ms['median_e2el_ms']:,.1f}",
            f"{ms[f'p{percentile}_e2el_ms']:,.1f}",
            f"{result.failed:,}",
        ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    return _PAGE.format(style=_STYLE, svg=svg, facts=facts, heads=heads, rows="\n".join(rows))


def _draw_png(path: Path, found: Sequence[Point], percentile: str, about: Mapping[str, str]) -> None:
    mpl: Any = import_module("matplotlib")
    mpl.use("agg")
    plot: Any = import_module("matplotlib.pyplot")
    figure, axes = plot.subplots(figsize=(9, 5.5), dpi=150, layout="constrained")
    for name, colour in servers(found).items():
        own = sorted((point for point in found if point.server == name), key=lambda point: point.rate)
        across = [point.throughput for point in own]
        axes.plot(across, [point.median for point in own], "o-", color=colour, label=f"{name}, median")
        line = axes.plot(across, [point.high for point in own], "o--", color=colour, label=f"{name}, p{percentile}")
        line[0].set_markerfacecolor("white")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(mpl.ticker.FuncFormatter(_plain))
    axes.yaxis.set_minor_formatter(mpl.ticker.NullFormatter())
    axes.set_xlim(left=0)
    axes.set_xlabel("answered requests per second")
    axes.set_ylabel("latency in ms (logarithmic)")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.set_title("Throughput against latency", loc="left", fontweight="bold")
    axes.legend(frameon=False)
    figure.text(0.01, -0.02, "; ".join(f"{name}: {value}" for name, value in about.items()), fontsize=8, va="top", wrap=True)
    figure.savefig(path, bbox_inches="tight")
    plot.close(figure)


def _plain(value: float, _: object) -> str:
    return f"{value:,g}"
