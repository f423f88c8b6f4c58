"""Checkpoints of late-interaction models -> Card: a vector for each token, and queries and documents in forms of their own.

Three layouts, whose own files `card_colbert` reads: Stanford's (HF_ColBERT, with artifact.metadata), PyLate's, and that of
Sentence Transformers 6. As in `card_reader`, every key is used, known not to matter, or refused.

Where the codes differ, the code that a layout comes from is followed. So a marker is a token that is put in, in Stanford's and
PyLate's layouts, and the text of a prompt in that of Sentence Transformers; and of a punctuation mark, Stanford's skips the
first token of its own encoding. Words for which a vocabulary has no token are not skipped, as Sentence Transformers has it:
otherwise every unknown word of a document would be.

Sources: stanford-futuredata/ColBERT, colbert/modeling and colbert/infra/config; lightonai/pylate, models/colbert.py and
Dense.py; sentence_transformers/multi_vector_encoder and base/modules/transformer.py (6.2).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, TypeAlias, cast

from whimbrel.checkpoint.config.common import read_matryoshka
from whimbrel.checkpoint.config.reader import read_encoder
from whimbrel.checkpoint.json_file import JsonFile, read_json
from whimbrel.checkpoint.late_interaction.colbert import (
    DIMENSIONS,
    PYLATE_KEYS,
    read_multi_vector_encoder,
    read_pylate,
    read_stanford,
)
from whimbrel.checkpoint.late_interaction.common import METADATA, Base
from whimbrel.checkpoint.sentence_transformers.modules import MODULES, SENTENCE, kinds_of, read_modules, read_transformer
from whimbrel.checkpoint.tokenizer.classes import read_vocabulary
from whimbrel.checkpoint.tokenizer.config import read_tokenizer
from whimbrel.checkpoint.tokenizer.vocabulary import read_tokenizer_file
from whimbrel.errors import CheckpointError
from whimbrel.types.card import Card, Output, PoolingOption
from whimbrel.types.heads import Dense

Layout: TypeAlias = Literal["stanford", "pylate", "sentence_transformers"]

_KINDS: Final = kinds_of("""
    pylate.models.Dense.Dense
    sentence_transformers.models.Transformer
    sentence_transformers.models.Dense
    sentence_transformers.models.Dropout
    sentence_transformers.base.modules.transformer.Transformer
    sentence_transformers.base.modules.dense.Dense
    sentence_transformers.base.modules.normalize.Normalize
    sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask
    sentence_transformers.multi_vector_encoder.modules.token_pooling.HierarchicalTokenPooling
""")
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
    return any(isinstance(kind, str) and _KINDS.get(kind) == "Dense" for kind in types)


def read_multi_vector(folder: Path, name: str, layout: Layout, *, pooling: PoolingOption | None) -> Card:
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
        activation="normalize",
        activated=said.finished,
        skip_ids=said.skip_ids,
        skip_in_queries=said.skip_in_queries,
        token_pooling=said.token_pooling,
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
        text_formats=said.forms,
    )


def _read_base(folder: Path, layout: Layout) -> Base:
    rows = [("Transformer", "")] if layout == "stanford" else read_modules(folder, _KINDS)
    modules = [row for row in rows if row[0] != "Dropout"]
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
    transformer = JsonFile("", {}) if layout == "stanford" else read_transformer(root, used=used)
    lowercase = transformer.get("do_lower_case", bool, False)
    card = read_tokenizer(root, config, tokenizer, lowercase=lowercase)
    ids, roles = read_vocabulary(read_tokenizer_file(root).data, card, encoder.vocab_size)
    return Base(folder, path, modules[1:], config, encoder, transformer, tokenizer, card, ids, roles)


_READERS: Final = {"stanford": read_stanford, "pylate": read_pylate, "sentence_transformers": read_multi_vector_encoder}
