"""Validation of a request's texts.

The texts are strings, pairs of strings or arrays of token ids, and must not be mixed. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from whimbrel.errors import InvalidRequest
from whimbrel.types.arrays import Int32Array, Int64Array
from whimbrel.types.request import Pair, Request


def has_ids(request: Request) -> bool:
    """Return whether the request's texts are token ids."""
    return len(request.texts) > 0 and isinstance(request.texts[0], np.ndarray)


def check_texts(texts: Sequence[object]) -> list[str]:
    """Return the texts. Raises InvalidRequest unless all are strings."""
    if set(map(type, texts)) != {str}:
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise InvalidRequest(f"must be a string, is {type(text).__name__}.", item=index)
    return cast(list[str], texts)


def check_pairs(texts: Sequence[object]) -> list[Pair]:
    """Return the pairs. Raises InvalidRequest unless all are pairs of strings."""
    for index, pair in enumerate(texts):
        if not isinstance(pair, tuple):
            message = "pairs and other inputs cannot be mixed in one list." if index else "must be a pair of strings."
            raise InvalidRequest(message, item=index)
        parts = cast(tuple[object, ...], pair)
        if len(parts) != 2:
            raise InvalidRequest(f"must be a pair of strings, has {len(parts)} parts.", item=index)
        for number, part in enumerate(parts):
            if not isinstance(part, str):
                kind = "an array" if isinstance(part, np.ndarray) else type(part).__name__
                raise InvalidRequest(f"a pair is made of strings; this is {kind}.", item=index, part=number)
    return cast(list[Pair], list(texts))


def check_ids(texts: Sequence[object], vocab_size: int) -> list[Int32Array]:
    """Return the ids as int32. Raises InvalidRequest unless all are arrays of ids of the vocabulary."""
    for index, row in enumerate(texts):
        if not isinstance(row, np.ndarray):
            raise InvalidRequest("texts and token ids cannot be mixed in one list.", item=index)
        ids = cast(Int64Array, row)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InvalidRequest("must be a text, or an array of token ids of one dimension.", item=index)
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if wrong.size:
            raise InvalidRequest(
                f"token id {ids[wrong[0]]:,} is outside the vocabulary of {vocab_size:,}. Were these ids made by "
                "another model's tokenizer? Send text (LangChain: check_embedding_ctx_length=False).",
                item=index,
                part=int(wrong[0]),
            )
    return [ids.astype(np.int32) for ids in cast(Sequence[Int64Array], texts)]
