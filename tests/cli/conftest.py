"""The `whimbrel` command in the test's own process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from command import Here
from whimbrel.telemetry import metrics


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    yield Here(monkeypatch)
    assert metrics.DIRECTORY not in os.environ, "a supervisor ran in this process: its metrics are in files from now on"
