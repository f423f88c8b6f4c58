"""Comparison with a reference that says which model it verifies. docs/models.md is made from it.

Verify a model so. Write a small random checkpoint in the layout of the real one: its config.json with its quirks, its
modules, its tokenizer's class. Hand the fixture `parity` both results, from float32 on the CPU:

    def test_a_layout_like_bge_base(parity: Parity, tmp_path: Path) -> None:
        write_bert(tmp_path)
        sentence_layout(tmp_path, modes=("cls",))
        expected = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
        with Engine(str(tmp_path), dtype="float32") as engine:
            parity(engine.embed(TEXTS), expected, "BAAI/bge-base-en-v1.5", family="bert", tasks=["dense"])

Then `python tests/support/models_page.py FILE` runs the file's parity tests and writes their rows to
src/whimbrel/models.json and docs/models.md; commit both. Without a path it runs all parity tests, and drops rows that no
test declares any more. Where a merge conflicts in these two files, take either side and run it for the files of the other, or
for all; do not mend them by hand. An ordinary run of a test fails if models.json has other rows for it than it
declares. The differences themselves are not compared, as they vary from machine to machine.

The rules. A model is named only if the checkpoint has its layout; several ids of one layout may be named at once. A
comparison that copies no model names none; then `parity` only compares. A test may call it many times: for each model the
largest difference counts, and the tasks add up. `family` is a row of model/families.py, or one of OTHER_FAMILIES. Of parametrised
tests, each case may name its own models. Results may be arrays, or lists of arrays for things of many lengths (token vectors);
sparse ones are made dense. `verified="weights"` says that the model's own weights were compared. The test checks
beside this that ragged equals alone, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from whimbrel.checkpoint.verified import Output, ParityResult, Verified

TOLERANCE = 1e-4
"""The largest difference that anything may have, relative to the scale of the reference."""
OTHER_FAMILIES = ("static", "fallback")
"""Models that are no transformer of ours."""
WRITTEN: pytest.StashKey[list[ParityResult]] = pytest.StashKey()
"""Key under which models_page.py collects measured results, in place of a check."""


def difference(got: Any, expected: Any) -> float:
    """Largest absolute difference, relative to the largest absolute number of the reference."""
    pairs = list(zip(_arrays(got), _arrays(expected), strict=True))
    assert pairs, "nothing was compared"
    for one, other in pairs:
        assert one.shape == other.shape
        assert np.isfinite(other).all()
    scale = np.max([np.abs(other).max(initial=0.0) for _, other in pairs])
    return float(np.max([np.abs(one - other).max(initial=0.0) for one, other in pairs]) / (scale or 1.0))


def _arrays(value: Any) -> list[np.ndarray]:
    parts = value if isinstance(value, list | tuple) else [value]
    return [np.asarray(part, np.float64) for part in parts]


def rounded_up(value: float) -> float:
    """To one significant digit, so that machines agree: 2.31e-7 is 3e-7."""
    if value == 0:
        return 0.0
    power = math.floor(math.log10(value))
    return float(f"{math.ceil(round(value / 10.0**power, 6))}e{power}")


class Parity:
    """The comparisons of one test. Use the fixture `parity`."""

    def __init__(self, test: str) -> None:
        self.test = test.removeprefix("tests/")
        self._results: dict[str, ParityResult] = {}

    def __call__(
        self,
        got: Any,
        expected: Any,
        *models: str,
        family: str = "",
        tasks: Sequence[Output] = (),
        tolerance: float = 1e-5,
        verified: Verified = "layout",
    ) -> None:
        """Assert that `got` is as near to `expected` as `tolerance` times its largest number; see above for the rest."""
        assert tolerance <= TOLERANCE
        assert not models or (family and tasks), "say the family and the tasks of the models"
        found = difference(got, expected)
        assert found <= tolerance, f"differs by {found:.2g} of the largest number"
        for model in models:
            before = self._results.get(model, ParityResult(model, family, (), self.test, 0.0, verified))
            assert (before.family, before.verified) == (family, verified)
            largest = max(before.difference, rounded_up(found))
            every = tuple(dict.fromkeys((*before.tasks, *tasks)))
            self._results[model] = ParityResult(model, family, every, self.test, largest, verified)

    @property
    def results(self) -> list[ParityResult]:
        return list(self._results.values())

    def check(self, listed: Iterable[ParityResult]) -> None:
        """Fail if the rows that this test has declared are not those `listed` for it."""
        own = {_declared(result) for result in listed if result.test == self.test}
        found = {_declared(result) for result in self.results}
        where = f"tests/{self.test.partition('::')[0]}"
        assert found == own, (
            f"models.json has {own or 'nothing'} of this test; run: python tests/support/models_page.py {where}"
        )


def _declared(result: ParityResult) -> tuple[str, str, tuple[str, ...], Verified]:
    return result.model, result.family, result.tasks, result.verified
