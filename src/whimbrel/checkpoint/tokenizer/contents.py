"""Contents of tokenizer.json in the reading that the card states: as transformers 5 or 4, or as it is."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from whimbrel.checkpoint.json_file import JSON
from whimbrel.checkpoint.tokenizer.classes import read_as_class, read_tokens, vocabulary, with_ids
from whimbrel.checkpoint.tokenizer.config import read_tokenizer_file
from whimbrel.checkpoint.tokenizer.version4 import read_as_version_4
from whimbrel.types.card import TokenizerCard, TokenizerReading


def read_content(file: JSON, card: TokenizerCard, vocab_size: int) -> JSON:
    """Return tokenizer.json as the card says to read it. The model embeds `vocab_size` tokens. Raises CheckpointError."""
    return _READINGS[card.reading](file, card, vocab_size)


def read_vocabulary(root: Path, card: TokenizerCard, vocab_size: int) -> tuple[Mapping[str, int], Mapping[str, str]]:
    """Return (token -> id with added tokens, role -> special token) of the tokenizer that `read_content` makes."""
    file = read_tokenizer_file(root).data
    tokens, _ = read_tokens(file, card, vocab_size)
    if card.reading != "file":
        return tokens.ids, tokens.names
    added = read_as_stored(file, card, vocab_size)["added_tokens"]
    return {**vocabulary(file), **{token["content"]: token["id"] for token in added}}, tokens.names


def read_as_stored(file: JSON, _: TokenizerCard, vocab_size: int) -> JSON:
    """Return tokenizer.json without added tokens that the model does not embed."""
    return file | {"added_tokens": list(with_ids(file.get("added_tokens") or (), file, vocab_size))}


_READINGS: Final[Mapping[TokenizerReading, Callable[[JSON, TokenizerCard, int], JSON]]] = {
    "transformers": read_as_class,
    "transformers-4": read_as_version_4,
    "file": read_as_stored,
}
