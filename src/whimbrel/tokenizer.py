"""Request -> [Seq]. Knows prompts, special tokens and truncation; knows nothing of batches.

Texts go through the tokenizer many at a time, whole; what is too long is cut here, between the special tokens that stand
around it, so one tokenizer, never reconfigured, serves all threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, cast

import numpy as np
import tokenizers

from whimbrel.card import Card, Form
from whimbrel.errors import CheckpointError, InvalidRequest, TooLarge, TooLong
from whimbrel.forms import give_form, is_fixed
from whimbrel.json_file import JsonFile
from whimbrel.plan import Plan
from whimbrel.tokenizer_file import read_as_class
from whimbrel.types import Int32Array, Int64Array, Request, Seq, Truncate

_FILE: Final = "tokenizer.json"

_RARE: Final = "\U00012000\U0001f9ff"
"""Two characters that few vocabularies have: a tokenizer must have a token for what it does not know."""

MAX_CHARACTERS: Final = 2**20
"""Of one text, prompt included. While it is tokenised a text takes up to some 400 bytes per character; texts are handed over
in slices of as many characters, so this bounds the memory of any request."""
_MAX_CHARACTERS_PER_TOKEN: Final = 32
"""A request may have so many times the characters that it may have tokens."""


class Tokenizer:
    """The tokenizer of one checkpoint. Safe to use from many threads."""

    def __init__(self, folder: Path, card: Card, plan: Plan) -> None:
        self._card = card
        self._includes_prompt = all(output.include_prompt for output in card.outputs.values())
        self._max_length = plan.max_length
        self._max_request_characters = _MAX_CHARACTERS_PER_TOKEN * plan.max_request_tokens
        self._tokenizer = _load(folder, card)
        vocab_size = self._tokenizer.get_vocab_size()
        if vocab_size > card.encoder.vocab_size:
            raise CheckpointError(
                f"has {vocab_size:,} tokens; the model embeds {card.encoder.vocab_size:,} (config.json: vocab_size).",
                file=_FILE,
            )
        self._prefix, self._suffix, self._type_id = _special_tokens(self._tokenizer, card)
        for form in (None, *card.forms.values()):
            least, usual, _ = self._lengths(form)
            if usual < least:
                raise CheckpointError(f"max length {usual} leaves no room: every text has {least} tokens or more.", file=_FILE)
        if self._prefix.size != 1 and any(form.marker_id is not None for form in card.forms.values()):
            raise CheckpointError("does not put one token before a text, after which its marker could come.", file=_FILE)

    def encode(self, request: Request) -> list[Seq]:
        """Tokenise all texts of a request.

        Raises InvalidRequest (wrong type, no tokens, id outside the vocabulary, unknown prompt), TooLarge and TooLong.
        """
        if len(request.texts) == 0:
            return []
        form = self._form(request)
        max_length = self._request_max_length(request, form)
        truncate: Truncate = request.truncate or self._card.tokenizer.truncate
        prompt_tokens = 0
        given_ids = isinstance(request.texts[0], np.ndarray)
        if given_ids:
            if request.prompt is not None or request.prompt_name is not None:
                raise InvalidRequest("a prompt cannot be put before token ids; send text.", param="prompt")
            rows = self._check_ids(cast(Sequence[Int64Array], request.texts))
        else:
            prompt = self._prompt(request)
            rows = self._encode_texts(_check_texts(cast(Sequence[object], request.texts)), prompt)
            prompt_tokens = 0 if self._includes_prompt or not prompt else self._count_prompt_tokens(prompt)
        if form is not None and form.marker_id is not None and not given_ids:
            max_length -= 1
        adapter = self._card.adapter(request.prompt_name)
        seqs = [self._seq(ids, index, prompt_tokens, max_length, truncate, adapter=adapter) for index, ids in enumerate(rows)]
        if form is None:
            return seqs
        is_query = request.input_type == "query"
        return [give_form(seq, None if given_ids else form, is_query=is_query) for seq in seqs]

    def _form(self, request: Request) -> Form | None:
        forms = self._card.forms
        if forms and request.input_type not in forms:
            raise InvalidRequest(
                'this model treats queries and documents differently; say input_type="query" or "document".',
                param="input_type",
            )
        return None if request.input_type is None else forms.get(request.input_type)

    @property
    def _least_length(self) -> int:
        return self._prefix.size + self._suffix.size + 1

    def _lengths(self, form: Form | None) -> tuple[int, int, int]:
        """Tokens that a text may have: the least that may be asked for, as many as it has if nothing is, and the most."""
        least, most = self._least_length, self._max_length
        if form is None:
            return least, most, most
        least += form.marker_id is not None
        if form.expansion is not None:
            least = max(least, form.expansion.length)
        return least, min(form.max_length, most), form.max_length if is_fixed(form) else most

    def _request_max_length(self, request: Request, form: Form | None) -> int:
        least, usual, most = self._lengths(form)
        if request.max_tokens is None:
            return usual
        if not least <= request.max_tokens <= most:
            raise InvalidRequest(
                f"{request.max_tokens:,} tokens per text; this model takes {least} to {most:,}.",
                param="truncate_prompt_tokens",
            )
        return request.max_tokens

    def _prompt(self, request: Request) -> str:
        if request.prompt is not None:
            return request.prompt
        name = request.prompt_name or self._card.prompt_for(request.input_type)
        return "" if name is None else self._card.prompt_text(name)

    def _encode_texts(self, texts: Sequence[str], prompt: str) -> list[Int32Array]:
        sizes = [len(prompt) + len(text) for text in texts]
        if (total := sum(sizes)) > self._max_request_characters:
            raise TooLarge(
                f"the texts have {total:,} characters, prompts included; the limit is {self._max_request_characters:,}. "
                "Send fewer texts at once.",
                param="input",
            )
        for index, size in enumerate(sizes):
            if size > MAX_CHARACTERS:
                raise TooLarge(
                    f"the text has {size:,} characters, its prompt included; the limit is {MAX_CHARACTERS:,}. Split it.",
                    param=f"input[{index}]",
                )
        rows: list[Int32Array] = []
        for part in _slices(sizes):
            prompted = [prompt + text for text in texts[part]] if prompt else texts[part]
            try:
                encodings = self._tokenizer.encode_batch_fast(prompted)
            except BaseException as error:
                if not _is_of_the_binding(error):
                    raise
                raise _culprit(texts, prompt, error) from None
            rows += _split([encoding.ids for encoding in encodings])
        return rows

    def _count_prompt_tokens(self, prompt: str) -> int:
        """Sentence Transformers' count: the prompt alone, cut to the model's length, except a special token that closes it."""
        return min(len(self._tokenizer.encode(prompt).ids), self._max_length) - min(1, self._suffix.size)

    def _check_ids(self, texts: Sequence[Int64Array]) -> list[Int32Array]:
        vocab_size = self._card.encoder.vocab_size
        for index, ids in enumerate(texts):
            _check_row(ids, index)
            wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
            if wrong.size:
                raise InvalidRequest(
                    f"token id {ids[wrong[0]]:,} is outside the vocabulary of {vocab_size:,}. Were these ids made by "
                    "another model's tokenizer? Send text (LangChain: check_embedding_ctx_length=False).",
                    param=f"input[{index}][{wrong[0]}]",
                )
        return [ids.astype(np.int32) for ids in texts]

    def _seq(
        self, ids: Int32Array, index: int, prompt_tokens: int, max_length: int, truncate: Truncate, *, adapter: int
    ) -> Seq:
        """Cut `ids` to the limit, keeping the special tokens around them; token ids that came without are cut as they are."""
        if ids.size == 0:
            raise InvalidRequest("the text has no tokens.", param=f"input[{index}]")
        cut = ids.size > max_length
        if cut and truncate == "never":
            raise TooLong(
                f'the text has {ids.size:,} tokens; the limit is {max_length:,}. Pass truncate="right" to cut it.',
                param=f"input[{index}]",
            )
        if cut:
            prefix, suffix = self._prefix, self._suffix
            if not (_starts_with(ids, prefix) and _ends_with(ids, suffix)):
                prefix = suffix = ids[:0]
            body = ids[prefix.size : ids.size - suffix.size]
            room = max_length - prefix.size - suffix.size
            body = body[:room] if truncate == "right" else body[body.size - room :]
            ids = np.concatenate((prefix, body, suffix))
        return Seq(ids, index, prompt_tokens, self._type_id, truncated=cut, adapter=adapter)


def _load(folder: Path, card: Card) -> tokenizers.Tokenizer:
    """The checkpoint's tokenizer without the padding and truncation that may be saved in its file."""
    file = JsonFile.read(folder / card.path, _FILE).data
    try:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(read_as_class(file, card.tokenizer, card.encoder.vocab_size)))
        tokenizer.encode(_RARE)
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_of_the_binding(error):
            raise
        raise CheckpointError(f"cannot be read by tokenizers {tokenizers.__version__}: {error}.", file=_FILE) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _special_tokens(tokenizer: tokenizers.Tokenizer, card: Card) -> tuple[Int32Array, Int32Array, int]:
    """What the post-processor puts before and after a text, and its token type: the same for every text, or refused."""
    found = {_around(tokenizer, probe) for probe in ("a", "the quick brown fox")}
    if len(found) != 1:
        raise CheckpointError("does not put the same tokens around every text.", file=_FILE, key="post_processor")
    prefix, suffix, type_ids = found.pop()
    type_id = max(type_ids) if card.encoder.type_vocab_size > 1 else 0
    if card.encoder.type_vocab_size > 1 and (len(set(type_ids)) != 1 or type_id >= card.encoder.type_vocab_size):
        raise CheckpointError(f"gives one text the token types {sorted(type_ids)}.", file=_FILE, key="post_processor")
    return np.array(prefix, np.int32), np.array(suffix, np.int32), type_id


def _around(tokenizer: tokenizers.Tokenizer, text: str) -> tuple[tuple[int, ...], tuple[int, ...], frozenset[int]]:
    bare = tokenizer.encode(text, add_special_tokens=False).ids
    encoding = tokenizer.encode(text)
    full = encoding.ids
    start = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), None)
    if not bare or start is None:
        raise CheckpointError("does not simply put special tokens around a text.", file=_FILE, key="post_processor")
    return tuple(full[:start]), tuple(full[start + len(bare) :]), frozenset(encoding.type_ids)


def _slices(sizes: Sequence[int]) -> Iterator[slice]:
    """Neighbouring texts of together at most MAX_CHARACTERS."""
    start = total = 0
    for index, size in enumerate(sizes):
        if total + size > MAX_CHARACTERS and index > start:
            yield slice(start, index)
            start, total = index, 0
        total += size
    yield slice(start, len(sizes))


def _split(lists: list[list[int]]) -> list[Int32Array]:
    """Lists of ids -> views of one flat array."""
    sizes = np.fromiter(map(len, lists), np.int64, len(lists))
    flat = np.fromiter(chain.from_iterable(lists), np.int32, int(sizes.sum()))
    ends: list[int] = np.cumsum(sizes).tolist()
    return [flat[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _starts_with(ids: Int32Array, prefix: Int32Array) -> bool:
    return np.array_equal(ids[: prefix.size], prefix)


def _ends_with(ids: Int32Array, suffix: Int32Array) -> bool:
    return np.array_equal(ids[ids.size - suffix.size :], suffix)


def _check_row(row: object, index: int) -> None:
    if not isinstance(row, np.ndarray):
        raise InvalidRequest("texts and token ids cannot be mixed in one list.", param=f"input[{index}]")
    if cast(Int64Array, row).ndim != 1 or cast(Int64Array, row).dtype.kind not in "iu":
        raise InvalidRequest("must be a text, or an array of token ids of one dimension.", param=f"input[{index}]")


def _check_texts(texts: Sequence[object]) -> list[str]:
    if set(map(type, texts)) != {str}:
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise InvalidRequest(f"must be a string, is {type(text).__name__}.", param=f"input[{index}]")
    return cast(list[str], texts)


def _is_of_the_binding(error: BaseException) -> bool:
    """tokenizers also raises bare Exception, and its panics, whose class it does not export, are no Exception at all."""
    return isinstance(error, TypeError | ValueError) or type(error) is Exception or type(error).__name__ == "PanicException"


def _culprit(texts: Sequence[str], prompt: str, error: BaseException) -> InvalidRequest:
    named = [("prompt", prompt), *((f"input[{index}]", text) for index, text in enumerate(texts))]
    for param, text in named:
        try:
            text.encode()
        except UnicodeEncodeError:
            return InvalidRequest("holds a lone surrogate, which is no Unicode text.", param=param)
    return InvalidRequest(f"cannot be tokenised: {error}.", param="input")
