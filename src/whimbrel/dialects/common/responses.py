"""Response formats: JSON, raw bytes, npy or an Arrow stream, with numbers in several types; and content negotiation.

Ids and times of responses are made here; no other module of the dialects reads a clock or random numbers.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from whimbrel.dialects.common.route import JSON, ParseRequest, Response, ServedModel
from whimbrel.errors import InvalidRequest
from whimbrel.types.result import Outputs, Ragged, Result, Sparse
from whimbrel.wire import FLOATS, STREAM_ABOVE, ByteOrder, DType, EncodedArray, join_blocks, json_chunks, npy_chunks, to_json
from whimbrel.wire.arrow import Column, arrow_chunks, list_column, scalar_column, struct_column, vector_column

OCTETS: Final = "application/octet-stream"
NPY: Final = "application/x-npy"
ARROW: Final = "application/vnd.apache.arrow.stream"
METADATA: Final = "metadata"
"""The header that describes the bytes of a binary answer (vLLM)."""
_VECTORS: Final = ("dense", "multi_vector", "muvera", "hidden", "token_dense")
"""Outputs that may travel in fewer bits than floats have."""
_FLAT: Final = ("dense", "scores", "muvera")
"""Outputs that are printed as one flat array; others take about twice the time."""


def json_answer(value: object, result: Result, *, as_text: bool = False, times: int = 1) -> bytes | Response:
    """Return JSON of a result, with its numbers in `times` types, or in base64 if `as_text`.

    What is large is printed piece by piece while it is sent, so that others have their turn.
    """
    arrays = encoded_outputs(result.outputs, "float32", "little")
    size = times * sum(array.nbytes * (1 if name in _FLAT else 2) for name, array in arrays.items())
    is_large = size > STREAM_ABOVE * (20 if as_text else 4)
    return Response(json_chunks(value), memory_bytes=size) if is_large else to_json(value)


def binary_formats(parse_request: Callable[..., Any]) -> dict[str, ParseRequest]:
    """Return the media types of binary answers, each with `parse_request` for bodies that name no format."""
    formats = {OCTETS: "bytes", NPY: "npy", ARROW: "arrow"}
    return {media_type: partial(parse_request, default=name) for media_type, name in formats.items()}


def new_id(prefix: str, name: str | None = None) -> str:
    """Return `prefix`-`name`, or `prefix` with a random id."""
    return f"{prefix}-{name or os.urandom(16).hex()}"


def created() -> int:
    """Return the time in seconds since 1970."""
    return int(time.time())


def usage(result: Result) -> dict[str, int]:
    """Return the counts of tokens, as in OpenAI's API."""
    return {"prompt_tokens": result.num_tokens, "total_tokens": result.num_tokens}


def encoded_outputs(outputs: Outputs, dtype: DType, order: ByteOrder) -> dict[str, EncodedArray]:
    """Return the arrays of all outputs by name; a ragged output has `.offsets`, and `.rows` or `.ids` and `.weights`.

    `dtype` is that of vectors and, if it is one of floats, also of scores and weights, which are float32 otherwise.
    """
    arrays: dict[str, EncodedArray] = {}
    for name in Outputs.__slots__:
        output = getattr(outputs, name)
        kind: DType = dtype if name in _VECTORS or dtype in FLOATS else "float32"
        if isinstance(output, Sparse):
            arrays[f"{name}.offsets"] = EncodedArray(output.offsets_N1, "int64", order)
            arrays[f"{name}.ids"] = EncodedArray(output.ids_X, "int32", order)
            arrays[f"{name}.weights"] = EncodedArray(output.weights_X, kind, order, name)
        elif isinstance(output, Ragged):
            arrays[f"{name}.offsets"] = EncodedArray(output.offsets_N1, "int64", order)
            arrays[f"{name}.rows"] = EncodedArray(output.rows_XD, kind, order, name)
        elif output is not None:
            arrays[name] = EncodedArray(output, kind, order, name)
    return arrays


def bytes_answer(arrays: Mapping[str, EncodedArray], result: Result, model: ServedModel) -> Response:
    """Return the arrays one after another, and their description in a header."""
    blocks, size, pieces = join_blocks(arrays)
    about = {"model": model.plan.served_name, "usage": usage(result), "arrays": blocks}
    return Response(pieces, OCTETS, {METADATA: header(about)}, size)


def bare_answer(arrays: Mapping[str, EncodedArray]) -> Response:
    """Return the bytes of one array and nothing else."""
    array = _only(arrays, "bytes_only")
    return Response(array.chunks(), OCTETS, size=array.nbytes)


def npy_answer(arrays: Mapping[str, EncodedArray]) -> Response:
    """Return a file that `numpy.load` reads."""
    size, pieces = npy_chunks(_only(arrays, "npy"))
    return Response(pieces, NPY, size=size)


def arrow_answer(arrays: Mapping[str, EncodedArray], result: Result, model: ServedModel) -> Response:
    """Return a stream of one record batch with a column for each output; model and usage are in the schema's metadata."""
    about = {"model": model.plan.served_name, "usage": json.dumps(usage(result))}
    size, pieces = arrow_chunks(list(_columns(arrays)), about)
    return Response(pieces, ARROW, size=size)


def header(about: object) -> str:
    """Return JSON that a header may hold."""
    text = msgspec.json.encode(about)
    return text.decode() if text.isascii() else json.dumps(msgspec.json.decode(text))


def _only(arrays: Mapping[str, EncodedArray], form: str) -> EncodedArray:
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    raise InvalidRequest(
        f"{form} holds one array, and the answer has {', '.join(arrays)}; ask for one output with a row for each text, or for "
        "bytes or arrow.",
        param="encoding_format",
    )


def _columns(arrays: Mapping[str, EncodedArray]) -> Iterator[Column]:
    for name, array in arrays.items():
        output, _, part = name.partition(".")
        if not part:
            yield vector_column(output, array)
        elif part == "rows":
            yield list_column(output, arrays[f"{output}.offsets"].array, vector_column("item", array))
        elif part == "ids":
            offsets = arrays[f"{output}.offsets"].array
            weights = scalar_column("item", arrays[f"{output}.weights"])
            yield struct_column(
                output, list_column("ids", offsets, scalar_column("item", array)), list_column("weights", offsets, weights)
            )


def accepted_media_type(accept: str, offered: Sequence[str]) -> str:
    """Return the media type of `offered` that an Accept header prefers, or JSON if it names none of them.

    Of equals the one that is named first, and types before patterns, which stand for JSON.
    """
    best, best_rank = JSON, (0.0, False)
    for part in accept.split(","):
        kind, *parameters = (each.strip().lower() for each in part.split(";"))
        rank = _quality(parameters), "*" not in kind
        if rank > best_rank and rank[0] > 0 and (kind in offered or kind in (JSON, "application/*", "*/*")):
            best, best_rank = kind if kind in offered else JSON, rank
    return best


def _quality(parameters: Sequence[str]) -> float:
    for each in parameters:
        name, _, value = each.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
