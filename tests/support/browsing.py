"""A headless Chromium whose pages are watched for errors and violations of their policy.

Playwright drives it. Browsers that it would download are not used, only one that the machine has.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
TIMEOUT_MS = 30_000
WATCH = """
addEventListener("securitypolicyviolation", (event) => console.error(
  `policy violation: ${event.effectiveDirective} of ${event.blockedURI} at ${event.sourceFile}:${event.lineNumber} ${event.sample}`
));
"""


def chromium_path() -> str | None:
    """Return the path of the machine's Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run a headless Chromium. Skips the test where none is installed.

    While it runs, its thread has a running event loop, so tests beside it cannot call asyncio.run.
    """
    path = chromium_path()
    if path is None:
        pytest.skip(f"no Chromium: none of {', '.join(NAMES)} is on the PATH")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=TIMEOUT_MS)

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS, headless=True)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """A page, and everything wrong that happens on it."""

    page: Page
    faults: list[str] = field(default_factory=list)
    """Console errors and warnings, uncaught exceptions, and violations of the policy."""
    _allowed: list[str] = field(default_factory=list)

    def open(self, url: str) -> Page:
        """Load a page and return it."""
        self.page.goto(url)
        return self.page

    def allow(self, *patterns: str) -> None:
        """Expect faults that match one of these regular expressions, such as the browser's own line about a 401."""
        self._allowed += patterns

    def unexpected(self) -> list[str]:
        """Return the faults that no pattern allows."""
        return [fault for fault in self.faults if not any(re.search(pattern, fault) for pattern in self._allowed)]


@contextmanager
def watched(browser: Browser, **context: Any) -> Iterator[Watched]:
    """Open an empty page in a context of its own; at the end, fail on every fault that was not allowed.

    `context` are the options of Playwright's `new_context`, such as viewport and color_scheme.
    """
    with browser.new_context(**context) as session:
        session.set_default_timeout(TIMEOUT_MS)
        session.add_init_script(WATCH)
        page = session.new_page()
        watch = Watched(page)
        page.on("console", lambda line: line.type in ("error", "warning") and watch.faults.append(f"{line.type}: {line.text}"))
        page.on("pageerror", lambda error: watch.faults.append(f"exception: {error}"))
        yield watch
        if faults := watch.unexpected():
            raise AssertionError("\n".join(["faults of the page:", *faults]))
