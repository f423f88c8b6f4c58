"""Router: queries and documents that go through different modules, against Sentence Transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from checkpoints.files import edit_json, write_json
from checkpoints.router import write_router
from serving import Server
from whimbrel import Client, Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.engine.engine_request import EngineRequest, Job
from whimbrel.errors import CheckpointError, InvalidRequest
from whimbrel.model.runner import Runner
from whimbrel.outputs.finishers import ReturnRows, RowsFinisher
from whimbrel.types.request import Request

Floats = NDArray[np.float32]

TEXTS = ["", "a", "The whimbrel flies.", "Vogel " * 7, "far far away in a year " * 40, "query: birds", "1, 2; 3!"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models by their form, each saved once."""

    @cache
    def find(form: str) -> Path:
        folder = tmp_path_factory.mktemp("router")
        write_router(folder, form)
        return folder / "model"

    return find


@pytest.fixture
def heads(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy to be changed."""
    return shutil.copytree(saved("heads"), tmp_path / "model")


def assert_parity(found: Floats, expected: Floats) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-5 * max(1.0, float(np.abs(expected).max()))


@pytest.mark.parametrize("form", ["heads", "one head", "poolings", "table and model", "two models"])
def test_queries_and_documents(form: str, saved: Callable[[str], Path]) -> None:
    """Each way, none said, and both in one batch, where nothing changes a bit."""
    model = SentenceTransformer(str(saved(form)), device="cpu")
    with Engine(str(saved(form)), dtype="float32") as engine:
        queries, documents = (engine.embed(TEXTS, input_type=way) for way in ("query", "document"))
        assert_parity(queries, model.encode_query(TEXTS))
        assert_parity(documents, model.encode_document(TEXTS))
        assert_parity(engine.embed(TEXTS), model.encode(TEXTS))
        assert queries.shape != documents.shape or not np.allclose(queries, documents, atol=1e-3)
        futures = [
            (way, i, engine.submit(Request([text], input_type=way)))
            for i, text in enumerate(TEXTS)
            for way in ("query", "document")
        ]
        for way, i, future in futures:
            expected = queries if way == "query" else documents
            assert np.array_equal(future.result().dense[0], expected[i])


def test_a_batch_of_both_is_launched_at_once(saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts one after another, each ragged; they are delivered together."""
    sizes: list[tuple[int, int]] = []
    launch = Runner.launch

    def spied(self: Runner, batch: Any, *rest: Any) -> Any:
        sizes.append((batch.tower, batch.num_seqs))
        return launch(self, batch, *rest)

    with Engine(str(saved("table and model")), dtype="float32") as engine:
        dispatcher = engine._dispatcher
        prepared = [
            engine.preprocessor.preprocess(Request([f"{way} {i}"], input_type=way))
            for i in range(3)
            for way in ("query", "document")
        ]
        monkeypatch.setattr(Runner, "launch", spied)
        with dispatcher._lock:  # no lane takes until all have come
            jobs = [Job(Future(), one, rows_of(one)) for one in prepared]
            for job in jobs:
                dispatcher._jobs.add(job)
                dispatcher._scheduler.add(job, job.request.seqs, job.num_tokens)
            dispatcher._changed.notify_all()
        for job in jobs:
            assert job.future.result(30).dense.shape == (1, 48)
    assert sum(count for _, count in sizes) == 6
    assert {tower for tower, _ in sizes} == {0, 1}


def rows_of(request: EngineRequest) -> RowsFinisher:
    memory = np.empty(request.layout.num_bytes, np.uint8)
    return RowsFinisher(request.layout, memory, ReturnRows(), num_seqs=len(request.seqs))


def test_a_shared_model_is_loaded_once(saved: Callable[[str], Path]) -> None:
    for form, shared in (("heads", True), ("poolings", True), ("two models", False)):
        with Engine(str(saved(form))) as engine:
            first, second = engine._lanes._runner._models  # pyright: ignore
            assert (first is second) == shared


def test_in_processes_of_their_own(saved: Callable[[str], Path]) -> None:
    """Queries and documents, whole or in chunks, take their routes in a server's processes too."""
    folder, many = str(saved("poolings")), ["bird " * 100, "a", "far away in a year " * 60]
    with Engine(folder, dtype="float32") as engine, Server(folder, "--dtype", "float32", "--workers", "1") as server:
        for options in ({"input_type": "query"}, {"input_type": "document"}, {"split_long": True}, {}):
            expected = engine.embed(many, **options)
            answer = httpx2.post(f"{server.url}/v1/embed", json={"input": many, **options}, timeout=30)
            assert np.array_equal(np.array(answer.json()["outputs"]["dense"], np.float32), expected)
        late = {"input_type": "document", "late_chunking": True}
        parts = ["The whimbrel", " flies.", " A bird"]
        answer = httpx2.post(f"{server.url}/v1/embed", json={"input": parts, **late}, timeout=30)
        assert np.array_equal(np.array(answer.json()["outputs"]["dense"], np.float32), engine.embed(parts, **late))
        with Client(server.url) as client:
            assert np.array_equal(client.embed(many, split_long=True), engine.embed(many, split_long=True))
            with pytest.raises(InvalidRequest, match="pool by the mean"):
                client.embed(parts, late_chunking=True)


def test_limits_are_those_of_each_model(saved: Callable[[str], Path]) -> None:
    """The table has none; a limit that the user sets is that of both."""
    folder = str(saved("table and model"))
    with Engine(folder) as engine:
        assert engine.run(Request(["bird " * 1000], input_type="query")).num_truncated == 0
        assert engine.run(Request(["bird " * 1000], input_type="document")).num_tokens == 64
    with Engine(folder, max_length=10) as engine:
        assert engine.run(Request(["bird " * 1000], input_type="query")).num_tokens == 10
        assert engine.run(Request(["bird " * 1000], input_type="document")).num_tokens == 10


def test_an_old_asym(heads: Path) -> None:
    """A Router that Sentence Transformers saved under its earlier name, Asym, gives the same vectors."""
    folder = heads
    (folder / "2_Router").rename(folder / "2_Asym")
    old = "sentence_transformers.models."
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Asym": "2_Asym", "Normalize": "3_Normalize"}
    rows = [{"idx": i, "name": str(i), "path": path, "type": old + kind} for i, (kind, path) in enumerate(kinds.items())]
    write_json(folder / "modules.json", rows)
    (folder / "2_Asym/router_config.json").rename(folder / "2_Asym/config.json")
    names = ["query_0_Dense", "document_0_Dense", "document_1_Dense"]
    edit_json(folder / "2_Asym/config.json", types=dict.fromkeys(names, old + "Dense"), parameters={"allow_empty_key": True})
    model = SentenceTransformer(str(folder), device="cpu")
    with Engine(str(folder), dtype="float32") as engine:
        assert_parity(engine.embed(TEXTS, input_type="document"), model.encode_document(TEXTS))
        assert_parity(engine.embed(TEXTS), model.encode_query(TEXTS))


MAPPINGS: list[tuple[dict[str, Any], dict[str | None, str]]] = [
    ({}, {None: "query", "query": "query", "document": "document"}),
    ({"default_route": "document"}, {None: "document", "query": "query", "document": "document"}),
    ({"allow_empty_key": False}, {"query": "query", "document": "document"}),
    ({"route_mappings": {"(None, None)": "query", "('document', 'text')": "document"}}, {None: "query", "query": "query", "document": "document"}),
    ({"route_mappings": {"('query', None)": "document", "(None, 'text')": "query"}}, {None: "query", "query": "document", "document": "query"}),
    ({"route_mappings": {"('query', ('image', 'text'))": "document"}}, {None: "query", "query": "query", "document": "document"}),
]  # fmt: skip


@pytest.mark.parametrize(("parameters", "expected"), MAPPINGS)
def test_which_way_is_the_router_s_choice(parameters: dict[str, Any], expected: dict[str | None, str], heads: Path) -> None:
    edit_json(heads / "2_Router/router_config.json", parameters={"allow_empty_key": True} | parameters)
    router: Any = SentenceTransformer(str(heads), device="cpu")[2]
    card = read_card(heads, "m")
    routes = ["query", "document"]
    for way in (None, "query", "document"):
        if way not in expected:
            with pytest.raises(ValueError, match=r"Could not determine route|set a default route"):
                router._resolve_route(way, "text")
            with pytest.raises(InvalidRequest, match=r"input_type: .*say which, of: 'query', 'document'"):
                card.tower_for(way)
        else:
            assert router._resolve_route(way, "text") == expected[way]
            assert routes[card.tower_for(way)] == expected[way]


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("weights", {"weights": 1}),
    ("types", {"types": {"query_0_Dense": "os.abort"}}),
    ("types", {"types": None}),
    ("structure", {"structure": {}}),
    ("structure", {"structure": {"query": ["query_1_Dense"]}}),
    ("structure", {"structure": {"query": "query_0_Dense"}}),
    ("structure", {"structure": {"query": [], "document": [], "passage": []}}),
    ("structure", {"types": {"../x": "sentence_transformers.models.Dense"}, "structure": {"query": ["../x"]}}),
    ("default_route", {"parameters": {"default_route": "passage"}}),
    ("allow_empty_key", {"parameters": {"allow_empty_key": 1}}),
    ("modality", {"parameters": {"modality": "image"}}),
    ("route_mappings", {"parameters": {"route_mappings": {"query": "query"}}}),
    ("route_mappings", {"parameters": {"route_mappings": {"(None, None)": "passage"}}}),
    ("route_mappings", {"parameters": {"route_mappings": {"__import__('os')": "query"}}}),
]


@pytest.mark.parametrize(("key", "change"), REFUSED)
def test_what_is_not_supported_is_refused(key: str, change: dict[str, Any], heads: Path) -> None:
    edit_json(heads / "2_Router/router_config.json", **change)
    with pytest.raises(CheckpointError) as caught:
        read_card(heads, "m")
    assert (caught.value.file, caught.value.key) == ("2_Router/router_config.json", key)


def test_weights_that_no_route_takes_are_refused(heads: Path) -> None:
    file = heads / "2_Router/document_0_Dense/model.safetensors"
    save_file(load_file(file) | {"more": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError, match=r"document_0_Dense/model\.safetensors: more: "):
        Engine(str(heads))
