"""TEI's /vertex: several bodies as / takes them, in one. Pure functions over bytes.

Source: text-embeddings-inference, router/src/http/server.rs (`vertex_compatibility`). There each is run by itself; here all run
as one request, so what they ask for must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from whimbrel.dialects.common.decode import decode
from whimbrel.dialects.common.fields import MAX_INPUTS
from whimbrel.dialects.common.route import Response, ServedModel
from whimbrel.dialects.rerank import MAX_PAIRS
from whimbrel.dialects.tei.answers import TEI, TERMS, is_wrong_model_type
from whimbrel.dialects.tei.embed import ModelName
from whimbrel.dialects.tei.root import RootRequest, parse_root, render_root
from whimbrel.dialects.tei.scores import TEIRerankRequest, parse_rerank, render_rerank
from whimbrel.errors import InvalidRequest, Location, TooLarge
from whimbrel.types.request import Request
from whimbrel.types.result import Outputs, Ragged, Result, Sparse

MAX_INSTANCES: Final = 256
"""The limit of instances; each takes about 0.1 ms to parse and to answer."""


class VertexRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /vertex."""

    instances: Annotated[
        list[msgspec.Raw],
        Meta(
            description="At most 256 bodies of `/`, or of `/rerank` if they have `texts`. They may differ in their inputs, "
            "but not in their options."
        ),
    ]
    model: ModelName = None


class VertexResponse(msgspec.Struct):
    """Answer of POST /vertex."""

    predictions: Annotated[list[Any], Meta(description="The answer to each instance.")]


class _Marks(msgspec.Struct):
    texts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class _Instance:
    body: RootRequest | TEIRerankRequest
    request: Request | Callable[[ServedModel], Request]


@dataclass(frozen=True, slots=True)
class Instances:
    """The instances of a body."""

    model: str | None
    each: Sequence[_Instance]


def parse_vertex(raw: bytes) -> tuple[Instances, Callable[[ServedModel], Request] | None]:
    """Return the body, and the function from a model to its Request. Raises InvalidRequest or TooLarge."""
    body = decode(VertexRequest, raw)
    if len(body.instances) > MAX_INSTANCES:
        raise TooLarge(f"{len(body.instances):,}; the limit is {MAX_INSTANCES:,}. Split the request.", param="instances")
    each: list[_Instance] = []
    for index, instance in enumerate(map(bytes, body.instances)):
        with _within(index):
            is_rerank = decode(_Marks, instance).texts is not msgspec.UNSET
            each.append(_Instance(*(parse_rerank if is_rerank else parse_root)(instance)))
    instances = Instances(body.model, each)
    return instances, (lambda model: _merge_requests(instances, model)) if each else None


def render_vertex(body: Instances, result: Result | None, model: ServedModel) -> bytes | Response:
    """Return the answer to each instance."""
    answers: list[Response] = []
    if result is not None:
        ends = accumulate((len(request.texts) for request in _requests(body, model)), initial=0)
        answers = [
            _write(instance.body, _part(result, start, end), model)
            for instance, (start, end) in zip(body.each, pairwise(ends), strict=True)
        ]
    held = sum(answer.memory_bytes for answer in answers)
    return Response(_pieces(answers), memory_bytes=held) if held else b"".join(_pieces(answers))


def _write(body: RootRequest | TEIRerankRequest, result: Result, model: ServedModel) -> Response:
    return render_rerank(body, result, model) if isinstance(body, TEIRerankRequest) else render_root(body, result, model)


def _pieces(answers: Sequence[Response]) -> Iterator[bytes | memoryview]:
    yield b'{"predictions":['
    for index, answer in enumerate(answers):
        if index:
            yield b","
        yield from answer.chunks
    yield b"]}"


def _requests(body: Instances, model: ServedModel) -> list[Request]:
    requests: list[Request] = []
    for index, instance in enumerate(body.each):
        with _within(index):
            requests.append(instance.request(model) if callable(instance.request) else instance.request)
    return requests


def _merge_requests(body: Instances, model: ServedModel) -> Request:
    """Return one request for the texts of all instances."""
    requests = _requests(body, model)
    common = replace(requests[0], texts=[])
    for index, request in enumerate(requests):
        if replace(request, texts=[]) != common:
            message = "asks for something else than instances[0]; send a request for each kind."
            raise InvalidRequest(message, param="instances", item=index)
    texts: list[Any] = [text for request in requests for text in request.texts]
    limit = MAX_PAIRS if isinstance(body.each[0].body, TEIRerankRequest) else MAX_INPUTS
    if len(texts) > limit:
        raise TooLarge(f"{len(texts):,} inputs in all; the limit is {limit:,}. Split the request.", param="instances")
    return replace(common, texts=texts)


def _part(result: Result, start: int, end: int) -> Result:
    """Return the part of a result that belongs to some of its texts."""
    outputs = {name: _rows(getattr(result.outputs, name), start, end) for name in Outputs.__slots__}
    return replace(result, outputs=Outputs(**outputs))


def _rows(output: Any, start: int, end: int) -> Any:
    if not isinstance(output, Ragged | Sparse):
        return None if output is None else output[start:end]
    offsets = output.offsets_N1[start : end + 1]
    rows, offsets = slice(offsets[0], offsets[-1]), offsets - offsets[0]
    if isinstance(output, Ragged):
        return Ragged(output.rows_XD[rows], offsets)
    return Sparse(output.ids_X[rows], output.weights_X[rows], offsets)


@contextmanager
def _within(index: int) -> Generator[None]:
    """Put errors that are raised within at the instance of that index."""
    try:
        yield
    except InvalidRequest as error:
        if is_wrong_model_type(error):
            raise
        path = "" if error.location is None else f".{TERMS.locate(error.location)}"
        raise error.at(Location("instances", index, path=path)) from None


def _locate_input(location: Location) -> Location:
    return Location("instances", path="" if location.item is None else f" (input {location.item} of all)")


_TERMS: Final = TERMS.extended({"input": _locate_input})


ROUTES: Final = (
    TEI.route(
        "/vertex", "Several bodies of `/` in one, as Vertex AI sends them (TEI).",
        parse_vertex, render_vertex, response_type=VertexResponse,
        example='{"instances": [{"inputs": "What is a whimbrel?"}, {"inputs": "A wader."}]}', terms=_TERMS,
        request_type=VertexRequest,
    ),
)  # fmt: skip
