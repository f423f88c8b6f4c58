"""Engine on a GPU against Sentence Transformers on the same card: tokens per second, in turns, on random weights of real sizes.

    python benchmarks/gpu.py [--models minilm,bge-base,qwen3] [--tokens 32,128,512] [--rounds 5] [--small] [--profile]

Both compute in bfloat16, each in a process of its own, on the same texts of exactly that length. Sentence Transformers runs
with its default of 32 texts at a time and with 256, longest texts first, as it does. The engine gets all texts in one request,
and then the same texts in requests of 256 from eight threads. They take turns, after a round that is not counted. A ratio is
that of the medians, over the better of Sentence Transformers' two: above 1 the engine is faster. A second table has the time of
one text at a time. `--profile` adds the kernels that take the device longest. `--small` takes small models and few texts, to
try the program on a CPU.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import numpy as np
from common import chunks, min_cosine, note, options, print_table

from whimbrel_bench.processes import Worker
from whimbrel_bench.random_models import Size, write_bert, write_qwen3
from whimbrel_bench.words import CANDIDATES

SIZES: Final = {
    "minilm": Size(384, 1536, 6, 12),
    "bge-base": Size(768, 3072, 12, 12),
    "qwen3": Size(1024, 3072, 28, 16, 8, 128, vocabulary=151669),
}
_SMALL: Final = {"minilm": Size(64, 128, 2, 4), "bge-base": Size(128, 256, 2, 4), "qwen3": Size(64, 128, 2, 4, 2, 16)}
_BATCHES: Final = (32, 256)
"""Numbers of texts that Sentence Transformers runs at a time."""
_REQUEST: Final = 256
_THREADS: Final = 8


def make_engine(folder: str) -> Callable[[Any], Any]:
    """Load the Engine. It answers (what, texts)."""
    from whimbrel import Engine
    from whimbrel.types.request import Request

    engine = Engine(folder, dtype="bfloat16", max_queue_tokens=2**31)
    threads = ThreadPoolExecutor(_THREADS)

    def concurrent(texts: list[str]) -> Any:
        futures = list(threads.map(lambda part: engine.submit(Request(part)), chunks(texts, _REQUEST)))
        return np.concatenate([future.result().outputs.dense for future in futures])  # pyright: ignore

    def tokens(texts: list[str]) -> list[int]:
        return [seq.ids.size for seq in engine.preprocessor.preprocess(Request(texts)).seqs]

    calls: dict[str, Callable[[list[str]], Any]] = {
        "request": engine.embed,
        "concurrent": concurrent,
        "tokens": tokens,
        "alone": lambda texts: [engine.embed(text) for text in texts],
    }
    return lambda asked: _profile(engine.embed, asked[1]) if asked[0] == "profile" else _timed(calls[asked[0]], asked[1])


def make_sentence_transformers(folder: str) -> Callable[[Any], Any]:
    """Load Sentence Transformers. It answers (texts at a time, texts), and ("alone", texts)."""
    from sentence_transformers import SentenceTransformer

    model: Any = SentenceTransformer(folder, model_kwargs={"dtype": "bfloat16"})

    def encode(asked: Any) -> tuple[float, Any]:
        size, texts = asked
        if size == "alone":
            return _timed(lambda texts: [model.encode(text) for text in texts], texts)
        return _timed(lambda texts: model.encode(texts, batch_size=size), texts)

    return encode


def _timed(call: Callable[[list[str]], Any], texts: list[str]) -> tuple[float, Any]:
    started = perf_counter()
    result = call(texts)
    return perf_counter() - started, result


def _profile(call: Callable[[list[str]], Any], texts: list[str]) -> list[tuple[str, int, float]]:
    """Return name, number of launches and milliseconds of each kernel of a call, longest first."""
    from torch.profiler import DeviceType, ProfilerActivity, profile  # pyright: ignore

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:  # pyright: ignore
        call(texts)
    counts, times = Counter[str](), Counter[str]()
    for event in profiled.events() or ():  # pyright: ignore
        if event.device_type == DeviceType.CUDA:  # pyright: ignore
            counts[event.name] += 1  # pyright: ignore
            times[event.name] += event.time_range.elapsed_us()  # pyright: ignore
    return [(name, counts[name], elapsed / 1e3) for name, elapsed in times.most_common()]


def make_texts(engine: Worker, tokens: int, num_texts: int) -> list[str]:
    """Return texts of this many tokens; a tokenizer that knows no word without a space before it makes a few more."""
    special = engine.ask(("tokens", ["the"]))[1][0] - 1
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(CANDIDATES, max(1, tokens - special))) for _ in range(num_texts)]


def measure_alone(tokens: int, rounds: int, workers: tuple[Worker, Worker]) -> list[str]:
    """Return a row of the second table without the model's name."""
    texts = make_texts(workers[0], tokens, 64)
    asked = [[worker.ask(("alone", texts))[0] for worker in workers] for _ in range(rounds + 1)][1:]
    ours, theirs = (1e3 * median(each) / len(texts) for each in zip(*asked, strict=True))
    return [str(tokens), f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.2f}"]


def measure(tokens: int, num_texts: int, rounds: int, workers: tuple[Worker, Worker]) -> list[str]:
    """Return a row of the table without the model's name."""
    engine, peer = workers
    texts = make_texts(engine, tokens, num_texts)
    sizes = engine.ask(("tokens", texts))[1]
    contenders: list[tuple[Worker, str | int]] = [(engine, "request"), (engine, "concurrent"), *((peer, at) for at in _BATCHES)]
    vectors = [worker.ask((how, texts))[1] for worker, how in contenders]
    seconds = [[worker.ask((how, texts))[0] for worker, how in contenders] for _ in range(rounds)]
    rates = [sum(sizes) / median(each) for each in zip(*seconds, strict=True)]
    theirs = max(rates[2:])
    return [
        str(max(sizes)),
        f"{num_texts:,}",
        *(f"{rate:,.0f}" for rate in rates),
        f"{rates[0] / theirs:.2f}",
        f"{rates[1] / theirs:.2f}",
        f"{min(min_cosine(vectors[0], each) for each in vectors[1:]):.5f}",
    ]


def main() -> None:
    """Run the benchmark."""
    defaults = {"models": "minilm,bge-base,qwen3", "tokens": "32,128,512", "rounds": 5}
    args = options(__doc__, **defaults, small=False, profile=False).parse_args()
    rows: list[list[str]] = []
    alone: list[list[str]] = []
    header = ["model", "tokens of a text", "texts", "one request, tokens/s", "concurrent, tokens/s"]
    header += [*(f"Sentence Transformers, {size}" for size in _BATCHES), "ratio", "ratio, concurrent", "smallest cosine"]
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            size = (_SMALL if args.small else SIZES)[name]
            (write_qwen3 if name == "qwen3" else write_bert)(Path(folder), size)
            workers = Worker(make_engine, folder), Worker(make_sentence_transformers, folder)
            total = 2**10 if args.small else 2**17 if name == "qwen3" else 2**18
            for tokens in map(int, args.tokens.split(",")):
                rows.append([name, *measure(tokens, total // tokens, args.rounds, workers)])
                note(" | ".join(rows[-1]))
                alone.append([name, *measure_alone(tokens, args.rounds, workers)])
                note(" | ".join(alone[-1]))
            if args.profile:
                text = " ".join(CANDIDATES[:126])
                kernels = workers[0].ask(("profile", [text] * (total // 128)))
                note(f"{name}: {sum(each[1] for each in kernels)} launches, {sum(each[2] for each in kernels):.2f} ms")
                for kernel, count, elapsed in kernels[:20]:
                    note(f"  {elapsed:9.3f} ms {count:6} {kernel[:150]}")
    print_table(header, rows)
    print_table(["model", "tokens of the text", "engine, ms", "Sentence Transformers, ms", "ratio"], alone)
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"a CPU of {os.cpu_count()} cores"
    print(
        f"\n{device}, torch {torch.__version__}, sentence-transformers {version('sentence-transformers')}, rounds {args.rounds}"
    )


if __name__ == "__main__":
    main()
