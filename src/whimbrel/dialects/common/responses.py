"""Responses: JSON, raw bytes, npy or an Arrow stream, with numbers in several types; content negotiation.

No other module of the dialects reads a clock or random numbers: ids and times of responses are made here.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

import msgspec

from whimbrel.dialects.common.answers import usage
from whimbrel.errors import InvalidRequest
from whimbrel.types.result import Outputs, Ragged, Result, Sparse
from whimbrel.wire.arrow import Column, arrow_chunks, list_column, scalar_column, struct_column, vector_column
from whimbrel.wire.dtypes import FLOATS, ByteOrder, DType, EncodedArray
from whimbrel.wire.json_base64 import STREAM_ABOVE, json_chunks, to_json
from whimbrel.wire.raw import join_blocks, npy_chunks

if TYPE_CHECKING:
    from whimbrel.types.card import Card
    from whimbrel.types.plan import Plan
    from whimbrel.types.residence import Residence


JSON: Final = "application/json"
OCTETS: Final = "application/octet-stream"
NPY: Final = "application/x-npy"
ARROW: Final = "application/vnd.apache.arrow.stream"
EncodingFormat: TypeAlias = Literal["float", "base64", "bytes", "bytes_only", "npy", "arrow"]
METADATA: Final = "metadata"
"""The header that describes the bytes of a binary answer (vLLM)."""
SENT_OUTPUTS: Final = tuple(name for name in Outputs.__slots__ if name != "logits")
"""Names of the outputs that answers may have. Logits only order the scores."""
_VECTORS: Final = ("dense", "multi_vector", "muvera", "hidden", "token_dense")
"""Outputs that may travel in fewer bits than floats have."""
_FLAT: Final = ("dense", "scores", "muvera")
"""Outputs that are printed as one flat array; others take about twice the time."""


class ServedModel(Protocol):
    """The attributes of a model that dialects use."""

    @property
    def card(self) -> Card: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def residence(self) -> Residence: ...


def served_names(plan: Plan) -> tuple[str, ...]:
    """Return all names of a model, its own first, then those with an adapter."""
    names = (plan.served_name, *plan.aliases)
    return (*names, *(f"{name}:{adapter}" for name in names for adapter in plan.adapters))


def adapter_in(name: str, plan: Plan) -> str | None:
    """Return the adapter that a name of a model chooses, if it chooses one."""
    model, _, adapter = name.removesuffix(":latest").rpartition(":")
    return adapter if adapter in plan.adapters and model in (plan.served_name, *plan.aliases) else None


def _none() -> dict[str, str]:
    return {}  # dict[str, str]() would take ten times as long


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """The answer to a request."""

    chunks: Iterable[bytes | memoryview]
    """The pieces of the body. Making one may take a millisecond; other requests run before the next is made."""
    media_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=_none)
    size: int | None = None
    """Bytes of all chunks, if known before they are made."""
    memory_bytes: int = 0
    """Approximate bytes that stay in memory until the last chunk is made, if `size` is not known."""


def json_answer(value: object, result: Result, *, as_text: bool = False, times: int = 1) -> bytes | Response:
    """Return JSON of a result, with its numbers in `times` types, or in base64 if `as_text`.

    A large answer is printed in chunks while it is sent, so that other requests run in between.
    """
    outputs = ((name, getattr(result.outputs, name)) for name in SENT_OUTPUTS)
    size = times * sum(output.nbytes * (1 if name in _FLAT else 2) for name, output in outputs if output is not None)
    is_large = size > STREAM_ABOVE * (20 if as_text else 4)
    return Response(json_chunks(value), memory_bytes=size) if is_large else to_json(value)


def new_id(prefix: str, name: str | None = None) -> str:
    return f"{prefix}-{name or os.urandom(16).hex()}"


def created() -> int:
    return int(time.time())


def encoded_outputs(outputs: Outputs, dtype: DType, order: ByteOrder) -> dict[str, EncodedArray]:
    """Return the arrays of all outputs by name; a ragged output has `.offsets`, and `.rows` or `.ids` and `.weights`.

    `dtype` is that of vectors and, if it is one of floats, also of scores and weights, which are float32 otherwise.
    """
    arrays: dict[str, EncodedArray] = {}
    for name in SENT_OUTPUTS:
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


def binary_answer(
    encoding: Literal["bytes", "bytes_only", "npy", "arrow"],
    arrays: Mapping[str, EncodedArray],
    result: Result,
    model: ServedModel,
) -> Response:
    """Return the arrays as bytes with a header that describes them; or one array as bytes or as an npy file; or as Arrow.

    The Arrow stream has one record batch with a column for each output; model and usage are in the schema's metadata.
    """
    match encoding:
        case "bytes":
            blocks, size, pieces = join_blocks(arrays)
            about = {"model": model.plan.served_name, "usage": usage(result), "arrays": blocks}
            return Response(pieces, OCTETS, {METADATA: header(about)}, size)
        case "bytes_only":
            array = _only(arrays, encoding)
            return Response(array.chunks(), OCTETS, size=array.nbytes)
        case "npy":
            size, pieces = npy_chunks(_only(arrays, encoding))
            return Response(pieces, NPY, size=size)
        case "arrow":
            metadata = {"model": model.plan.served_name, "usage": json.dumps(usage(result))}
            size, pieces = arrow_chunks(list(_columns(arrays)), metadata)
            return Response(pieces, ARROW, size=size)


def row_blocks(rows: EncodedArray, offsets_N1: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Return the place, shape and type of the bytes of each text's row, or of its rows between two offsets (vLLM)."""
    shape = rows.shape[1:]
    size = math.prod(shape) * rows.storage_dtype.itemsize
    numbers = {"embed_dtype": rows.dtype, "endianness": "big" if rows.is_big else "little"}
    return [
        {"index": index, **numbers, "start": start * size, "end": end * size}
        | {"shape": shape if offsets_N1 is None else [end - start, *shape]}
        for index, (start, end) in enumerate(pairwise(offsets_N1 or range(len(rows) + 1)))
    ]


def header(about: object) -> str:
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

    Among types of equal quality the first one wins, and types precede patterns, which mean JSON.
    """
    best, best_rank = JSON, (0.0, False)
    for part in accept.split(","):
        kind, *parameters = (each.strip().lower() for each in part.split(";"))
        rank = _quality(parameters), "*" not in kind
        if rank > best_rank and rank[0] > 0 and (kind in offered or kind in (JSON, "application/*", "*/*")):
            best, best_rank = kind if kind in offered else JSON, rank
    return best


def _quality(parameters: Sequence[str]) -> float:
    pairs = (each.partition("=") for each in parameters)
    try:
        return next((float(value) for name, _, value in pairs if name.strip() == "q"), 1.0)
    except ValueError:
        return 0.0
