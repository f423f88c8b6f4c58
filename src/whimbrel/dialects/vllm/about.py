"""vLLM's GET /version and /tokenizer_info."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from whimbrel import __version__
from whimbrel.dialects.common.bodies import schema
from whimbrel.dialects.common.responses import ServedModel
from whimbrel.dialects.common.route import GetRoute
from whimbrel.dialects.vllm.status import VLLMError, render_error
from whimbrel.errors import InvalidRequest
from whimbrel.wire import to_json


class VLLMTokenizerInfo(msgspec.Struct):
    """Answer of GET /tokenizer_info, with the special tokens of further roles as `..._token`."""

    tokenizer_class: Annotated[str, schema("The class of transformers that reads the tokenizer's files.")]
    model_max_length: Annotated[int, schema("The limit in tokens per text.")]
    truncation_side: Literal["right", "left"]
    do_lower_case: bool
    strip_accents: bool | None
    tokenize_chinese_chars: bool
    add_prefix_space: bool | None
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    sep_token: str | None = None
    pad_token: str | None = None
    cls_token: str | None = None
    mask_token: str | None = None


class VLLMVersionResponse(msgspec.Struct):
    """Answer of GET /version."""

    version: Annotated[str, schema("Whimbrel's version.")]


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
