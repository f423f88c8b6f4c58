"""The watch on pages notices what it should."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from browsing import Watched, watched
from serving import Server


def test_a_page_without_faults(watch: Watched, server: Server) -> None:
    assert watch.open(server.url).title() == "Whimbrel playground"
    expect(watch.page.locator("td[data-cosine]").first).to_be_visible()


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("console.error('a fault')", "error: a fault"),
        ("setTimeout(() => { throw new Error('a fault') })", "exception: a fault"),
        ("document.body.innerHTML = '<b>bold</b>'", "require-trusted-types-for"),
        ("document.body.append(Object.assign(document.createElement('script'), {src: 'https://a.example/b.js'}))", "trusted"),
        ("document.body.setAttribute('style', 'color: red')", "style-src"),
        ("fetch('http://127.0.0.1:9/')", "connect-src"),
    ],
)
def test_every_fault_fails(browser: Browser, server: Server, script: str, fault: str) -> None:
    with pytest.raises(AssertionError, match=fault):
        _run(browser, server.url, script)


def _run(browser: Browser, url: str, script: str) -> None:
    with watched(browser) as watch:
        page = watch.open(url)
        page.evaluate(f"() => {{ try {{ {script} }} catch {{}} }}")
        page.wait_for_timeout(100)
