"""MaxSim on a CPU: seconds against other implementations, and reranking with a cache of documents.

    python benchmarks/maxsim.py [--threads 1,2] [--rounds 15] [--quick]

1. Queries of 32 tokens, eight in a round, one after another, against 1,000 documents of 20 to 300 tokens each. The width is
   128, the type float32, and all contenders have the same number of threads. Contenders are Whimbrel; padded documents with
   torch.bmm, maximum and sum, for all documents at once (as PyLate and Sentence Transformers do) and for 64 at a time (as vLLM
   does); and PyLate's rank.rerank and maxsim-cpu if they are installed (`pip install maxsim-cpu`, `pip install pylate`; PyLate
   needs other versions of our dependencies). Times are of one query. "Peak" is the fastest torch.mm of float32.
2. Reranks of 100 documents through the server, with a random model in ColBERT's layout: new documents and cached ones in turn.
   The workload of vLLM #35330 is `whimbrel bench serve --preset rerank`.

Each number of threads has its own process, in which contenders take turns, A B A B, after a round that is not counted. Ratios
are those of the medians and of the fastest rounds. --quick runs everything at a small size; its numbers mean nothing.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from common import NUM_CORES, chunks, make_texts, note, options, print_setting, print_table, turns
from torch import Tensor

from whimbrel.model.ops.maxsim import TokenVectors, maxsim
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
PRODUCT: Final = 2**31
"""FLOP of the products of a shape that are timed at once."""

Scorer = Callable[[Tensor], Any]


class Measurement(NamedTuple):
    """Seconds of one query in each round, and the largest difference to our scores, by contender."""

    seconds: dict[str, list[float]]
    differences: dict[str, float]
    num_tokens: int
    peak: float
    """FLOP/s of the fastest product."""


def make_comparison(threads: int, num_documents: int) -> Callable[[int], Measurement]:
    """Return the measurement of the first table, with one number of threads."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # maxsim-cpu
    torch.set_num_threads(threads)
    lengths = np.random.default_rng(0).integers(20, 301, num_documents)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    queries = [unit_vectors(QUERY_TOKENS, seed=seed) for seed in range(3, 3 + NUM_QUERIES)]
    rows = unit_vectors(int(offsets[-1]), seed=2)
    pool = ThreadPoolExecutor(threads, initializer=partial(torch.set_num_threads, 1))
    score = partial(ours, pool if threads > 1 else None, threads, TokenVectors(rows, offsets[:-1], offsets[1:]))
    contenders: dict[str, Scorer] = {OURS: score, **others(list(rows.split(lengths.tolist())))}
    products = [product(*shape) for shape in PEAKS]

    def one_after_another(score: Scorer) -> Callable[[], object]:
        return lambda: [score(query) for query in queries]

    def run(rounds: int) -> Measurement:
        scores = {name: np.array([each(query) for query in queries]) for name, each in contenders.items()}
        differences = {name: float(np.abs(each - scores[OURS]).max()) for name, each in scores.items()}
        found = turns(*map(one_after_another, contenders.values()), *products, rounds=rounds, pause=PAUSE)
        seconds = {name: [one / NUM_QUERIES for one in each] for name, each in zip(contenders, found, strict=False)}
        peak = PRODUCT / min(median(each) for each in found[len(contenders) :])
        return Measurement(seconds, differences, len(rows), peak)

    return run


def unit_vectors(count: int, *, seed: int) -> Tensor:
    return F.normalize(torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)), dim=-1)


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
    for part in chunks(documents, size):
        rows = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
        scores.append(torch.bmm(query.expand(len(rows), -1, -1), rows.mT).amax(dim=-1).sum(dim=-1))
    return torch.cat(scores)


def product(m: int, k: int, n: int) -> Callable[[], None]:
    """Return a function that multiplies matrices as often as takes PRODUCT."""
    a, b, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)

    def run() -> None:
        for _ in range(PRODUCT // (2 * prod((m, k, n)))):
            torch.mm(a, b, out=out)

    return run


def report(threads: int, found: Measurement) -> None:
    base, flop = found.seconds[OURS], 2 * QUERY_TOKENS * WIDTH * found.num_tokens
    rows: list[list[str]] = []
    for name, each in found.seconds.items():
        share, ratio, fastest = flop / median(each) / found.peak, median(each) / median(base), min(each) / min(base)
        numbers = (f"{number:.2f}" for number in (1e3 * median(each), share, ratio, fastest))
        rows.append([name, *numbers, f"{found.differences[name]:.1e}"])
    print(f"\n{found.num_tokens:,} tokens of documents; threads: {threads}; peak {found.peak / 1e9:.1f} GFLOP/s")
    print_table(["", "ms", "of the peak", "ratio of medians", "ratio of fastest", "largest difference"], rows)


def rerank(rounds: int, count: int, size: Size, dtype: str) -> None:
    """Print the table of reranks through the server with new documents, and with cached ones."""
    (query,), texts = make_texts(1, words=(29, 29)), make_texts(count * (rounds + 2), words=(80, 240), seed=1)
    lists = chunks(texts, count)
    seconds: dict[str, list[float]] = {"new": [], "kept": [], "the query alone": []}
    with TemporaryDirectory() as name:
        write_colbert(Path(name), size, query_tokens=QUERY_TOKENS, document_tokens=512)
        note("a cache of documents")
        with serving(name, "--dtype", dtype, "--document-cache-bytes", "2000000000") as server:
            target = Target(server.url, TargetOptions("rerank", extra_body={"return_documents": False}))
            target.connect()
            for documents in lists:
                for what, those in (("new", documents), ("kept", lists[0]), ("the query alone", [" "])):
                    result = target.run([Sample(tuple(those), query)], Load(concurrency=1, processes=1))
                    seconds[what].append(float(result.all_answered().latencies[0]))
    medians = {what: median(each[2:]) for what, each in seconds.items()}
    rows = [[what, f"{1e3 * each:.1f}", f"{medians['new'] / each:.1f}"] for what, each in medians.items()]
    print_table([f"{count} documents of 80 to 240 words", "ms", "new ones / these"], rows)


def main() -> None:
    args = options(__doc__, threads=f"1,{NUM_CORES}" if NUM_CORES > 1 else "1", rounds=15, quick=False).parse_args()
    documents, count, size = 1000, 100, Size(384, 1536, 6, 12)
    if args.quick:
        documents, args.rounds, count, size = 50, 1, 10, Size(128, 512, 2, 2)
    for threads in map(int, args.threads.split(",")):
        note(f"kernels, {threads} threads")
        report(threads, Worker(make_comparison, threads, documents).ask(args.rounds))
    rerank(args.rounds, count, size, args.dtype)
    print_setting(None, rounds=args.rounds)


if __name__ == "__main__":
    main()
