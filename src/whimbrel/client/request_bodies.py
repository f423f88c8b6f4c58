"""Requests: checks and encoding of texts, pairs and vectors. Errors name the caller's own arguments."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from whimbrel.client.responses import Ranking, ScoredRow, join_rankings, ranking_of
from whimbrel.client.task import JSON, Reply, Task
from whimbrel.errors import InvalidRequest, Locate, Location, locate_pairs
from whimbrel.outputs.stored_vectors import as_vector_list
from whimbrel.types.options import ScoreOptions, TextOptions, as_list, as_strings
from whimbrel.types.request import OutputName
from whimbrel.wire.json_base64 import to_json

_DTYPES: Final = {"float32": "float32", "float16": "float16", "int8": "int8", "uint8": "binary"}
Json: TypeAlias = dict[str, Any]
OutputNames: TypeAlias = OutputName | Sequence[OutputName]
ReadRows: TypeAlias = Callable[[bytes], Sequence[ScoredRow]]
Writer: TypeAlias = Callable[[Sequence[Any]], bytes]
"""Function that encodes some of the items as a body. Raises InvalidRequest."""


def item_writer(name: str, **fields: Any) -> Writer:
    """Return the function that writes items as the field `name`, beside the `fields` that are not None."""
    others = set_fields(**fields)
    return lambda items: encode_body(others, {name: items})


def encode_body(fields: Json, inputs: Json, write: Callable[[Json], bytes] = to_json) -> bytes:
    """Return an encoded body. Raises InvalidRequest, which names the input that cannot be encoded."""
    try:
        return write(fields | inputs)
    except (TypeError, ValueError) as error:
        for name, value in inputs.items():
            for index, item in enumerate([value] if isinstance(value, str) else value):
                if not _is_unicode(item):
                    location = Location(name, None if isinstance(value, str) else index)
                    raise InvalidRequest("holds a lone surrogate, which is no Unicode text.", location=location) from None
        raise InvalidRequest(f"the request cannot be encoded: {error}.") from None


def check_count(value: object, param: str) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise InvalidRequest(f"must be a positive number, is {value!r}.", param=param)


def set_fields(**fields: Any) -> Json:
    """Return the fields that are not None, structs as dicts."""
    return {
        name: msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else value
        for name, value in fields.items()
        if value is not None
    }


def _is_unicode(item: object) -> bool:
    if isinstance(item, tuple | list):
        return all(map(_is_unicode, cast(Sequence[object], item)))
    try:
        str.encode(item if isinstance(item, str) else "")
    except UnicodeEncodeError:
        return False
    return True


def text_list(texts: str | Iterable[Any]) -> list[Any]:
    """Return texts, pairs or token ids as a list that can be encoded. Raises InvalidRequest."""
    items = [each.tolist() if isinstance(each, np.ndarray) else each for each in as_list(texts)]
    for index, item in enumerate(items):
        if not isinstance(item, str | tuple | list):
            raise InvalidRequest(f"must be a string, is {type(item).__name__}.", item=index)
    return items


def choose_output(dialect: str, outputs: OutputNames, known: Iterable[str]) -> OutputName:
    """Return the single requested output of another server's API. Default: dense. Raises InvalidRequest."""
    names = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    if len(names) > 1:
        raise InvalidRequest("this API gives one output at a time.", param="outputs")
    output = names[0] if names else "dense"
    if output not in known:
        raise InvalidRequest(f"the dialect {dialect} has no {output!r}; it has {', '.join(known)}.", param="outputs")
    return output


def reject_options(dialect: str, options: TextOptions | ScoreOptions, known: Sequence[str]) -> None:
    """Raise InvalidRequest if another server's API lacks one of the options."""
    flags = ("late_chunking", "split_long", "muvera")
    for name, value in options.items():
        is_default = value is None or (value is False and name in flags) or (value is True and name == "truncate")
        if name not in known and not is_default:
            raise InvalidRequest(f"the dialect {dialect} has no such option; it takes {', '.join(known)}.", param=name)


def ranking_task(
    path: str, query: object, documents: Any, write: Writer, read_rows: ReadRows, *, max_items: int | None = None
) -> Task[Ranking]:
    """Return the task that scores documents for a query by another server's API. Raises InvalidRequest."""
    if not isinstance(query, str):
        raise InvalidRequest(f"must be a string, is {type(query).__name__}.", param="query")

    def read(reply: Reply, count: int) -> Ranking:
        return ranking_of(read_rows(reply.content), count)

    texts, locate = as_strings(documents, "documents"), locate_pairs("query", "documents", single=(True, False))
    return Task(path, texts, write, read, join_rankings, JSON, locate, is_list=True, may_be_empty=True, max_items=max_items)


def build_pairs(inputs: Mapping[str, Any], options: ScoreOptions) -> tuple[list[tuple[Any, Any]], Locate]:
    """Return pairs of the `inputs`, by the caller's names for them, and the function that locates their parts in errors."""
    output = options.get("score_by") or "dense"
    (queries, is_one), (documents, is_one_document) = (_side(texts, name, output) for name, texts in inputs.items())
    if is_one:
        queries = queries * len(documents)
    if len(queries) != len(documents):
        counts = f"{len(queries):,} queries and {len(documents):,} documents"
        raise InvalidRequest(f"{counts}; there must be one query, or one for each document.", param="documents")
    return list(zip(queries, documents, strict=True)), locate_pairs(*inputs, single=(is_one, is_one_document))


def _side(texts: object, name: str, output: OutputName) -> tuple[list[Any], bool]:
    """Return one side of the pairs as texts or encoded vectors, and whether it is a single item outside a list."""
    if isinstance(texts, str):
        return [texts], True
    if name == "query" and isinstance(texts, np.ndarray | tuple):
        return [_encode_vectors(cast(object, texts), Location(name))], True
    # an array of two dimensions holds a vector per text, unless `output` has a vector per token
    vectors = as_vector_list(texts, "sparse" if isinstance(texts, tuple) else output)
    is_single = vectors is not None and len(vectors) == 1 and vectors[0] is texts
    items = list[Any](as_list(cast(Any, texts), name)) if vectors is None else vectors
    items = [each if isinstance(each, str) else _encode_vectors(each, Location(name, i)) for i, each in enumerate(items)]
    return items, is_single


def _encode_vectors(vectors: object, location: Location) -> Json:
    """Return vectors in the form that a server takes in place of a text."""
    if isinstance(vectors, tuple) and len(cast(tuple[Any, ...], vectors)) == 2:
        ids, weights = cast(tuple[Any, Any], vectors)
        return {"ids": np.ascontiguousarray(ids, "<i4").tobytes(), "weights": np.ascontiguousarray(weights, "<f4").tobytes()}
    if not isinstance(vectors, np.ndarray) or isinstance(vectors, np.ma.MaskedArray):
        raise InvalidRequest(f"must be a string or an array, is {type(cast(object, vectors)).__name__}.", location=location)
    array = cast(NDArray[Any], vectors)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    if array.dtype.name not in _DTYPES or array.ndim not in (1, 2):
        summary = f"is of {array.dtype} and of {array.ndim} dimensions"
        raise InvalidRequest(f"{summary}; it takes one or two, of {', '.join(_DTYPES)} (bits).", location=location)
    kind = _DTYPES[array.dtype.name]
    data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    shape = [len(array), array.shape[-1] * (8 if kind == "binary" else 1)]
    return {"data": data, "dtype": kind} | ({"shape": shape} if array.ndim == 2 else {})
