"""Dialects: the APIs of other servers as pure functions over bytes, and the table ROUTES of all their routes.

A dialect knows Request, Result and the error tree; it knows nothing of HTTP servers, engines or tensors.
"""

from __future__ import annotations

from typing import Final

from whimbrel.dialects import (
    cohere,
    infinity,
    jina,
    llama_cpp,
    mixedbread,
    native,
    nvidia,
    ollama,
    openai,
    rerank,
    tei,
    vllm,
    voyage,
)
from whimbrel.dialects.common.responses import JSON, Response, ServedModel
from whimbrel.dialects.common.route import MESSAGE_PACK, GetRoute, Route

__all__ = ["GET_ROUTES", "JSON", "MESSAGE_PACK", "ROUTES", "GetRoute", "Response", "Route", "ServedModel"]

_DIALECTS: Final = (openai, native, rerank, tei, ollama, cohere, voyage, jina, vllm, infinity, mixedbread, nvidia, llama_cpp)

ROUTES: Final[tuple[Route, ...]] = tuple(route for dialect in _DIALECTS for route in dialect.ROUTES)
GET_ROUTES: Final[tuple[GetRoute, ...]] = (*ollama.GET_ROUTES, *vllm.GET_ROUTES, *infinity.GET_ROUTES)
