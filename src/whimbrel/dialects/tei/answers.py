"""Answers of all of TEI's routes: timings in headers, errors, and their statuses.

Source: text-embeddings-inference, router/src/http/server.rs and router/src/lib.rs, and its 422 for what is wrong (1.9).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal, TypeAlias

import msgspec

from whimbrel.dialects.common.decode import MalformedBody
from whimbrel.dialects.common.errors import ErrorTerms
from whimbrel.dialects.common.route import Dialect, Response, ServedModel
from whimbrel.errors import (
    ComputeError,
    InvalidRequest,
    Location,
    Overloaded,
    TooLarge,
    TooLong,
    Unauthorized,
    Unavailable,
    WhimbrelError,
)
from whimbrel.types.result import Result

ErrorType: TypeAlias = Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


class TEIError(msgspec.Struct):
    """The body of every error but 401, which has none."""

    error: str
    error_type: ErrorType


class Empty(InvalidRequest):
    """A list of inputs is empty."""


def wrong_model_type(message: str) -> InvalidRequest:
    """Return the error over a model of another type, for which TEI has a status of its own."""
    return InvalidRequest(message, location=_WRONG_MODEL_TYPE)


_WRONG_MODEL_TYPE: Final = Location("outputs")
"""The location of errors over the type of a model; no body here has such a field."""


def error_type(error: WhimbrelError) -> ErrorType:
    """Return TEI's type of an error."""
    if isinstance(error, Empty):
        return "Empty"
    if isinstance(error, Overloaded):
        return "Overloaded"
    if isinstance(error, Unavailable):
        return "Unhealthy"
    return "Validation" if error.status < 500 and not is_wrong_model_type(error) else "Backend"


def status(error: WhimbrelError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, ComputeError) or is_wrong_model_type(error):
        return 424
    if isinstance(error, Empty | MalformedBody):
        return 400
    if type(error) in (InvalidRequest, TooLong) or (isinstance(error, TooLarge) and error.location is not None):
        return 422  # 413 is for bodies of too many bytes
    return error.status


TERMS: Final = ErrorTerms({"input": "inputs"}, {"truncate": "truncate: true"})


def render_error(error: WhimbrelError, terms: ErrorTerms = TERMS) -> bytes:
    """Return an error in TEI's shape."""
    if isinstance(error, Unauthorized):
        return b""
    text = error.message if is_wrong_model_type(error) else terms.describe(error)[0]
    return msgspec.json.encode(TEIError(text, error_type(error)))


TEI: Final = Dialect(render_error, TERMS, status)


def is_wrong_model_type(error: WhimbrelError) -> bool:
    """True if an error is over the type of the model, not over the body."""
    return type(error) is InvalidRequest and error.location == _WRONG_MODEL_TYPE


def timed(body: bytes | Response, result: Result, model: ServedModel, characters: int) -> Response:
    """Return the answer with its timings, in whole milliseconds, and the inputs' `characters` in its headers."""
    answer = body if isinstance(body, Response) else Response([body], size=len(body))
    return replace(answer, headers=_headers(result, model, characters))


def _headers(result: Result, model: ServedModel, characters: int) -> Mapping[str, str]:
    timings = result.timings
    total = _milliseconds(timings.total)
    return {
        "x-compute-type": "cpu" if model.plan.device == "cpu" else "gpu+optimized",
        "x-compute-time": total,
        "x-compute-characters": str(characters),
        "x-compute-tokens": str(result.num_tokens),
        "x-total-time": total,
        "x-tokenization-time": _milliseconds(timings.tokenize),
        "x-queue-time": _milliseconds(timings.queue),
        "x-inference-time": _milliseconds(timings.compute),
    }


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1e3))
