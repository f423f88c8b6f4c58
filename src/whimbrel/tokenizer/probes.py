"""Comparison of a tokenizer with its tokenizer.json, run as it is.

Programs that know only tokenizer.json, such as TEI, give the vectors of its ids. A fixed list of texts shows whether these are
the ids that we give.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

import tokenizers

from whimbrel.checkpoint.tokenizer.config import read_tokenizer_file
from whimbrel.checkpoint.tokenizer.contents import read_content
from whimbrel.errors import CheckpointError
from whimbrel.tokenizer.backend import load_tokenizer
from whimbrel.types.card import Card

Probe: TypeAlias = str | tuple[str, str]

TEXTS: Final = (
    "bird", "Two birds.", " a space before", "a space after ", "two  spaces", "three   spaces   each", "a line\nand another",
    "a paragraph\n\nand another", "a line of Windows\r\nand another", "\ta tab\tin it", "no\u00a0break", "UPPER and lower",
    "Ünïcode, café, straße", "ﬁne ½ ① ㎏", "don't, we'll, it's", "1234567 3.14159 100,000", "snake_case/path-name.txt",
    "https://example.org/a?b=1&c=2", "``quoted'' “quoted”", "日本語と中文", "한국어 עברית русский", "🙂🙂",
)  # fmt: skip
"""Texts that tokenizers' classes and files are known to read in different ways, after two that they mostly do not."""
_PAIR: Final = ("bird", "Two birds.")
_MAX_TOKENS: Final = 12


def compare_with_files(folder: Path, card: Card, loaded: Sequence[tokenizers.Tokenizer]) -> str:
    """Return how tokenizer.json, run as it is, differs from the towers' tokenizers over the probe texts; empty: not at all."""
    notes = (_compare(folder, tower, ours) for tower, ours in zip(card.towers or (card,), loaded, strict=True))
    return next((note for note in notes if note), "")


def _compare(folder: Path, card: Card, ours: tokenizers.Tokenizer) -> str:
    if card.tokenizer.reading == "file" or not (folder / card.path / "tokenizer.json").exists():
        return ""
    as_stored = replace(card, tokenizer=replace(card.tokenizer, reading="file"))
    content = read_tokenizer_file(folder / card.path).data
    contents = (read_content(content, each.tokenizer, each.encoder.vocab_size) for each in (card, as_stored))
    first, second = ({key: value for key, value in each.items() if key not in _NOT_RUN} for each in contents)
    if first == second:
        return ""
    try:
        theirs = load_tokenizer(folder, as_stored)
    except CheckpointError as error:
        return f"cannot be run as it is: {error}"
    probes: list[Probe] = [*TEXTS, *([_PAIR] if "scores" in card.outputs and card.template is None else [])]
    differing = [probe for probe in probes if _ids(ours, probe, card) != _ids(theirs, probe, card)]
    if not differing:
        return ""
    shown = min(differing, key=lambda probe: len(_ids(ours, probe, card)))
    example = f"{shown!r} is {_words(theirs, shown, card)}, here {_words(ours, shown, card)}"
    return f"gives other ids for {len(differing)} of {len(probes)} probe texts: {example}"


_NOT_RUN: Final = ("decoder", "padding", "truncation", "version")
"""Parts of tokenizer.json that do not matter for ids, or are not used."""


def _ids(tokenizer: tokenizers.Tokenizer, probe: Probe, card: Card) -> list[int]:
    special = card.tokenizer.static is None
    if isinstance(probe, str):
        return tokenizer.encode(probe, add_special_tokens=special).ids
    return tokenizer.encode(*probe, add_special_tokens=special).ids


def _words(tokenizer: tokenizers.Tokenizer, probe: Probe, card: Card) -> str:
    """Return the tokens of a text, in brackets."""
    ids = _ids(tokenizer, probe, card)
    tokens = [tokenizer.id_to_token(number) or f"<{number}>" for number in ids[:_MAX_TOKENS]]
    return f"[{' '.join(tokens)}{' ...' if len(ids) > _MAX_TOKENS else ''}]"
