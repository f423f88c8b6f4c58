"""Reranking with DeBERTa: the engine against Sentence Transformers' CrossEncoder, on a random model of DeBERTa-v3-base's shape.

    python benchmarks/cross_encoder.py [--dtype float32|bfloat16] [--rounds 5]

The model is as large as mxbai-rerank-base-v1, except for its vocabulary: the packaged model's tokenizer, because lookups cost
next to nothing. Each contender has its own process and all cores, and they take turns. Beside the seconds, the ratio of
processor time is printed, which other work on the machine changes less. Scores are compared before.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any, Final, TypeAlias

import numpy as np
from common import FOLDER, NUM_CORES, default_plan, make_texts, note, options, print_setting, print_table

from whimbrel.types.arrays import Float32Array
from whimbrel_bench.processes import Worker

Pairs: TypeAlias = list[tuple[str, str]]
Timed: TypeAlias = tuple[float, float, Float32Array]
"""Seconds, seconds of processor time, and scores."""

VOCABULARY: Final = 30_522
WORKLOADS: Final = {
    "12 documents of 30 to 130 words": (12, (30, 130)),
    "48 documents of 3 to 15 words": (48, (3, 15)),
    "3 documents of 512 tokens with the query": (3, (600, 600)),
}
"""Number of documents, and the bounds of their words."""


def write_checkpoint(folder: Path) -> None:
    """Write a random model with the layers of DeBERTa-v3-base."""
    import torch
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    torch.manual_seed(0)
    config = DebertaV2Config(
        vocab_size=VOCABULARY, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        max_position_embeddings=512, type_vocab_size=0, relative_attention=True, position_buckets=256, share_att_key=True,
        norm_rel_ebd="layer_norm", pos_att_type="p2c|c2p", position_biased_input=False, num_labels=1,
    )  # fmt: skip
    model: Any = DebertaV2ForSequenceClassification(config)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, folder / name)


def make_pairs(count: int, words: tuple[int, int]) -> Pairs:
    (query,) = make_texts(1, words=(8, 8), seed=3)
    return [(query, document) for document in make_texts(count, words=words, seed=4)]


def make_engine(folder: str, dtype: str) -> Callable[[Pairs], Timed]:
    """Load the Engine."""
    from whimbrel import Engine

    engine = Engine(folder, dtype=dtype, max_length=512)
    return time_calls(lambda pairs: engine.classify(pairs, truncate=True).scores_NC[:, 0])


def make_cross_encoder(folder: str, dtype: str) -> Callable[[Pairs], Timed]:
    """Load Sentence Transformers."""
    import torch
    from sentence_transformers import CrossEncoder

    torch.set_num_threads(NUM_CORES)
    model: Any = CrossEncoder(folder, model_kwargs={"dtype": dtype}, max_length=512)
    return time_calls(model.predict)


def time_calls(score: Callable[[Pairs], Any]) -> Callable[[Pairs], Timed]:
    def run(pairs: Pairs) -> Timed:
        wall, processor = perf_counter(), process_time()
        scores = np.asarray(score(pairs), np.float32)
        return perf_counter() - wall, process_time() - processor, scores

    return run


def measure(engine: Worker, peer: Worker, pairs: Pairs, rounds: int) -> list[str]:
    """Return a row of the table without the workload's name."""
    difference = np.abs(engine.ask(pairs)[2] - peer.ask(pairs)[2]).max()
    turns = [(engine.ask(pairs)[:2], peer.ask(pairs)[:2]) for _ in range(rounds)]
    (ours, our_time), (theirs, their_time) = ([median(each[who][i] for each in turns) for i in (0, 1)] for who in (0, 1))
    return [f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.2f}", f"{their_time / our_time:.2f}", f"{difference:.1g}"]


def main() -> None:
    """Run the benchmark."""
    args = options(__doc__, dtype="float32", rounds=5).parse_args()
    with TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        engine, peer = Worker(make_engine, folder, args.dtype), Worker(make_cross_encoder, folder, args.dtype)
        rows: list[list[str]] = []
        for name, shape in WORKLOADS.items():
            note(name)
            rows.append([name, *measure(engine, peer, make_pairs(*shape), args.rounds)])
    header = ["workload", "engine, s", "CrossEncoder, s", "ratio", "of processor time", "largest difference"]
    print_table(header, rows)
    print_setting(default_plan(args.dtype), sentence_transformers=version("sentence-transformers"), rounds=args.rounds)


if __name__ == "__main__":
    main()
