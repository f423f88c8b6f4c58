"""Selection of the tests that `make test` runs.

Three markers say which tests are left to other commands:

- `extended`: a test that repeats a point with other inputs, or at length. `make test-all` runs it.
- `sample(n)`: of a test's cases, n evenly spaced ones, the first among them, run everywhere. The others are extended.
- `slow`: a test of `make soak` only.

A case that the command line names by its id is never extended, so `pytest FILE::TEST[CASE]` runs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest


def mark_extended_cases(items: Sequence[pytest.Item], arguments: Sequence[str]) -> None:
    """Mark as extended the cases that the samples of their tests leave out."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for same in cases.values():
        marker = same[0].get_closest_marker("sample")
        for index in range(len(same)) if marker else ():
            if index not in spaced(len(same), *marker.args) and not _is_named(same[index], arguments):  # pyright: ignore
                same[index].add_marker(pytest.mark.extended)


def spaced(total: int, count: int) -> set[int]:
    """Return `count` evenly spaced indices below `total`, or all of them; 0 is always one."""
    return set(range(total)) if total <= count else {index * total // count for index in range(count)}


def _is_named(item: pytest.Item, arguments: Sequence[str]) -> bool:
    return any(argument.endswith(item.nodeid) for argument in arguments if "[" in argument)
