"""Bodies that are wrong, odd or large. Each is answered with where the fault is; after each the server answers as before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest

from raw_http import Answer, ask, head, post
from serving import Server
from whimbrel import Client, Engine
from wrong_bodies import WRONG_BODIES

GOLDEN = "A whimbrel is a wader."
MIB = 2**20


@pytest.fixture(autouse=True)
def still_answers(server: Server, engine: Engine) -> Iterator[None]:
    """Whatever a test did: the server is ready, says nothing of a bug, and a text has the same bits as in-process."""
    yield
    assert ask(server.port, head("GET", "/health/ready")).status == 200
    with Client(server.url) as client:
        assert np.array_equal(client.embed(GOLDEN), engine.embed(GOLDEN))
    assert "Traceback" not in server.log


def assert_refused(answer: Answer, param: str | None, status: int = 400) -> None:
    assert answer.status == status, answer
    error = answer.error
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert len(answer.body) < 1000


def vectors(answer: Answer) -> Any:
    assert answer.status == 200, answer
    return np.array([row["embedding"] for row in answer.json()["data"]], np.float32)


@pytest.mark.parametrize(("body", "param"), WRONG_BODIES, ids=lambda value: str(value)[:40])
@pytest.mark.sample(2)
def test_B1_bodies_that_are_no_request(body: bytes, param: str | None, server: Server) -> None:
    assert_refused(ask(server.port, post(body)), param)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_B1_other_encodings(encoding: str, server: Server) -> None:
    text = '{"input": "naïve"}'
    assert_refused(ask(server.port, post(text.encode(encoding))), None)


def test_B1_malformed_json_is_located(server: Server) -> None:
    assert "(byte 14)" in ask(server.port, post(b'{"input": "a" "b"}')).error["message"]


@pytest.mark.parametrize("start", [b"", b'{"input":', b'{"x":', b'{"input":"a","user":'])
@pytest.mark.parametrize("bracket", [b"[", b'{"a":'])
def test_B2_100000_brackets(start: bytes, bracket: bytes, server: Server) -> None:
    began = time.monotonic()
    answer = ask(server.port, post(start + bracket * 100_000))
    assert time.monotonic() - began < 5
    assert answer.status == 400


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"1" * 100_000, b"0x10", b"1_000", b"01"])
def test_B3_numbers_that_are_none(number: bytes, server: Server) -> None:
    assert ask(server.port, post(b'{"input": [%b]}' % number)).status == 400
    assert ask(server.port, post(b'{"input": "a", "dimensions": %b}' % number)).status == 400


@pytest.mark.parametrize("text", [rb"\ud800", rb"a\udfff", rb"\ud83d", rb"\udc00\ud800"])
def test_B4_lone_surrogates(text: bytes, server: Server) -> None:
    assert ask(server.port, post(b'{"input": "%b"}' % text)).status == 400
    assert ask(server.port, post(b'{"input": ["ok", "%b"]}' % text)).status == 400


def test_B5_the_last_of_two_keys_wins(server: Server, engine: Engine) -> None:
    answer = ask(server.port, post(b'{"input": "first", "input": "second"}'))
    assert np.array_equal(vectors(answer)[0], engine.embed("second"))


def test_B6_fields_that_are_not_known_are_ignored(server: Server, engine: Engine) -> None:
    answer = ask(server.port, post({"input": "a", "unknown": {"deep": [1, None]}, "": 1, "Input": 3}))
    assert np.array_equal(vectors(answer)[0], engine.embed("a"))


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonp", "json", "*/*"]
)
def test_B7_other_content_types_are_refused(kind: str, server: Server) -> None:
    assert_refused(ask(server.port, post({"input": "a"}, content_type=kind)), None, 415)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/json ;x=y"])
def test_B7_json_in_other_words(kind: str, server: Server) -> None:
    assert ask(server.port, post({"input": "a"}, content_type=kind)).status == 200


@pytest.mark.parametrize(
    ("texts", "param"),
    [(["a", 1], "input[1]"), (["a", None], "input[1]"), (["a", ["b"]], "input[1][0]"), ([1, "a"], "input[1]"), ([["a"], "b"], "input[0][0]"),
     ([[1], [2, None]], "input[1][1]"), ({"text": "a"}, "input"), (3, "input"), (True, "input"), ([[[1]]], "input[0][0]"), ([], "input")],
)  # fmt: skip
def test_B8_mixed_lists_say_where(texts: Any, param: str, server: Server) -> None:
    assert_refused(ask(server.port, post({"input": texts})), param)


@pytest.mark.parametrize("size", [2 * MIB, 30 * MIB, 50 * MIB])
def test_B9_a_single_string_of_spaces(size: int, server: Server) -> None:
    began = time.monotonic()
    answer = ask(server.port, post(b'{"input": "' + b" " * size + b'"}'))
    assert_refused(answer, "input[0]" if size < 32 * MIB else None, 413)
    assert time.monotonic() - began < 10


def test_B9_a_text_just_below_the_limit_is_cut_to_the_model_s_length(server: Server, engine: Engine) -> None:
    text = "whimbrel " * 110_000
    answer = ask(server.port, post({"input": text}))
    assert np.array_equal(vectors(answer)[0], engine.embed(text[:4000]))
    assert answer.json()["usage"]["prompt_tokens"] == 256


def test_B9_many_texts_with_a_long_prompt(server: Server) -> None:
    assert ask(server.port, post({"input": ["a"] * 2048, "prompt": "x" * 100_000})).status == 413


@pytest.mark.parametrize(
    ("model", "status"),
    [(3, 400), ([], 400), ({}, 400), (True, 400), (" ", 404), ("x" * 10_000, 404), ("../../etc/passwd", 404), ("C:\\x", 404),
     ("a\x00b", 404), ("/etc/passwd", 404), ("nope", 404), ("\x1b[31m", 404), ("sentence-transformers/all-MiniLM-L6-v2 ", 404)],
)  # fmt: skip
def test_B10_models_that_are_not_served(model: Any, status: int, server: Server) -> None:
    answer = ask(server.port, post({"input": "a", "model": model}))
    assert answer.status == status
    assert answer.error["param"] == "model"
    if status == 404:
        assert answer.error["code"] == "model_not_found"
        assert "passwd:" not in answer.body.decode()


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"dimensions": -1}, "dimensions"), ({"dimensions": 10**9}, "dimensions"), ({"dimensions": 2**70}, "dimensions"),
     ({"dimensions": "256"}, "dimensions"), ({"dimensions": 3.5}, "dimensions"), ({"dimensions": 385}, "dimensions"), ({"dimensions": True}, "dimensions"),
     ({"encoding_format": "hex"}, "encoding_format"), ({"encoding_format": 1}, "encoding_format"), ({"truncate": "middle"}, "truncate"),
     ({"truncate": 1}, "truncate"), ({"prompt_name": "query"}, "prompt_name"), ({"prompt_name": 1}, "prompt_name"),
     ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"), ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
     ({"normalize": "yes"}, "normalize"), ({"input": "w " * 999, "truncate": False}, "input[0]"), ({"input": [5], "prompt": "x"}, "prompt")],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_B11_wrong_values_of_options(fields: dict[str, Any], param: str, server: Server) -> None:
    content = (
        orjson.dumps({"input": "a"} | fields) if 2**70 not in fields.values() else b'{"input": "a", "dimensions": %d}' % 2**70
    )
    assert_refused(ask(server.port, post(content)), param)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"encoding_format": "hex"}, ["'float'", "'base64'"]), ({"truncate": "middle"}, ["'right'", "'left'", "'never'"]), ({"prompt_name": "query"}, ["none"])],
)  # fmt: skip
def test_B11_unknown_words_are_answered_with_the_known(fields: dict[str, Any], words: list[str], server: Server) -> None:
    message = ask(server.port, post({"input": "a"} | fields)).error["message"]
    assert all(word in message for word in words), message
