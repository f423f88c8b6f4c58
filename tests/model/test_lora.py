"""LoRA adapters in PEFT's folders, added to models: parity with merged weights and with peft; requests and servers.

The reference is transformers' model with an adapter merged into its weights: weight + scale * B A.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from asgi import call
from checkpoints.classifiers import write_classifier
from checkpoints.encoders import write_bert
from checkpoints.families import CASES, write_model
from checkpoints.late_interaction import write_stanford
from checkpoints.lora import ALL, PREFIX, load_with_adapters, write_adapter
from checkpoints.published.cases import published_states, write_published
from checkpoints.sentence_layout import sentence_layout
from comparisons import assert_close
from hidden_states import hidden_states, random_ids, reference_states
from serving import Server
from whimbrel import AsyncEngine, Client, Engine
from whimbrel.cli.serve_options import names_of_adapters
from whimbrel.errors import CheckpointError, InvalidRequest, SetupError
from whimbrel.server.app.app import create_app
from whimbrel.server.app.routing import ModelRegistry
from whimbrel.types.request import Request

FAMILIES = [
    "bert", "roberta", "distilbert", "electra", "mpnet", "modernbert", "modernbert with biases", "qwen2", "qwen3", "mistral",
    "llama with yarn and biases", "gemma both ways", "gemma2", "gemma3", "nomic", "t5", "t5 gated", "gte", "gte without token types", "jina v3",
    "eurobert", "internlm3 with biases", "lfm2", "lfm2 with biases", "deepseek", "deepseek of narrow queries",
]  # fmt: skip
ATTENTION = r".*(query|value|q_proj|v_proj|q_lin|v_lin|Wqkv|attn\.[qv]|q_b_proj)"
TEXTS = ["The whimbrel is a wader with a long curved bill.", "ein großer Vogel!", "a"]


def tolerance(case: str) -> float:
    """Return the largest difference. GTE in transformers is itself 7e-5 away from float64 with adapters as large as these."""
    return 1e-4 if case.startswith("gte") else 3e-5


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.sample(4)
def test_hidden_states_of_every_family(case: str, tmp_path: Path) -> None:
    """A batch of several adapters and none equals merged weights, and has the same bits as each text alone."""
    model, ids = write_model(tmp_path / "m", *CASES[case]), random_ids()
    merged = [
        model,
        write_adapter(tmp_path / "a", model, rank=4, seed=1),
        write_adapter(tmp_path / "b", model, rank=11, seed=2, pattern=ATTENTION, use_rslora=True),
    ]
    added = (("a", str(tmp_path / "a")), ("b", str(tmp_path / "b")))
    for shift in range(3):
        numbers = [(i + shift) % 3 - 1 for i in range(len(ids))]
        together = hidden_states(tmp_path / "m", ids, adapters=numbers, added=added)
        assert_close(
            together,
            [reference_states(merged[number + 1], [row])[0] for number, row in zip(numbers, ids, strict=True)],
            tolerance(case),
        )
        for row, number, expected in zip(ids[:6], numbers, together, strict=False):
            assert np.array_equal(hidden_states(tmp_path / "m", [row], adapters=[number], added=added)[0], expected)
    assert np.abs(reference_states(merged[1], ids[-1:])[0] - reference_states(model, ids[-1:])[0]).max() > 0.05


def write_hub_adapter(
    folder: Path, weights: dict[str, torch.Tensor], pattern: str, *, seed: int = 1, rank: int = 4
) -> dict[str, torch.Tensor]:
    """Write a random adapter that names layers as the checkpoint does; the weights with the adapter merged."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 8}))
    generator, tensors, merged = torch.Generator().manual_seed(seed), dict[str, torch.Tensor](), dict(weights)
    for name, weight in weights.items():
        if not re.fullmatch(pattern, name) or weight.ndim != 2 or re.search("embed|tok_", name):
            continue
        a, b = (0.2 * torch.randn(shape, generator=generator) for shape in ((rank, weight.shape[1]), (weight.shape[0], rank)))
        module = f"{PREFIX}{name.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        merged[name] = weight + 8 / rank * b @ a
    assert tensors
    save_file(tensors, folder / "adapter_model.safetensors")
    return merged


HUB = [
    "nomic", "nomic ungated", "nomic with experts", "gte multilingual", "gte en", "jina v2", "jina v2 ungated", "jina v2 for code",
    "jina v3 without adapters", "jina colbert", "lfm2.5", "internlm2",
]  # fmt: skip
LINEAR = r"(?!.*(experts|router|conv\.conv|pooler|layer_norm|LayerNorm)).*\.weight"


@pytest.mark.parametrize("case", HUB)
@pytest.mark.sample(4)
def test_adapters_of_models_own_code(case: str, tmp_path: Path) -> None:
    """An adapter may name its layers as the checkpoint does. Rows of two adapters and none equal the formula of merged weights."""
    (tmp_path / "m").mkdir()
    config, weights = write_published(tmp_path / "m", case)
    every = [weights] + [
        write_hub_adapter(tmp_path / name, weights, pattern, seed=seed)
        for seed, (name, pattern) in enumerate(
            (("a", LINEAR), ("b", r"(?!.*experts).*(out_proj|Wqkv|wqkv|qkv_proj|query|wo|down_proj)\.weight"))
        )
    ]
    ids, added = random_ids(), (("a", str(tmp_path / "a")), ("b", str(tmp_path / "b")))
    numbers = [i % 3 - 1 for i in range(len(ids))]
    together = hidden_states(tmp_path / "m", ids, adapters=numbers, added=added)
    expected = [published_states(case, config, each) for each in every]
    assert_close(together, [expected[number + 1][i] for i, number in enumerate(numbers)], tolerance(case))
    for row, number, found in zip(ids[:6], numbers, together, strict=False):
        assert np.array_equal(hidden_states(tmp_path / "m", [row], adapters=[number], added=added)[0], found)
    assert np.abs(expected[1][-1] - expected[0][-1]).max() > 0.05


@pytest.mark.parametrize("case", ["nomic", "gte", "jina v3"])
def test_adapters_with_names_of_both_codes(case: str, tmp_path: Path) -> None:
    """One model takes adapters with the checkpoint's names and with those of transformers' class, in one batch."""
    model, ids = write_model(tmp_path / "m", *CASES[case]), random_ids()
    merged = write_hub_adapter(tmp_path / "b", load_file(tmp_path / "m/model.safetensors"), LINEAR, rank=7)
    write_model(tmp_path / "other", *CASES[case])
    save_file(merged, tmp_path / "other/model.safetensors", metadata={"format": "pt"})
    models = [model, write_adapter(tmp_path / "a", model), transformers.AutoModel.from_pretrained(tmp_path / "other").eval()]
    added, numbers = (("a", str(tmp_path / "a")), ("b", str(tmp_path / "b"))), [i % 3 - 1 for i in range(len(ids))]
    found = hidden_states(tmp_path / "m", ids, adapters=numbers, added=added)
    assert_close(
        found,
        [reference_states(models[number + 1], [row])[0] for number, row in zip(numbers, ids, strict=True)],
        tolerance(case),
    )


@pytest.mark.parametrize(
    "config",
    [
        {"rank_pattern": {"query": 2, r"layer\.1\.output\.dense": 7}, "alpha_pattern": {"query": 3.5}},
        {"rank_pattern": {"encoder.layer.0.attention.self.value": 9}, "layers_to_transform": [0, 1]},
        {"lora_alpha": 0.5, "target_modules": "all-linear"},
    ],
)
def test_ranks_and_scales_of_modules(config: dict[str, Any], tmp_path: Path) -> None:
    """Ranks and scales may differ by module, as patterns of its name say."""
    model, ids = write_model(tmp_path / "m", *CASES["bert"]), random_ids()
    merged = write_adapter(tmp_path / "a", model, **config)
    found = hidden_states(tmp_path / "m", ids, adapters=[0] * len(ids), added=(("a", str(tmp_path / "a")),))
    assert_close(found, reference_states(merged, ids))


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_adapters_of_larger_models(prefix: str, tmp_path: Path) -> None:
    """An adapter that was trained within a larger model names its layers by that model."""
    model, ids = write_model(tmp_path / "m", *CASES["bert"]), random_ids()
    merged = write_adapter(tmp_path / "a", model, prefix=prefix)
    found = hidden_states(tmp_path / "m", ids, adapters=[0] * len(ids), added=(("a", str(tmp_path / "a")),))
    assert_close(found, reference_states(merged, ids))


@pytest.mark.parametrize(("case", "name"), [("bert", "embeddings.word_embeddings"), ("qwen3", "embed_tokens")])
def test_tables_of_embeddings(case: str, name: str, tmp_path: Path) -> None:
    """An adapter may change the table of embeddings. The table that PEFT saves beside it must be the model's."""
    model, ids = write_model(tmp_path / "m", *CASES[case]), random_ids()
    merged = write_adapter(tmp_path / "a", model, pattern=ATTENTION)
    table, file = model.get_submodule(name).weight, tmp_path / "a" / "adapter_model.safetensors"
    generator = torch.Generator().manual_seed(3)
    a, b = (0.2 * torch.randn(shape, generator=generator) for shape in ((4, table.shape[0]), (table.shape[1], 4)))
    tensors = load_file(file) | {f"{PREFIX}{name}.lora_embedding_A": a, f"{PREFIX}{name}.lora_embedding_B": b}
    save_file(tensors | {f"{PREFIX}{name}.base_layer.weight": table.detach().clone()}, file)
    with torch.no_grad():
        merged.get_submodule(name).weight += 2.0 * (b @ a).T
    found = hidden_states(tmp_path / "m", ids, adapters=[0] * len(ids), added=(("a", str(tmp_path / "a")),))
    assert_close(found, reference_states(merged, ids), 3e-5)
    save_file(tensors | {f"{PREFIX}{name}.base_layer.weight": table.detach() + 1}, file)
    with pytest.raises(CheckpointError, match=r"is another table than the model's"):
        load_with_adapters(tmp_path / "m", a=str(tmp_path / "a"))


@pytest.mark.bfloat16
def test_half_precision_is_near(tmp_path: Path) -> None:
    """In bfloat16 vectors are near those of merged weights in float32."""
    model, ids = write_model(tmp_path / "m", *CASES["qwen3"]), random_ids()
    merged = write_adapter(tmp_path / "a", model)
    found = hidden_states(tmp_path / "m", ids, torch.bfloat16, adapters=[0] * len(ids), added=(("a", str(tmp_path / "a")),))
    for one, other in zip(found, reference_states(merged, ids), strict=True):
        x, y = one.mean(0), other.mean(0)
        assert x @ y / (np.linalg.norm(x) * np.linalg.norm(y)) > 0.99


EVERY = {"deepseek": ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}
"""Layers that peft adapts without the experts too, which are parameters in transformers and no layers."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", FAMILIES)
def test_peft_itself(case: str, tmp_path: Path) -> None:
    """An adapter that peft made and saved gives peft's own hidden states."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, ids = write_model(tmp_path / "m", *CASES[case]), random_ids()
    config = peft.LoraConfig(
        r=5, lora_alpha=7, target_modules=EVERY.get(case.partition(" ")[0], "all-linear"), init_lora_weights=False,
        rank_pattern={"down_proj": 3}, use_rslora=True,
    )  # fmt: skip
    torch.manual_seed(3)
    adapted = peft.get_peft_model(copy.deepcopy(model), config).eval()
    adapted.save_pretrained(tmp_path / "a")
    found = hidden_states(tmp_path / "m", ids, adapters=[0] * len(ids), added=(("a", str(tmp_path / "a")),))
    assert_close(found, reference_states(adapted.base_model.model, ids), tolerance(case))


# Requests


@pytest.fixture
def dense(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A model with two adapters."""
    write_bert(tmp_path / "m")
    sentence_layout(tmp_path / "m", prompts={"query": "query: ", "law": "law: "})
    model = transformers.AutoModel.from_pretrained(tmp_path / "m").eval()
    for seed, name in enumerate(("law", "bio")):
        write_adapter(tmp_path / name, model, seed=seed, pattern=ATTENTION if seed else ALL)
    return tmp_path / "m", {name: str(tmp_path / name) for name in ("law", "bio")}


def test_the_verbs_choose_an_adapter(dense: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """Each verb takes `adapter`. Vectors of the model itself stay, and a prompt named like an adapter chooses none."""
    folder, adapters = dense
    with Engine(str(folder), dtype="float32") as plain, Engine(str(folder), dtype="float32", adapters=adapters) as engine:
        vectors = {name: engine.embed(TEXTS, adapter=name) for name in (None, *adapters)}
        np.testing.assert_allclose(vectors[None], plain.embed(TEXTS), atol=1e-6)
        assert not any(np.allclose(vectors[name], vectors[None], atol=1e-2) for name in adapters)
        np.testing.assert_allclose(engine.embed(TEXTS, prompt="law"), plain.embed(TEXTS, prompt="law"), atol=1e-6)
        futures = [(name, engine.submit(Request(TEXTS, adapter=name))) for name in vectors for _ in range(3)]
        assert all(np.array_equal(future.result(30).outputs.dense, vectors[name]) for name, future in futures)
        scores = engine.score(TEXTS[0], TEXTS, adapter="law")
        query_D = engine.embed(TEXTS[0], adapter="law", input_type="query")
        documents_ND = engine.embed(TEXTS, adapter="law", input_type="document")
        np.testing.assert_allclose(scores, documents_ND @ query_D, atol=1e-5)
        with pytest.raises(InvalidRequest, match=r"adapter: no adapter 'x'; this model's adapters: law, bio"):
            engine.embed(TEXTS, adapter="x")
        with pytest.raises(InvalidRequest, match=r"adapter: no adapter 'law'; this model's adapters: none"):
            plain.embed(TEXTS, adapter="law")
        assert dict(engine.plan.adapters) == adapters


def test_rerankers_and_token_vectors_take_adapters(tmp_path: Path) -> None:
    """Pairs of a reranker and token vectors of a ColBERT are those of merged weights."""
    model = write_classifier(tmp_path / "r", "bert", num_labels=1)
    merged = write_adapter(tmp_path / "ra", model, pattern=r".*attention.*")
    merged.save_pretrained(tmp_path / "rm")
    for file in (tmp_path / "r").iterdir():
        if not (tmp_path / "rm" / file.name).exists():
            (tmp_path / "rm" / file.name).write_bytes(file.read_bytes())
    with (
        Engine(str(tmp_path / "r"), dtype="float32", adapters={"a": str(tmp_path / "ra")}) as engine,
        Engine(str(tmp_path / "rm"), dtype="float32") as other,
    ):
        np.testing.assert_allclose(engine.score(TEXTS[0], TEXTS, adapter="a"), other.score(TEXTS[0], TEXTS), atol=1e-5)
    torch.manual_seed(7)
    write_stanford(tmp_path / "c")
    write_adapter(tmp_path / "ca", transformers.AutoModel.from_pretrained(tmp_path / "c").eval())
    with Engine(
        str(tmp_path / "c"), dtype="float32", adapters={"a": str(tmp_path / "ca")}, document_cache_bytes=2**20
    ) as engine:
        plain, adapted = (engine.score(TEXTS[0], TEXTS, adapter=name) for name in (None, "a"))
        assert not np.allclose(plain, adapted, atol=1e-2)
        for _ in range(2):  # the second time from the cache
            np.testing.assert_array_equal(engine.score(TEXTS[0], TEXTS, adapter="a"), adapted)
            np.testing.assert_array_equal(engine.score(TEXTS[0], TEXTS), plain)


def test_routes_choose_an_adapter_by_the_name_of_the_model(dense: tuple[Path, dict[str, str]]) -> None:
    """Every dialect takes `model: "base:name"`, some also `adapter`; models with adapters are listed."""
    folder, adapters = dense
    with Engine(str(folder), dtype="float32", adapters=adapters, served_name="base", aliases=("other",)) as engine:
        app = create_app(ModelRegistry(AsyncEngine(engine)))

        def post(path: str, **body: Any) -> tuple[int, Any]:
            answer = asyncio.run(call(app, "POST", path, body=orjson.dumps(body), headers={"content_type": "application/json"}))
            return answer.status, orjson.loads(answer.body)

        expected = engine.embed(TEXTS[0], adapter="law")
        reads: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
            "/v1/embeddings": ({"input": TEXTS[0]}, lambda found: found["data"][0]["embedding"]),
            "/embed": ({"inputs": TEXTS[0]}, lambda found: found[0]),
            "/v1/embed": ({"input": TEXTS[0]}, lambda found: found["outputs"]["dense"][0]),
            "/pooling": ({"input": TEXTS[0]}, lambda found: found["data"][0]["data"]),
            "/v2/embed": ({"texts": [TEXTS[0]], "input_type": "clustering"}, lambda found: found["embeddings"]["float"][0]),
        }
        for path, (body, read) in reads.items():
            for name in ("base:law", "other:law"):
                status, found = post(path, **body, model=name)
                assert status == 200, found
                np.testing.assert_array_equal(np.array(read(found), np.float32), expected)
        for body in ({"adapter": "law"}, {"adapter": "law", "model": "base"}, {"adapter": "law", "model": "base:law"}):
            status, found = post("/v1/embed", input=TEXTS[0], **body)
            np.testing.assert_array_equal(np.array(found["outputs"]["dense"][0], np.float32), expected)
        status, found = post("/v1/embed", input="a", model="base:law", adapter="bio")
        assert (status, found["error"]["param"]) == (400, "adapter")
        status, found = post("/v1/embeddings", input="a", adapter="x")
        assert (status, "no adapter 'x'" in found["error"]["message"]) == (400, True)
        for name in ("base:x", "law", ":law", "base:", "x:law"):
            status, found = post("/v1/embeddings", input="a", model=name)
            assert (status, "serves base, other, base:law, base:bio, other:law, other:bio." in found["error"]["message"]) == (
                404,
                True,
            )
        found = orjson.loads(asyncio.run(call(app, "GET", "/v1/models")).body)
        assert [each["id"] for each in found["data"]] == ["base", "other", "base:law", "base:bio", "other:law", "other:bio"]
        status, found = post("/v1/rerank", query=TEXTS[0], documents=TEXTS, model="base:law")
        best = engine.rerank(TEXTS[0], TEXTS, adapter="law")
        assert [each["index"] for each in found["results"]] == [each.index for each in best]


def test_a_server_with_adapters(dense: tuple[Path, dict[str, str]]) -> None:
    """A server shows its adapters, and gives the engine's vectors through its processes; clients choose by name or option."""
    folder, adapters = dense
    options = [word for name, path in adapters.items() for word in ("--adapter", f"{name}={path}")]
    with (
        Engine(str(folder), dtype="float32", adapters=adapters) as engine,
        Server(str(folder), *options, "--served-name", "base", "--dtype", "float32") as server,
        Client(server.url) as client,
    ):
        assert "base:law, base:bio" in server.log
        assert "made for a model of another name: law of some/model, bio of some/model" in " ".join(server.log.split())
        expected = engine.embed(TEXTS, adapter="law")
        np.testing.assert_array_equal(client.embed(TEXTS, adapter="law"), expected)
        np.testing.assert_array_equal(client.for_model("base:law").embed(TEXTS), expected)
        np.testing.assert_array_equal(client.embed(TEXTS), engine.embed(TEXTS))


@pytest.mark.extended
def test_a_server_of_two_models_with_adapters(dense: tuple[Path, dict[str, str]]) -> None:
    """Each model has its own adapters."""
    folder, adapters = dense
    values = [f"one:law={adapters['law']}", f"two:law={adapters['bio']}"]
    options = [word for value in values for word in ("--adapter", value)]
    with (
        Engine(str(folder), dtype="float32", adapters=adapters) as engine,
        Server(
            str(folder), str(folder), *options, "--served-name", "one", "--served-name", "two", "--dtype", "float32"
        ) as server,
        Client(server.url) as client,
    ):
        for model, name in (("one:law", "law"), ("two:law", "bio")):
            np.testing.assert_array_equal(client.for_model(model).embed(TEXTS), engine.embed(TEXTS, adapter=name))


@pytest.mark.parametrize(
    ("values", "num_models", "words"),
    [
        (["law"], 1, "takes NAME=FOLDER"), (["=x"], 1, "takes NAME=FOLDER"), (["law="], 1, "takes NAME=FOLDER"),
        ([":law=a"], 2, "takes NAME=FOLDER"), (["m:=a"], 2, "takes NAME=FOLDER"),
        (["law=a", "law=b"], 1, "two adapters have the name 'law'"), (["law=a"], 2, "'law=a' is for one of several models"),
        (["x:law=a"], 2, "'x:law=a' is for no model"), (["x:law=a"], 1, "is for no model"), (["m:law=a"], 3, "is for several models"),
        (["o/m:law=a", "m:law=a"], 2, "two adapters have the name 'law'"),
    ],
)  # fmt: skip
def test_options_of_the_command_line(values: list[str], num_models: int, words: str) -> None:
    """A wrong --adapter is one line."""
    with pytest.raises(SetupError, match=words):
        names_of_adapters(values, [("o/m", "m"), ("o/n", "n"), ("o/m", "m")][:num_models])


def test_adapters_of_several_models() -> None:
    """The name of a model says which one gets an adapter; two models may have adapters of one name."""
    values = ["o/m:law=/a", "n:law=/b", "m:bio=/c=d"]
    assert names_of_adapters(values, [("o/m", "m"), ("o/n", "n")]) == [{"law": "/a", "bio": "/c=d"}, {"law": "/b"}]
    assert names_of_adapters(["law=/a"], [("o/m",)]) == [{"law": "/a"}]
