"""Runs on a cluster without one: a stand-in for Ray Data gives pickled tasks to a worker in this process, in another order.

With Ray itself they are in tests/cluster.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from bulk_runs import HashEmbedder, bulk, documents, files_of, write_lines
from ray_nodes import HashSource
from whimbrel.errors import SetupError
from whimbrel.ray import cluster, pipeline
from whimbrel.ray.cluster import ActorPool, ActorResources, connected
from whimbrel.ray.pipeline import ClusterPipeline


class Data:
    """Ray Data, as far as a run needs it: every shard comes twice, and in another order."""

    def __init__(self, change: Callable[[pa.Table], pa.Table]) -> None:
        self.DataContext = SimpleNamespace(get_current=SimpleNamespace)
        self.pools: list[dict[str, Any]] = []
        self._change = change

    def ActorPoolStrategy(self, **pool: Any) -> None:
        self.pools.append(pool)

    def from_items(self, items: list[dict[str, Any]], override_num_blocks: int) -> Any:
        assert override_num_blocks == len(items)

        def iterate(worker: Any, arguments: Any) -> Iterator[pa.Table]:
            blocks = [*items, *items]
            random.Random(3).shuffle(blocks)
            called = worker(*pickle.loads(pickle.dumps(arguments)))
            for block in blocks:
                yield from map(self._change, called(pa.Table.from_pylist([block])))

        def map_batches(worker: Any, *, fn_constructor_args: Any, **_: Any) -> Any:
            return SimpleNamespace(iter_batches=lambda **_: iterate(worker, fn_constructor_args))

        return SimpleNamespace(map_batches=map_batches)


class Probe(HashEmbedder):
    """The model as the start of a run sees it."""

    def __init__(self, source: HashSource) -> None:
        super().__init__()
        self.source, self.pool, self.resources = source, ActorPool(2, 5), ActorResources(1, 0)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Data]:
    """Run a job on the stand-in, and return it."""

    def run_job(rows: Path, out: Path, change: Callable[[pa.Table], pa.Table] = lambda table: table, **job: Any) -> Data:
        data = Data(change)
        modules = {"ray.data": data, "ray.exceptions": SimpleNamespace(RayError=ZeroDivisionError)}
        monkeypatch.setattr(pipeline, "ray_module", modules.__getitem__)
        monkeypatch.setattr(pipeline, "room_for", lambda _: 3)
        source = HashSource(str(tmp_path / "happened"))
        bulk(rows, out, Probe(source), runner=ClusterPipeline, shard_rows=30, **job)
        return data

    return run_job


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of 200 rows, of which some are refused or cut."""
    (tmp_path / "happened").mkdir()
    found: list[Any] = list(documents(200))
    found[33]["text"], found[77]["text"], found[120], found[121]["text"] = "@@bad", "a @@nan", {"id": "x"}, "b @@cut"
    return write_lines(tmp_path / "rows.jsonl", found)


@pytest.mark.parametrize(
    "job",
    [
        {"id_column": "id"},
        {"format": "arrow", "dtype": "float16"},
        {"id_column": "id", "format": "npy", "dtype": "int8", "keep": ("n",)},
    ],
)
def test_any_order_of_shards_gives_the_bytes_of_one_machine(rows: Path, run: Any, tmp_path: Path, job: Any) -> None:
    """Shards that come in another order, and twice, become the same files."""
    bulk(rows, tmp_path / "one", shard_rows=30, **job)
    data = run(rows, tmp_path / "many", **job)
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")
    (pool,) = data.pools
    assert (pool["min_size"], pool["initial_size"], pool["max_size"]) == (2, 3, 5)


def test_parquet_is_read_by_the_workers(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are read by their row groups, and relative paths made whole for the workers."""
    import pyarrow.parquet as pq

    (tmp_path / "happened").mkdir()
    pq.write_table(
        pa.table({"text": [f"text {number}" for number in range(100)]}), tmp_path / "rows.parquet", row_group_size=16
    )
    monkeypatch.chdir(tmp_path)
    bulk("rows.parquet", tmp_path / "one", shard_rows=30)
    run("rows.parquet", tmp_path / "many")
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")


def test_bytes_that_changed_on_the_way_are_refused(rows: Path, run: Any, tmp_path: Path) -> None:
    """A shard of which the bytes are not those that the worker hashed has no record, and runs again later."""

    def damage(table: pa.Table) -> pa.Table:
        (row,) = table.to_pylist()
        return pa.Table.from_pylist([row | {"contents": [b"x" + data[1:] for data in row["contents"]]}], schema=table.schema)

    with pytest.raises(SetupError, match=r"part-0000\d\.parquet came with other bytes than were sent"):
        run(rows, tmp_path / "out", damage)
    assert not list((tmp_path / "out" / "shards").iterdir())
    run(rows, tmp_path / "out")
    bulk(rows, tmp_path / "one", shard_rows=30)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "one")


def test_an_end_of_ray_is_one_error(rows: Path, run: Any, tmp_path: Path) -> None:
    def fail(_: pa.Table) -> pa.Table:
        raise ZeroDivisionError("the node of actor 17 died.\nIts last lines: ...")

    with pytest.raises(SetupError, match=r"^Ray gave up: the node of actor 17 died\.$") as raised:
        run(rows, tmp_path / "out", fail)
    assert raised.value.hint == "what is finished stays; the same command goes on"


def test_a_node_without_a_package_is_one_error(rows: Path, run: Any, tmp_path: Path) -> None:
    """Ray's error ends with the line that says why; the traceback before it is left out."""

    def fail(_: pa.Table) -> pa.Table:
        raise ZeroDivisionError(
            "The actor died, ray::f()\nTraceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'whimbrel'"
        )

    with pytest.raises(SetupError, match=r"^Ray gave up: ModuleNotFoundError: No module named 'whimbrel'\.$") as raised:
        run(rows, tmp_path / "out", fail)
    assert raised.value.hint == "all nodes need the packages of this machine: pip install 'whimbrel[serve,ray]'"


def test_an_input_that_a_node_sees_otherwise_is_refused(rows: Path, run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A file of another time or size on a node ends the run."""
    monkeypatch.setattr("whimbrel.bulk.rows.state_of", lambda _: (1, "another"))
    with pytest.raises(SetupError, match="changed while it was read"):
        run(rows, tmp_path / "out")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:9", "cannot reach Ray at 127.0.0.1:9: Connection refused."),
        ("ray://127.0.0.1:10001", "cannot reach Ray at ray://127.0.0.1:10001: runs take no URLs of Ray Client or of jobs."),
        (
            "nowhere",
            "cannot reach Ray at nowhere: Version mismatch: The cluster was started with: Ray: 2.60.0 This process: 2.61.0.",
        ),
    ],
)
def test_a_cluster_that_cannot_be_reached_is_one_error(monkeypatch: pytest.MonkeyPatch, address: str, words: str) -> None:
    """Nothing is waited for where nothing listens; and both versions are told where they differ."""

    def init(*_: Any, **options: Any) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n  This process: 2.61.0\n")

    monkeypatch.setattr(cluster, "ray_module", lambda: SimpleNamespace(init=init))
    with pytest.raises(SetupError) as raised, connected(address):
        pass
    assert str(raised.value) == words
