"""MaxSim on a CPU against what others do, by type of the stored vectors, in memory; and reranking through the server.

    python benchmarks/maxsim.py [--threads 1,2] [--rounds 15] [--requests 128] [--full] [--device auto] [--quick]

1. One query of 32 tokens against 1,000 documents of 20 to 300 tokens, width 128, float32, all with the same number of threads:
   ours; zeros put after documents, then torch.bmm, the maximum and the sum, for all documents at once (as PyLate and Sentence
   Transformers do it) and for 64 at a time (as vLLM does it); PyLate's rank.rerank and maxsim-cpu where they can be imported
   (`pip install maxsim-cpu`, `pip install pylate`; the second asks for other versions of what we use). The peak is that of the
   fastest of some torch.mm of float32; reading is that of the documents' bytes, once.
2. The same documents stored as other types, ours only. Products are float32 for all.
3. A store of float16, scanned: how much memory that takes beside the store, for a tenth of it and for all of it.
4. benchmarks/reranking.py: the workload of vLLM #35330 through the server.

Each number of threads has a process of its own, in which contenders take turns, A B A B ..., after a round that is not counted.
Ratios are those of the medians and of the fastest rounds. --quick is small everywhere, to see that all runs; its numbers mean
nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from common import NUM_CORES, Worker, compare, note, print_setting, print_table
from reranking import rerank
from torch import Tensor

from whimbrel.ops.maxsim import TokenVectors, maxsim
from whimbrel.types import Int64Array

WIDTH: Final = 128
QUERY_TOKENS: Final = 32
OURS: Final = "Whimbrel"
STORED: Final = ("float32", "float16", "bfloat16", "int8 and a factor for each row", "bits")
PEAKS: Final = ((1024, 1024, 1024), (2048, 2048, 2048), (1024, 128, 1024), (4096, 128, 128))

Times = dict[str, list[float]]


def offsets_of(count: int, lengths: tuple[int, int]) -> Int64Array:
    """Where documents of random lengths begin and end."""
    drawn = np.random.default_rng(0).integers(lengths[0], lengths[1] + 1, count)
    return np.concatenate(([0], np.cumsum(drawn)))


def unit_vectors(count: int, *, seed: int) -> Tensor:
    return F.normalize(torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)), dim=-1)


# In a process for each number of threads


def make_comparison(threads: int, num_documents: int) -> Callable[[int], tuple[Times, Times, Times, dict[str, float]]]:
    """The first two tables' seconds, those of the peak, and the largest difference between a contender's scores and ours."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # maxsim-cpu
    torch.set_num_threads(threads)
    offsets = offsets_of(num_documents, (20, 300))
    query, rows = unit_vectors(QUERY_TOKENS, seed=1), unit_vectors(int(offsets[-1]), seed=2)
    pool = ThreadPoolExecutor(threads, initializer=partial(torch.set_num_threads, 1))
    score = partial(ours, query, pool if threads > 1 else None, threads)
    documents = [rows[start:end] for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    contenders = {OURS: partial(score, TokenVectors.of(rows, offsets)), **others(query, documents)}
    stored = {name: partial(score, store(rows, offsets, name)) for name in STORED}
    peaks = {str(shape): product(*shape) for shape in PEAKS}

    def run(rounds: int) -> tuple[Times, Times, Times, dict[str, float]]:
        expected = contenders[OURS]()
        wrong = {name: float(np.abs(np.asarray(contender()) - expected).max()) for name, contender in contenders.items()}
        first = compare(*contenders.values(), rows.sum, *peaks.values(), rounds=rounds)
        names = [*contenders, "reading", *peaks]
        times = dict(zip(names, first, strict=True))
        second = dict(zip(stored, compare(*stored.values(), rounds=rounds), strict=True))
        return {name: times[name] for name in (*contenders, "reading")}, second, {name: times[name] for name in peaks}, wrong

    return run


def ours(query: Tensor, pool: ThreadPoolExecutor | None, threads: int, documents: TokenVectors) -> Any:
    pairs = np.zeros(len(documents), np.int64), np.arange(len(documents))
    return maxsim(TokenVectors.of(query, np.array([0, len(query)])), documents, *pairs, threads=pool, num_threads=threads)


def others(query: Tensor, documents: list[Tensor]) -> dict[str, Callable[[], Any]]:
    """What the peers do, and those of them that are installed."""
    found: dict[str, Callable[[], Any]] = {
        "zeros and bmm, all at once": partial(padded, query, documents, len(documents)),
        "zeros and bmm, 64 at a time": partial(padded, query, documents, 64),
    }
    if module := optional("maxsim_cpu", "maxsim-cpu"):
        arrays = [document.numpy() for document in documents]
        found["maxsim-cpu"] = lambda: module.maxsim_scores_variable(query.numpy(), arrays)
    if rank := optional("pylate.rank", "pylate"):
        numbers = [list(range(len(documents)))]

        def pylate() -> list[float]:
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


def padded(query: Tensor, documents: list[Tensor], size: int) -> Tensor:
    scores: list[Tensor] = []
    for start in range(0, len(documents), size):
        rows = torch.nn.utils.rnn.pad_sequence(documents[start : start + size], batch_first=True)
        scores.append(torch.bmm(query.expand(len(rows), -1, -1), rows.mT).amax(dim=-1).sum(dim=-1))
    return torch.cat(scores)


def product(m: int, k: int, n: int) -> Callable[[], Tensor]:
    """At least 2 GFLOP of one shape."""
    a, b, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
    times = max(1, 2**30 // (m * k * n))

    def run() -> Tensor:
        for _ in range(times):
            torch.mm(a, b, out=out)
        return out

    return run


def store(rows: Tensor, offsets: Int64Array, name: str) -> TokenVectors:
    """The vectors as they would be kept."""
    if name.startswith("int8"):
        scales = rows.abs().amax(dim=1) / 127
        return TokenVectors.of((rows / scales[:, None]).round().to(torch.int8), offsets, scales)
    if name == "bits":
        return TokenVectors.of(torch.from_numpy(np.packbits(rows.numpy() > 0, axis=1)), offsets)
    return TokenVectors.of(rows.to(getattr(torch, name)), offsets)


# Memory


def make_scan(num_documents: int) -> Callable[[int], tuple[float, float, float]]:
    """Scan some of the documents: (seconds, MiB of their vectors, MiB that the process grew by at most meanwhile)."""
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
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
        before = resident("VmRSS")
        seconds = compare(partial(ours, query, None, 1, some), rounds=3)[0]
        return median(seconds), 2 * WIDTH * int(some.ends_N[-1]) / 2**20, resident("VmHWM") - before

    return run


def resident(name: str) -> float:
    """A line of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


# Tables


def report(threads: int, found: tuple[Times, Times, Times, dict[str, float]], num_documents: int) -> None:
    times, stored, peaks, wrong = found
    num_tokens = int(offsets_of(num_documents, (20, 300))[-1])
    flop = 2 * QUERY_TOKENS * WIDTH * num_tokens
    rates = {name: [2 * np.prod(shape) * max(1, 2**30 // np.prod(shape)) / seconds for seconds in peaks[name]]
             for name, shape in zip(peaks, PEAKS, strict=True)}  # fmt: skip
    peak = max(median(rate) for rate in rates.values()), max(max(rate) for rate in rates.values())
    base = times[OURS]

    def row(name: str, seconds: list[float], *more: object) -> list[object]:
        middle, fastest = median(seconds), min(seconds)
        shares = f"{flop / middle / peak[0]:.2f}", f"{flop / fastest / peak[1]:.2f}"
        return [name, f"{1e3 * middle:.2f}", f"{1e3 * fastest:.2f}", f"{flop / middle / 1e9:.1f}", *shares, *more]

    def ratios(seconds: list[float]) -> tuple[str, str]:
        return f"{median(seconds) / median(base):.2f}", f"{min(seconds) / min(base):.2f}"

    columns = ["ms", "fastest", "GFLOP/s", "of the peak", "of the fastest peak"]
    title = f"{num_documents:,} documents, {num_tokens:,} tokens; {threads} thread{'s' * (threads > 1)}"
    print(f"\n{title}; peak {peak[0] / 1e9:.1f} GFLOP/s, fastest {peak[1] / 1e9:.1f}\n")
    reading = times.pop("reading")
    rows = [row(name, seconds, *ratios(seconds), f"{wrong[name]:.1e}") for name, seconds in times.items()]
    rows.append(["reading the documents", f"{1e3 * median(reading):.2f}", f"{1e3 * min(reading):.2f}", *[""] * 6])
    print_table(["", *columns, "time over ours", "of the fastest", "largest difference"], rows)
    print()
    print_table(["stored as", *columns, "time over float32's", "of the fastest"], by_type(stored, row))


def by_type(stored: Times, row: Callable[..., list[object]]) -> list[list[object]]:
    first = stored[STORED[0]]
    return [
        row(name, seconds, f"{median(seconds) / median(first):.2f}", f"{min(seconds) / min(first):.2f}")
        for name, seconds in stored.items()
    ]


def scan(num_documents: int) -> None:
    """The third table."""
    worker = Worker(make_scan, num_documents)
    worker.ask(num_documents // 10)
    rows: list[list[object]] = []
    for count in (num_documents // 10, num_documents):
        seconds, size, growth = worker.ask(count)
        rows.append([f"{count:,}", f"{size:.0f}", f"{1e3 * seconds:.0f}", f"{size / 1024 / seconds:.1f}", f"{growth:.1f}"])
    print()
    print_table(["stored documents of 20 to 40 tokens, float16", "MiB", "ms", "GiB/s", "memory grew by at most, MiB"], rows)


def main() -> None:
    """Run it."""
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
    print_setting(None, rounds=args.rounds)


if __name__ == "__main__":
    main()
