"""`whimbrel store` without a store: the run's folder is checked, rows get keys, faults are retried or told, nothing is lost."""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulk_runs import Told, bulk, write_lines
from command import Here
from store_runs import AllEmbedder, MemoryStore, Row, text_of, write_run
from whimbrel.bulk.job import Totals
from whimbrel.errors import InvalidRequest, SetupError, TooLarge, Unavailable
from whimbrel.stores import store, values
from whimbrel.stores.form import Outcome, Refused
from whimbrel.stores.location import read_location
from whimbrel.stores.qdrant import point_id
from whimbrel.stores.retry import Retry
from whimbrel.stores.source import open_run
from whimbrel.stores.transfer import RefusedRow, Transfer, last_of_each, pieces


def moved(folder: Path, target: MemoryStore, **options: Any) -> tuple[Totals, list[RefusedRow], Told]:
    """Transfer a run's rows without a pause."""
    about = {"unfinished": False, "verify": False, "last_of_doubled": False}
    about = {name: options.pop(name, value) for name, value in about.items()}
    source = open_run(folder, options.pop("outputs", ()), **about)
    totals, told, refused = Totals(), Told(), list[RefusedRow]()
    now = [0.0]
    retry = Retry(60, told.tell, lambda: now[0], lambda seconds: now.__setitem__(0, now[0] + seconds))
    Transfer(source, target, told, totals, retry, refused.append, **options).run()
    return totals, refused, told


@pytest.mark.parametrize("kind", ["parquet", "arrow", "npy"])
def test_rows_come_whole_from_every_format(kind: str, tmp_path: Path) -> None:
    outputs = ("dense",) if kind == "npy" else ("dense", "sparse", "multi_vector")
    folder = write_run(tmp_path, 45, *outputs, format=kind)
    target = MemoryStore()
    totals, refused, told = moved(folder, target)
    assert (totals.done, totals.refused, totals.shards_done, refused, target.finished) == (45, 0, 3, [], 1)
    assert target.form is not None
    assert (target.form.key, [field.name for field in target.form.fields]) == ("id", ["id", "n", "tags", "cut"])
    assert "dense: 8 numbers, dot" in told.lines
    assert list(target.rows) == [f"d{index}" for index in range(45)]
    for index in (0, 21, 44):
        row, expected = target.rows[f"d{index}"], Row.of(text_of(index))
        assert (row["n"], row["tags"], row["cut"]) == (index, f"t{index % 3}", False)
        np.testing.assert_array_equal(row["dense"], expected.dense)
        if "sparse" in outputs:
            assert row["sparse"] == {"ids": expected.ids.tolist(), "weights": expected.weights.tolist()}
            np.testing.assert_array_equal(row["multi_vector"], expected.tokens)


def test_numbers_of_int8_become_floats_and_cosine(tmp_path: Path) -> None:
    target = MemoryStore()
    moved(write_run(tmp_path, 5, "dense", dtype="int8"), target)
    assert target.form is not None
    assert [(each.half, each.distance) for each in target.form.vectors] == [(False, "cosine")]
    assert target.rows["d0"]["dense"] == np.rint(target.rows["d0"]["dense"]).tolist()


def test_distance_follows_lengths_unless_it_is_given(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 5, "dense", "multi_vector", scale=3.0)
    target = MemoryStore()
    moved(folder, target)
    assert target.form is not None
    assert [each.distance for each in target.form.vectors] == ["cosine", "dot"]
    moved(folder, target, distance="dot", outputs=("dense",))
    assert [(each.name, each.distance) for each in target.form.vectors] == [("dense", "dot")]


def test_keys_are_made_where_ids_name_no_row(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"id": "a", "text": "one two"}, {"id": "b", "text": "three"}])
    bulk(path, tmp_path / "rowless", AllEmbedder("dense"))
    target = MemoryStore()
    moved(tmp_path / "rowless", target)
    assert list(target.rows) == [f"{path}#0", f"{path}#1"]
    from whimbrel.bulk.chunks import Chunking

    bulk(path, tmp_path / "chunks", AllEmbedder("dense"), id_column="id", chunking=Chunking(4, 0))
    target = MemoryStore()
    moved(tmp_path / "chunks", target)
    assert list(target.rows) == ["a#0", "a#1", "b#0", "b#1"]
    assert target.rows["a#1"]["id"] == "a"


def test_doubled_ids_are_refused_or_the_last_counts(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"id": f"d{index % 7}", "text": f"text {index}"} for index in range(20)])
    bulk(path, tmp_path / "run", AllEmbedder("dense"), id_column="id", shard_rows=9)
    with pytest.raises(SetupError, match="repeats ids; rows with the id of an earlier row: 13"):
        moved(tmp_path / "run", MemoryStore())
    target = MemoryStore()
    totals, *_ = moved(tmp_path / "run", target, last_of_doubled=True)
    assert totals.done == 20
    for index in range(13, 20):
        np.testing.assert_array_equal(target.rows[f"d{index % 7}"]["dense"], Row.of(f"text {index}").dense)


def test_folders_that_are_no_finished_run(tmp_path: Path) -> None:
    def refusal(folder: Path, **options: Any) -> str:
        with pytest.raises(SetupError) as error:
            moved(folder, MemoryStore(), **options)
        return f"{error.value} {error.value.hint}"

    assert "there is no such folder" in refusal(tmp_path / "none")
    assert "it has no manifest.json" in refusal(tmp_path)
    folder = write_run(tmp_path, 45, "dense")
    assert "has no output 'sparse'; it has dense." in refusal(folder, outputs=("sparse",))
    part, record = folder / "part-00001.parquet", folder / "shards" / "part-00001.json"
    data = part.read_bytes()
    part.write_bytes(data[:-1])
    assert "part-00001.parquet has" in refusal(folder)
    part.write_bytes(data[:-1] + b"x")
    assert "part-00001.parquet has other bytes. the same `whimbrel run` command" in refusal(folder, verify=True)
    assert "cannot read" in refusal(folder)
    part.unlink()
    assert "part-00001.parquet is missing" in refusal(folder)
    record.unlink()
    assert "has 2 of 3 parts. the same `whimbrel run` command computes what is missing; --unfinished" in refusal(folder)
    target = MemoryStore()
    assert moved(folder, target, unfinished=True)[0].done == 25
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 9}))
    assert "is of format 9; this version reads 1" in refusal(folder)
    empty = write_lines(tmp_path / "empty.jsonl", [{"id": "a", "text": ""}])
    bulk(empty, tmp_path / "empty", AllEmbedder("dense"), id_column="id")
    assert "has no rows to store" in refusal(tmp_path / "empty")


def test_a_store_that_is_away_is_waited_for(tmp_path: Path) -> None:
    """Pauses double. After the time an error says so, and rows that were written stay."""
    folder, failures = write_run(tmp_path, 45, "dense"), [0]

    def fail(_: list[Any]) -> None:
        failures[0] += 1
        if failures[0] in (2, 3, 4):
            raise Unavailable("away", retry_after=0)

    target = MemoryStore(fail)
    totals, refused, told = moved(folder, target)
    assert (totals.done, refused, len(target.rows)) == (45, [], 45)
    assert [line for line in told.lines if "away" in line] == ["the store is not available: away; trying for up to 60 s"]

    def die(keys: list[Any]) -> None:
        if "d30" in keys:
            raise Unavailable("away", retry_after=0)

    target = MemoryStore(die)
    with pytest.raises(SetupError, match="the store was not available for 60 s: away"):
        moved(folder, target)
    assert list(target.rows) == [f"d{index}" for index in range(20)]
    totals, *_ = moved(folder, again := MemoryStore(), first_part=1)
    assert (totals.done, len(again.rows), totals.rows_before) == (25, 25, 20)
    moved(folder, again := MemoryStore(), first_part=3)  # the rows are written, and the end failed
    assert (len(again.rows), again.finished) == (0, 1)
    with pytest.raises(SetupError, match="has no part 4, but 3 parts"):
        moved(folder, MemoryStore(), first_part=4)


def test_pauses_of_retries() -> None:
    slept: list[float] = []
    now = [0.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    def fail() -> None:
        raise Unavailable("away", retry_after=3)

    with pytest.raises(SetupError):
        Retry(100, lambda _: None, lambda: now[0], sleep)(fail)
    assert slept == [3, 3, 3, 4, 8, 16, 30, 30, 3]


def test_rows_that_fail_alone_are_told_alone(tmp_path: Path) -> None:
    """Pieces that fail are halved, items that are busy are sent again, and NaN never reaches a store."""
    folder, busy = write_run(tmp_path, 45, "dense"), [True]

    def fail(keys: list[Any]) -> Outcome | None:
        if len(keys) > 10:
            raise TooLarge("too many")
        if "d7" in keys:
            raise InvalidRequest("bad row")
        if "d33" in keys:
            return Outcome([Refused("d33", "unwanted")], [])
        if "d40" in keys and busy[0]:
            busy[0] = False
            return Outcome([], [keys.index("d40"), keys.index("d41")], "busy")
        return None

    part = folder / "part-00000.parquet"
    table = pq.read_table(part)
    dense = table.column("dense").combine_chunks()
    values = dense.flatten().to_numpy().copy()
    values[3 * 8 + 1] = np.nan
    column = pa.FixedSizeListArray.from_arrays(pa.array(values), type=dense.type)
    pq.write_table(table.set_column(table.column_names.index("dense"), table.schema.field("dense"), column), part)
    record = folder / "shards" / "part-00000.json"
    record.write_text(
        record.read_text().replace(str(json.loads(record.read_text())["files"][0]["size"]), str(part.stat().st_size))
    )
    target = MemoryStore(fail)
    totals, refused, _ = moved(folder, target)
    assert (totals.done, totals.refused, len(target.rows)) == (45, 3, 42)
    assert refused == [
        RefusedRow("part-00000", "d3", "dense has a number that is not finite"),
        RefusedRow("part-00000", "d7", "bad row"),
        RefusedRow("part-00001", "d33", "unwanted"),
    ]


def test_a_store_that_refuses_everything_ends_the_command(tmp_path: Path) -> None:
    def fail(_: list[Any]) -> None:
        raise InvalidRequest("no such column")

    target = MemoryStore(fail)
    target.max_rows = 200
    with pytest.raises(SetupError, match="the store refused the first 100 rows: no such column"):
        moved(write_run(tmp_path, 150, "dense", shard_rows=200), target)
    assert target.calls < 250


def test_addresses_never_show_passwords() -> None:
    for url, expected in (
        ("lancedb:some/db", ("lancedb", "some/db", None, None, "lancedb:some/db")),
        ("lancedb:s3://bucket/db", ("lancedb", "s3://bucket/db", None, None, "lancedb:s3://bucket/db")),
        ("qdrant:/tmp/q", ("qdrant", "/tmp/q", None, None, "qdrant:/tmp/q")),
        ("qdrant+http://:s%2Fx@h:6333", ("qdrant", "http://h:6333", "", "s/x", "qdrant+http://h:6333")),
        ("opensearch+https://me:p%40w@h:9200/", ("opensearch", "https://h:9200", "me", "p@w", "opensearch+https://h:9200/")),
    ):
        assert tuple(read_location(url)) == expected
    place = read_location("postgresql://me:secret@h/db?password=other&sslmode=require")
    assert place.address.endswith("?password=other&sslmode=require")
    assert place.shown == "postgresql://h/db"
    assert read_location("postgresql://me@h/db", "pw").password == "pw"
    for url, words in (
        ("http://u:secret@h", "--to http://h names no kind of store"),
        ("birds", "names no kind of store"),
        ("qdrant://h:6333", "names no kind of store"),
        ("qdrant+http://:secret@/x", "names no host"),
        ("qdrant+http://h:6333x", "is no URL"),
        ("opensearch+http://h?x=1", "takes no parameters"),
    ):
        with pytest.raises(SetupError, match=words) as error:
            read_location(url)
        assert "secret" not in f"{error.value}{error.value.hint}"


def test_points_have_ids_that_follow_from_keys() -> None:
    assert point_id(7) == 7
    assert point_id("7") == point_id("7") != point_id("8")
    assert point_id(-1) == point_id("-1")
    assert point_id("d0") == "23f87570-58c5-5e41-a88f-4579ca6d341d"


def test_the_function_opens_writes_and_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = MemoryStore()
    monkeypatch.setattr("whimbrel.stores.kinds.open_store", lambda place, table: target)
    assert store(write_run(tmp_path, 45), "lancedb:x", "birds") == (45, [])
    assert (len(target.rows), target.closed) == (45, 1)


def test_the_command_says_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Last line and exit code; refused rows are told, or go to a file; the password comes from a file or the environment."""
    here, places = Here(monkeypatch), list[Any]()
    folder, state = str(write_run(tmp_path, 45, "dense")), {"fail": lambda keys: None}

    def opened(place: Any, table: str) -> MemoryStore:
        places.append((place.password, table))
        return MemoryStore(state["fail"])

    monkeypatch.setattr("whimbrel.stores.kinds.open_store", opened)
    command = ("store", folder, "--to", "qdrant+http://:old@h:6333", "-t", "birds")
    said = here.run(*command)[1].decode().splitlines()
    assert "  45 rows in 3 parts" in said
    assert re.fullmatch(r"45 rows written, 0 refused, in [\d.]+ s: birds", said[-1])

    def refuse(keys: list[Any]) -> Outcome:
        return Outcome([Refused(key, "unwanted") for key in keys if int(key[1:]) % 3 == 0], [])

    state["fail"] = refuse
    (tmp_path / "password").write_text("new\n")
    (tmp_path / "password").chmod(0o600)
    said = here.run(*command, "--password-file", str(tmp_path / "password"), code=3)[1].decode().splitlines()
    assert sum("refused d" in line for line in said) == 10
    assert said[-1].startswith("30 rows written, 15 refused")
    monkeypatch.setenv("WHIMBREL_STORE_PASSWORD", "environment")
    out = tmp_path / "refused.jsonl"
    said = here.run(*command, "--refused", str(out), code=3)[1].decode().splitlines()
    assert not any("refused d" in line for line in said)
    assert json.loads(out.read_text().splitlines()[1]) == {"part": "part-00000", "key": "d3", "reason": "unwanted"}
    assert len(out.read_text().splitlines()) == 15
    assert places == [("old", "birds"), ("new", "birds"), ("environment", "birds")]

    def interrupt(keys: list[Any]) -> None:
        if "d25" in keys:
            raise KeyboardInterrupt

    state["fail"] = interrupt
    assert b"stopped: 1 of 3 parts were written; --from 1 goes on there." in here.run(*command, code=130)[1]
    state["fail"] = lambda keys: None
    assert here.run(*command, "--from", "1")[1].decode().splitlines()[-1].startswith("25 rows written")
    assert "--from is for a finished run" in here.error(*command, "--from", "1", "--unfinished")
    assert "names no kind of store" in here.error("store", folder, "--to", "h:6333", "-t", "birds")
    assert "cannot read the password in" in here.error(*command, "--password-file", str(tmp_path / "none"))


@pytest.mark.parametrize(("url", "extra"), [("qdrant:x", "qdrant"), ("lancedb:x", "lancedb"), ("postgresql://h", "postgres")])
def test_a_client_that_is_missing_is_named(url: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("qdrant_client", "lancedb", "psycopg"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SetupError) as error:
        store(write_run(tmp_path, 3, "dense"), url, "birds")
    assert error.value.hint == f"pip install 'whimbrel[{extra}]'"


def test_vectors_of_slices_are_those_of_their_rows(tmp_path: Path) -> None:
    """Pieces are slices of larger tables; their arrays begin elsewhere."""
    source = open_run(write_run(tmp_path, 30, shard_rows=30), unfinished=False, verify=False, last_of_doubled=False)
    [table] = source.read(source.parts[0][0], 100)
    for begin, piece in ((0, table), (7, table.slice(7, 5)), (29, table.slice(20).slice(9, 1))):
        expected = [Row.of(text_of(begin + index)) for index in range(piece.num_rows)]
        np.testing.assert_array_equal(values.dense(piece.column("dense")), [row.dense for row in expected])
        offsets_N1, rows_XD = values.tokens(piece.column("multi_vector"))
        np.testing.assert_array_equal(rows_XD, np.concatenate([row.tokens for row in expected]))
        assert offsets_N1.tolist() == [0, *np.cumsum([len(row.tokens) for row in expected])]
        offsets_N1, ids_X, weights_X = values.sparse(piece.column("sparse"))
        np.testing.assert_array_equal(ids_X, np.concatenate([row.ids for row in expected]))
        np.testing.assert_array_equal(weights_X, np.concatenate([row.weights for row in expected]))
        assert offsets_N1.tolist() == list(range(0, 5 * len(expected) + 1, 5))
        assert values.has_unit_length(piece, "dense")
    assert [rows.num_rows for rows in pieces(table, -(-table.nbytes // 4))] == [8, 8, 8, 6]
    assert last_of_each(pa.concat_tables([table, table.slice(3, 4)]), "id").column("id").to_pylist()[-4:] == [
        "d3",
        "d4",
        "d5",
        "d6",
    ]


def test_values_that_json_lacks() -> None:
    when = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    for column, expected in (
        (pa.array([float("nan"), 1.5, None]), [None, 1.5, None]),
        (pa.array([when], pa.timestamp("ns", "UTC")), ["2026-01-02T03:04:05+00:00"]),
        (pa.array([when.date()]), ["2026-01-02"]),
        (pa.array([b"\x00\xff"]), ["AP8="]),
        (pa.array([Decimal("1.50")]), ["1.50"]),
        (pa.array([{"a": [float("inf"), 2.0]}]), [{"a": [None, 2.0]}]),
        (pa.array([timedelta(seconds=1)]), ["0:00:01"]),
        (pa.array([[1, 2], None]), [[1, 2], None]),
    ):
        assert values.lists(column) == expected
