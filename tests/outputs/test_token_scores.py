"""Scores of tokens against transformers' classes, entities against its pipeline, and rewards of steps."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from checkpoints.classifiers import two_layers, write_classifier
from checkpoints.files import edit_json, write_json
from checkpoints.published.blocks import draw_weights
from checkpoints.published.cases import save_tokenizer
from checkpoints.published.internlm2 import INTERNLM2, internlm2, internlm2_names
from checkpoints.step_rewards import write_shepherd
from hidden_states import random_ids
from parity import Parity
from whimbrel import AsyncEngine, Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError, InvalidRequest
from whimbrel.outputs.entities import AGGREGATIONS, find_entities
from whimbrel.types.request import Request
from whimbrel.types.result import Entity
from whimbrel.types.seq import TokenOffsets

LABELS = dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "OTHER", "X-OTHER"]))
TEXTS = [
    "The whimbrel is a wader with a long curved bill.",
    "",
    "Der Regenbrachvogel zieht im Herbst nach Afrika; ein großer Vogel!",
    "  It breeds  across\tmuch of\nsubarctic North-America, 雪 and 🙂 Europe (1234567890). " * 3,
    "bird",
]


@cache
def checkpoint(folder: Path, family: str) -> tuple[Path, Any]:
    path = folder / family
    model = write_classifier(path, family, "ForTokenClassification", id2label=LABELS)
    if family == "bert":
        write_old_tokenizer(path)
    return path, model


def write_old_tokenizer(folder: Path) -> None:
    """Write the tokenizer's files of dslim/bert-base-NER, except for sizes."""
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("\n".join(sorted(vocab, key=vocab.get)) + "\n", encoding="utf-8")
    write_json(folder / "tokenizer_config.json", {"do_lower_case": False, "max_len": 40, "init_inputs": []})
    roles = {f"{role}_token": f"[{role.upper()}]" for role in ("unk", "sep", "pad", "cls", "mask")}
    write_json(folder / "special_tokens_map.json", roles)
    write_json(folder / "added_tokens.json", {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("token-scores")


NER = {
    "bert": ("bert", "dslim/bert-base-NER"),
    "xlm-roberta": ("roberta", "FacebookAI/xlm-roberta-large-finetuned-conll03-english"),
    "distilbert": ("distilbert", "elastic/distilbert-base-uncased-finetuned-conll03-english"),
}
"""The row of model/families.py, and a model of that layout."""


@pytest.mark.parametrize("family", [*NER, "roberta"])
def test_entities_are_those_of_the_pipeline(family: str, folder: Path, parity: Parity) -> None:
    path, model = checkpoint(folder, family)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    texts = TEXTS
    with Engine(str(path), dtype="float32") as engine:
        found = {name: engine.token_classify(texts, name) for name in AGGREGATIONS}  # pyright: ignore[reportArgumentType]
        logits = engine.run(Request(texts, activate=False)).outputs.token_scores
    assert logits is not None
    with torch.no_grad():
        expected = [model(**tokenizer(text, truncation=True, return_tensors="pt")).logits[0].numpy() for text in texts]
    names, models = (NER[family][0], NER[family][1:]) if family in NER else ("", ())
    parity([logits[i] for i in range(len(texts))], expected, *models, family=names, tasks=["token_scores"])
    pipe = transformers.pipeline("token-classification", model=model, tokenizer=tokenizer, device="cpu")
    for name in AGGREGATIONS:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Tokenizer does not support real words")
            expected = [pipe(text, aggregation_strategy=name) for text in texts]
        for text, got, wanted in zip(texts, found[name], expected, strict=True):
            key = "entity" if name == "none" else "entity_group"
            assert [(each.label, each.start, each.end) for each in got] == [
                (each[key], each["start"], each["end"]) for each in wanted
            ]
            np.testing.assert_allclose([each.score for each in got], [each["score"] for each in wanted], rtol=1e-4)
            assert [each.text for each in got] == [text[each.start : each.end] for each in got]
    assert any(found["simple"])


@pytest.mark.parametrize(
    "family", ["jina v3", "nomic", "gte", "electra", "mpnet", "deberta", "modernbert", "eurobert", "llama", "gemma2"]
)
def test_each_family_gives_the_scores_of_transformers(family: str, tmp_path: Path, parity: Parity) -> None:
    model = write_classifier(tmp_path, family, "ForTokenClassification", num_labels=3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with Engine(str(tmp_path), dtype="float32") as engine:
        got = engine.run(Request(TEXTS)).outputs.token_scores
    assert got is not None
    with torch.no_grad():
        expected = [model(**tokenizer(text, truncation=True, return_tensors="pt")).logits[0] for text in TEXTS]
    parity([got[i] for i in range(len(TEXTS))], [each.softmax(-1).numpy() for each in expected])


@pytest.fixture(scope="module")
def bert(folder: Path) -> Iterator[Engine]:
    with Engine(str(checkpoint(folder, "bert")[0]), dtype="float32") as engine:
        yield engine


def test_what_is_alone_has_the_same_bits_in_any_company(bert: Engine) -> None:
    requests = [Request(TEXTS), Request(TEXTS[::-1], activate=False), Request(TEXTS * 2)]
    together = [future.result() for future in [bert.submit(request) for request in requests]]
    for request, result in zip(requests, together, strict=True):
        for i, text in enumerate(request.texts):
            alone = bert.run(Request([text], activate=request.activate)).outputs.token_scores  # pyright: ignore[reportArgumentType]
            assert alone is not None
            assert result.outputs.token_scores is not None
            assert alone[0].tobytes() == result.outputs.token_scores[i].tobytes()


def test_a_prompt_is_no_part_of_the_text(bert: Engine) -> None:
    text = "The whimbrel is a wader."
    prompted, whole = bert.token_classify(text, "none", prompt="a bird: ")[0], bert.token_classify("a bird: " + text, "none")[0]
    assert [each for each in whole if each.start >= 8] == [
        replace(each, start=each.start + 8, end=each.end + 8) for each in prompted
    ]
    assert all(each.text == text[each.start : each.end] for each in prompted)


def test_logits_and_cut_texts(bert: Engine) -> None:
    long = "bird wader " * 60
    cut = bert.token_classify(long, "none", truncate="left")[0]
    assert cut
    assert all(each.start > 200 and each.text == long[each.start : each.end] for each in cut)
    assert max(each.score for each in bert.token_classify(long, "none", activate=False)[0]) > 1
    with pytest.raises(InvalidRequest, match="none, simple, first, average, max"):
        bert.token_classify(long, "most")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match="gives no 'scores'; it gives: token_scores"):
        bert.classify("bird")
    with pytest.raises(InvalidRequest, match="not pairs"):
        bert.run(Request([("a", "b")]))
    with pytest.raises(InvalidRequest, match=r"input\[1\]"):
        bert.token_classify(["a", 5])  # pyright: ignore[reportArgumentType]
    assert bert.token_classify([]) == []


def test_the_same_verb_for_asyncio(folder: Path, bert: Engine) -> None:
    async def ask() -> list[list[Entity]]:
        async with AsyncEngine(str(checkpoint(folder, "bert")[0]), dtype="float32") as engine:
            return await engine.token_classify(TEXTS, "average")

    assert asyncio.run(ask()) == bert.token_classify(TEXTS, "average")


def test_words_of_equally_sure_tokens_go_by_the_first_of_them() -> None:
    scores = np.array([[0.1, 0.9, 0], [0.9, 0.1, 0], [0, 0.2, 0.8], [0.1, 0.1, 0.8]], np.float32)
    spans = TokenOffsets(
        np.array([[0, 2], [2, 4], [5, 7], [7, 9]], np.int32), np.zeros(4, np.bool_), np.array([False, True, False, True])
    )
    labels = ["O", "B-X", "I-X"]
    found = find_entities("abcd efgh", scores, spans, labels, "max")
    assert [(each.label, each.text, round(each.score, 3)) for each in found] == [("X", "abcd efgh", 0.85)]
    assert [(each.label, each.text) for each in find_entities("abcd efgh", scores, spans, labels, "none")] == [
        ("B-X", "ab"),
        ("I-X", "ef"),
        ("I-X", "gh"),
    ]


def test_rewards_of_steps_lie_at_the_tags(tmp_path: Path, parity: Parity) -> None:
    """The model is Qwen2.5-Math-PRM-7B: the probability of the second class, at each <extra_0>."""
    model = write_classifier(tmp_path, "qwen2", num_labels=2, pad_token_id=None)
    head = two_layers(tmp_path, 2)
    edit_json(
        tmp_path / "config.json",
        architectures=["Qwen2ForProcessRewardModel"],
        auto_map={"AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel"},
        id2label=None,
        label2id=None,
        pad_token_id=None,
    )
    with pytest.raises(CheckpointError, match="<extra_0>"):
        Engine(str(tmp_path))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    used = {*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])}
    tag = {**content["added_tokens"][0], "id": max(used) + 1, "content": "<extra_0>"}
    content["added_tokens"].append(tag)
    write_json(tmp_path / "tokenizer.json", content)
    edit_json(tmp_path / "config.json", vocab_size=tag["id"] + 1)
    grown = load_file(tmp_path / "model.safetensors")
    words = grown["model.embed_tokens.weight"]
    words = torch.cat((words, torch.randn(tag["id"] + 1 - len(words), words.shape[1])))
    save_file(grown | {"model.embed_tokens.weight": words}, tmp_path / "model.safetensors")
    model.model.embed_tokens = torch.nn.Embedding.from_pretrained(words)
    texts = ["birds fly<extra_0>some fly far<extra_0>", "birds fly", "<extra_0>so<extra_0> <extra_0>"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with Engine(str(tmp_path), dtype="float32") as engine:
        got = engine.run(Request(texts)).outputs.token_scores
        alone = [engine.run(Request([text])).outputs.token_scores for text in texts]
    assert got is not None
    expected: list[np.ndarray] = []
    for text in texts:
        encoded = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            scores = head(model.model(**encoded).last_hidden_state[0]).softmax(-1)
        expected.append(scores[encoded["input_ids"][0] == tag["id"]].numpy())
    assert [len(each) for each in expected] == [2, 0, 3]
    parity([got[i] for i in range(3)], expected, "Qwen/Qwen2.5-Math-PRM-7B", family="llama", tasks=["token_scores"])
    for i, each in enumerate(alone):
        assert each is not None
        assert each[0].tobytes() == got[i].tobytes()


def test_internlm2_with_classes(tmp_path: Path, parity: Parity) -> None:
    """A layer `score` over the last token, as modeling_internlm2.py says; trailing padding is not counted."""
    code = {"AutoConfig": "configuration_internlm2.InternLM2Config"}
    code["AutoModelForSequenceClassification"] = "modeling_internlm2.InternLM2ForSequenceClassification"
    config = INTERNLM2 | {"architectures": ["InternLM2ForSequenceClassification"], "auto_map": code, "num_labels": 3}
    weights = draw_weights(internlm2_names(config) | {"score.weight": (3, 48)})
    write_json(tmp_path / "config.json", config)
    named = {name if name == "score.weight" else f"model.{name}": tensor for name, tensor in weights.items()}
    save_file(named, tmp_path / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(tmp_path)
    given = [row[row != config["pad_token_id"]] for row in random_ids()]
    with torch.inference_mode():
        states = [internlm2(weights, config, torch.from_numpy(row).long())[-1] for row in given]
        expected = torch.stack([state @ weights["score.weight"].T for state in states]).softmax(-1).numpy()
    with Engine(str(tmp_path), dtype="float32") as engine:
        got = engine.run(Request(given)).outputs.scores
        parity(got, expected, family="internlm2", tasks=["scores"])


@pytest.mark.parametrize("bias", [False, True])
def test_rewards_of_tokens(bias: bool, tmp_path: Path, parity: Parity) -> None:
    """The model is internlm2-1_8b-reward: a layer over every token. The reward is that of the token that the caller puts last."""
    code = {"AutoConfig": "configuration_internlm2.InternLM2Config", "AutoModel": "modeling_internlm2.InternLM2ForRewardModel"}
    config = INTERNLM2 | {"architectures": ["InternLM2ForRewardModel"], "auto_map": code, "reward_token_id": 5, "bias": bias}
    weights = draw_weights(internlm2_names(config) | {"v_head.weight": (1, 48)})
    write_json(tmp_path / "config.json", config)
    named = {name if name == "v_head.weight" else f"model.{name}": tensor for name, tensor in weights.items()}
    save_file(named, tmp_path / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(tmp_path)
    with torch.inference_mode():
        states = [internlm2(weights, config, torch.from_numpy(row).long()) for row in random_ids()]
        expected = [(state @ weights["v_head.weight"].T).numpy() for state in states]
    models = () if bias else ("internlm/internlm2-1_8b-reward",)
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert list(engine.card.outputs) == ["token_scores"]
        got = engine.run(Request(random_ids())).outputs.token_scores
        assert got is not None
        parity([got[i] for i in range(len(expected))], expected, *models, family="internlm2", tasks=["token_scores"])
        for i, row in enumerate(random_ids()):
            alone = engine.run(Request([row])).outputs.token_scores
            assert alone is not None
            assert alone[0].tobytes() == got[i].tobytes()


SHEPHERD = "peiyi9979/math-shepherd-mistral-7b-prm"


def test_rewards_of_steps_by_a_language_model(tmp_path: Path, parity: Parity) -> None:
    """The rule is that of math-shepherd's card, '+' against '-' at each tag. Its id or the user asks for it."""
    model = write_shepherd(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    candidates, tag = tokenizer.encode("+ -")[1:], tokenizer.encode("ки")[-1]
    assert tokenizer.convert_ids_to_tokens([*candidates, tag]) == ["▁+", "▁-", "▁ки"]
    texts = ["birds fly ки\nsome fly far. The answer is: 18 ки", "birds fly", "ки 1 + 1 - 2 ки ки"]
    expected: list[np.ndarray] = []
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text)])
        with torch.no_grad():
            scores = model(ids).logits[:, :, candidates].softmax(dim=-1)[:, :, 0]
        expected.append(scores[ids == tag].numpy())
    assert [len(each) for each in expected] == [2, 0, 3]
    card = read_card(tmp_path, SHEPHERD)
    assert (card.labels, list(card.outputs)) == (("+",), ["token_scores"])
    assert read_card(tmp_path, SHEPHERD, pooling="math-shepherd") == card
    assert list(read_card(tmp_path, SHEPHERD, pooling="mean").outputs) == ["dense"]
    with Engine(str(tmp_path), dtype="float32", pooling="math-shepherd") as engine:
        got = engine.run(Request(texts)).outputs.token_scores
        logits = engine.run(Request(texts, activate=False)).outputs.token_scores
    assert got is not None
    assert logits is not None
    parity([got[i][:, 0] for i in range(3)], expected, SHEPHERD, family="llama", tasks=["token_scores"])
    np.testing.assert_allclose(1 / (1 + np.exp(-logits[0])), got[0], atol=1e-6)


def test_a_vocabulary_without_the_tag_is_no_shepherds(tmp_path: Path) -> None:
    write_shepherd(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    del content["model"]["vocab"]["▁ки"]
    write_json(tmp_path / "tokenizer.json", content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: model: has no token '▁ки'"):
        read_card(tmp_path, SHEPHERD)
