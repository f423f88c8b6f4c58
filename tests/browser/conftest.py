from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from browsing import Watched, chromium, watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium, while the tests of a file run."""
    with chromium() as browser:
        yield browser


@pytest.fixture
def watch(browser: Browser) -> Iterator[Watched]:
    """An empty page, 1280 px wide. The test fails on errors and policy violations that it does not allow."""
    with watched(browser, viewport={"width": 1280, "height": 900}) as watch:
        yield watch
