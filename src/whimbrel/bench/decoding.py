"""Reading of the vectors in an answer by the client, for benchmarks in which that is part of the time.

A decoder returns why the body cannot be read, or "".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import orjson

from whimbrel.bench.connection import Answer


def _none(_: Answer) -> str:
    return ""


def _with(load: Callable[[bytes], Any]) -> Callable[[Answer], str]:
    def decode(answer: Answer) -> str:
        try:
            load(b"".join(answer.body))
        except ValueError as error:
            return f"the body cannot be read: {error}"
        return ""

    return decode


def _raw(body: bytes) -> Any:
    return np.frombuffer(body, "<f4")


DECODERS: Final[Mapping[str, Callable[[Answer], str]]] = {
    "none": _none,
    "json": _with(json.loads),
    "orjson": _with(orjson.loads),
    "raw": _with(_raw),
}
