"""Dialects: other servers' APIs as pure functions over bytes, one module each, joined in the table ROUTES.

A dialect knows Request, Result and the error tree; it knows nothing of HTTP servers, engines or tensors.
"""

from __future__ import annotations

from typing import Final

from whimbrel.dialects import cohere, jina, native, ollama, openai, rerank, tei, vllm, voyage
from whimbrel.dialects.common.route import JSON, MESSAGE_PACK, GetRoute, Response, Route, ServedModel

__all__ = ["GET_ROUTES", "JSON", "MESSAGE_PACK", "ROUTES", "GetRoute", "Response", "Route", "ServedModel"]

ROUTES: Final[tuple[Route, ...]] = (
    *openai.ROUTES,
    *native.ROUTES,
    *rerank.ROUTES,
    *tei.ROUTES,
    *ollama.ROUTES,
    *cohere.ROUTES,
    *voyage.ROUTES,
    *jina.ROUTES,
    *vllm.ROUTES,
)
"""Every POST route; all are served alike."""

GET_ROUTES: Final[tuple[GetRoute, ...]] = (*ollama.GET_ROUTES, *vllm.GET_ROUTES)
"""Every GET route that belongs to a dialect."""
