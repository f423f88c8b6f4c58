"""Checkpoints of late-interaction models -> Card: a vector for each token, and queries and documents in forms of their own.

Three layouts: Stanford's (HF_ColBERT, with artifact.metadata), PyLate's (both in `card_colbert`), and that of Sentence
Transformers 6. As in `card_reader`, every key is used, known not to matter, or refused.

Where the codes differ, the code that a layout comes from is followed. So a marker is a token that is put in, in Stanford's and
PyLate's layouts, and the text of a prompt in that of Sentence Transformers; and of a punctuation mark, Stanford's skips the
first token of its own encoding. Words for which a vocabulary has no token are not skipped, as Sentence Transformers has it:
otherwise every unknown word of a document would be.

Sources: stanford-futuredata/ColBERT, colbert/modeling and colbert/infra/config; lightonai/pylate, models/colbert.py and
Dense.py; sentence_transformers/multi_vector_encoder and base/modules/transformer.py (6.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, TypeAlias, cast

from whimbrel.card import Card, Expansion, Form, Output, StatedPooling
from whimbrel.card_colbert import DIMENSIONS, PYLATE_KEYS, read_pylate, read_stanford
from whimbrel.card_modules import (
    read_matryoshka,
    read_max_length,
    read_module_rows,
    read_prompts,
    read_transformer,
)
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
from whimbrel.config_reader import read_encoder
from whimbrel.errors import CheckpointError
from whimbrel.heads import Dense, Normalize
from whimbrel.json_file import JsonFile, read_json
from whimbrel.tokenizer_file import read_vocabulary
from whimbrel.tokenizer_reader import read_tokenizer
from whimbrel.types import InputType

Layout: TypeAlias = Literal["stanford", "pylate", "sentence_transformers"]

_TYPES: Final[Mapping[str, str]] = {
    "pylate.models.Dense.Dense": "Dense",
    "sentence_transformers.models.Transformer": "Transformer",
    "sentence_transformers.models.Dense": "Dense",
    "sentence_transformers.models.Dropout": "Dropout",
    "sentence_transformers.base.modules.transformer.Transformer": "Transformer",
    "sentence_transformers.base.modules.dense.Dense": "Dense",
    "sentence_transformers.base.modules.normalize.Normalize": "Normalize",
    "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask": "MultiVectorMask",
    "sentence_transformers.multi_vector_encoder.modules.token_pooling.HierarchicalTokenPooling": "HierarchicalTokenPooling",
}

_LENGTHS: Final = ("query_length", "document_length", "query_expansion")


def find_layout(folder: Path) -> Layout | None:
    """Which of the layouts a checkpoint has, if any."""
    sentence = JsonFile.read_optional(folder, SENTENCE).data
    if (kind := sentence.get("model_type")) in ("ColBERT", "MultiVectorEncoder"):
        return "pylate" if kind == "ColBERT" else "sentence_transformers"
    names: object = JsonFile.read_optional(folder, "config.json").data.get("architectures")
    listed = cast(list[object], names) if isinstance(names, list) else []
    wrapped = "HF_ColBERT" in listed or ("ColBERTJinaRobertaModel" in listed and (folder / METADATA).exists())
    if wrapped and not _has_dense(folder):  # a modules.json of the model that it was made from may lie about
        return "stanford"
    return "pylate" if PYLATE_KEYS & sentence.keys() else None


def _has_dense(folder: Path) -> bool:
    values: object = read_json(folder, MODULES) if (folder / MODULES).exists() else []
    rows = cast(list[object], values) if isinstance(values, list) else []
    types = [cast(dict[str, object], row).get("type") for row in rows if isinstance(row, dict)]
    return any(isinstance(kind, str) and _TYPES.get(kind) == "Dense" for kind in types)


def read_multi_vector(folder: Path, name: str, layout: Layout, *, pooling: StatedPooling | None) -> Card:
    """The card of a checkpoint that has this layout. `pooling` is what the user says, out of place here."""
    if pooling is not None:
        raise CheckpointError("says that each token gives a vector; leave out --pooling.", file="config.json")
    base = _read_base(folder, layout)
    said = _READERS[layout](base)
    width = next((head.out_features for head in reversed(said.head) if isinstance(head, Dense)), base.encoder.hidden_size)
    widths = read_matryoshka(base.config, width)
    output = Output(
        width,
        rows="token",
        head=said.head,
        finish="normalize",
        finished=said.finished,
        skip_ids=said.skip_ids,
        skip_in_queries=said.skip_in_queries,
    )
    return Card(
        name=name,
        path=base.path,
        encoder=base.encoder,
        outputs={"multi_vector": output},
        max_length=base.encoder.max_positions,
        tokenizer=base.tokenizer_card,
        prompts=said.prompts,
        default_prompt_name=said.default_prompt_name,
        matryoshka=base.config.get("is_matryoshka", bool, False) or bool(widths),
        matryoshka_dimensions=widths,
        similarity=said.similarity,
        forms=said.forms,
    )


def _read_base(folder: Path, layout: Layout) -> Base:
    modules = [("Transformer", "")] if layout == "stanford" else read_module_rows(folder, _TYPES)
    kinds = [kind for kind, _ in modules]
    if kinds[:1] != ["Transformer"] or "Transformer" in kinds[1:]:
        raise CheckpointError(f"must begin with one Transformer, is {kinds}.", file=MODULES)
    path = modules[0][1]
    root = folder / path
    config = JsonFile.read(root, "config.json")
    if layout == "stanford":
        config.ignore(*DIMENSIONS)
    encoder = read_encoder(config)
    tokenizer = JsonFile.read_optional(root, "tokenizer_config.json")
    used = _LENGTHS if layout == "sentence_transformers" else ()
    transformer = JsonFile("", {}) if layout == "stanford" else read_transformer(root, used)
    lowercase = transformer.get("do_lower_case", bool, False)
    card = read_tokenizer(root, config, tokenizer, lowercase=lowercase)
    ids, roles = read_vocabulary(JsonFile.read(root, "tokenizer.json").data, card, encoder.vocab_size)
    return Base(folder, path, modules[1:], config, encoder, transformer, tokenizer, card, ids, roles)


# Sentence Transformers'


def _sentence_transformers(base: Base) -> Said:
    file = JsonFile.read(base.folder, SENTENCE)
    file.refuse_unknown(KNOWN_SENTENCE)
    file.refuse_other({"truncate_dim": (None,)})
    head = list(read_heads(base))
    finished = bool(head) and isinstance(head[-1], Normalize)
    while head and isinstance(head[-1], Normalize):
        head.pop()
    masks = [path for kind, path in base.modules if kind == "MultiVectorMask"]
    if len(masks) > 1:
        raise CheckpointError("must have one MultiVectorMask at most.", file=MODULES)
    expansion = _stated_expansion(base)
    if expansion is not None and not masks:
        raise base.transformer.error("queries are filled up, but no MultiVectorMask keeps those tokens.", "query_expansion")
    skip_ids, skip_in_queries = _mask(base, masks[0]) if masks else ((), False)
    _refuse_token_pooling(base, finished=finished)
    usual = read_max_length(base.encoder, base.transformer, base.tokenizer)
    forms: dict[InputType, Form] = {
        "query": base.form(_query_length(base.transformer, expansion, usual), None, expansion),
        "document": base.form(base.transformer.positive("document_length", usual)),
    }
    prompts, default = read_prompts(file)
    return Said(forms, tuple(head), skip_ids, skip_in_queries, finished, prompts, default, read_similarity(file))


def _stated_expansion(base: Base) -> Expansion | None:
    key = "query_expansion"
    if base.transformer.data.get(key) is None:
        return None
    stated = JsonFile(f"{base.transformer.name}: {key}", base.transformer.data[key])
    stated.refuse_unknown({"strategy", "attend", "token", "length"})
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


def _query_length(transformer: JsonFile, expansion: Expansion | None, usual: int) -> int:
    """Longer queries are cut to the length of the expansion if that is "fixed", and not if it is "min"."""
    length = transformer.positive("query_length", usual)
    if expansion is None:
        return length
    if transformer.data.get("query_length") is not None and length < expansion.length:
        raise transformer.error(f"is {length}, but queries are filled up to {expansion.length}.", "query_length")
    is_fixed = transformer.data["query_expansion"]["strategy"] == "fixed"
    return expansion.length if is_fixed else max(length, expansion.length)


def _mask(base: Base, path: str) -> tuple[tuple[int, ...], bool]:
    """(tokens without a vector, in queries too) of a MultiVectorMask."""
    file = JsonFile.read(base.folder, f"{path}/config.json")
    file.refuse_unknown({"skiplist_words", "skiplist_tasks", "keep_only_token_ids"})
    file.refuse_other({"keep_only_token_ids": (None, [])})
    given: object = file.data.get("skiplist_tasks")
    tasks = [given] if isinstance(given, str) else file.get("skiplist_tasks", list, ["document"])
    if any(task not in ("query", "document") for task in tasks) or (tasks and "document" not in tasks):
        raise file.error(f"{given!r:.80} is not supported; must be document, with or without query, or none.", "skiplist_tasks")
    return base.known(read_words(file, default=[])) if tasks else (), "query" in tasks


def _refuse_token_pooling(base: Base, *, finished: bool) -> None:
    """Unless it is off: then all that it may do is to normalise once more."""
    for kind, path in base.modules:
        if kind != "HierarchicalTokenPooling":
            continue
        file = JsonFile.read(base.folder, f"{path}/config.json")
        file.refuse_unknown({"pool_factor", "num_protected_tokens", "normalize_embeddings", "tasks"})
        if file.get("pool_factor", float, 1.0) != 1:
            raise file.error("vectors of a document are not merged; must be 1.", "pool_factor")
        if file.get("normalize_embeddings", bool, False) and not finished:
            raise file.error("is not supported without a Normalize module.", "normalize_embeddings")


_READERS: Final = {"stanford": read_stanford, "pylate": read_pylate, "sentence_transformers": _sentence_transformers}
