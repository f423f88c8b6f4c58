"""Outputs of bulk runs: columns of every kind and number type hold what the engine gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from bulk_runs import HashEmbedder, bulk, dense_of, documents, faults_of, files_of, table_of, vector_of, write_lines
from checkpoints.bge_m3 import write_m3
from checkpoints.fitted import write_classes, write_ranker
from whimbrel import Engine
from whimbrel.bulk import run as run_of
from whimbrel.bulk.chunks import Chunking, chunk_spans
from whimbrel.bulk.embedder import EngineEmbedder
from whimbrel.bulk.job import Job
from whimbrel.bulk.manifest import ColumnNames
from whimbrel.errors import SetupError
from whimbrel.types.result import Outputs
from whimbrel.wire.dtypes import to_int8

TEXTS = ["a whimbrel", "the river flies north", "a whimbrel", "light " * 30, "one"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("m3")
    write_m3(folder)
    with Engine(folder, dtype="float32") as engine:
        yield engine


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_dense_sparse_and_token_vectors_in_one_pass(m3: Engine, rows: Path, tmp_path: Path, dtype: Any) -> None:
    """Several outputs of one pass are those of `Engine.encode`, in each number type."""
    outputs: Any = ("dense", "sparse", "multi_vector")
    bulk(rows, tmp_path / "out", EngineEmbedder(m3, outputs, {}), dtype=dtype, shard_rows=2)
    table, expected = table_of(tmp_path / "out"), m3.encode(TEXTS, list(outputs))
    assert expected.sparse is not None
    assert expected.multi_vector is not None
    assert expected.dense is not None
    kinds = {"float32": (np.float32, "float"), "float16": (np.float16, "halffloat"), "int8": (np.int8, "int8")}[dtype]

    def convert(array: Any) -> Any:
        return to_int8(array) if dtype == "int8" else array.astype(kinds[0])

    assert str(table.schema.field("dense").type) == f"fixed_size_list<element: {kinds[1]}>[48]"
    assert str(table.schema.field("multi_vector").type) == f"list<element: fixed_size_list<element: {kinds[1]}>[48]>"
    assert np.array_equal(dense_of(tmp_path / "out"), convert(expected.dense))
    group = pq.ParquetFile(next((tmp_path / "out").glob("part-*.parquet"))).metadata.row_group(0)
    encodings = [chunk.encodings for chunk in map(group.column, range(group.num_columns)) if "_vector" in chunk.path_in_schema]
    assert ["RLE_DICTIONARY" in each for each in encodings] == [dtype == "int8"], "Parquet has no bytes but by a dictionary"
    for index, (sparse, tokens) in enumerate(
        zip(table.column("sparse").to_pylist(), table.column("multi_vector").to_pylist(), strict=True)
    ):
        ids, weights = expected.sparse[index]
        assert sparse["ids"] == ids.tolist()
        assert np.array_equal(
            np.array(sparse["weights"], np.float32), weights if dtype != "float16" else weights.astype(np.float16)
        )
        assert np.array_equal(np.array(tokens), convert(expected.multi_vector[index]))


def test_reductions_of_token_vectors(m3: Engine, rows: Path, tmp_path: Path) -> None:
    pooled = EngineEmbedder(m3, ("multi_vector",), {"token_pooling": 2.0, "input_type": "document"})
    bulk(rows, tmp_path / "pooled", pooled)
    expected = m3.multi_vector(TEXTS, token_pooling=2.0, input_type="document")
    for index, tokens in enumerate(table_of(tmp_path / "pooled").column("multi_vector").to_pylist()):
        assert np.array_equal(np.array(tokens, np.float32), expected[index])
    encoded = EngineEmbedder(m3, ("multi_vector",), {"muvera": True, "input_type": "query"})
    bulk(rows, tmp_path / "muvera", encoded)
    assert np.array_equal(dense_of(tmp_path / "muvera", "muvera"), m3.muvera(TEXTS, input_type="query"))


def test_scores_of_classes(rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_classes(folder)
    with Engine(folder) as engine:
        bulk(rows, tmp_path / "out", EngineEmbedder(engine, ("scores",), {}))
        classes = engine.classify(TEXTS)
    assert np.array_equal(dense_of(tmp_path / "out", "scores"), classes.scores_NC)
    assert json.loads((tmp_path / "out/manifest.json").read_text())["outputs"]["labels"] == list(classes.labels)


def test_scores_of_pairs(engine: Engine, tmp_path: Path) -> None:
    """A query of each row scores its text: by a model that judges pairs, and by similarity; equal pairs run once."""
    rows: list[dict[str, Any]] = [{"q": f"river {number % 3}", "text": text} for number, text in enumerate(TEXTS * 3)]
    rows[1]["text"] = "far " * 600
    path = write_lines(tmp_path / "rows.jsonl", [*rows, {"q": " ", "text": "a"}, {"text": "a"}])
    write_ranker(tmp_path / "ranker")
    queries, texts = [row["q"] for row in rows], [row["text"] for row in rows]
    with Engine(tmp_path / "ranker") as ranker:
        for name, model in (("ranker", ranker), ("similarity", engine)):
            totals, _ = bulk(path, tmp_path / f"{name}-out", EngineEmbedder(model, ("scores",), {}), query="q", shard_rows=4)
            assert (totals.done, totals.cut, totals.refused) == (15, 1, 2)
            found = dense_of(tmp_path / f"{name}-out", "scores")[:, 0]
            assert np.abs(found - model.score(queries, texts, truncate=True)).max() < 1e-2
            assert table_of(tmp_path / f"{name}-out").column("cut").to_pylist() == [number == 1 for number in range(15)]
    assert [reason for _, _, reason in faults_of(tmp_path / "ranker-out")] == ["q: the text is empty", "has no q"]


def test_arrow_and_npy_hold_the_same_numbers(rows: Path, tmp_path: Path, engine: Engine) -> None:
    embedder = EngineEmbedder(engine, (), {"dimensions": None, "prompt": "query: "})
    for kind in ("parquet", "arrow", "npy"):
        bulk(rows, tmp_path / kind, embedder, format=kind)
    expected = dense_of(tmp_path / "parquet")
    with pa.ipc.open_file(tmp_path / "arrow" / "part-00000.arrow") as reader:
        assert reader.read_all().equals(table_of(tmp_path / "parquet"))
    assert np.array_equal(np.load(tmp_path / "npy/part-00000.dense.npy"), expected)
    ids = [json.loads(line) for line in (tmp_path / "npy/part-00000.ids.jsonl").read_text().splitlines()]
    assert [(row["row"], row["cut"]) for row in ids] == [(number, False) for number in range(5)]
    assert np.array_equal(expected, engine.embed(TEXTS, prompt="query: "))


def test_ragged_outputs_are_no_npy(m3: Engine, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"an \.npy file holds no sparse vectors"):
        bulk(rows, tmp_path / "out", EngineEmbedder(m3, ("dense", "sparse"), {}), format="npy")


def test_texts_that_are_cut_are_marked(engine: Engine, tmp_path: Path) -> None:
    """The column `cut` says which texts the model read only in part; with truncate="never" they are refused."""
    texts = ["short", "far " * 400, "near", "off " * 300]
    path = write_lines(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    totals, _ = bulk(path, tmp_path / "out", EngineEmbedder(engine, (), {}))
    assert table_of(tmp_path / "out").column("cut").to_pylist() == [False, True, False, True]
    assert (totals.done, totals.cut) == (4, 2)
    totals, _ = bulk(path, tmp_path / "never", EngineEmbedder(engine, (), {"truncate": "never"}))
    assert (totals.done, totals.cut, totals.refused) == (2, 0, 2)
    assert [row for _, row, _ in faults_of(tmp_path / "never")] == [1, 3]
    assert "402 tokens" in faults_of(tmp_path / "never")[0][2]


def test_chunks_have_their_place_in_the_text(engine: Engine, tmp_path: Path) -> None:
    """Each chunk is a row with its characters, and has the vector of these characters."""
    texts = ["short", " ".join(f"word{number % 7}" for number in range(60)), "long" * 100]
    path = write_lines(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    totals, _ = bulk(path, tmp_path / "out", EngineEmbedder(engine, (), {}), chunking=Chunking(20, 5))
    table = table_of(tmp_path / "out")
    assert totals.done == 3
    pieces = list[str]()
    for row in table.select(["row", "chunk", "start", "end"]).to_pylist():
        text = texts[row["row"]]
        pieces.append(text[row["start"] : row["end"]])
    assert pieces[0] == "short"
    assert all(piece.startswith("word") for piece in pieces if " " in piece)
    assert np.array_equal(dense_of(tmp_path / "out"), engine.embed(pieces))
    with pytest.raises(SetupError, match="chunks of 300 tokens do not fit: the model takes 256"):
        bulk(path, tmp_path / "large", EngineEmbedder(engine, (), {}), chunking=Chunking(300, 0))


def test_a_text_that_is_too_long_for_the_tokenizer_is_refused_alone(engine: Engine, tmp_path: Path) -> None:
    """A text above the limit of characters is refused with it, whole or in chunks, and the others run."""
    texts = ["one", "x " * 600_000, "two", "x " * 600_000]
    path = write_lines(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    for name, chunking in (("whole", None), ("chunks", Chunking(20, 5))):
        totals, told = bulk(path, tmp_path / name, EngineEmbedder(engine, (), {}), chunking=chunking)
        assert (totals.done, totals.refused, round(told.rows)) == (2, 2, 4)
        assert [row for _, row, _ in faults_of(tmp_path / name)] == [1, 3]
        assert all("1,048,576" in reason for _, _, reason in faults_of(tmp_path / name))
        assert table_of(tmp_path / name).column("row").to_pylist() == [0, 2]


@pytest.mark.parametrize(("tokens", "overlap"), [(1, 0), (3, 0), (3, 2), (7, 3), (50, 0)])
def test_chunks_cover_the_text(tokens: int, overlap: int) -> None:
    """No character is in none of the chunks but space between words, and no chunk has more tokens."""
    text = "the whimbrel has a long bill  and a stripe over the eye; it winters in the south"
    chars_T2 = np.array([[start, min(start + 3, len(text))] for start in range(0, len(text), 3)], np.int32)
    spans = chunk_spans(text, chars_T2, Chunking(tokens, overlap))
    covered = {character for start, end in spans for character in range(start, end)}
    assert covered >= {index for index, character in enumerate(text) if not character.isspace()}
    assert all(end - start <= 3 * tokens for start, end in spans)
    assert all(before < after for before, after in pairwise(spans))


def test_chunks_make_parts_smaller(tmp_path: Path) -> None:
    """The output of a part is bounded also where a text has very many chunks."""
    job = Job([], tmp_path, ColumnNames(("text",), "", None, None), chunking=Chunking(8, 4))
    rows, size = run_of._limits(job, {"dense": 1024})
    assert (rows, size) == (32768, 2**27 * 4 * 4 // (4 * 1024 + 4 * 8))
    assert (
        run_of._limits(job, {"multi_vector": 128}).bytes
        < run_of._limits(replace(job, chunking=None), {"multi_vector": 128}).bytes
    )


def test_numbers_that_float16_does_not_hold_are_refused(tmp_path: Path) -> None:
    class Large(HashEmbedder):
        def run(self, texts: Any) -> Any:
            answer = super().run(texts)
            dense = np.stack([vector_of(text) * (1e6 if "large" in text else 1) for text in texts])
            return type(answer)(Outputs(dense=dense), answer.cut_N, answer.num_tokens)

    path = write_lines(tmp_path / "rows.jsonl", [{"text": "a"}, {"text": "large"}, {"text": "b"}])
    totals, _ = bulk(path, tmp_path / "out", Large(), dtype="float16")
    assert totals.done == 2
    assert faults_of(tmp_path / "out") == [("rows.jsonl", 1, "float16 does not hold its numbers")]


def test_parts_do_not_depend_on_requests_and_threads(tmp_path: Path) -> None:
    """Whatever the sizes of requests and their number at a time, the bytes are the same."""
    path = write_lines(tmp_path / "rows.jsonl", list(documents(200)))
    found = list[Any]()
    for number, texts in enumerate((1, 3, 1000)):
        bulk(path, tmp_path / f"{number}", HashEmbedder(texts=texts), id_column="id", shard_rows=50)
        found.append(files_of(tmp_path / f"{number}"))
    assert found[0] == found[1] == found[2]
    row_group = pq.ParquetFile(tmp_path / "0/part-00000.parquet").metadata.row_group(0)
    assert {row_group.column(index).path_in_schema: row_group.column(index).compression for index in range(4)} == {
        "id": "ZSTD", "n": "ZSTD", "cut": "ZSTD", "dense.list.element": "UNCOMPRESSED",
    }  # fmt: skip
