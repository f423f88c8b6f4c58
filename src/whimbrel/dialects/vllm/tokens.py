"""vLLM's /tokenize and /detokenize. Pure functions over bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from whimbrel.dialects.common.decode import decode
from whimbrel.dialects.common.route import Route, ServedModel
from whimbrel.dialects.common.vllm_fields import reject_unsupported
from whimbrel.dialects.vllm.errors import TERMS, render_error, status
from whimbrel.errors import Location
from whimbrel.types.request import DetokenizeRequest, TokenizeRequest
from whimbrel.types.seq import TokenInfo
from whimbrel.wire import to_json


class VLLMTokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /tokenize."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: Annotated[bool | None, Meta(description="Also as they stand in the vocabulary.")] = None


class VLLMTokenizeResponse(msgspec.Struct):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class VLLMDetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /detokenize."""

    tokens: Annotated[list[Annotated[int, Meta(ge=0, le=2**63 - 1)]], Meta(description="At most 524,288.")]
    model: str | None = None


class VLLMDetokenizeResponse(msgspec.Struct):
    """Answer of POST /detokenize."""

    prompt: str


def parse_tokenize(raw: bytes) -> tuple[VLLMTokenizeRequest, TokenizeRequest]:
    """The body as it was sent, and what it asks. Raises InvalidRequest."""
    reject_unsupported(raw, text="prompt")
    body = decode(VLLMTokenizeRequest, raw)
    return body, TokenizeRequest([body.prompt], special=body.add_special_tokens is not False)


def render_tokenize(body: VLLMTokenizeRequest, found: Sequence[TokenInfo], model: ServedModel) -> bytes:
    """The answer."""
    (tokens,) = found
    names = list(tokens.names) if body.return_token_strs else None
    return to_json({
        "count": tokens.ids_T.size,
        "max_model_len": model.plan.max_length,
        "tokens": tokens.ids_T,
        "token_strs": names,
    })  # fmt: skip


def parse_detokenize(raw: bytes) -> tuple[VLLMDetokenizeRequest, DetokenizeRequest]:
    """The body as it was sent, and what it asks. Raises InvalidRequest or TooLarge."""
    body = decode(VLLMDetokenizeRequest, raw)
    return body, DetokenizeRequest([body.tokens])


def render_detokenize(body: VLLMDetokenizeRequest, found: Sequence[str], model: ServedModel) -> bytes:
    """The answer."""
    return to_json({"prompt": found[0]})


_TOKENIZE_TERMS: Final = TERMS.extended({"input": lambda _: Location("prompt")})
_DETOKENIZE_TERMS: Final = TERMS.extended({"input": lambda location: Location("tokens", location.part)})

ROUTES: Final = (
    Route(
        path="/tokenize",
        summary="The token ids of a text (vLLM).",
        parse_request=parse_tokenize,
        render_response=render_tokenize,
        render_error=partial(render_error, terms=_TOKENIZE_TERMS),
        request_type=VLLMTokenizeRequest,
        response_type=VLLMTokenizeResponse,
        example='{"prompt": "A whimbrel is a wader.", "return_token_strs": true}',
        discriminators=frozenset({"prompt", "messages"}),
        status=status,
    ),
    Route(
        path="/detokenize",
        summary="The text of token ids (vLLM).",
        parse_request=parse_detokenize,
        render_response=render_detokenize,
        render_error=partial(render_error, terms=_DETOKENIZE_TERMS),
        request_type=VLLMDetokenizeRequest,
        response_type=VLLMDetokenizeResponse,
        example='{"tokens": [101, 102]}',
        status=status,
    ),
)
