"""Late-interaction checkpoints of every layout, and the vectors of the reference for them."""

from __future__ import annotations

import shutil
import string
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import XLMRobertaTokenizer

from checkpoints.late_interaction import (
    JINA,
    write_mxbai_edge,
    write_mxbai_large,
    write_old_pylate,
    write_pylate,
    write_sentence_transformers,
    write_stanford,
)
from checkpoints.published.jina import jina_roberta
from whimbrel.types.request import InputType

QUERIES = [
    "what is a whimbrel?",
    "",
    "How far do birds fly in a year, [Q] and where to? A long, long query that goes on and on and on",
    "Zürich!! fly",
    "x",
    "what is a whimbrel? 日本",
]


DOCUMENTS = [
    "The whimbrel is a wader, with a long curved bill.",
    "... ! ? !",
    "Der Regenbrachvogel zieht im Herbst nach Afrika; ein großer Vogel! " * 4,
    "a",
    "日本 text. [D] It breeds [MASK] across much of subarctic North America",
]


FIXED = {"strategy": "fixed", "attend": False, "token": None, "length": 16}


MIN = {"strategy": "min", "attend": True, "token": "[SEP]", "length": 16}


CASES: dict[str, Callable[[Path], None]] = {
    "stanford": write_stanford,
    "stanford, attended": lambda folder: write_stanford(folder, attend_to_mask_tokens=True, mask_punctuation=False),
    "mxbai large": write_mxbai_large,
    "pylate": write_pylate,
    "pylate, filled up": lambda folder: write_pylate(folder, window=14, do_query_expansion=True),
    "pylate, attended": lambda folder: write_pylate(folder, do_query_expansion=True, attend_to_expansion_tokens=True),
    "pylate without markers": lambda folder: write_pylate(folder, query_prefix="", document_prefix="", skiplist_words=[]),
    "old pylate": write_old_pylate,
    "mxbai edge": write_mxbai_edge,
    "fixed": lambda folder: write_sentence_transformers(folder, FIXED, document_length=30),
    "min": lambda folder: write_sentence_transformers(folder, MIN, {"skiplist_tasks": ["query", "document"]}),
    "neither": lambda folder: write_sentence_transformers(folder, None, {"skiplist_tasks": []}, markers=False, query_length=9),
}


@cache
def late_reference(folder: Path) -> Any:
    """Sentence Transformers' model; without files that lead it astray."""
    from sentence_transformers import MultiVectorEncoder

    if (folder / "1_Pooling").exists():
        clean = folder.with_name(f"{folder.name}-clean")
        stale = shutil.ignore_patterns("modules.json", "1_Pooling", "*sentence*")
        folder = Path(shutil.copytree(folder, clean, ignore=stale, dirs_exist_ok=True))
    return MultiVectorEncoder(str(folder), device="cpu")


def checkpoints_of(
    factory: pytest.TempPathFactory, cases: Mapping[str, Callable[[Path], object]] = CASES
) -> Callable[[str], Path]:
    """Return a function that writes the checkpoint of a case, each once, and returns its folder."""

    @cache
    def make(case: str) -> Path:
        folder = factory.mktemp("late")
        cases[case](folder)
        return folder

    return make


@cache
def xlm_roberta(folder: Path) -> Any:
    return XLMRobertaTokenizer.from_pretrained(folder)


def jina_vectors(weights: dict[str, Any], folder: Path, text: str, kind: InputType, width: int) -> Any:
    """Stanford's recipe, over the formula of the transformer."""
    tokenizer = xlm_roberta(folder)
    length, marker = (12, "[QueryMarker]") if kind == "query" else (30, "[DocumentMarker]")
    ids = tokenizer(text, truncation=True, max_length=length - 1)["input_ids"]
    ids = [ids[0], tokenizer.convert_tokens_to_ids(marker), *ids[1:]]
    if kind == "query":
        ids += [tokenizer.mask_token_id] * (length - len(ids))
    config = JINA | {"vocab_size": len(tokenizer)}
    with torch.inference_mode():
        vectors = (jina_roberta(weights, config, torch.tensor(ids)) @ weights["linear.weight"].T)[:, :width]
        vectors = torch.nn.functional.normalize(vectors, dim=-1).numpy()
    skipped = {tokenizer.encode(sign, add_special_tokens=False)[0] for sign in string.punctuation} - {tokenizer.unk_token_id}
    return vectors if kind == "query" else vectors[[token not in skipped for token in ids]]
