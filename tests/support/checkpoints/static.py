"""Tables of vectors, small and random: StaticEmbedding and model2vec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer

from checkpoints.encoders import bert_tokenizer
from checkpoints.files import write_json
from checkpoints.sentence_layout import OLD

WIDTH = 40


def table(rows: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))


def write_static(folder: Path, *, old: bool = False, heads: tuple[Any, ...] = (), words: Tokenizer | None = None) -> None:
    """Write a table as Sentence Transformers saves it, or, if `old`, as it saved static-retrieval-mrl-en-v1."""
    words = words or bert_tokenizer()._tokenizer
    static = StaticEmbedding(words, embedding_weights=table(words.get_vocab_size()))
    SentenceTransformer(modules=[static, *heads], device="cpu").save(str(folder))
    if old:
        (folder / "0_StaticEmbedding").mkdir()
        for file in ("tokenizer.json", "model.safetensors"):
            (folder / file).rename(folder / "0_StaticEmbedding" / file)
        kinds = ["StaticEmbedding", *(type(head).__name__ for head in heads)]
        rows = [{"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": OLD + kind} for i, kind in enumerate(kinds)]
        write_json(folder / "modules.json", rows)


POTION = {
    "model_type": "model2vec",
    "architectures": ["StaticModel"],
    "tokenizer_name": "baai/bge-base-en-v1.5",
    "apply_pca": 256,
    "apply_zipf": True,
    "hidden_dim": WIDTH,
    "seq_length": 1000000,
    "normalize": True,
}


def write_model2vec(folder: Path, words: Tokenizer, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    """Write the layout of minishlab/potion-base-8M on the hub."""
    folder.mkdir(exist_ok=True)
    words.save(str(folder / "tokenizer.json"))
    save_file(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", {key: value for key, value in (POTION | config).items() if value != "ABSENT"})
    rows = [{"idx": 0, "name": "0", "path": ".", "type": OLD + "StaticEmbedding"}]
    if config.get("normalize", True):
        rows.append({"idx": 1, "name": "1", "path": "1_Normalize", "type": OLD + "Normalize"})
    write_json(folder / "modules.json", rows)


def word_tokenizer() -> Tokenizer:
    return bert_tokenizer()._tokenizer
