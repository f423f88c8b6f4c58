"""The table of docs/faults.md: which tests hold which promise.

`python tests/support/faults_page.py` fills in the last column; tests/house/test_docs.py checks it.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/faults.md"
ROW = re.compile(r"^\| ([A-K]\d+) \| ([^|]*) \| ([^|]*) \| ?([^|]*?) \|$", re.MULTILINE)
"""A row of the page: number, fault, promise, tests."""


NONE_YET = "none yet"


def numbers_in(test: str) -> list[str]:
    """Return the numbers of the catalogue that a test's name begins with: two of test_D1_D5_x."""
    match = re.match(r"test_((?:[A-K]\d+_)+)", test)
    return match[1].strip("_").split("_") if match else []


@cache
def names_of_tests() -> list[str]:
    """Return the names of all tests, in the order of their files."""
    return [
        node.name
        for file in sorted(ROOT.glob("tests/**/test_*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]


def named(text: str) -> list[str]:
    """Return the tests that a cell of the page names."""
    return re.findall(r"`(test_\w+)`", text)


def filled(page: str, known: list[str]) -> str:
    """Return the page with the tests of each line: those that bear its number, and those that somebody named without any."""

    def row(match: re.Match[str]) -> str:
        number, fault, promise, cell = match.groups()
        own = [test for test in dict.fromkeys(known) if number in numbers_in(test)]
        others = [test for test in named(cell) if not numbers_in(test)]
        cell = ", ".join(f"`{test}`" for test in [*own, *others]) or NONE_YET
        return f"| {number} | {fault} | {promise} | {cell} |"

    return ROW.sub(row, page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), names_of_tests()), encoding="utf-8")
