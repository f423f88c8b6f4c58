"""TEI's /tokenize and /decode. Pure functions over bytes."""

from collections.abc import Iterator
from typing import Annotated, Any, Final, cast

import msgspec

from whimbrel.dialects.common.answers import answer_type
from whimbrel.dialects.common.bodies import decode, schema, text_inputs
from whimbrel.dialects.common.responses import Response, ServedModel
from whimbrel.dialects.common.route import Parsed, ready
from whimbrel.dialects.common.schemas import EMPTY_OR_ID_LISTS, IDS, TEXT, TEXTS
from whimbrel.dialects.common.texts import PromptName
from whimbrel.dialects.tei.answers import TEI, TERMS
from whimbrel.dialects.tei.embed import TEIModelName
from whimbrel.errors import InvalidRequest
from whimbrel.types.request import DetokenizeRequest, TokenizeRequest
from whimbrel.types.seq import TokenInfo
from whimbrel.wire.json_base64 import LazyList, json_chunks, to_json

_MANY: Final = 2048
"""The number of tokens above which an answer is printed in chunks, so that other requests run in between."""
_NONE: Final = "is an empty list."


class TEITokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /tokenize in TEI's form."""

    inputs: Annotated[
        str | list[str],
        text_inputs(TEXT, TEXTS, empty=_NONE).says("A text or at most {most} texts, of any length: nothing is cut."),
    ]
    model: TEIModelName = None
    add_special_tokens: Annotated[bool | None, schema("Put special tokens around texts. Default: true.")] = None
    prompt_name: PromptName = None


SimpleToken: Final = answer_type(
    "SimpleToken", "A token; `start` and `stop` are in characters of prompt and text, and null of special tokens.",
    id=int, text=str, special=bool, start=int | None, stop=int | None,
)  # fmt: skip


class DecodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    ids: Annotated[
        list[int | list[int]], text_inputs(IDS, EMPTY_OR_ID_LISTS, empty=_NONE).says("Token ids of a text, or lists of them.")
    ]
    model: TEIModelName = None
    skip_special_tokens: Annotated[bool | None, schema("Leave out special tokens. Default: true.")] = None


def parse_tokenize(raw: bytes) -> Parsed[TEITokenizeRequest]:
    body = decode(TEITokenizeRequest, raw)
    special = body.add_special_tokens is not False
    return ready(body, TokenizeRequest(_texts(body), special=special, prompt_name=body.prompt_name))


def render_tokens(body: TEITokenizeRequest, found: list[TokenInfo], model: ServedModel) -> bytes | Response:
    prompt = "" if body.prompt_name is None else model.card.prompt_text(body.prompt_name)
    rows = [LazyList(_tokens(prompt + text, tokens)) for text, tokens in zip(_texts(body), found, strict=True)]
    return Response(json_chunks(rows)) if sum(tokens.ids_T.size for tokens in found) > _MANY else to_json(rows)


def _tokens(text: str, tokens: TokenInfo) -> Iterator[dict[str, Any]]:
    columns = zip(tokens.ids_T.tolist(), tokens.names, tokens.special_T.tolist(), tokens.chars_T2.tolist(), strict=True)
    for id_, name, special, (start, stop) in columns:
        piece, places = (name, (None, None)) if special else (text[start:stop], (start, stop))
        yield {"id": id_, "text": piece, "special": special, "start": places[0], "stop": places[1]}


def _texts(body: TEITokenizeRequest) -> list[str]:
    return [body.inputs] if isinstance(body.inputs, str) else body.inputs


def parse_decode(raw: bytes) -> Parsed[DecodeRequest]:
    body = decode(DecodeRequest, raw)
    rows: list[Any] = body.ids if isinstance(body.ids[0], list) else [body.ids]
    for index, row in enumerate(rows):
        if not isinstance(row, list) or not all(isinstance(each, int) for each in cast(list[object], row)):
            raise InvalidRequest("ids and lists of ids cannot be mixed in one list.", param="ids", item=index)
        if any(not 0 <= each < 2**31 for each in cast(list[int], row)):
            raise InvalidRequest("a token id is 0 or more, and fits into 31 bits.", param="ids", item=index)
    return ready(body, DetokenizeRequest(rows, special=body.skip_special_tokens is False))


ROUTES: Final = (
    TEI(
        "/tokenize", "The tokens of texts (TEI).", parse_tokenize, render_tokens, response_type=list[list[SimpleToken]],
        example='{"inputs": "What is a whimbrel?"}', discriminators=frozenset({"inputs"}),
    ),
    TEI(
        "/decode", "The texts that token ids stand for (TEI).", parse_decode, lambda _, texts, __: msgspec.json.encode(texts),
        response_type=list[str], example='{"ids": [101, 7592, 102]}', terms=TERMS.extended({"input": "ids"}),
    ),
)  # fmt: skip
