"""Verbs of the client through a real server give the same bits as the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from checkpoints.bge_m3 import write_m3
from checkpoints.classifiers import write_classifier, write_nli
from checkpoints.gliner_golden import write_gliner
from checkpoints.late_interaction import write_sentence_transformers
from serving import Server
from whimbrel import AsyncClient, Client, Engine, errors

TEXTS = ["A whimbrel is a wader.", "It has a long curved bill.", "bird", "Ein Vogel, der im Herbst nach Afrika zieht!"] * 3
QUERY = "What is a whimbrel?"
PAIRS = [(QUERY, text) for text in TEXTS]
MIN = {"strategy": "min", "attend": True, "token": "[SEP]", "length": 16}
LABELS = ["birds", "food, or drink", "a long curved bill", "Reise"]
WRITERS: dict[str, Callable[[Path], object]] = {
    "m3": write_m3,
    "late": lambda folder: write_sentence_transformers(folder, MIN),
    "ranker": lambda folder: write_classifier(folder, "bert", num_labels=1),
    "classes": lambda folder: write_classifier(folder, "bert", num_labels=3),
    "tagger": lambda folder: write_classifier(folder, "bert", "ForTokenClassification", num_labels=3),
    "nli": write_nli,
    "spans": write_gliner,
}


@dataclass(frozen=True)
class Setup:
    url: str
    engines: dict[str, Engine]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folders = {name: tmp_path_factory.mktemp(name) for name in WRITERS}
    for name, write in WRITERS.items():
        write(folders[name])
    names = [word for name in folders for word in ("--served-name", name)]
    options = ("--dtype", "float32", "--workers", "1")
    engines = {name: Engine(str(folder), dtype="float32") for name, folder in folders.items()}
    try:
        with Server(*map(str, folders.values()), *names, *options) as server:
            yield Setup(server.url, engines)
    finally:
        for engine in engines.values():
            engine.close()


def equal(found: Any, expected: Any) -> bool:
    """Return whether the values have the same types and bits."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    if is_dataclass(expected):
        return all(equal(getattr(found, field.name), getattr(expected, field.name)) for field in fields(expected))
    if isinstance(expected, list | tuple):
        one, other = cast(list[Any], found), cast(list[Any], expected)
        return len(one) == len(other) and all(map(equal, one, other))
    return found == expected


VERBS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "embed": ("m3", lambda it: it.embed(TEXTS)),
    "embed one": ("m3", lambda it: it.embed(TEXTS[0], normalize=False, truncate="left", max_tokens=7)),
    "embed parts": ("late", lambda it: it.multi_vector(TEXTS, input_type="document", token_pooling=2)),
    "sparse": ("m3", lambda it: it.sparse(TEXTS, max_active_dims=5)),
    "sparse one": ("m3", lambda it: it.sparse(TEXTS[0])),
    "multi_vector": ("m3", lambda it: it.multi_vector(TEXTS)),
    "queries": ("late", lambda it: it.multi_vector(TEXTS, input_type="query")),
    "muvera": ("late", lambda it: it.muvera(TEXTS, input_type="document", muvera={"r_reps": 3, "k_sim": 2, "dim_proj": 4})),
    "muvera one": ("late", lambda it: it.muvera(TEXTS[0], input_type="query")),
    "encode": ("m3", lambda it: it.encode(TEXTS, ("dense", "sparse", "multi_vector"))),
    "encode what there is": ("classes", lambda it: it.encode(TEXTS)),
    "encode pairs": ("ranker", lambda it: it.encode(PAIRS, ("scores",), )),
    "split": ("m3", lambda it: it.embed([" ".join(TEXTS * 4), "a"], split_long=True)),
    "score": ("ranker", lambda it: it.score(QUERY, TEXTS)),
    "score logits": ("ranker", lambda it: it.score([QUERY] * len(TEXTS), TEXTS, activate=False)),
    "score by": ("m3", lambda it: it.score(QUERY, TEXTS, score_by="sparse")),
    "score late": ("late", lambda it: it.score(QUERY, TEXTS)),
    "rerank": ("ranker", lambda it: it.rerank(QUERY, TEXTS, top_n=5)),
    "rerank all": ("m3", lambda it: it.rerank(QUERY, TEXTS)),
    "explain": ("late", lambda it: it.explain(QUERY, TEXTS)),
    "classify": ("classes", lambda it: it.classify(TEXTS)),
    "classify one": ("classes", lambda it: it.classify(TEXTS[0], activate=False)),
    "classify pairs": ("ranker", lambda it: it.classify(PAIRS)),
    "classify by labels": ("nli", lambda it: it.classify(TEXTS, LABELS, truncate=True)),
    "classify by labels alone": ("nli", lambda it: it.classify(TEXTS[0], (each for each in LABELS), hypothesis_template="{}!", multi_label=True)),
    "token_classify": ("tagger", lambda it: it.token_classify(TEXTS)),
    "entities by labels": ("spans", lambda it: it.token_classify(TEXTS, labels=LABELS, truncate=True)),
    "entities above": ("spans", lambda it: it.token_classify(TEXTS[0], labels=(each for each in LABELS), threshold=0.2)),
    "token_classify words": ("tagger", lambda it: it.token_classify(TEXTS[0], "max")),
}  # fmt: skip


@pytest.mark.parametrize("max_items", [5, 512])
@pytest.mark.parametrize("name", VERBS)
def test_verbs_are_those_of_the_engine(name: str, max_items: int, setup: Setup) -> None:
    model, ask = VERBS[name]
    expected = ask(setup.engines[model])

    async def ask_async() -> Any:
        async with AsyncClient(setup.url, model=model, max_items=max_items) as client:
            return await ask(client)

    with Client(setup.url, model=model, max_items=max_items) as client:
        assert equal(ask(client), expected)
    assert equal(asyncio.run(ask_async()), expected)


def test_vectors_may_stand_for_texts(setup: Setup) -> None:
    engine, late = setup.engines["m3"], setup.engines["late"]
    dense, sparse = engine.embed(TEXTS), engine.sparse(TEXTS)
    query, documents = late.multi_vector([QUERY], input_type="query")[0], late.multi_vector(TEXTS, input_type="document")
    with Client(setup.url, model="m3", max_items=5) as client:
        for given in (dense, list(dense), dense.astype(np.float64), [*dense[:3], *TEXTS[3:]]):
            assert equal(client.score(QUERY, given), engine.score(QUERY, given))
        assert equal(client.rerank(dense[0], dense), engine.rerank(dense[0], dense))
        assert equal(client.score(QUERY, sparse, score_by="sparse"), engine.score(QUERY, sparse, score_by="sparse"))
        assert equal(client.rerank(sparse[0], TEXTS, score_by="sparse"), engine.rerank(sparse[0], TEXTS, score_by="sparse"))
        bits = np.packbits(dense > 0, axis=1)
        assert equal(client.score(QUERY, bits), engine.score(QUERY, bits))
    with Client(setup.url, model="late", max_items=5) as client:
        for given in (documents, list(documents), [documents[i].astype(np.float16) for i in range(len(documents))]):
            assert equal(client.rerank(query, given), late.rerank(query, given))
            assert equal(client.explain(query, given), late.explain(query, given))
        assert equal(client.score(QUERY, documents[0], score_by="multi_vector"), late.score(QUERY, documents[0]))


@pytest.mark.parametrize(
    ("model", "ask", "param"),
    [
        ("m3", lambda it: it.embed([*TEXTS[:7], "bird " * 200], truncate="never"), "input[7]"),
        ("m3", lambda it: it.embed(TEXTS, dimensions=5), "dimensions"),
        ("ranker", lambda it: it.score(QUERY, [*TEXTS[:7], "bird " * 200], truncate="never"), "documents[7]"),
        ("ranker", lambda it: it.rerank("bird " * 200, TEXTS[:5], truncate="never"), "documents[0]"),
        ("ranker", lambda it: it.score(["a", "b"], ["c"]), "documents"),
        ("m3", lambda it: it.score(QUERY, np.full((5, 48), np.nan, np.float32)), "documents[0]"),
        ("m3", lambda it: it.score(QUERY, [*TEXTS[:6], np.ones(3, np.float32)]), "documents[6]"),
        ("late", lambda it: it.multi_vector(TEXTS), "input_type"),
        ("late", lambda it: it.explain(QUERY, TEXTS, token_pooling=2), "explain"),
        ("tagger", lambda it: it.token_classify(TEXTS, "words"), "aggregation"),
        ("ranker", lambda it: it.rerank(QUERY, TEXTS, top_n=0), "top_n"),
        ("spans", lambda it: it.token_classify(TEXTS), "labels"),
        ("spans", lambda it: it.token_classify(TEXTS, labels=["a", "b", "a"]), "labels[2]"),
        ("spans", lambda it: it.token_classify(TEXTS, labels=["a", "<<ENT>>"]), "labels[1]"),
        ("spans", lambda it: it.token_classify(TEXTS, labels=LABELS, threshold=2), "threshold"),
        ("spans", lambda it: it.token_classify([*TEXTS[:7], "bird " * 200], labels=LABELS, truncate="never"), "input[7]"),
        ("tagger", lambda it: it.token_classify(TEXTS, labels=LABELS), "labels"),
        ("nli", lambda it: it.classify(TEXTS, ["a", "b", "a"]), "labels[2]"),
        ("nli", lambda it: it.classify(TEXTS, []), "labels"),
        ("nli", lambda it: it.classify(TEXTS, "a, b"), "labels"),
        ("nli", lambda it: it.classify(TEXTS, ["a", "word " * 60]), "labels[1]"),
        ("nli", lambda it: it.classify([*TEXTS[:7], "bird " * 200], LABELS, truncate="never"), "input[7]"),
        ("nli", lambda it: it.classify(TEXTS, LABELS, hypothesis_template="{} {}"), "hypothesis_template"),
        ("nli", lambda it: it.classify(TEXTS, multi_label=True), "multi_label"),
        ("nli", lambda it: it.classify(TEXTS, LABELS, activate=False), "activate"),
        ("nli", lambda it: it.classify(PAIRS[:5], LABELS), "input[0]"),
        ("classes", lambda it: it.classify(TEXTS, LABELS), "labels"),
        ("ranker", lambda it: it.rerank(5, TEXTS), "query"),
        ("ranker", lambda it: it.rerank(QUERY, [*TEXTS[:6], 5]), "documents[6]"),
    ],
)  # fmt: skip
def test_errors_are_those_of_the_engine(model: str, ask: Callable[[Any], Any], param: str, setup: Setup) -> None:
    """Errors have the engine's class and location, also for a list in several requests."""
    with Client(setup.url, model=model, max_items=5) as client, pytest.raises(errors.InvalidRequest) as found:
        ask(client)
    with pytest.raises(errors.InvalidRequest) as expected:
        ask(setup.engines[model])
    assert (type(found.value), found.value.param) == (type(expected.value), param)
    assert expected.value.param == param


def test_many_texts_with_many_labels_are_split_as_the_server_takes_them(setup: Setup) -> None:
    """1,000 labels leave ten texts for a request of 10,000 pairs."""
    labels = [f"label {i}" for i in range(1000)]
    with Client(setup.url, model="nli") as client:
        found = client.classify(TEXTS, labels)
    assert equal(found, setup.engines["nli"].classify(TEXTS, labels))
    assert len(found.ranked[0]) == 1000


def test_a_model_of_another_kind(setup: Setup) -> None:
    """The route of classes has no outputs to choose, so the error names the model."""
    with Client(setup.url, model="m3") as client, pytest.raises(errors.InvalidRequest, match="no 'scores'") as found:
        client.classify(TEXTS)
    assert found.value.param == "model"
