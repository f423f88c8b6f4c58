"""TEI's own API: text-embeddings-inference, router/src/http. Pure functions over bytes.

    answers   timings in headers, errors, statuses, fields of /info
    embed     /embed, /embed_all, /embed_sparse, /similarity
    scores    /rerank, /predict
    tokens    /tokenize, /decode
    root      /, /invocations, /vertex

/embeddings is that of OpenAI's API, as in Infinity. Unknown fields are ignored, as in TEI. Unlike TEI, token ids get no special
tokens, `dimensions` is for models whose vectors may be cut, and a body may have a `model`.
"""

from dataclasses import replace

from whimbrel.dialects.common.route import Route
from whimbrel.dialects.tei import embed, root, scores, tokens
from whimbrel.dialects.tei.answers import describe

__all__ = ["describe", "routes"]


def routes(embeddings: Route) -> tuple[Route, ...]:
    """Return the routes, given that of `/v1/embeddings`, which /embeddings repeats."""
    same = replace(embeddings, path="/embeddings", summary="The same as /v1/embeddings (TEI, Infinity).")
    return *embed.ROUTES, *scores.ROUTES, *tokens.ROUTES, *root.ROUTES, same
