"""Dialects: the APIs of other servers as pure functions over bytes, and the table of them.

A dialect knows Request, Result and the error tree; it knows nothing of HTTP servers, engines, tensors or other dialects: the
parts that several share stand in `common`. A dialect that repeats a route of another is given it here.
"""

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
    open_inference,
    openai,
    tei,
    vllm,
    voyage,
)
from whimbrel.dialects.common.responses import JSON, Response, ServedModel
from whimbrel.dialects.common.route import API, MESSAGE_PACK, GetRoute, Route

__all__ = ["API", "APIS", "GET_ROUTES", "JSON", "MESSAGE_PACK", "ROUTES", "GetRoute", "Response", "Route", "ServedModel"]

APIS: Final = (
    API(
        "OpenAI",
        "Clients of OpenAI work when their base URL is this server's, followed by `/v1`. Azure's paths work too.",
        openai.ROUTES,
    ),
    API(
        "Whimbrel",
        "Our own routes give all that a model has: any outputs from one pass, also sparse and token vectors, in any format.",
        native.ROUTES,
    ),
    API("Cohere", "Versions 1 and 2, for texts.", cohere.ROUTES),
    API("Voyage", "Vectors in several types of numbers, and rerank.", voyage.ROUTES),
    API("Jina", "Vectors of texts and of tokens, and rerank.", jina.ROUTES),
    API("TEI", "The API of text-embeddings-inference. Its `/v1/embeddings` is OpenAI's.", tei.routes(openai.EMBEDDINGS)),
    API(
        "vLLM",
        "The routes of pooling models. `/v1/embeddings` is OpenAI's, `/v1/rerank` Jina's, `/v2/rerank` Cohere's.",
        vllm.routes(openai.EMBEDDINGS),
        vllm.GET_ROUTES,
    ),
    API("Ollama", "The part of its API that embeds. Its `/v1/embeddings` is OpenAI's.", ollama.ROUTES, ollama.GET_ROUTES),
    API("Infinity", "Bodies with `raw_scores`. Its `/embeddings` is listed with TEI.", infinity.ROUTES, infinity.GET_ROUTES),
    API("Mixedbread", "Rerank with texts in `input`. Its `/v1/embeddings` is OpenAI's.", mixedbread.ROUTES),
    API("NVIDIA", "NIM's ranking, also at `/v1/retrieval/{model}/reranking`. Its `/v1/embeddings` is OpenAI's.", nvidia.ROUTES),
    API("llama.cpp", "Its own path of embeddings and its paths of rerank. Its `/v1/embeddings` is OpenAI's.", llama_cpp.ROUTES),
    API(
        "Open Inference Protocol",
        "Version 2 over REST, of KServe and Triton: texts, vectors and scores as tensors, in JSON or as bytes behind it.",
        open_inference.ROUTES,
        open_inference.GET_ROUTES,
    ),
)
"""The APIs in the order of /docs. Of several that share a path, the first takes a body that has fields of more than one."""
ROUTES: Final[tuple[Route, ...]] = tuple(route for api in APIS for route in api.routes)
GET_ROUTES: Final[tuple[GetRoute, ...]] = tuple(page for api in APIS for page in api.get_routes)
