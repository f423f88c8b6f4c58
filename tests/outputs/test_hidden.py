"""The tokens of models with dense vectors: hidden states against transformers', and what becomes of each token alone against the
modules of Sentence Transformers; through the engine, the routes that give them, processes and clients."""

from __future__ import annotations

import asyncio
import base64
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from asgi import Answer, call
from checkpoints.bge_m3 import write_m3
from checkpoints.classifiers import write_classifier
from checkpoints.encoders import write_bert
from checkpoints.families import DECODER, SIZES, write_model
from checkpoints.late_interaction import write_stanford
from checkpoints.router import write_router
from checkpoints.sentence_layout import sentence_layout
from checkpoints.sparse import write_splade
from checkpoints.static import write_static
from hidden_states import random_ids
from serving import Server
from whimbrel import AsyncEngine, Client, Engine
from whimbrel.engine.prepare import Preprocessor
from whimbrel.errors import InvalidRequest, TooLarge, TooLong
from whimbrel.server.app.app import create_app
from whimbrel.server.app.routing import AsyncEmbedder, ModelRegistry
from whimbrel.types.card import Card
from whimbrel.types.request import Request
from whimbrel.types.result import Ragged

TEXTS = ["", "a", "The whimbrel is a wader with a long curved bill.", "far away " * 40, "[SEP] it [CLS] flies"]
LONG = "far " * 400 + "away"
TANH = "torch.nn.modules.activation.Tanh"
IDENTITY = "torch.nn.modules.linear.Identity"


def hidden(engine: Engine, texts: Any, **options: Any) -> Ragged:
    found = engine.encode(texts, "hidden", **options).hidden
    assert found is not None
    return found


def token_dense(engine: Engine, texts: Any, **options: Any) -> Ragged:
    found = engine.encode(texts, "token_dense", **options).token_dense
    assert found is not None
    return found


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-5 * max(1.0, float(np.abs(expected).max()))


def assert_same(found: Any, expected: Ragged) -> None:
    """Bit for bit."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(np.asarray(one, np.float32).reshape(other.shape), other)


def normalized(rows_TD: np.ndarray) -> np.ndarray:
    return rows_TD / np.linalg.norm(rows_TD, axis=1, keepdims=True)


# The numbers


def test_hidden_states_are_transformers_(minilm: Path, engine32: Engine) -> None:
    model, tokenizer = AutoModel.from_pretrained(minilm).eval(), AutoTokenizer.from_pretrained(minilm)
    found, vectors = hidden(engine32, TEXTS), token_dense(engine32, TEXTS)
    with torch.inference_mode():
        for i, text in enumerate(TEXTS):
            expected = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()
            assert_close(found[i], expected)  # one for each token, special ones included
            assert_close(vectors[i], normalized(expected))


FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": DECODER,
    "Gemma2": DECODER | {"head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 12},
    "Albert": SIZES | {"embedding_size": 24},  # run by transformers
}


@pytest.mark.parametrize("family", FAMILIES)
def test_those_of_decoders_and_others(family: str, tmp_path: Path) -> None:
    reference = write_model(tmp_path, family, FAMILIES[family])
    sentence_layout(tmp_path, modes=("lasttoken",), heads=("Normalize",), max_seq_length=100)
    with torch.inference_mode(), Engine(str(tmp_path), dtype="float32") as engine:
        outputs = engine.run(Request(random_ids(), ("dense", "hidden", "token_dense"))).outputs
        assert outputs.hidden is not None
        assert outputs.token_dense is not None
        for i, ids in enumerate(random_ids()):
            expected = reference(torch.from_numpy(ids).long()[None]).last_hidden_state[0].numpy()
            assert_close(outputs.hidden[i], expected)
            assert_close(outputs.token_dense[i], normalized(expected))
            assert np.array_equal(outputs.token_dense[i][-1], outputs.dense[i])


HEADS: dict[str, tuple[Any, ...]] = {
    "no head": (),
    "normalised": ("Normalize",),
    "two layers": (("Dense", 20, TANH, {}), ("Dense", 32, IDENTITY, {"bias": False}), "Normalize"),
    "normalised before": ("Normalize", ("Dense", 20, TANH, {})),
    "a norm": ("LayerNorm", "Normalize"),
}


@pytest.mark.parametrize("heads", HEADS)
def test_layers_after_the_pooling(heads: str, tmp_path: Path) -> None:
    """`token_dense` passes the projector and normalisation, as in vLLM; `hidden` does not, as in TEI's /embed_all."""
    write_bert(tmp_path)
    sentence_layout(tmp_path, modes=("mean",), include_prompt=False, heads=HEADS[heads], prompts={"query": "query: birds "})
    modules = list(SentenceTransformer(str(tmp_path), device="cpu"))
    model, tokenizer = AutoModel.from_pretrained(tmp_path).eval(), AutoTokenizer.from_pretrained(tmp_path)
    with torch.inference_mode(), Engine(str(tmp_path), dtype="float32") as engine:
        for prompt, text in ((None, TEXTS[2]), ("query", "far")):
            found, raw = token_dense(engine, text, prompt=prompt)[0], hidden(engine, text, prompt=prompt)[0]
            inputs = tokenizer(("query: birds " if prompt else "") + text, truncation=True, max_length=40, return_tensors="pt")
            expected = model(**inputs).last_hidden_state[0]
            assert_close(raw, expected.numpy())
            features: Any = {"sentence_embedding": expected}
            for module in modules[2:]:
                features = module(features)
            assert_close(found, features["sentence_embedding"].numpy())
            bare = token_dense(engine, text, prompt=prompt, normalize=False)[0]
            assert_close(normalized(bare), normalized(found))
            assert_close(hidden(engine, text, prompt=prompt, normalize=True)[0], normalized(raw))


def test_several_poolings_leave_no_vectors_of_tokens(tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path, modes=("cls", "mean"), heads=(("Dense", 20, TANH, {}),))
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert hidden(engine, "a").rows_XD.shape[1] == 48
        with pytest.raises(InvalidRequest, match="gives no 'token_dense'; it gives: dense, hidden"):
            token_dense(engine, "a")


def test_queries_and_documents_that_go_different_ways(tmp_path: Path) -> None:
    """The models differ: one has 64 columns and a Dense, the other 48 columns and none."""
    write_router(tmp_path, "two models")
    with Engine(str(tmp_path / "model"), dtype="float32") as engine:
        for way, width in (("query", 64), ("document", 48)):
            options = {"input_type": way, "truncate": True}
            outputs = engine.encode(TEXTS, ("dense", "hidden", "token_dense"), **options)  # pyright: ignore
            assert outputs.hidden is not None
            assert outputs.token_dense is not None
            assert (outputs.hidden.rows_XD.shape[1], outputs.token_dense.rows_XD.shape[1]) == (width, 48)
            for i, vector in enumerate(cast(np.ndarray, outputs.dense)):
                rows_TD = outputs.token_dense[i]
                assert_close(vector, rows_TD[0] if way == "query" else rows_TD.mean(axis=0))
            assert_same(ask(engine, "/embed_all", inputs=TEXTS, input_type=way), outputs.hidden)
            told = ask(engine, "/pooling", input=TEXTS, task="token_embed", **options)["data"]
            assert_same([each["data"] for each in told], outputs.token_dense)


def test_tables_have_rows_of_their_own(tmp_path: Path) -> None:
    write_static(tmp_path)
    with Engine(str(tmp_path)) as engine:
        outputs = engine.encode("The whimbrel", ("dense", "hidden"), normalize=False)
        assert outputs.hidden is not None
        np.testing.assert_allclose(outputs.hidden[0].mean(axis=0), outputs.dense[0], atol=1e-6)  # pyright: ignore


# Batches


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.bfloat16)])
def test_ragged_equals_alone_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path, heads=(("Dense", 20, TANH, {}), "Normalize"))
    texts = [text * count for count in (1, 2, 5) for text in TEXTS[1:]]
    with Engine(str(tmp_path), dtype=dtype) as engine, ThreadPoolExecutor(8) as threads:
        alone = [engine.encode(text, ("hidden", "token_dense")) for text in texts]
        together = engine.encode(texts, ("hidden", "token_dense"))
        for name in ("hidden", "token_dense"):
            assert_same(getattr(together, name), cast(Ragged, [getattr(each, name)[0] for each in alone]))
        expected = [engine.embed(texts), hidden(engine, texts), token_dense(engine, texts, normalize=False)]
        asks = (engine.embed, hidden, lambda engine, texts: token_dense(engine, texts, normalize=False))
        for _ in range(5):  # in batches with one another
            running = [threads.submit(ask, *([] if ask == engine.embed else [engine]), texts) for ask in (*asks, *asks)]
            found = [each.result() for each in running]
            assert np.array_equal(found[0], expected[0])
            assert np.array_equal(found[3], expected[0])
            for i in (1, 2, 4, 5):
                assert_same(found[i], cast(Ragged, expected[i % 3]))


def test_they_do_not_change_what_they_come_with(engine: Engine) -> None:
    outputs = engine.encode(TEXTS, ("dense", "hidden", "token_dense"))
    assert np.array_equal(outputs.dense, engine.embed(TEXTS))  # pyright: ignore
    assert_same(outputs.hidden, hidden(engine, TEXTS))
    assert_same(outputs.token_dense, hidden(engine, TEXTS, normalize=True))


# Requests


def test_truncation_and_prompts(minilm: Path, engine32: Engine) -> None:
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    for side in ("right", "left"):
        tokenizer.truncation_side = side
        ids = tokenizer(LONG, truncation=True, max_length=256)["input_ids"]
        expected = engine32.run(Request([np.array(ids)], ("hidden",))).outputs.hidden
        assert_same(hidden(engine32, LONG, truncate=side), cast(Ragged, expected))
        assert len(hidden(engine32, LONG, truncate=side, max_tokens=9)[0]) == 9
    with pytest.raises(TooLong):
        hidden(engine32, LONG, truncate="never")
    assert_same(hidden(engine32, "birds", prompt="query: "), hidden(engine32, "query: birds"))  # those of the prompt too


def test_what_options_mean(engine32: Engine) -> None:
    for options in ({"late_chunking": True}, {"split_long": True}, {"token_pooling": 2}, {"max_active_dims": 3}):
        with pytest.raises(InvalidRequest) as caught:
            engine32.encode("a", "hidden", **options)  # pyright: ignore[reportArgumentType]
        assert caught.value.param == next(iter(options))
    for name in ("hidden", "token_dense"):
        with pytest.raises(InvalidRequest) as caught:
            engine32.encode("a", name, dimensions=64)
        assert caught.value.param == "dimensions"
    with pytest.raises(InvalidRequest, match="gives no 'multi_vector'; it gives: dense, hidden, token_dense"):
        engine32.multi_vector("a")
    for verb in (engine32.score, engine32.rerank):
        with pytest.raises(InvalidRequest):
            verb("a", ["b"], score_by="multi_vector")
        with pytest.raises(InvalidRequest):
            verb("a", ["b"], score_by="hidden")


def test_cut_as_dense_vectors_are(minilm: Path) -> None:
    with Engine(str(minilm), dtype="float32", matryoshka=True) as engine:
        whole = token_dense(engine, TEXTS, normalize=False)
        for i, found in enumerate(token_dense(engine, TEXTS, dimensions=64)):
            assert_close(found, normalized(whole[i][:, :64]))
        assert engine.encode("a", ("dense", "hidden"), dimensions=64).hidden[0].shape[1] == 384  # pyright: ignore


def test_models_without_dense_vectors_have_none(tmp_path: Path) -> None:
    write_classifier(tmp_path / "classes", "bert", num_labels=1)
    write_splade(tmp_path / "sparse")
    write_stanford(tmp_path / "late")
    for kind, pooling in {"classes": None, "sparse": "splade"}.items():
        with Engine(str(tmp_path / kind), dtype="float32", pooling=cast(Any, pooling)) as engine:
            assert engine.card.all_outputs.keys() - engine.card.outputs.keys() <= {"token_scores"}
            refused = told(engine, "/embed_all", inputs="a")
            assert (refused.status, orjson.loads(refused.body)["error_type"]) == (424, "Backend")
            refused = told(engine, "/pooling", input="a", task="token_embed")
            assert refused.status == 400
            assert set(detail := orjson.loads(refused.body)["error"]) == {"message", "type", "param", "code"}
            assert (detail["type"], detail["param"]) == ("BadRequestError", "task")
            refused = told(engine, "/v1/embed", input="a", outputs="hidden")
            assert (refused.status, orjson.loads(refused.body)["error"]["param"]) == (400, "outputs")
    late = Engine(str(tmp_path / "late"), dtype="float32")
    with late as engine, pytest.raises(InvalidRequest, match="it gives: multi_vector"):
        engine.encode("a", "hidden", input_type="query")


# Routes


def told(engine: Engine, path: str, **body: Any) -> Answer:
    app = create_app(ModelRegistry(cast(AsyncEmbedder, AsyncEngine(engine))))
    return asyncio.run(call(app, "POST", path, body=orjson.dumps(body), headers={"content_type": "application/json"}))


def ask(engine: Engine, path: str, **body: Any) -> Any:
    answer = told(engine, path, **body)
    assert answer.status == 200, answer.body
    return orjson.loads(answer.body)


def test_embed_all(engine32: Engine) -> None:
    """Raw: neither pooled nor normalised, and with special tokens."""
    expected = hidden(engine32, TEXTS)
    answer = told(engine32, "/embed_all", inputs=TEXTS)
    assert_same(orjson.loads(answer.body), expected)
    assert answer.headers["x-compute-tokens"] == str(len(expected.rows_XD))
    assert_same(ask(engine32, "/embed_all", inputs=TEXTS[2]), hidden(engine32, TEXTS[2]))
    for direction in ("Left", "right"):
        found = ask(engine32, "/embed_all", inputs=[LONG], truncation_direction=direction)
        assert_same(found, hidden(engine32, LONG, truncate=direction.lower()))
    refused = told(engine32, "/embed_all", inputs=["a", LONG], truncate=False)
    assert (refused.status, orjson.loads(refused.body)["error_type"]) == (422, "Validation")
    assert orjson.loads(refused.body)["error"].startswith("inputs[1]: the text has 403 tokens")


def test_a_large_answer_comes_in_pieces(engine32: Engine) -> None:
    answer = told(engine32, "/embed_all", inputs=[LONG, LONG])
    assert len(answer.pieces) > 8
    assert max(map(len, answer.pieces)) < 2**19
    assert_same(orjson.loads(answer.body), hidden(engine32, [LONG, LONG]))
    assert answer.headers["x-compute-tokens"] == "512"


def test_token_embed(engine32: Engine) -> None:
    """vLLM normalises where the checkpoint does, unless it is told otherwise."""
    for options, normalize in (({}, None), ({"use_activation": True}, True), ({"use_activation": False}, False)):
        expected = token_dense(engine32, TEXTS, normalize=normalize)
        body = {"input": TEXTS, "task": "token_embed"} | options
        answer = ask(engine32, "/pooling", **body)
        assert_same([each["data"] for each in answer["data"]], expected)
        assert answer["usage"]["prompt_tokens"] == len(expected.rows_XD)
        texts = [base64.b64decode(each["data"]) for each in ask(engine32, "/pooling", **body, encoding_format="base64")["data"]]
        assert_same([np.frombuffer(text, np.float32) for text in texts], expected)
        answer = told(engine32, "/pooling", **body, encoding_format="bytes")
        about = json.loads(answer.headers["metadata"])["data"]
        assert [each["shape"] for each in about] == [list(each.shape) for each in expected]
        assert_same([np.frombuffer(answer.body[each["start"] : each["end"]], np.float32) for each in about], expected)
        assert told(engine32, "/pooling", **body, encoding_format="bytes_only").body == answer.body
        half = told(engine32, "/pooling", **body, encoding_format="bytes_only", embed_dtype="float16").body
        assert np.array_equal(np.frombuffer(half, np.float16), expected.rows_XD.astype(np.float16).reshape(-1))
    assert np.array_equal(hidden(engine32, TEXTS).rows_XD, token_dense(engine32, TEXTS, normalize=False).rows_XD)
    refused = told(engine32, "/pooling", input=["a", LONG], task="token_embed")
    assert (refused.status, orjson.loads(refused.body)["error"]["param"]) == (400, "input[1]")
    cut = ask(engine32, "/pooling", input=LONG, task="token_embed", truncate_prompt_tokens=9)
    assert_same([cut["data"][0]["data"]], token_dense(engine32, LONG, max_tokens=9))


def test_late_interaction_goes_before(tmp_path: Path) -> None:
    """A model that has token vectors of its own gives those where other servers have but one name for both."""
    write_m3(tmp_path)
    with Engine(str(tmp_path), dtype="float32") as engine:
        late, own = engine.multi_vector(TEXTS[1:3]), hidden(engine, TEXTS[1:3])
        assert [len(rows) + 1 for rows in late] == [len(rows) for rows in own]  # BGE-M3 leaves out the first token
        assert_same(ask(engine, "/embed_all", inputs=TEXTS[1:3]), late)
        answer = ask(engine, "/pooling", input=TEXTS[1:3], task="token_embed")
        assert_same([each["data"] for each in answer["data"]], late)
        assert_same(ask(engine, "/v1/embed", input=TEXTS[1:3], outputs="hidden")["outputs"]["hidden"], own)


def test_our_own_route(engine32: Engine) -> None:
    body = {"input": TEXTS, "outputs": ["dense", "hidden", "token_dense"]}
    outputs = ask(engine32, "/v1/embed", **body)["outputs"]
    assert_same(outputs["hidden"], hidden(engine32, TEXTS))
    assert_same(outputs["token_dense"], token_dense(engine32, TEXTS))
    assert list(outputs) == ["dense", "hidden", "token_dense"]
    texts = ask(engine32, "/v1/embed", **body, encoding_format="base64")["outputs"]["hidden"]
    assert [each["shape"] for each in texts] == [list(each.shape) for each in hidden(engine32, TEXTS)]
    assert_same([np.frombuffer(base64.b64decode(each["data"]), np.float32) for each in texts], hidden(engine32, TEXTS))
    assert told(engine32, "/v1/embed", **body, encoding_format="arrow").status == 200


# Limits


def test_an_answer_that_is_too_large_is_refused(engine32: Engine) -> None:
    """Before anything is computed, or memory is taken for it."""
    limit = 4 * 384 * 100
    frontend = Preprocessor(engine32.folder, engine32.card, replace(engine32.plan, max_queue_bytes=limit))
    assert frontend.preprocess(Request(["a"] * 33, ("hidden",))).layout.num_bytes == limit - 4 * 384
    for output in ("hidden", "token_dense"):
        with pytest.raises(TooLarge, match="the answer would take 156,672 bytes; the limit is 153,600") as caught:
            frontend.preprocess(Request(["a"] * 34, (output,)))
        assert caught.value.param == "input"
    assert frontend.preprocess(Request(["a"] * 34)).num_tokens == 102


def test_what_is_too_large_in_each_dialect(minilm: Path) -> None:
    texts = ["a"] * 34
    with Engine(str(minilm), dtype="float32", max_queue_bytes=4 * 384 * 100) as engine:
        for path, body, status in (
            ("/embed_all", {"inputs": texts}, 422),
            ("/pooling", {"input": texts, "task": "token_embed"}, 413),
            ("/v1/embed", {"input": texts, "outputs": "hidden"}, 413),
        ):
            refused = told(engine, path, **body)
            assert refused.status == status
            assert b"the answer would take 156,672 bytes" in refused.body
        assert engine.embed(texts).shape == (34, 384)


def test_what_the_card_says(engine: Engine) -> None:
    card: Card = engine.card
    assert list(card.outputs) == ["dense"], "what the model is made for"
    assert list(card.all_outputs) == ["dense", "hidden", "token_dense"]
    assert replace(card, outputs={}).all_outputs == {}


# Through processes


@pytest.mark.extended
def test_through_a_server(server32: Server, engine32: Engine) -> None:
    texts = [*TEXTS, *([LONG] * 20)]  # beyond what goes without shared memory
    expected = engine32.encode(texts, ("dense", "hidden", "token_dense"))
    with Client(server32.url) as client:
        found = client.encode(texts, ("dense", "hidden", "token_dense"))
        assert np.array_equal(found.dense, expected.dense)  # pyright: ignore
        assert_same(found.hidden, cast(Ragged, expected.hidden))
        assert_same(found.token_dense, cast(Ragged, expected.token_dense))
        many = client.encode(["a b"] * 3000, "hidden").hidden  # in several requests
        assert_same(many, cast(Ragged, [hidden(engine32, "a b")[0]] * 3000))
    with Client(server32.url, dialect="tei") as client:
        assert_same(client.encode(TEXTS, "hidden").hidden, hidden(engine32, TEXTS))
