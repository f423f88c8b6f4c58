"""Hugging Face's `tokenizers`: loaded without what its file says of padding and truncation, and given many texts at a time.

Its errors over a text, which may be panics, become errors that say which text of the request it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers

from whimbrel.checkpoint.tokenizer.classes import read_as_class
from whimbrel.checkpoint.tokenizer.vocabulary import read_tokenizer_file
from whimbrel.errors import CheckpointError, InvalidRequest
from whimbrel.tokenizer.truncation import MAX_CHARACTERS, Index, check_characters, location_of
from whimbrel.types.arrays import Int32Array
from whimbrel.types.card import Card
from whimbrel.types.seq import TokenInfo

_FILE: Final = "tokenizer.json"

_RARE: Final = "\U00012000\U0001f9ff"
"""Two characters that few vocabularies have: a tokenizer must have a token for what it does not know."""


def load_tokenizer(folder: Path, card: Card) -> tokenizers.Tokenizer:
    """The checkpoint's tokenizer, as its class reads tokenizer.json. Raises CheckpointError."""
    file = read_tokenizer_file(folder / card.path).data
    try:
        as_stored = card.tokenizer.static is not None and card.tokenizer.static.as_stored
        content = file if as_stored else read_as_class(file, card.tokenizer, card.encoder.vocab_size)
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        if card.tokenizer.tokenizer_class in _UNIGRAM:
            tokenizer.model = _exact_unigram(content["model"])
        tokenizer.encode(_RARE)
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_of_the_binding(error):
            raise
        raise CheckpointError(f"cannot be read by tokenizers {tokenizers.__version__}: {error}.", file=_FILE) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if (vocab_size := tokenizer.get_vocab_size()) > card.encoder.vocab_size:
        raise CheckpointError(
            f"has {vocab_size:,} tokens; the model embeds {card.encoder.vocab_size:,} (config.json: vocab_size).", file=_FILE
        )
    return tokenizer


_UNIGRAM: Final = ("AlbertTokenizer", "CamembertTokenizer", "XLMRobertaTokenizer")
"""Classes that give tokenizers the scores of pieces as numbers."""


def _exact_unigram(model: dict[str, Any]) -> tokenizers.models.Model:
    """The model with its scores to the last bit, as such a class has them.

    tokenizers' own reading of JSON gets one score in forty wrong in the last bit, which then decides between 0|00 and 00|0.
    """
    vocab = [(token, score) for token, score in model["vocab"]]
    return tokenizers.models.Unigram(vocab, model["unk_id"], model["byte_fallback"])


class BackendTokenizer:
    """Texts -> ids. Safe to use from many threads, since nothing reconfigures it."""

    def __init__(self, raw: tokenizers.Tokenizer, *, special: bool, max_characters: int) -> None:
        """`special`: whether special tokens are put around texts. `max_characters`: of all texts of a request."""
        self.raw = raw
        self._special = special
        self._max_characters = max_characters

    def ids(
        self, texts: Sequence[str], prompt: str = "", *, indices: Sequence[Index] | None = None, special: bool = True
    ) -> list[Int32Array]:
        """The ids of prompt + text, for each text. `indices`: what the texts are to the request, for errors;
        None: item 0 and so on.

        Raises InvalidRequest and TooLarge.
        """
        slices = self.encode_batches(texts, prompt, indices=indices, special=special)
        return [row for encodings in slices for row in _flat([encoding.ids for encoding in encodings])]

    def encode_unique(self, rows: Iterable[Iterable[str]]) -> dict[str, Int32Array]:
        """The ids of each text in rows of texts, without special tokens. What occurs in many is tokenised once."""
        first: dict[str, Index] = {}
        for index, row in enumerate(rows):
            for part, text in enumerate(row):
                first.setdefault(text, (index, part))
        texts = list(first)
        return dict(zip(texts, self.ids(texts, indices=list(first.values()), special=False), strict=True))

    def encode_batches(
        self,
        texts: Sequence[str],
        prompt: str = "",
        *,
        indices: Sequence[Index] | None = None,
        special: bool = True,
        located: bool = False,
    ) -> Iterator[list[tokenizers.Encoding]]:
        """As `ids`, slice by slice; only if they are to be `located` do they know which characters their tokens are of."""
        sizes = [len(prompt) + len(text) for text in texts]
        self.check_sizes(sizes, indices)
        encode = self.raw.encode_batch if located else self.raw.encode_batch_fast
        for part in _slices(sizes):
            prompted = [prompt + text for text in texts[part]] if prompt else texts[part]
            try:
                encodings = encode(prompted, add_special_tokens=special and self._special)
            except BaseException as error:
                if not _is_of_the_binding(error):
                    raise
                found = find_surrogate(texts, indices, prompt=prompt)
                raise found or InvalidRequest(f"cannot be tokenised: {error}.", param="input") from None
            yield encodings

    def tokens(self, texts: Sequence[str], prompt: str = "", *, special: bool = True) -> list[TokenInfo]:
        """All there is to say of the tokens of prompt + text, for each text. Raises InvalidRequest and TooLarge."""
        found = self.encode_batches(texts, prompt, special=special, located=True)
        return [_tokens(encoding) for encodings in found for encoding in encodings]

    def texts(self, rows: Sequence[Int32Array], *, special: bool = True) -> list[str]:
        """What ids stand for, row by row."""
        return self.raw.decode_batch([row.tolist() for row in rows], skip_special_tokens=not special)

    def check_sizes(self, sizes: Sequence[int], indices: Sequence[Index] | None = None) -> None:
        """Refuse texts of so many characters if that is too much. Raises TooLarge."""
        check_characters(sizes, self._max_characters, indices)


def find_surrogate(texts: Sequence[str], indices: Sequence[Index] | None = None, **before: str) -> InvalidRequest | None:
    """Return the error over the first text that is not Unicode, if there is one. The fields `before` are looked at first."""
    for name, text in before.items():
        if not _is_unicode(text):
            return InvalidRequest(_SURROGATE, param=name)
    for number, text in enumerate(texts):
        if not _is_unicode(text):
            return InvalidRequest(_SURROGATE, location=location_of(number, indices))
    return None


_SURROGATE: Final = "holds a lone surrogate, which is no Unicode text."


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_of_the_binding(error: BaseException) -> bool:
    """tokenizers also raises bare Exception, and its panics, whose class it does not export, are no Exception at all."""
    return isinstance(error, TypeError | ValueError) or type(error) is Exception or type(error).__name__ == "PanicException"


def _slices(sizes: Sequence[int]) -> Iterator[slice]:
    """Neighbouring texts of together at most MAX_CHARACTERS."""
    start = total = 0
    for index, size in enumerate(sizes):
        if total + size > MAX_CHARACTERS and index > start:
            yield slice(start, index)
            start, total = index, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))


def _tokens(encoding: tokenizers.Encoding) -> TokenInfo:
    special_T = np.array(encoding.special_tokens_mask, np.bool_)
    return TokenInfo(np.array(encoding.ids, np.int32), tuple(encoding.tokens), special_T, np.array(encoding.offsets, np.int32))


def _flat(lists: list[list[int]]) -> list[Int32Array]:
    """Lists of ids -> views of one flat array."""
    sizes = np.fromiter(map(len, lists), np.int64, len(lists))
    flat = np.fromiter(chain.from_iterable(lists), np.int32, int(sizes.sum()))
    ends: list[int] = np.cumsum(sizes).tolist()
    return [flat[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
