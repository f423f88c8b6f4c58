"""Large answers of every dialect go out in pieces, each made in a moment; they say the same as small ones do."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from fake_embedder import FakeModel
from vectors import body_of
from whimbrel.dialects import ROUTES, Response
from whimbrel.dialects.common import responses
from whimbrel.dialects.tei import tokens
from whimbrel.types.card import Output
from whimbrel.types.result import Outputs, Ragged, Result, Sparse, Timings
from whimbrel.types.seq import TokenInfo

RANDOM = np.random.default_rng(3)
COUNT, WIDTH = 600, 256
DENSE = RANDOM.standard_normal((COUNT, WIDTH)).astype(np.float32)
OFFSETS = np.arange(0, 60 * COUNT + 1, 60)
RAGGED = Ragged(np.repeat(DENSE, 60, axis=0)[:, :16].copy(), OFFSETS)
SPARSE = Sparse(np.tile(np.arange(60, dtype=np.int32), COUNT), RAGGED.rows_XD[:, 0].copy(), OFFSETS)
MATCHES = Ragged(RAGGED.rows_XD[:, :2].copy(), OFFSETS)
TEXTS = ["a"] * COUNT
LABELS = tuple(map(str, range(WIDTH)))
JINA = "JinaEmbeddingsRequest"
EMBEDDED: dict[str, Any] = {"dense": DENSE}
LATE: dict[str, Any] = {"multi_vector": RAGGED}

CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/embeddings", "EmbeddingsRequest", {"input": TEXTS}, EMBEDDED),
    ("/v1/embed", "EmbedRequest", {"input": TEXTS}, EMBEDDED),
    ("/v1/embed", "EmbedRequest", {"input": TEXTS, "embed_dtype": "int8"}, EMBEDDED),
    ("/v1/embed", "EmbedRequest", {"input": TEXTS}, {"sparse": SPARSE}),
    ("/v1/embed", "EmbedRequest", {"input": TEXTS, "encoding_format": "base64"}, LATE),
    ("/v1/classify", "ClassifyRequest", {"input": TEXTS}, {"scores": DENSE}),
    *(
        (f"/v{version}/embed", "CohereEmbedRequest", {"texts": TEXTS, "embedding_types": types}, EMBEDDED)
        for version in (1, 2)
        for types in (None, ["int8"], ["float", "uint8", "binary", "ubinary", "base64"])
    ),
    *(
        ("/v1/embeddings", JINA, {"input": TEXTS, "embedding_type": kind}, EMBEDDED)
        for kind in (None, "int8", ["ubinary", "base64"])
    ),
    *(("/v1/multi-vector", JINA, {"input": TEXTS, "embedding_type": kind}, LATE) for kind in (None, "int8", "base64")),
    *(
        ("/v1/embeddings", "VoyageEmbeddingsRequest", {"input": TEXTS, "output_dtype": kind}, EMBEDDED)
        for kind in (None, "uint8", "binary")
    ),
    ("/api/embed", "OllamaEmbedRequest", {"input": TEXTS}, EMBEDDED),
    ("/embed", "TEIEmbedRequest", {"inputs": TEXTS}, EMBEDDED),
    ("/embed_all", "EmbedAllRequest", {"inputs": TEXTS}, LATE),
    ("/embed_sparse", "EmbedSparseRequest", {"inputs": TEXTS}, {"sparse": SPARSE}),
    ("/pooling", "PoolingRequest", {"input": TEXTS}, EMBEDDED),
    ("/pooling", "PoolingRequest", {"input": TEXTS}, LATE),
    ("/classify", "VLLMClassifyRequest", {"input": TEXTS}, {"scores": DENSE}),
    *(
        (path, kind, {"query": "q", "documents": TEXTS, "explain": True}, {"scores": DENSE[:, :1], "token_matches": MATCHES})
        for path, kind in (
            ("/v1/rerank", "RerankRequest"),
            ("/v1/rerank", "VoyageRerankRequest"),
            ("/v2/rerank", "CohereRerankRequest"),
        )
    ),
    (
        "/score",
        "ScoreRequest",
        {"text_1": "q", "text_2": TEXTS, "explain": True},
        {"scores": DENSE[:, :1], "token_matches": MATCHES},
    ),
]


@pytest.mark.parametrize(("path", "kind", "body", "outputs"), CASES, ids=range(len(CASES)))
def test_large_answers_come_in_pieces(
    path: str, kind: str, body: dict[str, Any], outputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Output(WIDTH)
    card = SimpleNamespace(
        labels=LABELS, outputs={"dense": output}, prompts={}, text_formats=None, list_template=None, output=lambda _: output
    )
    model: Any = FakeModel.named("m", card)
    (route,) = (route for route in ROUTES if (route.path, route.request_type.__name__) == (path, kind))
    result = Result(Outputs(**outputs), 7, 0, Timings(), pair_tokens=[(("q",), ("a",))] * COUNT)
    sent = route.parse(orjson.dumps(body)).body
    answer = route.render_response(sent, result, model)
    assert isinstance(answer, Response)
    pieces = list(answer.chunks)
    assert len(pieces) > 1
    assert max(map(len, pieces)) < 2**20
    monkeypatch.setattr(responses, "STREAM_ABOVE", 10**9)
    whole = route.render_response(sent, result, model)
    assert isinstance(whole, bytes) or len(list(whole.chunks)) == 1
    assert without_stamps(b"".join(pieces)) == without_stamps(body_of(route.render_response(sent, result, model)))


def without_stamps(body: bytes) -> bytes:
    return re.sub(rb'"id":"[^"]*"|"created":\d+', b"", body)


def test_tokens_of_a_long_text_come_in_pieces() -> None:
    count = 50_000
    text = "a " * count
    chars = np.arange(0, 2 * count, 2, dtype=np.int32)
    found = TokenInfo(np.ones(count, np.int32), ("a",) * count, np.zeros(count, bool), np.stack([chars, chars + 1], 1))
    body = tokens.parse_tokenize(orjson.dumps({"inputs": [text, "a"]})).body
    few = TokenInfo(found.ids_T[:1], ("a",), found.special_T[:1], found.chars_T2[:1])
    answer = tokens.render_tokens(body, [found, few], FakeModel.named("m"))
    assert isinstance(answer, Response)
    pieces = list(answer.chunks)
    assert max(map(len, pieces)) < 100_000
    rows = orjson.loads(b"".join(pieces))
    assert [len(row) for row in rows] == [count, 1]
    assert rows[0][-1] == {"id": 1, "text": "a", "special": False, "start": 2 * count - 2, "stop": 2 * count - 1}
    assert rows[1] == rows[0][:1]
