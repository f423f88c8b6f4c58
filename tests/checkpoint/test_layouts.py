"""Models as they lie on the hub: config, modules, prompts and tokenizer of each, end to end, against Sentence Transformers.

Models that came with code of their own are compared with the formulas of test_hub_models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_hub_models as hub
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from test_models import DECODER, DEEPSEEK, LLAMA3, ROBERTA, SIZES, T5, reference, rows, write
from test_tokenizer_classes import GTE_QWEN2
from transformers import AutoTokenizer

from checkpoints import edit_json, sentence_layout, write_json
from parity import Parity
from tokenizer_files import FAMILIES, e5_mistral, qwen
from whimbrel import Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError
from whimbrel.types.request import Request

JSON = dict[str, Any]

TEXTS = [
    "", "a", "The whimbrel flies.", "l'été 雪飛 Ünïcode", "far far away in a year " * 20, "query: birds", "a  b\n\nc <mask> [SEP]",
]  # fmt: skip
WEB = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
ARCTIC = "Represent this sentence for searching relevant passages: "
IDENTITY = "torch.nn.modules.linear.Identity"


@dataclass(frozen=True)
class Layout:
    """What one model has, and what of it shows in the files."""

    models: tuple[str, ...]
    family: str
    """Of model/families.py."""
    name: str
    """Of transformers' classes."""
    tokenizer: tuple[JSON, JSON]
    sizes: JSON
    pooling: str
    heads: tuple[Any, ...] = ("Normalize",)
    prompts: dict[str, str] = field(default_factory=dict)
    config: JSON = field(default_factory=dict)
    """What the hub's config.json says in other words than transformers writes today; None: it does not say it."""
    form: str = "Model"
    max_seq_length: int = 64
    flags: JSON = field(default_factory=dict)
    """Flags of the tokenizer that transformers 5 has to be told of, which transformers 4 read in the files."""


OLD = {"gradient_checkpointing": False, "position_embedding_type": "absolute", "use_cache": True, "torch_dtype": "float32"}
OLD_ROPE = {"rope_parameters": None, "layer_types": None, "torch_dtype": "bfloat16", "use_cache": False}
OLD_QWEN = OLD_ROPE | {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 28, "rope_scaling": None}
PLACES = {"max_position_embeddings": 66, "vocab_size": 900}
OLD_T5 = {"n_positions": 512, "output_past": True, "is_encoder_decoder": True, "dense_act_fn": None, "is_gated_act": None}
TURNS = {"max_position_embeddings": 300, "vocab_size": 900, "rms_norm_eps": 1e-6}

LAYOUTS = {
    "bge": Layout(
        ("BAAI/bge-base-en-v1.5",), "bert", "Bert", FAMILIES["bert"][1], SIZES | PLACES, "cls",
        config=OLD | {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
    ),
    "arctic xs": Layout(
        ("Snowflake/snowflake-arctic-embed-xs",), "bert", "Bert", FAMILIES["bert"][1], SIZES | PLACES, "cls",
        prompts={"query": ARCTIC}, config=OLD,
    ),
    "e5": Layout(
        ("intfloat/multilingual-e5-small",), "bert", "Bert", FAMILIES["xlm-roberta"][1], SIZES | PLACES, "mean",
        config=OLD | {"tokenizer_class": "XLMRobertaTokenizer"},
    ),
    "e5 large": Layout(
        ("intfloat/multilingual-e5-base", "intfloat/multilingual-e5-large"), "roberta", "XLMRoberta", FAMILIES["xlm-roberta"][1],
        ROBERTA | PLACES | {"type_vocab_size": 1, "layer_norm_eps": 1e-5}, "mean", config=OLD | {"output_past": True},
    ),
    "bge m3": Layout(
        ("BAAI/bge-m3",), "roberta", "XLMRoberta", FAMILIES["xlm-roberta"][1],
        ROBERTA | PLACES | {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "max_position_embeddings": 8194}, "cls",
        config=OLD | {"output_past": True}, max_seq_length=8192,
    ),
    "all roberta": Layout(
        ("sentence-transformers/all-roberta-large-v1",), "roberta", "Roberta", FAMILIES["roberta"][1],
        ROBERTA | PLACES | {"type_vocab_size": 1, "layer_norm_eps": 1e-5}, "mean", config=OLD, form="ForMaskedLM",
    ),
    "camembert": Layout(
        ("dangvantuan/sentence-camembert-base",), "roberta", "Camembert", FAMILIES["camembert"][1],
        ROBERTA | PLACES | {"type_vocab_size": 1, "layer_norm_eps": 1e-5}, "mean", heads=(), config=OLD,
    ),
    "distilbert": Layout(
        ("sentence-transformers/multi-qa-distilbert-cos-v1",), "distilbert", "DistilBert", FAMILIES["distilbert"][1],
        {"vocab_size": 900, "dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 96, "max_position_embeddings": 66}, "mean",
        config={"sinusoidal_pos_embds": False, "tie_weights_": True},
    ),
    "all mpnet": Layout(
        ("sentence-transformers/all-mpnet-base-v2",), "mpnet", "MPNet", FAMILIES["mpnet"][1], ROBERTA | PLACES, "mean",
        config={"relative_attention_num_buckets": 32}, form="ForMaskedLM",
    ),
    "gtr t5": Layout(
        tuple(f"sentence-transformers/{kind}-t5-{size}" for kind in ("gtr", "sentence") for size in ("base", "large", "xl", "xxl")),
        "t5", "T5", FAMILIES["mt5"][1], T5 | {"vocab_size": 900}, "mean",
        heads=(("Dense", 32, IDENTITY, {"bias": False}), "Normalize"), config=OLD_T5,
    ),
    "whole flan t5": Layout(
        (), "t5_gated", "T5", FAMILIES["t5"][1], T5 | {"vocab_size": 900, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 1},
        "mean", form="ForConditionalGeneration", config={"dense_act_fn": "gelu_new", "is_gated_act": True},
    ),
    "deberta": Layout(
        (), "deberta", "DebertaV2", FAMILIES["deberta-v2"][1],
        SIZES | {
            "vocab_size": 900, "relative_attention": True, "position_buckets": 12, "norm_rel_ebd": "layer_norm", "type_vocab_size": 0,
            "share_att_key": True, "pos_att_type": "p2c|c2p", "position_biased_input": False, "max_relative_positions": -1,
        }, "mean", form="ForMaskedLM",
    ),
    "gte modernbert": Layout(
        ("Alibaba-NLP/gte-modernbert-base",), "modernbert", "ModernBert", FAMILIES["modernbert"][1],
        SIZES | {"local_attention": 8, "vocab_size": 900}, "cls", heads=(),
        config={"rope_parameters": None, "layer_types": None, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
                "global_attn_every_n_layers": 3, "position_embedding_type": "absolute", "layer_norm_eps": 1e-5,
                "reference_compile": False, "repad_logits_with_grad": False, "sparse_prediction": False},
    ),
    "qwen3": Layout(
        ("Qwen/Qwen3-Embedding-0.6B",), "qwen3", "Qwen3", qwen(suffix=True), DECODER | TURNS | {"head_dim": 16, "rope_theta": 1e6},
        "lasttoken", prompts={"query": WEB.rstrip(" "), "document": ""}, config=OLD_QWEN | {"rope_theta": 1000000},
        form="ForCausalLM", max_seq_length=200,
    ),
    "e5 mistral": Layout(
        ("intfloat/e5-mistral-7b-instruct",), "llama", "Mistral", e5_mistral(), DECODER | TURNS | {"sliding_window": 4096},
        "lasttoken", prompts={"web_search_query": WEB}, config=OLD_ROPE | {"rope_theta": 10000.0, "transformers_version": "4.34.0"},
        max_seq_length=100, flags={"add_bos_token": True, "add_eos_token": True},
    ),
    "bge gemma2": Layout(
        ("BAAI/bge-multilingual-gemma2",), "gemma2", "Gemma2", FAMILIES["gemma2"][1],
        DECODER | TURNS | {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24}, "lasttoken",
        prompts={"web_search_query": WEB}, config=OLD_ROPE | {"rope_theta": 10000.0, "hidden_act": "gelu_pytorch_tanh", "cache_implementation": None},
        max_seq_length=100,
    ),
    "embedding gemma": Layout(
        ("google/embeddinggemma-300m",), "gemma3", "Gemma3Text", FAMILIES["gemma3_text"][1],
        DECODER | TURNS | {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 7, "use_bidirectional_attention": True}, "mean",
        heads=(("Dense", 96, IDENTITY, {"bias": False}), ("Dense", 48, IDENTITY, {"bias": False}), "Normalize"),
        prompts={"query": "task: search result | query: ", "document": "title: none | text: "}, max_seq_length=100,
    ),
}  # fmt: skip


def write_layout(folder: Path, layout: Layout) -> None:
    write(folder, layout.name, layout.sizes, form=layout.form)
    write_json(folder / "tokenizer.json", layout.tokenizer[0])
    write_json(folder / "tokenizer_config.json", layout.tokenizer[1])
    edit_json(folder / "config.json", **layout.config)
    sentence_layout(
        folder, modes=(layout.pooling,), heads=layout.heads, prompts=layout.prompts or None,
        max_seq_length=layout.max_seq_length,
    )  # fmt: skip


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
"""Case of test_hub_models, pooling, heads."""


def assert_dense(folder: Path, expected: np.ndarray, parity: Parity, *models: str) -> None:
    """Of token ids; all seqs at once, and alone, bit for bit."""
    with Engine(str(folder), dtype="float32") as engine:
        together = engine.run(Request(rows())).dense
        alone = [engine.run(Request([row])).dense[0] for row in rows()]
        parity(together, expected, *models, family=engine.card.encoder.family, tasks=["dense"])
    assert np.array_equal(together, np.stack(alone))


@pytest.mark.parametrize("model", OWN_CODE)
def test_dense_of_models_with_own_code(model: str, parity: Parity, tmp_path: Path) -> None:
    case, pooling, heads = OWN_CODE[model]
    config, weights = hub.save(tmp_path, case)
    sentence_layout(tmp_path, modes=(pooling,), heads=heads, max_seq_length=120)
    expected = np.stack([one[0] if pooling == "cls" else one.mean(0) for one in hub.expect(case, config, weights)])
    if heads:
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert_dense(tmp_path, expected, parity, model)


def test_dense_of_llama_nemotron(parity: Parity, tmp_path: Path) -> None:
    """Its config.json says how it is pooled; there are no modules."""
    model = write(tmp_path, "Llama", DECODER | {"is_causal": False, "rope_scaling": LLAMA3})
    hub.write_llama_bidirec(tmp_path)
    expected = np.stack([one.mean(0) for one in reference(model, rows())])
    assert_dense(tmp_path, expected, parity, "nvidia/llama-nemotron-embed-1b-v2")


VOYAGE = {
    "architectures": ["Qwen3ForCausalLM"],
    "auto_map": {"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"},
    "is_causal": None,
    "num_labels": 80,
    "use_bidirectional_attention": True,
}
"""Keys of config.json in voyageai/voyage-4-nano, but for the width."""


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "VoyageQwen3BidirectionalEmbedModel"])
def test_dense_of_voyage(architecture: str, parity: Parity, tmp_path: Path) -> None:
    """Its own code has a linear layer, which no module names."""
    write_layout(tmp_path, LAYOUTS["qwen3"])
    model = write(tmp_path, "Qwen3", LAYOUTS["qwen3"].sizes | {"is_causal": False}, form="ForCausalLM")
    prompts = {"query": "Represent the query for retrieving supporting documents: "}
    prompts["document"] = "Represent the document for retrieval: "
    sentence_layout(tmp_path, modes=("mean",), heads=("Normalize",), prompts=prompts, max_seq_length=200)
    edit_json(tmp_path / "1_Pooling/config.json", word_embedding_dimension=80)
    edit_json(tmp_path / "config.json", **OLD_QWEN, rope_theta=1000000, **VOYAGE | {"architectures": [architecture]})
    weights = load_file(tmp_path / "model.safetensors")
    linear = torch.randn(80, 48, generator=torch.Generator().manual_seed(1))
    del weights["lm_head.weight"]
    save_file(weights | {"linear.weight": linear}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = np.stack([(one @ linear.numpy().T).mean(0) for one in reference(model, rows())])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert_dense(tmp_path, expected, parity, *(["voyageai/voyage-4-nano"] if architecture == "Qwen3ForCausalLM" else []))
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert engine.run(Request(rows(), ("token_dense",))).outputs.token_dense[0].shape == (1, 80)
        assert engine.run(Request(rows(), ("hidden",))).outputs.hidden[0].shape == (1, 48)


@pytest.mark.parametrize(
    ("change", "says"),
    [({"use_bidirectional_attention": None}, "use_bidirectional_attention: is missing"), ({"num_labels": None}, "num_labels"),
     ({"use_bidirectional_attention": False}, "use_bidirectional_attention"), ({"use_sliding_window": True}, "use_sliding_window"),
     ({"auto_map": None}, "num_labels|use_bidirectional_attention"), ({"is_causal": True}, "is_causal")],
)  # fmt: skip
def test_what_voyage_cannot_be(change: JSON, says: str, tmp_path: Path) -> None:
    write(tmp_path, "Qwen3", LAYOUTS["qwen3"].sizes, form="ForCausalLM")
    edit_json(tmp_path / "config.json", **VOYAGE | change)
    with pytest.raises(CheckpointError, match=rf"config\.json: {says}"):
        read_card(tmp_path, "m", pooling="mean")


@pytest.mark.parametrize("causal", [False, True])
def test_giga_embeddings_see_both_ways(causal: bool, parity: Parity, tmp_path: Path) -> None:
    """No model is named: not all keys of its config.json are known."""
    model = write(tmp_path, "Qwen3", LAYOUTS["qwen3"].sizes | {"is_causal": False})
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
        got = engine.run(Request(rows())).dense
    expected = np.stack([one.mean(0) for one in reference(model, rows())])
    parity(got, expected / np.linalg.norm(expected, axis=1, keepdims=True))


def test_dense_of_deepseek_both_ways(parity: Parity, tmp_path: Path) -> None:
    """No model is named: not all keys of the config.json of Giga-Embeddings-instruct-10B-A1.8B are known."""
    model = write(tmp_path, "DeepseekV3", DEEPSEEK | {"q_lora_rank": 20})
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
    expected = np.stack([one.mean(0) for one in reference(model, rows())])
    assert_dense(tmp_path, expected / np.linalg.norm(expected, axis=1, keepdims=True), parity)


def test_dense_of_gte_qwen2(parity: Parity, tmp_path: Path) -> None:
    """Its code sees both ways and ends a text. No model is named: whether its config.json says is_causal is not known."""
    model = write(tmp_path, "Qwen2", DECODER | TURNS | {"is_causal": False})
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
            expected = np.stack([one[-1] / np.linalg.norm(one[-1]) for one in reference(model, rows)])
            parity(got, expected)
            assert np.array_equal(got, np.stack([engine.embed(each, prompt=prompt) for each in TEXTS]))
