"""Voyage's embeddings and rerank APIs. Pure functions over bytes.

Texts that exceed the limit are truncated by default. Whimbrel's own fields of /v1/embeddings and /v1/rerank are accepted, and
unknown fields are ignored. Source: voyageai-python 0.5 (client.py, api_resources).
"""

from functools import partial
from typing import Annotated, Any, Final, TypeAlias

from msgspec.structs import replace

from whimbrel.dialects.common.answers import BEST_FIRST, Usage, answer_type, described, usage, word
from whimbrel.dialects.common.bodies import Positive, decode, is_packed, schema
from whimbrel.dialects.common.hosted import NumberType, ServiceError, ServiceFields, check_bits, quantize, render_error, status
from whimbrel.dialects.common.pairs import RERANK_TERMS, RankedText, RerankRequest, rank, request_of
from whimbrel.dialects.common.responses import Response, ServedModel, json_answer, new_id
from whimbrel.dialects.common.route import ErrorTerms, Parsed, Route, ready
from whimbrel.dialects.common.texts import text_request
from whimbrel.errors import InvalidRequest
from whimbrel.types.request import Request
from whimbrel.types.result import Result
from whimbrel.wire.json_base64 import base64_rows, number_rows

CutFlag: TypeAlias = Annotated[bool | None, schema("Cut texts that are too long; `false` makes them an error. Default: true.")]


class VoyageEmbeddingsRequest(ServiceFields, frozen=True, kw_only=True):
    """Body of POST /v1/embeddings where it has one of these fields."""

    truncation: CutFlag = None
    output_dimension: Annotated[Positive | None, schema("The same as `dimensions`.")] = None
    output_dtype: Annotated[
        NumberType | None,
        schema(
            "`int8`, `uint8`: 127ths of a vector's largest entry, and that + 128. `ubinary`, `binary`: bits, eight to a byte, "
            "and that - 128. In base64 they are bytes too."
        ),
    ] = None


VoyageEmbedding: Final = answer_type(
    "VoyageEmbedding", "One vector of the answer.",
    index=int, embedding=described(list[float] | str, "JSON numbers, or base64 of `output_dtype`."),
    object=word("embedding"),
)  # fmt: skip
VoyageUsage: Final = answer_type(
    "VoyageUsage", "Tokens of all texts after truncation, special tokens included.", total_tokens=int
)
VoyageEmbeddingsResponse: Final = answer_type(
    "VoyageEmbeddingsResponse", "Answer of POST /v1/embeddings. Mistral's clients read `id` and `prompt_tokens` too.",
    id=str, data=list[VoyageEmbedding], model=str, usage=Usage, object=word("list"),
)  # fmt: skip


class VoyageRerankRequest(RerankRequest, frozen=True, kw_only=True):
    """Body of POST /v1/rerank where it has one of these fields."""

    truncation: CutFlag = None
    top_k: Annotated[Positive | None, schema("Return only the N best. Default: all.")] = None
    return_documents: Annotated[bool | None, schema("Send the texts back. Default: false.")] = None


VoyageRerankResponse: Final = answer_type(
    "VoyageRerankResponse", f"Answer of POST /v1/rerank, {BEST_FIRST}",
    data=list[RankedText], model=str, usage=VoyageUsage, object=word("list"),
)  # fmt: skip


def parse_embeddings(raw: bytes) -> Parsed[VoyageEmbeddingsRequest]:
    body = decode(VoyageEmbeddingsRequest, raw)
    if None not in (body.dimensions, body.output_dimension) and body.dimensions != body.output_dimension:
        raise InvalidRequest("differs from dimensions; give one of them.", param="output_dimension")
    width = body.output_dimension if body.dimensions is None else body.dimensions
    says = body.truncation is not None or body.truncate is not None
    fields = replace(body, dimensions=width, truncate=_cuts(body) if says else None)
    encode_request = text_request(fields, ("dense",), input_type=body.input_type)

    def request(model: ServedModel) -> Request:
        check_bits(model.card, "dense", width, (body.output_dtype or "float",), param="output_dtype")
        return encode_request

    return Parsed(body, request)


def _cuts(body: VoyageEmbeddingsRequest | VoyageRerankRequest) -> Any:
    """Return the truncation of a body; Voyage's own field overrides `truncate`."""
    return body.truncation is not False if body.truncation is not None or body.truncate is None else body.truncate


def render_embeddings(body: VoyageEmbeddingsRequest, result: Result, model: ServedModel) -> bytes | Response:
    vectors_ND = quantize(result.dense, body.output_dtype or "float")
    vectors = base64_rows(vectors_ND) if body.encoding_format == "base64" else number_rows(vectors_ND)
    data = [{"object": "embedding", "embedding": vector, "index": index} for index, vector in enumerate(vectors)]
    as_text = body.encoding_format == "base64"
    head = {"id": new_id("embd"), "object": "list", "data": data, "model": model.plan.served_name}
    return json_answer(head | {"usage": usage(result)}, result, as_text=as_text)


def parse_rerank(raw: bytes) -> Parsed[VoyageRerankRequest]:
    body = decode(VoyageRerankRequest, raw, packed=is_packed(raw))
    body = replace(body, top_n=body.top_n if body.top_k is None else body.top_k)
    return ready(body, request_of(replace(body, truncate=_cuts(body))))


def render_rerank(body: VoyageRerankRequest, result: Result, model: ServedModel) -> bytes | Response:
    data = rank(body, result, str if body.return_documents else None)
    counts = {"total_tokens": result.num_tokens}
    return json_answer({"object": "list", "data": data, "model": model.plan.served_name, "usage": counts}, result)


_OPTIONS: Final = {"truncate": "truncation=true"}
_TERMS: Final = ErrorTerms({"outputs": "model", "dimensions": "output_dimension"}, _OPTIONS)
_RERANK_TERMS: Final = RERANK_TERMS.extended({"outputs": "model"}, _OPTIONS)
_VOYAGE: Final = partial(Route, render=render_error, error_type=ServiceError, terms=_TERMS, status=status)

ROUTES: Final = (
    _VOYAGE(
        "/v1/embeddings",
        "Dense vectors of texts: a body with `output_dtype`, `output_dimension` or `truncation` (Voyage).",
        parse_embeddings, render_embeddings, response_type=VoyageEmbeddingsResponse,
        made_for="dense", example='{"input": ["A whimbrel is a wader."], "input_type": "document", "output_dtype": "int8"}',
        discriminators=frozenset(("output_dtype", "output_dimension", "truncation")),
    ),
    _VOYAGE(
        "/v1/rerank", "Documents ranked by a query: a body with `top_k` or `truncation` (Voyage).",
        parse_rerank, render_rerank, response_type=VoyageRerankResponse,
        made_for="ranking",
        example='{"query": "What is a whimbrel?", "documents": ["A wader with a curved bill.", "A sandwich."], "top_k": 1}',
        terms=_RERANK_TERMS, discriminators=frozenset(("top_k", "truncation")),
    ),
)  # fmt: skip
