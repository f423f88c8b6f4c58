"""The dialect's pure functions: reading, writing, and every way a body can be wrong."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any, cast

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asgi import Answer, call
from fake_embedder import FakeModel, asked
from vectors import body_of, same_bits, told, vectors
from whimbrel import AsyncEngine, Engine, errors
from whimbrel.dialects import Route, native, openai
from whimbrel.dialects.common import bodies as read_module
from whimbrel.dialects.common.openai_errors import render_error
from whimbrel.dialects.common.route import ErrorTerms
from whimbrel.errors import InvalidRequest, TooLarge
from whimbrel.server.app.app import create_app
from whimbrel.server.app.routing import AsyncEmbedder, ModelRegistry
from whimbrel.types.request import Request
from whimbrel.types.result import Outputs, Result, Timings
from wrong_bodies import WRONG_BODIES

IDS = st.lists(st.integers(0, 2**62), min_size=1, max_size=5)


def read(**body: Any) -> Request:
    return asked(openai.parse_request(orjson.dumps(body)))


@given(st.one_of(st.text(), st.lists(st.text(), min_size=1)))
def test_texts_are_read_back(texts: Any) -> None:
    assert read(input=texts).texts == ([texts] if isinstance(texts, str) else texts)


@given(st.one_of(IDS, st.lists(IDS, min_size=1, max_size=4)))
def test_token_ids_are_read_back(rows: Any) -> None:
    texts = read(input=rows).texts
    assert [row.tolist() for row in texts] == ([rows] if isinstance(rows[0], int) else rows)  # pyright: ignore


def test_every_field() -> None:
    body = {"model": "m", "encoding_format": "base64", "dimensions": 7, "user": "u", "normalize": False, "unknown": 1}
    parsed = openai.parse_request(orjson.dumps({"input": "a", "prompt_name": "query", "truncate": "left", **body}))
    sent, request = parsed.body, asked(parsed)
    assert (sent.model, sent.encoding_format) == ("m", "base64")
    assert request == Request(["a"], ("dense",), prompt_name="query", dimensions=7, normalize=False, truncate="left")
    for field in ("late_chunking", "split_long"):
        assert read(input="a", **{field: True}) == Request(["a"], ("dense",), **{field: True})


@pytest.mark.parametrize(
    ("body", "truncate", "limit"),
    [
        ({}, None, None), ({"truncate": True}, None, None), ({"truncate": False}, "never", None), ({"truncate": "right"}, "right", None),
        ({"truncate_prompt_tokens": -1}, None, None), ({"truncate_prompt_tokens": 8}, None, 8), ({"truncate": None}, None, None),
    ],
)  # fmt: skip
def test_truncation(body: dict[str, Any], truncate: str | None, limit: int | None) -> None:
    request = read(input="a", **body)
    assert (request.truncate, request.max_tokens) == (truncate, limit)


@pytest.mark.parametrize(("body", "param"), WRONG_BODIES, ids=lambda value: str(value)[:40])
def test_wrong_bodies_say_where(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        openai.parse_request(body)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("shape", [(600_000,), (2000, 300)])
def test_too_many_token_ids_are_refused_before_they_are_decoded(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = orjson.dumps({"model": "m", "input": np.ones(shape, np.int64)}, option=orjson.OPT_SERIALIZE_NUMPY)
    monkeypatch.setattr(read_module, "_decoder", None)
    with pytest.raises(TooLarge, match=r"more than \d{3},\d{3} token ids or items; the limit is 524,288"):
        openai.parse_request(body)


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (b"[],", "items"),
        (b"{},", "items"),
        (b"null,", "items"),
        (b'"",', "strings; the limit is 100,000"),
        (b'"a\\\\",', "strings"),
    ],
)
def test_very_long_lists_are_refused_before_they_are_decoded(item: bytes, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"input": ["a", ' + item * 600_000 + item[:-1] + b"]}"
    monkeypatch.setattr(read_module, "_decoder", None)
    with pytest.raises(TooLarge, match=says):
        openai.parse_request(body)


@pytest.mark.parametrize("start", ['"input": [1', "\\", '\\"', ""])
def test_commas_in_texts_are_no_token_ids(start: str) -> None:
    text = start + "," * 600_000 + start
    assert read(input=[text, text]).texts == [text, text]


def test_2049_inputs_are_too_many() -> None:
    assert len(read(input=["a"] * 2048).texts) == 2048
    for many in (["a"] * 2049, [[1]] * 2049):
        with pytest.raises(TooLarge, match="2,049 inputs; the limit is 2,048"):
            read(input=many)
    assert len(read(input=[1] * 5000).texts) == 1


def result(vectors: np.ndarray) -> Result:
    return Result(Outputs(vectors), num_tokens=11, num_truncated=0, timings=Timings())


def test_the_answer() -> None:
    vectors = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    for encoding in ("float", "base64", None):
        body = openai.EmbeddingsRequest(input="a", encoding_format=encoding)  # pyright: ignore[reportArgumentType]
        answer = told(openai.render_response(body, result(vectors), FakeModel.named("m")))
        assert (answer["object"], answer["model"]) == ("list", "m")
        counts = {"prompt_tokens": 11, "total_tokens": 11, "completion_tokens": 0, "prompt_tokens_details": None}
        assert answer["usage"] == counts
        assert [(row["object"], row["index"]) for row in answer["data"]] == [("embedding", i) for i in range(3)]
        rows = [row["embedding"] for row in answer["data"]]
        if encoding == "base64":
            rows = [np.frombuffer(base64.b64decode(row), np.float32) for row in rows]
        assert np.array_equal(np.array(rows, np.float32), vectors)


@given(vectors(3, 5))
def test_what_is_written_reads_back(rows: np.ndarray) -> None:
    """Bit for bit in every format."""

    def written(form: Any) -> Any:
        body = openai.EmbeddingsRequest(input="a", encoding_format=form)
        return openai.render_response(body, result(rows), FakeModel.named("m"))

    assert same_bits([row["embedding"] for row in told(written("float"))["data"]], rows)
    texts = [base64.b64decode(row["embedding"]) for row in told(written("base64"))["data"]]
    assert b"".join(texts) == body_of(written("bytes")) == body_of(written("bytes_only")) == rows.astype("<f4").tobytes()
    assert same_bits(np.load(io.BytesIO(body_of(written("npy")))), rows)


def test_floats_are_printed_from_the_array_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No list of floats is made: what goes to the encoder are views of the result."""
    seen: list[Any] = []
    monkeypatch.setattr(openai, "json_answer", lambda value, *_, **__: seen.append(value) or b"")
    vectors = np.ones((128, 768), np.float32)
    openai.render_response(openai.EmbeddingsRequest(input="a"), result(vectors), FakeModel.named("m"))
    rows = [row["embedding"] for row in seen[0]["data"]]
    assert len(rows) == 128
    assert all(np.shares_memory(row, vectors) for row in rows)


def test_errors_have_four_keys_and_the_path_in_the_message() -> None:
    error = InvalidRequest("must be a string.", item=3)
    assert orjson.loads(render_error(error)) == {
        "error": {
            "message": "input[3]: must be a string.",
            "type": "invalid_request_error",
            "param": "input[3]",
            "code": "invalid_value",
        }
    }


SHARED = "dimensions late_chunking max_tokens normalize priority prompt prompt_name split_long truncate".split()


@pytest.mark.parametrize("route", [*openai.ROUTES, *native.ROUTES[:1]], ids=lambda route: route.path)
def test_errors_name_fields_that_the_route_has(route: Route) -> None:
    """Errors use the name that a field of Request has in the API."""
    fields = {field.name for field in msgspec.structs.fields(route.request_type)}
    for name in SHARED:
        detail = orjson.loads(route.render_error(InvalidRequest("is wrong.", param=name)))["error"]
        assert detail["param"] in fields
        assert detail["message"].startswith(f"{detail['param']}: is wrong.")


def test_without_v1(engine: Engine) -> None:
    """Clients whose base URL does not end in /v1 are answered too."""
    app = create_app(ModelRegistry(cast(AsyncEmbedder, AsyncEngine(engine))))
    body, headers = {"input": ["a", "b"], "request_id": "r"}, {"content_type": "application/json"}

    def told(path: str, body: Any, **more: str) -> Answer:
        return asyncio.run(call(app, "POST", path, body=orjson.dumps(body), headers=headers | more))

    bare, usual = (orjson.loads(told(path, body).body) | {"created": 0} for path in ("/embeddings", "/v1/embeddings"))
    assert bare == usual
    assert np.array_equal(np.array([each["embedding"] for each in bare["data"]], np.float32), engine.embed(["a", "b"]))
    assert told("/embeddings", body, accept="application/octet-stream").body == engine.embed(["a", "b"]).tobytes()
    refused = [told(path, {"input": []}) for path in ("/embeddings", "/v1/embeddings")]
    assert refused[0].body == refused[1].body
    assert (refused[0].status, orjson.loads(refused[0].body)["error"]["type"]) == (400, "invalid_request_error")


def test_a_field_is_renamed_with_what_is_within_it() -> None:
    error = errors.TooLong("is long.", item=3, part=1)
    assert ErrorTerms({"input": "texts", "in": "x"}).describe(error) == ("texts[3][1]: is long.", "texts[3][1]")
    assert (str(error), error.param) == ("input[3][1]: is long.", "input[3][1]")
    assert ErrorTerms({"in": "x"}).describe(error) == (str(error), "input[3][1]")
    assert ErrorTerms({"input": "texts"}).describe(InvalidRequest("x")) == ("x", None)


def test_a_hint_names_the_option_of_the_api() -> None:
    for hint in errors.Hint:
        error = errors.TooLong("is long", param="input", hint=hint)
        assert ErrorTerms().describe(error)[0] == str(error) == f"input: is long{hint.sentence()}"
        assert "option X" in ErrorTerms(options={"truncate": "option X", "input_type": "option X"}).describe(error)[0]
    assert ErrorTerms(options={"truncate": None}).describe(errors.TooLong("x.", hint=errors.Hint.TRUNCATE)) == ("x.", None)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.Unauthorized("x"), 401, "invalid_request_error", "invalid_api_key"),
        (errors.ModelNotFound("x"), 404, "invalid_request_error", "model_not_found"),
        (TooLarge("x"), 413, "invalid_request_error", "request_too_large"),
        (errors.UnsupportedMediaType("x"), 415, "invalid_request_error", "unsupported_media_type"),
        (errors.Overloaded("x", retry_after=1), 429, "rate_limit_error", "overloaded"),
        (errors.NonFinite("x"), 500, "server_error", "non_finite"),
        (errors.Unavailable("x"), 503, "overloaded_error", "unavailable"),
    ],
)
def test_error_types(error: errors.WhimbrelError, status: int, kind: str, code: str) -> None:
    detail = orjson.loads(render_error(error))["error"]
    assert error.status == status
    assert (detail["type"], detail["code"], detail["param"]) == (kind, code, None)
