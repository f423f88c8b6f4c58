"""The pure functions of /v1/classify and /v1/token_classify: reading, writing and refusing. Numbers: test_client_verbs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given

from fake_embedder import FakeModel
from vectors import same_bits, told, vectors
from whimbrel.dialects import ROUTES, native
from whimbrel.errors import InvalidRequest, TooLarge
from whimbrel.types.request import Request
from whimbrel.types.result import Outputs, Ragged, Result, Timings
from whimbrel.types.seq import TokenOffsets

READ = {"classify": native.parse_classify, "token_classify": native.parse_token_classify}


class Card(SimpleNamespace):
    labels = ("O", "BIRD")
    entailment = 1
    prompts = {"query": "q: "}  # noqa: RUF012
    outputs = dict.fromkeys(("scores", "token_scores"))

    def output(self, name: str) -> None: ...


MODEL = FakeModel.named("m", Card())


def request(verb: str, **body: Any) -> Any:
    ask = READ[verb](orjson.dumps(body)).request
    return ask(MODEL)


def test_every_field() -> None:
    options = {"prompt": "query", "activate": False, "truncate": "left"}
    expected = Request(["a"], ("scores",), prompt_name="query", activate=False, truncate="left")
    assert request("classify", input="a", **options) == expected
    assert request("classify", input=[["a", "b"]]).texts == [("a", "b")]
    found = request("token_classify", input=["a", "b"], aggregation="max", **options)
    assert found == Request(
        ["a", "b"], ("token_scores",), prompt_name="query", activate=False, truncate="left", return_offsets=True
    )


@pytest.mark.parametrize("verb", READ)
@pytest.mark.parametrize(
    ("body", "param"),
    [(b"", None), (b"{", None), (b"[]", None), (b"{}", "input"), (b'{"input": []}', "input"), (b'{"input": 3}', "input"), (b'{"input": [3]}', "input[0]"),
     (b'{"input": ["a", null]}', "input[1]"), (b'{"input": "a", "activate": 1}', "activate"), (b'{"input": "a", "inputs": 1}', None),
     (b'{"input": "a", "truncate": "middle"}', "truncate"), (b'{"input": "a", "model": 3}', "model")],
)  # fmt: skip
def test_wrong_bodies_say_where(verb: str, body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        READ[verb](body).request(MODEL)
    assert caught.value.param == param


@pytest.mark.parametrize("verb", READ)
def test_2049_texts_are_too_many(verb: str) -> None:
    with pytest.raises(TooLarge, match="2,049 inputs"):
        request(verb, input=["a"] * 2049)


def test_labels_become_hypotheses() -> None:
    body = {"input": ["a", "b"], "labels": ["x", "y z"], "truncate": "left", "activate": True}
    expected = Request(["a", "b"], ("scores",), hypotheses=("about x", "about y z"), activate=False, truncate="left")
    assert request("classify", **body, hypothesis_template="about {}") == expected
    assert request("classify", **body, multi_label=True).hypotheses == ("This example is x.", "This example is y z.")
    assert request("classify", input="a", labels=None, hypothesis_template=None, multi_label=False).hypotheses == ()


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"labels": []}, "labels", "empty list"), ({"labels": "x, y"}, "labels", "Expected `array | null`"),
        ({"labels": ["x", 3]}, "labels[1]", "Expected `str`"), ({"labels": ["x", "x"]}, "labels[1]", "each label once"),
        ({"labels": ["x", " "]}, "labels[1]", "is empty"), ({"labels": ["x"] * 10_000}, "labels", "the limit is 1,000"),
        ({"labels": ["x"], "hypothesis_template": "{} {}"}, "hypothesis_template", "2 places"),
        ({"labels": ["x"], "activate": False}, "activate", "leave it out"), ({"labels": ["x"], "multi_label": 1}, "multi_label", "bool"),
        ({"multi_label": True}, "multi_label", "give labels too"), ({"hypothesis_template": "{}"}, "hypothesis_template", "give labels too"),
        ({"labels": ["x"], "input": [["a", "b"]]}, "input[0]", "not for pairs"), ({"candidate_labels": ["x"]}, None, "candidate_labels"),
    ],
)  # fmt: skip
def test_wrong_labels_say_where(body: dict[str, Any], param: str | None, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        request("classify", **({"input": "a"} | body))
    assert (caught.value.param, caught.value.status) == (param, 400)


def test_10001_pairs_are_too_many() -> None:
    labels = [str(i) for i in range(100)]
    assert len(request("classify", input=["a"] * 100, labels=labels).texts) == 100
    says = "101 texts with 100 labels are 10,100 pairs; the limit is 10,000. Send at most 100 of the texts at once"
    with pytest.raises(TooLarge, match=says):
        request("classify", input=["a"] * 101, labels=labels)


def test_the_answer_to_labels_has_their_order() -> None:
    body = native.parse_classify(b'{"input": ["a", "b"], "labels": ["x", "y", "z"], "multi_label": true}').body
    logits = np.array([[0, 30], [0, 40], [0, 35], [0, 0], [1, 0], [0, 1]], np.float32)
    answer = orjson.loads(native.render_classify(body, Result(Outputs(scores=logits), 5, 0, Timings()), MODEL))
    assert answer["scores"] == [[1, 1, 1], [0.5, 0.26894143, 0.7310586]]
    assert (answer["labels"], answer["order"]) == (["x", "y", "z"], [[1, 2, 0], [2, 0, 1]])
    assert list(answer) == ["labels", "scores", "model", "usage", "order"]


def test_the_answers() -> None:
    body = native.parse_classify(b'{"input": ["a", "b"]}').body
    scores = np.array([[0.25, 0.75], [1, 0]], np.float32)
    answer = native.render_classify(body, Result(Outputs(scores=scores), 5, 0, Timings()), MODEL)
    assert orjson.loads(answer) == {
        "labels": ["O", "BIRD"], "scores": [[0.25, 0.75], [1, 0]], "model": "m", "usage": {"prompt_tokens": 5, "total_tokens": 5}
    }  # fmt: skip
    tagged = native.parse_token_classify(b'{"input": "a wader"}').body
    scores = Ragged(np.array([[0.9, 0.1], [0.25, 0.75]], np.float32), np.array([0, 2]))
    spans = TokenOffsets(np.array([[0, 1], [2, 7]], np.int32), np.zeros(2, bool), np.zeros(2, bool))
    result = Result(Outputs(token_scores=scores), 2, 0, Timings(), [spans])
    entities = orjson.loads(native.render_token_classify(tagged, result, MODEL))["entities"]
    assert entities == [[{"label": "BIRD", "score": 0.75, "start": 2, "end": 7, "text": "wader"}]]


@given(vectors(3, 2))
def test_scores_read_back(scores: np.ndarray) -> None:
    body = native.parse_classify(b'{"input": ["a", "b", "c"]}').body
    answer = native.render_classify(body, Result(Outputs(scores=scores), 5, 0, Timings()), MODEL)
    assert same_bits(told(answer)["scores"], scores)


def test_the_examples_can_be_read() -> None:
    for route in ROUTES:
        if "classify" in route.path:
            assert type(route.parse(route.example.encode()).body) is route.request_type
