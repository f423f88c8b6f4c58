"""MaxSim on a CPU: seconds against other implementations, and reranking with a cache of documents.

    python benchmarks/maxsim.py [--threads 1,2] [--rounds 15] [--full] [--device auto] [--quick]

1. Queries of 32 tokens, eight in a round, one after another, against 1,000 documents of 20 to 300 tokens each. The width is
   128, the type float32, and all contenders have the same number of threads. Contenders are Whimbrel, where each thread scores
   a part of the documents, as in an engine; padded documents with torch.bmm, maximum and sum, for all documents at once (as
   PyLate and Sentence Transformers do) and for 64 at a time (as vLLM does); and PyLate's rank.rerank and maxsim-cpu if they are
   installed (`pip install maxsim-cpu`, `pip install pylate`; PyLate needs other versions of our dependencies). Times are of one
   query. "Peak" is the fastest torch.mm of float32, "reading" is one read of the documents' bytes.
2. Reranks of 100 documents through the server, with a random model in ColBERT's layout: new documents and cached ones in turn.
   The workload of vLLM #35330 is `whimbrel bench serve --preset rerank`.

Each number of threads has its own process, in which contenders take turns, A B A B, after a round that is not counted. Ratios
are those of the medians and of the fastest rounds. --quick runs everything at a small size; its numbers mean nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from common import NUM_CORES, chunks, make_texts, note, options, print_setting, print_table, turns
from torch import Tensor

from whimbrel.model.ops.maxsim import TokenVectors, maxsim
from whimbrel.types.arrays import Int64Array
from whimbrel_bench.backends import Sample
from whimbrel_bench.processes import Worker
from whimbrel_bench.random_models import Size, write_colbert
from whimbrel_bench.server import serving
from whimbrel_bench.target import Load, Target, TargetOptions

WIDTH: Final = 128
QUERY_TOKENS: Final = 32
NUM_QUERIES: Final = 8
"""Queries in a round. The first calls after a pause are slow, until each thread runs on its own core."""
OURS: Final = "Whimbrel"
PAUSE: Final = 0.02
PEAKS: Final = ((1024, 1024, 1024), (2048, 2048, 2048), (1024, 128, 1024), (4096, 128, 128))

Times = dict[str, list[float]]
Scorer = Callable[[Tensor], Any]


def offsets_of(count: int, lengths: tuple[int, int]) -> Int64Array:
    """Return the offsets of documents of random lengths."""
    drawn = np.random.default_rng(0).integers(lengths[0], lengths[1] + 1, count)
    return np.concatenate(([0], np.cumsum(drawn)))


def unit_vectors(count: int, *, seed: int) -> Tensor:
    return F.normalize(torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)), dim=-1)


# In a process for each number of threads


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds of each round for one query, and other cells of the table."""

    contenders: Times
    reading: list[float]
    peak: tuple[float, float]
    """FLOP/s of the fastest product, by its median and by its fastest round."""
    differences: dict[str, float]
    """Largest difference between a contender's scores and ours."""


def make_comparison(threads: int, num_documents: int) -> Callable[[int], Measurement]:
    """Measure the first table, with one number of threads."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # maxsim-cpu
    torch.set_num_threads(threads)
    offsets = offsets_of(num_documents, (20, 300))
    queries = [unit_vectors(QUERY_TOKENS, seed=seed) for seed in range(3, 3 + NUM_QUERIES)]
    rows = unit_vectors(int(offsets[-1]), seed=2)
    pool = ThreadPoolExecutor(threads, initializer=partial(torch.set_num_threads, 1))
    score = partial(ours, pool if threads > 1 else None, threads)
    documents = [rows[start:end] for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    contenders = {OURS: partial(score, TokenVectors(rows, offsets[:-1], offsets[1:])), **others(documents)}
    products = [product(*shape) for shape in PEAKS]

    def all_of(named: Mapping[str, Scorer]) -> list[Callable[[], None]]:
        return [partial(one_after_another, each, queries) for each in named.values()]

    def run(rounds: int) -> Measurement:
        found = {name: np.array([each(query) for query in queries]) for name, each in contenders.items()}
        differences = {name: float(np.abs(scores - found[OURS]).max()) for name, scores in found.items()}
        seconds = turns(*all_of(contenders), rows.sum, *products, rounds=rounds, pause=PAUSE)
        times = dict(zip(contenders, map(for_one, seconds), strict=False))
        reading, *peaks = seconds[len(contenders) :]
        rates = [(flop / median(each), flop / min(each)) for (_, flop), each in zip(map(flops, PEAKS), peaks, strict=True)]
        return Measurement(times, reading, (max(rate[0] for rate in rates), max(rate[1] for rate in rates)), differences)

    return run


def one_after_another(score: Scorer, queries: list[Tensor]) -> None:
    for query in queries:
        score(query)


def for_one(seconds: list[float]) -> list[float]:
    return [each / NUM_QUERIES for each in seconds]


def ours(pool: ThreadPoolExecutor | None, threads: int, documents: TokenVectors, query: Tensor) -> Any:
    of_query = TokenVectors(query, np.array([0]), np.array([len(query)]))
    parts = np.array_split(np.arange(len(documents)), threads)
    run = map if pool is None else pool.map
    return np.concatenate(list(run(lambda part: maxsim(of_query, documents, np.zeros_like(part), part), parts)))


def others(documents: list[Tensor]) -> dict[str, Scorer]:
    """Return the implementations of installed peers."""
    found: dict[str, Scorer] = {
        "zeros and bmm, all at once": partial(padded, documents, len(documents)),
        "zeros and bmm, 64 at a time": partial(padded, documents, 64),
    }
    if module := optional("maxsim_cpu", "maxsim-cpu"):
        arrays = [document.numpy() for document in documents]
        found["maxsim-cpu"] = lambda query: module.maxsim_scores_variable(query.numpy(), arrays)
    if rank := optional("pylate.rank", "pylate"):
        numbers = [list(range(len(documents)))]

        def pylate(query: Tensor) -> list[float]:
            ranked = rank.rerank(numbers, [query], [documents])[0]
            return [row["score"] for row in sorted(ranked, key=lambda row: row["id"])]

        found["PyLate, rank.rerank"] = pylate
    return found


def optional(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        note(f"without {package}: {error}; pip install {package}")
        return None


def padded(documents: list[Tensor], size: int, query: Tensor) -> Tensor:
    scores: list[Tensor] = []
    for start in range(0, len(documents), size):
        rows = torch.nn.utils.rnn.pad_sequence(documents[start : start + size], batch_first=True)
        scores.append(torch.bmm(query.expand(len(rows), -1, -1), rows.mT).amax(dim=-1).sum(dim=-1))
    return torch.cat(scores)


def flops(shape: tuple[int, int, int]) -> tuple[int, int]:
    """Return how many products of a shape are timed at once, and their FLOP: at least 2 GFLOP."""
    once = 2 * prod(shape)
    times = max(1, 2**31 // once)
    return times, times * once


def product(m: int, k: int, n: int) -> Callable[[], None]:
    a, b, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
    times, _ = flops((m, k, n))

    def run() -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    return run


# Reranking


def warm(rounds: int, count: int, size: Size, *, device: str, dtype: str) -> None:
    """Print the table of reranks through the server with new documents, and with cached ones."""
    (query,), texts = make_texts(1, words=(29, 29)), make_texts(count * (rounds + 2), words=(80, 240), seed=1)
    lists = chunks(texts, count)
    seconds: dict[str, list[float]] = {"new": [], "kept": [], "the query alone": []}
    cache = ("--document-cache-bytes", "2000000000")
    with TemporaryDirectory() as name:
        write_colbert(Path(name), size, query_tokens=QUERY_TOKENS, document_tokens=512)
        note("a cache of documents")
        with serving(name, "--device", device, "--dtype", dtype, *cache) as server:
            target = Target(server.url, TargetOptions("rerank", extra_body={"return_documents": False}))
            target.connect()
            for documents in lists:
                for what, those in (("new", documents), ("kept", lists[0]), ("the query alone", [" "])):
                    result = target.run([Sample(tuple(those), query)], Load(concurrency=1, processes=1))
                    if result.failed:
                        raise SystemExit(result.errors[0])
                    seconds[what].append(float(result.latencies[0]))
    medians = {what: median(each[2:]) for what, each in seconds.items()}
    rows = [[what, f"{1e3 * each:.1f}", f"{medians['new'] / each:.1f}"] for what, each in medians.items()]
    print_table([f"{count} documents of 80 to 240 words", "ms", "new ones / these"], rows)


# Table


def report(threads: int, found: Measurement, num_documents: int) -> None:
    """Print the first table."""
    num_tokens = int(offsets_of(num_documents, (20, 300))[-1])
    flop = 2 * QUERY_TOKENS * WIDTH * num_tokens
    middle, fastest = found.peak

    def row(name: str, seconds: list[float], base: list[float]) -> list[str]:
        rate, best = flop / median(seconds), flop / min(seconds)
        numbers = f"{1e3 * median(seconds):.2f}", f"{1e3 * min(seconds):.2f}", f"{rate / 1e9:.1f}"
        ratios = median(seconds) / median(base), min(seconds) / min(base)
        return [name, *numbers, *(f"{x:.2f}" for x in (rate / middle, best / fastest, *ratios))]

    columns = ["ms", "fastest", "GFLOP/s", "of the peak", "of the fastest peak", "ratio of medians", "ratio of fastest"]
    title = f"{num_documents:,} documents, {num_tokens:,} tokens; threads: {threads}"
    reading = f"reading the documents takes {1e3 * median(found.reading):.2f} ms, fastest {1e3 * min(found.reading):.2f}"
    print(f"\n{title}; peak {middle / 1e9:.1f} GFLOP/s, fastest {fastest / 1e9:.1f}; {reading}\n")
    base = found.contenders[OURS]
    rows = [[*row(name, each, base), f"{found.differences[name]:.1e}"] for name, each in found.contenders.items()]
    print_table(["", *columns, "largest difference"], rows)


def main() -> None:
    """Run the benchmark."""
    threads = f"1,{NUM_CORES}" if NUM_CORES > 1 else "1"
    args = options(__doc__, threads=threads, rounds=15, full=False, device="auto", quick=False).parse_args()
    count, size = 100, Size(384, 1536, 6, 12)
    if args.full:
        size = Size(1024, 4096, 24, 16)
    documents = 1000
    if args.quick:
        documents, args.rounds, count, size = 50, 1, 10, Size(128, 512, 2, 2)
    for threads in map(int, args.threads.split(",")):
        note(f"kernels, {threads} threads")
        report(threads, Worker(make_comparison, threads, documents).ask(args.rounds), documents)
    warm(args.rounds, count, size, device=args.device, dtype=args.dtype)
    print_setting(None, rounds=args.rounds)


if __name__ == "__main__":
    main()
