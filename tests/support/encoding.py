"""Texts of a request in a tokenizer, without an engine."""

from __future__ import annotations

from whimbrel.engine.prepare_texts import encode_texts
from whimbrel.tokenizer.tokenizer import Tokenizer
from whimbrel.types.request import Request
from whimbrel.types.seq import Seq


def encode_request(tokenizer: Tokenizer, request: Request) -> list[Seq]:
    return encode_texts(tokenizer, request, request.texts)
