"""Jina's embeddings, multi-vector and rerank APIs, for texts. Pure functions over bytes.

Texts that exceed the limit are an error by default. Whimbrel's own fields of /v1/embeddings are accepted; unknown fields are
ignored. OpenAI's route takes `late_chunking` and objects in `input` too.
Source: Jina's API (api.jina.ai/openapi.json) and its clients in LlamaIndex and LangChain.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec.structs import replace

from whimbrel.dialects.common.answers import Usage, answer_type, described, usage, word
from whimbrel.dialects.common.bodies import decode, schema
from whimbrel.dialects.common.hosted import ServiceError, ServiceFields, check_bits, quantize, render_error, status
from whimbrel.dialects.common.rerank import RERANK
from whimbrel.dialects.common.responses import Response, ServedModel, json_answer
from whimbrel.dialects.common.route import ErrorTerms, Parsed, Route
from whimbrel.dialects.common.texts import SIDES, prompt_for_task, text_request
from whimbrel.errors import InvalidRequest
from whimbrel.types.request import OutputName, Request
from whimbrel.types.result import Result
from whimbrel.wire.dtypes import EncodedArray
from whimbrel.wire.json_base64 import LazyList, base64_rows, number_rows, to_base64

JinaType: TypeAlias = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]

_TASKS: Final = ("retrieval", "text-matching", "classification", "separation", "clustering")


class JinaEmbeddingsRequest(ServiceFields, frozen=True, kw_only=True):
    """Body of POST /v1/embeddings where it has one of these fields, and of POST /v1/multi-vector."""

    task: Annotated[
        str | None,
        schema(
            "What the texts are for: the model's prompt (and adapter) of that name if it has one. `retrieval.query` and all in "
            "`.query` are queries, all in `.passage` documents. Of a model with an adapter per task, such as "
            "jina-embeddings-v5, the adapter of that name. To others `retrieval`, `text-matching`, `classification`, "
            "`separation` and `clustering` say nothing."
        ),
    ] = None
    embedding_type: Annotated[
        JinaType | list[JinaType] | None,
        schema(
            "`float` by default. `int8`, `uint8`: 127ths of a vector's largest entry, and that + 128. `ubinary`, `binary`: "
            "bits, eight to a byte, and that - 128. `base64`: the bytes of little-endian float32. Of a list of several, each "
            "`embedding` is an object with each."
        ),
    ] = None
    encoding_type: Annotated[JinaType | None, schema("The same as `embedding_type` (LlamaIndex).")] = None
    normalized: Annotated[bool | None, schema("Divide vectors by their Euclidean norm. Default: as the model does.")] = None
    return_multivector: Annotated[
        bool | None, schema("Return a vector for each token, under `embeddings`. Default: false.")
    ] = None


JinaEmbedding: Final = answer_type(
    "JinaEmbedding", "The vectors of one text.",
    index=int, embedding=(list[float] | str | dict[str, list[float] | str] | None, None),
    embeddings=described(
        list[list[float] | str] | dict[str, list[list[float] | str]] | None,
        "The token vectors, in place of `embedding`.", None,
    ),
    object=(Literal["embedding", "embeddings"], "embedding"),
)  # fmt: skip
JinaEmbeddingsResponse: Final = answer_type(
    "JinaEmbeddingsResponse", "Answer of POST /v1/embeddings and /v1/multi-vector.",
    data=list[JinaEmbedding], model=str, usage=Usage, object=word("list"),
)  # fmt: skip


def parse_embeddings(raw: bytes, default: OutputName = "dense") -> Parsed[JinaEmbeddingsRequest]:
    body = decode(JinaEmbeddingsRequest, raw)
    output: OutputName = "multi_vector" if body.return_multivector else default
    side = SIDES.get((body.task or "").rpartition(".")[2], None if default == "dense" else "document")
    normalize = body.normalize if body.normalized is None else body.normalized
    truncate = False if body.truncate is None else body.truncate
    body = replace(body, input_type=body.input_type or side, normalize=normalize, truncate=truncate)
    request_without_task = text_request(body, (output,), input_type=body.input_type)

    def request(model: ServedModel) -> Request:
        check_bits(model.card, output, body.dimensions, _kinds(body), param="embedding_type")
        return request_without_task if body.task is None else _for_task(body.task, request_without_task, model)

    return Parsed(body, request)


def parse_multi_vector(raw: bytes) -> Parsed[JinaEmbeddingsRequest]:
    return parse_embeddings(raw, "multi_vector")


def _kinds(body: JinaEmbeddingsRequest) -> Sequence[str]:
    kinds = body.embedding_type or body.encoding_type or body.encoding_format or "float"
    return (kinds,) if isinstance(kinds, str) else tuple(dict.fromkeys(kinds))


def _for_task(task: str, request: Request, model: ServedModel) -> Request:
    card, purpose = model.card, prompt_for_task(model.card, task, request.input_type)
    tasks = card.tasks or _TASKS
    is_general = not card.tasks and (task in _TASKS or task.rpartition(".")[2] in SIDES)
    if purpose["prompt_name"] is None and "adapter" not in purpose and not is_general:
        names = ", ".join(dict.fromkeys((*card.prompts, "retrieval.query", "retrieval.passage", *tasks)))
        raise InvalidRequest(f"{task[:40]!r} is no prompt of this model, and no task; it takes: {names}.", param="task")
    if request.adapter is not None and purpose.setdefault("adapter", request.adapter) != request.adapter:
        message = f"is {request.adapter!r}, and task names {purpose['adapter']!r}; give one of them."
        raise InvalidRequest(message, param="adapter")
    if request.prompt is not None or request.prompt_name is not None:
        purpose = {key: value for key, value in purpose.items() if key == "adapter"}
    return dataclasses.replace(request, **purpose)


def render_embeddings(body: JinaEmbeddingsRequest, result: Result, model: ServedModel) -> bytes | Response:
    texts_N, kinds = result.outputs.multi_vector, _kinds(body)
    name = "embedding" if texts_N is None else "embeddings"
    columns = {kind: _columns(result, kind) for kind in kinds}
    values = columns[kinds[0]]
    if len(kinds) > 1:
        values = [dict(zip(kinds, each, strict=True)) for each in zip(*columns.values(), strict=True)]
    data = [{"object": name, "index": index, name: value} for index, value in enumerate(values)]
    content = {"object": "list", "data": data, "model": model.plan.served_name, "usage": usage(result)}
    return json_answer(content, result, as_text=texts_N is None and kinds == ("base64",), times=len(kinds))


def _columns(result: Result, kind: str) -> Any:
    """Return the vector of each text, or its token vectors, whose base64 is made when they are printed."""
    if result.outputs.multi_vector is None:
        vectors_ND = quantize(result.dense, kind)
        return base64_rows(vectors_ND) if kind == "base64" else number_rows(vectors_ND)
    texts = [quantize(rows_TD, kind) for rows_TD in result.outputs.multi_vector]
    return [LazyList(_base64(rows_TD)) for rows_TD in texts] if kind == "base64" else texts


def _base64(rows_TD: EncodedArray) -> Iterator[str]:
    yield from to_base64(rows_TD)


_TERMS: Final = ErrorTerms({"outputs": "model"}, {"truncate": "truncate=true"})
_JINA: Final = partial(Route, render=render_error, error_type=ServiceError, terms=_TERMS, status=status)
_EXAMPLE: Final = '"input": ["A whimbrel is a wader."]'

ROUTES: Final = (
    _JINA(
        "/v1/embeddings",
        "Vectors of texts: a body with `task`, `embedding_type`, `normalized` or `return_multivector` (Jina).",
        parse_embeddings, render_embeddings, response_type=JinaEmbeddingsResponse,
        made_for="dense", example=f'{{{_EXAMPLE}, "task": "retrieval.passage", "embedding_type": "ubinary"}}',
        discriminators=frozenset(("task", "embedding_type", "encoding_type", "normalized", "return_multivector")),
    ),
    _JINA(
        "/v1/multi-vector", "A vector for each token of texts (Jina).",
        parse_multi_vector, render_embeddings, response_type=JinaEmbeddingsResponse,
        made_for="multi_vector", example=f'{{{_EXAMPLE}, "input_type": "document"}}',
    ),
    RERANK,
)  # fmt: skip
