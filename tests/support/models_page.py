"""Writes src/whimbrel/models.json and docs/models.md: `python tests/support/models_page.py [TEST FILE...]`.

Runs the parity tests, in the files given or in all, and takes what they declare and measure. Rows of tests that were not run
stay, if some files were given. Nothing is written if a test fails. `parity` says how a test declares a row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from parity import TOLERANCE, WRITTEN
from whimbrel.checkpoint.verified import FILE, ParityResult, Row, format_difference, read_results, rows

ROOT = Path(__file__).parents[2]
DATA = ROOT / "src/whimbrel" / FILE
PAGE = ROOT / "docs/models.md"

_INTRODUCTION = f"""\
# Verified models

A model is *layout-verified* if a test copies its checkpoint layout: a small random checkpoint is written to disk with the real model's
files, names and quirks, and what Whimbrel computes from it is compared with transformers, Sentence Transformers or the
formula that the model's authors have published, in float32 on a CPU. The difference is the largest one seen, divided by the
largest number of the reference, one digit, rounded up; beyond {format_difference(TOLERANCE)} at the latest a test fails. A model is
*weights-verified* if a test compares its own weights. `whimbrel verify MODEL` compares one output of most models
on your machine, with their own weights, and says which it cannot compare.

Other models of these families are served too: `whimbrel show MODEL` says what it understands of a checkpoint, and refuses
what it does not. `whimbrel models` prints this table without the tests. It is written by `python tests/support/models_page.py`.

"""
_HEAD = ("model", "family", "tasks", "verified", "parity test", "largest difference")


def page(table: Iterable[Row]) -> str:
    """docs/models.md."""
    cells = [
        (
            row.model,
            row.family,
            ", ".join(row.tasks),
            row.verified,
            ", ".join(f"`{test}`" for test in row.tests),
            format_difference(row.difference),
        )
        for row in table
    ]
    lines = [_HEAD, ("---",) * len(_HEAD), *cells]
    return _INTRODUCTION + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def data(results: Iterable[ParityResult]) -> bytes:
    """models.json: a result on each line, so that changes are seen and merged line by line."""
    ordered = sorted(results, key=lambda result: (result.family, result.model.lower(), result.test))
    return b"[\n" + b",\n".join(b"  " + msgspec.json.encode(result) for result in ordered) + b"\n]\n"


def steady(result: ParityResult, before: float | None) -> ParityResult:
    """The largest difference that was seen, unless it has become much less: each run differs a little."""
    if before is not None and result.difference < before <= 3 * result.difference:
        return replace(result, difference=before)
    return result


class _Collector:
    """Keeps parity tests only, and what they find."""

    def __init__(self) -> None:
        self.results: list[ParityResult] = []
        self.files: set[str] = set()

    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[WRITTEN] = self.results

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.files = {item.nodeid.partition("::")[0].removeprefix("tests/") for item in items}
        items[:] = [item for item in items if "parity" in getattr(item, "fixturenames", ())]


def main(paths: list[str]) -> int:
    collector = _Collector()
    code = pytest.main(
        [*(paths or ["tests"]), "-q", "-m", "not slow and not pictures", f"--rootdir={ROOT}"], plugins=[collector]
    )
    if code != pytest.ExitCode.OK:
        return int(code)
    before = read_results()
    old = {(result.model, result.test): result.difference for result in before}
    kept = [result for result in before if paths and result.test.partition("::")[0] not in collector.files]
    results = [*kept, *(steady(result, old.get((result.model, result.test))) for result in collector.results)]
    DATA.write_bytes(data(results))
    PAGE.write_text(page(rows(results)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main([str(Path(path).resolve()) for path in sys.argv[1:]]))
