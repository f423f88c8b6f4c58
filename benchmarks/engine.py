"""Engine against Sentence Transformers: tokens per second for the same texts, in the same dtype.

    python benchmarks/engine.py [--dtype auto|bfloat16|float32] [--rounds 7]
    python benchmarks/engine.py --models minilm,bge-base,qwen3 [--tokens 32,128,512] [--quick]

The first command runs the packaged all-MiniLM-L6-v2 on texts of mixed lengths. The second is for a GPU: random weights of real
sizes, on texts of one length in a single call, and one text at a time. There the engine also gets the texts in requests
of 256 from eight threads, beside Sentence Transformers with 256 texts at a time in place of 32, its default. `--quick` takes
small models and few texts, to try it on a CPU.

Each contender has its own process, because the engine sets torch's intra-op threads to one. Sentence Transformers has a thread
per core, and sorts texts by length as it does. They are compared as by `whimbrel bench compare`: vectors first, then rounds in
turns. The ratio is the median of Sentence Transformers' seconds over that of the engine: above 1 the engine is faster.
"""

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from common import FOLDER, NUM_CORES, chunks, count_tokens, default_plan, make_texts, note, options, print_setting, print_table

from whimbrel.types.arrays import Float32Array
from whimbrel_bench.compare import Contender, compare
from whimbrel_bench.datasets import DatasetOptions, make_samples
from whimbrel_bench.processes import Worker
from whimbrel_bench.random_models import Size, write_bert, write_qwen3
from whimbrel_bench.words import local_words

Calls: TypeAlias = list[list[str]]
"""Lists of texts. Each list is the argument of one call, and calls run one after another."""

SIZES: Final = {
    "minilm": Size(384, 1536, 6, 12),
    "bge-base": Size(768, 3072, 12, 12),
    "qwen3": Size(1024, 3072, 28, 16, 8, 128, vocabulary=151669),
}
_SMALL: Final = {"minilm": Size(64, 128, 2, 4), "bge-base": Size(128, 256, 2, 4), "qwen3": Size(64, 128, 2, 4, 2, 16)}
_PACKAGED: Final = "packaged"
_REQUEST: Final = 256
_THREADS: Final = 8
_ALONE: Final = 64
"""Texts that are sent one at a time."""
_LEAST_COSINE: Final = 0.98


class Workload(NamedTuple):
    """Calls of every contender."""

    name: str
    calls: Calls
    tokens: int


def make_engine(folder: str, dtype: str) -> Callable[[tuple[int, Calls]], tuple[float, Float32Array]]:
    """Load the Engine. It answers (threads, calls)."""
    from whimbrel import Engine

    engine = Engine(folder, dtype=dtype, max_queue_tokens=2**31)
    pool = ThreadPoolExecutor(_THREADS)

    def concurrent(texts: list[str]) -> Float32Array:
        return np.concatenate(list(pool.map(engine.embed, chunks(texts, _REQUEST))))

    return lambda asked: time_calls(engine.embed if asked[0] == 1 else concurrent, asked[1])


def make_sentence_transformers(folder: str, dtype: str) -> Callable[[tuple[int, Calls]], tuple[float, Float32Array]]:
    """Load Sentence Transformers. It answers (texts at a time, calls)."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(NUM_CORES)
    model: Any = SentenceTransformer(folder, model_kwargs={"dtype": dtype})
    return lambda asked: time_calls(partial(model.encode, batch_size=asked[0]), asked[1])


def time_calls(encode: Callable[[list[str]], Float32Array], calls: Calls) -> tuple[float, Float32Array]:
    """Return the seconds for all calls, one after another, and their vectors."""
    started = perf_counter()
    vectors = [encode(texts) for texts in calls]
    return perf_counter() - started, np.concatenate(vectors)


def packaged_workloads() -> list[Workload]:
    """Return the workloads of the packaged model."""
    found = {
        "mixed, 4 to 200 words": [make_texts(256)],
        "short, 4 to 24 words": [make_texts(1024, words=(4, 24))],
        "requests of 8 mixed": chunks(make_texts(256, seed=1), 8),
    }
    return [Workload(name, calls, sum(map(count_tokens, calls))) for name, calls in found.items()]


def sized_workloads(model: str, folder: str, tokens: int, amount: int) -> list[Workload]:
    """Return the workloads of texts with a number of tokens, which come to `amount` tokens or more."""
    dataset = DatasetOptions(num_prompts=max(amount // tokens, _ALONE), input_len=tokens)
    texts = [sample.texts[0] for sample in make_samples(dataset, local_words(folder))]
    alone = chunks(texts[:_ALONE], 1)
    return [
        Workload(f"{model}, {len(texts):,} texts of {tokens} tokens", [texts], tokens * len(texts)),
        Workload(f"{model}, one text of {tokens} tokens at a time", alone, tokens * _ALONE),
    ]


def contender(name: str, worker: Worker, how: int, calls: Calls) -> Contender:
    """Return a library with a workload; `how` is the engine's threads, or the texts that the peer takes at a time."""
    return Contender(name, lambda: list(worker.ask((how, calls))[1]), lambda: worker.ask((how, calls))[0])


def measure(workload: Workload, engine: Worker, peer: Worker, threads: int, size: int, rounds: int) -> list[str]:
    """Return a row of the table."""
    name = workload.name if threads == 1 else f"{workload.name}, {threads} threads; {size} at a time"
    note(name)
    theirs = contender("Sentence Transformers", peer, size, workload.calls)
    ours = contender("the engine", engine, threads, workload.calls)
    found = compare(theirs, ours, rounds=rounds, threshold=_LEAST_COSINE, on_round=lambda number: note(f"round {number}"))
    speeds = [f"{workload.tokens / median(each):,.0f}" for each in reversed(found.rounds)]
    ratio, between = f"{found.ratio.value:.2f}", f"{found.ratio.low:.2f} to {found.ratio.high:.2f}"
    return [name, f"{workload.tokens:,}", *speeds, ratio, between, f"{found.min_cosine:.6f}"]


def prepare(model: str, folder: Path, lengths: list[int], *, quick: bool) -> tuple[str, list[Workload]]:
    """Return the folder of a model, which is written if it is random, and its workloads."""
    if model == _PACKAGED:
        return str(FOLDER), packaged_workloads()
    (write_qwen3 if model == "qwen3" else write_bert)(folder, (_SMALL if quick else SIZES)[model])
    amount = 2**10 if quick else 2**17 if model == "qwen3" else 2**18
    return str(folder), [each for length in lengths for each in sized_workloads(model, str(folder), length, amount)]


def main() -> None:
    args = options(__doc__, rounds=7, models=_PACKAGED, tokens="32,128,512", quick=False).parse_args()
    plan, lengths = default_plan(args.dtype), list(map(int, args.tokens.split(",")))
    ways = [(1, 32)] if args.models == _PACKAGED else [(1, 32), (_THREADS, 256)]
    rows: list[list[str]] = []
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as temporary:
            folder, workloads = prepare(name, Path(temporary), lengths, quick=args.quick)
            engine, peer = Worker(make_engine, folder, plan.dtype), Worker(make_sentence_transformers, folder, plan.dtype)
            rows += [measure(each, engine, peer, *way, args.rounds) for each in workloads for way in ways]
    header = ["workload", "tokens", "engine, tokens/s", "Sentence Transformers, tokens/s"]
    print_table([*header, "ratio", "95 % interval", "smallest cosine"], rows)
    print_setting(plan, sentence_transformers=version("sentence-transformers"), rounds=args.rounds)


if __name__ == "__main__":
    main()
