"""Scores of texts and pairs against transformers' classes and Sentence Transformers' CrossEncoder."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder

from checkpoints.classifiers import (
    DOCUMENTS,
    FAMILIES,
    PAIRS,
    QUERIES,
    SPLIT_PAIRS,
    TEXTS,
    logits_of,
    two_layers,
    write_classifier,
)
from checkpoints.encoders import SIZES
from checkpoints.files import edit_json, write_json
from checkpoints.published.blocks import draw_weights, tensors
from checkpoints.published.cases import published_states, write_published
from hidden_states import random_ids
from parity import Parity
from whimbrel import AsyncEngine, Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError, InvalidRequest, TooLong
from whimbrel.types.request import Request
from whimbrel.types.result import Ranked


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_gives_the_scores_of_transformers(family: str, tmp_path: Path, parity: Parity) -> None:
    model = write_classifier(tmp_path, family, num_labels=3)
    with Engine(str(tmp_path), dtype="float32") as engine:
        logits = engine.score(*SPLIT_PAIRS, activate=False)
        classes = engine.classify(TEXTS)
    parity(logits, logits_of(tmp_path, model, PAIRS))
    expected = torch.tensor(logits_of(tmp_path, model, TEXTS)).softmax(-1)
    parity(classes.scores_NC, expected.numpy())
    assert classes.best == [classes.labels[best] for best in expected.argmax(-1)]


IDENTITY = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0.dev0"}
SIGMOID = {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "5.1.0"}


@dataclass(frozen=True)
class Layout:
    """A cross-encoder, and the form in which its config.json states it."""

    models: tuple[str, ...]
    family: str
    """A name in `classifiers.FAMILIES`."""
    names: str
    """A name in model/families.py."""
    num_labels: int = 1
    config: dict[str, Any] = field(default_factory=dict)


LAYOUTS = {
    "ms marco": Layout(
        ("cross-encoder/ms-marco-MiniLM-L6-v2", "cross-encoder/ms-marco-MiniLM-L12-v2"),
        "bert",
        "bert",
        config={"sentence_transformers": IDENTITY},
    ),
    "stsb": Layout(("cross-encoder/stsb-roberta-base",), "roberta", "roberta", config={"sentence_transformers": SIGMOID}),
    "nli": Layout(
        ("cross-encoder/nli-distilroberta-base",),
        "roberta",
        "roberta",
        3,
        {"sentence_transformers": IDENTITY, "id2label": {"0": "contradiction", "1": "entailment", "2": "neutral"}},
    ),
    "bge": Layout(("BAAI/bge-reranker-base", "BAAI/bge-reranker-large", "BAAI/bge-reranker-v2-m3"), "xlm-roberta", "roberta"),
    "gte modernbert": Layout(
        ("Alibaba-NLP/gte-reranker-modernbert-base",), "modernbert", "modernbert", config={"classifier_pooling": "mean"}
    ),
    "mxbai": Layout(
        ("mixedbread-ai/mxbai-rerank-xsmall-v1", "mixedbread-ai/mxbai-rerank-base-v1", "mixedbread-ai/mxbai-rerank-large-v1"),
        "deberta",
        "deberta",
    ),
    "nli deberta": Layout(
        ("cross-encoder/nli-deberta-v3-base", "cross-encoder/nli-deberta-v3-large"),
        "deberta",
        "deberta",
        3,
        {"sentence_transformers": IDENTITY, "id2label": {"0": "contradiction", "1": "entailment", "2": "neutral"}},
    ),
    "oldest": Layout((), "bert", "bert", config={"sbert_ce_default_activation_function": IDENTITY["activation_fn"]}),
    "oldest without": Layout((), "bert", "bert", config={"sbert_ce_default_activation_function": None}),
    "several, each alone": Layout((), "bert", "bert", 3, {"sentence_transformers": SIGMOID}),
    "several, raw": Layout((), "bert", "bert", 3, {"sentence_transformers": {"version": "4.1.0"}}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_cross_encoders_give_the_scores_of_sentence_transformers(name: str, tmp_path: Path, parity: Parity) -> None:
    layout = LAYOUTS[name]
    write_classifier(tmp_path, layout.family, num_labels=layout.num_labels)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", config | layout.config)
    reference = CrossEncoder(str(tmp_path), device="cpu")
    with Engine(str(tmp_path), dtype="float32") as engine:
        parity(engine.score(*SPLIT_PAIRS), reference.predict(PAIRS), *layout.models, family=layout.names, tasks=["scores"])
        if layout.num_labels == 1:
            expected = reference.rank(QUERIES[0], DOCUMENTS, top_k=3)
            ranked = engine.rerank(QUERIES[0], DOCUMENTS, top_n=3)
            assert [each.index for each in ranked] == [each["corpus_id"] for each in expected]
            parity([each.score for each in ranked], [each["score"] for each in expected])


@pytest.mark.parametrize(("activation", "num_labels"), [(None, 1), (torch.nn.Identity(), 1), (None, 3)])
def test_cross_encoders_as_sentence_transformers_saves_them_today(
    activation: Any, num_labels: int, tmp_path: Path, parity: Parity
) -> None:
    write_classifier(tmp_path / "plain", "bert", num_labels=num_labels)
    made = CrossEncoder(str(tmp_path / "plain"), device="cpu", activation_fn=activation, prompts={"query": "query: "})
    made.save_pretrained(str(tmp_path / "saved"))
    reference = CrossEncoder(str(tmp_path / "saved"), device="cpu")
    with Engine(str(tmp_path / "saved"), dtype="float32") as engine:
        parity(engine.score(*SPLIT_PAIRS), reference.predict(PAIRS))
        parity(engine.score(*SPLIT_PAIRS, activate=False), reference.predict(PAIRS, activation_fn=torch.nn.Identity()))
        parity(engine.score(*SPLIT_PAIRS, prompt="query"), reference.predict(PAIRS, prompt_name="query"))


@pytest.mark.parametrize(
    ("problem", "num_labels", "family", "models"),
    [
        ("regression", 1, "bert", ()),
        ("regression", 2, "bert", ()),
        ("single_label_classification", 3, "bert", ()),
        ("multi_label_classification", 3, "roberta", ("SamLowe/roberta-base-go_emotions",)),
        (None, 3, "deberta", ("MoritzLaurer/DeBERTa-v3-base-mnli-fever-anli", "meta-llama/Prompt-Guard-86M")),
        (None, 1, "bert", ()),
        (None, 2, "distilbert", ("distilbert/distilbert-base-uncased-finetuned-sst-2-english",)),
    ],
)
def test_classifiers_give_what_the_pipeline_gives(
    problem: str | None, num_labels: int, family: str, models: tuple[str, ...], tmp_path: Path, parity: Parity
) -> None:
    labels = {i: f"class {i}" for i in range(num_labels)}
    model = write_classifier(tmp_path, family, problem_type=problem, id2label=labels)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    pipe = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu", top_k=None)
    expected = [{each["label"]: each["score"] for each in row} for row in pipe(TEXTS, truncation=True)]
    with Engine(str(tmp_path), dtype="float32") as engine:
        classes = engine.classify(TEXTS)
    assert classes.labels == tuple(labels.values())
    wanted = [[row[label] for label in classes.labels] for row in expected]
    parity(classes.scores_NC, np.array(wanted), *models, family=family, tasks=["scores"])
    assert classes.best == [max(row, key=lambda label: row[label]) for row in expected]


def test_two_labels_are_what_a_config_without_names_means(tmp_path: Path, parity: Parity) -> None:
    model = write_classifier(tmp_path, "bert", num_labels=2)
    edit_json(tmp_path / "config.json", id2label=None, label2id=None)
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert engine.card.labels == ("LABEL_0", "LABEL_1")
        parity(engine.classify(TEXTS, activate=False).scores_NC, logits_of(tmp_path, model, TEXTS))


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_each_token_of_a_classifier(family: str, tmp_path: Path, parity: Parity) -> None:
    """Every token passes the layers that the checkpoint calls its classifier, without pooling, as in vLLM.

    A text's scores by EuroBERT are the mean of these.
    """
    model = write_classifier(tmp_path, family, num_labels=3)
    layers = getattr(model, "classifier", None) or model.score
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected: list[np.ndarray] = []
    for text in TEXTS:
        encoded = tokenizer(text, truncation=True, return_tensors="pt")
        with torch.no_grad():
            hidden = model.base_model(**encoded).last_hidden_state[0]
            if family == "eurobert":  # its scores are the mean of the scores of all tokens
                hidden = model.activation(model.dense(hidden))
            whole = isinstance(layers, torch.nn.Linear)  # else it takes the first token of rows of tokens
            expected.append((layers(hidden) if whole else layers(hidden[:, None])).numpy())
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert list(engine.card.outputs) == ["scores"]
        raw = engine.run(Request(TEXTS, ("token_scores", "scores"), activate=False)).outputs
        usual = engine.run(Request(TEXTS, ("token_scores",))).outputs.token_scores
        assert raw.token_scores is not None
        assert usual is not None
        parity(list(raw.token_scores), expected)
        parity(list(usual), [torch.tensor(each).softmax(-1).numpy() for each in expected])
        assert np.array_equal(raw.scores, engine.classify(TEXTS, activate=False).scores_NC)


SKYWORK = "Skywork/Skywork-Reward-V2-"


@pytest.mark.parametrize(
    ("family", "padding", "models"),
    [
        ("llama", 7, (f"{SKYWORK}Llama-3.2-1B", f"{SKYWORK}Llama-3.1-8B")),
        ("qwen3", 7, (f"{SKYWORK}Qwen3-0.6B", f"{SKYWORK}Qwen3-8B")),
        ("llama", None, ()),
    ],
)
def test_a_decoders_score_comes_from_the_last_token_that_is_no_padding(
    family: str, padding: int | None, models: tuple[str, ...], tmp_path: Path, parity: Parity
) -> None:
    model = write_classifier(tmp_path, family, num_labels=1, pad_token_id=padding)
    rows = [[5, 9, 8, 7, 7], [7, 5, 7, 9], [7], [7, 7, 7], [9, 7], [12]]
    with torch.no_grad():
        expected = [model(torch.tensor([row])).logits.numpy()[0] for row in rows]
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert engine.card.output("scores").activated is False  # a reward
        got = engine.run(Request([np.array(row) for row in rows])).outputs.scores
        activated = engine.run(Request([np.array(row) for row in rows], activate=True)).outputs.scores
    parity(got, np.array(expected), *models, family=family, tasks=["scores"])
    parity(activated, sigmoid(np.array(expected)))


def test_a_reward_model_of_two_layers(tmp_path: Path, parity: Parity) -> None:
    """Qwen2.5-Math-RM-72B's code puts Linear, ReLU, Linear on the last token, and vLLM on every token."""
    model = write_classifier(tmp_path, "qwen2", num_labels=1, pad_token_id=None)
    head = two_layers(tmp_path, 1)
    edit_json(
        tmp_path / "config.json",
        architectures=["Qwen2ForRewardModel"],
        auto_map={"AutoConfig": "configuration_qwen2_rm.Qwen2RMConfig", "AutoModel": "modeling_qwen2_rm.Qwen2ForRewardModel"},
        id2label=None,
        label2id=None,
        pad_token_id=None,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        hidden = [model.model(**tokenizer(text, truncation=True, return_tensors="pt")).last_hidden_state[0] for text in TEXTS]
        expected = [head(each[-1]).numpy() for each in hidden]
        of_tokens = [head(each).numpy() for each in hidden]
    models = ("Qwen/Qwen2.5-Math-RM-72B",)
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert list(engine.card.outputs) == ["scores", "token_scores"]
        parity(engine.classify(TEXTS).scores_NC, np.array(expected), *models, family="llama", tasks=["scores"])
        got = engine.run(Request(TEXTS, ("scores", "token_scores"))).outputs
        assert got.token_scores is not None
        rewards = [got.token_scores[i] for i in range(len(TEXTS))]
        parity(rewards, of_tokens, *models, family="llama", tasks=["token_scores"])
        assert np.array_equal(np.stack([each[-1] for each in rewards]), got.scores)
        for text, each in zip(TEXTS, rewards, strict=True):
            alone = engine.run(Request([text], ("token_scores",))).outputs.token_scores
            assert alone is not None
            assert np.array_equal(alone[0], each)


JINA_RERANKER: dict[str, Any] = {
    "_name_or_path": "jinaai/jina-reranker-v2-base-multilingual",
    "architectures": ["XLMRobertaForSequenceClassification"],
    "attention_probs_dropout_prob": 0.1,
    "auto_map": {
        "AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig",
        "AutoModel": "modeling_xlm_roberta.XLMRobertaModel",
        "AutoModelForSequenceClassification": "modeling_xlm_roberta.XLMRobertaForSequenceClassification",
    },
    "bos_token_id": 0,
    "classifier_dropout": None,
    "emb_pooler": None,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "num_labels": 1,
    "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02,
    "label2id": {"LABEL_0": 0},
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 66,
    "output_past": True,
    "pad_token_id": 1,
    "position_embedding_type": "absolute",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "type_vocab_size": 1,
    "use_cache": False,
    "use_flash_attn": True,
}
"""config.json of jinaai/jina-reranker-v2-base-multilingual, except for sizes."""
JINA_RESAVED: dict[str, Any] = {
    "load_trained_adapters": False,
    "lora_adaptations": None,
    "lora_alpha": 1,
    "lora_dropout_p": 0.0,
    "lora_main_params_trainable": False,
    "lora_rank": 4,
    "matryoshka_dimensions": None,
    "truncate_dim": None,
}
"""Keys that its code adds when a model made from it is saved."""


@pytest.mark.parametrize("resaved", [{}, JINA_RESAVED], ids=["published", "saved again"])
def test_jinas_reranker_has_the_names_of_its_own_code(resaved: dict[str, Any], tmp_path: Path, parity: Parity) -> None:
    """The model is jina-reranker-v2-base-multilingual: XLM-RoBERTa with learned positions, in the code of jina-embeddings-v3."""
    model = write_classifier(tmp_path, "xlm-roberta", num_labels=1, layer_norm_eps=1e-5)
    weights = {name: value for name, value in load_file(tmp_path / "model.safetensors").items() if "position_ids" not in name}
    expected = sigmoid(logits_of(tmp_path, model, PAIRS)[:, 0])
    stated = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", JINA_RERANKER | {key: stated[key] for key in (*SIZES, "vocab_size")} | resaved)
    save_file(flash_names(weights), tmp_path / "model.safetensors")
    with Engine(str(tmp_path), dtype="float32") as engine:
        parity(
            engine.score(*SPLIT_PAIRS),
            expected,
            *(() if resaved else ("jinaai/jina-reranker-v2-base-multilingual",)),
            family="jina_reranker",
            tasks=["scores"],
        )


def flash_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        new = name.replace("embeddings.LayerNorm", "emb_ln").replace("encoder.layer.", "encoder.layers.")
        new = new.replace("attention.output.dense", "mixer.out_proj").replace("attention.output.LayerNorm", "norm1")
        new = (
            new.replace("intermediate.dense", "mlp.fc1").replace("output.dense", "mlp.fc2").replace("output.LayerNorm", "norm2")
        )
        if ".query." in name:
            parts = [weights[name.replace("query", part)] for part in ("query", "key", "value")]
            renamed[new.replace("attention.self.query", "mixer.Wqkv")] = torch.cat(parts)
        elif ".key." not in name and ".value." not in name:
            renamed[new] = value
    return renamed


def test_alibabas_own_code_has_the_head_of_bert(tmp_path: Path, parity: Parity) -> None:
    """The model is gte-multilingual-reranker-base."""
    model = write_classifier(tmp_path, "gte", num_labels=1)
    expected = sigmoid(logits_of(tmp_path, model, PAIRS)[:, 0])
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name.replace("gte.", "new.", 1): value for name, value in weights.items()}, tmp_path / "model.safetensors")
    edit_json(
        tmp_path / "config.json",
        architectures=["NewForSequenceClassification"],
        auto_map={"AutoModelForSequenceClassification": "Alibaba-NLP/new-impl--modeling.NewForSequenceClassification"},
        model_type="new",
        position_embedding_type="rope",
        rope_theta=160000.0,
        rope_parameters=None,
        pack_qkv=True,
    )
    with Engine(str(tmp_path), dtype="float32") as engine:
        parity(
            engine.score(*SPLIT_PAIRS), expected, "Alibaba-NLP/gte-multilingual-reranker-base", family="gte", tasks=["scores"]
        )


@pytest.fixture(scope="module")
def nli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nli")
    write_classifier(folder, "bert", id2label={0: "contradiction", 1: "entailment", 2: "neutral"})
    return folder


def test_what_is_alone_has_the_same_bits_in_any_company(nli: Path) -> None:
    with Engine(str(nli), dtype="float32") as engine:
        requests = [Request(PAIRS), Request(TEXTS), Request(PAIRS[:5], activate=False), Request(TEXTS[::-1], activate=False)]
        together = [future.result() for future in [engine.submit(request) for request in requests]]
        for request, result in zip(requests, together, strict=True):
            scores = result.outputs.scores
            assert scores is not None
            for i, text in enumerate(request.texts):
                alone = engine.run(Request([text], activate=request.activate)).outputs.scores  # pyright: ignore[reportArgumentType]
                assert alone is not None
                assert alone.tobytes() == scores[i].tobytes()


def test_one_query_goes_with_every_document(nli: Path) -> None:
    with Engine(str(nli), dtype="float32") as engine:
        scores = engine.score("a wader", DOCUMENTS)
        assert scores.shape == (4, 3)
        assert np.array_equal(scores, engine.score(["a wader"] * 4, DOCUMENTS))
        assert np.array_equal(scores[:1], engine.score("a wader", DOCUMENTS[0]))
        assert np.array_equal(scores, engine.classify([("a wader", document) for document in DOCUMENTS]).scores_NC)
        assert engine.score("a wader", []).shape == (0, 3)
        with pytest.raises(InvalidRequest, match="2 queries and 4 documents"):
            engine.score(["a", "b"], DOCUMENTS)
        with pytest.raises(InvalidRequest, match="contradiction, entailment, neutral"):
            engine.rerank("a wader", DOCUMENTS)
        with pytest.raises(InvalidRequest, match="gives no 'token_scores'; it gives: scores"):
            engine.token_classify("a wader")
        with pytest.raises(InvalidRequest, match="gives no 'dense'"):
            engine.embed("a wader")
        with pytest.raises(TooLong, match=r"documents\[1\]"):
            engine.score("a wader", DOCUMENTS, truncate="never")
        with pytest.raises(InvalidRequest, match=r"documents\[2\].*NoneType"):
            engine.score("a wader", ["a", "b", None])  # pyright: ignore[reportArgumentType]
        with pytest.raises(InvalidRequest, match="documents"):
            engine.score("a wader", 5)  # pyright: ignore[reportArgumentType]


def test_ranking_leaves_equals_in_their_order(tmp_path: Path) -> None:
    write_classifier(tmp_path, "bert", num_labels=1)
    with Engine(str(tmp_path), dtype="float32") as engine:
        ranked = engine.rerank("a wader", ["bill", "a bird", "bill", "bill"])
        assert [each.index for each in ranked if each.index != 1] == [0, 2, 3]
        assert engine.rerank("a wader", ["bill", "a bird", "bill", "bill"], top_n=2) == ranked[:2]
        assert isinstance(ranked[0], Ranked)
        assert engine.rerank("a wader", []) == []
        for wrong in (0, -1, True, "2"):
            with pytest.raises(InvalidRequest, match="top_n"):
                engine.rerank("a wader", ["bill"], top_n=wrong)  # pyright: ignore[reportArgumentType]
        with pytest.raises(InvalidRequest, match="query"):
            engine.rerank(["a wader"], ["bill"])  # pyright: ignore[reportArgumentType]


def test_the_same_verbs_for_asyncio(nli: Path) -> None:
    async def ask() -> None:
        async with AsyncEngine(str(nli), dtype="float32") as engine:
            scores = await engine.score("a wader", DOCUMENTS)
            classes = await engine.classify([("a wader", document) for document in DOCUMENTS])
            assert np.array_equal(scores, classes.scores_NC)
            with pytest.raises(InvalidRequest, match="several classes"):
                await engine.rerank("a wader", DOCUMENTS)
            with pytest.raises(InvalidRequest, match="token_scores"):
                await engine.token_classify(TEXTS)

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("changes", "file", "key"),
    [
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, "config.json", "activation_fn"),
        ({"sentence_transformers": {"activation_fn": "os.system"}}, "config.json", "activation_fn"),
        ({"sentence_transformers": {"activation": "x"}}, "config.json", "activation"),
        ({"sbert_ce_default_activation_function": "my.code.Act"}, "config.json", "sbert_ce_default_activation_function"),
        ({"problem_type": "ranking"}, "config.json", "problem_type"),
        ({"id2label": {"0": "a", "2": "b"}}, "config.json", "id2label"),
        ({"id2label": {"0": "a", "1": 5}}, "config.json", "id2label"),
        ({"id2label": {"x": "a", "1": "b"}}, "config.json", "id2label"),
        ({"num_labels": 5}, "config.json", "num_labels"),
        ({"architectures": ["DebertaForSequenceClassification"]}, "config.json", "architectures"),
        ({"architectures": ["Gemma3ForSequenceClassification"]}, "config.json", "architectures"),
    ],
)
def test_what_is_not_known_is_refused(changes: dict[str, Any], file: str, key: str, nli: Path, tmp_path: Path) -> None:
    config = json.loads((nli / "config.json").read_text()) | changes
    write_json(tmp_path / "config.json", config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((nli / name).read_bytes())
    with pytest.raises(CheckpointError) as caught:
        read_card(tmp_path, "m")
    assert (caught.value.file or "").startswith(file)
    assert caught.value.key == key


def test_a_head_of_another_size_is_refused(nli: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((nli / name).read_bytes())
    edit_json(tmp_path / "config.json", id2label={"0": "a", "1": "b"})
    with pytest.raises(CheckpointError, match=r"classifier\.weight"):
        Engine(str(tmp_path))


@pytest.mark.parametrize(
    ("case", "architecture", "prefix", "before", "last"),
    [
        ("nomic", "NomicBert", "bert.", "bert.pooler.dense", "classifier"),
        ("jina v2", "JinaBert", "bert.", "bert.pooler.dense", "classifier"),
        ("jina v3 without adapters", "XLMRoberta", "roberta.", "classifier.dense", "classifier.out_proj"),
        ("gte multilingual", "New", "new.", "new.pooler.dense", "classifier"),
    ],
)
def test_heads_of_models_with_code_of_their_own(
    case: str, architecture: str, prefix: str, before: str, last: str, tmp_path: Path, parity: Parity
) -> None:
    config, weights = write_published(tmp_path, case)
    edit_json(tmp_path / "config.json", architectures=[f"{architecture}ForSequenceClassification"], num_labels=3)
    head = draw_weights(tensors(before, 48, 48) | tensors(last, 3, 48))
    save_file({prefix + name: value for name, value in weights.items()} | head, tmp_path / "model.safetensors")
    expected: list[np.ndarray] = []
    for hidden in published_states(case, config, weights):
        inner = torch.tanh(head[f"{before}.weight"] @ torch.from_numpy(hidden[0]) + head[f"{before}.bias"])
        expected.append((head[f"{last}.weight"] @ inner + head[f"{last}.bias"]).softmax(0).numpy())
    with Engine(str(tmp_path), dtype="float32") as engine:
        parity(engine.run(Request(random_ids())).outputs.scores, np.array(expected))
