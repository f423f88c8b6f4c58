"""Models whose queries and documents go through different modules, as Sentence Transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Router, StaticEmbedding, Transformer

from checkpoints.encoders import bert_tokenizer, write_bert, write_xlmr
from checkpoints.files import edit_json


def dense(out: int, seed: int) -> Dense:
    torch.manual_seed(seed)
    return Dense(48, out)


def static() -> StaticEmbedding:
    words = bert_tokenizer()._tokenizer
    table = torch.randn(words.get_vocab_size(), 48, generator=torch.Generator().manual_seed(3))
    return StaticEmbedding(words, embedding_weights=table)


def write_router(folder: Path, form: str) -> None:
    write_bert(folder / "bert")
    write_xlmr(folder / "xlmr", hidden_size=64)
    edit_json(folder / "xlmr/tokenizer_config.json", model_max_length=40)
    bert, pooling = Transformer(str(folder / "bert")), Pooling(48, "mean")
    other = [Transformer(str(folder / "xlmr")), Pooling(64, "cls"), Dense(64, 48)]
    heads = {"query": [dense(20, 1)], "document": [dense(20, 2), dense_of(20, 20)]}
    modules: dict[str, list[Any]] = {
        "heads": [bert, pooling, Router(heads), Normalize()],
        "one head": [bert, pooling, Router({"query": [dense(48, 1)], "document": []}, default_route="document")],
        "poolings": [Router({"query": [bert, Pooling(48, "cls")], "document": [bert, pooling]}), Normalize()],
        "table and model": [Router.for_query_document([static()], [bert, pooling]), Normalize()],
        "two models": [Router.for_query_document(other, [bert, pooling])],
    }
    SentenceTransformer(modules=modules[form], device="cpu").save(str(folder / "model"))


def dense_of(columns: int, rows: int) -> Dense:
    torch.manual_seed(7)
    return Dense(columns, rows)
