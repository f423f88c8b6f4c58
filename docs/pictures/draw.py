"""Pictures of README: the terminal while `whimbrel serve` starts and answers, and a chart of measured speed.

`make pictures` writes terminal.svg from a real run, and speed.svg from the tables of BENCHMARKS.md. sweep.svg is drawn by
`whimbrel bench serve`, with the command in BENCHMARKS.md.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path
from xml.sax.saxutils import escape

from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PORT = 8000
WIDTH = 118
SHOWN_NUMBERS = 3

INK = "#57606a"  # legible on light and on dark pages
BARS = {"Whimbrel": "#2a7f62", "Sentence Transformers": "#a9b4bd"}
LABEL, BAR, ROW = 230, 420, 26
"""Widths of labels and of the longest bar, height of a bar, in pixels."""


def terminal() -> str:
    """Return the picture of a server that starts and of a request, as SVG."""
    command = [sys.executable, "-m", "whimbrel", "serve", "--port", str(PORT)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603
    assert server.stderr is not None
    lines: list[str] = []
    for line in server.stderr:
        lines.append(line.rstrip("\n"))
        if line.startswith("print("):
            break
    else:
        raise SystemExit("".join(lines))
    curl = next(line for line in lines if line.startswith("curl "))
    answer = subprocess.run(curl.replace("curl", "curl -s", 1), shell=True, capture_output=True, text=True, check=True).stdout  # noqa: S602
    server.send_signal(signal.SIGINT)
    server.wait()

    said = Text("\n".join(lines).replace(_interpreter(lines), "python"))
    said.highlight_regex(r"(?m)^  [A-Za-z ]+ [0-9.]+ s$", "dim")
    said.highlight_regex(
        r"(?m)^(  (model|outputs|max length|device|dtype|batch memory|CPU|kernels|processes|API key|URL) |In (a shell|Python))",
        "bold",
    )
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print(Text("$ whimbrel serve", style="bold"))
    console.print(said)
    console.print(Text(f"\n$ {curl}", style="bold"))
    console.print(Text(_shortened(answer)))
    return console.export_svg(title="whimbrel serve")


def _interpreter(lines: list[str]) -> str:
    """Return the path in the banner's line about Python."""
    return next(found[1] for line in lines if (found := re.fullmatch(r"In Python \((.+)\)", line)))


def _shortened(answer: str) -> str:
    """Return the answer with the first numbers of its vector."""

    def cut(found: re.Match[str]) -> str:
        numbers = found[1].split(",")
        return f'"embedding":[{", ".join(numbers[:SHOWN_NUMBERS])}, ... {len(numbers)} numbers]'

    return re.sub(r'"embedding":\[([^]]+)\]', cut, answer)


def speed() -> str:
    """Return the chart of tokens per second, in bfloat16 and in float32, as SVG."""
    text = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8").partition("## The engine against Sentence Transformers")[2]
    tables = re.split(r"^`python benchmarks/engine\.py", text.partition("\n## ")[0], flags=re.MULTILINE)[1:]
    rows: list[tuple[str, list[int], str]] = []
    for dtype, table in zip(("bfloat16", "float32"), tables, strict=True):
        for name, _, ours, theirs, ratio in re.findall(
            r"^\| ([a-z][^|]*) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| \*\*([\d.]+)", table, re.MULTILINE
        ):
            rows.append((f"{name}, {dtype}", [int(each.replace(",", "")) for each in (ours, theirs)], ratio))
    most = max(max(numbers) for _, numbers, _ in rows)
    parts = [_text(10, 18, "all-MiniLM-L6-v2, tokens per second on 2 cores (Intel Xeon): longer is faster", weight="bold")]
    y = 34
    for x, (who, colour) in zip((LABEL, LABEL + 110), BARS.items(), strict=True):
        parts += [f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>', _text(x + 18, y + 11, who)]
    y += 30
    for name, numbers, ratio in rows:
        parts.append(_text(LABEL - 10, y + 20, name, anchor="end"))
        for offset, number, colour in zip((0, 13), numbers, BARS.values(), strict=True):
            parts.append(f'<rect x="{LABEL}" y="{y + offset}" width="{number / most * BAR:.0f}" height="12" fill="{colour}"/>')
        parts.append(_text(LABEL + numbers[0] / most * BAR + 8, y + 11, f"{ratio} times"))
        y += ROW + 12
    size = f'width="{LABEL + BAR + 90}" height="{y}"'
    style = 'font-family="system-ui, sans-serif" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style} fill="{INK}">\n' + "\n".join(parts) + "\n</svg>\n"


def _text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'


if __name__ == "__main__":
    for picture in (speed, terminal):
        (FOLDER / f"{picture.__name__}.svg").write_text(picture(), encoding="utf-8")
