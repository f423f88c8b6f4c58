"""Numbers of tokens in the answers of servers, found by a scan of the ends of a body or in a header."""

from __future__ import annotations

import re
from functools import cache
from typing import Final

from whimbrel_bench.connection import Answer

UNKNOWN: Final = -1
_MAX_DIGITS: Final = 18
"""Digits of a number that fits 64 bits."""


def read_tokens(answer: Answer, key: str) -> int:
    """Return the number of tokens that an answer states under a key of its JSON, or in a header of TEI or Whimbrel; else -1."""
    places = (answer.tail, answer.head, answer.headers.get(b"metadata", b"")) if key else ()
    if found := next(filter(None, map(_pattern(key).search, places)), None):
        return int(found[1])
    value = answer.headers.get(b"x-compute-tokens") or answer.headers.get(b"x-whimbrel-tokens") or b""
    return int(value) if value.isdigit() and len(value) <= _MAX_DIGITS else UNKNOWN


@cache
def _pattern(key: str) -> re.Pattern[bytes]:
    """Return the pattern of a JSON key. A quote within a text is escaped in JSON, so no text of the answer can match."""
    return re.compile(rb'"%b"\s*:\s*(\d{1,%d})(?!\d)' % (key.encode(), _MAX_DIGITS))
