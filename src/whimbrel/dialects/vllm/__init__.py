"""vLLM's own routes, of pooling models. Those that other APIs share stand with these, with vLLM's fields.

    pooling       /pooling, /classify
    pair_scores   /v1/score, /score, /rerank
    invocations   /invocations
    tokenize      /tokenize, /detokenize, /tokenizer_info, /version
    status        statuses and bodies of errors

Source: vLLM 0.33, entrypoints/pooling and entrypoints/serve/tokenize.
"""

from whimbrel.dialects.common.route import Route
from whimbrel.dialects.vllm.invocations import invocation_routes
from whimbrel.dialects.vllm.pair_scores import SCORE, V1_SCORE, VLLM_RERANK
from whimbrel.dialects.vllm.pooling import CLASSIFY, POOLING
from whimbrel.dialects.vllm.tokenize import GET_ROUTES, ROUTES

__all__ = ["GET_ROUTES", "routes"]


def routes(embeddings: Route) -> tuple[Route, ...]:
    """Return the routes, given that of `/v1/embeddings`, as which models of dense vectors answer on /invocations."""
    return POOLING, CLASSIFY, VLLM_RERANK, SCORE, *invocation_routes(embeddings), *ROUTES, V1_SCORE
