"""Promises behind tests: text for the report of a test that fails.

A test whose name bears a number of docs/faults.md (`test_H12_...`) holds that row's promise. Any other test holds the first line
of its docstring, or else the purpose of its room.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from faults_page import PAGE, ROOT, ROW, numbers_in


def promise_of(item: pytest.Item) -> str:
    """Return the promise that a test holds, for people who read that it failed."""
    rows = [f"{number}. Fault: {_rows()[number][0]}. Promise: {_rows()[number][1]}." for number in numbers_in(item.name)]
    function = getattr(item, "function", None)
    docstring = (getattr(function, "__doc__", None) or "").strip()
    return "\n".join(rows) or docstring.partition("\n")[0] or _purpose(item.path)


@cache
def _rows() -> dict[str, tuple[str, str]]:
    return {row[1]: (row[2], row[3]) for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))}


def _purpose(file: Path) -> str:
    """Return the first line of the room's docstring, or the test file's own."""
    room = file.parent.name
    package = ROOT / "src/whimbrel" / room / "__init__.py"
    source = package if package.exists() else file
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return f"Room {room}: {docstring.partition(chr(10))[0]}"
