"""Paths as clients build them: with doubled or trailing slashes, below Azure's prefixes, and NVIDIA's with a model in them."""

from __future__ import annotations

import re
from typing import Final

from starlette.types import Scope

from whimbrel.server.app.routing import ROUTES_BY_PATH

DEPLOYMENT: Final = "whimbrel.deployment"
_NAMING: Final = {
    re.compile(r"/openai/deployments/(.+)/embeddings"): "/v1/embeddings",
    re.compile(r"/v1/retrieval/(.+)/reranking"): "/v1/ranking",
}
"""Azure's path of embeddings and NVIDIA's of rankings, which name the model -> the route."""
_AZURE: Final = "/openai/v1/"
_SLASHES: Final = re.compile(r"/{2,}")


def canonical(scope: Scope) -> Scope:
    """Return the scope of a request with the path that its route has here.

    Slashes are merged, and the last one is dropped. `/openai/v1/...` is `/v1/...`. `/openai/deployments/NAME/embeddings` is
    `/v1/embeddings` of the model NAME, which the scope then names under DEPLOYMENT; so is NVIDIA's path of rankings.
    """
    path: str = scope["path"]
    if path in ROUTES_BY_PATH:
        return scope
    plain = _SLASHES.sub("/", path).rstrip("/") or "/"
    for pattern, path in _NAMING.items():
        if found := pattern.fullmatch(plain):
            return {**scope, "path": path, DEPLOYMENT: found[1]}
    if plain.startswith(_AZURE):
        plain = plain.removeprefix("/openai")
    return scope if plain == path else {**scope, "path": plain}
