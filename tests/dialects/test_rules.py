"""Rules of bodies: the limit that /openapi.json and /docs tell is the limit that the parser checks, for every field of every route."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from whimbrel.dialects import ROUTES, Route
from whimbrel.dialects.common.bodies import NOT_EMPTY, _rules, check, count  # pyright: ignore[reportPrivateUsage]
from whimbrel.errors import InvalidRequest, Location, TooLarge
from whimbrel.server.app.openapi import openapi_document

SCHEMAS = openapi_document()["components"]["schemas"]
ITEMS: dict[str, Any] = {"passages": {"text": "a"}, "tokens": 1, "instances": {"inputs": "a"}, "ids": [1]}
"""Items of lists that are no texts."""


def limits() -> Iterator[Any]:
    """Yield each field with a limit: its route, its name and the limit."""
    for route in ROUTES:
        for _, name, rule in _rules(route.request_type):
            if rule.most is not None and route.request_type.__name__ + name != "CohereEmbedRequestinputs":  # as many objects
                yield pytest.param(route, name, rule.most, id=f"{route.path} {route.request_type.__name__}.{name}")


@pytest.mark.parametrize(("route", "name", "most"), [*limits()])
def test_one_more_is_refused_with_the_limit_that_is_told(route: Route, name: str, most: int) -> None:
    told = SCHEMAS[route.request_type.__name__]["properties"][name]
    assert f"'maxItems': {most}" in str(told)
    if "At most" in (about := told.get("description", "")):
        assert f"{most:,}" in about
    if route.body_type is not None and name != "instances":
        return  # the route of the model reads the body
    body = orjson.loads(route.example) | {name: [ITEMS.get(name, "a")] * (most + 1)}
    with pytest.raises(TooLarge) as caught:
        route.parse(orjson.dumps(body))
    assert f"the limit is {most:,}" in caught.value.message
    assert str(caught.value.location).startswith(name) or most > 100_000


def test_a_rule_says_where_it_is_broken() -> None:
    with pytest.raises(InvalidRequest, match="is empty") as caught:
        NOT_EMPTY.check("", Location("query", 3))
    assert str(caught.value.location) == "query[3]"
    assert count(2, " texts", least=0).check([], Location("texts")) is None
    check(3)  # has no fields
