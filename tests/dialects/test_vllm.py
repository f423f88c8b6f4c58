"""The pure functions of vLLM's routes: every field, and every way a body can be wrong."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fake_embedder import FakeModel, asked
from vectors import TORCH_DTYPES, body_of, same_bits, told, vectors
from vllm_apps import IMAGE, Asker
from whimbrel.dialects import APIS, openai
from whimbrel.dialects.common import rerank
from whimbrel.dialects.vllm import pair_scores, pooling, tokenize
from whimbrel.dialects.vllm.status import status as status_of
from whimbrel.errors import ComputeError, InvalidRequest, Overloaded, TooLarge, TooLong, UnsupportedMediaType, WhimbrelError
from whimbrel.server.app.openapi import openapi_document
from whimbrel.types.request import DetokenizeRequest, Request, TokenizeRequest
from whimbrel.types.result import Outputs, Ragged, Result, Timings
from whimbrel.types.seq import TokenInfo

VLLM = next(api.routes for api in APIS if api.name == "vLLM")
DENSE = np.random.default_rng(3).standard_normal((3, 8)).astype(np.float32)
TOKENS = Ragged(DENSE, np.array([0, 2, 2, 3]))


class Card:
    """The part of a card that the routes read."""

    def __init__(self, *outputs: str, labels: tuple[str, ...] = ()) -> None:
        self.outputs = dict.fromkeys(outputs)
        self.all_outputs = self.outputs | ({"token_dense": None} if "dense" in outputs else {})
        self.text_formats = {}
        self.list_template = None
        self.labels = labels


def pooled(*outputs: str, **body: Any) -> Request:
    request = pooling.parse_pooling(orjson.dumps({"input": "a"} | body)).request
    return request(FakeModel.named("m", Card(*(outputs or ("dense", "multi_vector", "scores", "token_scores")))))


def classified(**body: Any) -> Request:
    return asked(pooling.parse_classify(orjson.dumps({"input": "a"} | body)))


def embedded(**body: Any) -> Request:
    return asked(openai.parse_request(orjson.dumps({"input": "a"} | body)))


def scored(**body: Any) -> Request:
    return pair_scores.parse_score(orjson.dumps(body)).request(FakeModel.named("m", Card("scores")))


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
        ["a", "b"], ("dense",), dimensions=4, normalize=True, input_type="query", truncate="left", max_tokens=9
    )
    nulls = dict.fromkeys(pooling.PoolingRequest.__struct_fields__) | {"input": "a"}
    assert pooled(**nulls) == pooled()
    assert classified(**(dict.fromkeys(pooling.VLLMClassifyRequest.__struct_fields__) | {"input": "a"})) == classified()
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
            route.parse(orjson.dumps(body))
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


@pytest.mark.parametrize("read", [pooling.parse_pooling, pooling.parse_classify, tokenize.parse_tokenize, openai.parse_request])
def test_chats_are_refused(read: Callable[[bytes], Any]) -> None:
    with pytest.raises(InvalidRequest, match="chats") as caught:
        read(CHAT)
    assert caught.value.param == "messages"
    both = orjson.loads(CHAT) | {"input": "a", "prompt": "a"}
    read(orjson.dumps(both))  # vLLM does not look at it either


def test_tokenize_and_detokenize_are_read() -> None:
    parsed = tokenize.parse_tokenize(b'{"prompt": "a", "return_token_strs": true, "model": "m"}')
    assert (parsed.body.model, asked(parsed)) == ("m", TokenizeRequest(["a"]))
    assert asked(tokenize.parse_tokenize(b'{"prompt": "", "add_special_tokens": false}')) == TokenizeRequest(
        [""], special=False
    )
    assert asked(tokenize.parse_detokenize(b'{"tokens": [1, 2]}')) == DetokenizeRequest([[1, 2]])
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
        parsed = route.parse(json.dumps(example | body).encode())
        asked(parsed, Card("dense"))
    except InvalidRequest as error:
        found = error
    if found is not None:
        assert orjson.loads(route.render_error(found))["error"]["code"] == route.status(found)
        assert route.status(found) in (400, 413)


# Writing


def write(outputs: dict[str, Any], **body: Any) -> Any:
    sent = pooling.parse_pooling(orjson.dumps({"input": ["a"] * 3} | body)).body
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
    body = pooling.parse_classify(b'{"input": ["a", "b", "c"]}').body
    model = FakeModel.named("m", SimpleNamespace(labels=("x", "y")))
    found = told(pooling.render_classify(body, result(scores=rows), model))["data"]
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
    body = pooling.parse_classify(b'{"input": ["a", "b"]}').body
    scores = np.array([[0.25, 0.5], [1, 0]], np.float32)
    for labels, expected in (((), [None, None]), (("no", "yes"), ["yes", "no"])):
        told = orjson.loads(
            pooling.render_classify(body, result(scores=scores), FakeModel.named("m", Card("scores", labels=labels)))
        )
        assert [(row["label"], row["probs"], row["num_classes"]) for row in told["data"]] == [
            (expected[0], [0.25, 0.5], 2),
            (expected[1], [1.0, 0.0], 2),
        ]


def test_tokens_are_written() -> None:
    info = TokenInfo(np.array([5, 6], np.int32), ("a", "##b"), np.zeros(2, np.bool_), np.zeros((2, 2), np.int32))
    for more, names in (({}, None), ({"return_token_strs": True}, ["a", "##b"])):
        body = tokenize.parse_tokenize(orjson.dumps({"prompt": "ab"} | more)).body
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
