"""Check of answers and their numbers of tokens: the first is read in full, the others as far as there is time.

A later answer must have the media type of the first. JSON must be JSON at both ends, or throughout if it is short. Where rows
can be counted, there must be one for each text of the request.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Final

import orjson

from whimbrel.errors import SetupError
from whimbrel_bench.backends import Backend
from whimbrel_bench.connection import END_BYTES, Answer

ROW_MARK: Final = b'"index"'
"""Key of every row of an answer, wherever rows are objects. A quote within a text is escaped, so no text can match."""
_JSON: Final = b"application/json"
UNKNOWN: Final = -1
_MAX_DIGITS: Final = 18
"""Digits of a number that fits 64 bits."""


@dataclass(frozen=True)
class Shape:
    """Shape of the answers of one server."""

    media_type: bytes
    counts_rows: bool = False
    """Each row has one ROW_MARK."""


def check_first(backend: Backend, media_type: str, body: bytes, num_texts: int | None) -> Shape:
    """Return the shape of answers from the first. `num_texts` is None if there may be fewer rows. Raises SetupError."""
    words = excerpt(body) or "an empty body"
    kind = media_type.partition(";")[0].strip().lower().encode("latin-1", "replace")
    if kind.startswith(b"text/"):
        raise _unsuitable(f"is {kind.decode()}: {words}")
    if kind not in (_JSON, b""):
        return Shape(kind)
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _unsuitable(f"is no JSON ({error}): {words}") from None
    try:
        rows = len(backend.rows(answer))
    except (KeyError, TypeError, IndexError, AttributeError, StopIteration):
        raise _unsuitable(f"has no vectors or scores: {words}") from None
    if num_texts is not None and rows != num_texts:
        raise _unsuitable(f"has {_rows(rows, num_texts)}")
    return Shape(kind, num_texts is not None and body.count(ROW_MARK) == rows)


def _unsuitable(what: str) -> SetupError:
    return SetupError(
        f"the first answer {what}.", hint="choose the --backend, --endpoint and --extra-body that suit the server"
    )


def _rows(rows: int, texts: int) -> str:
    return f"{rows:,} {'row' if rows == 1 else 'rows'} for {texts:,} {'text' if texts == 1 else 'texts'}"


def excerpt(body: bytes) -> str:
    """Return the beginning of a body as one line that does nothing to a terminal."""
    words = " ".join(body[:300].decode("utf-8", "replace").split())
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in words)


def refusal(answer: Answer, shape: Shape | None = None, num_texts: int = 0) -> str:
    """Return why an answer is no success, or ""."""
    if answer.status != 200:
        return f"HTTP {answer.status}: {excerpt(answer.head)}".rstrip(": ")
    kind = answer.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if shape is not None and kind != shape.media_type:
        found, first = (excerpt(each) or "no content type" for each in (kind, shape.media_type))
        return f"HTTP 200 with {found}, where the first answer was {first}"
    if kind == _JSON and not _may_be_json(answer):
        return "HTTP 200 with a body that is no JSON"
    if shape is not None and shape.counts_rows and answer.num_rows != num_texts:
        return f"HTTP 200 with {_rows(answer.num_rows, num_texts)}"
    return ""


def _may_be_json(answer: Answer) -> bool:
    if answer.size > END_BYTES:
        return answer.head.lstrip().startswith((b"{", b"[")) and answer.tail.rstrip().endswith((b"}", b"]"))
    try:
        orjson.loads(answer.head)
    except orjson.JSONDecodeError:
        return False
    return True


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
