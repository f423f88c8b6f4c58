"""Engines and apps of several kinds of models, for vLLM's routes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from checkpoints.bge_m3 import write_m3
from checkpoints.classifiers import write_classifier
from checkpoints.late_interaction import write_stanford
from vllm_apps import Asker
from whimbrel import Engine


@pytest.fixture(scope="module")
def minilm_app(engine: Engine) -> Asker:
    return Asker(engine)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("classifier")
    write_classifier(folder, "bert", id2label={0: "sad", 1: "glad", 2: "neither"}, label2id={"sad": 0, "glad": 1, "neither": 2})
    with Engine(str(folder), dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("tagger")
    write_classifier(folder, "bert", "ForTokenClassification", num_labels=3)
    with Engine(str(folder), dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("late")
    write_stanford(folder)
    with Engine(str(folder), dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("ranker")
    write_classifier(folder, "bert", num_labels=1)
    with Engine(str(folder), dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("m3")
    write_m3(folder)
    with Engine(str(folder), dtype="float32") as engine:
        yield engine
