"""GLiNER models against the entities of their own package, which `checkpoints/gliner_golden.py` wrote."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from asgi import call
from checkpoints.classifiers import write_classifier
from checkpoints.files import edit_json
from checkpoints.gliner_golden import GOLDEN, LABELS, TEXTS, write_gliner
from whimbrel import AsyncEngine, Engine
from whimbrel.checkpoint.locate import Checkpoint
from whimbrel.checkpoint.reader import read_card
from whimbrel.cli.console import describe
from whimbrel.errors import CheckpointError, InvalidRequest, SetupError, TooLong, TruncationWarning
from whimbrel.server.app.app import create_app
from whimbrel.server.app.routing import ModelRegistry
from whimbrel.types.request import Request

NAMES = ["deberta", "modernbert"]
CONFIG = "gliner_config.json"
pytestmark = pytest.mark.filterwarnings("ignore::whimbrel.errors.TruncationWarning")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    root = tmp_path_factory.mktemp("gliner")
    engines = {name: Engine(write_gliner(root / name, name), dtype="float32", served_name=name) for name in NAMES}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="module")
def engine(engines: dict[str, Engine]) -> Engine:
    return engines["deberta"]


@pytest.mark.parametrize("name", NAMES)
def test_entities_are_those_of_the_package(name: str, engines: dict[str, Engine]) -> None:
    """Labels, places, texts and order, also of texts without words, of more words than the model takes, and of marks in a text."""
    for case in json.loads((GOLDEN / name / "entities.json").read_text(encoding="utf-8")):
        found = engines[name].token_classify(TEXTS, labels=case["labels"], threshold=case["threshold"])
        for entities, expected in zip(found, case["entities"], strict=True):
            wanted = [(each["label"], each["start"], each["end"], each["text"]) for each in expected]
            assert [(each.label, each.start, each.end, each.text) for each in entities] == wanted
            assert [each.score for each in entities] == pytest.approx([each["score"] for each in expected], abs=2e-5)
    assert sum(map(len, found)) > 3


@pytest.mark.parametrize("name", NAMES)
def test_a_text_alone_has_the_same_bits(name: str, engines: dict[str, Engine]) -> None:
    """Beside other texts, and beside requests with other labels."""
    engine = engines[name]
    futures = [
        engine.submit(Request(texts, ("token_scores",), labels=tuple(labels)))
        for texts, labels in ((TEXTS, LABELS), (TEXTS[:1], LABELS[:1]), (TEXTS[4:6], LABELS))
    ]
    together, one, other = (future.result().outputs.token_scores for future in futures)
    assert together is not None
    assert one is not None
    assert other is not None
    for index, text in enumerate(TEXTS):
        alone = engine.run(Request([text], ("token_scores",), labels=tuple(LABELS))).outputs.token_scores
        assert alone is not None
        assert np.array_equal(alone[0], together[index])
    assert np.array_equal(other[1], together[5])
    assert len(one[0]) * len(LABELS) == len(together[0])


def test_texts_longer_than_positions_of_other_models(tmp_path: Path) -> None:
    """Distances alone limit no text of DeBERTa, as in the package."""
    edit_json(write_gliner(tmp_path) / CONFIG, max_len=384)
    labels = [f"label number {number} of many" for number in range(60)]
    with Engine(tmp_path, dtype="float32") as engine:
        result = engine.run(Request(["a b c " * 20], ("token_scores",), labels=tuple(labels)))
    assert result.num_tokens > 512
    assert result.num_truncated == 0


def test_words_beyond_the_limit(engine: Engine) -> None:
    words = ["one", "two", "three", "four"] * 20
    with pytest.warns(TruncationWarning):
        cut = engine.token_classify(" ".join(words), labels=LABELS, threshold=0)
    assert cut == engine.token_classify(" ".join(words[:64]), labels=LABELS, threshold=0)
    with pytest.raises(TooLong, match=r"^input\[0\]: the text has 80 words; the limit is 64"):
        engine.token_classify(" ".join(words), labels=LABELS, truncate="never")
    few = engine.run(Request([" ".join(words)], ("token_scores",), labels=("a",), max_tokens=20))
    assert (few.num_truncated, few.num_tokens <= 20) == (1, True)


def test_a_word_without_tokens_moves_no_other(engine: Engine) -> None:
    found = engine.token_classify("Bill \u00ad Gates", labels=LABELS, threshold=0)
    assert all(each.text == "Bill \u00ad Gates"[each.start : each.end] for each in found[0])


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({}, "labels"),
        ({"labels": []}, "labels"),
        ({"labels": "a, b"}, "labels"),
        ({"labels": ["a", "b", "a"]}, "labels[2]"),
        ({"labels": ["a", " "]}, "labels[1]"),
        ({"labels": ["a", 5]}, "labels[1]"),
        ({"labels": [str(number) for number in range(10_000)]}, "labels"),
        ({"labels": ["a", "b <<ENT>> c"]}, "labels[1]"),
        ({"labels": ["a <<SEP>>"]}, "labels[0]"),
        ({"labels": ["a", "\ud800"]}, "input[0]"),
        ({"labels": ["word " * 1000]}, "labels"),
        ({"threshold": 0.5}, "threshold"),
        ({"labels": LABELS, "threshold": 1.5}, "threshold"),
        ({"labels": LABELS, "threshold": float("nan")}, "threshold"),
        ({"labels": LABELS, "threshold": True}, "threshold"),
        ({"labels": LABELS, "threshold": "0.5"}, "threshold"),
        ({"labels": LABELS, "aggregation": "first"}, "aggregation"),
        ({"labels": LABELS, "activate": False}, "activate"),
        ({"labels": LABELS, "prompt": "query: "}, "prompt"),
        ({"labels": LABELS, "truncate": "left"}, "truncate"),
    ],
)
def test_what_is_refused(options: dict[str, Any], where: str, engine: Engine) -> None:
    with pytest.raises(InvalidRequest) as refused:
        engine.token_classify(TEXTS[:2], **options)
    assert str(refused.value).startswith(f"{where}: ")


def test_other_requests_and_other_models(engine: Engine, tmp_path: Path) -> None:
    for request in (Request(["a"]), Request(["a"], ("token_scores",))):
        with pytest.raises(InvalidRequest, match=r"^labels: this model finds entities of labels"):
            engine.run(request)
    with pytest.raises(InvalidRequest, match="token ids"):
        engine.run(Request([np.array([1, 2])], labels=("a",)))
    with pytest.raises(InvalidRequest, match="no 'dense'"):
        engine.embed("a")
    write_classifier(tmp_path, "bert", "ForTokenClassification", num_labels=3)
    with Engine(tmp_path, dtype="float32") as other, pytest.raises(InvalidRequest, match=r"^labels: this model finds its own"):
        other.token_classify("a", labels=LABELS)


def test_the_route(engines: dict[str, Engine]) -> None:
    app = create_app(ModelRegistry(*map(AsyncEngine, engines.values())))

    def post(**body: Any) -> Any:
        told = asyncio.run(
            call(app, "POST", "/v1/token_classify", body=orjson.dumps(body), headers={"content_type": "application/json"})
        )
        return told.status, orjson.loads(told.body)

    status, answer = post(model="modernbert", input=TEXTS, labels=LABELS, threshold=0.6)
    found = engines["modernbert"].token_classify(TEXTS, labels=LABELS, threshold=0.6)
    assert status == 200
    assert [[(each["label"], each["start"], each["end"], each["text"]) for each in row] for row in answer["entities"]] == [
        [(each.label, each.start, each.end, each.text) for each in row] for row in found
    ]
    for body, param in (
        ({"input": TEXTS}, "labels"),
        ({"input": TEXTS, "labels": ["a", "a"]}, "labels[1]"),
        ({"input": TEXTS, "labels": LABELS, "threshold": 2}, "threshold"),
        ({"input": ["a"] * 2000, "labels": ["a", "b", "c", "d", "e", "f"]}, "input"),
    ):
        status, answer = post(model="deberta", **body)
        assert status in (400, 413)
        assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("encoder_config", None, "names the model inside"),
        ("span_mode", "token_level", "must be 'markerV0'"),
        ("span_mode", "marker", "must be 'markerV0'"),
        ("labels_encoder", "BAAI/bge-small-en-v1.5", "must be absent"),
        ("subtoken_pooling", "mean", "must be 'first'"),
        ("words_splitter_type", "spacy", "must be 'whitespace'"),
        ("embed_ent_token", False, "must be True"),
        ("post_fusion_schema", "l2l-l2t", "must be ''"),
        ("fuse_layers", True, "must be False"),
        ("max_width", 0, "must be positive"),
        ("num_rnn_layers", -1, "must not be negative"),
        ("invented", 1, "is not known"),
    ],
)
def test_other_models_are_refused_by_name(key: str, value: Any, what: str, tmp_path: Path) -> None:
    edit_json(write_gliner(tmp_path) / CONFIG, **{key: value})
    with pytest.raises(CheckpointError, match=what) as refused:
        read_card(tmp_path, "m")
    assert (refused.value.file, refused.value.key) == (CONFIG, key)


def test_files_that_disagree(tmp_path: Path) -> None:
    write_gliner(tmp_path)
    with pytest.raises(CheckpointError, match="leave out --pooling"):
        read_card(tmp_path, "m", pooling="mean")
    edit_json(tmp_path / CONFIG, class_token_index=5)
    with pytest.raises(CheckpointError, match="class_token_index is 5") as refused:
        Engine(tmp_path)
    assert refused.value.file == "tokenizer.json"
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    edit_json(tmp_path / CONFIG, class_token_index=176)
    with pytest.raises(CheckpointError, match="only pickled weights") as pickled:
        Engine(tmp_path)
    assert "whimbrel convert" in (pickled.value.hint or "")


def test_other_dtypes(tmp_path: Path) -> None:
    """Samples without labels would say nothing of int8."""
    with Engine(write_gliner(tmp_path), dtype="bfloat16") as engine:
        assert engine.token_classify(TEXTS, labels=LABELS, threshold=0)[0]
    with pytest.raises(SetupError, match="int8"):
        Engine(tmp_path, dtype="int8")


def test_show_says_what_it_finds(tmp_path: Path) -> None:
    card = read_card(write_gliner(tmp_path), "m")
    fields = describe(card, Checkpoint(tmp_path, "m"))
    assert fields["outputs"] == "entities (spans of up to 4 words)"
    assert fields["labels"] == "those of a request"
