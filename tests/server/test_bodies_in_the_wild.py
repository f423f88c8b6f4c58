"""Bodies and names as clients send them: gzipped, without a type, below other paths, for one of several models."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asgi import call
from checkpoints.classifiers import write_classifier
from exchanges import WRITE
from whimbrel import AsyncEngine, Engine
from whimbrel.server.app.app import create_app
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.routing import ROUTES_BY_PATH, ModelRegistry

JSON = {"content_type": "application/json"}
BODY = orjson.dumps({"inputs": ["A whimbrel is a wader."]})
MIB = 2**20
compressed = partial(gzip.compress, mtime=0)


def _write_names(folder: Path) -> None:
    labels = dict(enumerate(["B-ORG", "B-PER", "I-PER", "B-LOC"]))
    write_classifier(folder, "bert", "ForTokenClassification", id2label=labels)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    root = tmp_path_factory.mktemp("models")
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for name, write in {
            **{name: WRITE[name] for name in ("dense", "ranker", "classes", "late")},
            "names": _write_names,
        }.items():
            torch.manual_seed(7)
            write(root / name)
            options: Any = {"served_name": name, "aliases": (f"{name}-alias",), "dtype": "float32"}
            found[name] = AsyncEngine(stack.enter_context(Engine(str(root / name), **options)))
        yield found


def post(app: Any, path: str, body: bytes, **headers: str) -> Any:
    return asyncio.run(call(app, "POST", path, body=body, headers=headers))


# Bodies

KEYS = st.sampled_from(["input", "task", "truncation", 'a"task', "a\\", "\\", "{", "embedding_type"])
VALUES = st.recursive(
    st.none() | st.integers(0, 9) | st.text('"\\{}:task, \né', max_size=12) | KEYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, VALUES, max_size=5), st.sampled_from([None, 1]))
def test_the_outermost_fields_of_a_body_choose_its_route(body: dict[str, Any], indent: int | None) -> None:
    """Whatever names and braces there are in texts and in objects within; the same in JSON and MessagePack."""
    ways = ROUTES_BY_PATH["/v1/embeddings"]
    expected = next((route for route in ways.routes if not route.discriminators.isdisjoint(body)), ways.default)
    assert ways.choose(json.dumps(body, indent=indent).encode()) is expected
    assert ways.choose(orjson.dumps(body)) is expected
    assert ways.choose(msgspec.msgpack.encode(body)) is expected


def test_a_field_may_be_spelt_in_escapes() -> None:
    assert "task" in ROUTES_BY_PATH["/v1/embeddings"].choose(rb'{"input": "a", "t\u0061sk": "b"}').discriminators


def test_a_body_of_too_many_strings_has_the_errors_of_its_api() -> None:
    body = orjson.dumps({"input": [""] * 200_001, "task": None})
    assert "task" in ROUTES_BY_PATH["/v1/embeddings"].choose(body).discriminators


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "x-gzip"])
def test_A15_gzipped_bodies_are_read(engines: dict[str, Any], coding: str) -> None:
    """A gzipped body is read as the body itself, also one of many pieces."""
    app = create_app(ModelRegistry(engines["dense"]))
    plain = post(app, "/embed", BODY, **JSON)
    assert plain.status == 200
    for packed in (compressed(BODY), compressed(BODY + b" " * 3 * MIB), compressed(BODY + b" " * MIB, 0)):
        answer = post(app, "/embed", packed, content_encoding=coding, **JSON)
        assert (answer.status, answer.body) == (200, plain.body)


def test_A15_gzip_bombs_are_refused_before_they_are_large(engines: dict[str, Any]) -> None:
    """A gzipped body is decompressed up to the limit of bodies and no further, and its memory is given back."""
    app = create_app(ModelRegistry(engines["dense"]), guards=ServerLimits(max_body_bytes=MIB, max_inflight_bytes=2 * MIB))
    bomb = compressed(b" " * 64 * MIB)
    for _ in range(5):
        answer = post(app, "/embed", bomb, content_encoding="gzip", **JSON)
        assert (answer.status, orjson.loads(answer.body)["error_type"]) == (413, "Validation")
    assert post(app, "/embed", compressed(BODY + b" " * (MIB - MIB // 8)), content_encoding="gzip", **JSON).status == 200


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (compressed(BODY)[:-9], "ended early"),
        (compressed(BODY)[:5], "ended early"),
        (b"", "ended early"),
        (BODY, "is not valid gzip"),
        (zlib.compress(BODY), "is not valid gzip"),
        (compressed(BODY)[:-4] + b"1234", "is not valid gzip"),
        (compressed(BODY) * 2, "bytes after the gzipped body"),
        (compressed(BODY) + b"x", "bytes after the gzipped body"),
        (compressed(b" " * 2**20, 0) + b"x" * 2**17, "bytes after the gzipped body"),
        (compressed(b""), "the body is empty"),
    ],
    ids=range(10),
)
def test_A15_broken_gzip_is_named(engines: dict[str, Any], packed: bytes, words: str) -> None:
    """A gzipped body that is cut off, or followed by more, is refused with the reason."""
    answer = post(create_app(ModelRegistry(engines["dense"])), "/embed", packed, content_encoding="gzip", **JSON)
    assert answer.status == 400
    assert words in orjson.loads(answer.body)["error"]


def test_A15_other_codings_are_refused(engines: dict[str, Any]) -> None:
    """A coding that is not known is refused with the one that is."""
    for coding in ("br", "deflate", "zstd", "gzip, gzip", "", "\xff"):
        answer = post(create_app(ModelRegistry(engines["dense"])), "/embed", BODY, content_encoding=coding, **JSON)
        assert (answer.status, "send gzip" in orjson.loads(answer.body)["error"]) == (415, True)


def test_B7_bodies_without_a_type(engines: dict[str, Any]) -> None:
    """A body without a Content-Type is JSON, unless a page of a browser may have sent it."""
    app = create_app(ModelRegistry(engines["dense"]))
    assert post(app, "/embed", BODY).status == 200
    for header in (
        {"origin": "http://127.0.0.1"},
        {"referer": "http://a.example/"},
        {"sec_fetch_site": "none"},
        {"sec_fetch_mode": "cors"},
    ):
        answer = post(app, "/embed", BODY, host="127.0.0.1", **header)
        assert (answer.status, "Content-Type is missing" in answer.body.decode()) == (415, True)
    assert post(app, "/embed", BODY, content_type="").status == 200
    assert post(app, "/embed", BODY, content_type=" ; charset=utf-8").status == 200
    assert post(app, "/embed", BODY, content_type="", origin="http://127.0.0.1", host="127.0.0.1").status == 415
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        assert post(app, "/embed", BODY, content_type=kind).status == 415


# Paths


@pytest.mark.parametrize("path", ["//embed", "/embed/", "///embed//", "/embed"])
def test_slashes_do_not_matter(engines: dict[str, Any], path: str) -> None:
    """A path with slashes that are doubled or at its end is the path itself."""
    app = create_app(ModelRegistry(engines["dense"]), guards=ServerLimits(api_keys=("a-s3cret-key-of-ours",)))
    assert post(app, path, BODY, **JSON).status == 401
    assert post(app, path, BODY, api_key="a-s3cret-key-of-ours", **JSON).status == 200


def test_paths_that_stay_unknown(engines: dict[str, Any]) -> None:
    """A path that only looks like a known one is unknown, in the words of the dialect that it looks like."""
    app = create_app(ModelRegistry(engines["dense"]))
    for path in (
        "/openai",
        "/openai/v1",
        "/openai/deployments//embeddings",
        "/openai/deployments/dense/chat/completions",
        "/embed/x",
    ):
        answer = post(app, path, BODY, **JSON)
        assert (answer.status, orjson.loads(answer.body)["error"]["code"]) == (404, "not_found"), path
    answer = post(app, "/api/chat", b"{}")
    assert (answer.status, type(orjson.loads(answer.body)["error"])) == (404, str)


def test_models_are_listed_at_both_paths_by_all_their_names(engines: dict[str, Any]) -> None:
    """GET /v1/models, /models, /api/tags and /api/ps list every name of every model, and each can be asked for."""
    engines = {name: engines[name] for name in ("dense", "ranker", "classes")}
    app = create_app(ModelRegistry(*engines.values()))
    names = [f"{name}{end}" for name in engines for end in ("", "-alias")]
    for path in ("/v1/models", "/models", "/v1/models/"):
        found = orjson.loads(asyncio.run(call(app, "GET", path)).body)
        assert [each["id"] for each in found["data"]] == names
    for path in ("/api/tags", "/api/ps"):
        found = orjson.loads(asyncio.run(call(app, "GET", path)).body)
        assert [each["name"] for each in found["models"]] == [f"{name}:latest" for name in names]
    for name in names:
        assert orjson.loads(asyncio.run(call(app, "GET", f"/v1/models/{name}")).body)["id"] == name


# Several models


ASKED = [
    ("/embed", {"inputs": "a"}, "dense"),
    ("/embed_all", {"inputs": "a"}, "dense"),
    ("/v1/embeddings", {"input": "a"}, "dense"),
    ("/v1/embeddings", {"input": "a", "model": ""}, "dense"),
    ("/embeddings", {"input": "a", "model": "text-embeddings-inference"}, "dense"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, "dense"),
    ("/rerank", {"query": "a", "texts": ["b"]}, "ranker"),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}, "ranker"),
    ("/v1/score", {"queries": "a", "documents": ["b"]}, "ranker"),
    ("/v2/rerank", {"query": "a", "documents": ["b"]}, "ranker"),
    ("/api/embed", {"input": "a"}, "dense"),
    ("/v2/embed", {"texts": ["a"], "input_type": "search_query"}, "dense"),
]


TEXT_PAIR = [["a", "b"]]
OF_SEVERAL = [
    ("/", {"inputs": "a"}, "dense", "ranker late names"),
    ("/", {"inputs": "a", "normalize": True, "truncate": True}, "dense", "ranker classes late names"),
    ("/", {"inputs": "a", "parameters": {}}, "classes", "dense ranker late"),
    ("/", {"inputs": "a", "parameters": {}}, "names", "dense ranker late"),
    ("/", {"inputs": "a", "parameters": {"top_k": 2}}, "classes", "dense ranker late names"),
    ("/", {"inputs": "a", "parameters": {"aggregation_strategy": "simple"}}, "names", "dense ranker late classes"),
    ("/", {"inputs": "a", "raw_scores": True}, "classes", "dense ranker late names"),
    ("/", {"inputs": TEXT_PAIR}, "ranker", "dense late names"),
    ("/", {"inputs": "a"}, "classes", "ranker late names"),
    ("/", {"query": "a", "texts": ["b"]}, "ranker", "dense classes late names"),
    ("/invocations", {"inputs": "a"}, "dense", "ranker late names"),
    ("/invocations", {"query": "a", "texts": ["b"]}, "ranker", "dense classes late names"),
    ("/invocations", {"input": ["a"]}, "dense", "ranker"),
    ("/invocations", {"query": "a", "documents": ["b"]}, "ranker", "dense classes late names"),
    ("/vertex", {"instances": [{"inputs": "a"}, {"inputs": "b"}]}, "dense", "ranker late names"),
    ("/vertex", {"instances": [{"query": "a", "texts": ["b"]}]}, "ranker", "dense classes late names"),
    ("/pooling", {"input": ["a"]}, "dense", "ranker"),
    ("/pooling", {"input": ["a"], "task": "token_embed"}, "late", "ranker classes names"),
    ("/predict", {"inputs": "a"}, "classes", "dense ranker late names"),
    ("/predict", {"inputs": TEXT_PAIR}, "ranker", "dense classes late names"),
    ("/classify", {"input": "a"}, "classes", "dense ranker late names"),
]


@pytest.mark.parametrize(
    ("path", "body", "expected", "beside"), [*((*each, "dense ranker classes") for each in ASKED), *OF_SEVERAL]
)
def test_the_only_model_that_can_answer_is_chosen(
    engines: dict[str, Any], path: str, body: dict[str, Any], expected: str, beside: str
) -> None:
    """A request that names no model goes to the only model whose own kind of server answers such a body."""
    several = create_app(ModelRegistry(*(engines[name] for name in dict.fromkeys([*beside.split(), expected]))))
    alone = post(create_app(ModelRegistry(engines[expected])), path, orjson.dumps(body), **JSON)
    answer = post(several, path, orjson.dumps(body), **JSON)
    stamps = ("id", "created", "total_duration")
    ours, theirs = orjson.loads(answer.body), orjson.loads(alone.body)
    for found in (ours, theirs):
        for name in stamps if isinstance(found, dict) else ():
            found.pop(name, None)
    assert (answer.status, ours) == (200, theirs)


def test_two_that_can_and_none_that_can(engines: dict[str, Any]) -> None:
    """The error names the models if several could answer, or none."""
    two = create_app(ModelRegistry(engines["dense"], engines["dense"], engines["classes"]))
    answer = post(two, "/v1/embeddings", b'{"input": "a"}', **JSON)
    assert answer.status == 400
    names = "dense, dense-alias, dense, dense-alias"
    assert f"several models can answer this; name one of: {names}." in orjson.loads(answer.body)["error"]["message"]
    answer = post(two, "/embed_sparse", b'{"inputs": "a"}', **JSON)
    names += ", classes, classes-alias"
    assert f"none of this server's models can answer this: {names}." in orjson.loads(answer.body)["error"]
    answer = post(two, "/v1/embeddings", b'{"input": "a", "model": "gpt-4"}', **JSON)
    assert (answer.status, f"this server serves {names}." in answer.body.decode()) == (404, True)
    for path, body in (("/", {"inputs": "a"}), ("/vertex", {"instances": [{"inputs": "a"}]}), ("/pooling", {"input": "a"})):
        answer = post(create_app(ModelRegistry(engines["dense"], engines["classes"])), path, orjson.dumps(body), **JSON)
        assert (answer.status // 100, "several models can answer this" in answer.body.decode()) == (4, True)
    answer = post(create_app(ModelRegistry(engines["dense"], num_models=2)), "/embed", BODY, **JSON)
    assert answer.status == 503


def test_info_has_the_type_of_each_model(engines: dict[str, Any]) -> None:
    """TEI's /info names every type of model on the server; clients look for theirs."""
    found = orjson.loads(asyncio.run(call(create_app(ModelRegistry(*engines.values())), "GET", "/info")).body)
    assert found["model_type"].keys() == {"embedding", "reranker", "classifier"}
    assert found["max_client_batch_size"] == 2048
