"""vLLM's routes: every field, every way a body can be wrong, and apps over every kind of model, asked as vLLM's own examples do.

There is no SDK. The requests are those of examples/pooling of vLLM 0.33 and of tests of its entrypoints. Their answers lie under
golden/vllm; `python tests/dialects/test_vllm.py` writes them.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import numpy as np
import orjson
import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asgi import call
from checkpoints.bge_m3 import write_m3
from checkpoints.classifiers import two_layers, write_classifier
from checkpoints.files import edit_json
from checkpoints.late_interaction import write_stanford
from fake_embedder import FakeEmbedder, FakeModel, asked
from serving import Server
from vectors import TORCH_DTYPES, body_of, same_bits, told, vectors
from whimbrel import AsyncEngine, Engine, __version__
from whimbrel.dialects import APIS, openai
from whimbrel.dialects.common import rerank
from whimbrel.dialects.vllm import classes, pair_scores, pooling, tokenize
from whimbrel.dialects.vllm.status import status as status_of
from whimbrel.errors import ComputeError, InvalidRequest, Overloaded, TooLarge, TooLong, UnsupportedMediaType, WhimbrelError
from whimbrel.server.app.app import create_app
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.openapi import openapi_document
from whimbrel.server.app.routing import AsyncEmbedder, ModelRegistry
from whimbrel.types.request import DetokenizeRequest, Request, TokenizeRequest
from whimbrel.types.result import Outputs, Ragged, Result, Timings
from whimbrel.types.seq import TokenInfo

VLLM = next(api.routes for api in APIS if api.name == "vLLM")
GOLDEN = Path(__file__).parents[1] / "golden/vllm"
DENSE = np.random.default_rng(3).standard_normal((3, 8)).astype(np.float32)
TOKENS = Ragged(DENSE, np.array([0, 2, 2, 3]))
TEXTS = ["The whimbrel is a wader.", "far away", ""]
QUERY, DOCUMENTS = "what is a whimbrel?", ["a sandwich", "The whimbrel is a wader.", "a sandwich"]


class Card:
    """The part of a card that the routes read."""

    def __init__(self, *outputs: str, labels: tuple[str, ...] = ()) -> None:
        self.outputs = dict.fromkeys(outputs)
        self.all_outputs = self.outputs | ({"token_dense": None} if "dense" in outputs else {})
        self.text_formats = {}
        self.list_template = None
        self.labels = labels


def pooled(*outputs: str, **body: Any) -> Request:
    _, request = pooling.parse_pooling(orjson.dumps({"input": "a"} | body))
    return request(FakeModel.named("m", Card(*(outputs or ("dense", "multi_vector", "scores", "token_scores")))))


def classified(**body: Any) -> Request:
    return classes.parse_classify(orjson.dumps({"input": "a"} | body))[1]


def embedded(**body: Any) -> Request:
    return asked(openai.parse_request(orjson.dumps({"input": "a"} | body)))


def scored(**body: Any) -> Request:
    return pair_scores.parse_score(orjson.dumps(body))[1](FakeModel.named("m", Card("scores")))


def result(**outputs: Any) -> Result:
    return Result(Outputs(**outputs), 7, 0, Timings())


# Reading


@pytest.mark.parametrize(
    ("task", "output"),
    [("embed", "dense"), ("classify", "scores"), ("token_embed", "multi_vector"), ("token_classify", "token_scores")],
)
def test_tasks(task: str, output: Any) -> None:
    assert pooled(task=task) == Request(["a"], (output,), truncate="never")
    assert pooled(output) == pooled(output, task=None) == pooled(task=task), "what the model is made for"
    name = "normalize" if output in ("dense", "multi_vector") else "activate"
    assert pooled(task=task, use_activation=False) == Request(["a"], (output,), truncate="never", **{name: False})


@pytest.mark.parametrize("use_activation", [None, False, True])
def test_tokens_of_a_model_that_pools_them(use_activation: bool | None) -> None:
    expected = Request(["a"], ("token_dense",), truncate="never", normalize=use_activation)
    assert pooled("dense", task="token_embed", use_activation=use_activation) == expected
    assert pooled("dense", "multi_vector", task="token_embed").outputs == ("multi_vector",)


def test_a_model_of_sparse_vectors_has_no_task() -> None:
    with pytest.raises(InvalidRequest, match="/v1/embed") as caught:
        pooled("sparse", "dense")
    assert caught.value.param == "task"
    assert pooled("sparse", "dense", task="embed").outputs == ("dense",)


def test_every_field_of_pooling() -> None:
    body = {"input": ["a", "b"], "dimensions": 4, "use_activation": True, "priority": 2, "input_type": "query", "user": "u"}
    more = {"truncate_prompt_tokens": 9, "truncation_side": "left", "request_id": "r", "nobody": "knows", "cache_salt": "s"}
    assert pooled(task="embed", **body, **more) == Request(
        ["a", "b"],
        ("dense",),
        dimensions=4,
        normalize=True,
        priority=2,
        input_type="query",
        truncate="left",
        max_tokens=9,
    )
    nulls = dict.fromkeys(pooling.PoolingRequest.__struct_fields__) | {"input": "a"}
    assert pooled(**nulls) == pooled()
    assert classified(**(dict.fromkeys(classes.VLLMClassifyRequest.__struct_fields__) | {"input": "a"})) == classified()
    assert [row.tolist() for row in pooled(input=[[1, 2], [3]], add_special_tokens=False).texts] == [[1, 2], [3]]  # pyright: ignore


def test_every_field_of_classify() -> None:
    assert classified() == Request(["a"], ("scores",), truncate="never")
    cut = Request(["a"], ("scores",), activate=False, split_long=False)
    assert classified(use_activation=False, truncate_prompt_tokens=-1) == cut


@pytest.mark.parametrize(
    ("body", "truncate", "limit"),
    [
        ({}, "never", None), ({"truncate_prompt_tokens": -1}, None, None), ({"truncate_prompt_tokens": 8}, None, 8),
        ({"truncate": True}, None, None), ({"truncate": False, "truncate_prompt_tokens": 8}, "never", 8), ({"truncate": "left"}, "left", None),
        ({"truncation_side": "left"}, "never", None), ({"truncate_prompt_tokens": 8, "truncation_side": "left"}, "left", 8),
        ({"truncate": True, "truncation_side": "right"}, "right", None), ({"truncate": "left", "truncation_side": "left"}, "left", None),
    ],
)  # fmt: skip
def test_truncation(body: dict[str, Any], truncate: str | None, limit: int | None) -> None:
    """Texts are cut where cutting is asked for; on /v1/embeddings, where it is not forbidden."""
    for request in (pooled(**body), classified(**body), scored(text_1="a", text_2="b", **body)):
        assert (request.truncate, request.max_tokens) == (truncate, limit)
    usual = embedded(**body)
    assert usual.max_tokens == limit
    assert usual.truncate == (truncate if body.get("truncate") is not None else body.get("truncation_side"))


def test_fields_of_embeddings() -> None:
    assert embedded(use_activation=False) == embedded(normalize=False) == Request(["a"], ("dense",), normalize=False)
    assert embedded(use_activation=True, normalize=True, add_special_tokens=True, padding="do_not_pad").normalize is True
    assert embedded(input=[1, 2], add_special_tokens=False, embed_dtype="fp8_e5m2", endianness="big").max_tokens is None


PAIRS = [("q", "a"), ("q", "b")]


@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")])
def test_the_forms_of_pairs(names: tuple[str, str]) -> None:
    one = {"content": [{"type": "text", "text": "b"}]}
    for first, second in (("q", ["a", "b"]), (["q"], ["a", one]), (["q", "q"], ["a", {"text": "b"}])):
        assert scored(**{names[0]: first, names[1]: second}).texts == PAIRS
    with pytest.raises(InvalidRequest) as caught:
        scored(**{names[0]: ["q", "q", "q"], names[1]: ["a", "b"]})
    assert caught.value.param == names[0]
    for there, missing in (names, names[::-1]):
        with pytest.raises(InvalidRequest) as caught:
            scored(**{there: "a"})
        assert caught.value.param == ("documents" if missing == "items" else missing)


def test_the_first_form_that_is_whole_counts() -> None:
    assert scored(queries="q", items=["a", "b"], data_1="x").texts == PAIRS
    assert scored(documents="x", text_1="q", text_2=["a", "b"]).texts == PAIRS


IMAGE = {"content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": "q", "text_2": IMAGE}, "text_2.content[0]"),
        ({"text_1": "q", "text_2": ["a", IMAGE]}, "text_2[1].content[0]"),
        ({"text_1": "q", "text_2": {"content": []}}, "text_2.content"),
        ({"text_1": "q", "text_2": {"content": [{"type": "text"}]}}, "text_2.content"),
        ({"text_1": "q", "text_2": {"content": [{"type": "text", "text": "a"}] * 2}}, "text_2.content"),
        ({"text_1": "q", "text_2": {"content": [{"type": "text", "text": "a"}], "text": "b"}}, "text_2"),
        ({"text_1": "q", "text_2": {"content": "a"}}, "text_2.content"),
        ({"text_1": "q", "text_2": "a", "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ({"text_1": "q", "text_2": "a", "max_tokens_per_query": 2.5}, "max_tokens_per_query"),
        ({"text_1": "q", "text_2": "a", "chat_template": "{{ query }}"}, "chat_template"),
        ({"text_1": "q", "text_2": "a", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"text_1": "q", "text_2": "a", "padding": "max_length"}, "padding"),
        ({"text_1": "q", "text_2": "a", "truncate": "left", "truncation_side": "right"}, "truncation_side"),
    ],
)
def test_pairs_that_are_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        scored(**body)
    assert caught.value.param == param
    same = {"query": "q", "documents": [body["text_2"]]} | {k: v for k, v in body.items() if not k.startswith("text_")}
    with pytest.raises(InvalidRequest):
        rerank.parse_rerank(orjson.dumps(same))


def _too_long(limit: int | None) -> TooLong:
    error = TooLong("the text has 300 tokens; the limit is 1,256.", item=0)
    error.model_limit = limit
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (_too_long(None), "Please reduce the length of the input prompt."),
        (_too_long(None), "maximum context length"),
        (_too_long(1256), "This model's maximum context length is 1256 tokens."),
        (_too_long(1256), "Please reduce the length of the input prompt."),
        (InvalidRequest("900 tokens per text.", param="max_tokens"), "Please request a smaller truncation size."),
        (
            InvalidRequest("Expected `int` >= 0.", param="max_tokens_per_doc"),
            "max_tokens_per_doc must be a non-negative integer",
        ),
        (
            InvalidRequest("Expected `int` >= 0.", param="max_tokens_per_query"),
            "max_tokens_per_query must be a non-negative integer",
        ),
        (
            UnsupportedMediaType("Content-Type is text/plain; send application/json."),
            "Unsupported Media Type: Only 'application/json' is allowed",
        ),
    ],
)
def test_errors_have_the_words_of_vllm_too(error: InvalidRequest, words: str) -> None:
    """Programs that match vLLM's words find them beside the place and the fix."""
    for route in (*VLLM, rerank.RERANK):
        detail = orjson.loads(route.render_error(error))["error"]
        assert words in detail["message"]
        assert error.statement in detail["message"]


ASKED_WRONGLY: list[tuple[str, dict[str, Any] | bytes, str, str | None]] = [
    ("/pooling", {"input": "a", "model": "nope"}, "The model `nope` does not exist.", "model"),
    ("/v1/embeddings", {"input": "a", "model": "nope"}, "The model `nope` does not exist.", "model"),
    ("/pooling", {"input": []}, "You must pass at least one prompt", "input"),
    ("/v1/embeddings", {"input": []}, "You must pass at least one prompt", "input"),
    ("/pooling", {}, "Field required ('missing')", "input"),
    ("/v1/embeddings", {}, "Field required ('missing')", "input"),
    ("/rerank", {"query": "a"}, "Field required ('missing')", "documents"),
    ("/tokenize", {"add_special_tokens": True, "messages": []}, "chats are not taken", "messages"),
    ("/pooling", b"{", "JSON decode error ('json_invalid')", None),
    ("/score", {"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "Input lengths must be either 1:1, 1:N or N:N", "queries"),
    ("/score", {"queries": [], "documents": ["a"]}, "At least one text element must be given", "queries"),
    ("/score", {"text_1": ["a"], "text_2": []}, "At least one text_pair element must be given", "text_2"),
    ("/rerank", {"query": "a", "documents": []}, "At least one text_pair element must be given", "documents"),
    ("/invocations", {"messages": []}, "Cannot find suitable handler for request", "input"),
    ("/invocations", {"prompt": "a"}, "Cannot find suitable handler for request", "input"),
    ("/pooling", {"input": [99999999]}, "Token id 99999999 is out of vocabulary", "input[0][0]"),
    ("/pooling", {"input": "a " * 999, "truncate": False}, "This model's maximum context length is 256 tokens.", "input[0]"),
    ("/v1/embeddings", {"input": "a " * 999, "truncate": False}, "This model's maximum context length is 256 tokens.", "input[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "words", "param"), ASKED_WRONGLY)
def test_the_words_of_vllm_and_the_place(
    path: str, body: dict[str, Any] | bytes, words: str, param: str | None, minilm_app: Asker
) -> None:
    """An error has vLLM's words about a wrong body, besides the place and the fix."""
    error = orjson.loads(minilm_app.told(path, body).body)["error"]
    assert words in error["message"]
    assert error["param"] == param
    assert param is None or param in error["message"]


def test_a_limit_that_the_request_sets_is_not_said_to_be_the_model_s(minilm_app: Asker) -> None:
    body = {"input": "a " * 20, "truncate": False, "truncate_prompt_tokens": 8}
    message = orjson.loads(minilm_app.told("/pooling", body).body)["error"]["message"]
    assert "the limit is 8." in message
    assert "maximum context length is" not in message
    assert "Please reduce the length of the input prompt." in message


def test_a_body_that_is_of_no_route(minilm_app: Asker) -> None:
    """A body of /invocations that neither TEI nor vLLM knows is answered in TEI's shape, and in vLLM's words too."""
    told = minilm_app.told("/invocations", {"foo": 1})
    found = orjson.loads(told.body)
    assert (told.status, found["error_type"]) == (422, "Validation")
    assert "Cannot find suitable handler for request" in found["error"]
    assert "query and documents" in found["error"]


def test_words_that_a_field_does_not_take() -> None:
    """A word that a field does not take is a literal_error, as pydantic calls it, with the words that it takes."""
    for path, body in (("/pooling", {"input": "a", "task": "x"}), ("/pooling", {"input": "a", "encoding_format": "x"})):
        route = next(route for route in VLLM if route.path == path)
        with pytest.raises(InvalidRequest) as caught:
            route.parse_request(orjson.dumps(body))
        message = orjson.loads(route.render_error(caught.value))["error"]["message"]
        assert "literal_error" in message
        assert "it takes" in message


def test_tasks_that_a_model_does_not_have() -> None:
    """A task that a model does not have is refused with those that it has."""
    with pytest.raises(InvalidRequest, match=r"Unsupported task: 'classify'. Supported tasks: embed, token_embed"):
        pooled("dense", task="classify")


def test_limits_that_are_off() -> None:
    off = {"max_tokens_per_query": 0, "max_tokens_per_doc": 0, "chat_template_kwargs": {}, "padding": None}
    assert scored(text_1="q", text_2="a", **off) == scored(text_1="q", text_2="a")


def test_limits_of_queries_and_documents() -> None:
    request = scored(text_1="q", text_2="a", max_tokens_per_query=5, max_tokens_per_doc=7)
    assert (request.max_query_tokens, request.max_document_tokens, request.max_tokens) == (5, 7, None)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"padding": "max_length"}, "padding"), ({"add_special_tokens": "no"}, "add_special_tokens"), ({"embed_dtype": "int8"}, "embed_dtype"),
        ({"endianness": "middle"}, "endianness"), ({"truncation_side": "both"}, "truncation_side"), ({"input": []}, "input"),
        ({"truncate": "left", "truncation_side": "right"}, "truncation_side"), ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"request_id": 3}, "request_id"), ({"encoding_format": "hex"}, "encoding_format"), ({"priority": 2**40}, "priority"),
        ({"input": "a", "use_activation": "yes"}, "use_activation"),
    ],
)  # fmt: skip
def test_texts_that_are_refused(body: dict[str, Any], param: str) -> None:
    for read in (pooled, embedded, *([classified] if param != "encoding_format" else [])):
        with pytest.raises(InvalidRequest) as caught:
            read(**body)
        assert caught.value.param == param


def test_what_only_some_routes_refuse() -> None:
    for read in (pooled, embedded):
        with pytest.raises(InvalidRequest) as caught:
            read(normalize=True, use_activation=False)
        assert caught.value.param == "use_activation"
    for task in ("plugin", "embed&token_classify", "score", "encode"):
        with pytest.raises(InvalidRequest, match="token_embed") as caught:
            pooled(task=task)
        assert caught.value.param == "task"
    for body in ({"encoding_format": "bytes"}, {"encoding_format": "bytes_only"}):
        assert pooled(**body)
    with pytest.raises(TooLarge):
        pooled(input=["a"] * 2049)


CHAT = orjson.dumps({"messages": [{"role": "user", "content": "a"}]})


@pytest.mark.parametrize("read", [pooling.parse_pooling, classes.parse_classify, tokenize.parse_tokenize, openai.parse_request])
def test_chats_are_refused(read: Callable[[bytes], Any]) -> None:
    with pytest.raises(InvalidRequest, match="chats") as caught:
        read(CHAT)
    assert caught.value.param == "messages"
    both = orjson.loads(CHAT) | {"input": "a", "prompt": "a"}
    read(orjson.dumps(both))  # vLLM does not look at it either


def test_tokenize_and_detokenize_are_read() -> None:
    sent, asked = tokenize.parse_tokenize(b'{"prompt": "a", "return_token_strs": true, "model": "m"}')
    assert (sent.model, asked) == ("m", TokenizeRequest(["a"]))
    assert tokenize.parse_tokenize(b'{"prompt": "", "add_special_tokens": false}')[1] == TokenizeRequest([""], special=False)
    assert tokenize.parse_detokenize(b'{"tokens": [1, 2]}')[1] == DetokenizeRequest([[1, 2]])
    for read, body, param in (
        (tokenize.parse_tokenize, b"{}", "prompt"),
        (tokenize.parse_tokenize, b'{"prompt": ["a"]}', "prompt"),
        (tokenize.parse_detokenize, b'{"tokens": [-1]}', "tokens[0]"),
        (tokenize.parse_detokenize, b'{"tokens": "a"}', "tokens"),
        (tokenize.parse_detokenize, b'{"tokens": [9223372036854775808]}', "tokens[0]"),
        (tokenize.parse_detokenize, b'{"tokens": [' + b"1," * 600_000 + b"1]}", "input"),  # as errors are written: tokens
        (tokenize.parse_detokenize, b"", None),
    ):
        with pytest.raises(InvalidRequest) as caught:
            read(body)
        assert caught.value.param == param


FIELDS = sorted({
    *(name for route in VLLM for name in route.request_type.__struct_fields__),
    *("messages", "padding", "late_chunking_params", "chat_template", "chat_template_kwargs", "max_tokens_per_query"),
})  # fmt: skip
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5), st.sampled_from(["left", "bytes", "fp8_e4m3"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["text", "content", "type", "x"]), inner, max_size=3)),
    max_leaves=6,
)  # fmt: skip


@given(
    st.sampled_from([route for route in VLLM if not route.path.startswith("/v1")]),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5),
    st.booleans(),
)
def test_any_values_are_read_or_refused(route: Any, body: dict[str, Any], whole: bool) -> None:
    example = json.loads(route.example) if whole else {}
    found: InvalidRequest | None = None
    try:
        parsed = route.parse_request(json.dumps(example | body).encode())
        asked(parsed, Card("dense"))
    except InvalidRequest as error:
        found = error
    if found is not None:
        assert orjson.loads(route.render_error(found))["error"]["code"] == route.status(found)
        assert route.status(found) in (400, 413)


# Writing


def write(outputs: dict[str, Any], **body: Any) -> Any:
    sent, _ = pooling.parse_pooling(orjson.dumps({"input": ["a"] * 3} | body))
    return pooling.render_pooling(sent, result(**outputs), FakeModel.named("m"))


@given(st.sampled_from(list(TORCH_DTYPES)), st.sampled_from(["native", "little", "big"]), st.booleans())
def test_base64_and_bytes_read_back(dtype: str, order: str, ragged: bool) -> None:
    """The same numbers in all formats, those of torch in that type, and of float32 the floats bit for bit."""
    rows = [np.asarray(TOKENS[i]) for i in range(3)] if ragged else list(DENSE)
    outputs = {"token_dense" if order == "big" else "multi_vector": TOKENS} if ragged else {"dense": DENSE}
    expected = [torch.from_numpy(row.copy()).to(TORCH_DTYPES[dtype]).to(torch.float32).numpy() for row in rows]

    def numbers(content: bytes, shape: Any) -> Any:
        kind = np.dtype(f"V{TORCH_DTYPES[dtype].itemsize}")
        stored = np.frombuffer(content, kind)
        content = stored.view(f">u{kind.itemsize}").astype(f"<u{kind.itemsize}").tobytes() if order == "big" else content
        if not content:
            return np.empty(shape, np.float32)
        return torch.frombuffer(bytearray(content), dtype=TORCH_DTYPES[dtype]).to(torch.float32).numpy().reshape(shape)

    floats = orjson.loads(write(outputs))["data"]
    texts = orjson.loads(write(outputs, encoding_format="base64", embed_dtype=dtype, endianness=order))["data"]
    answer = write(outputs, encoding_format="bytes", embed_dtype=dtype, endianness=order)
    content, told = b"".join(answer.chunks), json.loads(answer.headers["metadata"])
    assert set(told) == {"id", "created", "model", "data", "usage"}
    for i, row in enumerate(expected):
        piece = told["data"][i]
        assert (piece["index"], piece["embed_dtype"], piece["endianness"], tuple(piece["shape"])) == (
            i,
            dtype,
            sys.byteorder if order == "native" else order,
            row.shape,
        )
        assert np.array_equal(numbers(content[piece["start"] : piece["end"]], row.shape), row)
        assert np.array_equal(numbers(base64.b64decode(texts[i]["data"]), row.shape), row)
        assert np.array_equal(np.array(floats[i]["data"], np.float32).reshape(row.shape), rows[i])
    only = write(outputs, encoding_format="bytes_only", embed_dtype=dtype, endianness=order)
    assert (b"".join(only.chunks), dict(only.headers), only.media_type) == (content, {}, "application/octet-stream")


@given(vectors(3, 4), st.booleans())
def test_what_is_written_reads_back(rows: np.ndarray, ragged: bool) -> None:
    """Bit for bit in every format."""
    outputs = {"multi_vector": Ragged(rows, np.array([0, 1, 1, 3]))} if ragged else {"dense": rows}
    numbers = [row for each in told(write(outputs))["data"] for row in (each["data"] if ragged else [each["data"]])]
    assert same_bits(numbers, rows)
    stored = rows.astype("<f4").tobytes()
    texts = told(write(outputs, encoding_format="base64", endianness="little"))["data"]
    assert b"".join(base64.b64decode(each["data"]) for each in texts) == stored
    assert body_of(write(outputs, encoding_format="bytes", endianness="little")) == stored


@given(vectors(3, 2))
def test_scores_of_classes_read_back(rows: np.ndarray) -> None:
    body, _ = classes.parse_classify(b'{"input": ["a", "b", "c"]}')
    model = FakeModel.named("m", SimpleNamespace(labels=("x", "y")))
    found = told(classes.render_classify(body, result(scores=rows), model))["data"]
    assert same_bits([each["probs"] for each in found], rows)
    assert [each["label"] for each in found] == ["xy"[best] for best in rows.argmax(1)]


def test_numbers_that_a_type_does_not_hold_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="float16") as caught:
        write({"dense": DENSE * 100_000}, encoding_format="base64", embed_dtype="float16")
    assert caught.value.param == "embed_dtype"
    assert write({"dense": DENSE * 100_000}, encoding_format="float", embed_dtype="float16"), "it is of binary formats"


def test_a_header_that_no_client_reads_is_refused() -> None:
    many = {"dense": np.ones((1000, 2), np.float32)}
    with pytest.raises(InvalidRequest, match="bytes_only") as caught:
        write(many, encoding_format="bytes")
    assert caught.value.param == "encoding_format"
    assert write(many, encoding_format="bytes_only").size == 8000


def test_ids_and_times() -> None:
    for _ in range(2):
        told = orjson.loads(write({"dense": DENSE}, request_id="mine"))
        assert told["id"] == "pooling-mine"
        assert abs(told["created"] - __import__("time").time()) < 100
    ids = {orjson.loads(write({"dense": DENSE}))["id"] for _ in range(9)}
    assert len(ids) == 9


def test_classes_without_names() -> None:
    body, _ = classes.parse_classify(b'{"input": ["a", "b"]}')
    scores = np.array([[0.25, 0.5], [1, 0]], np.float32)
    for labels, expected in (((), [None, None]), (("no", "yes"), ["yes", "no"])):
        told = orjson.loads(
            classes.render_classify(body, result(scores=scores), FakeModel.named("m", Card("scores", labels=labels)))
        )
        assert [(row["label"], row["probs"], row["num_classes"]) for row in told["data"]] == [
            (expected[0], [0.25, 0.5], 2),
            (expected[1], [1.0, 0.0], 2),
        ]


def test_tokens_are_written() -> None:
    info = TokenInfo(np.array([5, 6], np.int32), ("a", "##b"), np.zeros(2, np.bool_), np.zeros((2, 2), np.int32))
    for more, names in (({}, None), ({"return_token_strs": True}, ["a", "##b"])):
        body, _ = tokenize.parse_tokenize(orjson.dumps({"prompt": "ab"} | more))
        assert orjson.loads(tokenize.render_tokenize(body, [info], FakeModel.named("m"))) == {
            "count": 2,
            "max_model_len": 256,
            "tokens": [5, 6],
            "token_strs": names,
        }


def test_errors_are_in_vllm_s_words() -> None:
    def render(path: str, error: WhimbrelError) -> bytes:
        return next(route for route in VLLM if route.path == path).render_error(error)

    for error, status, kind in (
        (InvalidRequest("x", param="max_tokens"), 400, "BadRequestError"),
        (Overloaded("x", retry_after=1), 503, "Service Unavailable"),
        (TooLarge("x"), 413, "Request Entity Too Large"),
        (ComputeError("x"), 500, "InternalServerError"),
    ):
        assert status_of(error) == status
        told = orjson.loads(render("/pooling", error))["error"]
        assert (told["code"], told["type"]) == (status, kind)
        assert told["param"] == (None if error.args == ("x",) else "truncate_prompt_tokens")
    assert orjson.loads(render("/detokenize", InvalidRequest("x", item=0, part=7)))["error"]["param"] == "tokens[7]"
    assert orjson.loads(render("/tokenize", InvalidRequest("x", item=0)))["error"]["param"] == "prompt"


def test_all_are_in_the_description() -> None:
    paths = {"/pooling", "/classify", "/score", "/rerank", "/tokenize", "/detokenize", "/version"}
    assert paths <= openapi_document()["paths"].keys()


# Apps


class Asker:
    """An app over an engine, asked from outside any event loop."""

    def __init__(self, engine: Engine, **guards: Any) -> None:
        self._embedder = cast(AsyncEmbedder, AsyncEngine(engine))
        self._guards = ServerLimits(**guards)

    def told(self, path: str, body: Any = None, **headers: str) -> Any:
        app = create_app(ModelRegistry(self._embedder), guards=self._guards)
        content = body if isinstance(body, bytes) else b"" if body is None else orjson.dumps(body)
        named = {"content_type": "application/json"} | headers
        return asyncio.run(call(app, "GET" if body is None else "POST", path, body=content, headers=named))

    def ask(self, path: str, body: Any = None) -> Any:
        told = self.told(path, body)
        assert told.status == 200, told.body
        return orjson.loads(told.body)


@pytest.fixture(scope="module")
def minilm_app(engine: Engine) -> Asker:
    return Asker(engine)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("classifier")
    write_classifier(folder, "bert", id2label={0: "sad", 1: "glad", 2: "neither"}, label2id={"sad": 0, "glad": 1, "neither": 2})
    with Engine(str(folder), dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("tagger")
    write_classifier(folder, "bert", "ForTokenClassification", num_labels=3)
    with Engine(str(folder), dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("late")
    write_stanford(folder)
    with Engine(str(folder), dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("ranker")
    write_classifier(folder, "bert", num_labels=1)
    with Engine(str(folder), dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("m3")
    write_m3(folder)
    with Engine(str(folder), dtype="float32") as engine:
        yield engine


def column(answer: Any, name: str = "data") -> Any:
    return [np.array(each[name], np.float32) for each in answer["data"]]


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


def check(told: Any, status: int, kind: str) -> Any:
    error = orjson.loads(told.body)["error"]
    assert (told.status, error["type"], error["code"]) == (status, kind, status), told
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


# What vLLM's examples send

EXAMPLES: dict[str, tuple[str, str, Any]] = {
    "embeddings": ("engine", "/v1/embeddings", {"model": "M", "input": "vLLM is great!"}),
    "embeddings base64": (
        "engine",
        "/v1/embeddings",
        {
            "input": ["The best thing about vLLM"],
            "model": "M",
            "encoding_format": "base64",
            "embed_dtype": "float16",
            "endianness": "big",
        },
    ),
    "embeddings of chats": (
        "engine",
        "/v1/embeddings",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Represent it."}]}],
            "model": "M",
            "encoding_format": "float",
        },
    ),
    "pooling": (
        "late",
        "/pooling",
        {"model": "M", "input": ["vLLM is great!", "a"], "task": "token_embed", "input_type": "document"},
    ),
    "pooling of chats": ("engine", "/pooling", {"model": "M", "messages": [{"role": "user", "content": "vLLM is great!"}]}),
    "pooling of rewards": ("classifier", "/pooling", {"model": "M", "input": "vLLM is great!"}),
    "classify": ("classifier", "/classify", {"model": "M", "input": ["Hello, my name is", "The president is"]}),
    "score one": ("ranker", "/score", {"model": "M", "text_1": "What is the capital of France?", "text_2": "Paris."}),
    "score one to many": (
        "ranker",
        "/score",
        {"model": "M", "queries": "What is the capital of Brazil?", "documents": ["Brasilia.", "Paris."]},
    ),
    "score of images": ("ranker", "/score", {"model": "M", "data_1": "A dog", "data_2": IMAGE}),
    "rerank": (
        "ranker",
        "/rerank",
        {
            "model": "M",
            "query": "What is the capital of France?",
            "documents": ["Brazil.", "France: Paris.", "Horses and cows"],
        },
    ),
    "tokenize": ("engine", "/tokenize", {"model": "M", "prompt": "Hello world", "return_token_strs": True}),
    "detokenize": ("engine", "/detokenize", {"model": "M", "tokens": [101, 7592, 2088, 102]}),
    "unknown model": ("engine", "/pooling", {"model": "nobody", "input": "a"}),
    "late chunking": (
        "engine",
        "/v1/embeddings",
        {"model": "M", "input": ["vLLM is great!", "a"], "late_chunking_params": {"chunk_size": 4}},
    ),
    "embeddings of tokens": ("late", "/v1/embeddings", {"model": "M", "input": ["vLLM is great!", "a"]}),
    "embeddings without special tokens": (
        "engine",
        "/v1/embeddings",
        {"model": "M", "input": "vLLM is great!", "add_special_tokens": False},
    ),
    "classes of tokens": (
        "classifier",
        "/pooling",
        {"model": "M", "input": ["vLLM is great!", "a"], "task": "token_classify"},
    ),
    "weights of tokens": ("m3", "/pooling", {"model": "M", "input": [[0, 5, 7, 2]], "task": "token_classify"}),
    "tokenizer info": ("engine", "/tokenizer_info", None),
    "load": ("engine", "/load", None),
}


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


def exchange(engine: Engine, path: str, body: Any) -> Any:
    """Return an exchange without ids, times, folders and numbers that depend on the machine."""
    name = engine.plan.served_name
    sent = None if body is None else {key: name if value == "M" else value for key, value in body.items()}
    told = Asker(engine).told(path, sent)
    answer = orjson.loads(told.body.replace(orjson.dumps(name)[1:-1], b"M"))
    return {"path": path, "request": body, "status": told.status, "answer": kept(answer)}


VARIES = {"created": "a time", "prompt_tokens": "a count", "total_tokens": "a count", "label": "a label"}
"""The tokenizers of small checkpoints are trained, and are not the same in every process."""


def kept(value: Any, key: str = "") -> Any:
    if key in VARIES and value is not None:
        return VARIES[key]
    if key == "id":
        return f"{value.split('-')[0]}-..."
    if isinstance(value, dict):
        return {name: kept(each, name) for name, each in value.items()}
    if isinstance(value, list) and value and all(isinstance(each, float) for each in value):
        return f"{len(value)} numbers"
    if key in ("data", "embedding") and isinstance(value[0], list):
        return sorted({kept(each) for each in value})
    if key == "results" or (key == "data" and value and "relevance_score" in value[0]):
        return sorted((kept(each) for each in value), key=lambda each: each["index"])
    if isinstance(value, list):
        return [kept(each) for each in value]
    if key == "embedding":
        return f"base64 of {len(base64.b64decode(value))} bytes"
    return "a number" if isinstance(value, float) else value


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str, request: pytest.FixtureRequest) -> None:
    kind, path, body = EXAMPLES[name]
    found = exchange(request.getfixturevalue(kind), path, body)
    assert found == json.loads((GOLDEN / f"{name.replace(' ', '_')}.json").read_text())


def record() -> None:
    """Write the golden files."""
    torch.manual_seed(7)
    makers: dict[str, Callable[[Path], object]] = {
        "late": write_stanford,
        "m3": write_m3,
        "ranker": lambda folder: write_classifier(folder, "bert", num_labels=1),
        "classifier": lambda folder: write_classifier(
            folder, "bert", id2label={0: "sad", 1: "glad", 2: "neither"}, label2id={"sad": 0, "glad": 1, "neither": 2}
        ),
    }
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, (kind, path, body) in EXAMPLES.items():
        with tempfile.TemporaryDirectory() as folder:
            if kind in makers:
                makers[kind](Path(folder))
            with Engine(folder, dtype="float32") if kind in makers else Engine() as engine:
                text = json.dumps(exchange(engine, path, body), indent=2)
        (GOLDEN / f"{name.replace(' ', '_')}.json").write_text(text + "\n")


if __name__ == "__main__":
    record()
