"""models.json, docs/models.md and what the parity tests declare are of one mind, and `whimbrel models` prints it."""

from __future__ import annotations

from typing import get_args

import msgspec
import numpy as np
import pytest

from models_page import DATA, PAGE, data, page, steady
from parity import OTHER_FAMILIES, TOLERANCE, Parity, difference, rounded_up
from whimbrel.checkpoint.verified import OUTPUTS, ParityResult, read_results, rows
from whimbrel.model.families import FAMILIES
from whimbrel.types.request import OutputName

RESULTS = read_results()


def test_the_files_are_as_the_generator_writes_them() -> None:
    assert data(RESULTS) == DATA.read_bytes(), "run: python tests/support/models_page.py"
    assert page(rows(RESULTS)) == PAGE.read_text(encoding="utf-8"), "run: python tests/support/models_page.py"


def test_tasks_are_what_a_model_may_give() -> None:
    assert (*OUTPUTS, "hidden", "token_dense") == get_args(OutputName)  # these two any model with dense vectors gives


def test_every_row_is_of_a_family_and_near_enough() -> None:
    for result in RESULTS:
        assert result.family in (*FAMILIES, *OTHER_FAMILIES)
        assert result.model.count("/") == 1
        assert 0 <= result.difference <= TOLERANCE
        assert rounded_up(result.difference) == result.difference
    assert len({(result.model, result.test) for result in RESULTS}) == len(RESULTS)


class _Collector:
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.found = {item.nodeid.removeprefix("tests/") for item in session.items if "parity" in item.fixturenames}  # pyright: ignore


def test_every_row_s_test_exists_and_compares(pytestconfig: pytest.Config) -> None:
    """Each test checks, whenever it runs, that it declares just these rows."""
    collector = _Collector()
    files = sorted({f"{pytestconfig.rootpath}/tests/{result.test.partition('::')[0]}" for result in RESULTS})
    options = ["--collect-only", "-m", "not slow", "-qq", "-s", "-p", "no:cacheprovider", f"--rootdir={pytestconfig.rootpath}"]
    assert pytest.main([*files, *options], plugins=[collector]) == pytest.ExitCode.OK
    assert {result.test for result in RESULTS} <= collector.found
    assert all("tests/" not in result.test for result in RESULTS)


def test_a_row_adds_up_what_its_tests_verify() -> None:
    results = [
        ParityResult("b/B", "bert", ("sparse",), "test_b.py::test_2", 2e-6),
        ParityResult("a/C", "llama", ("dense",), "test_a.py::test_1", 0.0),
        ParityResult("b/B", "bert", ("dense",), "test_a.py::test_1", 3e-7),
        ParityResult("a/a", "bert", ("dense",), "test_a.py::test_1", 3e-7),
    ]
    table = rows(results)
    assert [row.model for row in table] == ["a/a", "b/B", "a/C"]
    assert (table[1].tasks, table[1].difference) == (("dense", "sparse"), 2e-6)
    assert table[1].tests == ("test_a.py::test_1", "test_b.py::test_2")
    assert {row.verified for row in table} == {"layout"}
    real = ParityResult("a/C", "llama", ("dense",), "test_d.py::test_1", 0.0, "weights")
    assert [row.verified for row in rows([*results, real])] == ["layout", "layout", "weights"]
    assert rows(msgspec.json.decode(data(results), type=list[ParityResult])) == table
    with pytest.raises(ValueError, match="two families"):
        rows([*results, ParityResult("b/B", "llama", ("dense",), "test_c.py::test_3", 0.0)])


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0, 0.0), (2.31e-7, 3e-7), (3e-7, 3e-7), (9.2e-7, 1e-6), (1e-5, 1e-5), (1.0000001e-5, 1e-5)]
)
def test_differences_are_rounded_up(value: float, expected: float) -> None:
    assert rounded_up(value) == expected


@pytest.mark.parametrize(
    ("before", "now", "kept"),
    [(None, 3e-7, 3e-7), (5e-7, 3e-7, 5e-7), (5e-7, 6e-7, 6e-7), (5e-6, 3e-7, 3e-7), (1e-7, 0.0, 0.0)],
)
def test_a_difference_that_wavers_is_left(before: float | None, now: float, kept: float) -> None:
    assert steady(ParityResult("a/b", "bert", ("dense",), "test_a.py::test_1", now), before).difference == kept


def test_a_difference_is_relative_to_the_largest_number() -> None:
    assert difference([1.0, 4.5], [1.0, 5.0]) == pytest.approx(0.1)
    assert difference([np.zeros((2, 3)), np.ones(3)], [np.zeros((2, 3)), np.full(3, 2.0)]) == 0.5
    assert difference(np.full(2, 0.5), np.zeros(2)) == 0.5
    for wrong in ([np.ones(3)], np.ones((1, 3)), [np.ones(2)] * 2, []):
        with pytest.raises((AssertionError, ValueError)):
            difference(wrong, [np.ones(2)])
    with pytest.raises(AssertionError):
        difference(np.ones(2), np.array([1.0, np.nan]))
    assert np.isnan(difference(np.array([1.0, np.nan]), np.ones(2)))


def test_what_a_test_declares_is_checked() -> None:
    parity = Parity("tests/test_x.py::test_y")
    with pytest.raises(AssertionError):
        parity(np.ones(2), np.zeros(2), "a/b", family="bert", tasks=["dense"])
    with pytest.raises(AssertionError):
        parity(np.full(2, np.nan), np.zeros(2))
    with pytest.raises(AssertionError, match="say the family"):
        parity(np.ones(2), np.ones(2), "a/b")
    parity.check([])
    parity(np.array([1.0, 2.000001]), np.array([1.0, 2.0]), "a/b", "a/c", family="bert", tasks=["dense"])
    parity(np.ones(2), np.ones(2), "a/b", family="bert", tasks=["sparse"])
    parity(np.ones(2), np.ones(2))
    expected = [
        ParityResult("a/b", "bert", ("dense", "sparse"), "test_x.py::test_y", 5e-7),
        ParityResult("a/c", "bert", ("dense",), "test_x.py::test_y", 5e-7),
    ]
    assert parity.results == expected
    parity.check([*expected, ParityResult("a/d", "bert", ("dense",), "test_x.py::test_other", 0.0)])
    for listed in ([], expected[:1], [*expected, ParityResult("a/d", "bert", ("dense",), "test_x.py::test_y", 0.0)]):
        with pytest.raises(AssertionError, match=r"run: python tests/support/models_page\.py tests/test_x\.py"):
            parity.check(listed)
