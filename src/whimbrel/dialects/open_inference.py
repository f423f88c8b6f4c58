"""The Open Inference Protocol, version 2, over REST, as KServe and Triton have it. Pure functions over bytes.

Texts are tensors of BYTES, vectors and scores tensors of FP32. They stand in the JSON, or as bytes behind it (the extension
`binary_tensor_data`). Outputs whose rows differ in length are refused. Unknown parameters are ignored.
Sources: kserve/open-inference-protocol, specification/protocol; triton-inference-server/server,
docs/protocol/extension_binary_data.md; what kserve 0.21 and tritonclient 2.73 send.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Annotated, Any, ClassVar, Final

import msgspec

from whimbrel import __version__
from whimbrel.dialects.common.activation import class_names
from whimbrel.dialects.common.answers import answer_type, described
from whimbrel.dialects.common.bodies import EMPTY, NOT_EMPTY, Empty, MissingField, Natural, decode, schema
from whimbrel.dialects.common.responses import JSON, OCTETS, Response, ServedModel, json_answer
from whimbrel.dialects.common.route import ErrorTerms, GetRoute, Parse, Parsed, Route
from whimbrel.dialects.common.schemas import MAX_INPUTS, ONE_PROMPT, TEXT_LISTS, TEXTS, Schema, any_of
from whimbrel.dialects.common.texts import Columns, Instruction, ModelName, PromptName, TextUse, Truncation
from whimbrel.errors import InvalidRequest, Location, TooLarge, WhimbrelError
from whimbrel.outputs.requested import can_score
from whimbrel.types.card import Card
from whimbrel.types.options import MAX_PAIRS, require
from whimbrel.types.request import OutputName, Pair, Request, read_truncate
from whimbrel.types.result import Result
from whimbrel.wire.dtypes import EncodedArray
from whimbrel.wire.json_base64 import to_json

JSON_LENGTH: Final = "Inference-Header-Content-Length"
"""The header with the length of the JSON that bytes of tensors follow."""
_TENSORS: Final[Mapping[str, OutputName]] = {"embedding": "dense", "score": "scores"}
_LENGTH: Final = 4
"""Bytes of the little-endian length before each text of a binary tensor."""
_SHAPE: Final = [{"type": "integer", "minimum": 1, "maximum": MAX_PAIRS}, {"const": 1}]
_DATA: Final = any_of(TEXTS, TEXT_LISTS, {"type": "null"})
_SharedMemory = Annotated[str | None, schema("Refused: tensors are sent.", type="null")]


class InputParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of an input tensor."""

    binary_data_size: Annotated[
        Natural | None,
        schema(
            f"The size of the tensor behind the JSON, in place of `data`: of each text its length in {_LENGTH} bytes, "
            "little-endian, and its UTF-8. Tensors follow each other as the inputs do."
        ),
    ] = None
    shared_memory_region: _SharedMemory = None


class InputTensor(msgspec.Struct, frozen=True, kw_only=True):
    """An input: texts."""

    name: str
    shape: Annotated[list[int], schema("The number of texts: [N], or [N, 1].", minItems=1, maxItems=2, prefixItems=_SHAPE)]
    datatype: Annotated[str, schema(enum=["BYTES"])]
    data: Annotated[list[str | list[str]] | None, schema("The texts, or a list with each.", **_DATA)] = None
    parameters: InputParameters | None = None


class OutputParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of an output tensor."""

    binary_data: Annotated[bool | None, schema("Send the tensor behind the JSON. Default: `binary_data_output`.")] = None
    classification: Annotated[int | None, schema("Refused: `score` has all classes.", type="null")] = None
    shared_memory_region: _SharedMemory = None


class RequestedOutput(msgspec.Struct, frozen=True, kw_only=True):
    """An output to send."""

    name: Annotated[str, schema("`embedding` or `score`, as the model has it.")]
    parameters: OutputParameters | None = None


class InferParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a request."""

    RULES: ClassVar[tuple[Schema, ...]] = ONE_PROMPT
    input_type: TextUse = None
    prompt: Annotated[str | None, schema("Text put before each text or query, instead of a named prompt.")] = None
    prompt_name: PromptName = None
    instruction: Instruction = None
    dimensions: Columns = None
    normalize: Annotated[bool | None, schema("Divide vectors by their Euclidean norm. Default: as the model does.")] = None
    activate: Annotated[bool | None, schema("Apply the activation to scores. Default: as the model does.")] = None
    truncate: Annotated[
        Truncation,
        schema(
            "The end at which a text that is too long is cut; `false` or `never` makes it an error, `true` cuts as the model "
            "does. Default: texts are cut as the model does, and pairs are an error."
        ),
    ] = None
    binary_data_output: Annotated[bool | None, schema("Send output tensors behind the JSON. Default: false.")] = None


class InferRequest(msgspec.Struct, frozen=True, kw_only=True):
    inputs: Annotated[
        list[InputTensor],
        schema(
            "One tensor of texts, of any name; or two, which are pairs: `query` and another, or `text_pair` and another, whose "
            "texts are then the first of each pair. One query goes with all texts, or one with each.",
            minItems=1,
            maxItems=2,
        ),
    ]
    outputs: Annotated[list[RequestedOutput] | None, schema("The outputs to send. Default: all of the model's.")] = None
    id: Annotated[str | None, schema("Comes back.")] = None
    parameters: InferParameters | None = None
    model: ModelName = None
    """Name of the model for a path that has none."""


_TENSOR: Final = {"name": str, "datatype": str, "shape": list[int]}
OutputTensor: Final = answer_type(
    "OutputTensor", "An output: FP32, row by row.",
    **_TENSOR, data=(list[float] | None, None),
    parameters=described(dict[str, int] | None, "`binary_data_size` of a tensor that follows the JSON.", None),
)  # fmt: skip
InferResponse: Final = answer_type(
    "InferResponse", f"Answer of POST /v2/models/{{model}}/infer. With binary tensors the header {JSON_LENGTH} has its length.",
    model_name=str, outputs=list[OutputTensor], id=(str | None, None),
    model_version=described(str | None, "The revision of the model.", None),
)  # fmt: skip
ServerMetadata: Final = answer_type("ServerMetadata", "Answer of GET /v2.", name=str, version=str, extensions=list[str])
Live: Final = answer_type("Live", "Answer of GET /v2/health/live.", live=bool)
Ready: Final = answer_type("Ready", "Answer of GET /v2/health/ready.", ready=bool)
ModelReady: Final = answer_type("ModelReady", "Answer of GET /v2/models/{model}/ready.", name=str, ready=bool)
TensorMetadata: Final = answer_type(
    "TensorMetadata", "A tensor; -1 is any size.",
    **_TENSOR, parameters=described(dict[str, list[str]] | None, "`labels` of classes.", None),
)  # fmt: skip
ModelMetadata: Final = answer_type(
    "ModelMetadata", "Answer of GET /v2/models/{model}.",
    name=str, versions=described(list[str], "The revision of the model."), platform=str,
    inputs=list[TensorMetadata], outputs=list[TensorMetadata],
)  # fmt: skip


def parse_infer(raw: bytes, headers: Mapping[bytes, bytes] | None = None) -> Parsed[InferRequest]:
    size = _json_length(raw, (headers or {}).get(JSON_LENGTH.lower().encode()))
    body = decode(InferRequest, raw[:size])
    texts, listwise = _texts_of(body, memoryview(raw)[size:])
    for index, output in enumerate(body.outputs or ()):
        _check_output(output, Location("outputs", index))
    return Parsed(body, partial(_request, body, texts, listwise))


def parse_by(headers: Mapping[bytes, bytes]) -> Parse:
    return partial(parse_infer, headers=headers)


def _json_length(raw: bytes, stated: bytes | None) -> int:
    if stated is None:
        return len(raw)
    size = int(stated) if stated.isdigit() and len(stated) < 20 else -1
    if not 0 <= size <= len(raw):
        text = stated[:40].decode("latin-1")
        raise InvalidRequest(f"is {text!r}; it takes the bytes of the JSON, of {len(raw):,} in all.", param=JSON_LENGTH)
    return size


def _texts_of(body: InferRequest, binary: memoryview) -> tuple[list[str] | list[Pair], bool]:
    """Return the texts or pairs of a body and the bytes behind it, and whether one query is for all. Raises InvalidRequest."""
    if not 1 <= len(body.inputs) <= 2:
        raise InvalidRequest(f"are {len(body.inputs):,}; send one tensor of texts, or two of pairs.", param="inputs")
    most = MAX_INPUTS if len(body.inputs) == 1 else MAX_PAIRS
    tensors: dict[str, list[str]] = {}
    for index, tensor in enumerate(body.inputs):
        place = Location("inputs", index)
        if tensor.name in tensors:
            raise InvalidRequest(f"two tensors are named {tensor.name[:100]!r}.", location=place.below(".name"))
        count = _count(tensor, most, place)
        size = _binary_size(tensor, binary, place)
        tensors[tensor.name] = (
            _listed(tensor.data, count, place.below(".data"))
            if size is None
            else _unpacked(bytes(binary[:size]), count, place.below(".data"))
        )
        binary = binary[size or 0 :]
    if binary:
        raise InvalidRequest(f"leaves {len(binary):,} bytes behind the JSON that no input has.", param=JSON_LENGTH)
    if len(tensors) == 1:
        return next(iter(tensors.values())), False
    return _pairs(tensors)


def _count(tensor: InputTensor, most: int, place: Location) -> int:
    """Return the number of texts of a tensor. Raises InvalidRequest and TooLarge."""
    shape = tensor.shape
    if tensor.datatype != "BYTES":
        message = f"is {tensor.datatype[:40]!r}; texts are BYTES, and this server takes nothing else."
        raise InvalidRequest(message, location=place.below(".datatype"))
    if len(shape) not in (1, 2) or shape[0] < 0 or shape[1:] not in ([], [1]):
        raise InvalidRequest(f"is {str(shape[:4])[:80]}; texts have [N], or [N, 1].", location=place.below(".shape"))
    if shape[0] == 0:
        raise Empty(EMPTY, location=place.below(".data"))
    if shape[0] > most:
        raise TooLarge(f"{shape[0]:,} texts; the limit is {most:,}. Split the request.", location=place.below(".shape"))
    return shape[0]


def _binary_size(tensor: InputTensor, binary: memoryview, place: Location) -> int | None:
    """Return the size of a tensor behind the JSON; None if it is within. Raises InvalidRequest."""
    parameters = tensor.parameters or InputParameters()
    if parameters.shared_memory_region is not None:
        _refuse_shared_memory(place)
    size = parameters.binary_data_size
    if size is None:
        return None
    if tensor.data is not None:
        raise InvalidRequest("stands beside binary_data_size; give one of them.", location=place.below(".data"))
    if size > len(binary):
        message = f"is {size:,}, and behind the JSON are {len(binary):,} bytes. {JSON_LENGTH} says where it ends."
        raise InvalidRequest(message, location=place.below(".parameters.binary_data_size"))
    return size


def _refuse_shared_memory(place: Location) -> None:
    message = "there is no shared memory here; send the tensor in the body."
    raise InvalidRequest(message, location=place.below(".parameters.shared_memory_region"))


def _listed(data: list[str | list[str]] | None, count: int, place: Location) -> list[str]:
    """Return the texts of a tensor in JSON, each of which may be a list of one. Raises InvalidRequest."""
    if data is None:
        raise MissingField("is missing; send it, or binary_data_size.", location=place)
    rows = [[each] if isinstance(each, str) else each for each in data]
    if any(len(row) != 1 for row in rows):
        index = next(i for i, row in enumerate(rows) if len(row) != 1)
        raise InvalidRequest("must be one text.", location=place.below(f"[{index}]"))
    if len(rows) != count:
        raise InvalidRequest(f"has {len(rows):,} texts, and the shape has {count:,}.", location=place)
    return [text for (text,) in rows]


def _unpacked(data: bytes, count: int, place: Location) -> list[str]:
    """Return the texts of a binary tensor, each after its length. Raises InvalidRequest."""
    texts: list[str] = []
    end = 0
    for index in range(count):
        start = end + _LENGTH
        end = start + int.from_bytes(data[end:start], "little")
        if max(start, end) > len(data):
            raise InvalidRequest(f"ends within text {index:,} of {count:,}.", location=place)
        try:
            texts.append(data[start:end].decode())
        except UnicodeDecodeError:
            raise InvalidRequest("is not valid UTF-8.", location=place.below(f"[{index}]")) from None
    if end != len(data):
        raise InvalidRequest(f"has {len(data) - end:,} bytes more than the {count:,} texts of the shape.", location=place)
    return texts


def _pairs(tensors: Mapping[str, list[str]]) -> tuple[list[Pair], bool]:
    names = list(tensors)
    if "query" in names:
        names.sort(key=lambda name: name != "query")
    elif "text_pair" in names:
        names.sort(key=lambda name: name == "text_pair")
    else:
        raise InvalidRequest("two tensors are pairs if one is named query or text_pair; neither is.", param="inputs")
    firsts, seconds = (tensors[name] for name in names)
    listwise = len(firsts) == 1
    if not listwise and len(firsts) != len(seconds):
        message = f"{len(firsts):,} texts for {len(seconds):,} of {names[1][:100]!r}; there must be one, or one for each."
        raise InvalidRequest(message, param=names[0][:100])
    for index, first in enumerate(firsts):
        NOT_EMPTY.check(first, Location(names[0][:100], index))
    return list(zip(firsts * len(seconds) if listwise else firsts, seconds, strict=True)), listwise


def _check_output(output: RequestedOutput, place: Location) -> None:
    parameters = output.parameters or OutputParameters()
    if parameters.classification:
        message = "scores are not sorted here; `score` has all classes, and GET /v2/models/{model} their labels."
        raise InvalidRequest(message, location=place.below(".parameters.classification"))
    if parameters.shared_memory_region is not None:
        _refuse_shared_memory(place)


def _request(body: InferRequest, texts: list[str] | list[Pair], listwise: bool, model: ServedModel) -> Request:
    options, card = body.parameters or InferParameters(), model.card
    pairs = isinstance(texts[0], tuple)
    cuts = not pairs or options.truncate is not None or card.text_formats or card.list_template
    return Request(
        texts,
        _outputs(body, card, pairs=pairs),
        prompt=options.prompt,
        prompt_name=options.prompt_name,
        input_type=options.input_type,
        instruction=options.instruction,
        listwise=listwise,
        dimensions=options.dimensions,
        normalize=options.normalize,
        activate=options.activate,
        truncate=read_truncate(options.truncate) if cuts else "never",
        split_long=False if options.truncate is True and not pairs else None,
    )


def _outputs(body: InferRequest, card: Card, *, pairs: bool) -> tuple[OutputName, ...]:
    """Return the outputs that a body asks for, or all. Raises InvalidRequest."""
    tensors = _tensors_of(card, pairs=pairs)
    names = [each.name for each in body.outputs or ()] or list(tensors)
    if not names:
        names = list(card.outputs)[:1]
    for index, name in enumerate(names):
        place = Location("outputs", index)
        if name in card.all_outputs and name not in _TENSORS.values():
            route = "/v1/token_classify" if name == "token_scores" else "/v1/embed"
            raise InvalidRequest(f"rows of {name} differ in length, and no tensor has them; POST {route} does.", location=place)
        if name not in tensors:
            given = ", ".join(tensors) or "no tensors"
            raise InvalidRequest(f"no output {name[:100]!r}; this model gives {given} for these inputs.", location=place)
    return tuple(tensors[name] for name in dict.fromkeys(names))


def _tensors_of(card: Card, *, pairs: bool) -> dict[str, OutputName]:
    """Return the tensors that a model gives for texts, or for pairs, by name."""
    if pairs:
        return {"score": "scores"} if can_score(card) else {}
    return {name: output for name, output in _TENSORS.items() if output in card.outputs}


def render_infer(body: InferRequest, result: Result, model: ServedModel) -> bytes | Response:
    asked = {each.name: each.parameters or OutputParameters() for each in body.outputs or ()}
    default = bool(body.parameters and body.parameters.binary_data_output)
    tensors: list[dict[str, Any]] = []
    binary: list[EncodedArray] = []
    for name in asked or [name for name, output in _TENSORS.items() if getattr(result.outputs, output) is not None]:
        rows = require(getattr(result.outputs, _TENSORS[name]))
        array = EncodedArray(rows[:, 0] if name == "score" and rows.shape[1] == 1 else rows)
        tensors.append({"name": name, "datatype": "FP32", "shape": array.shape})
        wanted = asked[name].binary_data if name in asked else None
        if default if wanted is None else wanted:
            tensors[-1]["parameters"] = {"binary_data_size": array.nbytes}
            binary.append(array)
        else:
            tensors[-1]["data"] = array.array.reshape(-1)
    about: dict[str, Any] = {"model_name": model.plan.served_name}
    about |= {"model_version": model.plan.revision} if model.plan.revision else {}
    about |= {"outputs": tensors} if body.id is None else {"id": body.id, "outputs": tensors}
    if not binary:
        return json_answer(about, result)
    head = to_json(about)
    size = len(head) + sum(array.nbytes for array in binary)
    chunks = chain([head], *(array.chunks() for array in binary))
    return Response(chunks, OCTETS, {JSON_LENGTH: str(len(head))}, size)


def render_server(models: Sequence[ServedModel]) -> bytes:
    return to_json({"name": "whimbrel", "version": __version__, "extensions": ["binary_tensor_data"]})


def render_model(models: Sequence[ServedModel]) -> bytes:
    [model] = models
    card, revision = model.card, model.plan.revision
    pairs = not _tensors_of(card, pairs=False) or card.judges_pairs
    tensors = _tensors_of(card, pairs=pairs)
    outputs = [_metadata(name, *_columns(card, output)) for name, output in tensors.items()]
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [-1]} for name in (("query", "text") if pairs and tensors else ("text",))
    ]
    about = {"name": model.plan.served_name, "versions": [revision] if revision else [], "platform": "whimbrel"}
    return to_json(about | {"inputs": inputs, "outputs": outputs})


def _columns(card: Card, name: OutputName) -> tuple[int, tuple[str, ...]]:
    """Return the number of columns of an output, 1 for similarities, and the names of its classes."""
    if name not in card.outputs:
        return 1, ()
    output = card.output(name)
    return output.default_width or output.width, () if name == "dense" else class_names(card.labels, output.width)


def _metadata(name: str, columns: int, labels: tuple[str, ...]) -> dict[str, Any]:
    shape = [-1] if name == "score" and columns == 1 else [-1, columns]
    about: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": shape}
    return about | ({"parameters": {"labels": labels}} if len(labels) > 1 else {})


InferenceError: Final = answer_type("InferenceError", "An error of the Open Inference Protocol.", error=str)


_TERMS: Final = ErrorTerms({name: f"parameters.{name}" for name in InferParameters.__struct_fields__})


def render_error(error: WhimbrelError, terms: ErrorTerms = _TERMS) -> bytes:
    return msgspec.json.encode({"error": terms.describe(error)[0]})


_get = partial(GetRoute, render_error=render_error, error_type=InferenceError)
_MODEL: Final = "/v2/models/{model}"

ROUTES: Final = (
    Route(
        f"{_MODEL}/infer", "Vectors of texts, or scores, as tensors (KServe, Triton).", parse_infer, render_infer,
        response_type=InferResponse, render=render_error, error_type=InferenceError, terms=_TERMS, media_types=(JSON, OCTETS),
        parse_by=parse_by,
        example='{"inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": ["A wader.", "A sandwich."]}]}',
    ),
)  # fmt: skip
GET_ROUTES: Final = (
    _get("/v2", "The server and its extensions (KServe, Triton).", render_server, response_type=ServerMetadata),
    _get("/v2/health/live", "Whether the process runs (KServe, Triton).", lambda _: b'{"live":true}', response_type=Live),
    _get(
        "/v2/health/ready", "Whether requests are answered: 200 or 503 (KServe, Triton).", lambda _: b'{"ready":true}',
        response_type=Ready, if_ready=True,
    ),
    _get(_MODEL, "The tensors of a model (KServe, Triton).", render_model, response_type=ModelMetadata),
    _get(
        f"{_MODEL}/ready", "Whether a model answers: 200 or 503 (KServe, Triton).",
        lambda models: to_json({"name": models[0].plan.served_name, "ready": True}), response_type=ModelReady, if_ready=True,
    ),
)  # fmt: skip
