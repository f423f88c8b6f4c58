"""Cost of batch-invariant bits: the Engine with matrix products in blocks of rows, against the same Engine without blocks.

    python benchmarks/blocks.py [--dtype auto|bfloat16|float32] [--rounds 12] [--model FOLDER]

Three engines take turns, each in its own process: one with the blocks that it found, one without blocks, and one with the
blocks of an AMX processor. Without blocks a product runs all rows of a batch at once, and a text may have other bits in other
batches. On AMX, 16, 32 and 384 rows give other bits than other row counts, and 512 rows again others. A ratio is that of the
medians, over the engine without blocks: above 1 a contender is slower. "Rounds" are the smallest and the largest ratio of one
round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice, permutations
from statistics import median
from time import perf_counter
from typing import Any, Final, TypeAlias

import numpy as np
from common import MIXED, SHORT, Worker, chunks, default_plan, make_texts, note, print_setting, print_table

from whimbrel.types.arrays import Float32Array

Calls: TypeAlias = list[list[str]]
Timed: TypeAlias = tuple[float, Float32Array]

CONTENDERS: Final = ("found", "none", "amx")


def make_workloads() -> dict[str, Calls]:
    """Return lists of texts. Each list is the argument of one call, and calls run one after another."""
    return {
        "mixed, 4 to 200 words": [make_texts(256, words=MIXED)],
        "short, 4 to 24 words": [make_texts(1024, words=SHORT)],
        "requests of 8 mixed": chunks(make_texts(256, words=MIXED, seed=1), 8),
        "one short text at a time": chunks(make_texts(64, words=SHORT, seed=2), 1),
        "8 texts of 400 to 450 words": [make_texts(8, words=(400, 450), seed=3)],
    }


def make_engine(contender: str, model: str | None, dtype: str) -> Callable[[Calls], Timed]:
    """Load the Engine with one kind of blocks."""
    from whimbrel import Engine
    from whimbrel.model.ops import linear
    from whimbrel.model.ops.row_blocks import RowBlocks, find_row_blocks

    if contender == "none":
        linear.find_row_blocks = lambda *_: RowBlocks(())
    elif contender == "amx":
        linear.find_row_blocks = lambda sizes, _: find_row_blocks(sizes, lambda rows: rows in (16, 32, 384) or rows // 512 * 2)
    return time_calls(Engine(model, dtype=dtype, max_length=512).embed)


def time_calls(encode: Callable[[list[str]], Float32Array]) -> Callable[[Calls], Timed]:
    """Return the seconds for all calls, and their vectors."""

    def run(calls: Calls) -> Timed:
        started = perf_counter()
        vectors = [encode(texts) for texts in calls]
        return perf_counter() - started, np.concatenate(vectors)

    return run


def measure(workers: dict[str, Worker], calls: Calls, rounds: int) -> list[str]:
    """Return a row of the table without the workload's name."""
    ask: Callable[[str], Any] = lambda name: workers[name].ask(calls)  # noqa: E731
    vectors = {name: ask(name)[1] for name in CONTENDERS}
    orders = islice(cycle(permutations(CONTENDERS)), rounds)
    seconds = [{name: ask(name)[0] for name in order} for order in orders]
    medians = {name: median(each[name] for each in seconds) for name in CONTENDERS}
    found = [f"{medians['none'] * 1e3:,.1f}"]
    for name in ("found", "amx"):
        ratios = [each[name] / each["none"] for each in seconds]
        found += [f"{medians[name] / medians['none']:.3f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
    return [*found, "yes" if all(np.array_equal(vectors["none"], each) for each in vectors.values()) else "no"]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--model", help="a checkpoint's folder; the packaged model by default")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    plan = default_plan(args.dtype)
    workers = {name: Worker(partial(make_engine, name), args.model, plan.dtype) for name in CONTENDERS}
    rows: list[list[str]] = []
    for name, calls in make_workloads().items():
        note(name)
        rows.append([name, *measure(workers, calls, args.rounds)])
    header = ["workload", "without, ms", "with blocks", "rounds", "with AMX's blocks", "rounds", "same bits as without"]
    print_table(header, rows)
    print_setting(plan, rounds=args.rounds)


if __name__ == "__main__":
    main()
