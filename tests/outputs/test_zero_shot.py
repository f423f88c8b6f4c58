"""Zero-shot classification against transformers' pipeline, on random NLI checkpoints of several families."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from checkpoints.classifiers import NLI, write_classifier, write_nli
from checkpoints.files import edit_json
from parity import Parity
from whimbrel import AsyncEngine, Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import InvalidRequest, TooLong, TruncationWarning
from whimbrel.outputs.zero_shot import ZeroShot
from whimbrel.types.request import Request

TEXTS = ["The whimbrel is a wader.", "a", "a long curved bill " * 30, "ein großer Vogel!", "a"]
LABELS = ["birds", "food, and drink", "far away {}", "a long curved bill"]
CLASSES = {
    "contradiction first": NLI,
    "entailment first": ("ENTAILMENT", "neutral", "contradiction"),
    "entailment in the middle": ("neutral", "entailment", "contradiction"),
    "two": ("entailment", "not_entailment"),
    "two, permuted": ("not_entailment", "entailment"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "sum to 1": {},
    "each alone": {"multi_label": True},
    "one label": {"labels": LABELS[:1]},
    "another template": {"hypothesis_template": "{} is what it is about"},
}


def pipeline(folder: Path) -> Any:
    return transformers.pipeline("zero-shot-classification", model=str(folder), device="cpu")


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "modernbert", "deberta", "qwen3"])
@pytest.mark.parametrize("names", CLASSES.values(), ids=CLASSES)
@pytest.mark.filterwarnings("ignore::whimbrel.errors.TruncationWarning")
def test_labels_are_judged_as_by_the_pipeline(family: str, names: tuple[str, ...], tmp_path: Path, parity: Parity) -> None:
    """Also texts that are too long, which are cut; the hypothesis never is."""
    write_nli(tmp_path, family, names)
    reference = pipeline(tmp_path)
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert names[engine.card.entailment or 0].lower() == "entailment"
        for options in OPTIONS.values():
            given = {"labels": LABELS} | options
            found = engine.classify(TEXTS, **given)
            wanted = reference(TEXTS, candidate_labels=given.pop("labels"), **given)
            assert [[label for label, _ in row] for row in found.ranked] == [each["labels"] for each in wanted]
            assert found.best == [each["labels"][0] for each in wanted]
            parity([[score for _, score in row] for row in found.ranked], [each["scores"] for each in wanted])


def test_a_text_has_the_same_bits_alone(engine: Engine) -> None:
    together = engine.classify(TEXTS, LABELS, multi_label=True, truncate=True)
    for text, scores in zip(TEXTS, together.scores_NC, strict=True):
        alone = engine.classify(text, LABELS, multi_label=True, truncate=True)
        assert alone.scores_NC[0].tobytes() == scores.tobytes()


@pytest.fixture(scope="module")
def nli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_nli(tmp_path_factory.mktemp("nli"))


@pytest.fixture(scope="module")
def engine(nli: Path) -> Iterator[Engine]:
    with Engine(str(nli), dtype="float32") as engine:
        yield engine


@pytest.mark.parametrize("multi_label", [False, True])
def test_scores_that_round_to_one_number_keep_their_order(multi_label: bool) -> None:
    """Rerankers saturate, and so do these: of scores that print alike the order is that of the logits."""
    entailments = [[30.0, 20.0, 40.0, 35.0], [-120.0, -110.0, -130.0, -110.0]]
    logits = np.array([[each, -60.0] for row in entailments for each in row], np.float32)
    found = ZeroShot(("a", "b", "c", "d"), multi_label=multi_label).classes(logits, entailment=0)
    assert [[label for label, _ in row] for row in found.ranked] == [list("cdab"), list("bdac")]
    assert np.isfinite(found.scores_NC).all()
    if multi_label:
        assert (found.scores_NC[0] == 1).all()


def test_logits_beyond_exp_are_no_nan() -> None:
    logits = np.array([[5e4, -5e4], [-5e4, 5e4], [0, 0]], np.float32)
    for multi_label, expected in ((False, [1, 0, 0]), (True, [1, 0, 0.5])):
        found = ZeroShot(("a", "b", "c"), multi_label=multi_label).classes(logits, entailment=0)
        assert found.scores_NC.tolist() == [expected]


def test_texts_are_counted_once_and_tokens_as_often_as_they_run(engine: Engine) -> None:
    hypotheses = tuple(f"This example is {label}." for label in LABELS)
    result = engine.run(Request(TEXTS, ("scores",), hypotheses=hypotheses))
    pairs = engine.run(Request([(text, each) for text in TEXTS for each in hypotheses], ("scores",)))
    assert result.num_truncated == 1
    assert result.num_tokens == pairs.num_tokens
    assert result.outputs.scores is not None
    assert result.outputs.scores.shape == (len(TEXTS) * len(LABELS), 3)
    with pytest.warns(TruncationWarning, match="1 text was cut"):
        engine.classify(TEXTS, LABELS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.classify(TEXTS, LABELS, truncate=True)
        assert engine.classify([], LABELS).scores_NC.shape == (0, 4)


def test_the_same_for_asyncio_and_at_either_end(engine: Engine, nli: Path) -> None:
    left = engine.classify(TEXTS[2] + "a wader", LABELS, truncate="left")
    assert not np.array_equal(left.scores_NC, engine.classify(TEXTS[2] + "a wader", LABELS, truncate="right").scores_NC)
    reference = pipeline(nli)
    reference.tokenizer.truncation_side = "left"
    assert [label for label, _ in left.ranked[0]] == reference(TEXTS[2] + "a wader", LABELS)["labels"]
    assert np.array_equal(
        left.scores_NC, asyncio.run(AsyncEngine(engine).classify(TEXTS[2] + "a wader", LABELS, truncate="left")).scores_NC
    )


LONG = "word " * 60


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        ({"labels": []}, "labels", "empty list; give at least one"),
        ({"labels": ["a", "b", "a"]}, "labels[2]", r"'a' is labels\[0\] too"),
        ({"labels": ["a"] * 10_000}, "labels", "10,000 labels; the limit is 1,000"),
        ({"labels": ["a", ""]}, "labels[1]", "is empty"),
        ({"labels": ["a", "\t "]}, "labels[1]", "is empty"),
        ({"labels": ["a", None]}, "labels[1]", "must be a string, is NoneType"),
        ({"labels": ["a", ["b"]]}, "labels[1]", "must be a string, is list"),
        ({"labels": "a, b"}, "labels", "must be a list of strings.* is str"),
        ({"labels": {"a", "b"}}, "labels", "is set"),
        ({"labels": {"a": 1}}, "labels", "is dict"),
        ({"labels": 3}, "labels", "is int"),
        ({"labels": ["a", LONG]}, "labels[1]", "its hypothesis has .* leaves none of 40"),
        ({"labels": ["a", "\ud800"]}, "labels[1]", "surrogate"),
        ({"labels": ["a"], "hypothesis_template": "about"}, "hypothesis_template", "no place for the label; write {} once"),
        ({"labels": ["a"], "hypothesis_template": ""}, "hypothesis_template", "no place"),
        ({"labels": ["a"], "hypothesis_template": "{} or {}"}, "hypothesis_template", "2 places"),
        ({"labels": ["a"], "hypothesis_template": "{} {0}"}, "hypothesis_template", "other braces"),
        ({"labels": ["a"], "hypothesis_template": "{{}}"}, "hypothesis_template", "other braces"),
        ({"labels": ["a"], "hypothesis_template": "{label}"}, "hypothesis_template", "no place"),
        ({"labels": ["a"], "hypothesis_template": "{}" + "a" * 999}, "hypothesis_template", "1,001 characters; the limit is 1,000"),
        ({"labels": ["a"], "hypothesis_template": 3}, "hypothesis_template", "is int"),
        ({"labels": ["a"], "multi_label": "yes"}, "multi_label", "true or false, is 'yes'"),
        ({"hypothesis_template": "{}"}, "hypothesis_template", "give labels too"),
        ({"multi_label": True}, "multi_label", "give labels too"),
        ({"labels": ["a"], "activate": False}, "activate", "leave it out"),
        ({"labels": ["a"], "max_query_tokens": 3}, "max_query_tokens", "pairs"),
        ({"labels": ["a"], "score_by": "dense"}, "score_by", "scores pairs itself"),
        ({"labels": ["a"], "dimensions": 3}, "dimensions", "is for dense"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_labels_is_refused(options: dict[str, Any], param: str, says: str, engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        engine.classify(["a bird", "a text"], **options)
    assert caught.value.param == param
    assert (caught.value.status, isinstance(caught.value, ValueError)) == (400, True)


def test_faults_of_texts_are_at_their_place(engine: Engine) -> None:
    for texts, error, says in (
        (["a", ("a", "b")], InvalidRequest, r"input\[1\]: labels are for texts, not for pairs"),
        (["a", 3], InvalidRequest, r"input\[1\]: must be a string"),
        (["a", "a", TEXTS[2]], TooLong, r"input\[2\]: the pair has 1.. tokens; the limit is 40"),
    ):
        with pytest.raises(error, match=says):
            engine.classify(texts, [f"label {i}" for i in range(100)], truncate="never")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "changes",
    [
        {"id2label": {"0": "sad", "1": "glad", "2": "neutral"}, "label2id": None},
        {"id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}, "label2id": None},
        {"id2label": {"0": "entailment", "1": "entails", "2": "neutral"}, "label2id": None},
        {"label2id": {"contradiction": 2, "neutral": 1, "entailment": 0}},
        {"label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}},
    ],
)
def test_a_model_whose_classes_do_not_say_which_is_entailment_is_refused(
    changes: dict[str, Any], nli: Path, tmp_path: Path
) -> None:
    """Transformers warns, and takes the last class."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((nli / name).read_bytes())
    edit_json(tmp_path / "config.json", **changes)
    with (
        Engine(str(tmp_path), dtype="float32") as engine,
        pytest.raises(InvalidRequest, match="id2label and label2id") as caught,
    ):
        engine.classify("a", ["b"])
    assert caught.value.param == "labels"
    assert ", ".join(engine.card.labels) in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{}, {"label2id": None}, {"label2id": {"contradiction": "0", "neutral": "1", "entailment": "2"}}]
)
def test_config_may_name_entailment_in_one_place_or_two(changes: dict[str, Any], nli: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((nli / name).read_bytes())
    edit_json(tmp_path / "config.json", **changes)
    assert read_card(tmp_path, "m").entailment == 2


def test_rerankers_take_no_labels(tmp_path: Path) -> None:
    write_classifier(tmp_path, "bert", id2label={0: "entailment"}, label2id={"entailment": 0})
    needs = pytest.raises(InvalidRequest, match="labels: need a model for natural language inference")
    with Engine(str(tmp_path), dtype="float32") as engine, needs:
        engine.classify("a", ["b"])
    with Engine() as embedder, pytest.raises(InvalidRequest, match="gives no 'scores'"):
        embedder.classify("a", ["b"])


def test_hypotheses_are_for_scores_of_texts(engine: Engine) -> None:
    for fields, says in (
        ({"outputs": ("token_scores",), "hypotheses": ("a",)}, "hypotheses: are for scores alone"),
        ({"outputs": ("scores",), "hypotheses": ["a"]}, "hypotheses: must be a tuple of strings"),
        ({"outputs": ("scores",), "hypotheses": ("a", 3)}, "hypotheses: must be a tuple of strings"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            engine.run(Request(["a"], **fields))
    with pytest.raises(InvalidRequest, match=r"input\[0\]: must be a string"):
        engine.run(Request([np.array([5])], ("scores",), hypotheses=("a",)))
