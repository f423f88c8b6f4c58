"""The test suite itself: its imports, the cases that `make test` leaves out, and the promise that a failure names."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from faults_page import PAGE, ROOT, ROW
from selection import TESTS, WIDE, mark_wide_files, spaced

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

HEEDS = """
import signal

def test_signals():
    names = [signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD]
    assert signal.SIG_IGN not in [signal.getsignal(name) for name in names]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""


@pytest.mark.parametrize(
    ("total", "count", "indices"), [(5, 1, {0}), (5, 2, {0, 2}), (5, 5, {0, 1, 2, 3, 4}), (3, 7, {0, 1, 2}), (526, 2, {0, 263})]
)
def test_samples_are_evenly_spaced(total: int, count: int, indices: set[int]) -> None:
    assert spaced(total, count) == indices


def test_every_row_of_the_wide_files_is_a_file_or_a_folder() -> None:
    assert [name for name in WIDE if not (TESTS / name).exists()] == []


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose name is that of a room."""
    folder = tmp_path_factory.mktemp("suite") / "wire"
    folder.mkdir()
    (folder / "test_some.py").write_text(SUITE, encoding="utf-8")
    return folder / "test_some.py"


def imported(code: str) -> list[str]:
    """Return the dotted names that Python code imports, those of functions among them."""
    names: list[str] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module or ''}.{alias.name}" for alias in node.names]
    return names


def imports_of_tests(code: str) -> list[str]:
    """Return the imported names that are those of a test file or a conftest."""
    return [name for name in imported(code) if re.search(r"(^|\.)(test_|conftest\b)", name)]


def test_no_test_imports_a_test() -> None:
    """Code that several test files need stands in tests/support."""
    files = {file: file.read_text(encoding="utf-8") for file in sorted((ROOT / "tests").rglob("*.py"))}
    found = {str(file.relative_to(ROOT)): names for file, code in files.items() if (names := imports_of_tests(code))}
    assert found == {}
    lines = ["import test_a", "from test_a import b", "from model import test_a", "def f():\n    import conftest as c"]
    assert [len(imports_of_tests(line)) for line in lines] == [1] * len(lines)
    assert imports_of_tests("import pytest, latest_news\nfrom whimbrel import Engine") == []


def test_the_map_lists_every_module_of_support_once() -> None:
    """A folder of modules with one row is listed by its name."""
    support = ROOT / "tests/support"
    listed = re.findall(r"^\| `([\w/]+)` \|", (support / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    files = [file.relative_to(support).with_suffix("") for file in support.rglob("*.py") if file.stem != "__init__"]
    assert sorted(listed) == sorted({next((p for p in map(str, file.parents) if p in listed), str(file)) for file in files})


def deafen() -> None:
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(name, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP, signal.SIGTERM})


def run(*arguments: str, preexec_fn: Callable[[], object] | None = None) -> str:
    """Run pytest as `make test` does, on other files. Return its output."""
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "conftest", "-p", "no:cacheprovider"]
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tests/support"), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [*command, "-v", *arguments],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=preexec_fn,
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


@pytest.mark.parametrize("processes", ["1", pytest.param("0", marks=pytest.mark.extended)])
def test_signals_that_the_parent_ignores_reach_the_tests(processes: str, tmp_path: Path) -> None:
    """The suite is the same under nohup, in the background of a shell, and below a parent that blocks signals."""
    (tmp_path / "test_heeds.py").write_text(HEEDS, encoding="utf-8")
    output = run("-n", processes, str(tmp_path), preexec_fn=deafen)
    assert "1 passed" in output


@pytest.mark.parametrize(
    ("named", "is_wide"),
    [
        ("", True),
        ("tests", True),
        ("tests/outputs", True),
        ("tests/deploy", False),
        ("tests/deploy/test_prometheus.py::test_x[a/b]", False),
    ],
)
def test_files_that_take_long_are_wide_unless_they_are_named(
    named: str, is_wide: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(ROOT)
    item = pytest.Module.from_parent(request.session, path=TESTS / "deploy/test_prometheus.py")
    mark_wide_files([item], [named] if named else [])  # pyright: ignore[reportArgumentType]
    assert (item.get_closest_marker("wide") is not None) == is_wide


@pytest.mark.extended
def test_extended_cases_run_when_they_are_asked_for(suite: Path) -> None:
    everything = run("-m", "not slow", str(suite))
    assert "[d] PASSED" in everything
    assert "test_at_length PASSED" in everything
    assert "[d] PASSED" in run(f"{suite}::test_letters[d]")
