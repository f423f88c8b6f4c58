"""Models whose layouts the parity tests prove, and how near the numbers came: models.json, as rows.

The file is written by `python tests/models_page.py` out of what the tests declare and measure; nobody edits it. Knows nothing
of checkpoints: a model that is not listed is served all the same if its card can be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from typing import Final, Literal, TypeAlias, get_args

import msgspec

Output: TypeAlias = Literal["dense", "sparse", "multi_vector", "scores", "token_scores"]
"""What a test compares, as the column "tasks" names it."""
OUTPUTS: Final[tuple[Output, ...]] = get_args(Output)
FILE: Final = "models.json"


@dataclass(frozen=True, slots=True)
class ParityResult:
    """One test about one model."""

    model: str
    """The hub id of the model whose layout the test's checkpoint has."""
    family: str
    """Whose names the weights have: a row of models/families.py, or what stands for other ways to run it."""
    tasks: tuple[Output, ...]
    test: str
    """pytest's id, without "tests/"."""
    max_difference: float
    """The largest difference from the reference, divided by the largest number in it; one digit, rounded up."""


@dataclass(frozen=True, slots=True)
class Row:
    """All that is proven about one model."""

    model: str
    family: str
    tasks: tuple[Output, ...]
    tests: tuple[str, ...]
    difference: float


def read_results() -> list[ParityResult]:
    """What models.json holds, in its order."""
    return msgspec.json.decode(files("whimbrel").joinpath(FILE).read_bytes(), type=list[ParityResult])


def rows(proofs: Iterable[ParityResult]) -> list[Row]:
    """One row per model, families together. Raises ValueError for a model of two families."""

    def key(proof: ParityResult) -> tuple[str, str]:
        return proof.family, proof.model.lower()

    table = [_row(list(group)) for _, group in groupby(sorted(proofs, key=key), key)]
    if len({row.model for row in table}) < len(table):
        raise ValueError("a model has two families.")
    return table


def format_difference(difference: float) -> str:
    """In the fewest characters: 3e-7."""
    return f"{difference:.0e}".replace("e-0", "e-") if difference else "0"


def _row(proofs: list[ParityResult]) -> Row:
    stated = {task for proof in proofs for task in proof.tasks}
    return Row(
        model=proofs[0].model,
        family=proofs[0].family,
        tasks=tuple(task for task in OUTPUTS if task in stated),
        tests=tuple(sorted({proof.test for proof in proofs})),
        difference=max(proof.max_difference for proof in proofs),
    )
