"""Whimbrel's own way to ask: any of a model's outputs, all from one pass. Pure functions over bytes."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
import pybase64
from msgspec import Meta
from numpy.typing import NDArray

from whimbrel.dialects.fields import TextFields, text_request
from whimbrel.dialects.inputs import refuse_many
from whimbrel.dialects.openai import Usage, render_error
from whimbrel.dialects.read import decode
from whimbrel.dialects.route import Route, ServedModel
from whimbrel.late_options import MuveraParameters, TokenPooling, read_muvera, read_token_pooling
from whimbrel.types import InputType, OutputName, Outputs, Ragged, Request, Result, Sparse
from whimbrel.wire import to_json


class EmbedRequest(TextFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/embed."""

    input: Annotated[
        str | list[str | int | list[int | str]],
        Meta(
            description="A text, a list of texts, a list of pairs of texts (query and document), a list of token ids, or a "
            "list of such lists; at most 2,048 inputs and 524,288 ids. Token ids are taken as they are."
        ),
    ]
    outputs: Annotated[
        OutputName | list[OutputName] | None,
        Meta(
            description="One output, or a list of them, all from one pass; by default what the model is made for. /info tells "
            "all."
        ),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        Meta(description="`float` (default): JSON numbers. `base64`: the bytes of arrays, little-endian float32 (ids: int32)."),
    ] = None
    input_type: Annotated[
        InputType | None,
        Meta(description="Whether the texts are queries or documents, for models that treat them differently."),
    ] = None
    instruction: Annotated[str | None, Meta(description="What a reranker with a template is told to judge.")] = None
    activate: Annotated[bool | None, Meta(description="Apply the activation of scores; by default as the model does.")] = None
    max_active_dims: Annotated[int | None, Meta(description="Keep so many entries of a sparse vector, the largest.")] = None
    token_pooling: Annotated[
        float | TokenPooling | None,
        Meta(
            description="Documents' token vectors become fewer: about 1 / factor of them, or by these parameters. By default "
            "as the model says; `1`: not even then."
        ),
    ] = None
    muvera: Annotated[
        bool | MuveraParameters | None,
        Meta(
            description="`true`, or parameters: one vector for each text in place of its token vectors (MUVERA), to be "
            "compared by dot product. It takes `input_type`."
        ),
    ] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="A limit of tokens per text below the model's; of late-interaction models, in place of the usual one."
        ),
    ] = None


class Entries(msgspec.Struct):
    """Entries of the vocabulary and their weights, by ascending id."""

    ids: Annotated[list[int] | str, Meta(description="JSON numbers, or base64 of little-endian int32.")]
    weights: Annotated[list[float] | str, Meta(description="JSON numbers, or base64 of little-endian float32.")]


class Matrix(msgspec.Struct):
    """Rows of equal width as bytes."""

    shape: Annotated[list[int], Meta(min_length=2, max_length=2)]
    data: Annotated[str, Meta(description="base64 of little-endian float32, row by row.")]


class EmbedOutputs(msgspec.Struct):
    """What was asked for, each in the order of the inputs; null is what was not."""

    dense: Annotated[list[list[float] | str] | None, Meta(description="A vector for each input.")] = None
    sparse: Annotated[list[Entries] | None, Meta(description="Weights of vocabulary entries for each input.")] = None
    multi_vector: Annotated[
        list[list[list[float]] | Matrix] | None,
        Meta(description="For each input a vector for each token that counts."),
    ] = None
    scores: Annotated[list[list[float] | str] | None, Meta(description="For each input a score for each class.")] = None
    token_scores: Annotated[
        list[list[list[float]] | Matrix] | None, Meta(description="For each input the scores of each token.")
    ] = None
    muvera: Annotated[
        list[list[float] | str] | None, Meta(description="For each input a vector in place of its token vectors.")
    ] = None


class EmbedResponse(msgspec.Struct):
    """Answer of POST /v1/embed."""

    outputs: EmbedOutputs
    model: str
    usage: Usage


def read_request(body: bytes) -> tuple[EmbedRequest, Request]:
    """The body as it was sent, and the Request it stands for. Raises InvalidRequest or TooLarge."""
    refuse_many(body)
    sent = decode(EmbedRequest, body)
    outputs = (sent.outputs,) if isinstance(sent.outputs, str) else tuple(sent.outputs or ())
    return sent, text_request(
        sent,
        outputs,
        input_type=sent.input_type,
        instruction=sent.instruction,
        activate=sent.activate,
        max_active_dims=sent.max_active_dims,
        token_pooling=read_token_pooling(sent.token_pooling),
        muvera=read_muvera(sent.muvera),
        max_tokens=sent.max_tokens,
    )


def write_result(sent: EmbedRequest, result: Result, model: ServedModel) -> bytes:
    """The answer; numbers are printed from the arrays' memory."""
    as_text = sent.encoding_format == "base64"
    outputs = {name: _column(getattr(result.outputs, name), as_text) for name in Outputs.__slots__}
    return to_json({
        "outputs": {name: column for name, column in outputs.items() if column is not None},
        "model": model.plan.served_name,
        "usage": {"prompt_tokens": result.num_tokens, "total_tokens": result.num_tokens},
    })  # fmt: skip


def _column(output: NDArray[np.float32] | Sparse | Ragged | None, as_text: bool) -> Any:
    """One output, an item for each input."""
    if output is None:
        return None
    if isinstance(output, Sparse):
        return [{"ids": _array(ids, as_text), "weights": _array(weights, as_text)} for ids, weights in output]
    if isinstance(output, Ragged):
        return [{"shape": rows.shape, "data": _array(rows, True)} if as_text else _array(rows, False) for rows in output]
    return [_array(row, as_text) for row in output] if as_text else output


def _array(array: NDArray[Any], as_text: bool) -> Any:
    contiguous = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return pybase64.b64encode_as_string(contiguous.data) if as_text else contiguous


ROUTES: Final = (
    Route(
        path="/v1/embed",
        summary="Any of a model's outputs, all from one pass (Whimbrel's own).",
        read_request=read_request,
        write_result=write_result,
        write_error=render_error,
        request_type=EmbedRequest,
        response_type=EmbedResponse,
        example='{"input": ["A whimbrel is a wader."], "encoding_format": "base64"}',
    ),
)
