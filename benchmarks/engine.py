"""Engine against Sentence Transformers: seconds for the same texts, on the packaged all-MiniLM-L6-v2 in the same dtype.

    python benchmarks/engine.py [--dtype auto|bfloat16|float32] [--rounds 7]

Each contender has its own process, because the engine sets torch's intra-op threads to one. Sentence Transformers has a thread
per core and its defaults, `model.encode(texts)`. They take turns, A B A B, after a round that is not counted. The ratio is the
median of Sentence Transformers' seconds over that of the engine: above 1 the engine is faster. "Rounds" are the smallest and
the largest ratio of one round, "fastest" is the ratio of the fastest rounds. If the ratio is far above "fastest", other work
used the cores. That slows Sentence Transformers more, because its threads wait for one another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from statistics import median
from time import perf_counter
from typing import Any, Final, TypeAlias

import numpy as np
from common import (
    FOLDER,
    MIXED,
    NUM_CORES,
    SHORT,
    chunks,
    count_tokens,
    default_plan,
    make_texts,
    min_cosine,
    note,
    options,
    print_setting,
    print_table,
    ratios,
    turns,
)  # fmt: skip

from whimbrel.types.arrays import Float32Array
from whimbrel_bench.processes import Worker

Calls: TypeAlias = list[list[str]]
Timed: TypeAlias = tuple[float, Float32Array]

WORKLOADS: Final[dict[str, Calls]] = {
    "mixed, 4 to 200 words": [make_texts(256, words=MIXED)],
    "short, 4 to 24 words": [make_texts(1024, words=SHORT)],
    "requests of 8 mixed": chunks(make_texts(256, words=MIXED, seed=1), 8),
}
"""Lists of texts. Each list is the argument of one call, and calls run one after another."""


def make_engine(folder: str, dtype: str) -> Callable[[Calls], Timed]:
    from whimbrel import Engine

    return partial(time_calls, Engine(folder, dtype=dtype).embed)


def make_sentence_transformers(folder: str, dtype: str) -> Callable[[Calls], Timed]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(NUM_CORES)
    model: Any = SentenceTransformer(folder, model_kwargs={"dtype": dtype})
    return partial(time_calls, model.encode)


def time_calls(encode: Callable[[list[str]], Float32Array], calls: Calls) -> Timed:
    """Return the seconds for all calls, one after another, and their vectors."""
    started = perf_counter()
    vectors = [encode(texts) for texts in calls]
    return perf_counter() - started, np.concatenate(vectors)


def main() -> None:
    args = options(__doc__, rounds=7).parse_args()
    plan = default_plan(args.dtype)
    workers = [Worker(make, str(FOLDER), plan.dtype) for make in (make_engine, make_sentence_transformers)]
    rows: list[list[str]] = []
    for name, calls in WORKLOADS.items():
        note(name)
        cosine = min_cosine(*(worker.ask(calls)[1] for worker in workers))
        ours, theirs = turns(*(lambda each=each, calls=calls: each.ask(calls)[0] for each in workers), rounds=args.rounds)
        tokens = sum(map(count_tokens, calls))
        rates = [f"{tokens / median(each):,.0f}" for each in (ours, theirs)]
        rows.append([name, f"{tokens:,}", *rates, *ratios(ours, theirs), f"{cosine:.6f}"])
    head = ["workload", "tokens", "engine, tokens/s", "Sentence Transformers, tokens/s", "ratio", "fastest", "rounds"]
    print_table([*head, "smallest cosine"], rows)
    print_setting(plan, sentence_transformers=version("sentence-transformers"), rounds=args.rounds)


if __name__ == "__main__":
    main()
