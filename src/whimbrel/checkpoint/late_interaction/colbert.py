"""Layouts of late-interaction checkpoints.

There are three: Stanford's (HF_ColBERT, with artifact.metadata), PyLate's (with config_sentence_transformers.json) and that of
Sentence Transformers 6 (a MultiVectorEncoder, with that file, sentence_bert_config.json and modules of its own). A marker is an
inserted token in the first two, and the text of a prompt in the third. For a punctuation mark, Stanford's layout skips the
first token of its encoding. Words without a token are not skipped: otherwise every unknown word of a document would be.

Sources: stanford-futuredata/ColBERT, colbert/modeling and colbert/infra/config; lightonai/pylate, models/colbert.py and
Dense.py; sentence_transformers/multi_vector_encoder and base/modules/transformer.py (6.2).
"""

import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

from whimbrel.checkpoint.config import common, reader
from whimbrel.checkpoint.json_file import Fixed, JsonFile
from whimbrel.checkpoint.late_interaction.chain import read_token_chain, read_words, token_output
from whimbrel.checkpoint.sentence_transformers import chained, modules
from whimbrel.checkpoint.sentence_transformers.modules import MODULES, SENTENCE, Rows, kinds_of
from whimbrel.checkpoint.tokenizer.config import read_tokenizer, read_tokenizer_file
from whimbrel.checkpoint.tokenizer.contents import read_vocabulary
from whimbrel.errors import CheckpointError
from whimbrel.types.card import Card, Encoder, Output, QueryExpansion, TextFormat
from whimbrel.types.choices import TokenizerReading
from whimbrel.types.heads import Dense
from whimbrel.types.request import InputType

Layout: TypeAlias = Literal["stanford", "pylate", "sentence_transformers"]

_KINDS: Final[Mapping[str, str]] = {
    "pylate.models.Dense.Dense": "Dense",
    **kinds_of("models", "Transformer Dense Dropout Pooling LayerNorm"),
    **kinds_of("base.modules", "transformer.Transformer dense.Dense normalize.Normalize"),
    **kinds_of("multi_vector_encoder.modules", "multi_vector_mask.MultiVectorMask token_pooling.HierarchicalTokenPooling"),
    **kinds_of("sentence_transformer.modules", "pooling.Pooling layer_norm.LayerNorm dropout.Dropout normalize.Normalize"),
}
_LENGTHS: Final = ("query_length", "document_length", "query_expansion")
_METADATA: Final = "artifact.metadata"
_SIMILARITIES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("MaxSim", "maxsim", "cosine"), "maxsim"),  # "cosine": of the base class, and unused
    "meanmaxsim": "meanmaxsim",
}
_MAX_EXPANSION: Final = 1024
"""Limit of query expansion in tokens, so that a short query does not cost as much as a long document."""
_PYLATE_KEYS: Final = """
    query_prefix document_prefix query_length document_length do_query_expansion attend_to_expansion_tokens skiplist_words
""".split()
# Keys of artifact.metadata that do not change a vector: training, index and search.
_INERT_METADATA: Final = """
    accumsteps amp avoid_fork_if_possible bsize centroid_score_threshold checkpoint clustering_mode collection
    distillation_alpha doc_token experiment gpus ignore_scores index_bsize index_name index_path index_root kmeans_niters
    load_index_with_mmap lr maxsteps meta name nbits ncells ndocs nranks num_partitions_max nway overwrite protected_tokens
    queries query_token rank reranker resume root save_every total_visible_gpus triples use_ib_negatives warmup warmup_bert
""".split()
_MARKERS: Final[Mapping[InputType, str]] = {"query": "[Q] ", "document": "[D] "}
_FIXED_METADATA: Final[Fixed] = {
    "interaction": ("colbert", None),
    "pool_factor": (1, None),
    "relu": (False, None),
    "similarity": ("cosine", None),
}
_DIMENSIONS: Final = ("dim", "colbert_dim", "projection_dim")
"""Keys of config.json in Stanford's layout that may repeat the width."""


def find_layout(folder: Path) -> Layout | None:
    sentence = JsonFile.read_optional(folder, SENTENCE).data
    if (kind := sentence.get("model_type")) in ("ColBERT", "MultiVectorEncoder"):
        return "pylate" if kind == "ColBERT" else "sentence_transformers"
    names: object = JsonFile.read_optional(folder, "config.json").data.get("architectures")
    architectures = cast(list[object], names) if isinstance(names, list) else []
    jina = "ColBERTJinaRobertaModel" in architectures
    is_stanford = "HF_ColBERT" in architectures or (jina and (folder / _METADATA).exists())
    if is_stanford and "Dense" not in map(_KINDS.get, modules.stated_classes(folder)):  # that of the base model may remain
        return "stanford"
    return "pylate" if sentence.keys() & _PYLATE_KEYS else None


@dataclass(frozen=True, slots=True)
class _Base:
    """The files and settings that all layouts share."""

    folder: Path
    modules: Rows
    config: JsonFile
    transformer: JsonFile
    tokenizer: JsonFile
    card: Card
    """The card without outputs and formats."""
    encoder: Encoder
    ids: Mapping[str, int]
    """Token -> id."""
    roles: Mapping[str, str]
    """Role -> special token."""

    def token_id(self, token: object, file: JsonFile, key: str) -> int:
        """Return the id of a token that `file` names. Raises CheckpointError."""
        if not isinstance(token, str) or token not in self.ids:
            raise file.error(f"{token!r:.80} is not a token of this vocabulary that the model embeds.", key)
        return self.ids[token]

    def text_format(self, max_length: int, marker_id: int | None = None, expansion: QueryExpansion | None = None) -> TextFormat:
        return TextFormat(min(max_length, self.encoder.max_positions), marker_id, expansion)

    def ids_of(self, words: Iterable[str]) -> tuple[int, ...]:
        """Return the ids of the words that are tokens."""
        return tuple(sorted({self.ids[word] for word in words if word in self.ids}))

    def card_of(self, output: Output, query: TextFormat, document: TextFormat) -> Card:
        formats: dict[InputType, TextFormat] = {"query": query, "document": document}
        own = common.read_matryoshka(self.config, output.width)
        return replace(self.card, outputs={"multi_vector": output}, text_formats=formats, **own)


def read_multi_vector(
    folder: Path, name: str, layout: Layout, reading: TokenizerReading | None, *, pooling: str | None
) -> Card:
    """Read the card of a checkpoint with this layout. Raises CheckpointError if the user chose a `pooling`."""
    if pooling is not None:
        raise CheckpointError("says that each token gives a vector; leave out --pooling.", file="config.json")
    rows = [("Transformer", "")] if layout == "stanford" else modules.read_modules(folder, _KINDS)
    if layout != "sentence_transformers":
        rows = [row for row in rows if row[0] != "Dropout"]
    kinds = [kind for kind, _ in rows]
    if kinds[:1] != ["Transformer"] or "Transformer" in kinds[1:]:
        raise CheckpointError(f"must begin with one Transformer, is {kinds}.", file=MODULES)
    path = rows[0][1]
    root = folder / path
    config = reader.read_config(root)
    if layout == "stanford":
        config.ignore(*_DIMENSIONS)
    encoder = reader.read_encoder(config)
    files = JsonFile.read_optional(root, "tokenizer_config.json")
    used = _LENGTHS if layout == "sentence_transformers" else ()
    transformer = JsonFile("", {}) if layout == "stanford" else modules.read_transformer(root, used=used)
    lowercase = transformer.get("do_lower_case", bool, False)
    tokenizer = read_tokenizer(folder, path, config, files, reading=reading, lowercase=lowercase)
    ids, roles = read_vocabulary(root, tokenizer, encoder.vocab_size)
    card = Card(name, path, encoder, {}, encoder.max_positions, tokenizer, similarity="maxsim")
    return _READERS[layout](_Base(folder, rows[1:], config, transformer, files, card, encoder, ids, roles))


def read_expansion(
    base: _Base, file: JsonFile, keys: tuple[str, str], length: int, *, token_id: int, attended: bool
) -> QueryExpansion:
    """Return the expansion. Raises CheckpointError if it is not supported. `keys` name the length and `attended`."""
    if length > (limit := min(_MAX_EXPANSION, base.encoder.max_positions)):
        raise file.error(f"every query would be filled up to {length:,} tokens; the limit is {limit:,}.", keys[0])
    encoder = base.encoder
    windows = [layer.window for layer in encoder.layers if layer.window is not None]
    sees_all = encoder.layers and min(windows, default=length) >= length - 1
    if not attended and not sees_all:
        message = (
            "tokens that fill up a query and are not attended to are not supported in a model that transformers runs, "
            f"or whose window is narrower than the {length:,} tokens of a query: some might see nothing."
        )
        raise file.error(message, keys[1])
    return QueryExpansion(token_id, length, attended)


def _fill_token(base: _Base, file: JsonFile, key: str) -> int:
    """Return the id of the default expansion token: the mask, or the end of a text."""
    token = base.roles.get("mask", base.roles.get("eos"))
    if token is None:
        raise file.error("queries are filled up, but the tokenizer has neither a mask nor an end of text.", key)
    return base.token_id(token, file, key)


def _read_similarity(file: JsonFile) -> str:
    return file.choice("similarity_fn_name", _SIMILARITIES) if file.data.get("similarity_fn_name") else "maxsim"


def _read_stanford(base: _Base) -> Card:
    """Read Stanford's layout, with the defaults of ColBERTConfig and the head's weights among the transformer's.

    A padding token in a text becomes an expansion token in a query, and has no vector in a document.
    """
    file = JsonFile.read(base.folder, _METADATA)
    file.require_values(_FIXED_METADATA)
    width = file.positive("dim", 128)
    base.config.require_values(dict.fromkeys(_DIMENSIONS, (width, None)))
    keys = ("query_maxlen", "attend_to_mask_tokens")
    length, attended = file.positive("query_maxlen", 32), file.get("attend_to_mask_tokens", bool, False)
    token_id = _fill_token(base, file, "query_maxlen")
    pad_id = base.ids.get(base.roles.get("pad", ""))
    expansion = replace(read_expansion(base, file, keys, length, token_id=token_id, attended=attended), stands_for=pad_id)
    query_marker = base.token_id(file.get("query_token_id", str, "[unused0]"), file, "query_token_id")
    document_marker = base.token_id(file.get("doc_token_id", str, "[unused1]"), file, "doc_token_id")
    document = base.text_format(file.positive("doc_maxlen", 220), document_marker)
    skips = string.punctuation if file.get("mask_punctuation", bool, True) else ""
    skip_ids = {*base.ids_of(_first_pieces(base, skips)), *([] if pad_id is None else [pad_id])}
    file.reject_unread_keys(_INERT_METADATA)
    head = Dense(None, "linear", base.encoder.hidden_size, width, bias=False, activation="identity")
    output = token_output(width, (head,), skip_ids)
    return base.card_of(output, base.text_format(expansion.length, query_marker, expansion), document)


def _first_pieces(base: _Base, words: Iterable[str]) -> list[str]:
    """Return the first token of each word's encoding. SentencePiece puts a space before, in the same token if likelier."""
    model = cast(dict[str, Any], read_tokenizer_file(base.folder / base.card.path).get("model", dict))
    if model.get("type") != "Unigram":
        return list(words)
    scores: dict[str, float] = {row[0]: row[1] for row in model["vocab"]}
    space = "\u2581"

    def first(word: str) -> str:
        joint, parts = scores.get(space + word), [scores.get(space), scores.get(word)]
        separate = None if None in parts else sum(cast(list[float], parts))
        return space + word if joint is not None and (separate is None or joint >= separate) else space

    return [first(word) for word in words]


def _read_pylate(base: _Base) -> Card:
    """Read PyLate's layout, with the defaults of ColBERT.__init__."""
    if not base.modules or any(kind != "Dense" for kind, _ in base.modules):
        raise CheckpointError(f"must be a Transformer and Dense layers, is {[kind for kind, _ in base.modules]}.", file=MODULES)
    file = JsonFile.read(base.folder, SENTENCE)
    file.reject_unknown_keys(_PYLATE_KEYS, modules.KNOWN_SENTENCE)
    file.require_values({"truncate_dim": (None,)})
    prompts, default = modules.read_prompts(file)
    markers: dict[InputType, int | None] = {}
    for kind, marker in _MARKERS.items():
        prefix = file.get(f"{kind}_prefix", str, marker)
        markers[kind] = base.token_id(prefix, file, f"{kind}_prefix") if prefix else None
        if kind in prompts:  # newer files repeat the prefix there
            prompts[kind] = prompts[kind].removeprefix(prefix)
    length, attended = file.positive("query_length", 32), file.get("attend_to_expansion_tokens", bool, False)
    expansion = None
    if file.get("do_query_expansion", bool, True):
        token_id = _fill_token(base, file, "do_query_expansion")
        keys = ("query_length", "attend_to_expansion_tokens")
        expansion = read_expansion(base, file, keys, length, token_id=token_id, attended=attended)
    states = chained.tokens(base.encoder.hidden_size)
    dense = chained.resolve_features(base.folder, base.modules, states, "token_embeddings", of_dense="token_embeddings")
    skip_ids = base.ids_of(read_words(file, default=list(string.punctuation)))
    card = base.card_of(
        token_output(dense.width, dense.token_head, skip_ids),
        base.text_format(length, markers["query"], expansion),
        base.text_format(file.positive("document_length", 180), markers["document"]),
    )
    return replace(card, prompts=prompts, default_prompt_name=default, similarity=_read_similarity(file))


def _read_multi_vector_encoder(base: _Base) -> Card:
    file = JsonFile.read(base.folder, SENTENCE)
    file.reject_unknown_keys(modules.KNOWN_SENTENCE)
    file.require_values({"truncate_dim": (None,)})
    expansion = _stated_query_expansion(base)
    width = base.encoder.hidden_size
    output = read_token_chain(base.folder, base.modules, width, ids_of=base.ids_of, fills_up=expansion is not None)
    limit = modules.read_max_length(base.encoder, base.transformer, base.tokenizer)
    query = base.text_format(_query_length(base.transformer, expansion, limit), None, expansion)
    card = base.card_of(output, query, base.text_format(base.transformer.positive("document_length", limit)))
    prompts, default = modules.read_prompts(file)
    return replace(card, prompts=prompts, default_prompt_name=default, similarity=_read_similarity(file))


def _stated_query_expansion(base: _Base) -> QueryExpansion | None:
    key = "query_expansion"
    if base.transformer.data.get(key) is None:
        return None
    file = JsonFile(f"{base.transformer.name}: {key}", base.transformer.data[key])
    file.reject_unknown_keys({"strategy", "attend", "token", "length"})
    file.choice("strategy", {"fixed": True, "min": True})
    token, length = file.data.get("token"), file.positive("length")
    token_id = _fill_token(base, file, "token") if token is None else base.token_id(token, file, "token")
    attended = file.get("attend", bool, False)
    return read_expansion(base, file, ("length", "attend"), length, token_id=token_id, attended=attended)


def _query_length(transformer: JsonFile, expansion: QueryExpansion | None, default: int) -> int:
    """Return the limit of queries, which a "fixed" expansion sets and a "min" expansion does not."""
    length = transformer.positive("query_length", default)
    if expansion is None:
        return length
    if transformer.data.get("query_length") is not None and length < expansion.length:
        raise transformer.error(f"is {length}, but queries are filled up to {expansion.length}.", "query_length")
    is_fixed = transformer.data["query_expansion"]["strategy"] == "fixed"
    return expansion.length if is_fixed else max(length, expansion.length)


_READERS: Final[Mapping[Layout, Callable[[_Base], Card]]] = {
    "stanford": _read_stanford,
    "pylate": _read_pylate,
    "sentence_transformers": _read_multi_vector_encoder,
}
