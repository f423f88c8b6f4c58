"""Settings files of late-interaction models.

Stanford's ColBERT has artifact.metadata, PyLate config_sentence_transformers.json, and MultiVectorEncoder of Sentence
Transformers that, sentence_bert_config.json and modules of its own. `layouts.py` tells them apart, and names the sources.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, cast

from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.checkpoint.late_interaction.common import (
    METADATA,
    Base,
    ParsedLayout,
    fill_token,
    read_expansion,
    read_similarity,
    read_words,
)
from whimbrel.checkpoint.sentence_transformers.modules import KNOWN_SENTENCE, MODULES, SENTENCE, read_max_length, read_prompts
from whimbrel.checkpoint.tokenizer.vocabulary import read_tokenizer_file
from whimbrel.errors import CheckpointError, InvalidRequest
from whimbrel.types.card import QueryExpansion, TextFormat
from whimbrel.types.heads import Dense
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.request import InputType

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


def read_stanford(base: Base) -> ParsedLayout:
    """Read Stanford's layout, with the defaults of ColBERTConfig.

    That code treats a padding token in a text as padding: it becomes an expansion token in a query, and has no vector in a
    document.
    """
    file = JsonFile.read(base.folder, METADATA)
    file.require_values(_FIXED_METADATA)
    width = file.positive("dim", 128)
    base.config.require_values(dict.fromkeys(DIMENSIONS, (width, None)))
    expansion = read_expansion(
        base,
        file,
        ("query_maxlen", "attend_to_mask_tokens"),
        file.positive("query_maxlen", 32),
        token_id=fill_token(base, file, "query_maxlen"),
        attended=file.get("attend_to_mask_tokens", bool, False),
    )
    pad_id = base.ids.get(base.roles.get("pad", ""))
    expansion = replace(expansion, stands_for=pad_id)  # wherever the padding's token comes from
    markers = {
        key: base.token_id(file.get(key, str, default), file, key)
        for key, default in (("query_token_id", "[unused0]"), ("doc_token_id", "[unused1]"))
    }
    forms: dict[InputType, TextFormat] = {
        "query": base.form(expansion.length, markers["query_token_id"], expansion),
        "document": base.form(file.positive("doc_maxlen", 220), markers["doc_token_id"]),
    }
    skips = string.punctuation if file.get("mask_punctuation", bool, True) else ""
    skip_ids = {*base.known(_first_pieces(base, skips)), *([] if pad_id is None else [pad_id])}
    file.reject_unread_keys(_INERT_METADATA)
    head = Dense(None, "linear", base.encoder.hidden_size, width, bias=False, activation="identity")
    return ParsedLayout(forms, (head,), tuple(sorted(skip_ids)))


def _first_pieces(base: Base, words: Iterable[str]) -> list[str]:
    """Return the first token of each word's encoding. SentencePiece puts a space before, in one token if likelier."""
    model = cast(dict[str, Any], read_tokenizer_file(base.folder / base.path).get("model", dict))
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


def read_pylate(base: Base) -> ParsedLayout:
    """Read PyLate's layout, with the defaults of ColBERT.__init__."""
    if not base.modules or any(kind != "Dense" for kind, _ in base.modules):
        raise CheckpointError(f"must be a Transformer and Dense layers, is {[kind for kind, _ in base.modules]}.", file=MODULES)
    file = JsonFile.read(base.folder, SENTENCE)
    file.reject_unknown_keys(PYLATE_KEYS, KNOWN_SENTENCE)
    file.require_values({"truncate_dim": (None,)})
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
    forms: dict[InputType, TextFormat] = {
        "query": base.form(length, marker_ids["query"], expansion),
        "document": base.form(file.positive("document_length", 180), marker_ids["document"]),
    }
    prompts, default = read_prompts(file)
    for kind, prefix in prefixes.items():  # newer files say the prefix there as well
        if kind in prompts:
            prompts[kind] = prompts[kind].removeprefix(prefix)
    return ParsedLayout(
        forms,
        base.heads()[0],
        base.known(read_words(file, default=list(string.punctuation))),
        prompts=prompts,
        default_prompt_name=default,
        similarity=read_similarity(file),
    )


# Sentence Transformers'


def read_multi_vector_encoder(base: Base) -> ParsedLayout:
    file = JsonFile.read(base.folder, SENTENCE)
    file.reject_unknown_keys(KNOWN_SENTENCE)
    file.require_values({"truncate_dim": (None,)})
    head, finished = base.heads()
    masks = [path for kind, path in base.modules if kind == "MultiVectorMask"]
    if len(masks) > 1:
        raise CheckpointError("must have one MultiVectorMask at most.", file=MODULES)
    expansion = _stated_expansion(base)
    if expansion is not None and not masks:
        raise base.transformer.error("queries are filled up, but no MultiVectorMask keeps those tokens.", "query_expansion")
    skip_ids, skip_in_queries = _mask(base, masks[0]) if masks else ((), False)
    usual = read_max_length(base.encoder, base.transformer, base.tokenizer)
    forms: dict[InputType, TextFormat] = {
        "query": base.form(_query_length(base.transformer, expansion, usual), None, expansion),
        "document": base.form(base.transformer.positive("document_length", usual)),
    }
    prompts, default = read_prompts(file)
    pooling = _token_pooling(base, finished=finished)
    return ParsedLayout(forms, head, skip_ids, skip_in_queries, finished, prompts, default, read_similarity(file), pooling)


def _stated_expansion(base: Base) -> QueryExpansion | None:
    key = "query_expansion"
    if base.transformer.data.get(key) is None:
        return None
    stated = JsonFile(f"{base.transformer.name}: {key}", base.transformer.data[key])
    stated.reject_unknown_keys({"strategy", "attend", "token", "length"})
    stated.choice("strategy", {"fixed": True, "min": True})
    token = stated.data.get("token")
    return read_expansion(
        base,
        stated,
        ("length", "attend"),
        stated.positive("length"),
        token_id=fill_token(base, stated, "token") if token is None else base.token_id(token, stated, "token"),
        attended=stated.get("attend", bool, False),
    )


def _query_length(transformer: JsonFile, expansion: QueryExpansion | None, usual: int) -> int:
    """Return the limit of queries, which a "fixed" expansion sets and a "min" expansion does not."""
    length = transformer.positive("query_length", usual)
    if expansion is None:
        return length
    if transformer.data.get("query_length") is not None and length < expansion.length:
        raise transformer.error(f"is {length}, but queries are filled up to {expansion.length}.", "query_length")
    is_fixed = transformer.data["query_expansion"]["strategy"] == "fixed"
    return expansion.length if is_fixed else max(length, expansion.length)


def _mask(base: Base, path: str) -> tuple[tuple[int, ...], bool]:
    """Return (ids without a vector, whether also in queries) of a MultiVectorMask."""
    file = JsonFile.read(base.folder, f"{path}/config.json")
    file.reject_unknown_keys({"skiplist_words", "skiplist_tasks", "keep_only_token_ids"})
    file.require_values({"keep_only_token_ids": (None, [])})
    value: object = file.data.get("skiplist_tasks")
    tasks = [value] if isinstance(value, str) else file.get("skiplist_tasks", list, ["document"])
    if any(task not in ("query", "document") for task in tasks) or (tasks and "document" not in tasks):
        raise file.error(f"{value!r:.80} is not supported; must be document, with or without query, or none.", "skiplist_tasks")
    return base.known(read_words(file, default=[])) if tasks else (), "query" in tasks


def _token_pooling(base: Base, *, finished: bool) -> TokenPooling | None:
    """Return the token pooling of the document vectors, if any. A module without effect may stand anywhere."""
    kept: list[tuple[int, TokenPooling]] = []
    for place, (kind, path) in enumerate(base.modules, start=1):
        pooling = _stated_pooling(base, path) if kind == "HierarchicalTokenPooling" else None
        if pooling is not None and (pooling.pool_factor > 1 or not finished):
            kept.append((place, pooling))
    if not kept:
        return None
    if [place for place, _ in kept] != [len(base.modules)]:
        raise CheckpointError("must have one HierarchicalTokenPooling at most, as its last module.", file=MODULES)
    return kept[0][1]


def _stated_pooling(base: Base, path: str) -> TokenPooling | None:
    """Return a module's token pooling, if any. Its first versions had no option to normalise, and did not (load_config)."""
    file = JsonFile.read(base.folder, f"{path}/config.json")
    file.reject_unknown_keys({"pool_factor", "num_protected_tokens", "normalize_embeddings", "tasks"})
    normalizes = file.get("normalize_embeddings", bool, False)
    try:
        pooling = TokenPooling(
            file.get("pool_factor", float, 1.0), file.get("num_protected_tokens", int, 1), normalize_embeddings=normalizes
        )
    except InvalidRequest as error:
        raise file.error(error.message, error.param or "pool_factor") from None
    value: object = file.data.get("tasks")
    tasks = [value] if isinstance(value, str) else file.get("tasks", list, ["document"])
    if not tasks or (pooling.pool_factor == 1 and not normalizes):
        return None
    if tasks != ["document"]:
        raise file.error(f"{value!r:.80} is not supported; only documents are pooled.", "tasks")
    return pooling
