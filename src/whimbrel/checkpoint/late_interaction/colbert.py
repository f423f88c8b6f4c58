"""Settings files of late-interaction models.

Stanford's ColBERT has artifact.metadata. PyLate has config_sentence_transformers.json. MultiVectorEncoder of Sentence
Transformers has both that file and sentence_bert_config.json, and its own modules. `layouts.py` names the sources.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.checkpoint.late_interaction.chain import read_token_chain, read_words
from whimbrel.checkpoint.sentence_transformers import modules
from whimbrel.checkpoint.sentence_transformers.chained import CHAINED, resolve_features, tokens, without_norm
from whimbrel.checkpoint.sentence_transformers.modules import MODULES, SENTENCE, Rows
from whimbrel.checkpoint.tokenizer.config import read_tokenizer_file
from whimbrel.errors import CheckpointError
from whimbrel.types.card import Encoder, QueryExpansion, TextFormat, TokenizerCard
from whimbrel.types.heads import Dense, Head
from whimbrel.types.late_interaction import StatedPooling
from whimbrel.types.request import InputType

METADATA: Final = "artifact.metadata"

_SIMILARITIES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("MaxSim", "maxsim", "cosine"), "maxsim"),  # "cosine": of the base class, and unused
    "meanmaxsim": "meanmaxsim",
}
_MAX_EXPANSION: Final = 1024
"""Limit of query expansion in tokens, so that a short query does not cost as much as a long document."""
PYLATE_KEYS: Final = frozenset(
    """
    query_prefix document_prefix query_length document_length do_query_expansion attend_to_expansion_tokens skiplist_words
""".split()
)
# Keys of artifact.metadata that do not change a vector: training, index and search.
_INERT_METADATA: Final = """
    accumsteps amp avoid_fork_if_possible bsize centroid_score_threshold checkpoint clustering_mode collection
    distillation_alpha doc_token experiment gpus ignore_scores index_bsize index_name index_path index_root kmeans_niters
    load_index_with_mmap lr maxsteps meta model_name name nbits ncells ndocs nranks num_partitions_max nway overwrite
    protected_tokens queries query_token rank reranker resume root save_every total_visible_gpus triples use_ib_negatives
    warmup warmup_bert
""".split()
_FIXED_METADATA: Final[Mapping[str, tuple[object, ...]]] = {
    "interaction": ("colbert", None),
    "pool_factor": (1, None),
    "relu": (False, None),
    "similarity": ("cosine", None),
}
DIMENSIONS: Final = ("dim", "colbert_dim", "projection_dim")
"""Keys of config.json in Stanford's layout that may repeat the width."""


@dataclass(frozen=True, slots=True)
class Base:
    """The files and settings that all layouts share."""

    folder: Path
    path: str
    modules: Rows
    config: JsonFile
    encoder: Encoder
    transformer: JsonFile
    tokenizer: JsonFile
    tokenizer_card: TokenizerCard
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

    def heads(self) -> tuple[tuple[Head, ...], bool]:
        """Return (heads of each token's vector, whether the vectors are normalised at last)."""
        rows = [row for row in self.modules if row[0] in CHAINED]
        features, target = tokens(self.encoder.hidden_size), "token_embeddings"
        return without_norm(resolve_features(self.folder, rows, features, target, of_dense=target).token_head)

    def ids_of(self, words: Iterable[str]) -> tuple[int, ...]:
        """Return the ids of the words that are tokens."""
        return tuple(sorted({self.ids[word] for word in words if word in self.ids}))


@dataclass(frozen=True, slots=True)
class ParsedLayout:
    text_formats: Mapping[InputType, TextFormat]
    head: tuple[Head, ...]
    skip_ids: tuple[int, ...]
    query_skip_ids: tuple[int, ...] = ()
    keep_ids: tuple[int, ...] = ()
    activated: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt_name: str | None = None
    similarity: str = "maxsim"
    token_pooling: Mapping[InputType, StatedPooling] = field(default_factory=dict[InputType, StatedPooling])


def read_expansion(
    base: Base, file: JsonFile, keys: tuple[str, str], length: int, *, token_id: int, attended: bool
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


def _fill_token(base: Base, file: JsonFile, key: str) -> int:
    """Return the id of the default expansion token: the mask, or the end of a text."""
    token = base.roles.get("mask", base.roles.get("eos"))
    if token is None:
        raise file.error("queries are filled up, but the tokenizer has neither a mask nor an end of text.", key)
    return base.token_id(token, file, key)


def _read_similarity(file: JsonFile) -> str:
    return file.choice("similarity_fn_name", _SIMILARITIES) if file.data.get("similarity_fn_name") else "maxsim"


def read_stanford(base: Base) -> ParsedLayout:
    """Read Stanford's layout, with the defaults of ColBERTConfig and the head's weights among the transformer's.

    A padding token in a text becomes an expansion token in a query, and has no vector in a document.
    """
    file = JsonFile.read(base.folder, METADATA)
    file.require_values(_FIXED_METADATA)
    width = file.positive("dim", 128)
    base.config.require_values(dict.fromkeys(DIMENSIONS, (width, None)))
    keys = ("query_maxlen", "attend_to_mask_tokens")
    length, attended = file.positive("query_maxlen", 32), file.get("attend_to_mask_tokens", bool, False)
    token_id = _fill_token(base, file, "query_maxlen")
    pad_id = base.ids.get(base.roles.get("pad", ""))
    expansion = replace(read_expansion(base, file, keys, length, token_id=token_id, attended=attended), stands_for=pad_id)
    query_marker = base.token_id(file.get("query_token_id", str, "[unused0]"), file, "query_token_id")
    document_marker = base.token_id(file.get("doc_token_id", str, "[unused1]"), file, "doc_token_id")
    text_formats: dict[InputType, TextFormat] = {
        "query": base.text_format(expansion.length, query_marker, expansion),
        "document": base.text_format(file.positive("doc_maxlen", 220), document_marker),
    }
    skips = string.punctuation if file.get("mask_punctuation", bool, True) else ""
    skip_ids = {*base.ids_of(_first_pieces(base, skips)), *([] if pad_id is None else [pad_id])}
    file.reject_unread_keys(_INERT_METADATA)
    head = Dense(None, "linear", base.encoder.hidden_size, width, bias=False, activation="identity")
    return ParsedLayout(text_formats, (head,), tuple(sorted(skip_ids)))


def _first_pieces(base: Base, words: Iterable[str]) -> list[str]:
    """Return the first token of each word's encoding. SentencePiece puts a space before, in the same token if likelier."""
    model = cast(dict[str, Any], read_tokenizer_file(base.folder / base.path).get("model", dict))
    if model.get("type") != "Unigram":
        return list(words)
    scores: dict[str, float] = {row[0]: row[1] for row in model["vocab"]}
    space = "\u2581"

    def first(word: str) -> str:
        joint, parts = scores.get(space + word), [scores.get(space), scores.get(word)]
        separate = None if None in parts else sum(cast(list[float], parts))
        return space + word if joint is not None and (separate is None or joint >= separate) else space

    return [first(word) for word in words]


def read_pylate(base: Base) -> ParsedLayout:
    """Read PyLate's layout, with the defaults of ColBERT.__init__."""
    if not base.modules or any(kind != "Dense" for kind, _ in base.modules):
        raise CheckpointError(f"must be a Transformer and Dense layers, is {[kind for kind, _ in base.modules]}.", file=MODULES)
    file = JsonFile.read(base.folder, SENTENCE)
    file.reject_unknown_keys(PYLATE_KEYS, modules.KNOWN_SENTENCE)
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
        token_id = _fill_token(base, file, "do_query_expansion")
        keys = ("query_length", "attend_to_expansion_tokens")
        expansion = read_expansion(base, file, keys, length, token_id=token_id, attended=attended)
    text_formats: dict[InputType, TextFormat] = {
        "query": base.text_format(length, marker_ids["query"], expansion),
        "document": base.text_format(file.positive("document_length", 180), marker_ids["document"]),
    }
    prompts, default = modules.read_prompts(file)
    for kind, prefix in prefixes.items():  # which newer files repeat in the prompts
        if kind in prompts:
            prompts[kind] = prompts[kind].removeprefix(prefix)
    head, skip_ids = base.heads()[0], base.ids_of(read_words(file, default=list(string.punctuation)))
    similarity = _read_similarity(file)
    return ParsedLayout(text_formats, head, skip_ids, prompts=prompts, default_prompt_name=default, similarity=similarity)


def read_multi_vector_encoder(base: Base) -> ParsedLayout:
    file = JsonFile.read(base.folder, SENTENCE)
    file.reject_unknown_keys(modules.KNOWN_SENTENCE)
    file.require_values({"truncate_dim": (None,)})
    expansion = _stated_query_expansion(base)
    width = base.encoder.hidden_size
    chain = read_token_chain(base.folder, base.modules, width, ids_of=base.ids_of, fills_up=expansion is not None)
    limit = modules.read_max_length(base.encoder, base.transformer, base.tokenizer)
    text_formats: dict[InputType, TextFormat] = {
        "query": base.text_format(_query_length(base.transformer, expansion, limit), None, expansion),
        "document": base.text_format(base.transformer.positive("document_length", limit)),
    }
    prompts, default = modules.read_prompts(file)
    return ParsedLayout(
        text_formats,
        chain.head,
        chain.skip_ids,
        chain.query_skip_ids,
        chain.keep_ids,
        chain.activated,
        prompts,
        default,
        _read_similarity(file),
        chain.token_pooling,
    )


def _stated_query_expansion(base: Base) -> QueryExpansion | None:
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
