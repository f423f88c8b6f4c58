"""Numbers of tokens in the answers of servers, found by a scan of the ends of a body or in a header.

A reader returns -1 where the server does not say the number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from whimbrel_bench.connection import Answer

UNKNOWN: Final = -1
_MAX_DIGITS: Final = 18
"""Digits of a number that fits 64 bits."""


def _field(name: str) -> Callable[[Answer], int]:
    """Return a reader of a JSON key. A quote within a text is escaped in JSON, so no text of the answer can match."""
    pattern = re.compile(rb'"%b"\s*:\s*(\d{1,%d})(?!\d)' % (name.encode(), _MAX_DIGITS))

    def read(answer: Answer) -> int:
        found = (
            pattern.search(answer.tail) or pattern.search(answer.head) or pattern.search(answer.headers.get(b"metadata", b""))
        )
        return int(found[1]) if found else _header(answer)

    return read


def _header(answer: Answer) -> int:
    """Return the number that a header of TEI or of Whimbrel states."""
    value = answer.headers.get(b"x-compute-tokens") or answer.headers.get(b"x-whimbrel-tokens") or b""
    return int(value) if value.isdigit() and len(value) <= _MAX_DIGITS else UNKNOWN


USAGES: Final[Mapping[str, Callable[[Answer], int]]] = {
    "openai": _field("prompt_tokens"),
    "ollama": _field("prompt_eval_count"),
    "header": _header,
}
"""Readers by the place of the number."""
