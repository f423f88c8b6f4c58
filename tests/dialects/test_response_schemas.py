"""Responses of every POST route, read back as the type that /openapi.json gives them: they lack no field, and have no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import orjson
import pytest
import torch

from asgi import call
from checkpoints.bge_m3 import write_m3
from checkpoints.classifiers import write_classifier, write_nli
from exchanges import GOLDEN, WRITE
from whimbrel import AsyncEngine, Engine
from whimbrel.dialects import ROUTES, Route
from whimbrel.server.app.app import create_app
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.routing import ROUTES_BY_PATH, ModelRegistry
from whimbrel.server.budgets import Budgets
from whimbrel.server.keys import ApiKey, digest_of

WRITERS = WRITE | {
    "m3": write_m3,
    "tagger": partial(write_classifier, family="bert", form="ForTokenClassification", num_labels=3),
    "nli": write_nli,
}


def golden_bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """The bodies that clients sent, of every dialect."""
    for file in sorted(GOLDEN.glob("*/*.json")):
        exchanges = orjson.loads(file.read_bytes())
        for each in exchanges if isinstance(exchanges, list) else [exchanges]:
            if each.get("status") == 200 and each["request"] is not None and each["path"] in ROUTES_BY_PATH:
                yield each["path"], each["request"]


def with_small_ids(body: dict[str, Any]) -> dict[str, Any]:
    """The body with token ids that the small models' vocabularies have."""
    return body | {name: [1, 2, 3] for name in ("ids", "tokens") if name in body}


CASES = [*((route.path, orjson.loads(route.example)) for route in ROUTES), *golden_bodies()]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    root = tmp_path_factory.mktemp("models")
    with ExitStack() as stack:
        engines: list[Any] = []
        for name, write in WRITERS.items():
            torch.manual_seed(7)
            write(root / name)
            engine = Engine(str(root / name), dtype="float32", matryoshka=True, served_name=name)
            engines.append(AsyncEngine(stack.enter_context(engine)))
        yield engines


@pytest.fixture(scope="module")
def app(engines: list[Any]) -> Any:
    return create_app(ModelRegistry(*engines))


@pytest.mark.parametrize(("path", "body"), CASES, ids=[f"{path}-{number}" for number, (path, _) in enumerate(CASES)])
def test_responses_are_of_the_type_that_is_documented(path: str, body: dict[str, Any], app: Any) -> None:
    responses = [
        response for name in WRITERS if (response := ask(app, path, with_small_ids(body) | {"model": name})) is not None
    ]
    assert responses
    for route, response in responses:
        typed = msgspec.json.decode(response, type=route.response_type)
        assert fields_of(orjson.loads(response)) <= fields_of(msgspec.to_builtins(typed))


FREE = {"/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/decode", "/api/show", "/api/pull"}
"""Routes that compute no tokens."""


@pytest.fixture(scope="module")
def almost_used_up(engines: list[Any]) -> Any:
    """An app whose key has one token left of a thousand, at a clock that stands still."""
    key = ApiKey(name="k", digest=digest_of("k"), tokens_per_minute=1000)
    budgets = Budgets.of_one_process([key], clock=lambda: 10**15)
    assert budgets is not None
    usage = budgets.usage(key)
    assert usage is not None
    usage.charge(999)
    return create_app(ModelRegistry(*engines), guards=ServerLimits(keys=(key,)), budgets=budgets)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.path}-{route.summary[:20]}")
def test_tokens_above_a_budget_are_refused_in_the_words_of_the_api(route: Route, almost_used_up: Any) -> None:
    """Each route that computes tokens refuses those that its key has not left with 429, in its API's own shape."""
    body, statuses = with_small_ids(orjson.loads(route.example)), set[int]()
    headers = {"content_type": (route.media_types or ("application/json",))[0], "authorization": "Bearer k"}
    for name in WRITERS:
        told = asyncio.run(call(almost_used_up, "POST", route.path, body=orjson.dumps(body | {"model": name}), headers=headers))
        statuses.add(told.status)
        if told.status == 429:
            refusal = msgspec.to_builtins(msgspec.json.decode(told.body, type=route.error_type))
            assert "may use 1,000 tokens a minute, and this request has" in str(refusal)
            assert 1 <= int(told.headers["retry-after"]) <= 60
            assert told.headers["x-ratelimit-remaining-tokens"] == "1"
    assert (429 in statuses) == (route.path not in FREE)
    assert (200 in statuses) == (route.path in FREE)


def ask(app: Any, path: str, body: dict[str, Any]) -> tuple[Route, bytes] | None:
    """The route that a body is for, and its response; None: the model does not give that."""
    content = orjson.dumps(body)
    told = asyncio.run(call(app, "POST", path, body=content, headers={"content_type": "application/json"}))
    assert told.status < 500, told.body
    is_json = told.headers["content-type"] == "application/json"
    return (ROUTES_BY_PATH[path].choose(content), told.body) if told.status == 200 and is_json else None


def fields_of(value: Any, path: str = "") -> set[str]:
    """The paths of all fields in a value; items of a list have one path."""
    if isinstance(value, dict):
        return {inner for name, each in value.items() for inner in ({f"{path}.{name}"} | fields_of(each, f"{path}.{name}"))}
    return {inner for each in value for inner in fields_of(each, f"{path}[]")} if isinstance(value, list) else set()
