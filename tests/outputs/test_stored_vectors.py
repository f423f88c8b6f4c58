"""Vectors in place of texts, in the verbs, on the routes and through engine processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import httpx2
import msgspec
import numpy as np
import orjson
import pybase64
import pytest
from numpy.typing import NDArray

from checkpoints.bge_m3 import write_m3
from checkpoints.encoders import write_bert
from checkpoints.late_interaction import write_stanford
from checkpoints.late_references import DOCUMENTS, QUERIES
from checkpoints.sentence_layout import sentence_layout
from serving import Server
from whimbrel import AsyncEngine, Engine
from whimbrel.errors import InvalidRequest
from whimbrel.model.ops.token_vectors import EMPTY
from whimbrel.types.request import OutputName

QUERY = QUERIES[0]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Engine]]:
    engines: list[Engine] = []

    @cache
    def load(kind: str) -> Engine:
        folder = tmp_path_factory.mktemp(kind)
        _write(kind, folder)
        engines.append(Engine(str(folder), dtype="float32"))
        return engines[-1]

    yield load
    for each in engines:
        each.close()


def _write(kind: str, folder: Path) -> None:
    if kind == "late":
        write_stanford(folder)
    elif kind == "m3":
        write_m3(folder)
    else:
        write_bert(folder)
        sentence_layout(folder, modes=("mean",), heads=())


@pytest.mark.parametrize(
    ("kind", "output"),
    [("late", "multi_vector"), ("dense", "dense"), *(("m3", o) for o in ("dense", "sparse", "multi_vector"))],
)
def test_vectors_score_as_their_texts(kind: str, output: OutputName, engine: Callable[[str], Engine]) -> None:
    """The very same bits (except for cosines, since vectors are normalised again): on either side, on both, and among texts."""
    atol = 1e-6 if output == "dense" else 0
    model = engine(kind)
    more: Any = {"score_by": output} if kind == "m3" else {}
    queries = getattr(model.encode(QUERIES, output, input_type="query"), output)
    documents = getattr(model.encode(DOCUMENTS, output, input_type="document"), output)
    query = queries[0]
    expected = model.score(QUERY, DOCUMENTS, **more)
    mixed = [DOCUMENTS[i] if i % 2 else documents[i] for i in range(len(DOCUMENTS))]
    for q, given in ((QUERY, documents), (query, DOCUMENTS), (query, documents), (QUERY, mixed), (query, list(documents))):
        np.testing.assert_allclose(model.score(q, given, **more), expected, rtol=0, atol=atol)
        found = model.rerank(q, given, top_n=2, **more)
        assert [each.index for each in found] == np.argsort(-expected, kind="stable")[:2].tolist()
    count = min(len(QUERIES), len(DOCUMENTS))
    pairs = model.score([*QUERIES[:count]], [*DOCUMENTS[:count]], **more)
    found = model.score([queries[i] for i in range(count)], [documents[i] for i in range(count)], **more)
    np.testing.assert_allclose(found, pairs, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "binary"])
def test_fewer_bits(dtype: str, engine: Callable[[str], Engine]) -> None:
    """int8 counts 127ths, bits stand for vectors of norm 1."""
    model = engine("late")
    documents = list(model.multi_vector(DOCUMENTS, input_type="document"))
    query = model.multi_vector(QUERY, input_type="query")[0]
    width = query.shape[1]
    stored, meant = zip(*(_stored(rows, dtype) for rows in documents), strict=True)
    for as_query in (QUERY, query):
        found = model.score(as_query, list(stored))
        expected = [(query.astype(np.float64) @ rows.T).max(axis=1).sum() for rows in meant]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert width % 8 == 0
    swapped = model.score(stored[0], documents)
    np.testing.assert_allclose(swapped, [(meant[0] @ rows.T).max(axis=1).sum() for rows in documents], rtol=1e-5)
    together = model.score(QUERY, [*stored, *documents, *DOCUMENTS])
    assert together.tolist() == [
        *model.score(QUERY, list(stored)),
        *model.score(QUERY, documents),
        *model.score(QUERY, DOCUMENTS),
    ]


def _stored(rows: NDArray[np.float32], dtype: str) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """An array of few bits, and the vectors that it means."""
    if dtype == "binary":
        return np.packbits(rows > 0, axis=1), np.where(rows > 0, 1.0, -1.0) / np.sqrt(rows.shape[1])
    if dtype == "int8":
        steps = np.round(rows * 127).astype(np.int8)
        return steps, steps / 127
    return rows.astype(dtype), rows.astype(dtype).astype(np.float64)


def test_cosine_of_vectors_of_any_length(engine: Callable[[str], Engine]) -> None:
    model = engine("dense")
    vectors = model.embed(DOCUMENTS)
    expected = model.score(QUERY, DOCUMENTS)
    for factor in (37, 1e30, 1e-30):  # the squares of the last two are no float32
        np.testing.assert_allclose(model.score(QUERY, vectors * np.float32(factor)), expected, rtol=1e-5, atol=1e-6)
    bits = np.packbits(vectors > 0, axis=1)
    signs = np.where(vectors > 0, 1.0, -1.0)
    query = model.embed(QUERY, normalize=True)
    np.testing.assert_allclose(model.score(QUERY, bits), signs @ query / np.sqrt(signs.shape[1]), rtol=1e-5, atol=1e-6)
    assert model.score(QUERY, np.zeros_like(vectors)).tolist() == [0.0] * len(vectors)


def test_what_holds_several_documents(engine: Callable[[str], Engine]) -> None:
    """Two arrays in a tuple are two documents, and numpy's own lists are lists."""
    for kind in ("late", "dense"):
        model = engine(kind)
        texts = [DOCUMENTS[0], DOCUMENTS[0][::-1]]
        vectors = list(model.multi_vector(texts, input_type="document")) if kind == "late" else list(model.embed(texts))
        expected = model.score(QUERY, vectors).tolist()
        held = np.empty(2, object)
        held[:] = vectors
        for given in (tuple(vectors), held, (vectors[0], vectors[1])):
            assert model.score(QUERY, given).tolist() == expected
        held[1] = texts[1]
        assert model.score(QUERY, held).tolist() == model.score(QUERY, [vectors[0], texts[1]]).tolist()
        assert model.score(QUERY, np.array(texts)).tolist() == model.score(QUERY, texts).tolist()


def test_a_document_without_vectors(engine: Callable[[str], Engine]) -> None:
    model = engine("late")
    query = model.multi_vector(QUERY, input_type="query")[0]
    for q in (QUERY, query):
        assert model.score(q, [query[:0]]).tolist() == [EMPTY]
        assert [each.index for each in model.rerank(q, [query[:0], query])] == [1, 0]


def _array(*shape: int, dtype: str = "float32", value: float = 1) -> NDArray[Any]:
    return np.full(shape, value, dtype)


@pytest.mark.parametrize(
    ("kind", "documents", "message"),
    [
        ("late", ["a", _array(3, 12)], r"documents\[1\]: the vectors have 12 columns; those they are compared with have 16"),
        ("late", [_array(3, 16), _array(16)], r"documents\[1\]: the array has the shape \(16,\); .* \(tokens, width\)"),
        ("late", [_array(3, 16), _array(2, 16, value=np.nan)], r"documents\[1\]: holds nan \(at row 0, column 0\)"),
        ("late", [_array(3, 16, dtype="float64", value=1e300)], r"documents\[0\]: holds inf"),
        ("late", [_array(3, 16, dtype="int64")], r"documents\[0\]: the array is of int64; it takes float32, float16, int8"),
        ("late", [_array(3, 16, dtype="bool")], r"documents\[0\]: the array is of bool"),
        ("late", [_array(3, 1, dtype="uint8")], r"documents\[0\]: the vectors have 8 columns"),
        ("late", [_array(1, 3, 16)], r"documents\[0\]: the array has the shape"),
        ("late", [np.ma.masked_invalid(_array(3, 16))], r"documents\[0\]: is a masked array"),
        ("late", np.array(1.0), r"documents: the array has the shape \(\)"),
        ("late", np.array([[None]]), r"documents: the array is of object"),
        ("late", [[0.5] * 16], r"documents\[0\]: must be a string or an array of multi_vector, is list"),
        ("late", [b"abc"], r"documents\[0\]: must be a string or an array .*, is bytes"),
        ("late", [None], r"documents\[0\]: must be a string or an array .*, is NoneType"),
        (
            "late",
            [(_array(1, dtype="int32"), _array(1))],
            r"documents\[0\]: must be a string or an array .*, is ids and weights",
        ),
        ("dense", _array(3, 12), r"documents\[0\]: the vectors have 12 columns"),
        ("dense", [_array(2, 16)], r"documents\[0\]: the array has the shape \(2, 16\); .* \(width,\)"),
    ],
)
def test_what_is_wrong_is_named(kind: str, documents: Any, message: str, engine: Callable[[str], Engine]) -> None:
    with pytest.raises(InvalidRequest, match=message):
        engine(kind).score(QUERY, documents)
    with pytest.raises(InvalidRequest, match=message):
        engine(kind).rerank(QUERY, documents)


def test_sparse_vectors_that_are_wrong(engine: Callable[[str], Engine]) -> None:
    model = engine("m3")
    size = model.card.encoder.vocab_size

    def wrong(ids: Any, weights: Any, message: str) -> None:
        with pytest.raises(InvalidRequest, match=r"documents\[1\]: " + message):
            model.score(QUERY, ["a", (np.asanyarray(ids), np.asanyarray(weights))], score_by="sparse")

    wrong([1, size], [0.5, 0.5], f"entry {size:,} is outside the vocabulary of {size:,}")
    wrong([1, -1], [0.5, 0.5], "entry -1 is outside")
    wrong([1, 2, 1], [0.5, 0.5, 0.5], "entry 1 is there twice")
    wrong([1, 2], [0.5], "2 entries have 1 weights")
    wrong([1.0], [0.5], "entries are integers and weights floats, not float64 and float64")
    wrong([[1]], [[0.5]], "arrays of entries and weights have one dimension")
    wrong([1, 2], [0.5, np.inf], r"holds inf \(at row 1")
    wrong(np.ma.masked_array([1, 2], [True, False]), [0.5, 0.5], "is a masked array")
    with pytest.raises(InvalidRequest, match=r"documents\[0\]: must be a string, or a pair of arrays"):
        model.score(QUERY, [np.ones(3, np.float32)], score_by="sparse")
    empty = (np.empty(0, np.int32), np.empty(0, np.float32))
    assert model.score(QUERY, [empty], score_by="sparse").tolist() == [0.0]


def test_what_says_nothing_of_vectors_is_refused(engine: Callable[[str], Engine]) -> None:
    model = engine("late")
    rows = model.multi_vector(QUERY, input_type="query")[0]
    with pytest.raises(InvalidRequest, match="prompt: stands before queries, which came as vectors"):
        model.score(rows, DOCUMENTS, prompt="judge: ")
    with pytest.raises(InvalidRequest, match=r"query: has no vectors"):
        model.rerank(rows[:0], DOCUMENTS)
    with pytest.raises(InvalidRequest, match=r"queries\[1\]: has no vectors"):
        model.score([rows, rows[:0]], [rows, rows])
    with pytest.raises(InvalidRequest, match="query: must be a string or its vectors, is list"):
        model.rerank([QUERY], DOCUMENTS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match="activate"):
        model.score(rows, [rows], activate=True)


def test_without_a_text_nothing_is_computed(engine: Callable[[str], Engine]) -> None:
    """Many comparisons at once, of nothing but vectors."""
    model = engine("late")
    rng = np.random.default_rng(0)
    documents = [rng.standard_normal((n, 16)).astype(np.float16) for n in rng.integers(1, 300, 3000)]
    queries = [rng.standard_normal((5, 16)).astype(np.float32) for _ in range(3)]
    expected = [
        [float((query.astype(np.float64) @ rows.astype(np.float64).T).max(axis=1).sum()) for rows in documents]
        for query in queries
    ]
    for query, row in zip(queries, expected, strict=True):
        np.testing.assert_allclose(model.score(query, documents), row, rtol=1e-5, atol=1e-4)
    many = model.score([query for query in queries for _ in documents], documents * 3)
    np.testing.assert_allclose(many, np.concatenate(expected), rtol=1e-5, atol=1e-4)
    scores = asyncio.run(AsyncEngine(model).score(queries[0], documents))
    np.testing.assert_allclose(scores, expected[0], rtol=1e-5, atol=1e-4)


def _sent(rows: NDArray[Any], dtype: str = "float32") -> dict[str, Any]:
    width = rows.shape[1] * (8 if dtype == "binary" else 1)
    return {"data": rows.tobytes(), "dtype": dtype, "shape": [len(rows), width]}


def _scores(answer: Any) -> list[float]:
    """JSON has the shortest text that is the same float32."""
    return np.array([each["score"] for each in answer["data"]], np.float32).tolist()


def _as_json(value: Any) -> bytes:
    return orjson.dumps(value, default=pybase64.b64encode_as_string)


def _post(client: httpx2.Client, path: str, body: Any, packed: bool = False) -> Any:
    headers = {"content-type": "application/msgpack" if packed else "application/json"}
    return client.post(path, content=msgspec.msgpack.encode(body) if packed else _as_json(body), headers=headers)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.sample(1)
def test_over_http(replicas: int, tmp_path: Path) -> None:
    """base64 in JSON and bytes in MessagePack, small and large, against the same model in this process."""
    write_stanford(tmp_path)
    options = ["--dtype", "float32", "--replicas", str(replicas)]
    with Engine(str(tmp_path), dtype="float32") as model, Server(str(tmp_path), *options) as server:
        client = httpx2.Client(base_url=server.url, timeout=60)
        told = _post(client, "/v1/embed", {"input": DOCUMENTS, "input_type": "document", "encoding_format": "base64"}).json()[
            "outputs"
        ]["multi_vector"]
        texts = cast("list[float]", model.score(QUERY, DOCUMENTS).tolist())
        answer = _post(client, "/v1/score", {"queries": QUERY, "documents": told}).json()
        assert _scores(answer) == texts
        long = [text + " and far away" * 40 for text in DOCUMENTS * 20]
        documents = model.multi_vector(long, input_type="document")
        query = model.multi_vector(QUERY, input_type="query")[0]
        expected = np.argsort(-model.score(QUERY, long), kind="stable").tolist()
        for packed in (False, True):
            for q in (QUERY, _sent(query)):
                body = {"query": q, "documents": [_sent(rows) for rows in documents], "return_documents": True}
                answer = _post(client, "/v1/rerank", body, packed).json()
                assert [each["index"] for each in answer["results"]] == expected
                assert "document" not in answer["results"][0]
            stored = [_sent(np.packbits(rows > 0, axis=1), "binary") for rows in documents]
            answer = _post(client, "/v1/score", {"queries": QUERY, "documents": stored}, packed).json()
            bits = [np.packbits(rows > 0, axis=1) for rows in documents]
            assert _scores(answer) == model.score(QUERY, bits).tolist()
        nothing = _post(client, "/v1/rerank", {"query": _sent(query), "documents": [_sent(query)]}).json()
        assert nothing["usage"] == {"prompt_tokens": 0, "total_tokens": 0, "completion_tokens": 0}
        for document, param, message in WRONG:
            refused = _post(client, "/v1/rerank", {"query": QUERY, "documents": ["a", document]})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, param), error
            assert message in error["message"]
        packed_elsewhere = _post(client, "/v1/embeddings", {"input": "a"}, packed=True)
        assert packed_elsewhere.status_code == 415
        cut = client.post(
            "/v1/rerank", content=msgspec.msgpack.encode({"query": "a", "documents": ["b"]})[:-1],
            headers={"content-type": "application/msgpack"},
        )  # fmt: skip
        assert cut.status_code == 400
        assert "not valid MessagePack" in cut.json()["error"]["message"]
        answer = _post(client, "/v1/score", {"queries": QUERY, "documents": DOCUMENTS, "truncate": True}).json()
        assert _scores(answer) == texts
        client.close()


_DATA = np.ones(16, np.float32).tobytes()
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"data": _DATA[:-1], "shape": [1, 16]}, "documents[1].data", "63 bytes are no whole numbers of float32"),
    ({"data": _DATA, "shape": [2, 16]}, "documents[1].data", "64 bytes are not the shape [2, 16], which takes 128"),
    ({"data": _DATA, "shape": [-1, -16]}, "documents[1].shape[0]", "Expected `int` >= 0"),
    ({"data": _DATA, "shape": []}, "documents[1].data", "are not the shape"),
    ({"data": _DATA, "shape": [2**30, 2**30]}, "documents[1].data", "are not the shape"),
    ({"data": b"", "shape": [0, 2**63]}, "documents[1].shape[1]", "Expected `int` <= 2147483647"),
    ({"data": b"", "shape": [0, 2**31 - 1]}, "documents[1]", "the vectors have 2,147,483,647 columns"),
    ({"data": _DATA, "shape": [1, 1, 16]}, "documents[1].shape", "length <= 2"),
    ({"data": _DATA}, "documents[1]", "the array has the shape (16,)"),
    ({"data": _DATA, "shape": [2, 8]}, "documents[1]", "the vectors have 8 columns"),
    ({"data": _DATA, "shape": [4, 128], "dtype": "binary"}, "documents[1]", "the vectors have 128 columns"),
    ({"data": np.full(16, np.nan, np.float32).tobytes(), "shape": [1, 16]}, "documents[1]", "holds nan"),
    ({"data": _DATA, "text": "a"}, "documents[1]", "must have one of text, data"),
    ({}, "documents[1]", "must have one of text, data"),
    ({"ids": b"abcd"}, "documents[1]", "a sparse vector has both ids and weights"),
    ({"ids": b"abcd", "weights": b"abcd"}, "documents[1]", "must be a string or an array of multi_vector, is ids and weights"),
    ({"data": _DATA, "dtype": "bfloat16"}, "documents[1].dtype", "'bfloat16'; it takes 'binary', 'float16', 'float32', 'int8'"),
]
