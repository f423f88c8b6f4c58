"""TEI's own API: text-embeddings-inference, router/src/http. Pure functions over bytes.

    answers   timings in headers, errors, statuses
    embed     /embed, /embed_all, /embed_sparse, /similarity
    scores    /rerank, /predict
    tokens    /tokenize, /decode
    root      /, /invocations
    vertex    /vertex

/embeddings is that of OpenAI's API, as in Infinity.
    info      what is added to /info

Fields that are not known are ignored, as there. Unlike TEI, ids are given to the model as they are, `dimensions` is for models
whose vectors may be cut, and a body may have a `model`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from whimbrel.dialects import openai
from whimbrel.dialects.common.route import Route
from whimbrel.dialects.tei import embed, root, scores, tokens, vertex
from whimbrel.dialects.tei.info import describe

__all__ = ["ROUTES", "describe"]

ROUTES: Final[tuple[Route, ...]] = (
    *embed.ROUTES,
    *scores.ROUTES,
    *tokens.ROUTES,
    *root.ROUTES,
    *vertex.ROUTES,
    *(replace(route, path="/embeddings", summary="The same as /v1/embeddings (TEI, Infinity).") for route in openai.ROUTES),
)
