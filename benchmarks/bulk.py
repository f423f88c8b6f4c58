"""Bulk runs against `Engine.embed`: tokens per second for the same texts by the same engine, in turns.

    python benchmarks/bulk.py [--dtype auto|bfloat16|float32] [--texts 10000] [--rounds 5] [--shard-rows N] [--lines]

A run reads a Parquet file (`--lines`: JSON lines) and writes Parquet, each time into a new folder: survey, hashes, copies and
syncs are within its time, and the load of the model is not. `Engine.embed` gets all texts in one call, in memory. The ratio is
the median of `Engine.embed`'s seconds over those of the run in the same round: above 1 the run is faster. The vectors are
compared first. The last line is the largest memory of the process while a run went on, over that before the first.
"""

import json
import resource
import tempfile
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import count_tokens, make_texts, note, options, print_setting, print_table

from whimbrel import Engine
from whimbrel.bulk.embedder import EngineEmbedder
from whimbrel.bulk.job import Job, Totals
from whimbrel.bulk.manifest import ColumnNames
from whimbrel.bulk.run import run


class _Silent:
    def tell(self, text: str) -> None: ...

    def start(self, totals: Totals) -> None: ...

    def advance(self, rows: float, tokens: int) -> None: ...


def write_input(folder: Path, texts: list[str], *, lines: bool) -> Path:
    """Write texts with an id and a column to copy."""
    table = pa.table({"id": [f"d{number}" for number in range(len(texts))], "text": texts, "n": range(len(texts))})
    path = folder / ("texts.jsonl" if lines else "texts.parquet")
    if lines:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        pq.write_table(table, path)
    return path


def time_run(engine: Engine, path: Path, out: Path, shard_rows: int | None) -> float:
    begin = perf_counter()
    job = Job([str(path)], out, ColumnNames(("text",), "\n", "id", None), shard_rows=shard_rows)
    run(job, lambda: nullcontext(EngineEmbedder(engine, (), {})), _Silent(), Totals())
    return perf_counter() - begin


def main() -> None:
    given = options(__doc__, texts=10_000, rounds=5, shard_rows=0, lines=False).parse_args()
    texts = make_texts(given.texts)
    tokens = count_tokens(texts)
    with tempfile.TemporaryDirectory() as name, Engine(dtype=given.dtype) as engine:
        print_setting(engine.plan, texts=f"{given.texts:,}", tokens=f"{tokens:,}", input="JSONL" if given.lines else "Parquet")
        folder = Path(name)
        path = write_input(folder, texts, lines=given.lines)
        expected = engine.embed(texts, truncate=True)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        embeds, runs = list[float](), list[float]()
        for number in range(given.rounds):
            begin = perf_counter()
            engine.embed(texts, truncate=True)
            embeds.append(perf_counter() - begin)
            runs.append(time_run(engine, path, folder / f"out{number}", given.shard_rows or None))
            note(f"round {number + 1}: embed {embeds[-1]:.2f} s, run {runs[-1]:.2f} s")
        written = pa.concat_tables([pq.read_table(part) for part in sorted((folder / "out0").glob("part-*.parquet"))])
        dense = written.column("dense").combine_chunks().flatten().to_numpy().reshape(len(texts), -1)
        same = "the same bits" if np.array_equal(dense, expected) else f"differ by up to {np.abs(dense - expected).max():.1e}"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ratio = median(one / other for one, other in zip(embeds, runs, strict=True))
    rows = [
        ["Engine.embed", f"{tokens / median(embeds):,.0f}", ""],
        ["whimbrel run", f"{tokens / median(runs):,.0f}", f"{ratio:.3f}"],
    ]
    print_table(["", "tokens/s", "ratio"], rows)
    print(f"vectors: {same}; memory: {(peak - before) / 1024:,.0f} MB more than before the first run")


if __name__ == "__main__":
    main()
