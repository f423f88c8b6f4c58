"""Shared types and readers of late-interaction layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.checkpoint.sentence_transformers.heads import CHAINED, resolve_features, tokens, without_norm
from whimbrel.checkpoint.sentence_transformers.modules import Rows
from whimbrel.types.card import Encoder, QueryExpansion, TextFormat, TokenizerCard
from whimbrel.types.heads import Head
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.request import InputType

METADATA: Final = "artifact.metadata"

_SIMILARITIES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("MaxSim", "maxsim", "cosine"), "maxsim"),  # "cosine": of the base class, and unused
    "meanmaxsim": "meanmaxsim",
}
_MAX_EXPANSION: Final = 1024
"""Limit of query expansion in tokens, so that a short query does not cost as much as a long document."""


@dataclass(frozen=True, slots=True)
class Base:
    """The files and settings that all layouts share."""

    folder: Path
    path: str
    modules: Rows
    """Modules after the Transformer."""
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

    def form(self, max_length: int, marker_id: int | None = None, expansion: QueryExpansion | None = None) -> TextFormat:
        return TextFormat(min(max_length, self.encoder.max_positions), marker_id, expansion)

    def heads(self) -> tuple[tuple[Head, ...], bool]:
        """Return (heads of each token's vector, whether the vectors are normalised at last)."""
        rows = [row for row in self.modules if row[0] in CHAINED]
        features, target = tokens(self.encoder.hidden_size), "token_embeddings"
        return without_norm(resolve_features(self.folder, rows, features, target, of_dense=target).token_head)

    def known(self, words: Iterable[str]) -> tuple[int, ...]:
        """Return the ids of the words that are tokens."""
        return tuple(sorted({self.ids[word] for word in words if word in self.ids}))


@dataclass(frozen=True, slots=True)
class ParsedLayout:
    forms: Mapping[InputType, TextFormat]
    head: tuple[Head, ...]
    skip_ids: tuple[int, ...]
    skip_in_queries: bool = False
    finished: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt_name: str | None = None
    similarity: str = "maxsim"
    token_pooling: TokenPooling | None = None


def read_expansion(
    base: Base, file: JsonFile, keys: tuple[str, str], length: int, *, token_id: int, attended: bool
) -> QueryExpansion:
    """Return the expansion. Raises CheckpointError if it is not supported. `keys` name the length and `attended`."""
    if length > (limit := min(_MAX_EXPANSION, base.encoder.max_positions)):
        raise file.error(f"every query would be filled up to {length:,} tokens; the limit is {limit:,}.", keys[0])
    encoder = base.encoder
    windows = [layer.window for layer in encoder.layers if layer.window is not None]
    sees_all = encoder.layers and not encoder.causal and min(windows, default=length) >= length - 1
    if not attended and not sees_all:
        message = (
            "tokens that fill up a query and are not attended to are not supported in a model that is causal, that "
            f"transformers runs, or whose window is narrower than the {length:,} tokens of a query: some might see nothing."
        )
        raise file.error(message, keys[1])
    return QueryExpansion(token_id, length, attended)


def fill_token(base: Base, file: JsonFile, key: str) -> int:
    """Return the id of the default expansion token: the mask, or the end of a text."""
    token = base.roles.get("mask", base.roles.get("eos"))
    if token is None:
        raise file.error("queries are filled up, but the tokenizer has neither a mask nor an end of text.", key)
    return base.token_id(token, file, key)


def read_similarity(file: JsonFile) -> str:
    return file.choice("similarity_fn_name", _SIMILARITIES) if file.data.get("similarity_fn_name") else "maxsim"


def read_words(file: JsonFile, default: list[str]) -> list[str]:
    words = cast(list[object], file.get("skiplist_words", list, default))
    if not all(isinstance(word, str) for word in words):
        raise file.error("must be a list of strings.", "skiplist_words")
    return cast(list[str], words)
