"""The playground at /, for browsers and behind a prefix."""

from __future__ import annotations

import asyncio

import pytest

from asgi import call
from fake_embedder import FakeEmbedder
from whimbrel.server.app.app import create_app
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.routing import ModelRegistry

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.mark.parametrize(
    ("playground", "accept", "kind"),
    [
        (True, "text/html,*/*;q=0.8", "text/html; charset=utf-8"),
        (True, "*/*", "application/json"),
        (True, "text/html;q=0, */*", "application/json"),
        (False, "text/html,*/*;q=0.8", "application/json"),
    ],
)
def test_browsers_get_the_page(playground: bool, accept: str, kind: str) -> None:
    app = create_app(ModelRegistry(FakeEmbedder()), guards=ServerLimits(playground=playground))
    answer = asyncio.run(call(app, headers={"accept": accept}))
    assert (answer.status, answer.headers["content-type"]) == (200, kind)


def test_a_prefix_without_its_slash_is_redirected() -> None:
    app = create_app(ModelRegistry(FakeEmbedder()), guards=ServerLimits(root_path="/a/b"))
    answer = asyncio.run(call(app, path="/a/b", headers=BROWSER))
    assert (answer.status, answer.headers["location"]) == (307, "/a/b/")
    for path in ("/a/b/", "/"):  # some proxies pass the prefix on, others take it away
        assert asyncio.run(call(app, path=path, headers=BROWSER)).status == 200
