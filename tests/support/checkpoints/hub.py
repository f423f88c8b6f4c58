"""A Hugging Face cache of small random checkpoints, under the ids that the docs use.

Each has the real model's file layout and architecture, and widths of its own. The packaged all-MiniLM-L6-v2 is in the
cache as it is, so its vectors are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from checkpoints.bge_m3 import write_m3
from checkpoints.classifiers import write_classifier
from checkpoints.files import edit_json
from checkpoints.jina_v5 import write as write_v5
from checkpoints.late_interaction import write_pylate
from checkpoints.layouts import LAYOUTS, write_layout
from checkpoints.rerankers import qwen, write_reranker
from checkpoints.sparse import splade_layout, write_splade
from whimbrel.checkpoint.locate import resolve_checkpoint

EMOTIONS = ["admiration", "amusement", "anger", "joy", "surprise", "neutral"]
ENTITIES = ["O", "B-MISC", "I-MISC", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"]
NLI = ["contradiction", "neutral", "entailment"]
LENGTH = 512


def _classifier(folder: Path, family: str, form: str = "ForSequenceClassification", labels: list[str] | None = None) -> None:
    names = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}} if labels else {}
    more = {} if labels else {"num_labels": 1}
    write_classifier(folder, family, form, max_position_embeddings=LENGTH + 2, **names, **more)
    edit_json(folder / "tokenizer_config.json", model_max_length=LENGTH)


def _emotions(folder: Path) -> None:
    _classifier(folder, "roberta", labels=EMOTIONS)
    edit_json(folder / "config.json", problem_type="multi_label_classification")


def _m3(folder: Path) -> None:
    """Its weights are a pickle on the hub. Here they are safetensors as well, as the page on troubleshooting makes them."""
    write_m3(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")


def _late(folder: Path) -> None:
    write_pylate(folder, query_length=32, document_length=300)
    edit_json(folder / "sentence_bert_config.json", max_seq_length=299)


def _llm_reranker(folder: Path) -> None:
    write_reranker(folder, "Qwen3", qwen(), tie_word_embeddings=True)


def _splade(folder: Path) -> None:
    write_splade(folder)
    splade_layout(folder)


WRITERS: dict[str, Callable[[Path], object]] = {
    "BAAI/bge-m3": _m3,
    "BAAI/bge-reranker-v2-m3": lambda folder: _classifier(folder, "xlm-roberta"),
    "Qwen/Qwen3-Embedding-0.6B": lambda folder: write_layout(folder, LAYOUTS["qwen3"]),
    "Qwen/Qwen3-Reranker-0.6B": _llm_reranker,
    "SamLowe/roberta-base-go_emotions": _emotions,
    "cross-encoder/ms-marco-MiniLM-L6-v2": lambda folder: _classifier(folder, "bert"),
    "dslim/bert-base-NER": lambda folder: _classifier(folder, "bert", "ForTokenClassification", ENTITIES),
    "intfloat/multilingual-e5-small": lambda folder: write_layout(folder, LAYOUTS["e5"]),
    "jinaai/jina-embeddings-v5-text-nano": lambda folder: write_v5(folder, "nano"),
    "joeddav/xlm-roberta-large-xnli": lambda folder: _classifier(folder, "xlm-roberta", labels=NLI),
    "lightonai/GTE-ModernColBERT-v1": _late,
    "naver/splade-v3": _splade,
}


def write_hub(cache: Path) -> None:
    """Write a cache, to be named by the variable HF_HUB_CACHE."""
    for name, write in WRITERS.items():
        torch.manual_seed(7)
        write(_snapshot(cache, name))
    minilm = resolve_checkpoint(None).folder
    place = _snapshot(cache, "sentence-transformers/all-MiniLM-L6-v2")
    for file in minilm.rglob("*"):
        if file.is_file():
            link = place / file.relative_to(minilm)
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(file)


def _snapshot(cache: Path, name: str) -> Path:
    """Make the folder of the one revision that a model has."""
    model, revision = cache / f"models--{name.replace('/', '--')}", "0" * 40
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text(revision)
    folder = model / "snapshots" / revision
    folder.mkdir(parents=True)
    return folder
