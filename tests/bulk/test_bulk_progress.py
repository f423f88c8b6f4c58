"""Progress of bulk runs: a bar on a terminal, lines elsewhere, with rows, tokens and the time left."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from whimbrel.bulk.job import Totals
from whimbrel.cli import run_progress
from whimbrel.cli.run_progress import RunProgress


def said(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> str:
    monkeypatch.setattr(run_progress, "_LINE_SECONDS", 0.0)
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=is_terminal, width=120, highlight=False, soft_wrap=True)
    totals = Totals(shards=4, rows=400)
    totals.shards_done, totals.rows_before, totals.done = 1, 100, 98
    with RunProgress(console, totals) as progress:
        progress.start(totals)
        progress.advance(50.5, 1000)
        progress.advance(49.5, 1000)
        assert progress.parts() == "1 of 4 parts, 98 rows"
        totals.refused = 2
        progress.finish(Path("out"))
    return stream.getvalue()


def test_lines_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = said(monkeypatch, is_terminal=False).splitlines()
    assert lines[0] == "  400 rows in 4 parts, of which 1 finished before"
    assert re.fullmatch(r"  150 of 400 rows, [\d,]+ rows/s, [\d,]+ tokens/s, \d+ s left", lines[1])
    assert re.fullmatch(r"  200 of 400 rows, [\d,]+ rows/s, [\d,]+ tokens/s, \d+ s left", lines[2])
    assert re.fullmatch(r"98 rows done, 0 cut, 2 refused \(out/errors\), in 0\.\d s: out", lines[3])
    assert len(lines) == 4


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = said(monkeypatch, is_terminal=True)
    assert "━" in text
    assert "rows/s" in text
    assert "98 rows done, 0 cut, 2 refused" in text


def test_a_log_that_cannot_be_written_ends_no_run() -> None:
    """Lines to a full disk are lost, and the run goes on."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    totals = Totals(rows=10)
    with RunProgress(Console(file=Full()), totals) as progress:
        progress.tell("hello")
        progress.start(totals)
        progress.advance(5, 10)
        progress.finish(Path("out"))


@pytest.mark.parametrize(("seconds", "words"), [(0.2, "0 s"), (59.6, "1 min 00 s"), (61, "1 min 01 s"), (7322, "2 h 02 min")])
def test_durations(seconds: float, words: str) -> None:
    assert run_progress._duration(seconds) == words
