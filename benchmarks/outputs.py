"""Several outputs of one model: mixed batches, and three outputs from one pass.

    python benchmarks/outputs.py [--layers 12] [--width 768] [--dtype auto] [--device auto] [--rounds 15] [--quick]

The model is random, in the layout of BAAI/bge-m3: an XLM-RoBERTa with sparse_linear.pt and colbert_linear.pt. The base size is
12 layers of 768 columns; BGE-M3 itself has 24 of 1024. Speed does not depend on the values of the weights. The vocabulary is
smaller, because lookups cost next to nothing. Contenders take turns, A B A B, after a round that is not counted. A ratio is
that of the medians. "Rounds" are the smallest and the largest ratio of one round.

1. A mixed batch, in which texts request one of three outputs each at four widths, against uniform batches, in which all
   request the same output at full width. The ratio is the mixed seconds over the mean of the three uniform batches.
2. Three outputs of each text from one request, against three requests one after another.

--quick is a small model and few rounds, to test that everything runs; its numbers mean nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import torch
from common import MIXED, make_texts, note, options, print_setting, print_table, ratios, turns

from whimbrel import Engine
from whimbrel.types.card import OutputName
from whimbrel.types.request import Request
from whimbrel_bench.random_models import Size, write_bert

ALL: Final[tuple[OutputName, ...]] = ("dense", "sparse", "multi_vector")


def write_checkpoint(folder: Path, *, layers: int, width: int) -> None:
    """Write a random BERT as an XLM-RoBERTa, with BGE-M3's heads."""
    write_bert(folder, Size(width, 4 * width, layers, width // 64), mode="cls_token")
    config = json.loads((folder / "config.json").read_text())
    changed = {"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "type_vocab_size": 2, "pad_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config | changed))
    for name, rows in (("sparse_linear", 1), ("colbert_linear", width)):
        tensors = {"weight": torch.randn(rows, width) / width**0.5, "bias": torch.zeros(rows)}
        torch.save(tensors, folder / f"{name}.pt")


def together(engine: Engine, requests: Sequence[Request]) -> Callable[[], None]:
    """Return a function that runs the requests at once."""

    def run() -> None:
        for future in [engine.submit(request) for request in requests]:
            future.result()

    return run


def row(name: str, first: Sequence[float], second: Sequence[float]) -> list[str]:
    ratio, _, between = ratios(first, second)
    return [name, f"{1000 * median(first):.2f}", f"{1000 * median(second):.2f}", ratio, between]


def measure(engine: Engine, texts: list[np.ndarray], rounds: int) -> list[list[str]]:
    """Return the rows of both comparisons."""
    full, amount = engine.card.encoder.hidden_size, f"{len(texts)} texts"
    widths = (None, full // 2, full // 4, full // 8)
    kinds = [
        Request([text], (ALL[i % 3],), dimensions=None if ALL[i % 3] == "sparse" else widths[i // 3 % 4])
        for i, text in enumerate(texts)
    ]
    uniform = [[Request([text], (name,)) for text in texts] for name in ALL]
    mixed, *others = turns(*(together(engine, requests) for requests in (kinds, *uniform)), rounds=rounds)
    found = [row(f"{amount}: all {name}, mixed", one, mixed) for name, one in zip(ALL, others, strict=True)]
    mean = [sum(seconds) / len(ALL) for seconds in zip(*others, strict=True)]
    one_pass, passes = Request(texts, ALL), [Request(texts, (name,)) for name in ALL]
    seconds = turns(lambda: engine.run(one_pass), lambda: [engine.run(each) for each in passes], rounds=rounds)
    return [
        *found,
        row(f"{amount}: mean of these, mixed", mean, mixed),
        row(f"{amount}, three outputs: one pass, three passes", *seconds),
    ]


def main() -> None:
    args = options(__doc__, layers=12, width=768, device="auto", texts=64, rounds=15, quick=False).parse_args()
    if args.quick:
        args.layers, args.width, args.texts, args.rounds = 2, 128, 16, 2
    with TemporaryDirectory() as name:
        write_checkpoint(Path(name), layers=args.layers, width=args.width)
        note("loading")
        with Engine(name, device=args.device, dtype=args.dtype, matryoshka=True) as engine:
            request = Request(make_texts(args.texts, words=MIXED))
            texts = [seq.ids.astype(np.int64) for seq in engine.preprocessor.preprocess(request).seqs]
            rows = measure(engine, texts, args.rounds)
            print_table(["what: first, second", "first, ms", "second, ms", "second / first", "rounds"], rows)
            print_setting(engine.plan, layers=args.layers, width=args.width, rounds=args.rounds)


if __name__ == "__main__":
    main()
