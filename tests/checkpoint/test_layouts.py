"""Models as they lie on the hub: config, modules, prompts and tokenizer of each, end to end, against Sentence Transformers.

Models that came with code of their own are compared with the formulas in checkpoints/published.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from checkpoints.families import DECODER, DEEPSEEK, LLAMA3, write_model
from checkpoints.files import edit_json, write_json
from checkpoints.layouts import JSON, LAYOUTS, OLD_QWEN, TEXTS, TURNS, WEB, write_layout
from checkpoints.published.cases import published_states, write_llama_bidirec, write_published
from checkpoints.sentence_layout import sentence_layout
from checkpoints.tokenizer_files import GTE_QWEN2, qwen
from hidden_states import random_ids, reference_states
from parity import Parity
from whimbrel import Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError
from whimbrel.types.request import Request


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense(layout: str, parity: Parity, tmp_path: Path) -> None:
    """All texts at once, with each prompt; alone, bit for bit."""
    model = LAYOUTS[layout]
    write_layout(tmp_path, model)
    reference = SentenceTransformer(str(tmp_path), device="cpu", processor_kwargs=model.flags)
    with Engine(str(tmp_path), dtype="float32") as engine:
        for prompt in (None, *model.prompts):
            together = engine.embed(TEXTS, prompt=prompt)
            expected = reference.encode(TEXTS, prompt_name=prompt)
            parity(together, expected, *model.models, family=model.family, tasks=["dense"])
            assert np.array_equal(together, np.stack([engine.embed(text, prompt=prompt) for text in TEXTS]))


OWN_CODE = {
    "nomic-ai/nomic-embed-text-v1": ("nomic", "mean", ()),
    "Snowflake/snowflake-arctic-embed-m-long": ("nomic", "cls", ("Normalize",)),
    "Alibaba-NLP/gte-base-en-v1.5": ("gte en", "cls", ()),
    "Alibaba-NLP/gte-multilingual-base": ("gte multilingual", "cls", ("Normalize",)),
    "Snowflake/snowflake-arctic-embed-m-v2.0": ("arctic", "cls", ("Normalize",)),
    "jinaai/jina-embeddings-v2-base-en": ("jina v2", "mean", ()),
    "LiquidAI/LFM2.5-Embedding-350M": ("lfm2.5", "cls", ("Normalize",)),
    "jinaai/jina-embeddings-v2-base-code": ("jina v2 for code", "mean", ()),
}
"""Case of checkpoints/published/cases.py, pooling, heads."""


def assert_dense(folder: Path, expected: np.ndarray, parity: Parity, *models: str) -> None:
    """Compare the vectors of token ids; a seq alone has the bits that it has among others."""
    with Engine(str(folder), dtype="float32") as engine:
        together = engine.run(Request(random_ids())).dense
        alone = [engine.run(Request([row])).dense[0] for row in random_ids()]
        parity(together, expected, *models, family=engine.card.encoder.family, tasks=["dense"])
    assert np.array_equal(together, np.stack(alone))


@pytest.mark.parametrize("model", OWN_CODE)
def test_dense_of_models_with_own_code(model: str, parity: Parity, tmp_path: Path) -> None:
    case, pooling, heads = OWN_CODE[model]
    config, weights = write_published(tmp_path, case)
    sentence_layout(tmp_path, modes=(pooling,), heads=heads, max_seq_length=120)
    expected = np.stack([one[0] if pooling == "cls" else one.mean(0) for one in published_states(case, config, weights)])
    if heads:
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert_dense(tmp_path, expected, parity, model)


def test_dense_of_llama_nemotron(parity: Parity, tmp_path: Path) -> None:
    """Its config.json says how it is pooled; there are no modules."""
    model = write_model(tmp_path, "Llama", DECODER | {"is_causal": False, "rope_scaling": LLAMA3})
    write_llama_bidirec(tmp_path)
    expected = np.stack([one.mean(0) for one in reference_states(model, random_ids())])
    assert_dense(tmp_path, expected, parity, "nvidia/llama-nemotron-embed-1b-v2")


VOYAGE = {
    "architectures": ["Qwen3ForCausalLM"],
    "auto_map": {"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"},
    "is_causal": None,
    "num_labels": 80,
    "use_bidirectional_attention": True,
}
"""Keys of config.json in voyageai/voyage-4-nano, except for the width."""


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "VoyageQwen3BidirectionalEmbedModel"])
def test_dense_of_voyage(architecture: str, parity: Parity, tmp_path: Path) -> None:
    """Its own code has a linear layer, which no module names."""
    write_layout(tmp_path, LAYOUTS["qwen3"])
    model = write_model(tmp_path, "Qwen3", LAYOUTS["qwen3"].sizes | {"is_causal": False}, form="ForCausalLM")
    prompts = {"query": "Represent the query for retrieving supporting documents: "}
    prompts["document"] = "Represent the document for retrieval: "
    sentence_layout(tmp_path, modes=("mean",), heads=("Normalize",), prompts=prompts, max_seq_length=200)
    edit_json(tmp_path / "1_Pooling/config.json", word_embedding_dimension=80)
    edit_json(tmp_path / "config.json", **OLD_QWEN, rope_theta=1000000, **VOYAGE | {"architectures": [architecture]})
    weights = load_file(tmp_path / "model.safetensors")
    linear = torch.randn(80, 48, generator=torch.Generator().manual_seed(1))
    del weights["lm_head.weight"]
    save_file(weights | {"linear.weight": linear}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = np.stack([(one @ linear.numpy().T).mean(0) for one in reference_states(model, random_ids())])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert_dense(tmp_path, expected, parity, *(["voyageai/voyage-4-nano"] if architecture == "Qwen3ForCausalLM" else []))
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert engine.run(Request(random_ids(), ("token_dense",))).outputs.token_dense[0].shape == (1, 80)
        assert engine.run(Request(random_ids(), ("hidden",))).outputs.hidden[0].shape == (1, 48)


@pytest.mark.parametrize(
    ("change", "says"),
    [({"use_bidirectional_attention": None}, "use_bidirectional_attention: is missing"), ({"num_labels": None}, "num_labels"),
     ({"use_bidirectional_attention": False}, "use_bidirectional_attention"), ({"use_sliding_window": True}, "use_sliding_window"),
     ({"auto_map": None}, "num_labels|use_bidirectional_attention"), ({"is_causal": True}, "is_causal")],
)  # fmt: skip
def test_what_voyage_cannot_be(change: JSON, says: str, tmp_path: Path) -> None:
    write_model(tmp_path, "Qwen3", LAYOUTS["qwen3"].sizes, form="ForCausalLM")
    edit_json(tmp_path / "config.json", **VOYAGE | change)
    with pytest.raises(CheckpointError, match=rf"config\.json: {says}"):
        read_card(tmp_path, "m", pooling="mean")


@pytest.mark.parametrize("causal", [False, True])
def test_giga_embeddings_see_both_ways(causal: bool, parity: Parity, tmp_path: Path) -> None:
    """No model is named: not all keys of its config.json are known."""
    model = write_model(tmp_path, "Qwen3", LAYOUTS["qwen3"].sizes | {"is_causal": False})
    code = {"AutoModel": "modeling_gigarembed.Qwen3BidirectionalModel"}
    edit_json(
        tmp_path / "config.json", architectures=["Qwen3BidirectionalModel"], model_type="qwen3_bidirec", auto_map=code,
        is_causal=causal,
    )  # fmt: skip
    sentence_layout(tmp_path, modes=("mean",), max_seq_length=200)
    if causal:
        with pytest.raises(CheckpointError, match=r"config\.json: is_causal"):
            read_card(tmp_path, "m")
        return
    with Engine(str(tmp_path), dtype="float32") as engine:
        got = engine.run(Request(random_ids())).dense
    expected = np.stack([one.mean(0) for one in reference_states(model, random_ids())])
    parity(got, expected / np.linalg.norm(expected, axis=1, keepdims=True))


def test_dense_of_deepseek_both_ways(parity: Parity, tmp_path: Path) -> None:
    """No model is named: not all keys of the config.json of Giga-Embeddings-instruct-10B-A1.8B are known."""
    model = write_model(tmp_path, "DeepseekV3", DEEPSEEK | {"q_lora_rank": 20})
    code = {"AutoModel": "modeling_gigarembed.DeepseekV3BidirectionalModel"}
    changes: JSON = {"architectures": ["DeepseekV3BidirectionalModel"], "model_type": "deepseek_v3_bidirec", "auto_map": code}
    edit_json(tmp_path / "config.json", **changes)
    sentence_layout(tmp_path, modes=("mean",), max_seq_length=120)
    with pytest.raises(CheckpointError, match=r"config\.json: is_causal: is missing"):
        read_card(tmp_path, "m")
    edit_json(tmp_path / "config.json", is_causal=False)
    model.config.is_causal = False
    for layer in model.layers:
        layer.self_attn.is_causal = False
    expected = np.stack([one.mean(0) for one in reference_states(model, random_ids())])
    assert_dense(tmp_path, expected / np.linalg.norm(expected, axis=1, keepdims=True), parity)


def test_dense_of_gte_qwen2(parity: Parity, tmp_path: Path) -> None:
    """Its code sees both ways and ends a text. No model is named: whether its config.json says is_causal is not known."""
    model = write_model(tmp_path, "Qwen2", DECODER | TURNS | {"is_causal": False})
    sentence_layout(tmp_path, modes=("lasttoken",), prompts={"query": WEB}, max_seq_length=200)
    content, stated = qwen(suffix=False)
    write_json(tmp_path / "tokenizer.json", content)
    write_json(tmp_path / "tokenizer_config.json", stated)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_eos_token = True
    write_json(tmp_path / "tokenizer_config.json", stated | GTE_QWEN2)
    code = {
        kind: f"modeling_qwen.Qwen2{form}" for kind, form in (("AutoModel", "Model"), ("AutoModelForCausalLM", "ForCausalLM"))
    }
    edit_json(tmp_path / "config.json", **OLD_QWEN, rope_theta=10000.0, architectures=["Qwen2ForCausalLM"], auto_map=code)
    with Engine(str(tmp_path), dtype="float32") as engine:
        for prompt, text in ((None, ""), ("query", WEB)):
            got = engine.embed(TEXTS, prompt=prompt)
            rows = [np.array(tokenizer(text + each, truncation=True, max_length=200)["input_ids"], np.int32) for each in TEXTS]
            expected = np.stack([one[-1] / np.linalg.norm(one[-1]) for one in reference_states(model, rows)])
            parity(got, expected)
            assert np.array_equal(got, np.stack([engine.embed(each, prompt=prompt) for each in TEXTS]))
