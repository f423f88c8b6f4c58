"""Several outputs of one model: one projection for a ragged batch, mixed batches, and three outputs from one pass.

    python benchmarks/outputs.py [--layers 12] [--width 768] [--dtype auto] [--device auto] [--rounds 15] [--quick]

The model is random, in the layout of BAAI/bge-m3: an XLM-RoBERTa with sparse_linear.pt and colbert_linear.pt. The base size is
12 layers of 768 columns; BGE-M3 itself has 24 of 1024. Speed does not depend on the values of the weights. The vocabulary is
smaller, because lookups cost next to nothing. Contenders take turns, A B A B, after a round that is not counted. A ratio is
that of the medians. "Rounds" are the smallest and the largest ratio of one round.

1. Token vectors of 16 texts of 8 to 192 sentences: projection, truncation and norm once for the ragged batch, against the same
   functions for one text at a time. The layers before are the same for both and not timed.
2. A mixed batch, in which texts request one of three outputs each at four widths, against uniform batches, in which all
   request the same output at full width. The ratio is the mixed seconds over the mean of the three uniform batches.
3. Three outputs of each text from one request, against three requests one after another.

--quick is a small model and few rounds, to test that everything runs; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from common import FOLDER, MIXED, compare, make_texts, note, print_setting, print_table
from safetensors.torch import save_file

from whimbrel import Engine
from whimbrel.checkpoint.locate import Checkpoint
from whimbrel.model.pooling import DeviceRowSelection
from whimbrel.model.runner import Runner
from whimbrel.outputs.layout import plan_layout
from whimbrel.outputs.requested import OutputSpec
from whimbrel.outputs.rows import select_rows
from whimbrel.types.arrays import Int64Array
from whimbrel.types.batch import pack
from whimbrel.types.card import Card
from whimbrel.types.request import OutputName, Request
from whimbrel.types.seq import Seq

VOCABULARY: Final = 30_522
ALL: Final[tuple[OutputName, ...]] = ("dense", "sparse", "multi_vector")
SENTENCES: Final = (8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192)
SENTENCE: Final = "retrieval benchmark sentence "


def write_checkpoint(folder: Path, *, layers: int, width: int) -> None:
    """Write a random model with the files of BAAI/bge-m3, and the packaged model's tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, folder / name)
    config = {
        "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "vocab_size": VOCABULARY, "hidden_size": width,
        "num_hidden_layers": layers, "num_attention_heads": width // 64, "intermediate_size": 4 * width, "hidden_act": "gelu",
        "max_position_embeddings": 1026, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5,
    }  # fmt: skip
    st = "sentence_transformers.models."
    kinds = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    modules = [{"idx": i, "name": str(i), "path": path, "type": st + kind} for i, (kind, path) in enumerate(kinds)]
    files: dict[str, Any] = {
        "config.json": config,
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": width, "pooling_mode_cls_token": True},
        "sentence_bert_config.json": {"max_seq_length": 1024, "do_lower_case": False},
    }
    for name, value in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    (folder / "2_Normalize").mkdir()
    save_file(_tensors(layers, width), folder / "model.safetensors")
    for name, rows in (("sparse", 1), ("colbert", width)):
        torch.save({"weight": torch.randn(rows, width), "bias": torch.randn(rows)}, folder / f"{name}_linear.pt")


def _tensors(layers: int, width: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        found[f"{name}.weight"] = torch.randn(rows, columns, dtype=torch.bfloat16) / columns**0.5
        found[f"{name}.bias"] = torch.zeros(rows)

    def norm(name: str) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = torch.ones(width), torch.zeros(width)

    for table, rows in (("word", VOCABULARY), ("position", 1026), ("token_type", 1)):
        found[f"embeddings.{table}_embeddings.weight"] = torch.randn(rows, width, dtype=torch.bfloat16)
    norm("embeddings.LayerNorm")
    for at in (f"encoder.layer.{i}." for i in range(layers)):
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{at}attention.{part}", width, width)
        linear(f"{at}intermediate.dense", 4 * width, width)
        linear(f"{at}output.dense", width, 4 * width)
        norm(f"{at}attention.output.LayerNorm")
        norm(f"{at}output.LayerNorm")
    return found


def row(name: str, fast: Sequence[float], slow: Sequence[float]) -> list[str]:
    """Return a row of the table: slow over fast."""
    ratios = [b / a for a, b in zip(fast, slow, strict=True)]
    return [
        name,
        f"{1000 * median(fast):.2f}",
        f"{1000 * median(slow):.2f}",
        f"{median(slow) / median(fast):.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
    ]


def projector(engine: Engine, card: Card, rounds: int) -> list[str]:
    """Run the first comparison."""
    runner = Runner(Checkpoint(engine.folder, card.name), card, engine.plan)
    runner.init_thread()
    texts = [SENTENCE * number for number in SENTENCES]
    seqs = [Seq(ids, i) for i, ids in enumerate(ids_of(engine, texts))]
    batch = pack(seqs)
    lengths = np.diff(batch.cu_seqlens)
    ask = OutputSpec("multi_vector", card.outputs["multi_vector"].width // 2, True)
    hidden_TD = torch.randn(batch.num_tokens, card.encoder.hidden_size, device=engine.plan.device)

    def rows(part: Sequence[Seq]) -> DeviceRowSelection:
        packed = pack(part)
        return runner._rows(select_rows(card, packed, [plan_layout(card, part, [ask])] * len(part))["multi_vector"])

    together = rows(seqs)
    alone = [rows([seqs[i]]) for i in batch.order_B.tolist()]
    pieces_LD = hidden_TD.split(lengths.tolist())

    def wait(result: Any) -> Any:
        if hidden_TD.is_cuda:
            torch.cuda.synchronize()
        return result

    @torch.inference_mode()
    def ragged() -> torch.Tensor:
        return wait(runner._poolings[0]["multi_vector"](hidden_TD, together))

    @torch.inference_mode()
    def loop() -> list[torch.Tensor]:
        each = zip(pieces_LD, alone, strict=True)
        return wait([runner._poolings[0]["multi_vector"](piece, one) for piece, one in each])

    assert torch.equal(ragged(), torch.cat(loop())) or hidden_TD.is_cuda
    name = f"token vectors of 16 texts, {batch.num_tokens:,} tokens: once, text by text"
    return row(name, *compare(ragged, loop, rounds=rounds))


def ids_of(engine: Engine, texts: Sequence[str]) -> list[Any]:
    """Return the token ids of texts."""
    return [seq.ids for seq in engine.preprocessor.preprocess(Request(texts)).seqs]


def mixed(engine: Engine, card: Card, texts: list[Int64Array], rounds: int) -> list[list[str]]:
    """Run the second comparison."""
    full = card.encoder.hidden_size
    widths = (None, full // 2, full // 4, full // 8)

    def run(requests: Sequence[Request]) -> None:
        for future in [engine.submit(request) for request in requests]:
            future.result()

    def uniform(name: OutputName) -> Callable[[], None]:
        requests = [Request([text], (name,)) for text in texts]
        return lambda: run(requests)

    kinds = [
        Request([text], (ALL[i % 3],), dimensions=None if ALL[i % 3] == "sparse" else widths[i // 3 % 4])
        for i, text in enumerate(texts)
    ]
    ours, *theirs = compare(lambda: run(kinds), *(uniform(name) for name in ALL), rounds=rounds)
    mean = [sum(seconds) / len(ALL) for seconds in zip(*theirs, strict=True)]
    found = [row(f"{len(texts)} texts: all {name}, mixed", one, ours) for name, one in zip(ALL, theirs, strict=True)]
    return [*found, row(f"{len(texts)} texts: mean of these, mixed", mean, ours)]


def three(engine: Engine, texts: list[Int64Array], rounds: int) -> list[str]:
    """Run the third comparison."""

    def passes() -> None:
        for name in ALL:
            engine.run(Request(texts, (name,)))

    seconds = compare(lambda: engine.run(Request(texts, ALL)), passes, rounds=rounds)
    return row(f"{len(texts)} texts, three outputs: one pass, three passes", *seconds)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.layers, args.width, args.texts, args.rounds = 2, 128, 16, 2
    with TemporaryDirectory() as name:
        write_checkpoint(Path(name), layers=args.layers, width=args.width)
        note("loading")
        with Engine(name, device=args.device, dtype=args.dtype, matryoshka=True) as engine:
            texts = [ids.astype(np.int64) for ids in ids_of(engine, make_texts(args.texts, words=MIXED))]
            note("one projection")
            rows = [projector(engine, engine.card, args.rounds)]
            note("mixed batches")
            rows += mixed(engine, engine.card, texts, args.rounds)
            note("one pass")
            rows += [three(engine, texts, args.rounds)]
            print_table(["what: first, second", "first, ms", "second, ms", "second / first", "rounds"], rows)
            print_setting(engine.plan, layers=args.layers, width=args.width, rounds=args.rounds)


if __name__ == "__main__":
    main()
