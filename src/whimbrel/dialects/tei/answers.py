"""Answers of TEI's routes: timings in headers, errors with their statuses, and TEI's fields of GET /info. Pure.

Source: text-embeddings-inference, router/src/http/server.rs and router/src/lib.rs; status 422 as in TEI 1.9.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import msgspec

from whimbrel import errors
from whimbrel.dialects.common.activation import class_names
from whimbrel.dialects.common.answers import answer_type
from whimbrel.dialects.common.bodies import Empty, MalformedBody, MissingField, UnknownWord
from whimbrel.dialects.common.responses import Response, ServedModel
from whimbrel.dialects.common.route import PLACEHOLDERS, ErrorTerms, Route
from whimbrel.dialects.common.schemas import MAX_INPUTS
from whimbrel.errors import InvalidRequest, Location, WhimbrelError
from whimbrel.types.card import Card
from whimbrel.types.result import Result

ErrorType: TypeAlias = Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


TEIError: Final = answer_type("TEIError", "An error of TEI's API.", error=str, error_type=ErrorType)


def wrong_model_type(message: str) -> InvalidRequest:
    """Return the error for a model of another type, for which TEI has its own status."""
    return InvalidRequest(message, location=_WRONG_MODEL_TYPE)


_WRONG_MODEL_TYPE: Final = Location("outputs")
"""The location of errors over the type of a model; no body here has such a field."""


def error_type(error: WhimbrelError) -> ErrorType:
    if isinstance(error, Empty):
        return "Empty"
    if isinstance(error, errors.Overloaded):
        return "Overloaded"
    if isinstance(error, errors.Unavailable):
        return "Unhealthy"
    return "Validation" if error.status < 500 and not is_wrong_model_type(error) else "Backend"


def status(error: WhimbrelError) -> int:
    if isinstance(error, errors.ComputeError) or is_wrong_model_type(error):
        return 424
    if isinstance(error, Empty | MalformedBody):
        return 400
    if type(error) in (InvalidRequest, errors.TooLong, UnknownWord, MissingField) or (
        isinstance(error, errors.TooLarge) and error.location is not None
    ):
        return 422  # 413 is for bodies of too many bytes
    return error.status


TERMS: Final = ErrorTerms({"input": "inputs"}, {"truncate": "truncate: true"})


def render_error(error: WhimbrelError, terms: ErrorTerms = TERMS) -> bytes:
    if isinstance(error, errors.Unauthorized):
        return b""
    text = error.message if is_wrong_model_type(error) else terms.describe(error)[0]
    return msgspec.json.encode({"error": text, "error_type": error_type(error)})


TEI: Final = partial(Route, render=render_error, error_type=TEIError, terms=TERMS, status=status, placeholders=PLACEHOLDERS)


def is_wrong_model_type(error: WhimbrelError) -> bool:
    """Return whether an error is about the type of the model, not about the body."""
    return type(error) is InvalidRequest and error.location == _WRONG_MODEL_TYPE


def timed(body: bytes | Response, result: Result, model: ServedModel, characters: int) -> Response:
    """Return the answer with its timings, in whole milliseconds, and the inputs' `characters` in its headers."""
    answer = body if isinstance(body, Response) else Response([body], size=len(body))
    timings = result.timings
    stages = (timings.total, timings.tokenize, timings.queue, timings.compute)
    total, tokenize, queue, compute = (str(int(seconds * 1e3)) for seconds in stages)
    headers = {
        "x-compute-type": "cpu" if model.plan.device == "cpu" else "gpu+optimized",
        "x-compute-time": total,
        "x-compute-characters": str(characters),
        "x-compute-tokens": str(result.num_tokens),
        "x-total-time": total,
        "x-tokenization-time": tokenize,
        "x-queue-time": queue,
        "x-inference-time": compute,
    }
    return replace(answer, headers=headers)


_UNLIMITED: Final = 2**53 - 1
"""The largest integer that all JSON parsers hold exactly."""


def describe(models: Sequence[ServedModel]) -> dict[str, Any]:
    """Return TEI's fields of GET /info that exist here, without its version, which is another server's.

    TEI serves one model. Of several, the first is described, and `model_type` has the first of each type.
    """
    card, plan = models[0].card, models[0].plan
    types = [_model_type(model.card) for model in models]
    return {
        "model_id": card.name,
        "model_sha": plan.commit or None,
        "model_dtype": plan.dtype,
        "served_model_name": plan.served_name,
        "model_type": {kind: about for each in reversed(types) for kind, about in each.items()},
        "max_concurrent_requests": _UNLIMITED,
        "max_input_length": plan.max_length,
        "max_batch_tokens": plan.max_batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": MAX_INPUTS,
        "auto_truncate": True,
        "tokenization_workers": None,
        "sha": None,
        "docker_label": None,
    }


def _model_type(card: Card) -> dict[str, Any]:
    if "scores" in card.outputs:
        width = card.outputs["scores"].width
        labels = class_names(card.labels, width)
        by_label = {label: i for i, label in enumerate(labels)}
        about = {"id2label": {str(i): label for i, label in enumerate(labels)}, "label2id": by_label}
        return {"reranker" if width == 1 else "classifier": about}
    name, output = next(iter(card.outputs.items()))
    modes = "+".join("last-token" if mode == "lasttoken" else mode for mode in output.modes)
    return {"embedding": {"pooling": "splade" if name == "sparse" else modes or name}}
