"""Stores hold the rows of a run, once, and search over them finds what numpy finds. `make recipes` installs their packages."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bulk_runs import Told, bulk, write_lines
from postgres_server import POSTGRES_PACKAGES, Postgres, postgres
from store_runs import AllEmbedder, Row, text_of, write_run
from store_servers import FakeOpenSearch, FakeQdrant, serving
from whimbrel.errors import SetupError
from whimbrel.stores import store
from whimbrel.stores.postgres import SPARSE_WIDTH
from whimbrel.stores.qdrant import point_id

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(150)]
NUMBER = 60
OUTPUTS = ("dense", "sparse", "multi_vector")
QUERY = Row.of("a query")
ROWS = [Row.of(text_of(index)) for index in range(NUMBER)]
DENSE = np.array([float(row.dense @ QUERY.dense) for row in ROWS])
SPARSE = np.array([float(row.sparse @ QUERY.sparse) for row in ROWS])
MAXSIM = np.array([QUERY.maxsim(row) for row in ROWS])


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    package = request.node.function.__name__.split("_")[1]
    name = {"lancedb": "lancedb", "qdrant": "qdrant_client", "postgres": "psycopg", "opensearch": "opensearchpy"}[package]
    _need(request, name)


def _need(request: pytest.FixtureRequest, *packages: str) -> None:
    """Skip unless one of these is installed, or the command line says that they are."""
    if not any(map(importlib.util.find_spec, packages)) and not request.config.getoption("--recipes", default=False):
        pytest.skip(f"{packages[-1]} is not installed; `make recipes` installs it")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), NUMBER)


@pytest.fixture(scope="module")
def database(request: pytest.FixtureRequest) -> Iterator[Postgres]:
    _need(request, "psycopg")
    _need(request, *POSTGRES_PACKAGES)
    with postgres() as server:
        yield server


def has_sparse(database: Postgres) -> bool:
    """Return whether the server's pgvector has sparse vectors and those of float16."""
    import psycopg

    with psycopg.connect(database.url) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        return connection.execute("SELECT to_regtype('sparsevec')").fetchone() != (None,)


def best(scores: Any, number: int = 10) -> list[str]:
    """Return the ids of the best rows, best first."""
    return [f"d{index}" for index in np.argsort(-scores, kind="stable")[:number]]


def fused(*rankings: list[str], offset: int = 2) -> dict[str, float]:
    """Return the sums of reciprocal ranks, with the offset that Qdrant has: 1 / (2 + rank from 0)."""
    sums: dict[str, float] = {}
    for ranking in rankings:
        for rank, key in enumerate(ranking):
            sums[key] = sums.get(key, 0) + 1 / (offset + rank)
    return sums


def test_lancedb(run: Path, tmp_path: Path) -> None:
    import lancedb

    url = f"lancedb:{tmp_path}/db"
    assert store(run, url, "birds") == store(run, url, "birds") == (NUMBER, [])
    table = lancedb.connect(tmp_path / "db").open_table("birds")
    assert table.count_rows() == NUMBER
    rows = {row["id"]: row for row in table.to_arrow().to_pylist()}
    assert rows["d7"]["sparse"]["ids"] == ROWS[7].ids.tolist()
    assert (rows["d7"]["n"], rows["d7"]["tags"]) == (7, "t1")
    np.testing.assert_array_equal(rows["d7"]["multi_vector"], ROWS[7].tokens)

    def search(query: Any, column: str, distance: str) -> list[str]:
        found = table.search(query, vector_column_name=column).distance_type(distance).limit(10)
        return [row["id"] for row in found.to_list()]

    dense, tokens = search(QUERY.dense, "dense", "dot"), search(QUERY.tokens, "multi_vector", "cosine")
    assert (dense, tokens) == (best(DENSE), best(MAXSIM))
    assert fused(dense, tokens) == fused(best(DENSE), best(MAXSIM))


def test_lancedb_index(tmp_path: Path) -> None:
    import lancedb

    folder, url = write_run(tmp_path, 300, "dense", shard_rows=300), f"lancedb:{tmp_path}/db"
    assert store(folder, url, "birds", index=True) == store(folder, url, "birds", index=True) == (300, [])
    statistics = lancedb.connect(tmp_path / "db").open_table("birds").index_stats("dense_idx")
    assert (statistics.distance_type, statistics.num_indexed_rows) == ("dot", 300)


def test_lancedb_refusals(run: Path, tmp_path: Path) -> None:
    url = f"lancedb:{tmp_path}/db"
    store(run, url, "birds", outputs=("dense",))
    (tmp_path / "other").mkdir()
    half = write_run(tmp_path / "other", 3, "dense", dtype="float16")
    with pytest.raises(SetupError, match=r"table 'birds' of lancedb:.* has a column of type .*float.*'dense'; the run has"):
        store(half, url, "birds")
    with pytest.raises(SetupError, match="has no such column 'sparse'"):
        store(run, url, "birds")
    with pytest.raises(SetupError, match="cannot write lancedb:/proc/none"):
        store(run, "lancedb:/proc/none/db", "birds")


def store_and_die(run: Path, url: str, delay: float) -> None:
    """Store in small pieces, and die some time after the fifth of them has begun."""
    from whimbrel.stores import lancedb, postgres

    kinds: Any = {"lancedb": lancedb.LanceStore, "postgresql": postgres.PostgresStore}
    kind = kinds[url.partition(":")[0]]
    kind.max_rows, write, written = 4, kind.write, [0]

    def dying(self: Any, rows: Any) -> Any:
        written[0] += 1
        if written[0] == 5:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return write(self, rows)

    kind.write = dying
    store(run, url, "killed", outputs=("dense",))
    time.sleep(delay)


def kill_in_the_middle(run: Path, url: str, delay: float) -> None:
    process = multiprocessing.get_context("spawn").Process(target=store_and_die, args=(run, url, delay))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.extended
def test_lancedb_after_kills(run: Path, tmp_path: Path) -> None:
    import lancedb

    for delay in (0.001, 0.02):
        kill_in_the_middle(run, f"lancedb:{tmp_path}/db", delay)
    store(run, f"lancedb:{tmp_path}/db", "killed", outputs=("dense",))
    rows = lancedb.connect(tmp_path / "db").open_table("killed").to_arrow().to_pylist()
    assert sorted(row["id"] for row in rows) == sorted(f"d{index}" for index in range(NUMBER))


def test_qdrant(run: Path, tmp_path: Path) -> None:
    """Hybrid search by ranks of dense and sparse vectors, and MaxSim over its candidates."""
    from qdrant_client import QdrantClient, models

    url = f"qdrant:{tmp_path}/q"
    assert store(run, url, "birds") == store(run, url, "birds") == (NUMBER, [])
    with pytest.raises(SetupError, match="has 'dense' for Dot, not Cosine"):
        store(run, url, "birds", distance="cosine")
    client = QdrantClient(path=f"{tmp_path}/q")
    assert client.count("birds").count == NUMBER
    [point] = client.retrieve("birds", [point_id("d7")], with_vectors=True)
    assert point.payload == {"id": "d7", "n": 7, "tags": "t1", "cut": False}
    sparse = models.SparseVector(indices=QUERY.ids.tolist(), values=QUERY.weights.tolist())
    prefetch = [
        models.Prefetch(query=QUERY.dense.tolist(), using="dense", limit=10),
        models.Prefetch(query=sparse, using="sparse", limit=10),
    ]
    found = client.query_points("birds", prefetch=prefetch, query=models.FusionQuery(fusion=models.Fusion.RRF), limit=20).points
    sums = fused(best(DENSE), best(SPARSE))
    assert {each.payload["id"] for each in found} <= set(sums)
    np.testing.assert_allclose([each.score for each in found], sorted(sums.values(), reverse=True)[: len(found)], rtol=1e-5)
    found = client.query_points("birds", query=QUERY.tokens.tolist(), using="multi_vector", limit=10).points
    assert [each.payload["id"] for each in found] == best(MAXSIM)
    np.testing.assert_allclose([each.score for each in found], np.sort(MAXSIM)[::-1][:10], rtol=1e-5)
    client.close()


def test_qdrant_away(run: Path) -> None:
    """A server that drops the connection, is full or says 429 is asked again; one that refuses the key is not."""
    told = Told()
    with serving(FakeQdrant(), "secret") as server:
        server.faults = [(503, {"status": {"error": "busy"}}), None]
        url = f"qdrant+{server.url}".replace("://", "://:secret@")
        assert store(run, url, "birds", watch=told, wait_seconds=30) == (NUMBER, [])
        assert len(server.rows) == NUMBER
        assert sum("not available" in line for line in told.lines) == 1
        row = server.rows[str(point_id("d7"))]
        np.testing.assert_array_equal(np.array(row["vectors"]["dense"], np.float32), ROWS[7].dense)
        assert row["vectors"]["sparse"]["indices"] == ROWS[7].ids.tolist()
        assert server.made["vectors"]["multi_vector"]["multivector_config"] == {"comparator": "max_sim"}
        with pytest.raises(SetupError, match="the store refused user or password") as error:
            store(run, f"qdrant+{server.url}", "birds", password="wrong")
        assert "wrong" not in str(error.value)
    with pytest.raises(SetupError, match="the store was not available for 1 s"):
        store(run, f"qdrant+{server.url}", "birds", wait_seconds=1)


def test_postgres(run: Path, database: Postgres) -> None:
    """A weighted sum of dense and sparse scores, MaxSim over arrays, and the index."""
    import psycopg

    names = OUTPUTS if (is_new := has_sparse(database)) else ("dense", "multi_vector")
    options: Any = {"index": True, "outputs": names}
    if not is_new:
        with pytest.raises(SetupError, match="has no type sparsevec"):
            store(run, database.url, "birds")
    assert store(run, database.url, "birds", **options) == store(run, database.url, "birds", **options) == (NUMBER, [])
    dense = str(QUERY.dense.tolist())
    entries = ",".join(
        f"{entry + 1}:{weight!r}" for entry, weight in zip(QUERY.ids.tolist(), QUERY.weights.tolist(), strict=True)
    )
    sparse = f"{{{entries}}}/{SPARSE_WIDTH}"
    tokens = [str(row.tolist()) for row in QUERY.tokens]
    with psycopg.connect(database.url) as connection:
        connection.execute("SET enable_indexscan = off")
        assert connection.execute("SELECT count(*) FROM birds").fetchone() == (NUMBER,)
        assert connection.execute("SELECT n, tags, cut FROM birds WHERE id = 'd7'").fetchone() == (7, "t1", False)
        second = " - (sparse <#> %s::sparsevec)" if is_new else ""
        hybrid = f"SELECT id, -(dense <#> %s::vector){second} AS score FROM birds ORDER BY score DESC LIMIT 10"
        found = connection.execute(hybrid, [dense, sparse] if is_new else [dense]).fetchall()
        expected = DENSE + SPARSE if is_new else DENSE
        assert [key for key, _ in found] == best(expected)
        np.testing.assert_allclose([score for _, score in found], np.sort(expected)[::-1][:10], rtol=1e-5)
        maxsim = (
            "SELECT id, (SELECT sum(most) FROM (SELECT max(-(d <#> q)) AS most FROM unnest(multi_vector) d, "
            "unnest(%s::vector[]) q GROUP BY q) each) AS score FROM birds ORDER BY score DESC LIMIT 10"
        )
        found = connection.execute(maxsim, [tokens]).fetchall()
        assert [key for key, _ in found] == best(MAXSIM)
        [(definition,)] = connection.execute("SELECT indexdef FROM pg_indexes WHERE indexdef LIKE '%hnsw%'").fetchall()
        assert "vector_ip_ops" in definition
    with pytest.raises(SetupError, match="has an index of 'dense' for dot, not cosine"):
        store(run, database.url, "birds", distance="cosine", outputs=names)


def test_postgres_types_and_refusals(run: Path, database: Postgres, tmp_path: Path) -> None:
    """Columns of every type arrive; a row that the database refuses is told alone; a table of another form is refused."""
    from datetime import UTC, datetime
    from decimal import Decimal

    import psycopg
    import pyarrow as pa
    import pyarrow.parquet as pq

    when = datetime(2026, 1, 2, 3, 4, 5, 6000, UTC)
    columns = {
        "id": pa.array([5, 6, 7], pa.int32()),
        "text": ["a", "b", "c"],
        "when": pa.array([when] * 3, pa.timestamp("ns", "UTC")),
        "price": pa.array([Decimal("1.5")] * 3),
        "raw": pa.array([b"\x00\x01", None, b""]),
        "kind": pa.array(["x", "bad\0", None]).dictionary_encode(),
        "list": pa.array([[1, 2], None, []]),
        "number": pa.array([1.5, float("nan"), None]),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    bulk(
        tmp_path / "rows.parquet",
        tmp_path / "run",
        AllEmbedder("dense", "multi_vector", scale=2.0),
        id_column="id",
        dtype="float16",
    )
    rows, refused = store(tmp_path / "run", database.url, "typed")
    assert (rows, [row.key for row in refused]) == (3, ["6"])
    assert "0x00" in refused[0].reason
    with psycopg.connect(database.url) as connection:
        found = connection.execute('SELECT id, "when", price, raw, kind, list, number FROM typed ORDER BY id').fetchall()
        [(distance,)] = connection.execute("SELECT dense <=> dense FROM typed WHERE id = 5").fetchall()
    assert found == [(5, when, Decimal("1.5"), b"\x00\x01", "x", [1, 2], 1.5), (7, when, Decimal("1.5"), b"", None, [], None)]
    assert abs(distance) < 1e-3
    with pytest.raises(SetupError, match=r"table 'typed' of postgresql://127.* has 'id' as bigint; the run has text"):
        store(run, database.url, "typed", outputs=("dense", "multi_vector"))
    with psycopg.connect(database.url) as connection:
        connection.execute("CREATE TABLE wide (id text PRIMARY KEY, n bigint, tags text, cut boolean, dense vector(9))")
    with pytest.raises(SetupError, match=r"has 'dense' as vector\(9\); the run has vector\(8\)"):
        store(run, database.url, "wide", outputs=("dense",))


@pytest.mark.extended
def test_postgres_after_kills(run: Path, database: Postgres) -> None:
    import psycopg

    for delay in (0.001, 0.02):
        kill_in_the_middle(run, database.url, delay)
    store(run, database.url, "killed", outputs=("dense",))
    with psycopg.connect(database.url) as connection:
        assert connection.execute("SELECT count(*), count(DISTINCT id) FROM killed").fetchone() == (NUMBER, NUMBER)


def test_postgres_away(run: Path, database: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that dies in the middle and comes back gets all rows; a wrong password and a missing right end the command."""
    import psycopg

    from whimbrel.stores.postgres import PostgresStore

    with psycopg.connect(database.url) as connection:
        connection.execute("CREATE ROLE reader LOGIN PASSWORD 'right'")
    database.need_passwords()
    monkeypatch.setattr(PostgresStore, "max_rows", 7)
    written, write = [0], PostgresStore.write

    def dying(self: Any, rows: Any) -> Any:
        written[0] += 1
        if written[0] == 4:
            database.stop()
        if written[0] == 5:
            database.start()
        return write(self, rows)

    monkeypatch.setattr(PostgresStore, "write", dying)
    told = Told()
    assert store(run, database.url, "survivors", watch=told, outputs=("dense",), wait_seconds=60) == (NUMBER, [])
    assert sum("not available" in line for line in told.lines) == 1
    with psycopg.connect(database.url) as connection:
        assert connection.execute("SELECT count(*) FROM survivors").fetchone() == (NUMBER,)
        connection.execute("GRANT SELECT, INSERT, UPDATE ON survivors TO reader")
    assert store(run, database.url.replace("postgres@", "reader:right@"), "survivors", outputs=("dense",)) == (NUMBER, [])
    url = database.url.replace("postgres@", "reader:wrong@")
    with pytest.raises(SetupError, match=r"cannot connect to postgresql://127.*password authentication failed") as error:
        store(run, url, "survivors", outputs=("dense",), wait_seconds=60)
    assert "wrong" not in str(error.value)
    with pytest.raises(SetupError, match="permission denied"):
        store(run, url, "others", outputs=("dense",), password="right", wait_seconds=60)


def test_opensearch(run: Path) -> None:
    """The bodies of `_bulk` and of the index; items that are busy are sent again; refused ones are told with the reason."""
    told = Told()
    with serving(FakeOpenSearch(), "me:secret") as server:
        assert isinstance(server, FakeOpenSearch)
        server.busy, server.faults = 5, [(503, {"error": "away"}), None]
        url = f"opensearch+{server.url}".replace("://", "://me:secret@")
        options: Any = {"watch": told, "wait_seconds": 30}
        assert store(run, url, "birds", **options) == store(run, url, "birds", **options) == (NUMBER, [])
        assert len(server.rows) == NUMBER
        row = server.rows["d7"]
        assert {name: row[name] for name in ("id", "n", "tags", "cut")} == {"id": "d7", "n": 7, "tags": "t1", "cut": False}
        np.testing.assert_array_equal(np.array(row["dense"], np.float32), ROWS[7].dense)
        assert {int(entry): np.float32(weight) for entry, weight in row["sparse"].items()} == dict(
            zip(ROWS[7].ids.tolist(), ROWS[7].weights, strict=True)
        )
        np.testing.assert_array_equal(np.array(row["multi_vector"], np.float32), ROWS[7].tokens)
        properties = server.made["mappings"]["properties"]
        assert properties["multi_vector"] == {"type": "object", "enabled": False}
        assert properties["dense"]["method"]["space_type"] == "innerproduct"
        scores = {key: np.array(row["dense"], np.float32) @ QUERY.dense for key, row in server.rows.items()}
        assert sorted(scores, key=lambda key: -scores[key])[:10] == best(DENSE)
        with pytest.raises(SetupError, match="has 'dense' with space_type innerproduct, not cosinesimil"):
            store(run, url, "birds", **options, distance="cosine")
        with pytest.raises(SetupError, match="the store refused user or password"):
            store(run, url, "birds", **options, password="wrong")


def test_opensearch_refuses_rows(tmp_path: Path) -> None:
    rows = [{"id": f"d{index}" * (400 if index == 3 else 1), "text": "a", "tags": f"t{index}"} for index in range(12)]
    bulk(write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "run", AllEmbedder("dense"), id_column="id")
    with serving(FakeOpenSearch()) as server:
        rows_read, refused = store(tmp_path / "run", f"opensearch+{server.url}", "birds", wait_seconds=30)
        assert (rows_read, len(server.rows)) == (12, 10)
    assert [row.reason for row in refused] == [
        "the id has no bytes, or more than 512",
        "mapper_parsing_exception: failed to parse: unwanted",
    ]
