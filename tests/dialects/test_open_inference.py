"""The Open Inference Protocol: bodies as kserve and tritonclient send them, every way a body can be wrong, and real models.

Both clients were tried against a server; `make recipes` runs tritonclient. What they send was written down byte for byte.
"""

from __future__ import annotations

import asyncio
import gzip
from dataclasses import replace
from typing import Any

import httpx2
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asgi import Answer, call
from dialect_results import QUERY, TEXTS, dense_result
from exchanges import Small
from fake_embedder import CARD, FakeEmbedder, FakeModel, FakePlan, asked
from vectors import body_of, same_bits, told, vectors
from whimbrel.dialects import Response, open_inference
from whimbrel.dialects.open_inference import parse_infer, render_infer
from whimbrel.errors import InvalidRequest, TooLarge
from whimbrel.server.app.app import create_app
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.routing import ModelRegistry
from whimbrel.server.keys import ApiKey, digest_of
from whimbrel.types.card import Output
from whimbrel.types.request import Request
from whimbrel.types.result import Outputs, Result, Timings

LENGTH = b"inference-header-content-length"
SENT = ["A wader.", "é 漢"]
BINARY = b"\x08\x00\x00\x00A wader.\x06\x00\x00\x00\xc3\xa9 \xe6\xbc\xa2"
OF_CLIENTS = {
    "tritonclient": (
        b'{"id":"42","inputs":[{"name":"text","shape":[2],"datatype":"BYTES","parameters":{"binary_data_size":22}}],'
        b'"parameters":{"binary_data_output":true}}' + BINARY,
        {LENGTH: b"147"},
    ),
    "tritonclient, an output": (
        b'{"inputs":[{"name":"text","shape":[2],"datatype":"BYTES","parameters":{"binary_data_size":22}}],'
        b'"outputs":[{"name":"embedding","parameters":{"binary_data":true}}]}' + BINARY,
        {LENGTH: b"163"},
    ),
    "tritonclient, JSON": (
        rb'{"id":"42","inputs":[{"name":"text","shape":[2],"datatype":"BYTES","data":["A wader.","\u00E9 \u6F22"]}],'
        rb'"parameters":{"binary_data_output":true}}',
        {},
    ),
    "kserve": (
        b'{"id":"7","model_name":"fake","inputs":[{"name":"text","shape":[2],"datatype":"BYTES",'
        b'"parameters":{"binary_data_size":22}}],"parameters":{"binary_data_output":true}}' + BINARY,
        {LENGTH: b"166", b"content-type": b"application/octet-stream"},
    ),
    "kserve, JSON": (
        b'{"id":"7","model_name":"fake","inputs":[{"name":"text","shape":[2],"datatype":"BYTES",'
        b'"data":["A wader.","\xc3\xa9 \xe6\xbc\xa2"]}],"parameters":{"binary_data_output":true}}',
        {b"content-type": b"application/json"},
    ),
}
RANKER = replace(CARD, outputs={"scores": Output(1, modes=("cls",))})
CLASSES = replace(CARD, outputs={"scores": Output(2, modes=("cls",))}, labels=("sad", "glad"))
LATE = replace(CARD, outputs={"multi_vector": Output(4, rows="token")})
TAGGER = replace(CARD, outputs={"token_scores": Output(2, rows="token")})


def tensor(*texts: str, name: str = "text", **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": [len(texts)], "datatype": "BYTES", "data": texts} | more


def packed(texts: list[str]) -> bytes:
    return b"".join(len(each).to_bytes(4, "little") + each for each in map(str.encode, texts))


def body(*tensors: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"inputs": tensors or [tensor("a", "b")], **more}


def read(content: dict[str, Any], card: Any = CARD) -> Request:
    return asked(parse_infer(orjson.dumps(content)), card)


@pytest.mark.parametrize("client", OF_CLIENTS)
def test_what_clients_send(client: str) -> None:
    """The texts of each are read, and the answer is the binary one that they ask for, with its id."""
    content, headers = OF_CLIENTS[client]
    app = create_app(ModelRegistry(FakeEmbedder()))
    sent = {name.decode().replace("-", "_"): value.decode() for name, value in headers.items()}
    for more, coded in (({}, content), ({"content_encoding": "gzip"}, gzip.compress(content))):
        answer = asyncio.run(call(app, "POST", "/v2/models/fake/infer", body=coded, headers=sent | more))
        assert answer.status == 200, answer.body
        size = int(answer.headers[LENGTH.decode()])
        found, rows = orjson.loads(answer.body[:size]), answer.body[size:]
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-length"] == str(len(answer.body))
        assert found.get("id") == orjson.loads(content[: int(headers.get(LENGTH, len(content)))]).get("id")
        [about] = found["outputs"]
        assert about == {"name": "embedding", "datatype": "FP32", "shape": [2, 4], "parameters": {"binary_data_size": 32}}
        assert np.array_equal(np.frombuffer(rows, "<f4"), np.ones(8))
    assert asked(parse_infer(content, headers)).texts == SENT


def test_every_field() -> None:
    options = {"input_type": "query", "prompt": "p: ", "dimensions": 3, "normalize": False, "truncate": "left"}
    parameters = options | {"priority": 3, "timeout": 9, "sequence_id": "s", "binary_data_output": False}
    expected = Request(["a", "b"], ("dense",), **options)
    assert read(body(tensor("a", "b", name="any"), outputs=[{"name": "embedding"}], parameters=parameters)) == expected
    assert (
        read(body())
        == read(body(outputs=[{"name": "embedding"}] * 2, id=None, parameters=None))
        == Request(["a", "b"], ("dense",))
    )
    assert read(body(tensor("a", "b", shape=[2, 1]))) == read(body(tensor(shape=[2, 1], data=[["a"], ["b"]]))) == read(body())
    named = read(body(parameters={"prompt_name": "query", "activate": False, "truncate": False}), CLASSES)
    assert named == Request(["a", "b"], ("scores",), prompt_name="query", activate=False, truncate="never")


@pytest.mark.parametrize(
    ("tensors", "pairs"),
    [
        ((tensor("q", name="query"), tensor("a", "b")), [("q", "a"), ("q", "b")]),
        ((tensor("a", "b", name="texts"), tensor("q", name="query", shape=[1, 1])), [("q", "a"), ("q", "b")]),
        ((tensor("q", "r", name="query"), tensor("a", "b")), [("q", "a"), ("r", "b")]),
        ((tensor("q", "r"), tensor("a", "b", name="text_pair")), [("q", "a"), ("r", "b")]),
        ((tensor("a", "b", name="text_pair"), tensor("q")), [("q", "a"), ("q", "b")]),
    ],
)
def test_the_forms_of_pairs(tensors: tuple[Any, ...], pairs: list[tuple[str, str]]) -> None:
    one = len({first for first, _ in pairs}) == 1
    for card in (RANKER, CARD, LATE):
        assert read(body(*tensors), card) == Request(pairs, ("scores",), listwise=one, truncate="never")
    assert read(body(*tensors, parameters={"truncate": True, "instruction": "judge"}), RANKER) == Request(
        pairs, ("scores",), listwise=one, instruction="judge"
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "inputs"),
    ({"inputs": []}, "inputs"),
    ({"inputs": {}}, "inputs"),
    (body(tensor("a"), tensor("b", name="x"), tensor("c", name="y")), "inputs"),
    (body(tensor("a"), tensor("b")), "inputs[1].name"),
    (body(tensor("a", name="x"), tensor("b", name="y")), "inputs"),
    (body(tensor("a", "b", name="query"), tensor("a", "b", "c")), "query"),
    (body(tensor("", name="query"), tensor("a")), "query[0]"),
    (body(tensor(shape=[2, 2], data=["a", "b", "c", "d"])), "inputs[0].shape"),
    (body(tensor(shape=[1, 2], data=["a", "b"])), "inputs[0].shape"),
    (body(tensor("a", shape=[])), "inputs[0].shape"),
    (body(tensor("a", shape=[-1])), "inputs[0].shape"),
    (body(tensor("a", shape=[1, -1])), "inputs[0].shape"),
    (body(tensor("a", shape=[1.5])), "inputs[0].shape[0]"),
    (body(tensor("a", shape=[2**62])), "inputs[0].shape"),
    (body(tensor("a", shape=[2**32, 2**32])), "inputs[0].shape"),
    (body(tensor("a", shape=[1] * 1000)), "inputs[0].shape"),
    (body(tensor("a", shape=[2])), "inputs[0].data"),
    (body(tensor("a", "b", shape=[1])), "inputs[0].data"),
    (body(tensor()), "inputs[0].data"),
    (body(tensor("a", data=None)), "inputs[0].data"),
    (body(tensor("a", data="a")), "inputs[0].data"),
    (body(tensor("a", data=[None])), "inputs[0].data[0]"),
    (body(tensor("a", data=[1.0])), "inputs[0].data[0]"),
    (body(tensor("a", data=[["a", "b"]])), "inputs[0].data[0]"),
    (body(tensor("a", data=[[]])), "inputs[0].data[0]"),
    (body(tensor("a", datatype="FP32")), "inputs[0].datatype"),
    (body(tensor("a", datatype="bytes")), "inputs[0].datatype"),
    (body(tensor("a", parameters={"shared_memory_region": "r"})), "inputs[0].parameters.shared_memory_region"),
    (body(tensor("a", parameters={"binary_data_size": 5})), "inputs[0].data"),
    (body(tensor(shape=[1], data=None, parameters={"binary_data_size": 5})), "inputs[0].parameters.binary_data_size"),
    (body(tensor(shape=[1], parameters={"binary_data_size": -5})), "inputs[0].parameters.binary_data_size"),
    (body(tensor(*["a"] * 2049)), "inputs[0].shape"),
    (body(tensor("q", name="query"), tensor(*["a"] * 10_001)), "inputs[1].shape"),
    (body(outputs=[{"name": "score"}]), "outputs[0]"),
    (body(outputs=[{"name": "embedding"}, {"name": "../x"}]), "outputs[1]"),
    (body(outputs=[{"name": "token_dense"}]), "outputs[0]"),
    (body(outputs=[{"name": "embedding", "parameters": {"classification": 3}}]), "outputs[0].parameters.classification"),
    (
        body(outputs=[{"name": "embedding", "parameters": {"shared_memory_region": "r"}}]),
        "outputs[0].parameters.shared_memory_region",
    ),
    (body(parameters={"truncate": "middle"}), "parameters.truncate"),
    (body(parameters={"dimensions": 0}), "parameters.dimensions"),
    (body(parameters={"prompt": "a", "prompt_name": "b"}), "prompt"),
    (body(id=7), "id"),
]


@pytest.mark.parametrize(("content", "place"), WRONG)
def test_what_is_wrong_is_named(content: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(content)
    assert str(caught.value.location) == place
    assert isinstance(caught.value, TooLarge) == ("the limit is" in caught.value.message)
    written = orjson.loads(open_inference.render_error(caught.value))
    assert written.keys() == {"error"}
    assert written["error"].removeprefix("parameters.").startswith(f"{place.removeprefix('parameters.')}: ")
    assert len(written["error"]) < 300


def test_rows_that_no_tensor_has_name_their_route() -> None:
    for card, route in ((LATE, "POST /v1/embed "), (TAGGER, "POST /v1/token_classify ")):
        with pytest.raises(InvalidRequest, match=route):
            read(body(), card)
    with pytest.raises(InvalidRequest, match=r"gives no tensors for these inputs|POST /v1/token_classify"):
        read(body(tensor("q", name="query"), tensor("a")), TAGGER)


def binary_body(*sizes: int, shape: int = 2) -> bytes:
    inputs = [
        {
            "name": f"{'query' if number else 'text'}",
            "shape": [shape],
            "datatype": "BYTES",
            "parameters": {"binary_data_size": size},
        }
        for number, size in enumerate(sizes)
    ]
    return orjson.dumps({"inputs": inputs})


@pytest.mark.parametrize(
    ("head", "rest", "stated", "place"),
    [
        (binary_body(22), BINARY[:-1], None, "inputs[0].parameters.binary_data_size"),
        (binary_body(22), BINARY + b"x", None, open_inference.JSON_LENGTH),
        (binary_body(2**62), BINARY, None, "inputs[0].parameters.binary_data_size"),
        (binary_body(22, shape=3), BINARY, None, "inputs[0].data"),
        (binary_body(22, shape=1), BINARY, None, "inputs[0].data"),
        (binary_body(0), b"", None, "inputs[0].data"),
        (binary_body(3, shape=1), b"\1\0\0", None, "inputs[0].data"),
        (binary_body(5, shape=1), b"\xff\xff\xff\xffa", None, "inputs[0].data"),
        (binary_body(5, shape=1), b"\1\0\0\0\xff", None, "inputs[0].data[0]"),
        (binary_body(22, 22), BINARY, None, "inputs[1].parameters.binary_data_size"),
        (binary_body(22), BINARY, b"-1", open_inference.JSON_LENGTH),
        (binary_body(22), BINARY, b"1e2", open_inference.JSON_LENGTH),
        (binary_body(22), BINARY, b"", open_inference.JSON_LENGTH),
        (binary_body(22), BINARY, "²".encode("latin-1"), open_inference.JSON_LENGTH),
        (binary_body(22), BINARY, b"9" * 10_000, open_inference.JSON_LENGTH),
        (binary_body(22), BINARY, b"100000", open_inference.JSON_LENGTH),
    ],
)
def test_binary_tensors_that_are_wrong(head: bytes, rest: bytes, stated: bytes | None, place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_infer(head + rest, {LENGTH: b"%d" % len(head) if stated is None else stated})
    assert str(caught.value.location) == place


def test_a_length_that_cuts_the_json_is_no_json() -> None:
    head = binary_body(22)
    for length in (b"0", b"%d" % (len(head) - 1), b"%d" % (len(head) + 1)):
        with pytest.raises(InvalidRequest):
            parse_infer(head + BINARY, {LENGTH: length})
    with pytest.raises(InvalidRequest):
        parse_infer(head + BINARY)


@given(st.lists(st.text(), min_size=1, max_size=4), st.lists(st.text(min_size=1), min_size=1, max_size=1))
def test_any_texts_are_read_as_they_are(texts: list[str], query: list[str]) -> None:
    head = orjson.dumps({"inputs": [
        tensor(*texts, data=None, parameters={"binary_data_size": len(packed(texts))}),
        tensor(*query, name="query", data=None, parameters={"binary_data_size": len(packed(query))}),
    ]})  # fmt: skip
    parsed = parse_infer(head + packed(texts) + packed(query), {LENGTH: b"%d" % len(head)})
    assert asked(parsed, RANKER).texts == [(query[0], text) for text in texts]
    assert read(body(tensor(*texts))).texts == texts


@given(vectors(3, 5))
def test_vectors_read_back(rows: np.ndarray) -> None:
    def answer(**more: Any) -> Any:
        return render_infer(parse_infer(orjson.dumps(body(**more))).body, dense_result(rows), FakeModel.named("m"))

    plain = answer()
    assert same_bits(told(plain)["outputs"][0]["data"], rows)
    assert told(plain)["outputs"][0]["shape"] == [3, 5]
    for raw in (
        answer(parameters={"binary_data_output": True}),
        answer(outputs=[{"name": "embedding", "parameters": {"binary_data": True}}]),
    ):
        assert isinstance(raw, Response)
        size = int(raw.headers[open_inference.JSON_LENGTH])
        content = body_of(raw)
        assert len(content) == raw.size
        assert same_bits(np.frombuffer(content[size:], "<f4"), rows)
    off = answer(parameters={"binary_data_output": True}, outputs=[{"name": "embedding", "parameters": {"binary_data": False}}])
    assert body_of(off) == body_of(plain)


def test_both_outputs_in_the_order_asked_for() -> None:
    outputs = [{"name": "score"}, {"name": "embedding", "parameters": {"binary_data": True}}]
    parsed = parse_infer(orjson.dumps(body(outputs=outputs)))
    both = replace(CLASSES, outputs=CLASSES.outputs | CARD.outputs)
    assert asked(parsed, both).outputs == ("scores", "dense")
    result = Result(Outputs(np.ones((2, 4), np.float32), scores=np.zeros((2, 2), np.float32)), 7, 0, Timings())
    response = render_infer(parsed.body, result, FakeModel(FakePlan("m", revision="abc"), both))
    assert isinstance(response, Response)
    found = orjson.loads(body_of(response)[: int(response.headers[open_inference.JSON_LENGTH])])
    assert (found["model_version"], [each["name"] for each in found["outputs"]]) == ("abc", ["score", "embedding"])
    assert found["outputs"][0]["data"] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("card", "inputs", "outputs"),
    [
        (CARD, ["text"], [("embedding", [-1, 4], None)]),
        (RANKER, ["query", "text"], [("score", [-1], None)]),
        (CLASSES, ["text"], [("score", [-1, 2], {"labels": ["sad", "glad"]})]),
        (LATE, ["query", "text"], [("score", [-1], None)]),
        (TAGGER, ["text"], []),
    ],
    ids=["dense", "ranker", "classes", "late", "tagger"],
)
def test_metadata(card: Any, inputs: list[str], outputs: list[Any]) -> None:
    found = orjson.loads(open_inference.render_model([FakeModel(FakePlan("m", revision="abc"), card)]))
    assert (found["name"], found["versions"]) == ("m", ["abc"])
    assert [(each["name"], each["datatype"], each["shape"]) for each in found["inputs"]] == [
        (name, "BYTES", [-1]) for name in inputs
    ]
    assert [(each["name"], each["shape"], each.get("parameters")) for each in found["outputs"]] == outputs


# Through the app


class Asker:
    """The app with a model of two names, asked from outside any event loop."""

    def __init__(self, *keys: ApiKey) -> None:
        self.model = FakeEmbedder()
        self.model.plan = FakePlan("owner/name", aliases=("ü", "a/versions", "ready"), revision="abc")
        self._app = create_app(ModelRegistry(self.model), guards=ServerLimits(keys=keys))

    def get(self, path: str, method: str = "GET", key: str = "") -> Answer:
        headers = {"content_type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        content = orjson.dumps(body()) if method == "POST" else b""
        return asyncio.run(call(self._app, method, path, body=content, headers=headers))

    def post(self, path: str, key: str = "") -> Answer:
        return self.get(path, "POST", key)


@pytest.mark.parametrize("name", ["owner/name", "ü", "a/versions", "ready", "owner/name/versions/abc"])
def test_names_and_versions_in_paths(name: str) -> None:
    asker = Asker()
    for path in (f"/v2/models/{name}/infer", f"//v2/models/{name}//infer/"):
        answer = asker.post(path)
        assert (answer.status, orjson.loads(answer.body)["model_name"]) == (200, "owner/name")
    assert orjson.loads(asker.get(f"/v2/models/{name}/ready").body) == {"name": "owner/name", "ready": True}
    assert orjson.loads(asker.get(f"/v2/models/{name}").body)["versions"] == ["abc"]


@pytest.mark.parametrize(
    "name",
    ["nobody", "..", "owner", "owner/name/versions/1", "owner/name/versions/ab", "owner/name/versions/a/b", "{}", "x" * 500],
)
def test_unknown_models_and_versions(name: str) -> None:
    asker = Asker()
    for answer in (
        asker.post(f"/v2/models/{name}/infer"),
        asker.get(f"/v2/models/{name}"),
        asker.get(f"/v2/models/{name}/ready"),
    ):
        assert answer.status == 404
        assert orjson.loads(answer.body)["error"].startswith("model: no ")
    assert not asker.model.requests


def test_methods_and_paths_that_are_none() -> None:
    asker = Asker()
    for answer, status in (
        (asker.get("/v2/models/ü/infer"), 405),
        (asker.post("/v2/models/ü"), 405),
        (asker.post("/v2/health/live"), 405),
        (asker.post("/v2/repository/index"), 404),
        (asker.get("/v2/models"), 404),
    ):
        assert answer.status == status
        assert isinstance(orjson.loads(answer.body)["error"], str)


def test_health() -> None:
    asker = Asker()
    found = orjson.loads(asker.get("/v2").body)
    assert (found["name"], found["extensions"]) == ("whimbrel", ["binary_tensor_data"])
    paths = "/v2/health/live", "/v2/health/ready", "/v2/models/ü/ready"
    assert [orjson.loads(asker.get(path).body) for path in paths[:2]] == [{"live": True}, {"ready": True}]
    asker.model.ready, asker.model.status = False, "engine 0 is down"
    assert [asker.get(path).status for path in paths] == [200, 503, 503]
    assert orjson.loads(asker.get(paths[2]).body) == {"error": "engine 0 is down."}


def test_keys() -> None:
    """A key's models and routes hold; probes need none."""
    inferring = ApiKey(name="infer", digest=digest_of("i"), models=("ü",), routes=("/v2/models/{model}/infer",))
    elsewhere = ApiKey(name="other", digest=digest_of("o"), models=("nobody",))
    asker = Asker(inferring, elsewhere)
    assert [asker.get(path).status for path in ("/v2/health/live", "/v2/health/ready", "/v2", "/v2/models/ü")] == [
        200,
        200,
        401,
        401,
    ]
    assert [asker.post("/v2/models/ü/infer", key).status for key in ("", "i", "o")] == [401, 200, 403]
    assert [asker.get("/v2/models/ü", key=key).status for key in ("i", "o")] == [403, 403]
    assert isinstance(orjson.loads(asker.post("/v2/models/ü/infer").body)["error"], str)


# Real models


def infer(url: str, model: str, *tensors: dict[str, Any], **more: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    answer = httpx2.post(f"{url}/v2/models/{model}", json=body(*tensors, **more), timeout=60)
    assert answer.status_code == 200, answer.text
    size = int(answer.headers.get(open_inference.JSON_LENGTH, len(answer.content)))
    about, rest, arrays = orjson.loads(answer.content[:size]), answer.content[size:], {}
    for each in about["outputs"]:
        count = each.get("parameters", {}).get("binary_data_size", 0)
        flat = np.array(each["data"], np.float32) if "data" in each else np.frombuffer(rest[:count], "<f4")
        arrays[each["name"]], rest = flat.reshape(each["shape"]), rest[count:]
    assert not rest
    return about, arrays


@pytest.mark.parametrize("binary", [False, True])
def test_numbers_are_those_of_the_other_routes(binary: bool, small: Small) -> None:
    more = {"parameters": {"binary_data_output": binary}}
    rows = httpx2.post(f"{small.url}/v1/embeddings", json={"model": "dense", "input": TEXTS}).json()["data"]
    about, arrays = infer(small.url, "dense%2Finfer", tensor(*TEXTS), **more)
    assert same_bits([row["embedding"] for row in rows], arrays["embedding"])
    assert infer(small.url, f"dense/versions/{about['model_version']}/infer", tensor(*TEXTS), **more)[0] == about
    for model in ("ranker", "late"):
        ranked = httpx2.post(f"{small.url}/v1/rerank", json={"model": model, "query": QUERY, "documents": TEXTS}).json()
        scores = [each["relevance_score"] for each in sorted(ranked["results"], key=lambda each: each["index"])]
        _, arrays = infer(small.url, f"{model}/infer", tensor(QUERY, name="query"), tensor(*TEXTS), **more)
        assert same_bits(scores, arrays["score"])
    _, arrays = infer(small.url, "classes/infer", tensor(*TEXTS), **more)
    assert same_bits(arrays["score"], small.engines["classes"].classify(TEXTS).scores_NC)


def test_many_texts_and_long_ones(small: Small) -> None:
    """2,048 texts in both forms; 10,000 are refused with the limit, and so is a text that is too long where it is not cut."""
    many = [f"bird {number}" for number in range(2048)]
    found = [
        infer(small.url, "dense/infer", tensor(*many), parameters={"binary_data_output": each})[1] for each in (False, True)
    ]
    assert same_bits(*[each["embedding"] for each in found])
    for content, status, words in (
        (body(tensor(*many * 5)), 413, "inputs[0].shape: 10,240 texts; the limit is 2,048."),
        (body(tensor("a", "bird " * 200), parameters={"truncate": False}), 400, "input[1]: "),
        (body(parameters={"dimensions": 10**6}), 400, "parameters.dimensions: "),
    ):
        answer = httpx2.post(f"{small.url}/v2/models/dense/infer", json=content, timeout=60)
        assert answer.status_code == status
        assert answer.json()["error"].startswith(words)
