"""Table of verified models.

models.json lists each model that the parity tests verify, with the largest difference. `python
tests/support/models_page.py` generates it from the tests. Other models are served too if their card can be read.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from typing import Final, Literal, TypeAlias, get_args

import msgspec

Output: TypeAlias = Literal["dense", "sparse", "multi_vector", "scores", "token_scores"]
"""Kind of output that a test compares, as in the column "tasks"."""
Verified: TypeAlias = Literal["layout", "weights"]
"""Extent of a comparison: random weights in the model's layout, or the model's own weights."""
OUTPUTS: Final[tuple[Output, ...]] = get_args(Output)
FILE: Final = "models.json"


@dataclass(frozen=True, slots=True)
class ParityResult:
    model: str
    """Hub id of the model whose layout the test's checkpoint has."""
    family: str
    """Family of the weights' names: a row of `model/families.py`, or a name for another way to run the model."""
    tasks: tuple[Output, ...]
    test: str
    """Id in pytest, without "tests/"."""
    difference: float
    """Largest difference from the reference, divided by the largest number in it; one digit, rounded up."""
    verified: Verified = "layout"


@dataclass(frozen=True, slots=True)
class Row:
    """All results of one model."""

    model: str
    family: str
    tasks: tuple[Output, ...]
    tests: tuple[str, ...]
    difference: float
    verified: Verified
    """"weights" if a test compares the model's own weights."""


def read_results() -> list[ParityResult]:
    return msgspec.json.decode(files("whimbrel").joinpath(FILE).read_bytes(), type=list[ParityResult])


def rows(results: Iterable[ParityResult]) -> list[Row]:
    """Return one row per model, sorted by family. Raises ValueError if a model has two families."""

    def key(result: ParityResult) -> tuple[str, str]:
        return result.family, result.model.lower()

    def row(group: list[ParityResult]) -> Row:
        return Row(
            model=group[0].model,
            family=group[0].family,
            tasks=tuple(task for task in OUTPUTS if any(task in result.tasks for result in group)),
            tests=tuple(sorted({result.test for result in group})),
            difference=max(result.difference for result in group),
            verified="weights" if any(result.verified == "weights" for result in group) else "layout",
        )

    table = [row(list(group)) for _, group in groupby(sorted(results, key=key), key)]
    if len({row.model for row in table}) < len(table):
        raise ValueError("a model has two families.")
    return table


def format_difference(difference: float) -> str:
    """Format a difference in the fewest characters, such as 3e-7."""
    return f"{difference:.0e}".replace("e-0", "e-") if difference else "0"
