"""POST /v1/classify with labels, by an NLI model beside other models, as programs see it. Numbers: outputs/test_zero_shot.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from asgi import Answer, call
from checkpoints.classifiers import write_classifier, write_nli
from exchanges import Exchanges
from whimbrel import AsyncEngine, Engine
from whimbrel.server.app.app import create_app
from whimbrel.server.app.routing import ModelRegistry

TEXTS = ["A whimbrel is a wader.", "far away"]
LABELS = ["birds", "food", "a long bill"]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(7)
    write_classifier(root / "classes", "bert", num_labels=3)
    write_nli(root / "nli")
    with ExitStack() as stack:
        names = ("classes", "nli")
        yield {name: stack.enter_context(Engine(str(root / name), dtype="float32", served_name=name)) for name in names}


@pytest.fixture(scope="module")
def app(engines: dict[str, Engine]) -> Any:
    return create_app(ModelRegistry(*map(AsyncEngine, engines.values())))


def post(app: Any, body: dict[str, Any], **headers: str) -> Answer:
    headers = {"content_type": "application/json"} | headers
    return asyncio.run(call(app, "POST", "/v1/classify", body=orjson.dumps(body), headers=headers))


def test_the_exchanges(app: Any) -> None:
    said = Exchanges()
    for body in (
        {"input": TEXTS, "labels": LABELS},
        {"model": "nli", "input": TEXTS[0], "labels": LABELS, "hypothesis_template": "It is about {}.", "multi_label": True},
        {"model": "nli", "input": TEXTS, "labels": LABELS[:1], "truncate": "left"},
        {"model": "nli", "input": TEXTS},
        {"model": "classes", "input": TEXTS, "labels": LABELS},
        {"model": "nli", "input": TEXTS, "labels": []},
        {"model": "nli", "input": TEXTS, "labels": ["birds", "birds"]},
        {"model": "nli", "input": TEXTS, "labels": ["birds", "word " * 60]},
        {"model": "nli", "input": TEXTS, "labels": LABELS, "hypothesis_template": "about"},
        {"model": "nli", "input": [TEXTS], "labels": LABELS},
        {"model": "nli", "input": TEXTS, "candidate_labels": LABELS},
    ):
        told = post(app, body)
        answer = orjson.loads(told.body)
        answer.pop("order", None)  # it depends on random weights; see the next test
        said.note("/v1/classify", orjson.dumps(body), told.status, orjson.dumps(answer))
    said.check("native/zero_shot")


def test_the_model_that_takes_labels_answers(app: Any, engines: dict[str, Engine]) -> None:
    answer = orjson.loads(post(app, {"input": TEXTS, "labels": LABELS}).body)
    found = engines["nli"].classify(TEXTS, LABELS)
    assert (answer["model"], answer["labels"], answer["order"]) == ("nli", LABELS, found.order_NC.tolist())
    assert np.array_equal(np.array(answer["scores"], np.float32), found.scores_NC)
    assert "order" not in orjson.loads(post(app, {"model": "nli", "input": TEXTS}).body)


def test_headers_and_usage_count_texts_and_tokens(app: Any) -> None:
    told = post(app, {"input": ["a long curved bill " * 30, "a"], "labels": LABELS})
    assert told.headers["x-whimbrel-truncated"] == "1"
    one = orjson.loads(post(app, {"input": "a", "labels": LABELS}).body)["usage"]["prompt_tokens"]
    assert orjson.loads(told.body)["usage"]["prompt_tokens"] == 3 * 40 + one


def test_what_runs_out_of_time_is_dropped(app: Any) -> None:
    told = post(app, {"input": TEXTS, "labels": LABELS}, x_request_timeout="0.000001")
    assert (told.status, orjson.loads(told.body)["error"]["code"]) == (504, "deadline_exceeded")
