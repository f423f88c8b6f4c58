"""Bulk runs against `Engine.embed`: tokens per second for the same texts by the same engine, in turns.

    python benchmarks/bulk.py [--dtype auto|bfloat16|float32] [--texts 10000] [--rounds 5] [--shard-rows N] [--lines]
    python benchmarks/bulk.py --outputs [--model PATH] [--texts 1000] [--rounds 3]

A run reads a Parquet file (`--lines`: JSON lines) and writes Parquet, each time into a new folder: survey, hashes, copies and
syncs are within its time, and the load of the model is not. `Engine.embed` gets all texts in one call, in memory. The ratio is
the median of `Engine.embed`'s seconds over those of the run in the same round: above 1 the run is faster. The vectors are
compared first. The last line is the largest memory of the process while a run went on, over that before the first.

`--outputs` runs each output of the model in turns instead: tokens per second, and the bytes of a row in the parts, with its id.
"""

import json
import resource
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import count_tokens, make_texts, note, options, print_setting, print_table

from whimbrel import Engine
from whimbrel.bulk.columns import NumberType
from whimbrel.bulk.embedder import EngineEmbedder
from whimbrel.bulk.job import Job, Totals
from whimbrel.bulk.manifest import ColumnNames
from whimbrel.bulk.run import run
from whimbrel.types.options import TextOptions
from whimbrel.types.request import OutputName


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


@dataclass(frozen=True)
class Output:
    """Outputs of a run, and its numbers."""

    names: tuple[OutputName, ...]
    dtype: NumberType
    options: TextOptions


DENSE: Final = Output((), "float32", {})
OUTPUTS: Final = {
    "dense, float32": Output(("dense",), "float32", {}),
    "dense, float16": Output(("dense",), "float16", {}),
    "dense, int8": Output(("dense",), "int8", {}),
    "token vectors, float16": Output(("multi_vector",), "float16", {"input_type": "document"}),
    "token vectors, int8": Output(("multi_vector",), "int8", {"input_type": "document"}),
    "token vectors, one of 3, float16": Output(("multi_vector",), "float16", {"token_pooling": 3, "input_type": "document"}),
    "MUVERA, float16": Output(("multi_vector",), "float16", {"muvera": True, "input_type": "document"}),
    "sparse": Output(("sparse",), "float32", {}),
}


def time_run(engine: Engine, path: Path, out: Path, shard_rows: int | None, output: Output = DENSE) -> float:
    begin = perf_counter()
    names = ColumnNames(("text",), "\n", "id", ())
    job = Job([str(path)], out, names, output.dtype, shard_rows=shard_rows)
    run(job, lambda: nullcontext(EngineEmbedder(engine, output.names, output.options)), _Silent(), Totals())
    return perf_counter() - begin


def time_outputs(engine: Engine, path: Path, folder: Path, rounds: int, tokens: int, num_texts: int) -> None:
    """Print the speed of each output and its bytes a row."""
    given = {name: output for name, output in OUTPUTS.items() if {*output.names} <= {*engine.card.all_outputs}}
    seconds: dict[str, list[float]] = {name: [] for name in given}
    sizes = dict[str, float]()
    for number in range(rounds):
        for place, (name, output) in enumerate(given.items()):
            out = folder / f"{number}-{place}"
            seconds[name].append(time_run(engine, path, out, None, output))
            sizes[name] = sum(part.stat().st_size for part in out.glob("part-*")) / num_texts
        note(f"round {number + 1}: " + ", ".join(f"{name} {times[-1]:.2f} s" for name, times in seconds.items()))
    rows = [[name, f"{tokens / median(times):,.0f}", f"{sizes[name]:,.0f}"] for name, times in seconds.items()]
    print_table(["", "tokens/s", "bytes a row"], rows)


def main() -> None:
    given = options(__doc__, texts=10_000, rounds=5, shard_rows=0, lines=False, outputs=False, model="").parse_args()
    texts = make_texts(given.texts)
    tokens = count_tokens(texts)
    with tempfile.TemporaryDirectory() as name, Engine(given.model or None, dtype=given.dtype) as engine:
        print_setting(engine.plan, texts=f"{given.texts:,}", tokens=f"{tokens:,}", input="JSONL" if given.lines else "Parquet")
        folder = Path(name)
        path = write_input(folder, texts, lines=given.lines)
        if given.outputs:
            time_outputs(engine, path, folder, given.rounds, tokens, given.texts)
            return
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
