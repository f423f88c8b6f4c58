"""vLLM's /tokenize and /detokenize, GET /tokenizer_info and /version. Pure functions."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from whimbrel import __version__
from whimbrel.dialects.common.answers import answer_type, described
from whimbrel.dialects.common.bodies import count, decode, schema
from whimbrel.dialects.common.responses import ServedModel
from whimbrel.dialects.common.route import GetRoute, Parsed, parser, ready
from whimbrel.dialects.common.schemas import MAX_IDS
from whimbrel.dialects.common.vllm_fields import reject_unsupported
from whimbrel.dialects.vllm.status import TERMS, VLLM, VLLMError, render_error
from whimbrel.errors import InvalidRequest, Location
from whimbrel.types.request import DetokenizeRequest, TokenizeRequest
from whimbrel.types.seq import TokenInfo
from whimbrel.wire.json_base64 import to_json


class VLLMTokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: Annotated[bool | None, schema("Return the tokens as text too, as they stand in the vocabulary.")] = None


VLLMTokenizeResponse: Final = answer_type(
    "VLLMTokenizeResponse", "Answer of POST /tokenize.",
    count=int, max_model_len=int, tokens=list[int], token_strs=list[str] | None,
)  # fmt: skip


class VLLMDetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    tokens: Annotated[
        list[Annotated[int, Meta(ge=0, le=2**63 - 1)]], count(MAX_IDS, " token ids", least=0).says("At most {most} token ids.")
    ]
    model: str | None = None


VLLMDetokenizeResponse: Final = answer_type("VLLMDetokenizeResponse", "Answer of POST /detokenize.", prompt=str)


def parse_tokenize(raw: bytes) -> Parsed[VLLMTokenizeRequest]:
    reject_unsupported(raw, text="prompt")
    body = decode(VLLMTokenizeRequest, raw)
    return ready(body, TokenizeRequest([body.prompt], special=body.add_special_tokens is not False))


def render_tokenize(body: VLLMTokenizeRequest, results: Sequence[TokenInfo], model: ServedModel) -> bytes:
    (tokens,) = results
    counts = {"count": tokens.ids_T.size, "max_model_len": model.plan.max_length}
    names = list(tokens.names) if body.return_token_strs else None
    return to_json(counts | {"tokens": tokens.ids_T, "token_strs": names})


parse_detokenize: Final = parser(VLLMDetokenizeRequest, lambda body: DetokenizeRequest([body.tokens]))


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


VLLMTokenizerInfo: Final = answer_type(
    "VLLMTokenizerInfo", "Answer of GET /tokenizer_info, with the special tokens of further roles as `..._token`.",
    tokenizer_class=described(str, "The class of transformers that reads the tokenizer's files."),
    model_max_length=described(int, "The limit in tokens per text."), truncation_side=Literal["right", "left"],
    do_lower_case=bool, strip_accents=bool | None, tokenize_chinese_chars=bool, add_prefix_space=bool | None,
    **{f"{role}_token": (str | None, None) for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")},
)  # fmt: skip
VLLMVersionResponse: Final = answer_type(
    "VLLMVersionResponse", "Answer of GET /version.", version=described(str, "Whimbrel's version.")
)


def render_version(models: Sequence[ServedModel]) -> bytes:
    return to_json({"version": __version__})


def render_tokenizer_info(models: Sequence[ServedModel]) -> bytes:
    if len(models) != 1:
        raise InvalidRequest("several models are served; /info tells of all of them.")
    tokenizer, limit = models[0].card.tokenizer, models[0].plan.max_length
    own = tokenizer.tokenizer_class
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast" if own == "tokenizer.json" else own,
        "model_max_length": limit,
        "truncation_side": tokenizer.truncate,
        "do_lower_case": tokenizer.do_lower_case or tokenizer.lowercase,
        "strip_accents": tokenizer.strip_accents,
        "tokenize_chinese_chars": tokenizer.tokenize_chinese_chars,
        "add_prefix_space": tokenizer.add_prefix_space,
    }
    roles = {f"{role}_token": token["content"] for role, token in tokenizer.special_tokens.items() if token is not None}
    return to_json(about | roles)


GET_ROUTES: Final = (
    GetRoute("/version", "The version of the server (vLLM).", render_version, render_error, VLLMError, VLLMVersionResponse),
    GetRoute(
        "/tokenizer_info", "The settings of the tokenizer, of a server of one model (vLLM).",
        render_tokenizer_info, render_error, VLLMError, VLLMTokenizerInfo,
    ),
)  # fmt: skip
