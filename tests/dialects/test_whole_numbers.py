"""Whole numbers that are written as doubles: every integer field of every body of every dialect, found by its type."""

from __future__ import annotations

import inspect
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import httpx2
import msgspec
import numpy as np
import orjson
import pytest
from msgspec import inspect as types

from exchanges import Small
from whimbrel import Client
from whimbrel.dialects import ROUTES
from whimbrel.dialects.common.bodies import decode
from whimbrel.errors import InvalidRequest
from whimbrel.server.settings_table import read_settings
from whimbrel.wire.whole_numbers import as_whole, decode_json


class Whole(NamedTuple):
    """An integer in a document, which a test writes as it likes."""

    value: int


class Place(NamedTuple):
    """A body with an integer, which is in a field of the body."""

    kind: type[msgspec.Struct]
    field: str
    document: Any

    def __str__(self) -> str:
        return f"{self.kind.__name__}.{self.field}"


FILLERS: dict[type[types.Type], Callable[[Any], Any]] = {
    types.StrType: lambda _: "a",
    types.BoolType: lambda _: True,
    types.FloatType: lambda _: 1.5,
    types.IntType: lambda info: max(2, info.ge or 0),
    types.ListType: lambda info: [filler(info.item_type)] * (info.min_length or 1),
    types.VarTupleType: lambda info: [filler(info.item_type)],
    types.TupleType: lambda info: [*map(filler, info.item_types)],
    types.DictType: lambda info: {"a": filler(info.value_type)},
    types.LiteralType: lambda info: info.values[0],
    types.UnionType: lambda info: filler(info.types[0]),
    types.Metadata: lambda info: filler(info.type),
    types.StructType: lambda info: {field.encode_name: filler(field.type) for field in info.fields if field.required},
    types.AnyType: lambda _: "a",
    types.RawType: lambda _: "a",
    types.NoneType: lambda _: None,
    types.BytesType: lambda _: "",
}


def filler(info: types.Type) -> Any:
    """A document that is of a type."""
    return FILLERS[type(info)](info)


def documents(info: types.Type, seen: tuple[type, ...] = ()) -> Iterator[Any]:
    """Documents of a type, each with an integer where integers are taken and doubles are not: all such places."""
    if isinstance(info, types.IntType):
        yield Whole(max(2, info.ge or 0))
    for inner, put in parts(info, seen):
        yield from map(put, documents(inner, (*seen, info.cls) if isinstance(info, types.StructType) else seen))


def parts(info: types.Type, seen: tuple[type, ...]) -> Iterator[tuple[types.Type, Callable[[Any], Any]]]:
    """The types within a type, each with the function that makes a document of the whole from one of the part."""
    match info:
        case types.Metadata():
            yield info.type, lambda part: part
        case types.UnionType() if not any(isinstance(each, types.FloatType) for each in info.types):
            yield from ((each, lambda part: part) for each in info.types)
        case types.ListType() | types.VarTupleType():
            yield info.item_type, lambda part: [part] * (info.min_length or 1)
        case types.TupleType():
            yield from ((each, partial(replaced, [*map(filler, info.item_types)], i)) for i, each in enumerate(info.item_types))
        case types.DictType():
            yield info.value_type, lambda part: {"a": part}
        case types.StructType() if info.cls not in seen:
            yield from ((field.type, partial(replaced, filler(info), field.encode_name)) for field in info.fields)
        case _:
            pass


def replaced(whole: Any, place: Any, part: Any) -> Any:
    """A copy of a list or an object with another item."""
    copied = whole.copy()
    copied[place] = part
    return copied


def written(value: Any, write: Callable[[int], Any]) -> Any:
    """The document with its integer written by `write`."""
    if isinstance(value, Whole):
        return write(value.value)
    if isinstance(value, dict):
        return {name: written(each, write) for name, each in value.items()}
    return [written(each, write) for each in value] if isinstance(value, list) else value


def modules() -> Iterator[Any]:
    return (module for name, module in sys.modules.items() if name.startswith("whimbrel.dialects"))


STRUCTS = sorted(
    {
        kind
        for module in modules()
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
    },
    key=lambda kind: (kind.__module__, kind.__name__),
)
PLACES = [
    Place(kind, field.encode_name, filler(info) | {field.encode_name: document})
    for kind in STRUCTS
    for info in [types.type_info(kind)]
    if isinstance(info, types.StructType)
    for field in info.fields
    for document in documents(field.type, (kind,))
]


def test_the_fields_of_bodies_are_found() -> None:
    """Nested ones too, those of every route, and lists of token ids."""
    names = set(map(str, PLACES))
    for known in ("TextFields.dimensions", "RerankRequest.top_n", "EmbeddingsRequest.truncate_prompt_tokens", "EmbeddingsRequest.input",
                  "PredictRequest.parameters", "CohereRerankRequestV1.max_chunks_per_doc", "VoyageRerankRequest.top_k"):  # fmt: skip
        assert known in names
    assert {route.request_type for route in ROUTES} <= set(STRUCTS)


def test_fields_of_any_type_are_known() -> None:
    """A number in such a field is read by its dialect, with `as_whole`."""
    found = {
        f"{kind.__name__}.{field.encode_name}"
        for route in ROUTES
        for kind in [route.request_type]
        for field in types.type_info(kind).fields  # pyright: ignore[reportAttributeAccessIssue]
        if "AnyType" in repr(field.type)
    }
    assert found == {"OllamaEmbedRequest.options", "OllamaEmbeddingsRequest.options", "CohereClassifyRequest.examples"}


@pytest.mark.parametrize("place", PLACES, ids=map(str, PLACES))
@pytest.mark.sample(400)
def test_a_whole_double_is_an_integer(place: Place) -> None:
    packs: list[tuple[Any, bool]] = [(msgspec.json, False), (msgspec.msgpack, True)]
    for form, packed in packs:
        right = decode(place.kind, form.encode(written(place.document, int)), packed=packed)
        double = decode(place.kind, form.encode(written(place.document, float)), packed=packed)
        assert msgspec.msgpack.encode(double) == msgspec.msgpack.encode(right)
        with pytest.raises(InvalidRequest) as caught:
            decode(place.kind, form.encode(written(place.document, lambda number: number + 0.5)), packed=packed)
        assert caught.value.location is not None
        assert caught.value.location.field == place.field
        assert "got `float`" in str(caught.value)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("256.5", "dimensions: Expected `int | null`, got `float`"), ("1e-3", "got `float`"), ("1e300", "got `float`"), ("-1e19", "got `float`"),
        ("1e400", "dimensions: Number out of range"), ('"256"', "got `str`"), ("NaN", "not valid JSON"), ("true", "got `bool`"), ("[256.0]", "got `array`"),
        ("256.0, 3", "not valid JSON"), ('256.0, "priority": 1.5', "priority: Expected `int | null`, got `float`"),
        ('256.0, "priority": 1e10', "priority: Expected `int` <= 2147483647"), ('256.0, "input": [1.0, 2.5]', "input[1]: Expected"),
        ('256.0, "input": [[1.0, 2.0], [3.5]]', "input[1][0]: Expected `int`"),
        ('256.0, "user": 1e400', "dimensions"),
    ],
)  # fmt: skip
def test_all_else_is_refused_with_its_place(number: str, words: str) -> None:
    from whimbrel.dialects.openai import parse_request as parse_embeddings

    with pytest.raises(InvalidRequest) as caught:
        parse_embeddings(
            b'{"dimensions": %s, "input": "a"}' % number.encode()
            if "input" not in number
            else b'{"dimensions": %s}' % number.encode()
        )
    assert words in str(caught.value)


@pytest.mark.parametrize("number", ["256", "256.0", "2.56e2", "25600e-2", "2560E-1", "256.0000000000000000000001"])
def test_ways_to_write_a_number(number: str) -> None:
    from whimbrel.dialects.openai import parse_request as parse_embeddings

    body = parse_embeddings(b'{"input": [1e1, 2.0, 3], "dimensions": %s, "model": "1.0"}' % number.encode()).body
    assert (body.dimensions, body.input, body.model) == (256, [10, 2, 3], "1.0")


def test_bodies_that_are_right_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from whimbrel.wire import whole_numbers

    monkeypatch.delattr(whole_numbers, "_rewrite")
    body = orjson.dumps({"input": [[1, 2]], "dimensions": 256, "keep_alive": 1.0})
    assert decode(ROUTES[0].request_type, body).dimensions == 256
    with pytest.raises(InvalidRequest, match="got `str`"):
        decode(ROUTES[0].request_type, b'{"input": "a", "dimensions": "3.0"}')


def test_many_token_ids() -> None:
    from whimbrel.dialects.openai import parse_request as parse_embeddings

    ids = [*range(100_000)]
    assert parse_embeddings(orjson.dumps({"input": [*map(float, ids)]})).body.input == ids


@pytest.mark.parametrize("field", ["input", "ignored"])
def test_a_double_beside_millions_of_lists_costs_no_memory(field: str) -> None:
    """Nor time: looking at each of them in Python held up the worker for 15 s."""
    from whimbrel.dialects.openai import EmbeddingsRequest

    lists = b"[" + b"[[[[[[[[]]]]]]]]," * 100_000 + b"0]"
    tracemalloc.start()
    try:
        with suppress(InvalidRequest):  # the lists are no input
            assert (
                decode(EmbeddingsRequest, b'{"dimensions": 2.0, "input": "a", "%s": %s}' % (field.encode(), lists)).dimensions
                == 2
            )
        assert tracemalloc.get_traced_memory()[1] < 4 * len(lists)
    finally:
        tracemalloc.stop()


def test_what_is_ignored_may_be_nested_deeply() -> None:
    from whimbrel.dialects.openai import EmbeddingsRequest

    assert (
        decode(
            EmbeddingsRequest, b'{"dimensions": 2.0, "input": "a", "ignored": %s1%s}' % (b'{"a":' * 400, b"}" * 400)
        ).dimensions
        == 2
    )


def test_an_unknown_field_beside_a_double_is_named() -> None:
    from whimbrel.dialects.native import EmbedRequest

    with pytest.raises(InvalidRequest, match="unknown field `dimension`"):
        decode(EmbedRequest, b'{"input": "a", "dimensions": 2.0, "dimension": 2}')


@pytest.mark.parametrize(
    ("value", "whole"),
    [(3.0, 3), (-0.0, 0), (2.0**62, 2**62), (2.0**63, 2.0**63), (3.5, 3.5), (float("inf"), float("inf")), (True, True), ("3.0", "3.0"), (None, None)],
)  # fmt: skip
def test_whole_values(value: object, whole: object) -> None:
    assert as_whole(value) == whole
    assert type(as_whole(value)) is type(whole)


def test_the_operators_limits() -> None:
    assert read_settings({}, (), {"WHIMBREL_MAX_CONNECTIONS": "30.0"}).max_connections == 30


class Row(msgspec.Struct):
    index: int
    score: float


def test_answers_of_other_servers() -> None:
    assert decode_json(list[Row], b'[{"index": 1.0, "score": 1.0}]') == [Row(1, 1.0)]
    with pytest.raises(msgspec.ValidationError, match=r"got `float` - at `\$\[0\]\.index`"):
        decode_json(list[Row], b'[{"index": 1.5, "score": 1.0}]')


@pytest.mark.parametrize(
    ("path", "body", "field", "value"),
    [
        ("/v1/embeddings", {"model": "dense", "input": "a b"}, "dimensions", 8), ("/v1/embed", {"model": "dense", "input": ["a"]}, "dimensions", 8),
        ("/v1/embeddings", {"model": "dense", "input": "a b c d"}, "truncate_prompt_tokens", 3),
        ("/v2/embed", {"model": "dense", "texts": ["a"], "input_type": "search_query", "embedding_types": ["float"]}, "output_dimension", 8),
        ("/v1/rerank", {"model": "ranker", "query": "q", "documents": ["a", "b", "c"]}, "top_n", 2),
        ("/v2/rerank", {"model": "ranker", "query": "q", "documents": ["a", "b", "c"]}, "top_n", 2),
        ("/v1/rerank", {"model": "ranker", "query": "q", "documents": ["a", "b", "c"], "truncation": True}, "top_k", 2),
        ("/api/embed", {"model": "dense", "input": ["a b c d"]}, "options", {"num_ctx": 3}),
        ("/api/embed", {"model": "dense", "input": ["a"]}, "dimensions", 8),
    ],
)  # fmt: skip
def test_over_http(path: str, body: dict[str, Any], field: str, value: Any, small: Small) -> None:
    def numbers(value: Any) -> list[float]:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        own = [value] if isinstance(value, float) else []
        return own + [number for each in inner for number in numbers(each)]

    def doubled(value: Any) -> Any:
        return {name: float(each) for name, each in value.items()} if isinstance(value, dict) else float(value)

    with httpx2.Client(base_url=small.url, timeout=60) as client:
        right, double = (client.post(path, json=body | {field: each}) for each in (value, doubled(value)))
        assert (right.status_code, double.status_code) == (200, 200), double.text
        assert numbers(right.json())
        assert numbers(double.json()) == numbers(right.json())
        half = {"num_ctx": 2.5} if isinstance(value, dict) else value + 0.5
        refused = client.post(path, json=body | {field: half})
        assert refused.status_code == 400
        assert ("num_ctx" if isinstance(value, dict) else field) in refused.text


def test_our_client(small: Small) -> None:
    with Client(small.url, model="dense") as client:
        width: Any = 8.0
        assert np.array_equal(client.embed("a b", dimensions=width), client.embed("a b", dimensions=8))
