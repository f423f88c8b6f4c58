"""Reading of the vectors in an answer by the client, for benchmarks in which that is part of the time.

A decoder returns why the body cannot be read, or "".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import orjson

from whimbrel_bench.connection import Answer


def _none(_: Answer) -> str:
    return ""


def _with(load: Callable[[bytes], Any], media_type: bytes) -> Callable[[Answer], str]:
    """Return a decoder of bodies of one media type: read as another they would give a time, and nonsense."""

    def decode(answer: Answer) -> str:
        found = answer.headers.get(b"content-type", b"").partition(b";")[0].strip()
        if found != media_type:
            return f"the body is {found.decode('latin-1') or 'of no type'}, not {media_type.decode()}"
        try:
            load(b"".join(answer.body))
        except (ValueError, RecursionError) as error:
            return f"the body cannot be read: {error}"
        return ""

    return decode


def _raw(body: bytes) -> Any:
    return np.frombuffer(body, "<f4")


DECODERS: Final[Mapping[str, Callable[[Answer], str]]] = {
    "none": _none,
    "json": _with(json.loads, b"application/json"),
    "orjson": _with(orjson.loads, b"application/json"),
    "raw": _with(_raw, b"application/octet-stream"),
}
