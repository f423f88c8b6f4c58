"""Layouts of late-interaction checkpoints.

Recognizes the three layouts: Stanford's (HF_ColBERT, with artifact.metadata), PyLate's and that of Sentence Transformers 6.
`colbert.py` reads their files. A marker is an inserted token in the first two, and the text of a prompt in the third. For a
punctuation mark, Stanford's layout skips the first token of its encoding. Words without a token are not skipped: otherwise
every unknown word of a document would be.

Sources: stanford-futuredata/ColBERT, colbert/modeling and colbert/infra/config; lightonai/pylate, models/colbert.py and
Dense.py; sentence_transformers/multi_vector_encoder and base/modules/transformer.py (6.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, TypeAlias, cast

from whimbrel.checkpoint.config.common import read_matryoshka
from whimbrel.checkpoint.config.reader import read_config, read_encoder
from whimbrel.checkpoint.json_file import JsonFile, read_json
from whimbrel.checkpoint.late_interaction import colbert
from whimbrel.checkpoint.late_interaction.colbert import Base
from whimbrel.checkpoint.sentence_transformers.modules import MODULES, SENTENCE, kinds_of, read_modules, read_transformer
from whimbrel.checkpoint.tokenizer.config import read_tokenizer, read_tokenizer_file
from whimbrel.checkpoint.tokenizer.contents import read_vocabulary
from whimbrel.errors import CheckpointError
from whimbrel.types.card import Card, Output, PoolingOption, TokenizerReading
from whimbrel.types.heads import Dense

Layout: TypeAlias = Literal["stanford", "pylate", "sentence_transformers"]

_KINDS: Final[Mapping[str, str]] = {
    "pylate.models.Dense.Dense": "Dense",
    **kinds_of("models", "Transformer Dense Dropout Pooling LayerNorm"),
    **kinds_of("base.modules", "transformer.Transformer dense.Dense normalize.Normalize"),
    **kinds_of("multi_vector_encoder.modules", "multi_vector_mask.MultiVectorMask token_pooling.HierarchicalTokenPooling"),
    **kinds_of("sentence_transformer.modules", "pooling.Pooling layer_norm.LayerNorm dropout.Dropout normalize.Normalize"),
}
_LENGTHS: Final = ("query_length", "document_length", "query_expansion")


def find_layout(folder: Path) -> Layout | None:
    sentence = JsonFile.read_optional(folder, SENTENCE).data
    if (kind := sentence.get("model_type")) in ("ColBERT", "MultiVectorEncoder"):
        return "pylate" if kind == "ColBERT" else "sentence_transformers"
    names: object = JsonFile.read_optional(folder, "config.json").data.get("architectures")
    architectures = cast(list[object], names) if isinstance(names, list) else []
    jina = "ColBERTJinaRobertaModel" in architectures
    is_stanford = "HF_ColBERT" in architectures or (jina and (folder / colbert.METADATA).exists())
    if is_stanford and not _has_dense(folder):  # a modules.json of the base model may remain
        return "stanford"
    return "pylate" if colbert.PYLATE_KEYS & sentence.keys() else None


def _has_dense(folder: Path) -> bool:
    values: object = read_json(folder, MODULES) if (folder / MODULES).exists() else []
    rows = cast(list[object], values) if isinstance(values, list) else []
    types = [cast(dict[str, object], row).get("type") for row in rows if isinstance(row, dict)]
    return any(isinstance(kind, str) and _KINDS.get(kind) == "Dense" for kind in types)


def read_multi_vector(
    folder: Path, name: str, layout: Layout, reading: TokenizerReading | None, *, pooling: PoolingOption | None
) -> Card:
    """Read the card of a checkpoint with this layout. Raises CheckpointError if the user chose a `pooling`."""
    if pooling is not None:
        raise CheckpointError("says that each token gives a vector; leave out --pooling.", file="config.json")
    base = _read_base(folder, layout, reading)
    parsed = _READERS[layout](base)
    width = next((head.out_features for head in reversed(parsed.head) if isinstance(head, Dense)), base.encoder.hidden_size)
    widths = read_matryoshka(base.config, width)
    output = Output(
        width,
        rows="token",
        head=parsed.head,
        activation="normalize",
        activated=parsed.activated,
        skip_ids=parsed.skip_ids,
        query_skip_ids=parsed.query_skip_ids,
        keep_ids=parsed.keep_ids,
        keep_in_queries=False,
        token_pooling=parsed.token_pooling,
    )
    return Card(
        name=name,
        path=base.path,
        encoder=base.encoder,
        outputs={"multi_vector": output},
        max_length=base.encoder.max_positions,
        tokenizer=base.tokenizer_card,
        prompts=parsed.prompts,
        default_prompt_name=parsed.default_prompt_name,
        matryoshka=base.config.get("is_matryoshka", bool, False) or bool(widths),
        matryoshka_dimensions=widths,
        similarity=parsed.similarity,
        text_formats=parsed.text_formats,
    )


def _read_base(folder: Path, layout: Layout, reading: TokenizerReading | None) -> Base:
    rows = [("Transformer", "")] if layout == "stanford" else read_modules(folder, _KINDS)
    modules = rows if layout == "sentence_transformers" else [row for row in rows if row[0] != "Dropout"]
    kinds = [kind for kind, _ in modules]
    if kinds[:1] != ["Transformer"] or "Transformer" in kinds[1:]:
        raise CheckpointError(f"must begin with one Transformer, is {kinds}.", file=MODULES)
    path = modules[0][1]
    root = folder / path
    config = read_config(root)
    if layout == "stanford":
        config.ignore(*colbert.DIMENSIONS)
    encoder = read_encoder(config)
    tokenizer = JsonFile.read_optional(root, "tokenizer_config.json")
    used = _LENGTHS if layout == "sentence_transformers" else ()
    transformer = JsonFile("", {}) if layout == "stanford" else read_transformer(root, used=used)
    lowercase = transformer.get("do_lower_case", bool, False)
    card = read_tokenizer(folder, path, config, tokenizer, reading=reading, lowercase=lowercase)
    ids, roles = read_vocabulary(read_tokenizer_file(root).data, card, encoder.vocab_size)
    return Base(folder, path, modules[1:], config, encoder, transformer, tokenizer, card, ids, roles)


_READERS: Final = {
    "stanford": colbert.read_stanford,
    "pylate": colbert.read_pylate,
    "sentence_transformers": colbert.read_multi_vector_encoder,
}
