"""TEI's dialect: every field, every error, and real models through the app and through `InferenceClient`.

What the client sends and reads was seen in huggingface_hub 2.4.0; what TEI does, in router/src/http of
text-embeddings-inference (1.9).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import huggingface_hub
import numpy as np
import orjson
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asgi import Answer, call
from checkpoints.bge_m3 import write_m3
from checkpoints.classifiers import write_classifier
from checkpoints.late_interaction import write_stanford
from checkpoints.sparse import write_splade
from exchanges import Exchanges
from fake_embedder import FakeEmbedder, asked
from serving import Server
from vectors import EVERY_FLOAT, same_bits, told, vectors
from whimbrel import AsyncEngine, Engine, errors
from whimbrel.dialects import APIS
from whimbrel.dialects.common.bodies import MalformedBody
from whimbrel.dialects.tei import answers, describe, embed, root, scores, tokens
from whimbrel.errors import InvalidRequest, Location, TooLarge
from whimbrel.server.app.app import create_app
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.openapi import openapi_document
from whimbrel.server.app.routing import ModelRegistry
from whimbrel.types.card import Output
from whimbrel.types.request import DetokenizeRequest, Request, TokenizeRequest
from whimbrel.types.result import Outputs, Ragged, Result, Sparse, Timings
from whimbrel.types.seq import TokenInfo

ROUTES = next(api.routes for api in APIS if api.name == "TEI")
JSON = {"content_type": "application/json"}
QUERY = "what is a whimbrel?"
TEXTS = ["a sandwich", "The whimbrel is a wader, with a long curved bill.", "birds fly far"]


def encoded(**body: Any) -> bytes:
    return orjson.dumps(body)


def model(**outputs: Output) -> Any:
    """Return a model with these outputs, as a dialect sees it."""
    card = SimpleNamespace(
        outputs=outputs,
        labels=(),
        text_formats={},
        list_template=None,
        output=outputs.__getitem__,
        prompt_text={"q": "find: "}.__getitem__,
    )
    return SimpleNamespace(card=card, plan=SimpleNamespace(served_name="m", device="cpu", max_length=256))


def result(**outputs: Any) -> Result:
    return Result(Outputs(**outputs), 7, 0, Timings(0.0011, 0.002, 0.0309, 0.04))


# What bodies mean


def test_every_field_of_embed() -> None:
    more = {"truncate": True, "truncation_direction": "Left", "prompt_name": "q", "normalize": False, "dimensions": 3}
    parsed = embed.parse_embed(encoded(inputs=["a", "b"], model="m", input_type="query", nobody="knows", **more))
    body, request = parsed.body, parsed.request
    assert body.model == "m"
    assert request(model(dense=Output(4))) == Request(
        ["a", "b"], ("dense",), prompt_name="q", truncate="left", normalize=False, dimensions=3, input_type="query"
    )
    least = asked(embed.parse_embed(encoded(inputs="a")))
    assert least == Request(["a"], ("dense",), truncate="right", normalize=True)
    nulls = dict.fromkeys(embed.TEIEmbedRequest.__struct_fields__) | {"inputs": "a"}
    assert asked(embed.parse_embed(encoded(**nulls))) == least
    assert asked(embed.parse_embed(encoded(inputs="a", truncate=False))).truncate == "never"


def test_all_and_sparse() -> None:
    request = embed.parse_embed_all(encoded(inputs="a", truncation_direction="left", prompt_name="q")).request
    for output, expected in (("dense", "hidden"), ("scores", "hidden"), ("multi_vector", "multi_vector")):
        assert request(model(**{output: Output(4)})) == Request(["a"], (expected,), truncate="left", prompt_name="q")
    with pytest.raises(InvalidRequest):
        embed.parse_embed_all(encoded(inputs=[]))
    found = asked(embed.parse_embed_sparse(encoded(inputs=["a"], truncation_direction="left", prompt_name="q")))
    assert found == Request(["a"], ("sparse",), truncate="left", prompt_name="q")


def test_token_ids() -> None:
    for ids in ([101, 7592, 102], [[101, 7592, 102]]):
        (row,) = cast(list[Any], asked(embed.parse_embed(encoded(inputs=ids))).texts)
        assert row.tolist() == [101, 7592, 102]


def test_similarity_and_its_parameters() -> None:
    inputs = {"source_sentence": "a", "sentences": ["b", "c"]}
    parameters = {"truncate": False, "truncation_direction": "left", "prompt_name": "q"}
    found = asked(embed.parse_similarity(encoded(inputs=inputs)))
    assert found == Request(["a", "b", "c"], ("dense",), normalize=True, truncate="right")
    found = asked(embed.parse_similarity(encoded(inputs=inputs, parameters=parameters)))
    assert found == Request(["a", "b", "c"], ("dense",), normalize=True, truncate="never", prompt_name="q")
    assert asked(root.parse_root(encoded(inputs=inputs, parameters=parameters))) == found


@pytest.mark.parametrize(
    ("inputs", "texts"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        (["a", "b"], [("a", "b")]),
        ([["a"], ["b"]], ["a", "b"]),
        ([["a", "b"], ["c", "d"]], [("a", "b"), ("c", "d")]),
    ],
)
def test_what_predict_takes(inputs: Any, texts: Any) -> None:
    ranker = model(scores=Output(2, activation="softmax"))
    found = scores.parse_predict(encoded(inputs=inputs, truncate=False)).request(ranker)
    assert found == Request(texts, ("scores",), activate=True, truncate="never")
    assert root.parse_root(encoded(inputs=inputs, truncate=False)).request(ranker) == found


@pytest.mark.parametrize("raw", [True, False])
def test_every_field_of_rerank(raw: bool) -> None:
    body = encoded(query="q", texts=["a", "b"], raw_scores=raw, return_text=True, truncation_direction="left")
    parsed = scores.parse_rerank(body)
    sent, request = parsed.body, parsed.request
    assert sent.return_text
    found = request(model(scores=Output(1, activation="sigmoid")))
    assert found == Request([("q", "a"), ("q", "b")], ("scores",), listwise=True, activate=not raw, truncate="left")
    assert request(model(dense=Output(4))).activate is None, "similarities have no activation"
    with pytest.raises(InvalidRequest) as caught:
        request(model(scores=Output(2)))
    assert answers.status(caught.value) == 424


def test_tokenize_and_decode() -> None:
    assert asked(tokens.parse_tokenize(encoded(inputs="a"))) == TokenizeRequest(["a"])
    found = asked(tokens.parse_tokenize(encoded(inputs=["a", "b"], add_special_tokens=False, prompt_name="q")))
    assert found == TokenizeRequest(["a", "b"], special=False, prompt_name="q")
    assert asked(tokens.parse_decode(encoded(ids=[1, 2]))) == DetokenizeRequest([[1, 2]], special=False)
    assert asked(tokens.parse_decode(encoded(ids=[[1], [2]], skip_special_tokens=False))) == DetokenizeRequest(
        [[1], [2]], special=True
    )


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("dense", Request(["a"], ("dense",), truncate="right", normalize=True)),
        ("sparse", Request(["a"], ("sparse",), truncate="right")),
        ("multi_vector", Request(["a"], ("multi_vector",), truncate="right")),
        ("scores", Request(["a"], ("scores",), activate=True, truncate="right")),
    ],
)
def test_the_root_is_what_the_model_is_made_for(output: str, expected: Request) -> None:
    request = root.parse_root(encoded(inputs="a")).request
    assert (
        request(model(**{output: Output(1, activation="sigmoid"), "scores" if output == "dense" else "dense": Output(1)}))
        == expected
    )
    tokens_of = request(model(token_scores=Output(1)))
    assert tokens_of == Request(["a"], ("token_scores",), truncate="right", return_offsets=True)


# Wrong bodies

EMBED, RERANK, PREDICT = embed.parse_embed, scores.parse_rerank, scores.parse_predict


@pytest.mark.parametrize(
    ("read", "body", "param", "status", "kind"),
    [
        (EMBED, {}, "inputs", 422, "Validation"), (EMBED, {"inputs": None}, "inputs", 422, "Validation"),
        (EMBED, {"inputs": []}, "inputs", 400, "Empty"), (EMBED, {"inputs": ["a", 3]}, "input[1]", 422, "Validation"),
        (EMBED, {"inputs": [["a"]]}, "inputs[0][0]", 422, "Validation"), (EMBED, {"inputs": ["a"] * 2049}, "inputs", 422, "Validation"),
        (EMBED, {"inputs": "a", "truncate": "right"}, "truncate", 422, "Validation"),
        (EMBED, {"inputs": "a", "truncation_direction": "middle"}, "truncation_direction", 422, "Validation"),
        (EMBED, {"inputs": "a", "dimensions": 1.5}, "dimensions", 422, "Validation"),
        (EMBED, {"inputs": [[2**63]]}, "input[0][0]", 422, "Validation"),
        (embed.parse_similarity, {"inputs": {"source_sentence": "a", "sentences": []}}, "inputs.sentences", 400, "Empty"),
        (embed.parse_similarity, {"inputs": "a"}, "inputs", 422, "Validation"),
        (RERANK, {"query": "q", "texts": []}, "texts", 400, "Empty"), (RERANK, {"query": "q", "texts": ["a"] * 10_001}, "texts", 422, "Validation"),
        (RERANK, {"texts": ["a"]}, "query", 422, "Validation"), (RERANK, {"query": "q", "texts": ["a", 3]}, "texts[1]", 422, "Validation"),
        (PREDICT, {"inputs": []}, "inputs", 400, "Empty"), (PREDICT, {"inputs": ["a", "b", "c"]}, "input", 422, "Validation"),
        (PREDICT, {"inputs": [["a"], ["b", "c"]]}, "input[1]", 422, "Validation"), (PREDICT, {"inputs": [[]]}, "input[0]", 422, "Validation"),
        (PREDICT, {"inputs": [["a"], "b"]}, "input[1]", 422, "Validation"), (PREDICT, {"inputs": [["a"]] * 2049}, "inputs", 422, "Validation"),
        (PREDICT, {"inputs": "a", "parameters": {"top_k": 0}}, "parameters.top_k", 422, "Validation"),
        (tokens.parse_tokenize, {"inputs": []}, "inputs", 400, "Empty"), (tokens.parse_tokenize, {"inputs": [3]}, "inputs[0]", 422, "Validation"),
        (tokens.parse_decode, {"ids": []}, "ids", 400, "Empty"), (tokens.parse_decode, {"ids": [[1], 2]}, "ids[1]", 422, "Validation"),
        (tokens.parse_decode, {"ids": [1, [2]]}, "ids[0]", 422, "Validation"), (tokens.parse_decode, {"ids": [-1]}, "ids[0]", 422, "Validation"),
        (root.parse_root, {"inputs": {"sentences": ["a"]}}, "inputs.source_sentence", 422, "Validation"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(read: Callable[[bytes], Any], body: Any, param: str | None, status: int, kind: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(orjson.dumps(body))
    assert (caught.value.param, answers.status(caught.value), answers.error_type(caught.value)) == (param, status, kind)
    written = orjson.loads(answers.render_error(caught.value))
    assert written.keys() == {"error", "error_type"}
    assert written["error"].startswith((param or "").replace("input[", "inputs["))


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (MalformedBody("no JSON."), 400, "Validation"), (TooLarge("too many bytes."), 413, "Validation"),
        (errors.ModelNotFound("no.", param="model"), 404, "Validation"), (errors.TooLong("long.", item=0), 422, "Validation"),
        (errors.Overloaded("full.", retry_after=1), 429, "Overloaded"), (errors.Unavailable("draining."), 503, "Unhealthy"),
        (errors.NonFinite("NaN.", item=0), 424, "Backend"), (errors.OutOfMemory("large."), 424, "Backend"),
        (errors.DeadlineExceeded("late."), 504, "Backend"), (errors.UnsupportedMediaType("text."), 415, "Validation"),
        (answers.wrong_model_type("this model ranks nothing."), 424, "Backend"),
    ],
)  # fmt: skip
def test_errors(error: errors.WhimbrelError, status: int, kind: str) -> None:
    assert (answers.status(error), answers.error_type(error)) == (status, kind)


def test_errors_name_what_was_sent() -> None:
    by_path = {route.path: route for route in ROUTES}
    for path, location, expected in (
        ("/embed", Location("input", 3), "inputs[3]"), ("/rerank", Location("input", 3, 1), "texts[3]"), ("/rerank", Location("input", 3, 0), "query"), ("/rerank", Location("input"), "texts"),
        ("/similarity", Location("input", 0), "inputs.source_sentence"), ("/similarity", Location("input", 2), "inputs.sentences[1]"),
        ("/decode", Location("input", 1, 2), "ids[1][2]"), ("/predict", Location("input", 1, 0), "inputs[1][0]"),
    ):  # fmt: skip
        written = orjson.loads(by_path[path].render_error(InvalidRequest("is wrong.", location=location)))
        assert written == {"error": f"{expected}: is wrong.", "error_type": "Validation"}


# Writing


@given(vectors(3, 5))
def test_vectors_read_back(rows: np.ndarray) -> None:
    body = embed.parse_embed(encoded(inputs=["a", "bc", "d"])).body
    answer = embed.render_embed(body, result(dense=rows), model())
    assert same_bits(told(answer), rows)
    ragged = Ragged(rows, np.array([0, 1, 1, 3]))
    for name in ("multi_vector", "hidden"):
        texts = told(embed.render_embed_all(body, result(**{name: ragged}), model()))
        assert [len(text) for text in texts] == [1, 0, 2]
        assert same_bits([*texts[0], *texts[2]], rows)


@given(weights=arrays.arrays(np.float32, st.integers(0, 9), elements=EVERY_FLOAT), cut=st.integers(0, 9))
def test_entries_read_back(weights: np.ndarray, cut: int) -> None:
    ids = np.arange(weights.size, dtype=np.int32) * 1000
    offsets = np.array([0, min(cut, weights.size), weights.size])
    body = embed.parse_embed_sparse(encoded(inputs=["a", "b"])).body
    rows = told(embed.render_embed_sparse(body, result(sparse=Sparse(ids, weights, offsets)), model()))
    assert [[each["index"] for each in row] for row in rows] == [ids[: offsets[1]].tolist(), ids[offsets[1] :].tolist()]
    assert same_bits([each["value"] for row in rows for each in row], weights)


@given(vectors(4, 1))
def test_scores_read_back(logits: np.ndarray) -> None:
    body = scores.parse_rerank(encoded(query="q", texts=["a", "b", "c", "d"], raw_scores=True)).body
    ranked = told(scores.render_rerank(body, result(scores=logits), model(scores=Output(1))))
    assert same_bits([each["score"] for each in sorted(ranked, key=lambda each: each["index"])], logits)
    assert [each["score"] for each in ranked] == sorted((each["score"] for each in ranked), reverse=True)
    body = scores.parse_predict(encoded(inputs=[["a"]] * 4, raw_scores=True)).body
    assert same_bits(
        [row[0]["score"] for row in told(scores.render_predict(body, result(scores=logits), model(scores=Output(1))))], logits
    )


def test_headers_are_whole_milliseconds() -> None:
    body = embed.parse_embed(encoded(inputs=["a", "bcd"])).body
    answer = embed.render_embed(body, result(dense=np.ones((2, 3), np.float32)), model())
    assert answer.headers == {
        "x-compute-type": "cpu",
        "x-compute-time": "40",
        "x-compute-characters": "4",
        "x-compute-tokens": "7",
        "x-total-time": "40",
        "x-tokenization-time": "1",
        "x-queue-time": "2",
        "x-inference-time": "30",
    }
    on_gpu = model()
    on_gpu.plan.device = "cuda:0"
    assert (
        embed.render_embed(body, result(dense=np.ones((2, 3), np.float32)), on_gpu).headers["x-compute-type"] == "gpu+optimized"
    )


def test_characters_of_ids_and_of_pairs() -> None:
    assert embed.count_characters([101, 102]) == 2
    assert embed.count_characters([["ab", "c"], ["d", ""]]) == 4


def test_the_best_come_first_and_equal_ones_as_they_came() -> None:
    body = scores.parse_rerank(encoded(query="q", texts=["a", "b", "c"], return_text=True, raw_scores=True)).body
    logits = np.array([[0.5], [2], [0.5]], np.float32)
    ranked = told(scores.render_rerank(body, result(scores=logits), model(scores=Output(1))))
    assert ranked == [
        {"index": 1, "score": 2.0, "text": "b"},
        {"index": 0, "score": 0.5, "text": "a"},
        {"index": 2, "score": 0.5, "text": "c"},
    ]
    bare = scores.parse_rerank(encoded(query="q", texts=["a", "b", "c"])).body
    ranked = told(scores.render_rerank(bare, result(scores=logits), model(scores=Output(1, activation="sigmoid"))))
    assert ranked[0] == {"index": 1, "score": 2.0}, "the model has applied it"
    similarities = told(scores.render_rerank(bare, result(scores=logits), model(dense=Output(4))))
    assert similarities[0] == {"index": 1, "score": 2.0}


def test_where_the_checkpoint_has_no_activation_there_is_that_of_tei() -> None:
    identity = model(scores=Output(1))
    parsed = scores.parse_rerank(encoded(query="q", texts=["a", "b", "c"]))
    body, request = parsed.body, parsed.request
    assert request(identity).activate is False
    logits = np.array([[0.5], [-200], [200]], np.float32)
    found = {each["index"]: each["score"] for each in told(scores.render_rerank(body, result(scores=logits), identity))}
    np.testing.assert_allclose([found[i] for i in range(3)], [0.62245935, 0, 1], rtol=1e-6)
    body = scores.parse_predict(encoded(inputs="a")).body
    logits = np.array([[1, 2, 300]], np.float32)
    found = told(scores.render_predict(body, result(scores=logits), model(scores=Output(3))))
    assert [each["label"] for each in found] == ["LABEL_2", "LABEL_1", "LABEL_0"]
    assert sum(each["score"] for each in found) == 1


@pytest.mark.parametrize("function", ["sigmoid", "softmax", "none", None])
@pytest.mark.parametrize("inputs", ["a", [["a"]]])
def test_parameters_of_the_client(function: str | None, inputs: Any) -> None:
    body = encoded(inputs=inputs, parameters={"function_to_apply": function, "top_k": 2})
    parsed = scores.parse_predict(body)
    sent, request = parsed.body, parsed.request
    classifier = model(scores=Output(3, activation="softmax"))
    assert request(classifier).activate == (function is None)
    logits = np.array([[1, 3, 2]], np.float32)
    ((first, second),) = told(scores.render_predict(sent, result(scores=logits), classifier))
    assert (first["label"], second["label"]) == ("LABEL_1", "LABEL_2")
    expected = {"sigmoid": 0.95257413, "softmax": 0.66524094, "none": 3, None: 3}[function]
    assert first["score"] == pytest.approx(expected)


def test_tokens_are_pieces_of_prompt_and_text() -> None:
    found = [
        TokenInfo(
            np.array([2, 5, 6]),
            ("[CLS]", "find", "##ü"),
            np.array([True, False, False]),
            np.array([[0, 0], [0, 4], [6, 7]], np.int32),
        )
    ]
    body = tokens.parse_tokenize(encoded(inputs="ü", prompt_name="q")).body
    assert orjson.loads(tokens.render_tokens(body, found, model())) == [
        [
            {"id": 2, "text": "[CLS]", "special": True, "start": None, "stop": None},
            {"id": 5, "text": "find", "special": False, "start": 0, "stop": 4},
            {"id": 6, "text": "ü", "special": False, "start": 6, "stop": 7},
        ]
    ]


def test_all_are_in_the_description() -> None:
    paths = {
        "/",
        "/invocations",
        "/embed",
        "/embed_all",
        "/embed_sparse",
        "/rerank",
        "/predict",
        "/similarity",
        "/tokenize",
        "/decode",
        "/vertex",
        "/embeddings",
    }
    assert paths <= openapi_document()["paths"].keys()
    assert paths == {route.path for route in ROUTES}


# Through the app


def ask(engine: Engine, path: str, **body: Any) -> Answer:
    app = create_app(ModelRegistry(AsyncEngine(engine)))
    return asyncio.run(call(app, "POST", path, body=encoded(**body), headers=JSON))


def answer(engine: Engine, path: str, **body: Any) -> Any:
    found = ask(engine, path, **body)
    assert found.status == 200, found.body
    return orjson.loads(found.body)


def test_dense(engine32: Engine) -> None:
    expected = engine32.embed(TEXTS)
    for path in ("/embed", "/", "/invocations"):
        assert np.array_equal(np.array(answer(engine32, path, inputs=TEXTS), np.float32), expected)
    raw = engine32.embed(TEXTS, normalize=False)
    assert np.array_equal(np.array(answer(engine32, "/embed", inputs=TEXTS, normalize=False), np.float32), raw)
    tokenised = answer(engine32, "/tokenize", inputs=TEXTS)
    ids = [[token["id"] for token in row] for row in tokenised]
    assert np.array_equal(np.array(answer(engine32, "/embed", inputs=ids), np.float32), expected)
    assert np.array_equal(np.array(answer(engine32, "/embed", inputs=ids[0]), np.float32), expected[:1])
    assert [token["text"] for token in tokenised[0]] == ["[CLS]", "a", "sandwich", "[SEP]"]
    assert answer(engine32, "/decode", ids=ids) == [text.lower() for text in TEXTS]
    bare = answer(engine32, "/tokenize", inputs=TEXTS[0], add_special_tokens=False)
    assert [token["id"] for token in bare[0]] == ids[0][1:-1]
    similarities = np.array(answer(engine32, "/similarity", inputs={"source_sentence": QUERY, "sentences": TEXTS}), np.float32)
    vectors = engine32.embed([QUERY, *TEXTS])
    assert np.array_equal(similarities, (vectors[1:] * vectors[0]).sum(axis=1))
    alone = [answer(engine32, "/similarity", inputs={"source_sentence": QUERY, "sentences": [text]})[0] for text in TEXTS]
    assert np.array_equal(similarities, np.array(alone, np.float32))
    ranked = answer(engine32, "/rerank", query=QUERY, texts=TEXTS)
    assert [(each["index"], np.float32(each["score"])) for each in ranked] == [
        (each.index, each.score) for each in engine32.rerank(QUERY, TEXTS)
    ]


def test_a_text_that_is_too_long_is_cut_unless_that_is_forbidden(engine32: Engine) -> None:
    long = "far " * 400 + "away"
    for direction in ("right", "left"):
        found = answer(engine32, "/embed", inputs=long, truncation_direction=direction)
        assert np.array_equal(np.array(found[0], np.float32), engine32.embed(long, truncate=direction))
    refused = ask(engine32, "/embed", inputs=[TEXTS[0], long], truncate=False)
    assert refused.status == 422
    assert orjson.loads(refused.body)["error"].startswith(
        "inputs[1]: the text has 403 tokens; the limit is 256. Pass truncate: true"
    )


def test_what_a_model_does_not_give(engine32: Engine) -> None:
    for path in ("/embed_sparse", "/predict"):
        refused = ask(engine32, path, inputs="a")
        assert (refused.status, orjson.loads(refused.body)["error_type"]) == (424, "Backend")
    refused = ask(engine32, "/predict", inputs=["a", "b"])
    assert (refused.status, orjson.loads(refused.body)["error"]) == (
        424,
        "this model gives no 'scores'; it gives: dense, hidden, token_dense.",
    )
    refused = ask(engine32, "/embed", inputs="a", prompt_name="query")
    assert (refused.status, orjson.loads(refused.body)["error"]) == (
        422,
        "prompt_name: no prompt 'query'; this model's prompts: none.",
    )
    refused = ask(engine32, "/embed", inputs="a", dimensions=10_000)
    assert (refused.status, orjson.loads(refused.body)["error"].partition(":")[0]) == (422, "dimensions")


def test_sparse_and_token_vectors(tmp_path: Path) -> None:
    write_m3(tmp_path)
    with Engine(str(tmp_path), dtype="float32") as engine:
        for row, (ids, weights) in zip(answer(engine, "/embed_sparse", inputs=TEXTS), engine.sparse(TEXTS), strict=True):
            assert [each["index"] for each in row] == ids.tolist()
            assert np.array_equal(np.array([each["value"] for each in row], np.float32), weights)
        for rows, expected in zip(answer(engine, "/embed_all", inputs=TEXTS), engine.multi_vector(TEXTS), strict=True):
            assert np.array_equal(np.array(rows, np.float32), expected)


def test_late_interaction(tmp_path: Path) -> None:
    write_stanford(tmp_path)
    with Engine(str(tmp_path), dtype="float32") as engine:
        for path in ("/embed_all", "/"):
            for side in ("document", None):
                rows = answer(engine, path, inputs=TEXTS[1], input_type=side)
                assert np.array_equal(np.array(rows[0], np.float32), engine.multi_vector(TEXTS[1], input_type="document")[0])
        assert describe([AsyncEngine(engine)])["model_type"] == {"embedding": {"pooling": "multi_vector"}}


def test_a_reranker(tmp_path: Path) -> None:
    write_classifier(tmp_path, "bert", num_labels=1)
    with Engine(str(tmp_path), dtype="float32") as engine:
        for path in ("/rerank", "/"):
            for raw in (False, True):
                ranked = answer(engine, path, query=QUERY, texts=TEXTS, raw_scores=raw)
                assert [(each["index"], np.float32(each["score"])) for each in ranked] == [
                    (each.index, each.score) for each in engine.rerank(QUERY, TEXTS, activate=not raw)
                ]
        (only,) = answer(engine, "/predict", inputs=[QUERY, TEXTS[0]])
        assert only == {"score": pytest.approx(float(engine.score(QUERY, TEXTS[0])[0]), rel=1e-6), "label": "LABEL_0"}
        assert describe([AsyncEngine(engine)])["model_type"]["reranker"]["label2id"] == {"LABEL_0": 0}


# Several at once


def instances(*each: Any) -> bytes:
    return encoded(instances=list(each))


@pytest.mark.parametrize("kind", ["dense", "ranker", "classifier", "sparse", "late"])
def test_instances_are_answered_as_each_alone(kind: str, tmp_path: Path) -> None:
    batches: list[Any] = [TEXTS[0], TEXTS, [QUERY]]
    bodies = [{"inputs": each} for each in batches]
    if kind == "dense":
        write_m3(tmp_path)
        bodies.append({"inputs": {"source_sentence": QUERY, "sentences": TEXTS}})
    elif kind == "sparse":
        write_splade(tmp_path)
    elif kind == "late":
        write_stanford(tmp_path)
        bodies = [body | {"input_type": "document"} for body in bodies]
    else:
        write_classifier(tmp_path, "bert", num_labels=1 if kind == "ranker" else 3)
        bodies = [{"inputs": each} for each in (TEXTS[0], [[TEXTS[1]], [QUERY]])]
    with Engine(str(tmp_path), dtype="float32", pooling="splade" if kind == "sparse" else None) as engine:
        found = answer(engine, "/vertex", instances=bodies)
        assert list(found) == ["predictions"]
        assert found["predictions"] == [answer(engine, "/", **body) for body in bodies]
        if kind in ("dense", "ranker"):
            bodies = [{"query": QUERY, "texts": TEXTS, "return_text": True}, {"query": TEXTS[0], "texts": [QUERY]}]
            found = answer(engine, "/vertex", instances=bodies)["predictions"]
            assert found == [answer(engine, "/rerank", **body) for body in bodies]


def test_instances_of_no_texts_and_of_many(engine32: Engine) -> None:
    assert answer(engine32, "/vertex", instances=[]) == {"predictions": []}
    many = [{"inputs": f"bird {i}"} for i in range(256)]
    rows = np.array([row for (row,) in answer(engine32, "/vertex", instances=many)["predictions"]], np.float32)
    assert np.array_equal(rows, engine32.embed([each["inputs"] for each in many]))


def test_large_instances_come_in_pieces(engine32: Engine) -> None:
    found = ask(engine32, "/vertex", instances=[{"inputs": TEXTS * 150}, {"inputs": QUERY}])
    assert len(found.pieces) > 8
    assert orjson.loads(found.body)["predictions"] == [answer(engine32, "/", inputs=each) for each in (TEXTS * 150, QUERY)]


def test_instances_that_are_refused(engine32: Engine) -> None:
    one = {"inputs": "a"}
    for body, status, kind, where in (
        (instances(one, {"inputs": ["a", 3, []]}), 422, "Validation", "instances[1].inputs[1]: "),
        (instances(one, {"inputs": 3}), 422, "Validation", "instances[1].inputs: "),
        (instances(3), 422, "Validation", "instances[0]: "),
        (instances({"inputs": []}), 400, "Empty", "instances[0].inputs: "),
        (instances(one, {"query": "a", "texts": []}), 400, "Empty", "instances[1].texts: "),
        (instances(one, {"inputs": "a", "normalize": False}), 422, "Validation", "instances[1]: "),
        (instances(one, {"query": "a", "texts": ["b"]}), 422, "Validation", "instances[1]: "),
        (instances(one, {"inputs": [101, 102]}), 422, "Validation", "instances (input 1 of all): "),
        (instances(*[one] * 257), 422, "Validation", "instances: 257; the limit is 256"),
        (instances(*[{"inputs": ["a"] * 1500}] * 2), 422, "Validation", "instances: 3,000 inputs in all"),
        (encoded(instances="a"), 422, "Validation", "instances: "),
        (encoded(instances=[one], model="nobody"), 404, "Validation", "model: "),
    ):
        app = create_app(ModelRegistry(AsyncEngine(engine32)))
        told = asyncio.run(call(app, "POST", "/vertex", body=body, headers=JSON))
        error = orjson.loads(told.body)
        assert (told.status, error["error_type"]) == (status, kind), error
        assert error["error"].startswith(where), error


@given(rows=vectors(4, 3), counts=st.lists(st.integers(1, 3), min_size=1, max_size=4).filter(lambda counts: sum(counts) <= 4))
def test_instances_read_back(rows: np.ndarray, counts: list[int]) -> None:
    bodies = [{"inputs": ["a"] * count} for count in counts]
    parsed = root.parse_vertex(instances(*bodies))
    body, request = parsed.body, parsed.request
    assert request is not None
    for name, outputs in (
        ("dense", {"dense": rows[: sum(counts)]}),
        ("multi_vector", {"multi_vector": Ragged(rows, np.array([*range(sum(counts)), 4]))}),
    ):
        kind = model(**{name: Output(3)})
        assert len(request(kind).texts) == sum(counts)
        predictions = orjson.loads(cast(bytes, root.render_vertex(body, result(**outputs), kind)))["predictions"]
        assert [len(each) for each in predictions] == counts
        found = [row for each in predictions for row in each]
        if name == "multi_vector":
            found = [row for each in found for row in each]
        assert same_bits(found, rows[: len(found)])


def test_bodies_that_are_none_and_what_comes_before_them() -> None:
    app = create_app(
        ModelRegistry(cast(Any, FakeEmbedder())), guards=ServerLimits(api_keys=("a-s3cret-key-of-ours",), max_body_bytes=1000)
    )
    draining = ModelRegistry(cast(Any, FakeEmbedder()))
    draining.draining = True
    key = JSON | {"authorization": "Bearer a-s3cret-key-of-ours"}
    for path in ("/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/decode", "/", "/vertex"):
        told = asyncio.run(call(app, "POST", path, body=b"{}", headers=JSON))
        assert (told.status, told.body) == (401, b"")
        for body, status, kind in (
            (b"", 400, "Validation"),
            (b"{", 400, "Validation"),
            (b"[]", 422, "Validation"),
            (b" " * 1001, 413, "Validation"),
        ):
            told = asyncio.run(call(app, "POST", path, body=body, headers=key))
            assert (told.status, orjson.loads(told.body)["error_type"]) == (status, kind)
        told = asyncio.run(call(app, "POST", path, body=b"{}", headers=key | {"content_type": "text/plain"}))
        assert (told.status, orjson.loads(told.body)["error_type"]) == (415, "Validation")
        told = asyncio.run(call(create_app(draining), "POST", path, body=b"{}", headers=JSON))
        assert (told.status, orjson.loads(told.body)["error_type"]) == (503, "Unhealthy")
    assert asyncio.run(call(app, "GET", "/ping")).status == 200
    assert asyncio.run(call(app, "GET", "/")).status == 200  # open, for the page there
    assert asyncio.run(call(app, "GET", "/info")).status == 401


# Through the client


@pytest.fixture
def exchanges() -> Iterator[Exchanges]:
    """Exchanges of InferenceClient."""
    exchanges = Exchanges()
    huggingface_hub.set_client_factory(lambda: httpx2.Client(event_hooks={"response": [exchanges.hook]}, timeout=60))
    yield exchanges
    huggingface_hub.close_session()
    huggingface_hub.set_client_factory(httpx2.Client)


def test_inference_client(exchanges: Exchanges, server32: Server, engine32: Engine) -> None:
    client = InferenceClient(base_url=server32.url)
    assert np.array_equal(client.feature_extraction(TEXTS), engine32.embed(TEXTS))
    raw = client.feature_extraction(QUERY, normalize=False, truncate=True, truncation_direction="left")
    assert np.array_equal(raw[0], engine32.embed(QUERY, normalize=False))
    vectors = engine32.embed([QUERY, *TEXTS])
    found = np.array(client.sentence_similarity(QUERY, TEXTS), np.float32)
    assert np.array_equal(found, (vectors[1:] * vectors[0]).sum(axis=1))
    at_route = InferenceClient(model=f"{server32.url}/embed")
    assert np.array_equal(at_route.feature_extraction(QUERY), vectors[:1])
    with pytest.raises(HfHubHTTPError, match="prompt_name: no prompt 'query'"):
        client.feature_extraction(QUERY, prompt_name="query")
    with pytest.raises(HfHubHTTPError, match="the limit is 256"):
        client.feature_extraction("far " * 300, truncate=False)
    exchanges.check("tei/embedding")
    info = httpx2.get(f"{server32.url}/info").json()
    assert info["models"][0]["plan"]["served_name"] == info["served_model_name"] == info["model_id"]
    assert (info["model_dtype"], info["max_input_length"], info["auto_truncate"]) == ("float32", 256, True)
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert httpx2.get(server32.url).status_code == httpx2.get(f"{server32.url}/ping").status_code == 200


@pytest.mark.extended
def test_inference_client_and_a_classifier(exchanges: Exchanges, tmp_path: Path) -> None:
    write_classifier(tmp_path, "bert", num_labels=3, id2label={0: "bird", 1: "sandwich", 2: "other"})
    with (
        Engine(str(tmp_path), dtype="float32") as engine,
        Server(str(tmp_path), "--dtype", "float32", "--served-name", "classes") as server,
    ):
        for url in (server.url, f"{server.url}/predict"):
            client = InferenceClient(base_url=url)
            found = engine.classify(TEXTS[:1])
            expected = sorted(zip(found.scores_NC[0].tolist(), found.labels, strict=True), reverse=True)
            assert [(np.float32(each.score), each.label) for each in client.text_classification(TEXTS[0])] == expected
            best = client.text_classification(TEXTS[0], top_k=1)
            assert [each.label for each in best] == found.best
            raw = client.text_classification(TEXTS[0], function_to_apply="none")
            logits = engine.classify(TEXTS[:1], activate=False).scores_NC[0]
            assert [np.float32(each.score) for each in raw] == sorted(logits, reverse=True)
        exchanges.check("tei/classification")
        batch = httpx2.post(f"{server.url}/predict", json={"inputs": [[text] for text in TEXTS]}).json()
        assert [each[0]["label"] for each in batch] == engine.classify(TEXTS).best
        info = httpx2.get(f"{server.url}/info").json()
        assert info["model_type"]["classifier"]["id2label"] == {"0": "bird", "1": "sandwich", "2": "other"}
