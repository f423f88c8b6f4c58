"""vLLM's /tokenize and /detokenize. Pure functions over bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from whimbrel.dialects.common.bodies import MAX_IDS, count, decode, schema
from whimbrel.dialects.common.responses import ServedModel
from whimbrel.dialects.common.route import Parsed, ready
from whimbrel.dialects.common.vllm_fields import reject_unsupported
from whimbrel.dialects.vllm.status import TERMS, VLLM
from whimbrel.errors import Location
from whimbrel.types.request import DetokenizeRequest, TokenizeRequest
from whimbrel.types.seq import TokenInfo
from whimbrel.wire import to_json


class VLLMTokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /tokenize."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: Annotated[bool | None, schema("Return the tokens as text too, as they stand in the vocabulary.")] = None


class VLLMTokenizeResponse(msgspec.Struct):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class VLLMDetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /detokenize."""

    tokens: Annotated[
        list[Annotated[int, Meta(ge=0, le=2**63 - 1)]], count(MAX_IDS, " token ids", least=0).says("At most {most} token ids.")
    ]
    model: str | None = None


class VLLMDetokenizeResponse(msgspec.Struct):
    """Answer of POST /detokenize."""

    prompt: str


def parse_tokenize(raw: bytes) -> Parsed[VLLMTokenizeRequest]:
    reject_unsupported(raw, text="prompt")
    body = decode(VLLMTokenizeRequest, raw)
    return ready(body, TokenizeRequest([body.prompt], special=body.add_special_tokens is not False))


def render_tokenize(body: VLLMTokenizeRequest, results: Sequence[TokenInfo], model: ServedModel) -> bytes:
    (tokens,) = results
    counts = {"count": tokens.ids_T.size, "max_model_len": model.plan.max_length}
    names = list(tokens.names) if body.return_token_strs else None
    return to_json(counts | {"tokens": tokens.ids_T, "token_strs": names})


def parse_detokenize(raw: bytes) -> Parsed[VLLMDetokenizeRequest]:
    body = decode(VLLMDetokenizeRequest, raw)
    return ready(body, DetokenizeRequest([body.tokens]))


def render_detokenize(body: VLLMDetokenizeRequest, results: Sequence[str], model: ServedModel) -> bytes:
    return to_json({"prompt": results[0]})


ROUTES: Final = (
    VLLM(
        "/tokenize", "The token ids of a text (vLLM).", parse_tokenize, render_tokenize, response_type=VLLMTokenizeResponse,
        example='{"prompt": "A whimbrel is a wader.", "return_token_strs": true}',
        terms=TERMS.extended({"input": lambda _: Location("prompt")}), discriminators=frozenset({"prompt", "messages"}),
    ),
    VLLM(
        "/detokenize", "The text of token ids (vLLM).",
        parse_detokenize, render_detokenize, response_type=VLLMDetokenizeResponse, example='{"tokens": [101, 102]}',
        terms=TERMS.extended({"input": lambda location: Location("tokens", location.part)}),
    ),
)  # fmt: skip
