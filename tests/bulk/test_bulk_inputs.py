"""Inputs of bulk runs: every format gives the vectors of `Engine.embed`, and every bad row and file is named."""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from bulk_runs import HashEmbedder, bulk, dense_of, faults_of, table_of, vector_of, write_lines
from whimbrel import Engine
from whimbrel.bulk import lines
from whimbrel.bulk.embedder import EngineEmbedder
from whimbrel.bulk.files import find_files
from whimbrel.bulk.tables import plain_type
from whimbrel.errors import SetupError

TITLES = [f"title {number}" for number in range(12)]
BODIES = [f'body {number}, "quoted"\nand a second line ' + "word " * (number * 7 % 13) for number in range(12)]
TABLE = pa.table({"key": list(range(12)), "title": TITLES, "body": BODIES, "score": [0.5 * number for number in range(12)]})


def _parquet(path: Path) -> None:
    pq.write_table(TABLE, path, row_group_size=5)


def _dictionaries(path: Path) -> None:
    pq.write_table(TABLE.set_column(1, "title", TABLE.column("title").dictionary_encode()), path, row_group_size=4)


def _arrow_file(path: Path) -> None:
    with pa.ipc.new_file(path, TABLE.schema) as writer:
        writer.write_table(TABLE, 5)


def _arrow_stream(path: Path) -> None:
    with pa.ipc.new_stream(path, TABLE.schema) as writer:
        writer.write_table(TABLE, 5)


def _json(path: Path) -> None:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in TABLE.to_pylist()))


def _json_gz(path: Path) -> None:
    half = [orjson.dumps(row) + b"\n" for row in TABLE.to_pylist()]
    path.write_bytes(gzip.compress(b"".join(half[:6])) + gzip.compress(b"".join(half[6:])))


def _json_zst(path: Path) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(b"".join(orjson.dumps(row) + b"\n" for row in TABLE.to_pylist()))


def _csv(path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, TABLE.column_names)
        writer.writeheader()
        writer.writerows(TABLE.to_pylist())


FORMATS: dict[str, Callable[[Path], None]] = {
    "a.parquet": _parquet, "b.parquet": _dictionaries, "c.arrow": _arrow_file, "d.arrow": _arrow_stream, "e.jsonl": _json,
    "f.jsonl.gz": _json_gz, "g.ndjson.zst": _json_zst, "h.csv": _csv,
}  # fmt: skip


@pytest.fixture
def embedder(engine: Engine) -> EngineEmbedder:
    return EngineEmbedder(engine, (), {})


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_gives_the_vectors_of_the_engine(name: str, engine: Engine, embedder: Any, tmp_path: Path) -> None:
    """Texts of several columns are joined, other columns are copied, and shards begin anywhere."""
    path, out = tmp_path / name, tmp_path / "out"
    FORMATS[name](path)
    totals, _ = bulk(path, out, embedder, text=["title", "body"], id_column="key", shard_rows=5)
    assert (totals.done, totals.refused, totals.shards) == (12, 0, 3)
    table = table_of(out)
    assert table.column_names == ["key", "score", "cut", "dense"]
    assert [str(key) for key in table.column("key").to_pylist()] == [str(number) for number in range(12)]
    assert [float(score) for score in table.column("score").to_pylist()] == TABLE.column("score").to_pylist()
    expected = engine.embed([f"{title}\n{body}" for title, body in zip(TITLES, BODIES, strict=True)])
    if engine.plan.same_bits:
        assert np.array_equal(dense_of(out), expected)
    assert np.abs(dense_of(out) - expected).max() < 1e-2


def test_plain_text_folders_globs_and_urls(tmp_path: Path) -> None:
    """A folder is read in the order of its paths, without hidden files; rows without ids have file and row."""
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("three\nfour\r\n\nsix")
    (folder / "a.txt").write_text("one\ntwo\n")
    (folder / "sub" / "c.txt.gz").write_bytes(gzip.compress(b"seven\n"))
    (folder / ".hidden.txt").write_text("no")
    (folder / "notes.md").write_text("no")
    bulk(folder, tmp_path / "out")
    table = table_of(tmp_path / "out")
    assert [Path(file).name for file in table.column("file").to_pylist()] == [
        "a.txt",
        "a.txt",
        "b.txt",
        "b.txt",
        "b.txt",
        "c.txt.gz",
    ]
    assert table.column("row").to_pylist() == [0, 1, 0, 1, 3, 0]
    texts = ["one", "two", "three", "four", "six", "seven"]
    assert np.array_equal(dense_of(tmp_path / "out"), [vector_of(text) for text in texts])
    assert faults_of(tmp_path / "out") == [("b.txt", 2, "text: the text is empty")]

    bulk(f"{folder}/[ab].txt", tmp_path / "globbed")
    assert len(table_of(tmp_path / "globbed")) == 5
    with fsspec.open("memory://bulk/deep/x.txt", "wb") as file:
        file.write(b"one\ntwo\n")
    for number, url in enumerate(("memory://bulk/deep/x.txt", "memory://bulk/deep", "memory://bulk/*/x.txt")):
        bulk(url, tmp_path / f"url{number}")
        assert np.array_equal(dense_of(tmp_path / f"url{number}"), dense_of(tmp_path / "out")[:2])


def test_folders_are_read_whole_or_refused(tmp_path: Path) -> None:
    """Files behind links are read, each folder once; a file that is gone, a pipe and an unreadable folder are no silence."""
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    for name in ("data/a.txt", "data/x[1].txt", "data/50% ü#?.txt", "data/sub/_tmp.txt", "other/o.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    (folder / "loop").symlink_to(folder)
    (folder / "linked").symlink_to(tmp_path / "other")
    names = ["50% ü#?.txt", "a.txt", "linked/o.txt", "x[1].txt"]

    def found(*given: str) -> list[str]:
        files = find_files(given, without=tmp_path / "out")
        return [file.path.removeprefix("file://").removeprefix(f"{folder}/") for file in files]

    assert found(str(folder)) == found(f"file://{folder}") == names
    assert found(f"{folder}/*.txt") == [name for name in names if "/" not in name]
    assert found(f"{folder}/x[1].txt") == ["x[1].txt"]
    assert found(f"{folder}/sub/_*") == ["sub/_tmp.txt"]
    with pytest.raises(SetupError, match=r"sub/\* has no files to read"):
        found(f"{folder}/sub/*")
    (folder / "gone.txt").symlink_to("nothing")
    with pytest.raises(SetupError, match=r"cannot read .*/gone\.txt: No such file"):
        found(str(folder))
    (folder / "gone.txt").unlink()
    os.mkfifo(folder / "pipe.txt")
    for given in (folder, folder / "pipe.txt"):
        with pytest.raises(SetupError, match=r"cannot read .*/pipe\.txt: it is no file of data"):
            found(str(given))
    with pytest.raises(SetupError, match="an input has no name"):
        found("")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everywhere")
def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(SetupError, match="Permission denied"):
        find_files([str(tmp_path)], without=tmp_path / "out")


def test_files_of_an_archive(tmp_path: Path) -> None:
    """A chained URL of fsspec names a file, a folder or a glob of an archive."""
    with zipfile.ZipFile(tmp_path / "rows.zip", "w") as archive:
        archive.writestr("in/a.txt", "one\ntwo\n")
        archive.writestr("in/b.txt.gz", gzip.compress(b"three\n"))
        _parquet(tmp_path / "c.parquet")
        archive.write(tmp_path / "c.parquet", "tables/c.parquet")
    for number, (given, rows) in enumerate((("in", 3), ("in/a.txt", 2), ("*/*.gz", 1), ("tables", 12))):
        url = f"zip://{given}::file://{tmp_path}/rows.zip"
        totals, _ = bulk(url, tmp_path / f"out{number}", text=["body" if given == "tables" else "text"], keep=[])
        assert totals.done == rows


def test_a_file_system_keeps_its_host(tmp_path: Path) -> None:
    """The URL of a file that was found has the host that its file system takes out of paths."""

    class Hosted(MemoryFileSystem):
        protocol = "hosted"

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return "/" + path.partition("://")[2].partition("/")[2] if "://" in path else path.rstrip("/")

    fsspec.register_implementation("hosted", Hosted, clobber=True)
    with fsspec.open("hosted://me:secret@host/bulk-host/x.txt", "wb") as file:
        file.write(b"one\n")
    for given in ("hosted://me:secret@host/bulk-host", "hosted://me:secret@host/bulk-host/*.txt"):
        (found,) = find_files([given], without=tmp_path)
        assert found.url == "hosted://me:secret@host/bulk-host/x.txt"
        assert found.path == "hosted://host/bulk-host/x.txt"


def test_the_folder_of_the_output_is_no_input(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"text": "one"}])
    for _ in range(2):
        totals, _ = bulk(tmp_path, tmp_path / "out")
        assert totals.done == 1


def test_bad_rows_are_refused_with_their_reason(tmp_path: Path) -> None:
    """Each bad row is in errors/ with file, row and reason, and the others run."""
    path = tmp_path / "rows.jsonl"
    bad = [
        (b'{"id": 1, "text": "cut', "is no JSON: unexpected control character"), (b"[1]", "is no JSON object, but an array"), (b"7", "is no JSON object, but a number"),
        (b'{"id": 2}', "has no text"), (b'{"id": 3, "text": null}', "text is null"), (b'{"id": 4, "text": 5}', "text is a number, no text"),
        (b'{"id": 5, "text": ["a"]}', "text is a list, no text"), (b'{"id": 6, "text": ""}', "text: the text is empty"), (b'{"id": 6, "text": " \\n "}', "text: the text is empty"),
        (b'{"id": 7, "text": "\xff"}', "is no JSON: str is not valid UTF-8"), (b'{"id": 8, "text": "\\ud800"}', "is no JSON: "), (b'{"id": null, "text": "a"}', "id is missing"),
        (b'{"id": 9, "text": "a", "x": NaN}', "is no JSON: "), (b'{"id": 10, "text": "@@bad"}', "this text is bad."), (b'{"id": 11, "text": "@@nan"}', "the model gave NaN."),
    ]  # fmt: skip
    good = b'{"id": 0, "text": "good @@cut"}'
    path.write_bytes(b"\n".join([good, *(row for row, _ in bad), b"", good]))
    totals, told = bulk(path, tmp_path / "out", id_column="id")
    assert (totals.done, totals.cut, totals.refused) == (2, 2, len(bad))
    assert round(told.rows) == len(bad) + 3  # the blank line is gone through too
    found = faults_of(tmp_path / "out")
    assert [(name, row) for name, row, _ in found] == [("rows.jsonl", row + 1) for row in range(len(bad))]
    for (_, _, reason), (row, words) in zip(found, bad, strict=True):
        assert reason.startswith(words), row
    assert table_of(tmp_path / "out").column("cut").to_pylist() == [True, True]


def test_bad_rows_of_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'text,n\r\n"two\r\nlines",1\r\nshort\r\na,b,c\r\n\xff,2\r\n\r\n"a"b,3\r\nlast,4\r\n"open,5\r\n')
    totals, _ = bulk(path, tmp_path / "out", shard_rows=2)
    assert totals.done == 2
    assert table_of(tmp_path / "out").column("n").to_pylist() == ["1", "4"]
    (tmp_path / "open.csv").write_text('text\n"one\ntwo\nthree\n')
    bulk(tmp_path / "open.csv", tmp_path / "open")
    assert faults_of(tmp_path / "open") == [("open.csv", 0, "is no CSV: unexpected end of data, in a record of 3 lines")]
    assert [(row, reason[:24]) for _, row, reason in faults_of(tmp_path / "out")] == [
        (1, "has 1 fields; the header"), (2, "has 3 fields; the header"), (3, "byte 0 of the line is no"), (5, "is no CSV: ',' expected "), (7, "is no CSV: unexpected en"),
    ]  # fmt: skip


def test_bad_rows_of_tables(tmp_path: Path) -> None:
    raw = pa.array([b"a", b"\xff", None, b"", b"b"]).view(pa.string())
    pq.write_table(pa.table({"text": raw, "id": ["1", "2", "3", "4", None]}), tmp_path / "rows.parquet")
    totals, _ = bulk(tmp_path / "rows.parquet", tmp_path / "out", id_column="id")
    assert totals.done == 1
    reasons = [reason for _, _, reason in faults_of(tmp_path / "out")]
    assert reasons == ["text is not UTF-8", "text is null", "text: the text is empty", "id is missing"]


def test_bytes_that_are_not_utf8_are_refused_in_every_column(tmp_path: Path) -> None:
    """A text, an id or a copied value that is not UTF-8 is named, and no output has such bytes."""
    broken = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    whole = pa.array(["a", "b", "c"])
    for name in ("text", "id", "lang"):
        table = pa.table({each: broken if each == name else whole for each in ("text", "id", "lang")})
        pq.write_table(table, tmp_path / f"{name}.parquet")
        for kind in ("parquet", "npy"):
            totals, _ = bulk(tmp_path / f"{name}.parquet", tmp_path / f"{name}-{kind}", id_column="id", format=kind)
            assert totals.done == 2
            assert faults_of(tmp_path / f"{name}-{kind}") == [(f"{name}.parquet", 1, f"{name} is not UTF-8")]


def test_ids_that_are_none_are_refused(tmp_path: Path) -> None:
    """A missing, an empty and a structured id are refused in every format, and are no doubled ids."""
    rows = [{"text": "a", "id": each} for each in (1, "b", "", None, "", [1], True, 1.5)]
    bulk(write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "out", id_column="id")
    assert table_of(tmp_path / "out").column("id").to_pylist() == ["1", "b"]
    assert [reason.partition(";")[0] for _, _, reason in faults_of(tmp_path / "out")] == [
        "id is missing", "id is missing", "id is missing", "id is a list", "id is true or false", "id is a number",
    ]  # fmt: skip
    assert not (tmp_path / "out/errors/doubled-ids.jsonl").exists()
    ids = pa.array(["x", "", None]).dictionary_encode()
    pq.write_table(pa.table({"text": ["a", "b", "c"], "id": ids}), tmp_path / "rows.parquet")
    bulk(tmp_path / "rows.parquet", tmp_path / "tables", id_column="id")
    assert [row for _, row, _ in faults_of(tmp_path / "tables")] == [1, 2]


_TIME = datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("values", "formats", "json_value"),
    [
        (pa.array(["x"], pa.string_view()), "parquet arrow npy", "x"),
        (pa.array([b"x"], pa.binary_view()), "parquet arrow", None),
        (pa.array([[{"a": 1, "b": [None, 0.5]}]]), "parquet arrow npy", [{"a": 1, "b": [None, 0.5]}]),
        (pa.array([decimal.Decimal("1.50")]), "parquet arrow npy", "1.50"),
        (pa.array([_TIME]), "parquet arrow npy", "2020-01-02T03:00:00+00:00"),
        (pa.array([1577934000000000001], pa.timestamp("ns")), "parquet arrow npy", "2020-01-02 03:00:00.000000001"),
        (pa.array([datetime.timedelta(1)]), "parquet arrow", None),
        (pa.array([(1, 2, 3)], pa.month_day_nano_interval()), "arrow", None),
        (pa.array([["x"]], pa.list_(pa.string_view())), "", None),
        (pa.nulls(1), "parquet arrow npy", None),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_copied_columns_of_any_type_are_kept_or_refused(values: Any, formats: str, json_value: Any, tmp_path: Path) -> None:
    """A column whose type the format does not hold is refused before anything is computed; others have their values."""
    with pa.ipc.new_file(tmp_path / "rows.arrow", pa.schema([("text", pa.string()), ("k", values.type)])) as writer:
        writer.write_table(pa.table({"text": ["a"], "k": values}))
    for kind in ("parquet", "arrow", "npy"):
        embedder = HashEmbedder()
        if kind not in formats:
            with pytest.raises(SetupError, match=rf"the column 'k' is .*, which {kind} files do not hold"):
                bulk(tmp_path / "rows.arrow", tmp_path / kind, embedder, format=kind)
            assert embedder.seen == ["a"]
            continue
        bulk(tmp_path / "rows.arrow", tmp_path / kind, embedder, format=kind)
        if kind == "parquet":
            assert table_of(tmp_path / kind).column("k").combine_chunks().equals(values.cast(plain_type(values.type)))
        if kind == "npy":
            assert json.loads((tmp_path / kind / "part-00000.ids.jsonl").read_text())["k"] == json_value


def test_a_column_that_is_null_in_a_file_has_its_type_from_another(tmp_path: Path) -> None:
    """A file in which a column has no value agrees with others; its texts are refused row by row."""
    for name, table in {
        "a": {"text": ["a"], "n": pa.nulls(1)}, "b": {"text": ["b"], "n": [7]}, "c": {"text": pa.nulls(1), "n": [8]}
    }.items():  # fmt: skip
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
    bulk([tmp_path / f"{name}.parquet" for name in "abc"], tmp_path / "out")
    assert table_of(tmp_path / "out").column("n").to_pylist() == [None, 7]
    assert faults_of(tmp_path / "out") == [("c.parquet", 0, "text is null")]


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1000)
    (tmp_path / "rows.txt").write_text("one\n" + "x" * 5000 + "\ntwo\n" + "y" * 1001)
    totals, _ = bulk(tmp_path / "rows.txt", tmp_path / "out", shard_rows=1)
    assert totals.done == 2
    assert faults_of(tmp_path / "out") == [
        ("rows.txt", 1, "the line has 5,001 bytes; the limit is 1,000"), ("rows.txt", 3, "the line has 1,001 bytes; the limit is 1,000"),
    ]  # fmt: skip


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """A fault of a whole file is said before anything is computed, with the file and the fault."""
    names = ["x.parquet", "empty.parquet", "cut.jsonl.gz", "cut.jsonl.zst", "x.pdf", "no.csv", "twice.csv", "latin.csv"]
    x, empty, cut, cut_zst, pdf, no, twice, latin = (tmp_path / name for name in names)
    x.write_bytes(b"PAR1 not really")
    empty.write_bytes(b"")
    data = b"".join(json.dumps({"text": f"{number * 7919}"}).encode() + b"\n" for number in range(3000))
    cut.write_bytes(gzip.compress(data)[:-2000])
    cut_zst.write_bytes(pa.compress(data, "zstd", asbytes=True)[:-2000])
    pdf.write_bytes(b"%PDF")
    no.write_text("title\nx\n")
    twice.write_text("text,text\nx,y\n")
    latin.write_bytes(b"text,gr\xf6sse\nx,1\n")
    embedder = HashEmbedder()
    for given, words in (
        (x, r"cannot read .*x\.parquet: "),
        (empty, r"empty\.parquet: it is empty, and no parquet file"),
        (cut, r"cannot read .*cut\.jsonl\.gz: Compressed file ended"),
        (cut_zst, r"cannot read .*cut\.jsonl\.zst: "),
        (pdf, r"cannot tell the format of .*x\.pdf"),
        (no, r"no\.csv has no column 'text'; it has 'title'"),
        (twice, r"twice\.csv has several columns of one name"),
        (latin, r"latin\.csv: its header is not UTF-8"),
        (tmp_path / "nothing.jsonl", r"there is no file .*nothing\.jsonl"),
        (f"{tmp_path}/*.arrow", r"\*\.arrow has no files to read"),
        ("nosuch://a/b.jsonl", "cannot read nosuch://a/b.jsonl"),
    ):
        with pytest.raises(SetupError, match=words):
            bulk(given, tmp_path / "out", embedder)
    assert set(embedder.seen) <= {"a"}


def test_empty_files_have_no_rows(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.csv", "c.txt"):
        (tmp_path / name).write_bytes(b"")
    write_lines(tmp_path / "d.jsonl", [{"text": "one"}])
    totals, _ = bulk([tmp_path / name for name in ("a.jsonl", "b.csv", "c.txt", "d.jsonl")], tmp_path / "out", keep=[])
    assert (totals.done, totals.shards) == (1, 1)
    totals, _ = bulk(tmp_path / "a.jsonl", tmp_path / "none")
    assert (totals.done, totals.shards) == (0, 0)


def test_files_with_other_columns_are_refused_unless_the_wanted_ones_agree(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "n": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["b"], "n": ["x"]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": ["c"], "m": [1]}), tmp_path / "c.parquet")
    pq.write_table(pa.table({"text": [1]}), tmp_path / "d.parquet")
    for names, words in (
        ("ab", r"'n' is int64 in .*a\.parquet and string in .*b\.parquet"),
        ("ac", r"c\.parquet has none"),
        ("d", r"d\.parquet: the column 'text' is int64, no text"),
    ):
        with pytest.raises(SetupError, match=words):
            bulk([tmp_path / f"{name}.parquet" for name in names], tmp_path / "out")
    totals, _ = bulk([tmp_path / f"{name}.parquet" for name in "abc"], tmp_path / "out", keep=[])
    assert totals.done == 3
    write_lines(tmp_path / "e.jsonl", [{"text": "d", "n": 2}])
    totals, _ = bulk([tmp_path / "a.parquet", tmp_path / "e.jsonl"], tmp_path / "both")
    assert table_of(tmp_path / "both").column("n").to_pylist() == [1, 2]


def test_values_of_json_have_one_type_in_all_parts(tmp_path: Path) -> None:
    rows = [
        {"text": "a", "i": 1, "f": 1, "s": "x", "m": 1, "o": {"k": [1]}, "b": True, "z": None},
        {"text": "b", "i": 2, "f": 0.5, "s": None, "m": "one", "o": [2], "b": None, "new": 2**70},
    ]
    bulk(write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "out", shard_rows=1)
    table = table_of(tmp_path / "out")
    kinds = {name: str(table.schema.field(name).type) for name in ("i", "f", "s", "m", "o", "b", "z", "new")}
    assert kinds == {
        "i": "int64",
        "f": "double",
        "s": "string",
        "m": "string",
        "o": "string",
        "b": "bool",
        "z": "string",
        "new": "double",
    }
    assert table.column("m").to_pylist() == ["1", "one"]
    assert table.column("o").to_pylist() == ['{"k":[1]}', "[2]"]


def test_values_of_json_that_a_type_does_not_hold(tmp_path: Path) -> None:
    """A whole number that float64 does not hold is kept as a string; a value that cannot be copied refuses its row."""
    deep = "[" * 300 + "]" * 300
    lines = [f'{{"text": "a", "n": {2**53 + 1}}}', '{"text": "b", "n": 0.5}', f'{{"text": "c", "o": {deep}}}']
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    bulk(tmp_path / "rows.jsonl", tmp_path / "out")
    assert table_of(tmp_path / "out").column("n").to_pylist() == [f"{2**53 + 1}", "0.5"]
    assert faults_of(tmp_path / "out") == [("rows.jsonl", 2, "a value is nested too deeply to be copied")]


def test_columns_that_would_collide_or_are_missing(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"text": "a", "dense": 1, "row": 2}])
    for job, words in (
        ({}, "two columns 'row'"),
        ({"id_column": "row"}, "two columns 'dense'"),
        ({"text": ["body"]}, r"no row of .*rows\.jsonl has 'body'; they have 'text', 'dense', 'row'"),
        ({"keep": ["lang"]}, "has 'lang'"),
        ({"id_column": "no"}, "has 'no'"),
    ):
        with pytest.raises(SetupError, match=words):
            bulk(path, tmp_path / "out", **job)
    bulk(path, tmp_path / "out", keep=["text"])
    assert table_of(tmp_path / "out").column("text").to_pylist() == ["a"]


def test_equal_texts_run_once(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"text": f"t{number % 3}"} for number in range(60)])
    embedder = HashEmbedder()
    bulk(path, tmp_path / "out", embedder, shard_rows=30)
    assert sorted(embedder.seen) == ["a", *(f"t{number}" for number in range(3) for _ in range(2))]
    assert np.array_equal(dense_of(tmp_path / "out"), [vector_of(f"t{number % 3}") for number in range(60)])


def test_doubled_ids_are_named_and_run(tmp_path: Path) -> None:
    """Rows whose id an earlier row has are in the output, and named with that row; a kill changes nothing of it."""
    one = write_lines(
        tmp_path / "a.jsonl", [{"text": "a", "id": 1}, {"text": "b", "id": 2}, {"text": "c"}, {"text": "d", "id": 1}]
    )
    pq.write_table(pa.table({"text": ["e", "f", "g"], "id": [3, 2, 1]}), tmp_path / "b.parquet")
    totals, told = bulk([one, tmp_path / "b.parquet"], tmp_path / "out", id_column="id", shard_rows=1)
    assert (totals.done, totals.refused) == (6, 1)
    found = [json.loads(line) for line in (tmp_path / "out/errors/doubled-ids.jsonl").read_text().splitlines()]
    assert [(Path(row["file"]).name, row["row"], Path(row["as"]["file"]).name, row["as"]["row"]) for row in found] == [
        ("a.jsonl", 3, "a.jsonl", 0), ("b.parquet", 1, "a.jsonl", 1), ("b.parquet", 2, "a.jsonl", 0),
    ]  # fmt: skip
    assert any(line.startswith("rows with the id of an earlier row: 3, the first of them row 3 of") for line in told.lines)
    bulk([one, tmp_path / "b.parquet"], tmp_path / "out", id_column="id", shard_rows=1)
    assert (tmp_path / "out/errors/doubled-ids.jsonl").exists()
