"""The pages: docs/faults.md names every test of the catalogue and no other, and links lead somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fault_injection
from faults_page import PAGE, ROOT, ROW, filled, named, names_of_tests, numbers_in

SIZES = {"A": 25, "B": 11, "C": 15, "D": 7, "E": 14, "F": 12, "G": 19, "H": 20, "I": 10, "J": 24, "K": 7}
"""Lines of each section of the catalogue."""

_NOT_YET = re.compile(r"^\| ([A-K]\d+)(?:-[A-K](\d+))? \| [^|]* \| [^|]* \|$", re.MULTILINE)


def lines_of(page: str) -> Iterator[str]:
    """Every number that the page has a row for."""
    for found in ROW.finditer(page):
        yield found[1]
    for first, last in _NOT_YET.findall(page):
        section, start = first[0], int(first[1:])
        for number in range(start, int(last or start) + 1):
            yield f"{section}{number}"


def test_every_test_that_the_page_names_exists() -> None:
    assert set(named(PAGE.read_text(encoding="utf-8"))) <= set(names_of_tests())


def test_every_test_with_a_number_is_in_its_row() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, names_of_tests()) == page, "run: python tests/support/faults_page.py"


def test_a_number_that_the_catalogue_does_not_have_is_a_mistake() -> None:
    rows = {found[1] for found in ROW.finditer(PAGE.read_text(encoding="utf-8"))}
    assert {number for test in names_of_tests() for number in numbers_in(test)} <= rows


def test_the_page_answers_every_line_of_the_catalogue_once() -> None:
    everything = [f"{section}{number}" for section, size in SIZES.items() for number in range(1, size + 1)]
    assert sorted(lines_of(PAGE.read_text(encoding="utf-8"))) == sorted(everything)


LONGEST = {"D4", "E8", "F2", "K4", "K5"}
"""Rows whose tests all take ten seconds or more, and run in `make check` only."""


def test_make_test_all_covers_every_other_row() -> None:
    left_out = {
        node.name
        for file in sorted(ROOT.glob("tests/**/test_*.py"))
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if any(re.search(r"mark\.(extended|slow)$", ast.unparse(each)) for each in node.decorator_list)
    }
    rows = {row[1]: set(named(row[4])) for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))}
    assert {number for number, tests in rows.items() if tests and tests <= left_out} == LONGEST


def test_names_that_are_missing_or_gone_are_found() -> None:
    page = "| A1 | fault | promise | `test_A1_gone`, `test_by_hand` |\n| A2 | fault | promise |  |\n"
    assert filled(page, ["test_A1_new", "test_A1_A2_both", "test_B1_other"]) == (
        "| A1 | fault | promise | `test_A1_new`, `test_A1_A2_both`, `test_by_hand` |\n"
        "| A2 | fault | promise | `test_A1_A2_both` |\n"
    )
    assert filled("| A2 | fault | promise |  |\n", []) == "| A2 | fault | promise | none yet |\n"


def test_the_words_of_the_fault_backend_are_those_that_it_obeys() -> None:
    told = re.findall(r"`@@([\w>:-]+)`", PAGE.read_text(encoding="utf-8"))
    assert [fault_injection.find_words(f"@@{word}") for word in told] == [[word] for word in told]
    inside = re.findall(r"@@([\w>:-]+)", fault_injection.__doc__ or "")
    assert set(inside) == set(told)
    assert f"WHIMBREL_RUNNER={fault_injection.ENVIRONMENT['WHIMBREL_RUNNER']}" in PAGE.read_text(encoding="utf-8")


PAGES = [path for pattern in ("*.md", "docs/**/*.md") for path in sorted(ROOT.glob(pattern))]


def test_decisions_are_numbered_once_and_without_gaps() -> None:
    pages = sorted((ROOT / "docs/adr").glob("*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        assert page.read_text(encoding="utf-8").startswith(f"# {int(page.name[:4])}. "), page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if path.startswith(("http:", "https:", "mailto:")):
            continue
        found = page.parent / path if path else page
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, target


def test_the_changelog_has_one_line_per_change() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 160 or line.startswith(" ")] == []
    assert all(line.endswith(".") for line in lines if line.startswith("- "))
