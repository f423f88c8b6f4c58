"""What Stanford's ColBERT and PyLate write of their models: artifact.metadata and config_sentence_transformers.json.

See `card_multi_vector`.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from whimbrel.card import Form
from whimbrel.card_modules import read_prompts
from whimbrel.card_parts import (
    KNOWN_SENTENCE,
    METADATA,
    MODULES,
    SENTENCE,
    Base,
    Said,
    fill_token,
    read_expansion,
    read_heads,
    read_similarity,
    read_words,
)
from whimbrel.errors import CheckpointError
from whimbrel.heads import Dense
from whimbrel.json_file import JsonFile
from whimbrel.types import InputType

PYLATE_KEYS: Final = frozenset(
    """
    query_prefix document_prefix query_length document_length do_query_expansion attend_to_expansion_tokens skiplist_words
""".split()
)

# Keys of artifact.metadata that do not change a vector: where the model was trained, how, and how it is indexed and searched.
_INERT_METADATA: Final = frozenset(
    """
    accumsteps amp avoid_fork_if_possible bsize centroid_score_threshold checkpoint clustering_mode collection
    distillation_alpha doc_token experiment gpus ignore_scores index_bsize index_name index_path index_root kmeans_niters
    load_index_with_mmap lr maxsteps meta model_name name nbits ncells ndocs nranks num_partitions_max nway overwrite
    protected_tokens queries query_token rank reranker resume root save_every total_visible_gpus triples use_ib_negatives
    warmup warmup_bert
""".split()
)
_FIXED_METADATA: Final[Mapping[str, tuple[object, ...]]] = {
    "interaction": ("colbert", None),
    "pool_factor": (1, None),
    "relu": (False, None),
    "similarity": ("cosine", None),
}

# Stanford's: the weights of the head lie among the transformer's

DIMENSIONS: Final = ("dim", "colbert_dim", "projection_dim")
"""Keys of config.json that may repeat the width."""


def read_stanford(base: Base) -> Said:
    """Defaults are those of ColBERTConfig."""
    file = JsonFile.read(base.folder, METADATA)
    file.refuse_other(_FIXED_METADATA)
    width = file.positive("dim", 128)
    base.config.refuse_other(dict.fromkeys(DIMENSIONS, (width, None)))
    expansion = read_expansion(
        base,
        file,
        ("query_maxlen", "attend_to_mask_tokens"),
        file.positive("query_maxlen", 32),
        token_id=fill_token(base, file, "query_maxlen"),
        attended=file.get("attend_to_mask_tokens", bool, False),
    )
    markers = {
        key: base.token_id(file.get(key, str, default), file, key)
        for key, default in (("query_token_id", "[unused0]"), ("doc_token_id", "[unused1]"))
    }
    forms: dict[InputType, Form] = {
        "query": base.form(expansion.length, markers["query_token_id"], expansion),
        "document": base.form(file.positive("doc_maxlen", 220), markers["doc_token_id"]),
    }
    skips = string.punctuation if file.get("mask_punctuation", bool, True) else ""
    file.refuse_unread(_INERT_METADATA)
    head = Dense(None, "linear", base.encoder.hidden_size, width, bias=False, activation="identity")
    return Said(forms, (head,), base.known(_first_pieces(base, skips)))


def _first_pieces(base: Base, words: Iterable[str]) -> list[str]:
    """The first token of each word's encoding. SentencePiece puts a space before: a token with it, if that is the likelier."""
    model = cast(dict[str, Any], JsonFile.read(base.folder / base.path, "tokenizer.json").get("model", dict))
    if model.get("type") != "Unigram":
        return list(words)
    scores: dict[str, float] = {row[0]: row[1] for row in model["vocab"]}
    space = "\u2581"

    def first(word: str) -> str:
        whole, parts = scores.get(space + word), [scores.get(space), scores.get(word)]
        apart = None if None in parts else sum(cast(list[float], parts))
        return space + word if whole is not None and (apart is None or whole >= apart) else space

    return [first(word) for word in words]


# PyLate's


def read_pylate(base: Base) -> Said:
    """Defaults are those of ColBERT.__init__."""
    if not base.modules or any(kind != "Dense" for kind, _ in base.modules):
        raise CheckpointError(f"must be a Transformer and Dense layers, is {[kind for kind, _ in base.modules]}.", file=MODULES)
    file = JsonFile.read(base.folder, SENTENCE)
    file.refuse_unknown(PYLATE_KEYS, KNOWN_SENTENCE)
    file.refuse_other({"truncate_dim": (None,)})
    prefixes: dict[InputType, str] = {
        "query": file.get("query_prefix", str, "[Q] "),
        "document": file.get("document_prefix", str, "[D] "),
    }
    marker_ids: dict[InputType, int | None] = {
        kind: base.token_id(prefix, file, f"{kind}_prefix") if prefix else None for kind, prefix in prefixes.items()
    }
    length = file.positive("query_length", 32)
    expansion = None
    attended = file.get("attend_to_expansion_tokens", bool, False)
    if file.get("do_query_expansion", bool, True):
        token_id = fill_token(base, file, "do_query_expansion")
        keys = ("query_length", "attend_to_expansion_tokens")
        expansion = read_expansion(base, file, keys, length, token_id=token_id, attended=attended)
    forms: dict[InputType, Form] = {
        "query": base.form(length, marker_ids["query"], expansion),
        "document": base.form(file.positive("document_length", 180), marker_ids["document"]),
    }
    prompts, default = read_prompts(file)
    for kind, prefix in prefixes.items():  # newer files say the prefix there as well
        if kind in prompts:
            prompts[kind] = prompts[kind].removeprefix(prefix)
    return Said(
        forms,
        tuple(read_heads(base)),
        base.known(read_words(file, default=list(string.punctuation))),
        prompts=prompts,
        default_prompt_name=default,
        similarity=read_similarity(file),
    )
