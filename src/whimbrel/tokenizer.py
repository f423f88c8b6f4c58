"""Request -> [Seq]. Knows prompts, special tokens and truncation; knows nothing of batches.

Texts of a request go through the tokenizer in one call, without special tokens; these are put around the ids here, so
that cutting never loses them and one tokenizer, never reconfigured, serves all threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TypeGuard, cast

import numpy as np
import tokenizers

from whimbrel.card import Card
from whimbrel.errors import CheckpointError, InvalidRequest, TooLong
from whimbrel.types import Int32Array, Int64Array, Request, Seq, Truncate

_FILE = "tokenizer.json"


class Tokenizer:
    """The tokenizer of one checkpoint. Safe to use from many threads."""

    def __init__(self, folder: Path, card: Card, max_length: int) -> None:
        self._card = card
        self._max_length = max_length
        self._tokenizer = _load(folder, card)
        vocab_size = self._tokenizer.get_vocab_size()
        if vocab_size > card.encoder.vocab_size:
            raise CheckpointError(
                f"has {vocab_size:,} tokens; the model embeds {card.encoder.vocab_size:,} (config.json: vocab_size).",
                file=_FILE,
            )
        self._prefix, self._suffix, self._type_id = _special_tokens(self._tokenizer, card)
        self._prompt_tokens = lru_cache(maxsize=256)(self._count_prompt_tokens)
        if max_length <= len(self._prefix) + len(self._suffix):
            raise CheckpointError(f"max length {max_length} leaves no room between the special tokens.", file=_FILE)

    def encode(self, request: Request) -> list[Seq]:
        """Tokenise all texts of a request in one call.

        Raises InvalidRequest (empty, wrong type, id outside the vocabulary, unknown prompt) and TooLong.
        """
        if len(request.texts) == 0:
            return []
        max_length = self._request_max_length(request)
        truncate: Truncate = request.truncate or self._card.tokenizer.truncate
        if _are_texts(request.texts):
            prompt = self._prompt(request)
            bodies = self._encode_texts(request.texts, prompt)
            prompt_tokens = 0 if self._card.pooling.include_prompt or not prompt else self._prompt_tokens(prompt)
        else:
            if request.prompt or request.prompt_name:
                raise InvalidRequest("a prompt cannot be put before token ids; send text.", param="prompt")
            bodies = self._check_ids(cast(Sequence[Int64Array], request.texts))
            prompt_tokens = 0
        whole = not _are_texts(request.texts)
        return [self._seq(body, index, prompt_tokens, max_length, truncate, whole=whole) for index, body in enumerate(bodies)]

    def _request_max_length(self, request: Request) -> int:
        if request.max_tokens is None:
            return self._max_length
        least = len(self._prefix) + len(self._suffix) + 1
        if not least <= request.max_tokens <= self._max_length:
            raise InvalidRequest(
                f"a limit of {request.max_tokens:,} tokens per text; this model takes {least} to {self._max_length:,}.",
                param="truncate_prompt_tokens",
            )
        return request.max_tokens

    def _prompt(self, request: Request) -> str:
        if request.prompt is not None:
            return request.prompt
        name = request.prompt_name or self._card.default_prompt_name
        return self._card.prompt_text(name) if name else ""

    def _encode_texts(self, texts: Sequence[str], prompt: str) -> list[Int32Array]:
        prompted = [prompt + text for text in texts] if prompt else list(texts)
        try:
            encodings = self._tokenizer.encode_batch_fast(prompted, add_special_tokens=False)
        except (TypeError, ValueError, UnicodeError) as error:
            raise _culprit(texts, error) from None
        return _split([encoding.ids for encoding in encodings])

    def _count_prompt_tokens(self, prompt: str) -> int:
        """Sentence Transformers' count: the prompt alone, special tokens included except a closing one."""
        return len(self._prefix) + len(self._tokenizer.encode(prompt, add_special_tokens=False).ids)

    def _check_ids(self, texts: Sequence[Int64Array]) -> list[Int32Array]:
        vocab_size = self._card.encoder.vocab_size
        for index, ids in enumerate(texts):
            if ids.size == 0:
                raise InvalidRequest("holds no token ids.", param=f"input[{index}]")
            wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
            if wrong.size:
                raise InvalidRequest(
                    f"token id {ids[wrong[0]]:,} is outside the vocabulary of {vocab_size:,}. Were these ids made by "
                    "another model's tokenizer? Send text (LangChain: check_embedding_ctx_length=False).",
                    param=f"input[{index}][{wrong[0]}]",
                )
        return [ids.astype(np.int32) for ids in texts]

    def _seq(
        self, body: Int32Array, index: int, prompt_tokens: int, max_length: int, truncate: Truncate, *, whole: bool
    ) -> Seq:
        """Put the special tokens around `body`, cut between them. `whole` ids have theirs already, or want none."""
        prefix, suffix = self._prefix, self._suffix
        if whole:
            if body.size <= max_length:
                return Seq(body, index)
            if not (_starts_with(body, prefix) and _ends_with(body, suffix)):
                prefix = suffix = body[:0]
            body = body[prefix.size : body.size - suffix.size]
        room = max_length - prefix.size - suffix.size
        if cut := body.size > room:
            if truncate == "never":
                total = body.size + prefix.size + suffix.size
                raise TooLong(
                    f'the text has {total:,} tokens; the limit is {max_length:,}. Pass truncate="right" to cut it.',
                    param=f"input[{index}]",
                )
            body = body[:room] if truncate == "right" else body[body.size - room :]
        ids = np.concatenate((prefix, body, suffix))
        if ids.size == 0:
            raise InvalidRequest("the text has no tokens.", param=f"input[{index}]")
        return Seq(ids, index, prompt_tokens, self._type_id, truncated=cut)


def _are_texts(texts: Sequence[str] | Sequence[Int64Array]) -> TypeGuard[Sequence[str]]:
    return not isinstance(texts[0], np.ndarray)


def _load(folder: Path, card: Card) -> tokenizers.Tokenizer:
    """tokenizer.json without the padding and truncation that may be saved in it."""
    text = (folder / _FILE).read_text(encoding="utf-8")
    if card.tokenizer.normalizer is not None:
        text = json.dumps(json.loads(text) | {"normalizer": card.tokenizer.normalizer})
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the binding raises bare Exception
        raise CheckpointError(f"cannot be read by tokenizers {tokenizers.__version__}: {error}.", file=_FILE) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _special_tokens(tokenizer: tokenizers.Tokenizer, card: Card) -> tuple[Int32Array, Int32Array, int]:
    """What the post-processor puts before and after a text, found by looking, and checked on a second text."""
    for probe in ("a", "the quick brown fox"):
        bare = tokenizer.encode(probe, add_special_tokens=False).ids
        encoding = tokenizer.encode(probe)
        full = encoding.ids
        start = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), None)
        if not bare or start is None:
            raise CheckpointError("does not simply put special tokens around a text.", file=_FILE, key="post_processor")
        prefix, suffix = full[:start], full[start + len(bare) :]
        type_ids = set(encoding.type_ids) if card.encoder.type_vocab_size > 1 else {0}
        if len(type_ids) != 1 or (type_id := type_ids.pop()) >= card.encoder.type_vocab_size:
            raise CheckpointError("gives one text several token types.", file=_FILE, key="post_processor")
    return np.array(prefix, np.int32), np.array(suffix, np.int32), type_id


def _split(lists: list[list[int]]) -> list[Int32Array]:
    """Lists of ids -> views of one flat array."""
    sizes = np.fromiter(map(len, lists), np.int64, len(lists))
    flat = np.fromiter(chain.from_iterable(lists), np.int32, int(sizes.sum()))
    return np.split(flat, np.cumsum(sizes)[:-1])


def _starts_with(ids: Int32Array, prefix: Int32Array) -> bool:
    return np.array_equal(ids[: prefix.size], prefix)


def _ends_with(ids: Int32Array, suffix: Int32Array) -> bool:
    return np.array_equal(ids[ids.size - suffix.size :], suffix)


def _culprit(texts: Iterable[object], error: Exception) -> InvalidRequest:
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            return InvalidRequest(f"must be a string, is {type(text).__name__}.", param=f"input[{index}]")
        try:
            text.encode()
        except UnicodeEncodeError:
            return InvalidRequest("holds a lone surrogate, which is no Unicode text.", param=f"input[{index}]")
    return InvalidRequest(f"cannot be tokenised: {error}.", param="input")
