"""POST /, /invocations and /vertex: the route that suits the model, as in TEI, and several such bodies in one. Pure.

A body of / with `texts` is one of /rerank; one whose inputs are a source and sentences, of /similarity. The first output of the
model decides whether any other is of /predict, /embed, /embed_sparse or /embed_all, or asks for entities, as pipelines of
transformers give them. TEI runs each instance of /vertex alone; here all run as one request, so their options must be equal.
Source: text-embeddings-inference, router/src/http/server.rs (`vertex_compatibility`).
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Annotated, Any, Final, Literal, cast

import msgspec
import numpy as np

from whimbrel.dialects.common.answers import answer_type, described
from whimbrel.dialects.common.bodies import MissingField, count, decode, schema, text_inputs
from whimbrel.dialects.common.responses import Response, ServedModel
from whimbrel.dialects.common.route import Parsed, ready
from whimbrel.dialects.common.schemas import ID_LISTS, IDS, MAX_INPUTS, TEXT, TEXT_LISTS, TEXT_PAIRS, TEXTS, Schema, any_of
from whimbrel.dialects.common.texts import side_of
from whimbrel.dialects.tei import embed, scores
from whimbrel.dialects.tei.answers import TEI, TERMS, is_wrong_model_type, timed
from whimbrel.dialects.tei.embed import Direction, Sentences, TEIModelName, TruncateFlag, VectorFields
from whimbrel.dialects.tei.scores import PredictParameters, Raw, TEIRerankRequest
from whimbrel.errors import InvalidRequest, Location
from whimbrel.outputs import scoring
from whimbrel.outputs.scoring import Operation
from whimbrel.types.options import MAX_PAIRS
from whimbrel.types.request import OutputName, Request
from whimbrel.types.result import Entity, Outputs, Ragged, Result, Sparse
from whimbrel.wire.json_base64 import to_json


class RootParameters(PredictParameters, frozen=True, kw_only=True):
    """The parameters of /predict and of /similarity, and of entities."""

    truncate: TruncateFlag = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None
    aggregation_strategy: Annotated[
        Literal["none", "simple", "first", "average", "max"] | None,
        schema("How token labels are grouped into entities, as in transformers. Default: `simple`."),
    ] = None


class RootRequest(VectorFields, frozen=True, kw_only=True):
    """Body of POST /: that of /embed, /embed_all, /embed_sparse or /predict, by the kind of the model, or of /similarity."""

    inputs: Annotated[
        str | Sentences | list[str | int | list[int | str]],
        text_inputs(TEXT, {"$ref": "#/components/schemas/Sentences"}, TEXTS, TEXT_LISTS, TEXT_PAIRS, IDS, ID_LISTS).says(
            "Inputs as the route takes them that suits the model."
        ),
    ]
    raw_scores: Raw = None
    parameters: Annotated[
        RootParameters | None, schema("Parameters of /predict and /similarity, as `InferenceClient` sends them.")
    ] = None


def parse_root(raw: bytes) -> Parsed[RootRequest]:
    body = decode(RootRequest, raw)
    if isinstance(body.inputs, Sentences):
        return ready(body, embed.similarity(body.inputs, cast(Any, body.parameters or RootParameters())))

    def request(model: ServedModel) -> Request:
        output = _first(model)
        if output == "scores":
            return scores.classes(cast(Any, body), scores.sequences(cast(Any, body.inputs)), model)  # it finds token ids
        if output == "token_scores":
            return _find_entities(body, model).request
        if output == "multi_vector":
            return embed.encode_request(body, output, side=side_of(model.card, body.input_type))
        return embed.dense(body) if output == "dense" else embed.encode_request(body, output)

    return Parsed(body, request)


_OF_VECTORS: Final = ("normalize", "dimensions", "prompt_name")
_OF_CLASSES: Final = ("function_to_apply", "top_k")


def _root_suits(body: RootRequest, model: ServedModel) -> bool:
    return isinstance(body.inputs, Sentences) or _suits(body, _first(model))


def _suits(body: RootRequest, output: OutputName) -> bool:
    """Return whether TEI, or a pipeline of transformers, would give such a body to a model of this kind.

    Texts go to models of vectors or of classes. Clients send `parameters`, even if empty, for classes and for entities alone;
    TEI itself finds no entities.
    """
    if isinstance(body.inputs, list) and any(isinstance(each, list) and str in map(type, each) for each in body.inputs):
        return output == "scores"
    if any(getattr(body, name) is not None for name in _OF_VECTORS):
        return output in ("dense", "sparse")
    if body.raw_scores is not None or any(getattr(body.parameters, name, None) is not None for name in _OF_CLASSES):
        return output == "scores"
    if body.parameters is not None and body.parameters.aggregation_strategy is not None:
        return output == "token_scores"
    return output in (("dense", "sparse", "scores") if body.parameters is None else ("scores", "token_scores"))


def parse_invocation(raw: bytes) -> Parsed[RootRequest]:
    """Parse a body of /invocations that has no field of any other route. Raises InvalidRequest in vLLM's words too."""
    try:
        return parse_root(raw)
    except MissingField as error:
        if str(error.location) != "inputs":
            raise
        message = (
            "is missing, and so are the fields of other routes; send inputs, or query and texts (TEI), or input, or query and "
            "documents (vLLM). Cannot find suitable handler for request."
        )
        raise InvalidRequest(message, location=error.location) from None


def render_root(body: RootRequest, result: Result, model: ServedModel) -> Response:
    if isinstance(body.inputs, Sentences):
        return embed.render_similarity(cast(Any, body), result, model)
    output = _first(model)
    if output == "scores":
        return scores.render_predict(cast(Any, body), result, model)
    if output == "token_scores":
        return _render_entities(body, result, model)
    return _WRITE[output](body, result, model)


_WRITE: Final[dict[OutputName, Callable[[Any, Result, ServedModel], Response]]] = {
    "dense": embed.render_embed,
    "sparse": embed.render_embed_sparse,
    "multi_vector": embed.render_embed_all,
}


def _first(model: ServedModel) -> OutputName:
    return next(iter(model.card.outputs))


def _find_entities(body: RootRequest, model: ServedModel) -> Operation[list[list[Entity]]]:
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("must be a text or a list of texts: this model finds entities.", param="input")
    aggregation = (body.parameters and body.parameters.aggregation_strategy) or "simple"
    cut_at = embed.cut(body.truncate, body.truncation_direction)
    return scoring.token_classify(model.card, cast(list[str], texts), aggregation, truncate=cut_at)


def _render_entities(body: RootRequest, result: Result, model: ServedModel) -> Response:
    grouped = (body.parameters and body.parameters.aggregation_strategy) != "none"
    label = "entity_group" if grouped else "entity"
    rows = [
        [{label: e.label, "score": np.float32(e.score), "word": e.text, "start": e.start, "end": e.end} for e in entities]
        for entities in _find_entities(body, model).postprocess(result)
    ]
    answer: object = rows[0] if isinstance(body.inputs, str) else rows
    return timed(to_json(answer), result, model, embed.count_characters(cast(Any, body.inputs)))


_RERANK: Final[Schema] = {"required": ["texts"]}
_INSTANCE: Final = any_of(
    {"allOf": [{"$ref": "#/components/schemas/TEIRerankRequest"}, _RERANK]},
    {"allOf": [{"$ref": "#/components/schemas/RootRequest"}, {"not": _RERANK}]},
)
MAX_INSTANCES: Final = 256
"""The limit of instances; each takes about 0.1 ms to parse and to answer."""


class VertexRequest(msgspec.Struct, frozen=True, kw_only=True):
    instances: Annotated[
        list[msgspec.Raw],
        count(MAX_INSTANCES, "", least=0).says(
            "At most {most} bodies of `/`, or of `/rerank` if they have `texts`. They may differ in their inputs, but not in "
            "their options.",
            items=_INSTANCE,
        ),
    ]
    model: TEIModelName = None


VertexResponse: Final = answer_type(
    "VertexResponse", "Answer of POST /vertex.", predictions=described(list[Any], "The answer to each instance.")
)


class _Marks(msgspec.Struct):
    texts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class Instances:
    """Instances, each a parsed body."""

    model: str | None
    each: Sequence[Parsed[RootRequest] | Parsed[TEIRerankRequest]]


def parse_vertex(raw: bytes) -> Parsed[Instances]:
    body = decode(VertexRequest, raw)
    each: list[Parsed[RootRequest] | Parsed[TEIRerankRequest]] = []
    for index, instance in enumerate(map(bytes, body.instances)):
        with _locate_errors(index):
            is_rerank = decode(_Marks, instance).texts is not msgspec.UNSET
            each.append((scores.parse_rerank if is_rerank else parse_root)(instance))
    instances = Instances(body.model, each)
    if not each:
        return ready(instances, None)
    return Parsed(instances, lambda model: _merge_requests(instances, model))


def _vertex_suits(body: Instances, model: ServedModel) -> bool:
    return all(_root_suits(each.body, model) for each in body.each if isinstance(each.body, RootRequest))


def render_vertex(body: Instances, result: Result | None, model: ServedModel) -> bytes | Response:
    answers: list[Response] = []
    if result is not None:
        ends = accumulate((len(request.texts) for request in _requests(body, model)), initial=0)
        answers = [
            _write(instance.body, _part(result, start, end), model)
            for instance, (start, end) in zip(body.each, pairwise(ends), strict=True)
        ]
    size = sum(answer.memory_bytes for answer in answers)
    return Response(_pieces(answers), memory_bytes=size) if size else b"".join(_pieces(answers))


def _write(body: RootRequest | TEIRerankRequest, result: Result, model: ServedModel) -> Response:
    return scores.render_rerank(body, result, model) if isinstance(body, TEIRerankRequest) else render_root(body, result, model)


def _pieces(answers: Sequence[Response]) -> Iterator[bytes | memoryview]:
    yield b'{"predictions":['
    for index, answer in enumerate(answers):
        if index:
            yield b","
        yield from answer.chunks
    yield b"]}"


def _requests(body: Instances, model: ServedModel) -> list[Request]:
    requests: list[Request] = []
    for index, parsed in enumerate(body.each):
        with _locate_errors(index):
            requests.append(cast(Request, parsed.request(model)))
    return requests


def _merge_requests(body: Instances, model: ServedModel) -> Request:
    requests = _requests(body, model)
    common = replace(requests[0], texts=[])
    for index, request in enumerate(requests):
        if replace(request, texts=[]) != common:
            message = "asks for something else than instances[0]; send a request for each kind."
            raise InvalidRequest(message, param="instances", item=index)
    texts: list[Any] = [text for request in requests for text in request.texts]
    limit = MAX_PAIRS if isinstance(body.each[0].body, TEIRerankRequest) else MAX_INPUTS
    count(limit, " inputs in all").check(texts, Location("instances"))
    return replace(common, texts=texts)


def _part(result: Result, start: int, end: int) -> Result:
    outputs = {name: _rows(getattr(result.outputs, name), start, end) for name in Outputs.__slots__}
    offsets = None if result.token_offsets is None else result.token_offsets[start:end]
    return replace(result, outputs=Outputs(**outputs), token_offsets=offsets)


def _rows(output: Any, start: int, end: int) -> Any:
    if not isinstance(output, Ragged | Sparse):
        return None if output is None else output[start:end]
    offsets = output.offsets_N1[start : end + 1]
    rows, offsets = slice(offsets[0], offsets[-1]), offsets - offsets[0]
    if isinstance(output, Ragged):
        return Ragged(output.rows_XD[rows], offsets)
    return Sparse(output.ids_X[rows], output.weights_X[rows], offsets)


@contextmanager
def _locate_errors(index: int) -> Generator[None]:
    """Locate errors that are raised inside the block at the instance `index`."""
    try:
        yield
    except InvalidRequest as error:
        if is_wrong_model_type(error):
            raise
        path = "" if error.location is None else f".{TERMS.locate(error.location)}"
        raise error.at(Location("instances", index, path=path)) from None


def _locate_input(location: Location) -> Location:
    return Location("instances", path="" if location.item is None else f" (input {location.item} of all)")


_ROOT: Final = TEI(
    "/", "The route that suits the model: /embed, /embed_sparse, /embed_all, /predict or entities; or /similarity (TEI).",
    parse_root, render_root, response_type=list[Any], example='{"inputs": "What is a whimbrel?"}', suits=_root_suits,
)  # fmt: skip
_VERTEX: Final = TEI(
    "/vertex", "Several bodies of `/` in one, as Vertex AI sends them (TEI).",
    parse_vertex, render_vertex, response_type=VertexResponse,
    example='{"instances": [{"inputs": "What is a whimbrel?"}, {"inputs": "A wader."}]}',
    terms=TERMS.extended({"input": _locate_input}), body_type=VertexRequest, suits=_vertex_suits,
)  # fmt: skip

ROUTES: Final = (
    _ROOT,
    replace(scores.RERANK, path="/"),
    replace(_ROOT, path="/invocations", parse=parse_invocation),
    replace(scores.RERANK, path="/invocations"),
    _VERTEX,
)
