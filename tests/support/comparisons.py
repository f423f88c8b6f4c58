"""Comparisons of results: the same bits, or close within a tolerance."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from whimbrel.types.request import OutputName
from whimbrel.types.result import Outputs


def assert_close(found: list[Any], expected: list[NDArray[np.float32]], tolerance: float = 1e-5) -> None:
    scale = max(1.0, *(float(np.abs(row).max()) for row in expected))
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= tolerance * scale


def assert_same_outputs(one: Outputs, other: Outputs, names: tuple[OutputName, ...]) -> None:
    """Assert that these outputs have the same bits."""
    for name in names:
        a: Any = getattr(one, name)
        b: Any = getattr(other, name)
        if name == "dense":
            assert np.array_equal(a, b)
            continue
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert all(np.array_equal(x, y) for x, y in zip(left, right, strict=True))


def assert_close_vectors(got: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """Assert that each text has as many vectors as expected, and close ones."""
    assert [one.shape for one in got] == [other.shape for other in wanted]
    scale = max(np.abs(other).max(initial=0.0) for other in wanted)
    assert max(np.abs(one - other).max(initial=0.0) for one, other in zip(got, wanted, strict=True)) <= tolerance * scale


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the norm of the difference over the norm."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
