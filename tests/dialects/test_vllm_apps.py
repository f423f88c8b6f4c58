"""vLLM's routes: apps over every kind of model, and the shape of every error."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any, cast

import httpx2
import numpy as np
import orjson
import pyarrow
import pytest
import torch

from asgi import call
from checkpoints.classifiers import two_layers, write_classifier
from checkpoints.files import edit_json
from fake_embedder import FakeEmbedder
from serving import Server
from vectors import TORCH_DTYPES
from vllm_apps import DOCUMENTS, QUERY, TEXTS, Asker, check, column
from whimbrel import AsyncEngine, Engine, __version__
from whimbrel.errors import InvalidRequest
from whimbrel.server.app.app import create_app
from whimbrel.server.app.routing import AsyncEmbedder, ModelRegistry
from whimbrel.types.request import Request


def test_vectors(minilm_app: Asker, engine: Engine) -> None:
    expected = engine.embed(TEXTS)
    answer = minilm_app.ask("/pooling", {"input": TEXTS, "task": "embed"})
    assert np.array_equal(column(answer), expected)
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(i, "pooling") for i in range(3)]
    assert answer["usage"]["prompt_tokens"] == engine.run(Request(TEXTS)).num_tokens
    assert np.array_equal(column(minilm_app.ask("/pooling", {"input": TEXTS})), expected)
    free = minilm_app.ask("/v1/embeddings", {"input": TEXTS, "use_activation": False, "request_id": "r"})
    assert np.array_equal(column(free, "embedding"), engine.embed(TEXTS, normalize=False))
    assert free["id"] == "embd-r"
    assert free["created"] > 1.7e9
    for dtype, torch_type in TORCH_DTYPES.items():
        body = {"input": TEXTS, "encoding_format": "base64", "embed_dtype": dtype, "endianness": "little"}
        texts = [each["embedding"] for each in minilm_app.ask("/v1/embeddings", body)["data"]]
        found = [torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch_type) for text in texts]
        assert torch.equal(torch.stack(found).to(torch.float32), torch.from_numpy(expected).to(torch_type).to(torch.float32))
    told = minilm_app.told("/pooling", {"input": TEXTS, "encoding_format": "bytes"})
    assert told.headers["content-type"] == "application/octet-stream"
    assert np.array_equal(np.frombuffer(told.body, np.float32).reshape(3, -1), expected)
    assert [each["end"] - each["start"] for each in json.loads(told.headers["metadata"])["data"]] == [1536] * 3


def test_classes(classifier: Engine) -> None:
    app = Asker(classifier)
    for options in ({}, {"use_activation": False}):
        found = classifier.classify(TEXTS, **({"activate": False} if options else {}))
        answer = app.ask("/classify", {"input": TEXTS} | options)
        assert [each["label"] for each in answer["data"]] == found.best
        assert {each["label"] for each in answer["data"]} <= {"sad", "glad", "neither"}
        assert np.array_equal(column(answer, "probs"), found.scores_NC)
        assert {each["num_classes"] for each in answer["data"]} == {3}
        for task in ({"task": "classify"}, {}):
            assert np.array_equal(column(app.ask("/pooling", {"input": TEXTS} | task | options)), found.scores_NC)
    long = {"input": "far away " * 100}
    refused = app.told("/classify", long)
    assert (refused.status, orjson.loads(refused.body)["error"]["param"]) == (400, "input[0]")
    cut = app.ask("/classify", long | {"truncate_prompt_tokens": 9, "truncation_side": "left"})
    assert np.array_equal(
        column(cut, "probs"),
        classifier.run(Request(["far away " * 100], ("scores",), truncate="left", max_tokens=9)).outputs.scores,
    )  # pyright: ignore


def test_tokens_that_are_classified(tagger: Engine) -> None:
    app = Asker(tagger)
    for options in ({}, {"use_activation": False}):
        expected = tagger.run(Request(TEXTS, ("token_scores",), activate=False if options else None)).outputs.token_scores
        assert expected is not None
        for task in ({"task": "token_classify"}, {}):
            found = column(app.ask("/pooling", {"input": TEXTS} | task | options))
            assert all(map(np.array_equal, found, expected))


def test_scores_of_tokens_of_a_classifier_of_texts(classifier: Engine) -> None:
    """The task `token_classify` asks for them; without a task the route gives the classes of texts."""
    app = Asker(classifier)
    expected = classifier.run(Request(TEXTS, ("token_scores",))).outputs.token_scores
    assert expected is not None
    found = column(app.ask("/pooling", {"input": TEXTS, "task": "token_classify"}))
    assert all(map(np.array_equal, found, expected))
    assert column(app.ask("/pooling", {"input": TEXTS}))[0].shape == (3,)
    refused = app.told("/v1/token_classify", {"input": TEXTS})
    assert refused.status == 400
    assert b"gives no 'token_scores'; it gives: scores" in refused.body


def test_weights_of_tokens(m3: Engine) -> None:
    """A number for each token, in every format."""
    app = Asker(m3)
    expected = m3.run(Request(TEXTS, ("token_scores",))).outputs.token_scores
    assert expected is not None
    body = {"input": TEXTS, "task": "token_classify"}
    assert all(np.array_equal(a, b[:, 0]) for a, b in zip(column(app.ask("/pooling", body)), expected, strict=True))
    texts = app.ask("/pooling", body | {"encoding_format": "base64"})["data"]
    assert np.array_equal(np.frombuffer(base64.b64decode(texts[0]["data"]), np.float32), expected[0][:, 0])
    told = app.told("/pooling", body | {"encoding_format": "bytes"})
    assert np.array_equal(np.frombuffer(told.body, np.float32), expected.rows_XD[:, 0])
    assert [each["shape"] for each in json.loads(told.headers["metadata"])["data"]] == [[len(each)] for each in expected]


def test_vectors_of_tokens_at_embeddings(late: Engine, engine: Engine, m3: Engine) -> None:
    """A model without other vectors gives them, of documents if no side is stated."""
    app = Asker(late)
    for input_type, side in ((None, "document"), ("query", "query"), ("passage", "document")):
        expected = late.multi_vector(TEXTS, input_type=side)  # pyright: ignore[reportArgumentType]
        found = column(app.ask("/v1/embeddings", {"input": TEXTS, "input_type": input_type}), "embedding")
        assert all(map(np.array_equal, found, expected))
    refused = app.told("/v1/embeddings", {"input": TEXTS, "encoding_format": "npy"})
    assert (refused.status, orjson.loads(refused.body)["error"]["param"]) == (400, "encoding_format")
    assert column(Asker(m3).ask("/v1/embeddings", {"input": TEXTS}), "embedding")[0].ndim == 1
    assert column(Asker(engine).ask("/v1/embeddings", {"input": TEXTS}), "embedding")[0].ndim == 1


@pytest.mark.parametrize(("dtype", "order"), [(None, None), ("float16", "big")])
def test_bytes_of_token_vectors_at_embeddings(late: Engine, dtype: str | None, order: str | None) -> None:
    """The rows of a text are one string in base64, row after row, and one piece of bytes."""
    app, expected = Asker(late), late.multi_vector(TEXTS, input_type="document")
    kind = np.dtype(dtype or "float32").newbyteorder(">" if order == "big" else "<")
    body = {"input": TEXTS, "embed_dtype": dtype, "endianness": order}
    texts = [each["embedding"] for each in app.ask("/v1/embeddings", body | {"encoding_format": "base64"})["data"]]
    wanted = [rows_TD.astype(kind).tobytes() for rows_TD in expected]
    assert [base64.b64decode(text) for text in texts] == wanted
    assert texts == [each["data"] for each in app.ask("/pooling", body | {"encoding_format": "base64"})["data"]]
    for encoding_format in ("bytes", "bytes_only"):
        answer = app.told("/v1/embeddings", body | {"encoding_format": encoding_format})
        assert answer.body == b"".join(wanted)
        if encoding_format == "bytes":
            blocks = orjson.loads(answer.headers["metadata"])["data"]
            assert [each["shape"] for each in blocks] == [list(rows_TD.shape) for rows_TD in expected]
            assert [answer.body[each["start"] : each["end"]] for each in blocks] == wanted
    arrow = app.told("/v1/embeddings", {"input": TEXTS, "encoding_format": "arrow"})
    rows = pyarrow.ipc.open_stream(arrow.body).read_all()["multi_vector"].to_pylist()
    assert all(map(np.array_equal, map(np.array, rows), expected))


@pytest.mark.parametrize("size", [1, 4, 2**63 - 1])
def test_late_chunking_by_length(size: int, minilm_app: Asker, engine: Engine) -> None:
    """The vectors of a text's chunks, and the tokens and characters that they are of."""
    texts = ["The whimbrel 🙂 is a wader.", "a"]
    answer = minilm_app.ask("/v1/embeddings", {"input": texts, "late_chunking_params": {"chunk_size": size}})
    expected = engine.run(Request(texts, ("dense",), chunk_tokens=size))
    assert np.array_equal(np.concatenate(column(answer, "embedding")), expected.dense)
    assert answer["usage"]["prompt_tokens"] == expected.num_tokens
    for text, each in zip(texts, answer["data"], strict=True):
        about, (tokens,) = each["late_chunking"], minilm_app.ask("/tokenize", {"inputs": text})
        assert (about["strategy"], about["chunk_size"], about["input_tokens"]) == ("fixed_tokens", size, len(tokens))
        assert len(about["chunks"]) == len(each["embedding"])
        for chunk in about["chunks"]:
            first, end = chunk["token_range"]
            own = [token for token in tokens[first:end] if not token["special"]]
            assert chunk["char_range"] == ([own[0]["start"], own[-1]["stop"]] if own else None)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"late_chunking_params": {}}, "late_chunking_params.chunk_size"),
        ({"late_chunking_params": {"chunk_size": 0}}, "late_chunking_params.chunk_size"),
        ({"late_chunking_params": {"chunk_size": 2**63}}, "late_chunking_params.chunk_size"),
        ({"late_chunking_params": {"chunk_size": True}}, "late_chunking_params.chunk_size"),
        ({"late_chunking_params": {"chunk_size": 4, "overlap": 2}}, "late_chunking_params"),
        ({"encoding_format": "base64"}, "encoding_format"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"truncate": "left"}, "truncate_prompt_tokens"),
        ({"late_chunking": True}, "late_chunking"),
        ({"input": ""}, "input[0]"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[101, 102]]}, "input"),
        ({"input": ["a", "far away " * 300]}, "input[1]"),
        ({"add_special_tokens": False}, "add_special_tokens"),
    ],
)
def test_late_chunking_by_length_that_is_refused(more: dict[str, Any], param: str, minilm_app: Asker) -> None:
    told = minilm_app.told("/v1/embeddings", {"input": "a", "late_chunking_params": {"chunk_size": 4}} | more)
    assert (told.status, orjson.loads(told.body)["error"]["param"]) == (400, param)


def test_texts_without_special_tokens(minilm_app: Asker, engine: Engine, late: Engine, ranker: Engine) -> None:
    expected = engine.run(Request(TEXTS[:2], add_special_tokens=False)).dense
    for path, name in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
        found = column(minilm_app.ask(path, {"input": TEXTS[:2], "add_special_tokens": False}), name)
        assert np.array_equal(found, expected)
    assert not np.allclose(expected, engine.embed(TEXTS[:2]), atol=1e-3)
    error = check(Asker(late).told("/pooling", {"input": "a", "add_special_tokens": False}), 400, "BadRequestError")
    assert error["param"] == "add_special_tokens"
    with pytest.raises(InvalidRequest, match="stand between the two texts"):
        ranker.run(Request([("a", "b")], add_special_tokens=False))


def test_tokenizer_info(minilm_app: Asker, late: Engine, engine: Engine) -> None:
    told = minilm_app.ask("/tokenizer_info")
    assert (told["tokenizer_class"], told["model_max_length"], told["cls_token"]) == ("BertTokenizer", 256, "[CLS]")
    both = ModelRegistry(*(cast(AsyncEmbedder, AsyncEngine(each)) for each in (late, engine)))
    check(asyncio.run(call(create_app(both), "GET", "/tokenizer_info")), 400, "BadRequestError")


def test_load_counts_requests_in_progress() -> None:
    embedder = FakeEmbedder()

    async def loads() -> list[int]:
        app = create_app(ModelRegistry(cast(AsyncEmbedder, embedder)))

        async def load() -> int:
            return orjson.loads((await call(app, "GET", "/load")).body)["server_load"]

        embedder.go.clear()
        body = {"body": b'{"input": "a"}', "headers": {"content_type": "application/json"}}
        tasks = [asyncio.create_task(call(app, "POST", "/v1/embeddings", **body)) for _ in range(3)]
        while len(embedder.requests) < 3:
            await asyncio.sleep(0.01)
        during = await load()
        embedder.go.set()
        await asyncio.gather(*tasks)
        return [during, await load()]

    assert asyncio.run(loads()) == [3, 0]


def test_vectors_of_tokens(late: Engine) -> None:
    app = Asker(late)
    for input_type in ("query", "document"):
        body = {"input": TEXTS, "input_type": input_type}
        expected = late.multi_vector(TEXTS, input_type=input_type)  # pyright: ignore[reportArgumentType]
        assert all(map(np.array_equal, column(app.ask("/pooling", body | {"task": "token_embed"})), expected))
        text = app.ask("/pooling", body | {"encoding_format": "base64"})["data"][0]["data"]
        assert np.array_equal(np.frombuffer(base64.b64decode(text), np.float32), expected[0].reshape(-1))


@pytest.mark.parametrize("kind", ["engine", "late", "ranker"])
def test_pairs(kind: str, request: pytest.FixtureRequest) -> None:
    engine: Engine = request.getfixturevalue(kind)
    app = Asker(engine)
    expected = engine.score(QUERY, DOCUMENTS)
    for body in ({"text_1": QUERY, "text_2": DOCUMENTS}, {"data_1": [QUERY] * 3, "data_2": DOCUMENTS}):
        for path in ("/score", "/v1/score"):
            answer = app.ask(path, body)
            assert [np.float32(each["score"]) for each in answer["data"]] == expected.tolist()
            assert answer["id"].startswith("score-")
            assert answer["created"] > 1.7e9
    for path in ("/rerank", "/v1/rerank"):
        answer = app.ask(path, {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "request_id": "r"})
        assert answer["id"] == "rerank-r"
        assert [
            (each["index"], np.float32(each["relevance_score"]), each["document"]["text"]) for each in answer["results"]
        ] == [(each.index, each.score, DOCUMENTS[each.index]) for each in engine.rerank(QUERY, DOCUMENTS, top_n=2)]


def test_text_as_content_has_the_same_score(ranker: Engine) -> None:
    app = Asker(ranker)
    content = [{"content": [{"type": "text", "text": text}]} for text in DOCUMENTS]
    plain, parts = (app.ask("/rerank", {"query": QUERY, "documents": each})["results"] for each in (DOCUMENTS, content))
    assert plain == parts


def test_tokenize_and_back(minilm_app: Asker) -> None:
    told = minilm_app.ask("/tokenize", {"prompt": "A whimbrel", "return_token_strs": True})
    assert told["tokens"] == [101, 1037, 1059, 14341, 13578, 2140, 102]
    assert told["token_strs"] == ["[CLS]", "a", "w", "##him", "##bre", "##l", "[SEP]"]
    assert (told["count"], told["max_model_len"]) == (7, 256)
    bare = minilm_app.ask("/tokenize", {"prompt": "A whimbrel", "add_special_tokens": False})
    assert (bare["tokens"], bare["token_strs"]) == (told["tokens"][1:-1], None)
    assert minilm_app.ask("/detokenize", {"tokens": bare["tokens"]}) == {"prompt": "a whimbrel"}
    assert minilm_app.ask("/detokenize", {"tokens": []}) == {"prompt": ""}
    wrong = minilm_app.told("/detokenize", {"tokens": [5, 10**6]})
    assert (wrong.status, orjson.loads(wrong.body)["error"]["param"]) == (400, "tokens[1]")


def test_bytes_through_a_socket(server: Server, engine: Engine) -> None:
    expected = engine.embed(TEXTS)
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        body = {"input": TEXTS, "encoding_format": "bytes", "request_id": "é\r\nx: y"}
        answer = client.post("/pooling", json=body).raise_for_status()
        told = json.loads(answer.headers["metadata"])
        assert told["id"] == "pooling-é\r\nx: y"
        assert "x" not in answer.headers
        rows = [answer.content[each["start"] : each["end"]] for each in told["data"]]
        assert np.array_equal([np.frombuffer(row, np.float32) for row in rows], expected)
        only = client.post("/pooling", json=body | {"encoding_format": "bytes_only"}).raise_for_status()
        assert (only.content, "metadata" in only.headers) == (answer.content, False)
        assert (client.get("/ping").status_code, client.get("/version").json()) == (200, {"version": __version__})


def test_pages(minilm_app: Asker) -> None:
    assert minilm_app.ask("/version") == {"version": __version__}
    assert minilm_app.told("/ping").status == 200


PATHS = ("/pooling", "/classify", "/score", "/rerank", "/tokenize", "/detokenize")


WHOLE: dict[str, Any] = {
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [101]},
}


@pytest.mark.parametrize("path", PATHS)
def test_every_error_is_in_vllm_s_shape(path: str, minilm_app: Asker, engine: Engine) -> None:
    whole = WHOLE[path]
    field = next(iter(whole))
    wrong: list[tuple[Any, int, str]] = [
        (whole | {"model": "x"}, 404, "NotFoundError"),
        (whole | {"model": 3}, 400, "BadRequestError"),
        (whole | {field: 3}, 400, "BadRequestError"),
        (whole | {field: {}}, 400, "BadRequestError"),
    ]
    if path != "/tokenize":  # there these are answered as its other dialect does
        wrong += [(body, 400, "BadRequestError") for body in (b"", b"{", b"[]", b"\xff", b"{}", b"[" * 9999)]
    for body, status, kind in wrong:
        check(minilm_app.told(path, body), status, kind)
    closed = Asker(engine, api_keys=("k",))
    if path != "/tokenize":
        check(closed.told(path, whole), 401, "Unauthorized")
        check(minilm_app.told(path, whole, content_type="text/plain"), 400, "BadRequestError")


def test_errors_of_models_and_lengths(minilm_app: Asker) -> None:
    for path, body, param in (
        ("/classify", {"input": "a"}, "model"),
        ("/pooling", {"input": "a", "task": "token_classify"}, "task"),
        ("/pooling", {"input": "a", "use_activation": True, "task": "classify"}, "task"),
        ("/pooling", {"input": ["a", "far away " * 300]}, "input[1]"),
        ("/pooling", {"input": "a", "truncate_prompt_tokens": 10_000}, "truncate_prompt_tokens"),
        ("/pooling", {"input": [[101, 10**6]]}, "input[0][1]"),
        ("/score", {"queries": "a", "documents": ["far away " * 300]}, "documents[0]"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "far away " * 300, "documents": ["a"]}, "query"),
    ):
        assert check(minilm_app.told(path, body), 400, "BadRequestError")["param"] == param
    check(minilm_app.told("/pooling", {"input": ["a"] * 2049}), 413, "Request Entity Too Large")


def test_a_server_that_is_about_to_stop() -> None:
    served = ModelRegistry(cast(AsyncEmbedder, FakeEmbedder()))
    served.draining = True
    told = asyncio.run(
        call(create_app(served), "POST", "/pooling", body=b'{"input": "a"}', headers={"content_type": "application/json"})
    )
    check(told, 503, "Service Unavailable")
    assert told.headers["retry-after"]


def test_pooling_of_a_reward_model(tmp_path: Path) -> None:
    """Without a task it gives the reward of each token, as vLLM does."""
    write_classifier(tmp_path, "qwen2", num_labels=1, pad_token_id=None)
    two_layers(tmp_path, 1)
    code = {"AutoModel": "modeling_qwen2_rm.Qwen2ForRewardModel"}
    edit_json(tmp_path / "config.json", architectures=["Qwen2ForRewardModel"], auto_map=code, id2label=None, label2id=None)
    with Engine(str(tmp_path), dtype="float32") as engine:
        body = {"model": engine.plan.served_name, "input": "vLLM is great!"}
        tokens, same, text = (
            orjson.loads(Asker(engine).told("/pooling", body | more).body)["data"][0]["data"]
            for more in ({}, {"task": "token_classify"}, {"task": "classify"})
        )
    assert tokens == same
    assert len(tokens) > 1
    assert tokens[-1] == text
