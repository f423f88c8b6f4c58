"""Which text of a pair an error is over, and that it is told through engine processes: the others are not blamed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pybase64
import pytest

import fault_injection
from checkpoints.late_interaction import write_stanford
from serving import Server
from whimbrel import Engine
from whimbrel.errors import InvalidRequest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("late")
    write_stanford(path)
    return path


@pytest.fixture(scope="module", params=["1", "2"])
def client(folder: Path, request: pytest.FixtureRequest) -> Iterator[httpx2.Client]:
    options = ("--dtype", "float32", "--replicas", request.param)
    with (
        Server(str(folder), *options, **fault_injection.ENVIRONMENT) as server,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def refused(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["param"]


@pytest.mark.parametrize("poison", ["@@nan", "@@raise"])
@pytest.mark.sample(1)
def test_a_text_that_fails_is_named(poison: str, client: httpx2.Client) -> None:
    documents = ["far", "far", "far", "away", poison, "near"]
    assert refused(client.post("/v1/rerank", json={"query": "a", "documents": documents})) == (500, "documents[4]")
    assert refused(client.post("/v1/rerank", json={"query": poison, "documents": documents[:4]})) == (500, "query")
    body = {"queries": ["a", "a", "b", poison], "documents": ["far", "far", "far", "away"]}
    assert refused(client.post("/v1/score", json=body)) == (500, "queries[3]")


@pytest.mark.sample(1)
def test_vectors_that_are_too_large_are_named(client: httpx2.Client) -> None:
    """In a pair whose number is that of no text."""
    large: Any = {"data": pybase64.b64encode_as_string(np.full(16, 1e30, np.float32).tobytes()), "shape": [1, 16]}
    body = {"queries": ["a"] * 50 + [large], "documents": ["b"] * 50 + [large]}
    answer = client.post("/v1/score", json=body)
    assert refused(answer) == (400, "documents[50]")
    assert "too large" in answer.json()["error"]["message"]
    body = {"queries": [large] * 3, "documents": ["b"] * 3}
    assert client.post("/v1/score", json=body).status_code == 200
    assert client.post("/v1/rerank", json={"query": "a", "documents": ["b"]}).status_code == 200


def test_without_processes(folder: Path) -> None:
    large = np.full((1, 16), 1e30, np.float32)
    with Engine(str(folder), dtype="float32") as engine:
        with pytest.raises(InvalidRequest, match=r"documents\[50\]: .* too large"):
            engine.score(["a"] * 50 + [large], ["b"] * 50 + [large])
        with pytest.raises(InvalidRequest, match=r"documents\[1\]: .* too large"):
            engine.rerank(large, ["b", large])
