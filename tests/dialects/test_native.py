"""Whimbrel's own dialect: every output in both forms, and every way a body can be wrong."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_embedder import FakeModel, asked
from vectors import codes_of, same_bits, told, vectors
from whimbrel.dialects import native
from whimbrel.errors import InvalidRequest
from whimbrel.server.app.openapi import docs_page, openapi_document
from whimbrel.types.request import Request
from whimbrel.types.result import Outputs, Ragged, Result, Sparse, Timings

RANDOM = np.random.default_rng(3)
DENSE = RANDOM.standard_normal((3, 5)).astype(np.float32)
SPARSE = Sparse(np.array([3, 9, 4], np.int32), np.array([0.5, 2, 1], np.float32), np.array([0, 2, 2, 3]))
TOKENS = Ragged(RANDOM.standard_normal((4, 2)).astype(np.float32), np.array([0, 1, 1, 4]))


def read(**body: Any) -> Request:
    return asked(native.parse_embed(orjson.dumps(body)))


def test_every_field() -> None:
    body = {"input_type": "query", "outputs": ["dense", "sparse"], "prompt": "", "instruction": "judge", "dimensions": 3}
    more = {
        "normalize": True,
        "activate": False,
        "truncate": False,
        "max_tokens": 9,
        "max_active_dims": 4,
        "priority": -1,
        "late_chunking": True,
        "split_long": True,
    }
    assert read(input=[["q", "d"], ["q", "e"]], **body, **more) == Request(
        [("q", "d"), ("q", "e")],
        ("dense", "sparse"),
        prompt="",
        input_type="query",
        instruction="judge",
        dimensions=3,
        normalize=True,
        activate=False,
        max_active_dims=4,
        truncate="never",
        max_tokens=9,
        late_chunking=True,
        split_long=True,
    )
    assert read(input="a") == Request(["a"])
    nulls = dict.fromkeys(native.EmbedRequest.__struct_fields__) | {"input": "a"}
    assert read(**nulls) == Request(["a"])


def test_one_output_may_be_a_string() -> None:
    assert read(input="a", outputs="sparse").outputs == ("sparse",)
    with pytest.raises(InvalidRequest, match=r"outputs: .*'dence'; it takes 'dense'"):
        read(input="a", outputs="dence")
    with pytest.raises(InvalidRequest, match="it takes 'dense'") as caught:
        read(input="a", outputs=["dense", "dence"])
    assert caught.value.param == "outputs[1]"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"), ({"input": []}, "input"), ({"input": [["a"]]}, "input[0]"), ({"input": [["a", "b"], ["a", "b", "c"]]}, "input[1]"),
        ({"input": [["a", 1]]}, "input[0]"), ({"input": [["a", "b"], [1, 2]]}, "input[1]"), ({"input": ["a", ["a", "b"]]}, "input[1]"),
        ({"input": "a", "outputs": ["dence"]}, "outputs[0]"), ({"input": "a", "outputs": 3}, "outputs"),
        ({"input": "a", "input_type": "passage"}, "input_type"), ({"input": "a", "dimension": 3}, None),
        ({"input": "a", "prompt": "a ", "prompt_name": "b"}, "prompt"), ({"input": "a", "max_tokens": 0}, "max_tokens"),
        ({"input": "a", "truncate": "middle"}, "truncate"), ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(body: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as error:
        read(**body)
    assert error.value.param == param


def answer(encoding_format: str) -> Any:
    body = native.parse_embed(orjson.dumps({"input": "a", "encoding_format": encoding_format})).body
    outputs = Outputs(dense=DENSE, sparse=SPARSE, multi_vector=TOKENS, scores=DENSE[:, :1].copy())
    found = orjson.loads(native.render_embed(body, Result(outputs, 11, 0, Timings()), FakeModel.named("m")))
    assert (found["model"], found["usage"]) == ("m", {"prompt_tokens": 11, "total_tokens": 11})
    assert set(found["outputs"]) == {"dense", "sparse", "multi_vector", "scores"}
    return found["outputs"]


def test_numbers() -> None:
    found = answer("float")
    assert np.array_equal(np.array(found["dense"], np.float32), DENSE)
    assert found["sparse"] == [{"ids": [3, 9], "weights": [0.5, 2]}, {"ids": [], "weights": []}, {"ids": [4], "weights": [1]}]
    assert [len(rows) for rows in found["multi_vector"]] == [1, 0, 3]
    assert np.array_equal(np.array(found["multi_vector"][2], np.float32), TOKENS[2])
    assert np.array_equal(np.array(found["scores"], np.float32), DENSE[:, :1])


def test_bytes() -> None:
    found = answer("base64")
    assert np.array_equal(np.stack([floats(row) for row in found["dense"]]), DENSE)
    for text, entries in enumerate(found["sparse"]):
        assert np.array_equal(np.frombuffer(base64.b64decode(entries["ids"]), "<i4"), SPARSE[text][0])
        assert np.array_equal(floats(entries["weights"]), SPARSE[text][1])
    for text, matrix in enumerate(found["multi_vector"]):
        assert np.array_equal(floats(matrix["data"]).reshape(matrix["shape"]), TOKENS[text])


@given(vectors(4, 8), st.sampled_from(["float", "base64"]))
def test_what_is_written_reads_back(rows: np.ndarray, form: str) -> None:
    """Bit for bit, whatever the output is."""
    offsets = np.array([0, 1, 1, 4])
    entries = Sparse(np.arange(4, dtype=np.int32), rows[:, 0].copy(), offsets)
    tokens = Ragged(rows, offsets)
    outputs = Outputs(dense=rows[:3], sparse=entries, multi_vector=tokens, scores=rows[:3, :2].copy(), token_scores=tokens)
    body = native.parse_embed(orjson.dumps({"input": ["a"] * 3, "encoding_format": form})).body
    found = told(native.render_embed(body, Result(outputs, 11, 0, Timings()), FakeModel.named("m")))["outputs"]
    numbers: Any = floats if form == "base64" else lambda given: np.array(given, np.float32)
    assert same_bits([numbers(row) for row in found["dense"]], rows[:3])
    assert same_bits([numbers(row) for row in found["scores"]], rows[:3, :2])
    assert same_bits(np.concatenate([numbers(each["weights"]) for each in found["sparse"]]), entries.weights_X)
    for name in ("multi_vector", "token_scores"):
        texts = [each["data"] if form == "base64" else each for each in found[name]]
        assert same_bits(np.concatenate([numbers(each).reshape(-1, 8) for each in texts]), rows)


@given(vectors(3, 8), st.sampled_from(["int8", "uint8", "binary", "ubinary"]), st.sampled_from(["float", "base64"]))
def test_quantised_vectors_read_back(rows: np.ndarray, kind: Any, form: str) -> None:
    """Codes of the type are the same in JSON and in base64."""
    body = native.parse_embed(orjson.dumps({"input": ["a"] * 3, "encoding_format": form, "embed_dtype": kind})).body
    found = told(native.render_embed(body, Result(Outputs(rows), 11, 0, Timings()), FakeModel.named("m")))["outputs"]["dense"]
    code = np.int8 if kind in ("int8", "binary") else np.uint8
    codes = np.stack([np.frombuffer(base64.b64decode(row), code) if form == "base64" else np.array(row, code) for row in found])
    assert np.array_equal(codes, codes_of(kind, rows))


def floats(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")


def test_the_page_shows_every_field() -> None:
    page = docs_page(openapi_document(), base_url="http://localhost:8000")
    for field in (*native.EmbedRequest.__struct_fields__, *native.EmbedOutputs.__struct_fields__):
        assert f"<code>{field}</code>" in page
