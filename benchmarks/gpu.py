"""Engine on a GPU against Sentence Transformers on the same card: tokens per second, in turns, on random weights of real sizes.

    python benchmarks/gpu.py [--models minilm,bge-base,qwen3] [--tokens 32,128,512] [--rounds 5] [--quick]

Both compute in bfloat16, each in a process of its own, on the same texts of exactly that length. Sentence Transformers runs
with its default of 32 texts at a time and with 256, longest texts first, as it does. The engine gets all texts in one request,
and then the same texts in requests of 256 from eight threads. They take turns, after a round that is not counted. A ratio is
that of the medians, over the better of Sentence Transformers' two: above 1 the engine is faster. A second table has the time of
one text at a time. `--quick` takes small models and few texts, to try the program on a CPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from common import chunks, min_cosine, note, options, print_setting, print_table
from engine import Timed, time_calls

from whimbrel.types.arrays import Float32Array
from whimbrel_bench.datasets import DatasetOptions, make_samples
from whimbrel_bench.processes import Worker
from whimbrel_bench.random_models import Size, write_bert, write_qwen3
from whimbrel_bench.words import local_words

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
_ALONE: Final = 64
"""Texts that are sent one at a time."""


def make_engine(folder: str) -> Callable[[tuple[int, list[list[str]]]], Timed]:
    """Load the Engine. It answers (threads, calls)."""
    from whimbrel import Engine

    engine = Engine(folder, dtype="bfloat16", max_queue_tokens=2**31)
    pool = ThreadPoolExecutor(_THREADS)

    def concurrent(texts: list[str]) -> Float32Array:
        return np.concatenate(list(pool.map(engine.embed, chunks(texts, _REQUEST))))

    return lambda asked: time_calls(engine.embed if asked[0] == 1 else concurrent, asked[1])


def make_sentence_transformers(folder: str) -> Callable[[tuple[int, list[list[str]]]], Timed]:
    """Load Sentence Transformers. It answers (texts at a time, calls)."""
    from sentence_transformers import SentenceTransformer

    model: Any = SentenceTransformer(folder, model_kwargs={"dtype": "bfloat16"})
    return lambda asked: time_calls(partial(model.encode, batch_size=asked[0]), asked[1])


def in_turns(contenders: list[tuple[Worker, int]], calls: list[list[str]], rounds: int) -> tuple[list[float], float]:
    """Return the median seconds of each contender, and the smallest cosine of another's vectors with the first's."""
    found = [[worker.ask((how, calls)) for worker, how in contenders] for _ in range(rounds + 1)]
    vectors = [vectors for _, vectors in found[0]]
    medians = [median(seconds for seconds, _ in each) for each in zip(*found[1:], strict=True)]
    return medians, min(min_cosine(vectors[0], each) for each in vectors[1:])


def main() -> None:
    args = options(__doc__, models="minilm,bge-base,qwen3", tokens="32,128,512", rounds=5, quick=False).parse_args()
    together: list[list[str]] = []
    alone: list[list[str]] = []
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            (write_qwen3 if name == "qwen3" else write_bert)(Path(folder), (_SMALL if args.quick else SIZES)[name])
            engine, peer = Worker(make_engine, folder), Worker(make_sentence_transformers, folder)
            amount = 2**10 if args.quick else 2**17 if name == "qwen3" else 2**18
            for tokens in map(int, args.tokens.split(",")):
                dataset = DatasetOptions(num_prompts=max(amount // tokens, _ALONE), input_len=tokens)
                texts = [sample.texts[0] for sample in make_samples(dataset, local_words(folder))]
                contenders = [(engine, 1), (engine, _THREADS), *((peer, size) for size in _BATCHES)]
                seconds, cosine = in_turns(contenders, [texts], args.rounds)
                rates = [tokens * len(texts) / each for each in seconds]
                ratios = [f"{rate / max(rates[2:]):.2f}" for rate in rates[:2]]
                cells = [*(f"{rate:,.0f}" for rate in rates), *ratios, f"{cosine:.5f}"]
                together.append([name, str(tokens), f"{len(texts):,}", *cells])
                (ours, theirs), _ = in_turns([(engine, 1), (peer, 1)], chunks(texts[:_ALONE], 1), args.rounds)
                milliseconds = (f"{1e3 * each / _ALONE:.2f}" for each in (ours, theirs))
                alone.append([name, str(tokens), *milliseconds, f"{theirs / ours:.2f}"])
                note(f"{' | '.join(together[-1])}\n{' | '.join(alone[-1])}")
    header = ["model", "tokens of a text", "texts", "one request, tokens/s", "concurrent, tokens/s"]
    header += [*(f"Sentence Transformers, {size}" for size in _BATCHES), "ratio", "ratio, concurrent", "smallest cosine"]
    print_table(header, together)
    print_table(["model", "tokens of the text", "engine, ms", "Sentence Transformers, ms", "ratio"], alone)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    print_setting(None, device=device, sentence_transformers=version("sentence-transformers"), rounds=args.rounds)


if __name__ == "__main__":
    main()
