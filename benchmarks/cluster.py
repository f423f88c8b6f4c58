"""Runs on a Ray cluster against a run in one process: tokens per second for the same texts, and the overhead a row.

    python benchmarks/cluster.py [--dtype auto|bfloat16|float32] [--texts 1200] [--rows 50000] [--rounds 2]

The contenders take turns, each on all cores: an engine in this process, one actor, and as many actors of one core as there are
cores. Ray runs on this machine. A run on Ray loads the model once to ask it and once in each actor. So each contender runs a
small job first, of one text, and its seconds are taken off: they are the column "start". The overhead a row is that of a model
that costs nothing, with vectors of 384 columns. The folders are compared byte by byte.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import NUM_CORES, count_tokens, default_plan, make_texts, note, options, print_setting, print_table

from whimbrel.bulk.embedder import Answer, RequestSizes
from whimbrel.bulk.job import Job, Totals
from whimbrel.bulk.manifest import ColumnNames
from whimbrel.bulk.run import run
from whimbrel.ray.cluster import LOCAL, ActorPool, ActorResources, connected
from whimbrel.ray.pipeline import ClusterPipeline
from whimbrel.ray.probe import ClusterEmbedder
from whimbrel.ray.sources import EngineSource

WIDTH = 384
SHARD_ROWS = 100
SHARD_ROWS_OF_NOTHING = 5000


class _Silent:
    def tell(self, text: str) -> None: ...

    def start(self, totals: Totals) -> None: ...

    def advance(self, rows: float, tokens: int) -> None: ...


class Nothing:
    """A model that costs nothing."""

    model, revision, labels, sizes = "nothing", "1", (), RequestSizes(2048, 2**20, 2)

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}

    def run(self, texts: Any) -> Answer:
        from whimbrel.types.result import Outputs

        return Answer(Outputs(dense=np.ones((len(texts), WIDTH), np.float32)), np.zeros(len(texts), np.bool_), len(texts))

    def stop(self) -> None: ...


@dataclass(frozen=True)
class NothingSource:
    def load(self, cores: float | None) -> Any:
        return Nothing()


def write_input(path: Path, texts: list[str]) -> Path:
    pq.write_table(pa.table({"id": [f"d{number}" for number in range(len(texts))], "text": texts}), path)
    return path


def job_of(path: Path, out: Path, shard_rows: int) -> Job:
    return Job([str(path)], out, ColumnNames(("text",), "\n", "id", None), shard_rows=shard_rows)


def run_here(source: Any) -> Callable[[Job], None]:
    embedder = source.load(None)
    return lambda job: run(job, lambda: nullcontext(embedder), _Silent(), Totals())


def run_on(source: Any, number: int, cpus: float) -> Callable[[Job], None]:
    def by_actors(job: Job) -> None:
        embedder = ClusterEmbedder(source, ActorPool(number, number, cpus, 0), ActorResources(cpus, 0), lambda _: None)
        run(job, lambda: nullcontext(embedder), _Silent(), Totals(), ClusterPipeline)

    return by_actors


def seconds(contender: Callable[[Job], None], job: Job) -> float:
    begin = perf_counter()
    contender(job)
    return perf_counter() - begin


def bytes_of(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def main() -> None:
    given = options(__doc__, texts=1200, rows=50_000, rounds=2).parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # for the actors
    texts = make_texts(given.texts)
    tokens = count_tokens(texts)
    with tempfile.TemporaryDirectory() as name, connected(LOCAL):
        folder = Path(name)
        print_setting(default_plan(given.dtype), texts=f"{given.texts:,}", tokens=f"{tokens:,}", shards=f"of {SHARD_ROWS} rows")
        large, small = write_input(folder / "large.parquet", texts), write_input(folder / "small.parquet", texts[:1])
        source = EngineSource(None, {"dtype": given.dtype}, (), {})
        contenders = {
            "one engine": run_here(source),
            "1 actor": run_on(source, 1, NUM_CORES),
            f"{NUM_CORES} actors": run_on(source, NUM_CORES, 1),
        }
        starts, spent = {key: list[float]() for key in contenders}, {key: list[float]() for key in contenders}
        for number in range(given.rounds):
            for key, contender in contenders.items():
                starts[key].append(seconds(contender, job_of(small, folder / f"start-{number}-{key}", SHARD_ROWS)))
                whole = seconds(contender, job_of(large, folder / f"{number}-{key}", SHARD_ROWS))
                spent[key].append(whole - starts[key][-1])
                note(f"round {number + 1}, {key}: {starts[key][-1]:.1f} s, {whole:.1f} s")
        same = all(bytes_of(folder / f"0-{key}") == bytes_of(folder / "0-one engine") for key in contenders)
        first = spent["one engine"]
        rows = [
            [
                key,
                f"{median(starts[key]):.1f}",
                f"{tokens / median(times):,.0f}",
                f"{median(one / other for one, other in zip(first, times, strict=True)):.2f}",
            ]
            for key, times in spent.items()
        ]
        print_table(["", "start, s", "tokens/s", "ratio"], rows)
        print(f"folders: {'the same bytes' if same else 'they differ'}")
        many = write_input(folder / "many.parquet", [f"text {number}" for number in range(given.rows)])
        for key, contender in {"here": run_here(NothingSource()), "1 actor": run_on(NothingSource(), 1, NUM_CORES)}.items():
            start = seconds(contender, job_of(small, folder / f"no-start-{key}", SHARD_ROWS_OF_NOTHING))
            whole = seconds(contender, job_of(many, folder / f"nothing-{key}", SHARD_ROWS_OF_NOTHING))
            note(f"no model, {key}: {start:.1f} s, {whole:.1f} s")
            print(f"no model, {key}: {(whole - start) / given.rows * 1e6:,.0f} us a row")


if __name__ == "__main__":
    main()
