from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from browsing import Watched, chromium, watched
from checkpoints import fitted
from serving import Server

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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of MiniLM and of a model for each tab, by the names of their kinds."""
    folder = tmp_path_factory.mktemp("taught")
    for kind, write in fitted.KINDS.items():
        write(folder / kind)
    models = ["sentence-transformers/all-MiniLM-L6-v2", *(str(folder / kind) for kind in fitted.KINDS)]
    names = [word for name in ("all-MiniLM-L6-v2", *fitted.KINDS) for word in ("--served-name", name)]
    with Server(*models, *names, "--dtype", "float32") as server:
        yield server
    shutil.rmtree(folder)  # half a gigabyte
