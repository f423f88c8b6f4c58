"""Picture of a sweep, throughput against latency, by matplotlib: PNG, SVG, or SVG in a self-contained HTML page."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, Final

from whimbrel.errors import SetupError
from whimbrel_bench import page as pages
from whimbrel_bench.results import Result, cells, word

SUFFIXES: Final = (".png", ".svg", ".html")
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours that people with any kind of colour vision tell apart. Source: Okabe and Ito, Color Universal Design (2008)."""
_INTRODUCTION: Final = (
    "Further right and lower is better. Each point is a run at one rate. "
    "Latency counts from the moment for which a request was scheduled."
)


def check_path(path: Path) -> None:
    """Raise SetupError for a picture that could not be written, before anything is measured."""
    if path.suffix.lower() not in SUFFIXES:
        raise SetupError(
            f"cannot draw {path.suffix or path.name}.", hint=f"--picture takes paths that end in {', '.join(SUFFIXES)}"
        )
    try:
        import_module("matplotlib.pyplot")
    except ImportError as error:
        raise SetupError(f"a picture needs matplotlib ({error}).", hint="pip install 'whimbrel[bench]'") from None


def draw(path: Path, results: Sequence[Result], about: Mapping[str, str]) -> None:
    """Write the picture of results in the format of the path's suffix. Raises SetupError."""
    if not any(result.completed for result in results):
        raise SetupError(f"{path} is not drawn: no request was answered.")
    if path.suffix.lower() != ".html":
        _draw(path, results, about)
        return
    svg = StringIO()
    _draw(svg, results, {})
    path.write_text(page(svg.getvalue(), results, about), encoding="utf-8")


def page(svg: str, results: Sequence[Result], about: Mapping[str, str]) -> str:
    """Return an HTML page that fetches nothing."""
    head, *rows = cells(results)
    parts = pages.paragraph_part(_INTRODUCTION), pages.picture_part(svg), pages.facts_part(about), pages.table_part(head, rows)
    return pages.page("Throughput against latency", *parts)


def _draw(out: Path | StringIO, results: Sequence[Result], about: Mapping[str, str]) -> None:
    mpl: Any = import_module("matplotlib")
    mpl.use("agg")
    plot: Any = import_module("matplotlib.pyplot")
    answered = sorted((result for result in results if result.completed), key=lambda result: result.setting.load.rate)
    percentile = word(max(results[0].setting.load.percentiles))
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure, axes = plot.subplots(figsize=(9, 5.5), dpi=150, layout="constrained")
        for number, name in enumerate(dict.fromkeys(result.name for result in answered)):
            own, colour = [result for result in answered if result.name == name], COLOURS[number % len(COLOURS)]
            across, ms = [result.request_throughput for result in own], [result.milliseconds() for result in own]
            axes.plot(across, [each["median_e2el_ms"] for each in ms], "o-", color=colour, label=f"{name}, median")
            high = [each[f"p{percentile}_e2el_ms"] for each in ms]
            axes.plot(across, high, "o--", color=colour, markerfacecolor="white", label=f"{name}, p{percentile}")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(mpl.ticker.StrMethodFormatter("{x:,g}"))
        axes.yaxis.set_minor_formatter(mpl.ticker.NullFormatter())
        axes.set_xlim(left=0)
        axes.set_xlabel("answered requests per second")
        axes.set_ylabel("latency in ms (logarithmic)")
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.set_title("Throughput against latency", loc="left", fontweight="bold")
        axes.legend(frameon=False)
        facts = "; ".join(f"{name}: {value}" for name, value in about.items())
        figure.text(0.01, -0.02, facts, fontsize=8, va="top", wrap=True)
        is_svg = isinstance(out, StringIO) or out.suffix.lower() == ".svg"
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) if is_svg else None
        figure.savefig(out, format="svg" if is_svg else "png", bbox_inches="tight", metadata=metadata)
        plot.close(figure)
