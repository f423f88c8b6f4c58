"""The test suite itself: the cases that `make test` leaves out, and the promise that a failure names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults_page import PAGE, ROOT, ROW
from selection import spaced

SUITE = """
import pytest

@pytest.mark.sample(2)
@pytest.mark.parametrize("letter", "abcde")
def test_letters(letter): pass

@pytest.mark.extended
def test_at_length(): pass

def test_H12_numbered():
    assert False

def test_described():
    '''Two is one.

    More.'''
    assert False

def test_plain():
    assert False
"""


@pytest.mark.parametrize(
    ("total", "count", "indices"),
    [(5, 1, {0}), (5, 2, {0, 2}), (5, 5, {0, 1, 2, 3, 4}), (3, 7, {0, 1, 2}), (526, 2, {0, 263})],
)
def test_samples_are_evenly_spaced(total: int, count: int, indices: set[int]) -> None:
    assert spaced(total, count) == indices


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose name is that of a room."""
    folder = tmp_path_factory.mktemp("suite") / "wire"
    folder.mkdir()
    (folder / "test_some.py").write_text(SUITE, encoding="utf-8")
    return folder / "test_some.py"


def run(*arguments: str) -> str:
    """Run pytest as `make test` does, on other files. Return its output."""
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "conftest", "-p", "no:cacheprovider"]
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tests/support"), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [*command, "-v", *arguments], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    return result.stdout


def test_a_failure_says_which_promise_it_breaks_and_extended_cases_are_left_out(suite: Path) -> None:
    output = run(str(suite))
    rows = {row[1]: row for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))}
    assert f"H12. Fault: {rows['H12'][2]}. Promise: {rows['H12'][3]}." in output
    assert "\nTwo is one.\n" in output
    assert "\nRoom wire: " in output
    assert output.count("- promise -") == 3
    assert [name in output for name in ("[a]", "[b]", "[c]", "at_length")] == [True, False, True, False]


@pytest.mark.extended
def test_extended_cases_run_when_they_are_asked_for(suite: Path) -> None:
    everything = run("-m", "not slow", str(suite))
    assert "[d] PASSED" in everything
    assert "test_at_length PASSED" in everything
    assert "[d] PASSED" in run(f"{suite}::test_letters[d]")
