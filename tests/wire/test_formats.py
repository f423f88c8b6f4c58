"""Response formats of both routes over a real app, and their negotiation.

The Arrow streams under golden/arrow were read and checked by pyarrow 26.0.1 and nanoarrow 0.9.0 (`python tests/wire/test_formats.py`
writes them anew). pyarrow reads them here, too.
"""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pyarrow
import pyarrow.ipc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asgi import Answer, call
from fake_embedder import FakeEmbedder, FakeModel
from whimbrel.dialects import native, openai
from whimbrel.dialects.common.responses import ARROW, NPY, OCTETS, accepted_media_type
from whimbrel.errors import InvalidRequest, TooLarge
from whimbrel.server.app.app import create_app
from whimbrel.server.app.openapi import docs_page, openapi_document
from whimbrel.server.app.routing import ModelRegistry
from whimbrel.types.request import Request
from whimbrel.types.result import Outputs, Ragged, Result, Sparse, Timings
from whimbrel.types.scheduling import Scheduling
from whimbrel.wire.dtypes import EncodedArray, from_bytes
from whimbrel.wire.json_base64 import to_base64
from whimbrel.wire.raw import Block, read_blocks

GOLDEN = Path(__file__).parents[1] / "golden/arrow"
RANDOM = np.random.default_rng(3)
DENSE = RANDOM.standard_normal((3, 16)).astype(np.float32)
SPARSE = Sparse(np.array([3, 9, 4], np.int32), np.array([0.5, 2, 1], np.float32), np.array([0, 2, 2, 3]))
TOKENS = Ragged(RANDOM.standard_normal((5, 8)).astype(np.float32), np.array([0, 1, 1, 5]))
ALL = Outputs(dense=DENSE, sparse=SPARSE, multi_vector=TOKENS, scores=DENSE[:, :1].copy())
EVERYTHING = ("dense", "sparse", "multi_vector", "scores")


class Embedder(FakeEmbedder):
    """Gives what it is asked for of ALL."""

    async def run(self, request: Request, scheduling: Scheduling) -> Result:
        outputs = {name: getattr(ALL, name) for name in request.outputs or ("dense",)}
        return Result(Outputs(**outputs), 11, 0, Timings())


def post(path: str, accept: str = "*/*", **fields: Any) -> Answer:
    body = orjson.dumps({"input": ["a", "b", "c"]} | fields)
    app = create_app(ModelRegistry(Embedder()))
    return asyncio.run(call(app, "POST", path, headers={"content-type": "application/json", "accept": accept}, body=body))


PATHS = pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/embed"])
TYPES = ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
SMALL = ["int8", "uint8", "binary", "ubinary"]


def numbers(array: np.ndarray, dtype: Any) -> np.ndarray:
    return EncodedArray(array, dtype).numbers()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("order", ["native", "little", "big"])
def test_bytes_are_vllm_s(dtype: Any, order: Any) -> None:
    """A header `metadata` with an entry for each vector (vLLM 0.33)."""
    answer = post("/v1/embeddings", encoding_format="bytes", embed_dtype=dtype, endianness=order)
    assert answer.headers["content-type"] == OCTETS
    assert int(answer.headers["content-length"]) == len(answer.body)
    about = orjson.loads(answer.headers["metadata"])
    assert (about["model"], about["usage"]) == ("fake", {"prompt_tokens": 11, "total_tokens": 11})
    for index, (each, vector) in enumerate(zip(about["data"], DENSE, strict=True)):
        assert (each["index"], each["embed_dtype"], each["shape"]) == (index, dtype, [16])
        assert each["endianness"] == ("big" if order == "big" else "little")
        data = answer.body[each["start"] : each["end"]]
        assert np.array_equal(from_bytes(data, dtype, (16,), each["endianness"]), numbers(vector, dtype))
    bare = post("/v1/embeddings", encoding_format="bytes_only", embed_dtype=dtype, endianness=order)
    assert bare.body == answer.body
    assert "metadata" not in bare.headers


@pytest.mark.parametrize("dtype", [*TYPES, *SMALL])
@pytest.mark.parametrize("order", [None, "big"])
def test_bytes_of_several_outputs(dtype: Any, order: Any) -> None:
    answer = post("/v1/embed", outputs=EVERYTHING, encoding_format="bytes", embed_dtype=dtype, endianness=order)
    about = orjson.loads(answer.headers["metadata"])
    assert (about["model"], about["usage"]["total_tokens"]) == ("fake", 11)
    blocks = msgspec.convert(about["arrays"], list[Block])
    assert [block.endianness for block in blocks] == ["big" if order else "little"] * 7
    found = read_blocks(blocks, answer.body)
    floats = dtype if dtype in TYPES else "float32"
    assert np.array_equal(found["dense"], numbers(DENSE, dtype))
    assert np.array_equal(found["sparse.offsets"], SPARSE.offsets_N1)
    assert np.array_equal(found["sparse.ids"], SPARSE.ids_X)
    assert np.array_equal(found["sparse.weights"], numbers(SPARSE.weights_X, floats))
    assert np.array_equal(found["multi_vector.offsets"], TOKENS.offsets_N1)
    assert np.array_equal(found["multi_vector.rows"], numbers(TOKENS.rows_XD, dtype))
    assert np.array_equal(found["scores"], numbers(DENSE[:, :1], floats))


def without_stamp(told: Any) -> Any:
    """Return the header that describes the bytes, without its `id` and `created`."""
    about = json.loads(told.headers.get("metadata", "{}"))
    return {name: value for name, value in about.items() if name not in ("id", "created")}


@PATHS
def test_each_format_says_the_same(path: str) -> None:
    """Bit for bit, whether asked for in the body or by Accept."""
    for form, kind in (("bytes", OCTETS), ("npy", NPY), ("arrow", ARROW)):
        told, negotiated = post(path, encoding_format=form), post(path, accept=kind)
        assert told.body == negotiated.body
        assert told.headers["content-type"] == negotiated.headers["content-type"] == kind
        assert without_stamp(told) == without_stamp(negotiated)
        assert told.status == 200
    assert np.array_equal(np.load(io.BytesIO(post(path, encoding_format="npy").body)), DENSE)
    assert post(path, encoding_format="bytes_only").body == DENSE.tobytes()
    assert post(path, accept=OCTETS, encoding_format="float").headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "accept",
    ["", "*/*", "application/json", "text/html, application/xhtml+xml", "application/json, text/plain, */*", "nonsense;q=x"],
)
@PATHS
def test_json_is_the_default(path: str, accept: str) -> None:
    answer = post(path, accept=accept)
    assert answer.headers["content-type"] == "application/json"
    assert answer.status == 200


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (OCTETS, OCTETS), (f"{OCTETS}, */*", OCTETS), (f"*/*, {OCTETS}", OCTETS), (f"{OCTETS};q=0.5, application/json", "application/json"),
        (f"application/json;q=0.1, {ARROW}", ARROW), (f"{NPY}, {OCTETS}", NPY), (f"{OCTETS};q=0", "application/json"),
        (f"{OCTETS};q=0.5, */*", "application/json"), (f"text/html, {NPY};q=0.2", NPY), (OCTETS.upper(), OCTETS), ("application/json, " + OCTETS, "application/json"),
    ],
)  # fmt: skip
def test_accept(accept: str, chosen: str) -> None:
    assert accepted_media_type(accept, [OCTETS, NPY, ARROW]) == chosen


@given(st.text(max_size=40))
def test_any_accept_is_taken(accept: str) -> None:
    assert accepted_media_type(accept, [OCTETS, NPY]) in ("application/json", OCTETS, NPY)


def test_base64_in_other_types() -> None:
    for path, rows in (
        ("/v1/embeddings", lambda body: [each["embedding"] for each in body["data"]]),
        ("/v1/embed", lambda body: body["outputs"]["dense"]),
    ):
        body = orjson.loads(post(path, encoding_format="base64", embed_dtype="bfloat16", endianness="big").body)
        assert rows(body) == to_base64(EncodedArray(DENSE, "bfloat16", "big"))


@pytest.mark.parametrize("dtype", ["float16", *SMALL])
def test_json_numbers_in_other_types(dtype: Any) -> None:
    """JSON of the native route has them. /v1/embeddings has float32 in JSON, as vLLM does."""
    found = orjson.loads(post("/v1/embed", outputs=EVERYTHING, embed_dtype=dtype).body)["outputs"]
    assert np.array_equal(np.array(found["dense"], np.float32), numbers(DENSE, dtype))
    assert np.array_equal(np.array(found["multi_vector"][2], np.float32), numbers(TOKENS[2], dtype))
    assert (found["sparse"][0], found["multi_vector"][1]) == ({"ids": [3, 9], "weights": [0.5, 2]}, [])
    if dtype == "float16":
        plain = orjson.loads(post("/v1/embeddings", embed_dtype=dtype).body)["data"]
        assert np.array_equal(np.array([row["embedding"] for row in plain], np.float32), DENSE)


@pytest.mark.parametrize("form", ["bytes_only", "npy"])
def test_one_array_is_one(form: str) -> None:
    for outputs in (["dense", "scores"], "multi_vector", "sparse"):
        answer = post("/v1/embed", outputs=outputs, encoding_format=form)
        error = orjson.loads(answer.body)["error"]
        assert (answer.status, error["param"]) == (400, "encoding_format")
        assert f"{form} holds one array" in error["message"]


def test_what_is_refused_names_its_field() -> None:
    for path, fields, param in (
        ("/v1/embeddings", {"embed_dtype": "int8"}, "embed_dtype"), ("/v1/embed", {"embed_dtype": "float64"}, "embed_dtype"),
        ("/v1/embed", {"endianness": "middle"}, "endianness"), ("/v1/embeddings", {"encoding_format": "raw"}, "encoding_format"),
    ):  # fmt: skip
        answer = post(path, **fields)
        assert (answer.status, orjson.loads(answer.body)["error"]["param"]) == (400, param)
    with pytest.raises(TooLarge, match="513 inputs; the limit with encoding_format bytes is 512"):
        openai.parse_request(orjson.dumps({"input": ["a"] * 513, "encoding_format": "bytes"}))
    openai.parse_request(orjson.dumps({"input": ["a"] * 513, "encoding_format": "bytes_only"}))


def test_numbers_too_large_for_a_type() -> None:
    sent = native.parse_embed(b'{"input": "a", "encoding_format": "npy", "embed_dtype": "float16"}').body
    large = Result(Outputs(dense=DENSE * 1e6), 1, 0, Timings())
    with pytest.raises(InvalidRequest, match=r"dense has numbers up to .* float16 does not hold"):
        native.render_embed(sent, large, FakeModel.named("m"))


def test_the_page_shows_them() -> None:
    document = openapi_document()
    page = docs_page(document, base_url="http://localhost:8000")
    assert page.count(f"<code>{ARROW}</code>") == 4
    for path in ("/v1/embed", "/v1/embeddings"):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert list(content) == ["application/json", OCTETS, NPY, ARROW]


# Arrow


def stream(dtype: str, order: str) -> bytes:
    return post("/v1/embed", outputs=EVERYTHING, encoding_format="arrow", embed_dtype=dtype, endianness=order).body


STREAMS = [(dtype, order) for dtype in ("float32", "float16", "bfloat16", "int8", "ubinary") for order in ("little", "big")]


@pytest.mark.parametrize(("dtype", "order"), STREAMS)
def test_arrow_streams_are_those_that_were_checked(dtype: str, order: str) -> None:
    assert stream(dtype, order) == (GOLDEN / f"{dtype}-{order}.arrows").read_bytes()


@pytest.mark.parametrize(("dtype", "order"), STREAMS)
def test_arrow_reads_them(dtype: Any, order: Any) -> None:
    check(pyarrow.ipc.open_stream(stream(dtype, order)).read_all(), dtype)


def check(table: Any, dtype: Any) -> None:
    table.validate(full=True)
    assert table.schema.metadata[b"model"] == b"fake"
    rows = table.to_pylist()
    assert [row["sparse"]["ids"] for row in rows] == [[3, 9], [], [4]]
    assert [len(row["multi_vector"]) for row in rows] == [1, 0, 4]
    if dtype != "bfloat16":  # fixed_size_binary[2], which pyarrow leaves as it is
        assert [row["sparse"]["weights"] for row in rows] == [[0.5, 2], [], [1]]
        assert np.array_equal(np.array([row["dense"] for row in rows], np.float32), numbers(DENSE, dtype))
        assert np.array_equal(np.array(rows[2]["multi_vector"], np.float32), numbers(TOKENS[2], dtype))


def test_arrow_pieces_are_the_arrays() -> None:
    sent = native.parse_embed(b'{"input": "a", "encoding_format": "arrow"}').body
    answer = native.render_embed(sent, Result(ALL, 1, 0, Timings()), FakeModel.named("m"))
    assert not isinstance(answer, bytes)
    pieces = list(answer.chunks)
    assert sum(map(len, pieces)) == answer.size
    for array in (DENSE, TOKENS.rows_XD, SPARSE.ids_X):
        assert any(np.shares_memory(np.frombuffer(piece, np.uint8), array) for piece in pieces if len(piece))


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for kind, byte_order in STREAMS:
        data = stream(kind, byte_order)
        check(pyarrow.ipc.open_stream(data).read_all(), kind)
        (GOLDEN / f"{kind}-{byte_order}.arrows").write_bytes(data)
