"""The document /openapi.json: every status that a route answers with, the type of its body, and every method of a path."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from asgi import call
from whimbrel.dialects import ROUTES, Route
from whimbrel.dialects.common.bodies import MalformedBody
from whimbrel.errors import (
    BodyTimeout,
    ComputeError,
    DeadlineExceeded,
    Forbidden,
    HeadersTooLarge,
    InvalidRequest,
    MalformedHTTP,
    ModelNotFound,
    NonFinite,
    OutOfMemory,
    Overloaded,
    TooLarge,
    TooLong,
    Unauthorized,
    Unavailable,
    UnsupportedMediaType,
    WhimbrelError,
)
from whimbrel.server.app.app import create_app
from whimbrel.server.app.batch_routes import BATCH_METHODS
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.openapi import openapi_document
from whimbrel.server.app.routing import ModelRegistry

PROVOKED = [
    InvalidRequest("x", param="input"), InvalidRequest("x", param="outputs"), MalformedBody("x"), MalformedHTTP("x"), TooLong("x"),
    TooLarge("x"), TooLarge("x", param="input"), UnsupportedMediaType("x"), HeadersTooLarge("x"), ModelNotFound("x"),
    BodyTimeout("x"), Unauthorized("x"), Forbidden("x"), Overloaded("x", retry_after=1), Unavailable("x"),
    DeadlineExceeded("x"), ComputeError("x"), NonFinite("x"), OutOfMemory("x"), WhimbrelError("x"),
]  # fmt: skip
"""The errors that the fault tests provoke."""
DOCUMENT = openapi_document()


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.path}-{route.request_type.__name__}")
def test_every_status_is_listed_with_the_type_of_its_body(route: Route) -> None:
    responses = DOCUMENT["paths"][route.path]["post"]["responses"]
    for error in PROVOKED:
        answer = responses[str(route.status(error))]
        if body := route.render_error(error):
            msgspec.json.decode(body, type=route.error_type)
            assert f"/{route.error_type.__name__}" in str(answer["content"]["application/json"]["schema"])


def test_every_method_of_every_path_is_listed() -> None:
    taken = create_app(ModelRegistry(num_models=1)).methods
    served = {(path, method.lower()) for path, methods in taken.items() for method in methods}
    listed = {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assets = {each for each in served if each[0].startswith("/assets/")}  # files of the pages, which are no API
    assert {each for each in served - assets if each[1] != "head"} == listed


def test_a_server_with_batches_lists_their_routes_too(tmp_path: Path) -> None:
    app = create_app(ModelRegistry(num_models=1), guards=ServerLimits(batch_dir=str(tmp_path)))
    document = msgspec.json.decode(asyncio.run(call(app, "GET", "/openapi.json")).body)
    served = {(path, method.lower()) for path in BATCH_METHODS for method in app.methods[path]}
    assert served == {
        (path, method) for path in document["paths"].keys() - DOCUMENT["paths"].keys() for method in document["paths"][path]
    }
    named = {text.split("'")[0] for text in str(document).split("#/components/schemas/")[1:]}
    assert named <= document["components"]["schemas"].keys()


def test_every_type_that_is_named_is_there() -> None:
    named = {text.split("'")[0] for text in str(DOCUMENT).split("#/components/schemas/")[1:]}
    assert named <= DOCUMENT["components"]["schemas"].keys()
    assert "'x-" not in str(DOCUMENT)
