"""Runs on a Ray cluster of two nodes: the bytes of a run on one machine, also when an actor or a node dies."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bulk_runs import HashEmbedder, Told, bulk, documents, files_of, write_lines
from command import error
from ray_nodes import HashSource, nodes
from whimbrel.bulk.job import Totals
from whimbrel.errors import SetupError
from whimbrel.ray import pipeline
from whimbrel.ray.cluster import ActorPool, ActorResources, actor_resources
from whimbrel.ray.pipeline import ClusterPipeline
from whimbrel.ray.probe import ClusterEmbedder

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Two nodes of one processor each, beside that of the driver."""
    if not request.config.getoption("--recipes"):
        pytest.importorskip("ray", reason="Ray is not installed; `make ray` installs it")
    with nodes(2) as cluster:
        yield cluster


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of 400 rows, of which three are refused."""
    found: list[Any] = list(documents(400))
    found[33]["text"], found[77]["text"], found[200] = "@@bad", "a @@nan", {"id": "x"}
    return write_lines(tmp_path / "rows.jsonl", found)


@pytest.fixture
def whole(rows: Path, tmp_path: Path) -> dict[str, bytes]:
    """The folder of a run on one machine."""
    bulk(rows, tmp_path / "whole", id_column="id", shard_rows=30)
    return files_of(tmp_path / "whole")


def on_cluster(rows: Path, out: Path, *, most: int = 2, **source: Any) -> tuple[Totals, Told]:
    """Run on the cluster, with a model of hashes in actors of one processor."""
    out.parent.joinpath("happened").mkdir(exist_ok=True)
    told: list[str] = []
    pool = ActorPool(1, most, cpus=1, gpus=0)
    model = HashSource(str(out.parent / "happened"), **source)
    embedder = ClusterEmbedder(model, pool, actor_resources(pool, on_cpu=True, tell=told.append), told.append)
    try:
        return bulk(rows, out, embedder, runner=ClusterPipeline, id_column="id", shard_rows=30)
    finally:
        embedder.stop()


def test_two_nodes_write_the_bytes_of_one_machine(cluster: Any, rows: Path, whole: Any, tmp_path: Path) -> None:
    """Manifest, parts, records and errors of a run on a cluster are those of a run on one machine, byte for byte."""
    totals, told = on_cluster(rows, tmp_path / "out", seconds=0.05)
    assert files_of(tmp_path / "out") == whole
    assert (totals.done, totals.refused, totals.shards_done, told.rows) == (397, 3, 14, 400)


def test_a_node_that_is_killed_costs_time_only(cluster: Any, rows: Path, whole: Any, tmp_path: Path) -> None:
    """A node that dies during a run, with its actor and what it computed, changes no byte; the other node goes on."""
    out = tmp_path / "out"
    victim = max(cluster.worker_nodes, key=lambda node: node.unique_id)
    killed: list[int] = []

    def kill() -> None:
        while len(done := list(out.glob("shards/part-*.json"))) < 3:
            time.sleep(0.02)
        cluster.remove_node(victim, allow_graceful=False)
        killed.append(len(done))

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        on_cluster(rows, out, seconds=0.3)
        thread.join(30)
    finally:
        cluster.add_node(num_cpus=1, object_store_memory=80 * 1024 * 1024)
    assert killed
    assert killed[0] < 12
    assert files_of(out) == whole


def test_an_actor_that_is_killed_costs_time_only(cluster: Any, rows: Path, whole: Any, tmp_path: Path) -> None:
    """An actor that dies is started again, and its shards run again."""
    on_cluster(rows, tmp_path / "out", deadly=text_of(123))
    assert (tmp_path / "happened" / "killed").exists()
    assert files_of(tmp_path / "out") == whole


def test_a_text_that_kills_every_actor_ends_the_run(
    cluster: Any, rows: Path, whole: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """After some tries the run ends with one error, and the parts that were written stay."""
    monkeypatch.setattr(pipeline, "_RETRIES", 1)
    with pytest.raises(SetupError, match="Ray gave up: ") as raised:
        on_cluster(rows, tmp_path / "out", deadly=text_of(123), always=True, most=1)
    assert raised.value.hint == "what is finished stays; the same command goes on"
    on_cluster(rows, tmp_path / "out")
    assert files_of(tmp_path / "out") == whole


def test_a_run_of_one_machine_goes_on_on_a_cluster(cluster: Any, rows: Path, whole: Any, tmp_path: Path) -> None:
    """A folder that one machine began is finished by a cluster, and finished parts do not run again."""
    out = tmp_path / "out"

    class Ends(HashEmbedder):
        def run(self, texts: Any) -> Any:
            if len(self.seen) > 150:
                raise SetupError("enough.")
            return super().run(texts)

    with pytest.raises(SetupError, match="enough"):
        bulk(rows, out, Ends(), id_column="id", shard_rows=30)
    before = {name: (out / name).stat().st_mtime_ns for name in files_of(out) if name.startswith("part-")}
    assert before
    totals, _ = on_cluster(rows, out)
    assert totals.rows_before > 0
    assert files_of(out) == whole
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before


@pytest.mark.parametrize(
    ("source", "words"),
    [({"other": True}, "has another revision: r2, and not r1."), ({"broken": True}, "the weights are gone.")],
)
def test_a_node_with_another_model_is_refused(cluster: Any, rows: Path, tmp_path: Path, source: Any, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        on_cluster(rows, tmp_path / "out", **source)
    assert not list((tmp_path / "out").glob("part-*"))


def test_the_command_on_a_cluster(cluster: Any, tmp_path: Path) -> None:
    """`whimbrel run --ray` gives the bytes of `whimbrel run` with the packaged model, and says an address that is wrong."""
    path = write_lines(tmp_path / "rows.jsonl", list(documents(90)))
    command = [*command_for(path), "--shard-rows", "40"]
    for more in (
        ["--out", str(tmp_path / "one")],
        ["--out", str(tmp_path / "ray"), "--ray", cluster.address, "--ray-actors", "1:2"],
    ):
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "90 rows done, 0 cut, 0 refused" in done.stderr.splitlines()[-1]
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "one")
    assert "--ray is for a model" in error("run", str(path), "--out", "x", "--ray", "--url", "http://127.0.0.1:9")
    assert "--ray-actors takes a number, or two as 1:8" in error("run", str(path), "--out", "x", "--ray", "--ray-actors", "8:1")


def test_a_driver_that_ends_costs_time_only(cluster: Any, tmp_path: Path) -> None:
    """After SIGKILL of the command one machine goes on, and after SIGTERM the cluster; a second driver is refused meanwhile."""
    path = write_lines(tmp_path / "rows.jsonl", list(documents(2000)))
    command, on_ray = [*command_for(path), "--shard-rows", "50"], ["--ray", cluster.address, "--ray-actors", "1:2"]
    subprocess.run([*command, "--out", str(tmp_path / "whole")], check=True, timeout=120)
    for number, code, goes_on in ((signal.SIGKILL, -signal.SIGKILL, []), (signal.SIGTERM, 143, on_ray)):
        out = tmp_path / number.name
        driver = subprocess.Popen(
            [*command, "--out", str(out), *on_ray], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while len(list(out.glob("shards/part-*.json"))) < 2:
            assert driver.poll() is None
            time.sleep(0.02)
        assert f"another run writes into {out}" in error(*command[3:], "--out", str(out), *on_ray)
        driver.send_signal(number)
        stdout, stderr = driver.communicate(timeout=60)
        assert driver.returncode == code, stderr
        assert all(line.startswith(("  ", "stopped: ")) for line in stderr.splitlines()), stderr
        assert stdout == ""
        assert len(list(out.glob("shards/part-*.json"))) < 40
        subprocess.run([*command, "--out", str(out), *goes_on], check=True, timeout=120)
        assert files_of(out) == files_of(tmp_path / "whole")


def command_for(path: Path) -> list[str]:
    return [sys.executable, "-m", "whimbrel", "run", str(path), "--id", "id", "--device", "cpu"]


def test_actors_fit_the_nodes(cluster: Any) -> None:
    """An actor takes the largest node by default; resources that no node has are told, and waited for."""
    told: list[str] = []
    assert actor_resources(ActorPool(), on_cpu=False, tell=told.append) == ActorResources(1, 0)
    assert not told
    actor_resources(ActorPool(cpus=64, gpus=2), on_cpu=False, tell=told.append)
    assert told == ["no node has 64 CPUs and 2 GPUs yet; waiting for one"]


def text_of(number: int) -> str:
    return list(documents(number + 1))[number]["text"]
