"""Contents of tokenizer.json in the reading that the card states: as transformers 5 or 4, or as it is.

transformers 4 takes the whole of tokenizer.json. Some classes then set parts of it anew: the flags of BERT's normalizer, the
space before the first word, and the special tokens of a Llama or Gemma tokenizer, by `add_bos_token` and `add_eos_token`.

Source: transformers/tokenization_utils_fast.py, models/*/tokenization_*_fast.py and convert_slow_tokenizer.py (4.57).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from whimbrel.checkpoint.json_file import JSON
from whimbrel.checkpoint.tokenizer import classes
from whimbrel.checkpoint.tokenizer.config import read_tokenizer_file
from whimbrel.types.card import TokenizerCard
from whimbrel.types.choices import TokenizerReading


def read_content(file: JSON, card: TokenizerCard, vocab_size: int) -> JSON:
    """Return tokenizer.json as the card says to read it. The model embeds `vocab_size` tokens. Raises CheckpointError."""
    return _READINGS[card.reading](file, card, vocab_size)


def read_vocabulary(root: Path, card: TokenizerCard, vocab_size: int) -> tuple[Mapping[str, int], Mapping[str, str]]:
    """Return (token -> id with added tokens, role -> special token) of the tokenizer that `read_content` makes."""
    file = read_tokenizer_file(root).data
    tokens, _ = classes.read_tokens(file, card, vocab_size)
    if card.reading != "file":
        return tokens.ids, tokens.names
    added = read_as_stored(file, card, vocab_size)["added_tokens"]
    return {**classes.vocabulary(file), **{token["content"]: token["id"] for token in added}}, tokens.names


def read_as_stored(file: JSON, _: TokenizerCard, vocab_size: int) -> JSON:
    """Return tokenizer.json without added tokens that the model does not embed."""
    return file | {"added_tokens": list(classes.with_ids(file.get("added_tokens") or (), file, vocab_size))}


def read_as_version_4(file: JSON, card: TokenizerCard, vocab_size: int) -> JSON:
    """Return tokenizer.json as transformers 4 reads it, with the added tokens that the model embeds. Raises CheckpointError."""
    tokens, added = classes.read_tokens(file, card, vocab_size)
    parts: JSON = {}
    if card.tokenizer_class in ("BertTokenizer", "MPNetTokenizer"):
        parts["normalizer"] = _bert_normalizer(file.get("normalizer"), card)
    if card.tokenizer_class == "LlamaTokenizer" and card.add_prefix_space is not None:
        parts |= _llama_spaces(card)
    else:
        parts["pre_tokenizer"] = _byte_level(file.get("pre_tokenizer"), card)
    if card.flags is not None:
        parts["post_processor"] = classes.flags_template(card.flags, tokens)
    elif card.ends:
        parts["post_processor"] = classes.template("A eos", "A eos B:1 eos:1", tokens)
    return classes.lowercased(file | parts | {"added_tokens": added}, card)


def _bert_normalizer(normalizer: Any, card: TokenizerCard) -> Any:
    """Return the normalizer with the flags of tokenizer_config.json, where it has such flags. MPNet's class sets two."""
    if not isinstance(normalizer, dict):
        return normalizer
    stated: JSON = {"lowercase": card.do_lower_case, "strip_accents": card.strip_accents}
    if card.tokenizer_class == "BertTokenizer":
        stated["handle_chinese_chars"] = card.tokenize_chinese_chars
    own = cast(JSON, normalizer)
    return own | {key: value for key, value in stated.items() if key in own}


def _byte_level(pre_tokenizer: Any, card: TokenizerCard) -> Any:
    """Return the pre-tokenizer with `add_prefix_space`, where it has that flag itself and not within a sequence."""
    if isinstance(pre_tokenizer, dict) and "add_prefix_space" in (own := cast(JSON, pre_tokenizer)):
        return own | {"add_prefix_space": bool(card.add_prefix_space)}
    return cast(Any, pre_tokenizer)


def _llama_spaces(card: TokenizerCard) -> JSON:
    """Return the steps that transformers 4 makes anew where `add_prefix_space` is stated: those for Llama's tokenizer.model."""
    if card.legacy:
        prepend = [{"type": "Prepend", "prepend": classes.SPACE}] if card.add_prefix_space else []
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": classes.SPACE}
        return {"normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]}, "pre_tokenizer": None}
    pieces = classes.metaspace("first" if card.add_prefix_space else "never", split=False)
    return {"normalizer": None, "pre_tokenizer": pieces}


_READINGS: Final[Mapping[TokenizerReading, Callable[[JSON, TokenizerCard, int], JSON]]] = {
    "transformers": classes.read_as_class,
    "transformers-4": read_as_version_4,
    "file": read_as_stored,
}
