"""The `input` of a body: texts or token ids, in all the forms that OpenAI's API takes, and not too many of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec
import numpy as np

from whimbrel.errors import InvalidRequest, Location, TooLarge

MAX_INPUTS: Final = 2048
MAX_IDS: Final = 2**19
"""Token ids of a request, all inputs together."""
_MAX_STRINGS: Final = 100_000


class TextObject(msgspec.Struct, frozen=True):
    """A text as an object (Jina)."""

    text: str | None = None


def reject_many(body: bytes) -> None:
    """Before JSON is decoded, which holds up everybody for a second per million of lists. Raises TooLarge."""
    if len(body) <= MAX_IDS:
        return
    if _count(body, b'"') > 2 * _MAX_STRINGS and (strings := (_count(body, b'"') - body.count(b'\\"')) // 2) > _MAX_STRINGS:
        raise TooLarge(f"about {strings:,} strings; the limit is {_MAX_STRINGS:,}. Split the request.", param="input")
    if _count(body, b",") > MAX_IDS and (commas := _count(_without_strings(body), b",")) > MAX_IDS:
        raise TooLarge(f"more than {commas:,} token ids or items; the limit is {MAX_IDS:,}. Split the request.", param="input")


def _count(body: bytes, letter: bytes) -> int:
    """As bytes.count does, which is slow where there are many."""
    return int(np.count_nonzero(np.frombuffer(body, np.uint8) == letter[0]))


def _without_strings(body: bytes) -> bytes:
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotes that are left begin and end strings
    return b"".join(plain.split(b'"')[::2])


def parse_texts(raw: str | Sequence[str | int | Sequence[int | str] | TextObject]) -> Any:
    """Texts, pairs of texts, or arrays of token ids. A list must be of one kind throughout, but texts may be objects."""
    if isinstance(raw, str):
        return [raw]
    if not raw:
        raise InvalidRequest("is an empty list; give at least one text.", param="input")
    kinds = set(map(type, raw))
    if TextObject in kinds:
        raw = [_text(each, i) if isinstance(each, TextObject) else each for i, each in enumerate(raw)]
        kinds = set(map(type, raw))
    if len(kinds) > 1:
        first = type(raw[0])
        index = next(i for i, item in enumerate(raw) if type(item) is not first)
        raise InvalidRequest("texts, token ids and lists of them cannot be mixed in one list.", item=index)
    if kinds == {int}:
        return [_ids(cast(list[int], raw), None)]
    if len(raw) > MAX_INPUTS:
        raise TooLarge(f"{len(raw):,} inputs; the limit is {MAX_INPUTS:,}. Split the request.", param="input")
    if kinds == {str}:
        return raw
    rows = cast(list[list[int | str]], raw)
    if any(str in map(type, row) for row in rows):
        return [_pair(row, i) for i, row in enumerate(rows)]
    return [_ids(cast(list[int], ids), i) for i, ids in enumerate(rows)]


def _text(given: TextObject, item: int) -> str:
    if given.text is None:
        raise InvalidRequest("is an object without a text; this server takes texts, no images.", item=item)
    return given.text


def _pair(row: list[int | str], item: int) -> tuple[str, str]:
    if len(row) != 2 or not all(isinstance(text, str) for text in row):
        raise InvalidRequest("a list with a text in it must be a pair of two texts, as all of them must.", item=item)
    return cast(tuple[str, str], tuple(row))


def _ids(ids: list[int], item: int | None) -> np.ndarray[Any, np.dtype[np.int64]]:
    try:
        return np.array(ids, np.int64)
    except OverflowError:
        index = next(i for i, value in enumerate(ids) if not -(2**63) <= value < 2**63)
        message = f"token id {ids[index]} is no 64-bit integer."
        location = Location("input", index) if item is None else Location("input", item, index)
        raise InvalidRequest(message, location=location) from None
