"""MaxSim on a CPU: seconds against other implementations, types of stored vectors, memory, and reranking through the server.

    python benchmarks/maxsim.py [--threads 1,2] [--rounds 15] [--requests 128] [--full] [--device auto] [--quick]

1. Queries of 32 tokens, eight in a round, one after another, against 1,000 documents of 20 to 300 tokens each. The width is
   128, the type float32, and all contenders have the same number of threads. Contenders are Whimbrel; padded documents with
   torch.bmm, maximum and sum, for all documents at once (as PyLate and Sentence Transformers do) and for 64 at a time (as vLLM
   does); and PyLate's rank.rerank and maxsim-cpu if they are installed (`pip install maxsim-cpu`, `pip install pylate`; PyLate
   needs other versions of our dependencies). Times are of one query. "Peak" is the fastest torch.mm of float32, "reading" is
   one read of the documents' bytes.
2. The same documents in other stored types, Whimbrel only. Products are float32 for all types.
3. A scan of a float16 store: extra memory for a tenth of it and for all of it.
4. `reranking.py`: the workload of vLLM #35330 through the server, and reranks with cached documents.

Each number of threads has its own process, in which contenders take turns, A B A B, after a round that is not counted. Ratios
are those of the medians and of the fastest rounds. --quick runs everything at a small size; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from common import NUM_CORES, Worker, compare, note, print_setting, print_table
from reranking import rerank, warm
from torch import Tensor

from whimbrel.model.ops.maxsim import TokenVectors, maxsim
from whimbrel.types.arrays import Int64Array

WIDTH: Final = 128
QUERY_TOKENS: Final = 32
NUM_QUERIES: Final = 8
"""Queries in a round. The first calls after a pause are slow, until each thread runs on its own core."""
OURS: Final = "Whimbrel"
STORED: Final = ("float32", "float16", "bfloat16", "int8 and a factor for each row", "bits")
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
    """Seconds of each round for one query, and other cells of the tables."""

    contenders: Times
    stored: Times
    reading: list[float]
    peak: tuple[float, float]
    """FLOP/s of the fastest product, by its median and by its fastest round."""
    differences: dict[str, float]
    """Largest difference between a contender's scores and ours."""


def make_comparison(threads: int, num_documents: int) -> Callable[[int], Measurement]:
    """Measure the first two tables, with one number of threads."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # maxsim-cpu
    torch.set_num_threads(threads)
    offsets = offsets_of(num_documents, (20, 300))
    queries = [unit_vectors(QUERY_TOKENS, seed=seed) for seed in range(3, 3 + NUM_QUERIES)]
    rows = unit_vectors(int(offsets[-1]), seed=2)
    pool = ThreadPoolExecutor(threads, initializer=partial(torch.set_num_threads, 1))
    score = partial(ours, pool if threads > 1 else None, threads)
    documents = [rows[start:end] for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    contenders = {OURS: partial(score, TokenVectors.of(rows, offsets)), **others(documents)}
    stored = {name: partial(score, store(rows, offsets, name)) for name in STORED}
    products = [product(*shape) for shape in PEAKS]

    def all_of(named: Mapping[str, Scorer]) -> list[Callable[[], None]]:
        return [partial(one_after_another, each, queries) for each in named.values()]

    def run(rounds: int) -> Measurement:
        found = {name: np.array([each(query) for query in queries]) for name, each in contenders.items()}
        differences = {name: float(np.abs(scores - found[OURS]).max()) for name, scores in found.items()}
        seconds = compare(*all_of(contenders), rows.sum, *products, rounds=rounds, pause=PAUSE)
        times = dict(zip(contenders, map(for_one, seconds), strict=False))
        reading, *peaks = seconds[len(contenders) :]
        rates = [(flop / median(each), flop / min(each)) for (_, flop), each in zip(map(flops, PEAKS), peaks, strict=True)]
        by_type = dict(zip(stored, map(for_one, compare(*all_of(stored), rounds=rounds, pause=PAUSE)), strict=True))
        return Measurement(
            times, by_type, reading, (max(rate[0] for rate in rates), max(rate[1] for rate in rates)), differences
        )

    return run


def one_after_another(score: Scorer, queries: list[Tensor]) -> None:
    for query in queries:
        score(query)


def for_one(seconds: list[float]) -> list[float]:
    return [each / NUM_QUERIES for each in seconds]


def ours(pool: ThreadPoolExecutor | None, threads: int, documents: TokenVectors, query: Tensor) -> Any:
    pairs = np.zeros(len(documents), np.int64), np.arange(len(documents))
    return maxsim(TokenVectors.of(query, np.array([0, len(query)])), documents, *pairs, threads=pool, num_threads=threads)


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


def store(rows: Tensor, offsets: Int64Array, name: str) -> TokenVectors:
    """Return the vectors in a stored type."""
    if name.startswith("int8"):
        scales = rows.abs().amax(dim=1) / 127
        return TokenVectors.of((rows / scales[:, None]).round().to(torch.int8), offsets, scales)
    if name == "bits":
        return TokenVectors.of(torch.from_numpy(np.packbits(rows.numpy() > 0, axis=1)), offsets)
    return TokenVectors.of(rows.to(getattr(torch, name)), offsets)


# Memory


def make_scan(num_documents: int) -> Callable[[int], tuple[float, float, float]]:
    """Scan some of the documents. Return the seconds, MiB of their vectors, and MiB by which the process grew at most."""
    torch.set_num_threads(1)
    offsets = offsets_of(num_documents, (20, 40))
    rows, query = torch.empty(int(offsets[-1]), WIDTH, dtype=torch.float16), unit_vectors(QUERY_TOKENS, seed=1)
    for start in range(0, len(rows), 2**16):
        part = rows[start : start + 2**16]
        part[:] = unit_vectors(len(part), seed=start)
    documents = TokenVectors.of(rows, offsets)

    def run(count: int) -> tuple[float, float, float]:
        some = TokenVectors(rows, documents.starts_N[:count], documents.ends_N[:count])
        seconds: list[float] = []
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = resident("VmRSS")
        seconds = compare(partial(ours, None, 1, some, query), rounds=3)[0]
        return median(seconds), 2 * WIDTH * int(some.ends_N[-1]) / 2**20, resident("VmHWM") - before

    return run


def resident(name: str) -> float:
    """Return a line of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


# Tables


def report(threads: int, found: Measurement, num_documents: int) -> None:
    """Print the first two tables."""
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
    base, float32 = found.contenders[OURS], found.stored[STORED[0]]
    rows = [[*row(name, each, base), f"{found.differences[name]:.1e}"] for name, each in found.contenders.items()]
    print_table(["", *columns, "largest difference"], rows)
    print()
    print_table(["stored as", *columns], [row(name, each, float32) for name, each in found.stored.items()])


def scan(num_documents: int) -> None:
    """Print the third table."""
    worker = Worker(make_scan, num_documents)
    worker.ask(num_documents // 10)
    rows: list[list[object]] = []
    for count in (num_documents // 10, num_documents):
        seconds, size, growth = worker.ask(count)
        rows.append([f"{count:,}", f"{size:.0f}", f"{1e3 * seconds:.0f}", f"{size / 1024 / seconds:.1f}", f"{growth:.1f}"])
    print()
    print_table(["stored documents of 20 to 40 tokens, float16", "MiB", "ms", "GiB/s", "memory grew by at most, MiB"], rows)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default=f"1,{NUM_CORES}" if NUM_CORES > 1 else "1")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=128, help="through the server, to each route; 0: none")
    parser.add_argument("--full", action="store_true", help="the served model has jina-colbert-v2's full size")
    parser.add_argument("--device", default="auto", help="of the served model")
    parser.add_argument("--dtype", default="auto", help="of the served model")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    sizes: Mapping[str, int] = {"documents": 1000, "stored": 100_000}
    if args.quick:
        sizes, args.rounds, args.requests = {"documents": 50, "stored": 500}, 1, min(args.requests, 4)
    for threads in map(int, args.threads.split(",")):
        note(f"kernels, {threads} threads")
        report(threads, Worker(make_comparison, threads, sizes["documents"]).ask(args.rounds), sizes["documents"])
    note("memory")
    scan(sizes["stored"])
    if args.requests:
        rerank(args.requests, full=args.full, device=args.device, dtype=args.dtype, quick=args.quick)
        warm(args.rounds, full=args.full, device=args.device, dtype=args.dtype, quick=args.quick)
    print_setting(None, rounds=args.rounds)


if __name__ == "__main__":
    main()
