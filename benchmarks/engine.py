"""Engine against Sentence Transformers: seconds for the same texts, on the packaged all-MiniLM-L6-v2 in the same dtype.

    python benchmarks/engine.py [--dtype auto|bfloat16|float32] [--rounds 7]

Each contender has its own process, because the engine sets torch's intra-op threads to one. Sentence Transformers has a thread
per core and its defaults, `model.encode(texts)`. They take turns, A B A B, after a round that is not counted. The ratio is the
median of Sentence Transformers' seconds over that of the engine: above 1 the engine is faster. "Rounds" are the smallest and
the largest ratio of one round, "fastest" is the ratio of the fastest rounds. If the ratio is far above "fastest", other work
used the cores. That slows Sentence Transformers more, because its threads wait for one another.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import version
from statistics import median
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
from common import (
    FOLDER,
    MIXED,
    NUM_CORES,
    SHORT,
    Worker,
    chunks,
    count_tokens,
    default_plan,
    make_texts,
    min_cosine,
    note,
    print_setting,
    print_table,
)

from whimbrel.types.arrays import Float32Array

Calls: TypeAlias = list[list[str]]
Timed: TypeAlias = tuple[float, Float32Array]


def make_workloads() -> dict[str, Calls]:
    """Return lists of texts. Each list is the argument of one call, and calls run one after another."""
    return {
        "mixed, 4 to 200 words": [make_texts(256, words=MIXED)],
        "short, 4 to 24 words": [make_texts(1024, words=SHORT)],
        "requests of 8 mixed": chunks(make_texts(256, words=MIXED, seed=1), 8),
    }


def make_engine(dtype: str) -> Callable[[Calls], Timed]:
    """Load the Engine."""
    from whimbrel import Engine

    return time_calls(Engine(dtype=dtype).embed)


def make_sentence_transformers(dtype: str) -> Callable[[Calls], Timed]:
    """Load Sentence Transformers."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(NUM_CORES)
    model: Any = SentenceTransformer(str(FOLDER), model_kwargs={"dtype": dtype})
    return time_calls(model.encode)


def time_calls(encode: Callable[[list[str]], Float32Array]) -> Callable[[Calls], Timed]:
    """Return the seconds for all calls, and their vectors."""

    def run(calls: Calls) -> Timed:
        started = perf_counter()
        vectors = [encode(texts) for texts in calls]
        return perf_counter() - started, np.concatenate(vectors)

    return run


def measure(engine: Worker, peer: Worker, calls: Calls, rounds: int) -> list[str]:
    """Return a row of the table without the workload's name."""
    cosine = min_cosine(engine.ask(calls)[1], peer.ask(calls)[1])
    pairs = [(engine.ask(calls)[0], peer.ask(calls)[0]) for _ in range(rounds)]
    ours, theirs = (median(seconds) for seconds in zip(*pairs, strict=True))
    ratios = [b / a for a, b in pairs]
    tokens = sum(map(count_tokens, calls))
    return [
        f"{tokens:,}",
        f"{tokens / ours:,.0f}",
        f"{tokens / theirs:,.0f}",
        f"{theirs / ours:.2f}",
        f"{min(b for _, b in pairs) / min(a for a, _ in pairs):.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        f"{cosine:.6f}",
    ]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    plan = default_plan(args.dtype)
    engine, peer = Worker(make_engine, plan.dtype), Worker(make_sentence_transformers, plan.dtype)
    rows: list[list[str]] = []
    for name, calls in make_workloads().items():
        note(name)
        rows.append([name, *measure(engine, peer, calls, args.rounds)])
    peer_rate = "Sentence Transformers, tokens/s"
    header = ["workload", "tokens", "engine, tokens/s", peer_rate, "ratio", "fastest", "rounds", "smallest cosine"]
    print_table(header, rows)
    print_setting(plan, sentence_transformers=version("sentence-transformers"), rounds=args.rounds)


if __name__ == "__main__":
    main()
