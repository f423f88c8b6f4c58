"""The catalogue's bodies and inputs over every route of every dialect: each answers with its own status and shape, and never
with another's, nor with a page or bare text.

Where several dialects share a path, a body that cannot be read is answered by the one whose fields it seems to have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import msgspec
import orjson
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asgi import call
from exchanges import WRITE
from whimbrel import AsyncEngine, Engine
from whimbrel.dialects import ROUTES
from whimbrel.server.app.app import create_app
from whimbrel.server.app.routing import ModelRegistry

T = "A whimbrel is a wader."
LONG = "a bird " * 300
JSON = {"content_type": "application/json"}


@dataclass(frozen=True)
class Way:
    """A way to ask: a path, the shape of its errors, a body, and which of its fields holds the inputs."""

    path: str
    shape: str
    model: str
    name: str
    """The field of the inputs; with a dot in it, the field within a field."""
    inputs: Any = (T,)
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    uncut: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields that make a text that is too long an error."""
    hint: str = ""
    """Advice on truncation in that error."""
    wrong: dict[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    """Values of fields that are no values of them."""
    default: str = ""
    """The shape of what has no field, where that is another dialect's."""
    most: int = 2048

    def body(self, inputs: Any = None, **fields: Any) -> dict[str, Any]:
        """A whole body, with these inputs."""
        outer, _, inner = self.name.partition(".")
        value = self.inputs if inputs is None else inputs
        given = {inner: value, "source_sentence": T} if inner else value
        return {"model": self.model, **self.more, outer: given, **fields}


SIZES = (0, -1, 10**9, "256", 3.5)
OURS = {"uncut": {"truncate": False}, "hint": 'truncate="right"'}
VLLM = {"hint": "truncate_prompt_tokens=-1"}
TEI = {"uncut": {"truncate": False}, "hint": "truncate: true"}
PAIRS = {"more": {"query": T}, "most": 10_000}
WAYS = [
    Way("/v1/embeddings", "openai", "dense", "input", **OURS, wrong={"dimensions": SIZES[1:], "modality": ("image",), "encoding_format": ("int4", 3, ["float"])}),
    Way("/embeddings", "openai", "dense", "input", **OURS, wrong={"dimensions": SIZES[1:], "truncate": ("middle",), "prompt_name": ("x",)}),
    Way("/v1/embed", "openai", "dense", "input", **OURS, wrong={"dimensions": SIZES, "outputs": ("x", 3), "embed_dtype": ("float64",)}),
    Way("/v1/classify", "openai", "classes", "input", **OURS, wrong={"activate": (1, "yes"), "truncate": ("middle",)}),
    Way("/v1/rerank", "openai", "ranker", "documents", **PAIRS, hint=OURS["hint"], wrong={"top_n": (-1, "3"), "return_embeddings": (True,)}),
    Way("/v1/score", "openai", "ranker", "text_2", more={"text_1": T}, most=10_000, hint=OURS["hint"], wrong={"score_by": ("x",)}),
    Way("/v2/embed", "cohere", "dense", "texts", uncut={"truncate": "NONE"}, hint='truncate="END"',
        wrong={"output_dimension": SIZES, "embedding_types": (["int4"], "float", [3]), "input_type": ("x", 3), "truncate": ("end", True)}),
    Way("/v1/embed", "cohere", "dense", "texts", uncut={"truncate": "NONE"}, hint='truncate="END"', default="openai",
        wrong={"output_dimension": SIZES, "max_tokens": (0, -1, "3")}),
    Way("/v2/rerank", "cohere", "ranker", "documents", **PAIRS, uncut={"truncate": False}, hint=OURS["hint"],
        wrong={"top_n": (-1, "3"), "max_tokens_per_doc": (-1, "9")}),
    Way("/v1/rerank", "cohere", "ranker", "documents", more={"query": T, "max_chunks_per_doc": 2}, most=10_000, default="openai",
        hint="max_chunks_per_doc=1", wrong={"rank_fields": (["title"], "text")}),
    Way("/v1/embeddings", "detail", "dense", "input", more={"task": "retrieval.query"}, hint="truncate=true", default="openai",
        wrong={"dimensions": SIZES, "embedding_type": ("int4", ["int4"]), "task": ("x", 3), "normalized": ("yes",)}),
    Way("/v1/multi-vector", "detail", "late", "input", hint="truncate=true", wrong={"dimensions": SIZES, "input_type": ("x",)}),
    Way("/v1/embeddings", "detail", "dense", "input", more={"truncation": False}, hint="truncation=true", default="openai",
        wrong={"output_dimension": SIZES, "output_dtype": ("int4", ["int8"]), "truncation": ("yes",), "encoding_format": ("npy",)}),
    Way("/v1/rerank", "detail", "ranker", "documents", more={"query": T, "truncation": False}, most=10_000, hint="truncation=true",
        default="openai", wrong={"top_k": (0, -1, "3")}),
    Way("/embed", "tei", "dense", "inputs", **TEI, wrong={"dimensions": SIZES, "truncation_direction": ("middle",), "prompt_name": ("x",)}),
    Way("/embed_all", "tei", "late", "inputs", more={"input_type": "document"}, **TEI, wrong={"truncate": ("right",)}),
    Way("/similarity", "tei", "dense", "inputs.sentences", uncut={"parameters": {"truncate": False}}, hint="parameters.truncate: true"),
    Way("/rerank", "tei", "ranker", "texts", **PAIRS, **TEI, wrong={"raw_scores": ("yes",), "return_text": (1,)}, default="vllm"),
    Way("/predict", "tei", "classes", "inputs", ((T,),), **TEI, wrong={"raw_scores": ("yes",)}),
    Way("/tokenize", "tei", "dense", "inputs", wrong={"add_special_tokens": ("yes",), "prompt_name": ("x",)}, default="vllm"),
    Way("/decode", "tei", "dense", "ids", ((101, 5),), wrong={"skip_special_tokens": ("yes",)}),
    Way("/", "tei", "dense", "inputs", **TEI, wrong={"dimensions": SIZES}),
    Way("/invocations", "tei", "dense", "inputs", **TEI, wrong={"dimensions": SIZES}),
    Way("/api/embed", "ollama", "dense", "input", **TEI, wrong={"dimensions": (-1, 10**9, "256", 3.5), "options": ([], {"num_ctx": "9"})}),
    Way("/api/embeddings", "ollama", "dense", "prompt", T, wrong={"options": ({"num_ctx": -1}, {"rope_frequency_base": 1})}),
    Way("/pooling", "vllm", "dense", "input", **VLLM, wrong={"dimensions": SIZES, "task": ("plugin", 3), "encoding_format": ("npy",)}),
    Way("/classify", "vllm", "classes", "input", **VLLM, wrong={"use_activation": ("yes",), "padding": ("max_length",)}),
    Way("/score", "vllm", "ranker", "text_2", more={"text_1": T}, most=10_000, **VLLM, wrong={"max_tokens_per_doc": (-1, "5")}),
    Way("/rerank", "vllm", "ranker", "documents", **PAIRS, **VLLM, wrong={"top_n": (-1, "3"), "chat_template": ("x",)}),
    Way("/tokenize", "vllm", "dense", "prompt", T, wrong={"add_special_tokens": ("yes",)}),
    Way("/detokenize", "vllm", "dense", "tokens", (101, 5)),
    Way("/invocations", "vllm", "dense", "input", uncut={"truncate": False}, hint=VLLM["hint"], default="tei", wrong={"dimensions": SIZES[1:]}),
    Way("/invocations", "vllm", "ranker", "text_2", more={"text_1": T}, most=10_000, **VLLM, default="tei", wrong={"score_by": ("x",)}),
    Way("/invocations", "vllm", "ranker", "documents", **PAIRS, **VLLM, default="tei", wrong={"top_n": (-1, "3")}),
    Way("/rerank", "openai", "ranker", "documents", more={"query": T, "raw_scores": True}, most=10_000, hint="", default="vllm",
        uncut={"truncate": False}, wrong={"raw_scores": ("yes",), "return_documents": ("true",)}),
    Way("/classify", "openai", "classes", "input", more={"raw_scores": True}, default="vllm", wrong={"raw_scores": ("yes",)}),
    Way("/v1/reranking", "openai", "ranker", "documents", **PAIRS, hint=OURS["hint"], wrong={"top_n": (-1, "3")}),
    Way("/reranking", "openai", "ranker", "documents", **PAIRS, hint=OURS["hint"], wrong={"top_n": (-1, "3")}),
    Way("/v1/reranking", "openai", "ranker", "input", **PAIRS, wrong={"top_k": (0, -1, "3"), "return_input": ("yes",)}),
    Way("/reranking", "openai", "ranker", "input", **PAIRS, wrong={"top_k": (0, -1, "3")}),
    Way("/embedding", "openai", "dense", "content", wrong={"embd_normalize": (-2, "2", 1.5)}),
    Way("/v1/tokenize", "cohere", "dense", "text", T),
    Way("/v1/detokenize", "cohere", "dense", "tokens", (101, 5)),
    Way("/v1/classify", "cohere", "classes", "inputs", uncut={"truncate": "NONE"}, hint='truncate="END"', default="openai",
        wrong={"truncate": ("end", True), "examples": ([{"text": "a", "label": "b"}],)}),
]  # fmt: skip
EVERY = pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.path}-{way.shape}-{'-'.join(way.more)}")

STATUSES = {
    "openai": {"model": 404, "many": 413},
    "cohere": {"model": 404, "many": 413},
    "detail": {},
    "tei": {"wrong": 422, "model": 404, "many": 422},
    "ollama": {"model": 404, "many": 413},
    "vllm": {"model": 404, "many": 413},
}
"""Statuses of dialects other than 400. `wrong` is a body that can be read, and is no request."""


def shape(answer: Any) -> str:
    """Return the dialect whose errors look like this."""
    told = orjson.loads(answer.body)
    match told:
        case {"error": {"message": str(), "type": str(), "param": _, "code": int()}} if len(told["error"]) == 4:
            return "vllm"
        case {"error": {"message": str(), "type": str(), "param": _, "code": _}} if len(told["error"]) == 4:
            return "openai"
        case {"error": str(), "error_type": str()}:
            return "tei"
        case {"error": str()}:
            return "ollama"
        case {"message": str()}:
            return "cohere"
        case {"detail": str()}:
            return "detail"
        case _:
            return "none"


class Asker:
    """The app, asked from outside any event loop."""

    def __init__(self, engines: list[Engine]) -> None:
        embedders: list[Any] = [AsyncEngine(engine) for engine in engines]
        self.models: dict[str, Any] = {each.plan.served_name: each for each in embedders}
        self._app = create_app(ModelRegistry(*embedders))

    def post(self, path: str, body: Any, **headers: str) -> Any:
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        answer = asyncio.run(call(self._app, "POST", path, body=content, headers=JSON | headers))
        assert answer.headers["content-type"] == "application/json"
        return answer

    def refuse(self, way: Way, body: Any, *kinds: str, told_apart: bool = True) -> str:
        """Return the error for a body of one of these kinds of wrong; `told_apart`: its dialect is known."""
        answer = self.post(way.path, body)
        expected = way.shape if told_apart else way.default or way.shape
        assert shape(answer) == expected, answer.body
        assert answer.status in {STATUSES[expected].get(kind, 400) for kind in kinds}, answer.body
        assert len(answer.body) < 1500
        return answer.body.decode()

    def take(self, way: Way, body: Any) -> Any:
        """Return the answer to a body."""
        answer = self.post(way.path, body)
        assert answer.status == 200, answer.body
        found = orjson.loads(answer.body)
        assert all(map(isfinite, numbers(found)))
        return found


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, float):
        yield value


@pytest.fixture(scope="module")
def asker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    root = tmp_path_factory.mktemp("models")
    with ExitStack() as stack:
        engines: list[Engine] = []
        for name in ("dense", "late", "ranker", "classes"):
            torch.manual_seed(7)
            WRITE[name](root / name)
            engine = Engine(str(root / name), dtype="float32", matryoshka=True, served_name=name)
            engines.append(stack.enter_context(engine))
        yield Asker(engines)


def test_every_route_is_here() -> None:
    asked = {(way.path, route_of(way)) for way in WAYS}
    others = {
        "EmbedSparseRequest",
        "TokenClassifyRequest",
        "ShowRequest",
        "PullRequest",
        "VertexRequest",
        "RankingRequest",
        "InferRequest",
    }  # no model, no inputs, bodies of /, objects, tensors
    all_of_them = {(route.path, route.request_type.__name__) for route in ROUTES}
    left = {name for path, name in all_of_them - asked if path not in ("/", "/invocations")}
    assert left == others


def route_of(way: Way, body: dict[str, Any] | None = None) -> str:
    """The name of the struct of the route that a body is for."""
    routes = [route for route in ROUTES if route.path == way.path]
    marked = [route for route in routes if not route.discriminators.isdisjoint(way.body() if body is None else body)]
    return [*marked, *sorted(routes, key=lambda route: not route.discriminators)[-1:]][0].request_type.__name__


@EVERY
def test_B1_bodies_that_are_no_request(way: Way, asker: Asker) -> None:
    whole = orjson.dumps(way.body())
    for body in (
        b"",
        b" \n",
        whole[:-1],
        whole + b"x",
        whole + whole,
        b"\xef\xbb\xbf" + whole,
        whole.decode().encode("utf-16"),
    ):
        asker.refuse(way, body, "unreadable", told_apart=whole[:-1] in body)
    for body in (b"[]", b"null", b'"a"', b"3"):
        asker.refuse(way, body, "wrong", told_apart=False)
    name = way.name.partition(".")[0]
    asker.refuse(way, whole[:-1] + b',"%b":"\xff"}' % name.encode(), "unreadable", "wrong")
    if way.shape != "ollama":  # which has nothing to do then
        left = {key: value for key, value in way.body().items() if key != name}
        asker.refuse(way, left, "wrong", told_apart=route_of(way, left) == route_of(way))


@EVERY
def test_B2_B3_B4_what_no_field_holds(way: Way, asker: Asker) -> None:
    whole = orjson.dumps(way.body())[:-1]
    name = way.name.partition(".")[0].encode()
    for value in (b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000):
        for which in (name, b"nobody_knows"):
            asker.refuse(way, whole + b',"%b":%b}' % (which, value), "unreadable", "wrong")
    for value in (b"NaN", b"-Infinity", b"0x10", b"01", b"[1_0]", rb'"\ud800"', rb'["\udc00\ud800"]', b'"\0"'):
        asker.refuse(way, whole + b',"%b":%b}' % (name, value), "unreadable", "wrong")
    for value in (b"1e400", b"9" * 10_000):
        answer = asker.post(way.path, whole + b',"%b":%b}' % (name, value))
        assert (answer.status in (400, 422), shape(answer)) == (True, way.shape)


@EVERY
def test_B5_B6_the_last_of_two_keys_counts_and_unknown_ones_do_not(way: Way, asker: Asker) -> None:
    whole = orjson.dumps(way.body())
    twice = b'{"model":"nobody",' + whole[1:]
    once = asker.take(way, whole)
    assert without_stamps(asker.take(way, twice)) == without_stamps(once)
    if way.path in ("/v1/embed", "/v1/classify") and way.shape == "openai":
        assert "nobody_knows" in asker.refuse(way, way.body(nobody_knows=[{}]), "wrong")
    else:
        assert without_stamps(asker.take(way, way.body(nobody_knows=[{}]))) == without_stamps(once)


def without_stamps(answer: Any) -> Any:
    stamps = ("id", "created", "total_duration")
    if isinstance(answer, list):
        return [without_stamps(each) for each in answer]
    return (
        {name: without_stamps(each) for name, each in answer.items() if name not in stamps}
        if isinstance(answer, dict)
        else answer
    )


@EVERY
def test_B7_other_content_types(way: Way, asker: Asker) -> None:
    answer = asker.post(way.path, way.body(), content_type="text/plain")
    if way.shape == "ollama":
        assert answer.status == 200
    else:
        assert (answer.status, shape(answer)) == (400 if way.shape == "vllm" else 415, way.shape)


@EVERY
def test_B7_message_pack_where_a_path_takes_it(way: Way, asker: Asker) -> None:
    answer = asker.post(way.path, msgspec.msgpack.encode(way.body()), content_type="application/msgpack")
    if ("rerank" in way.path and way.path != "/v2/rerank") or way.path in ("/v1/score", "/score"):
        assert without_stamps(orjson.loads(answer.body)) == without_stamps(asker.take(way, way.body()))
    else:
        assert (answer.status, shape(answer)) == (400 if way.shape in ("ollama", "vllm") else 415, way.shape)


@EVERY
def test_B8_mixed_lists_say_where(way: Way, asker: Asker) -> None:
    first = way.inputs[0] if isinstance(way.inputs, tuple) else way.inputs
    for other in (None, {}, True, 0.5, [[[]]], 3 if not isinstance(first, int) else "a"):
        told = asker.refuse(way, way.body([first, other]), "wrong")
        assert way.name.partition(".")[0] in told
        assert "[1]" in told or isinstance(way.inputs, str) or way.name == "ids" or way.path == "/predict"


@EVERY
def test_B10_models_that_are_not_served(way: Way, asker: Asker) -> None:
    asker.refuse(way, way.body(model=3), "wrong")
    taken = {""} if way.shape in ("openai", "tei", "vllm") and way.path not in ("/v1/embed", "/v1/classify") else set()
    for name in {"", " ", "x" * 1000, "../../etc/passwd", "C:\\x", "\0"} - taken:
        asker.refuse(way, way.body(model=name), "model")


@EVERY
def test_B11_wrong_values_of_options(way: Way, asker: Asker) -> None:
    for name, values in way.wrong.items():
        for value in values:
            assert name in asker.refuse(way, way.body(**{name: value}), "wrong")


@EVERY
def test_C1_C4_C5_odd_texts(way: Way, asker: Asker) -> None:
    if way.path == "/api/embed":
        assert asker.take(way, way.body([]))["embeddings"] == []
    elif not isinstance(way.inputs, str) and way.name != "tokens":
        asker.refuse(way, way.body([]), "empty")
    if isinstance(way.inputs, str) or way.inputs == (T,):
        for text in ("", " ", "🙂\u200d🙂", "שלום", "e\u0301", "\0", "\u2028", "[SEP] </s> <|endoftext|> [MASK]"):
            asker.take(way, way.body(text if isinstance(way.inputs, str) else [text, T]))


@EVERY
@given(st.lists(st.text(), min_size=1, max_size=4))
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
def test_C4_any_texts_are_read_as_they_are(way: Way, asker: Asker, texts: list[str]) -> None:
    if way.inputs != (T,):
        return
    (route,) = (each for each in ROUTES if (each.path, each.request_type.__name__) == (way.path, route_of(way)))
    asked = route.parse(orjson.dumps(way.body(texts))).request(asker.models[way.model])
    assert asked is not None
    pairs = way.most == 10_000
    expected = [(T, text) for text in texts] if pairs else [T, *texts] if "." in way.name else texts
    assert list(asked.texts) == expected


@EVERY
def test_C2_texts_that_are_too_long(way: Way, asker: Asker) -> None:
    if way.hint or way.path == "/api/embeddings":
        body = way.body(LONG if isinstance(way.inputs, str) else [[LONG]] if way.path == "/predict" else [LONG], **way.uncut)
        told = asker.refuse(way, body, "wrong")
        assert way.hint in told.replace('\\"', '"')
        assert "tokens; the limit is" in told
        assert ("Pass" in told) == bool(way.hint)


@EVERY
def test_C3_too_many_inputs(way: Way, asker: Asker) -> None:
    if not isinstance(way.inputs, str) and way.name != "tokens":
        told = asker.refuse(way, way.body([way.inputs[0]] * (way.most + 1)), "many")
        assert f"{way.most + 1:,}" in told
        assert f"{way.most:,}" in told
    asker.refuse(way, orjson.dumps(way.body())[:-1] + b',"x":[%b1]}' % (b"[]," * 600_000), "many")


@EVERY
def test_C7_token_ids_that_are_none(way: Way, asker: Asker) -> None:
    for ids in ([[10**7]], [[-1]], [2**63], [[2**63]], [[101, "a"]]):
        given = ids[0] if way.name == "tokens" and isinstance(ids[0], list) else ids
        asker.refuse(way, way.body(given), "wrong")
