"""jina-embeddings-v5 with an adapter per task, and EuroBERT, against transformers and the formula of the model's own code."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from asgi import call
from checkpoints.families import CASES, write_model
from checkpoints.files import edit_json, write_json
from checkpoints.jina_v5 import LENGTH, MODULES, PROMPTS, SIZES, TASKS, WIDTH, Size, base, encode, merged, tokenize, write
from checkpoints.sentence_layout import sentence_layout
from comparisons import assert_close
from hidden_states import hidden_states, random_ids, reference_states
from parity import Parity
from whimbrel import AsyncEngine, Engine
from whimbrel.checkpoint.locate import Checkpoint
from whimbrel.checkpoint.reader import read_card
from whimbrel.cli.console import describe
from whimbrel.errors import CheckpointError, InvalidRequest
from whimbrel.model.load import load_model
from whimbrel.server.app.app import create_app
from whimbrel.server.app.routing import ModelRegistry
from whimbrel.types.request import Request

TEXTS = ["The whimbrel is a wader with a long curved bill.", "ein großer Vogel! 雪飛", "", "far away " * 90]


@pytest.fixture(scope="module", params=SIZES)
def size(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def folder(size: Size, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(size) / f"jina-embeddings-v5-text-{size}"
    write(path, size)
    return path


@pytest.fixture
def nano(tmp_path: Path) -> Path:
    write(tmp_path / "m", "nano")
    return tmp_path / "m"


def test_dense_of_every_task_and_prompt(size: Size, folder: Path, parity: Parity) -> None:
    """Vectors equal those of the model's own encode, also of rows of all tasks in one batch, bit for bit."""
    name = f"jinaai/jina-embeddings-v5-text-{size}"
    with Engine(str(folder), dtype="float32") as engine:
        card = engine.card
        assert (card.encoder.adapters, card.default_adapter) == (tuple(TASKS), "retrieval")
        alone: dict[tuple[str, str], Any] = {}
        for task in TASKS:
            for prompt, words in PROMPTS.items():
                found = alone[task, prompt] = engine.embed(TEXTS, adapter=task, input_type=prompt, truncate=True)
                parity(found, encode(folder, size, task, words, TEXTS), name, family=card.encoder.family, tasks=["dense"])
                one = [engine.embed(text, adapter=task, input_type=prompt, truncate=True) for text in TEXTS]
                assert np.array_equal(found, np.stack(one))
        requests = [(key, Request(TEXTS, adapter=key[0], input_type=key[1], truncate="right")) for key in alone] * 3
        futures = [(key, engine.submit(request)) for key, request in requests]
        assert all(np.array_equal(future.result(30).outputs.dense, alone[key]) for key, future in futures)
        narrow = engine.embed(TEXTS, adapter="clustering", input_type="query", truncate=True, dimensions=20)
        parity(narrow, encode(folder, size, "clustering", PROMPTS["query"], TEXTS, 20))
        np.testing.assert_array_equal(engine.embed(TEXTS, truncate=True), alone["retrieval", "document"])
        literal = engine.embed(TEXTS[:2], adapter="clustering", prompt="")
        parity(literal, encode(folder, size, "clustering", "", TEXTS[:2]))
        with pytest.raises(InvalidRequest, match="no adapter 'separation'; this model's adapters: retrieval"):
            engine.embed(TEXTS, adapter="separation")
        with pytest.raises(InvalidRequest, match="no prompt 'clustering'; this model's prompts: document, query"):
            engine.embed(TEXTS, prompt="clustering")


def test_hidden_states_of_every_task(size: Size, folder: Path) -> None:
    """Guard: adapters matter, and each token's state is that of merged weights."""
    ids, numbers = random_ids(), [i % len(TASKS) for i in range(len(random_ids()))]
    found = hidden_states(folder, ids, pooling=None, adapters=numbers)
    assert_close(
        found, [reference_states(merged(size, TASKS[number]), [row])[0] for number, row in zip(numbers, ids, strict=True)]
    )
    states = [reference_states(each, ids[-1:])[0] for each in (base(size), *(merged(size, task) for task in TASKS))]
    assert all(np.abs(one - other).max() > 0.1 for i, one in enumerate(states) for other in states[:i])


@pytest.mark.filterwarnings("ignore")
def test_peft_as_the_models_own_code_uses_it(size: Size, folder: Path) -> None:
    """Vectors equal those of peft's mixed model with one active adapter."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    paths = {task: str(folder / "adapters" / task) for task in TASKS}
    model = peft.PeftMixedModel(
        copy.deepcopy(base(size)), peft.PeftConfig.from_pretrained(paths["retrieval"]), adapter_name="retrieval"
    )
    for task, path in paths.items():
        model.load_adapter(path, adapter_name=task)
    with Engine(str(folder), dtype="float32") as engine:
        for task in TASKS:
            model.set_adapter([task])
            model.eval()
            for text in TEXTS:
                ids = torch.from_numpy(tokenize(folder, size, PROMPTS["query"] + text))[None].long()
                with torch.no_grad():
                    last = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0, -1]
                found = engine.embed(text, adapter=task, input_type="query", truncate=True)
                np.testing.assert_allclose(found, (last / last.norm()).numpy(), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_gives_the_same(dtype: torch.dtype, size: Size, folder: Path) -> None:
    ids, numbers = random_ids(), [i % len(TASKS) for i in range(len(random_ids()))]
    found = hidden_states(folder, ids, dtype, "cuda", pooling=None, adapters=numbers)
    for row, number, states in zip(ids, numbers, found, strict=True):
        one, other = states.mean(0), reference_states(merged(size, TASKS[number]), [row])[0].mean(0)
        near = 0.9999 if dtype == torch.float32 else 0.99
        assert one @ other / (np.linalg.norm(one) * np.linalg.norm(other)) > near


def test_a_folder_without_modules_has_the_prompts_of_the_code(nano: Path) -> None:
    """Without files of Sentence Transformers, pooling, norm and prompts are those of the model's own code."""
    with Engine(str(nano), dtype="float32") as engine:
        expected = engine.embed(TEXTS[:2], input_type="query")
    for file in ("modules.json", "config_sentence_transformers.json"):
        (nano / file).unlink()
    card = read_card(nano, "m")
    assert (card.prompts, card.default_prompt_name, card.default_adapter) == (PROMPTS, "document", "retrieval")
    with Engine(str(nano), dtype="float32") as engine:
        np.testing.assert_array_equal(engine.embed(TEXTS[:2], input_type="query"), expected)
    with pytest.raises(CheckpointError, match="leave out --pooling"):
        read_card(nano, "m", pooling="mean")


def test_the_files_state_the_default_task_and_the_limit(nano: Path) -> None:
    """sentence_bert_config.json may name another default task and limit; the tokenizer's limit does not count."""
    edit_json(nano / "tokenizer_config.json", model_max_length=20)
    assert read_card(nano, "m").max_length == LENGTH
    write_json(nano / "sentence_bert_config.json", {"max_seq_length": 50, "model_args": {"default_task": "clustering"}})
    card = read_card(nano, "m")
    assert (card.default_adapter, card.max_length, card.matryoshka) == ("clustering", 50, True)
    assert describe(card, Checkpoint(nano, "m"))["tasks"] == f"{', '.join(TASKS)} (adapters); by default: clustering"
    with Engine(str(nano), dtype="float32") as engine:
        found = engine.embed(TEXTS[:2], truncate=True)
    np.testing.assert_allclose(found, encode(nano, "nano", "clustering", PROMPTS["document"], TEXTS[:2]), atol=1e-5)


WRONG: list[tuple[str, Any, str]] = [
    ("config.json", {"task_names": ["text-matching"]}, r"config\.json: task_names: must name retrieval"),
    ("config.json", {"task_names": [*TASKS, "retrieval"]}, r"task_names: 'retrieval' .*twice"),
    ("config.json", {"task_names": ["retrieval", "../x"]}, r"task_names"),
    ("config.json", {"task_names": [*TASKS, "code"]}, r"adapters/code/adapter_config\.json: not found"),
    ("config.json", {"rope_theta": None}, r"rope_theta: is missing"),
    ("config.json", {"sparkle": 1}, r"sparkle"),
    ("adapters/clustering/adapter_config.json", {"r": 4}, r"adapters/clustering/adapter_config\.json: r, lora_alpha: differs"),
    ("adapters/clustering/adapter_config.json", {"use_dora": True}, r"use_dora"),
    ("adapters/clustering/adapter_config.json", {"target_modules": ["q_proj"]}, r"target_modules: must be down_proj"),
    ("config_sentence_transformers.json", {"prompts": PROMPTS | {"clustering": "x"}}, r"prompts: 'clustering' is a task"),
    ("sentence_bert_config.json", {"model_args": {"default_task": "code"}}, r"default_task"),
]


@pytest.mark.parametrize(("file", "change", "says"), WRONG)
def test_files_that_do_not_fit_are_refused(file: str, change: dict[str, Any], says: str, nano: Path) -> None:
    edit_json(nano / file, **change)
    with pytest.raises(CheckpointError, match=says):
        read_card(nano, "m")


def test_other_modules_and_bases_are_refused(nano: Path, tmp_path: Path) -> None:
    """Modules after its own Transformer, and weights of the other base, are refused."""
    write(tmp_path / "small", "small", is_decoder=False)
    with pytest.raises(CheckpointError, match=r"_norm\.weight: this tensor is not known"):
        load_model(tmp_path / "small", read_card(tmp_path / "small", "m"), device=torch.device("cpu"), dtype=torch.float32)
    write_json(
        nano / "modules.json",
        [*MODULES, {"idx": 1, "name": "1", "path": "1_Normalize", "type": "sentence_transformers.models.Normalize"}],
    )
    with pytest.raises(CheckpointError, match=r"modules\.json: jina-embeddings-v5 has one module"):
        read_card(nano, "m")


def test_tensors_of_adapters_must_be_complete(nano: Path) -> None:
    file = nano / "adapters/clustering/adapter_model.safetensors"
    tensors, name = load_file(file), "base_model.model.layers.0.mlp.up_proj.lora_A.weight"
    for changed, says in [
        ({name: None}, "is missing"),
        ({name: torch.zeros(4, WIDTH)}, "has shape"),
        ({name.replace("up_proj", "router"): torch.zeros(8, WIDTH)}, "not known"),
        ({"base_model.model.embed_tokens.lora_embedding_A": torch.zeros(8, 900)}, "not known"),
    ]:
        save_file({key: tensor for key, tensor in (tensors | changed).items() if tensor is not None}, file)
        with pytest.raises(CheckpointError, match=rf"adapters/clustering/adapter_model\.safetensors: .*{says}"):
            load_model(nano, read_card(nano, "m"), device=torch.device("cpu"), dtype=torch.float32)


def test_routes_choose_the_task(nano: Path) -> None:
    """Jina's `task`, Cohere's `input_type` and the field `adapter` choose adapter and prompt; without them it is retrieval."""
    with Engine(str(nano), dtype="float32", served_name="v5") as engine:
        app = create_app(ModelRegistry(AsyncEngine(engine)))

        def post(path: str, **body: Any) -> Any:
            answer = asyncio.run(call(app, "POST", path, body=orjson.dumps(body), headers={"content_type": "application/json"}))
            return orjson.loads(answer.body)

        text = TEXTS[0]
        cases: list[tuple[dict[str, Any], str, str]] = [
            ({}, "retrieval", "document"),
            ({"task": "retrieval"}, "retrieval", "document"),
            ({"task": "retrieval.query"}, "retrieval", "query"),
            ({"task": "retrieval.passage"}, "retrieval", "document"),
            ({"task": "Text-Matching"}, "text-matching", "document"),
            ({"task": "classification", "input_type": "query"}, "classification", "query"),
            ({"task": "clustering"}, "clustering", "document"),
            ({"task": "clustering", "adapter": "clustering", "prompt_name": "query"}, "clustering", "query"),
            ({"adapter": "clustering"}, "clustering", "document"),
            ({"adapter": "text-matching", "input_type": "query"}, "text-matching", "query"),
        ]  # fmt: skip
        expected = {(task, prompt): engine.embed(text, adapter=task, input_type=prompt) for task in TASKS for prompt in PROMPTS}
        for body, task, prompt in cases:
            found = post("/v1/embeddings", model="v5", input=[text], **body)
            np.testing.assert_array_equal(np.array(found["data"][0]["embedding"], np.float32), expected[task, prompt])
        for word, task, prompt in [("search_query", "retrieval", "query"), ("search_document", "retrieval", "document"),
                                   ("clustering", "clustering", "document"), ("text-matching", "text-matching", "document")]:  # fmt: skip
            found = post("/v2/embed", model="v5", texts=[text], input_type=word, embedding_types=["float"])
            np.testing.assert_array_equal(np.array(found["embeddings"]["float"][0], np.float32), expected[task, prompt])
        for task in ("separation", "code.query", "nonsense"):
            error = post("/v1/embeddings", model="v5", input=[text], task=task)["detail"]
            assert "it takes: query, document, retrieval.query, retrieval.passage, retrieval, text-matching" in error
        assert (
            "give one of them"
            in post("/v1/embeddings", model="v5", input=["a"], task="clustering", adapter="retrieval")["detail"]
        )


@pytest.mark.parametrize("case", ["qwen3", "eurobert"])
def test_repositories_of_one_merged_task(case: str, parity: Parity, tmp_path: Path) -> None:
    """Qwen3 and EuroBERT with `task_names` and modules of Sentence Transformers' own. No model is named: no copy was seen."""
    model = write_model(tmp_path, *CASES[case])
    edit_json(tmp_path / "config.json", task_names=TASKS)
    sentence_layout(tmp_path, modes=("lasttoken",), heads=("Normalize",), prompts=PROMPTS, max_seq_length=120)
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert not engine.card.encoder.adapters
        got = engine.run(Request(random_ids())).dense
    last = np.stack([one[-1] for one in reference_states(model, random_ids())])
    parity(got, last / np.linalg.norm(last, axis=1, keepdims=True))


def test_a_config_as_the_hubs_euroberts_have_it(parity: Parity, tmp_path: Path) -> None:
    """Old configs precede rope_parameters, and have keys without effect."""
    model = write_model(tmp_path, CASES["eurobert"][0], CASES["eurobert"][1] | {"rope_theta": 250000.0}, form="ForMaskedLM")
    edit_json(
        tmp_path / "config.json", rope_parameters=None, rope_theta=250000, rope_scaling=None, clf_pooling="late",
        auto_map={"AutoModel": "modeling_eurobert.EuroBertModel"}, hidden_dropout=0.0, mask_token="<|mask|>", is_decoder=False,
        classifier_pooling=None,
    )  # fmt: skip
    sentence_layout(tmp_path, modes=("mean",), max_seq_length=120)
    with Engine(str(tmp_path), dtype="float32") as engine:
        got = engine.run(Request(random_ids())).dense
    expected = np.stack([one.mean(0) for one in reference_states(model, random_ids())])
    parity(got, expected / np.linalg.norm(expected, axis=1, keepdims=True))
