"""Queries and documents that are cut to so many tokens of their own, before anything is put around them (vLLM, Cohere)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, cast

from whimbrel.errors import InvalidRequest
from whimbrel.tokenizer.backend import BackendTokenizer
from whimbrel.tokenizer.truncation import Index
from whimbrel.types.request import Request


def truncate_sides(request: Request, *backends: BackendTokenizer) -> Request:
    """The request with its queries and documents cut, as it asks; `backends` are those of the two. Vectors that stand for a
    text stay as they are. Raises InvalidRequest and TooLarge."""
    limits = {"max_query_tokens": request.max_query_tokens, "max_document_tokens": request.max_document_tokens}
    asked = [name for name, limit in limits.items() if limit is not None]
    pairs = cast("Sequence[object]", request.texts)
    if not all(isinstance(pair, tuple) and len(cast("tuple[Any, ...]", pair)) == 2 for pair in pairs):
        raise InvalidRequest("is for pairs of a query and a document.", param=asked[0])
    sides: list[list[Any]] = [[cast("tuple[Any, Any]", pair)[part] for pair in pairs] for part in (0, 1)]
    for part, (limit, backend) in enumerate(zip(limits.values(), backends, strict=True)):
        if limit is not None:
            sides[part] = _cut(sides[part], limit, part, backend)
    return replace(request, texts=list(zip(*sides, strict=True)))


def _cut(side: Sequence[object], limit: int, part: int, backend: BackendTokenizer) -> list[object]:
    """Each text up to where its first `limit` tokens end."""
    first: dict[str, Index] = {}
    for index, text in enumerate(side):
        if isinstance(text, str):
            first.setdefault(text, (index, part))
    slices = backend.encode_batches(list(first), indices=list(first.values()), special=False, located=True)
    found: dict[object, str] = {}
    for text, encoding in zip(first, chain.from_iterable(slices), strict=True):
        found[text] = text
        if len(encoding) > limit:
            encoding.truncate(limit)
            found[text] = text[: encoding.offsets[-1][1]]
    return [found[text] if isinstance(text, str) else text for text in side]
