"""Hugging Face `tokenizers` backend.

Loads the tokenizer without the padding and truncation of its file, and encodes many texts at a time. Errors and panics of the
library become errors that name the text of the request. Knows nothing of special tokens or limits per text.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Final

import numpy as np
import tokenizers

from whimbrel.checkpoint.tokenizer.config import read_tokenizer_file
from whimbrel.checkpoint.tokenizer.contents import read_content
from whimbrel.checkpoint.tokenizer.growth import check_growth
from whimbrel.errors import CheckpointError, InvalidRequest, Location, TooLarge
from whimbrel.tokenizer.validation import MAX_CHARACTERS, Index, Indices
from whimbrel.types.arrays import Int32Array
from whimbrel.types.card import Card
from whimbrel.types.seq import TokenInfo

_FILE: Final = "tokenizer.json"

_RARE: Final = "\U00012000\U0001f9ff"
"""Two characters that few vocabularies have. A tokenizer must have a token for unknown characters."""


def load_tokenizer(folder: Path, card: Card) -> tokenizers.Tokenizer:
    """Load the checkpoint's tokenizer in the card's reading of tokenizer.json. Raises CheckpointError."""
    file = read_tokenizer_file(folder / card.path).data
    try:
        as_stored = card.tokenizer.static is not None and card.tokenizer.static.as_stored
        content = file if as_stored else read_content(file, card.tokenizer, card.encoder.vocab_size)
        check_growth(content)
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        if card.tokenizer.reading == "transformers" and card.tokenizer.tokenizer_class in _UNIGRAM:
            model = content["model"]  # the backend's JSON parser gets one score in forty wrong in the last bit (0|00 or 00|0)
            vocab = [(token, score) for token, score in model["vocab"]]
            tokenizer.model = tokenizers.models.Unigram(vocab, model["unk_id"], model["byte_fallback"])
        tokenizer.encode(_RARE)
    except BaseException as error:
        if isinstance(error, CheckpointError) or not (isinstance(error, Exception) or _is_backend_error(error)):
            raise
        raise CheckpointError(f"cannot be read by tokenizers {tokenizers.__version__}: {error}.", file=_FILE) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if (vocab_size := tokenizer.get_vocab_size()) > card.encoder.vocab_size:
        embedded = f"the model embeds {card.encoder.vocab_size:,} (config.json: vocab_size)"
        raise CheckpointError(f"has {vocab_size:,} tokens; {embedded}.", file=_FILE)
    return tokenizer


_UNIGRAM: Final = ("AlbertTokenizer", "CamembertTokenizer", "DebertaV2Tokenizer", "XLMRobertaTokenizer")
"""Tokenizer classes that pass the scores of pieces to the backend as numbers."""


class BackendTokenizer:
    """Encodes texts as ids. Thread-safe, because nothing reconfigures it."""

    def __init__(self, raw: tokenizers.Tokenizer, *, special: bool, max_characters: int) -> None:
        """`special`: whether special tokens surround texts. `max_characters`: the limit for all texts of a request together."""
        self.raw = raw
        self._special = special
        self._max_characters = max_characters

    def ids(self, texts: Sequence[str], prompt: str = "", *, indices: Indices = None, special: bool = True) -> list[Int32Array]:
        """Return the ids of prompt + text for each text. Errors locate the texts by `indices`, or as item 0 and so on."""
        slices = self.encode_batches(texts, prompt, indices=indices, special=special)
        return [row for encodings in slices for row in _flat([encoding.ids for encoding in encodings])]

    def encode_pieces(self, rows: Sequence[Sequence[Int32Array | str]]) -> list[list[Int32Array]]:
        """Return the ids of each text in rows of texts, without special tokens; ids among them stay. Equal texts run once."""
        first: dict[str, Index] = {}
        for index, row in enumerate(rows):
            for part, text in enumerate(piece for piece in row if isinstance(piece, str)):
                first.setdefault(text, (index, part))
        ids = dict(zip(first, self.ids(list(first), indices=list(first.values()), special=False), strict=True))
        return [[ids[piece] if isinstance(piece, str) else piece for piece in row] for row in rows]

    def encode_batches(
        self,
        texts: Sequence[str],
        prompt: str = "",
        *,
        indices: Indices = None,
        special: bool = True,
        with_offsets: bool = False,
    ) -> Iterator[list[tokenizers.Encoding]]:
        """Yield the encodings of prompt + text in slices. They have character offsets only if `with_offsets`."""
        sizes = [len(prompt) + len(text) for text in texts]
        self.check_sizes(sizes, indices)
        encode = self.raw.encode_batch if with_offsets else self.raw.encode_batch_fast
        for part in _slices(sizes):
            prompted = [prompt + text for text in texts[part]] if prompt else texts[part]
            try:
                encodings = encode(prompted, add_special_tokens=special and self._special)
            except BaseException as error:
                raise _refusal(error, texts, indices, prompt) from None
            yield encodings

    def encode_words(self, rows: Sequence[Sequence[str]]) -> list[tokenizers.Encoding]:
        """Return the encodings of texts that are split into words, each of which is tokenised alone. Raises InvalidRequest."""
        self.check_sizes([sum(map(len, row)) for row in rows])
        try:
            return self.raw.encode_batch(rows, is_pretokenized=True)
        except BaseException as error:
            raise _refusal(error, ["".join(row) for row in rows]) from None

    def tokens(self, texts: Sequence[str], prompt: str = "", *, special: bool = True) -> list[TokenInfo]:
        """Return ids, strings, offsets and special-token masks of prompt + text. Raises InvalidRequest and TooLarge."""
        slices = self.encode_batches(texts, prompt, special=special, with_offsets=True)
        return [_tokens(encoding) for encodings in slices for encoding in encodings]

    def texts(self, rows: Sequence[Int32Array], *, special: bool = True) -> list[str]:
        return self.raw.decode_batch([row.tolist() for row in rows], skip_special_tokens=not special)

    def check_sizes(self, sizes: Sequence[int], indices: Indices = None) -> None:
        """Raise TooLarge if texts of these sizes exceed the limits, in characters."""
        if (total := sum(sizes)) > self._max_characters:
            message = f"the texts have {total:,} characters, prompts included; the limit is {self._max_characters:,}."
            raise TooLarge(f"{message} Send fewer texts at once.", param="input")
        for index, size in enumerate(sizes):
            if size > MAX_CHARACTERS:
                message = f"the text has {size:,} characters, its prompt included; the limit is {MAX_CHARACTERS:,}. Split it."
                raise TooLarge(message, location=_location(index, indices))


def find_surrogate(texts: Sequence[str], indices: Indices = None, **before: str) -> InvalidRequest | None:
    """Return the error over the first text that is not Unicode, if there is one. The fields `before` are looked at first."""
    named = ((text, Location(name)) for name, text in before.items())
    numbered = ((text, _location(number, indices)) for number, text in enumerate(texts))
    for text, place in chain(named, numbered):
        try:
            text.encode()
        except UnicodeEncodeError:
            return InvalidRequest("holds a lone surrogate, which is not valid Unicode.", location=place)
    return None


def _location(text: int, indices: Indices) -> Location:
    return Location("input", text) if indices is None else Location("input", *indices[text])


def _refusal(error: BaseException, texts: Sequence[str], indices: Indices = None, prompt: str = "") -> BaseException:
    """Return the error over texts that the backend did not encode; `error` itself if the backend did not raise it."""
    if not _is_backend_error(error):
        return error
    return find_surrogate(texts, indices, prompt=prompt) or InvalidRequest(f"cannot be tokenised: {error}.", param="input")


def _is_backend_error(error: BaseException) -> bool:
    """Return whether the backend raised `error`: also bare Exception, and panics that do not derive from Exception."""
    return isinstance(error, TypeError | ValueError) or type(error) is Exception or type(error).__name__ == "PanicException"


def _slices(sizes: Sequence[int]) -> Iterator[slice]:
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
    bounds = [0, *accumulate(map(len, lists))]
    flat = np.fromiter(chain.from_iterable(lists), np.int32, bounds[-1])
    return [flat[start:end] for start, end in pairwise(bounds)]
