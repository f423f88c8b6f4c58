"""Small random late-interaction checkpoints, in the layouts of the real ones."""

from __future__ import annotations

import copy
import json
import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from checkpoints.families import write_model
from checkpoints.files import edit_json, write_json
from checkpoints.published.blocks import draw_weights
from checkpoints.published.jina import JINA_BERT, JINA_ROBERTA, jina_bert_names, jina_roberta_names
from checkpoints.published.lfm2 import LFM2, lfm2_names
from checkpoints.tokenizer_files import FAMILIES

Config = dict[str, Any]

MASK = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
POOLING = "sentence_transformers.multi_vector_encoder.modules.token_pooling.HierarchicalTokenPooling"
BASE = "sentence_transformers.base.modules."
OLD = "sentence_transformers.models."
PYLATE_DENSE = "pylate.models.Dense.Dense"
IDENTITY = "torch.nn.modules.linear.Identity"
SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
}

METADATA: Config = {
    "query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_token": "[Q]", "doc_token": "[D]", "ncells": None,
    "centroid_score_threshold": None, "ndocs": None, "load_index_with_mmap": False, "index_path": None, "nbits": 1,
    "kmeans_niters": 20, "resume": False, "similarity": "cosine", "bsize": 8, "accumsteps": 1, "lr": 1e-5, "maxsteps": 400000,
    "save_every": None, "warmup": 20000, "warmup_bert": None, "relu": False, "nway": 64, "use_ib_negatives": True,
    "reranker": False, "distillation_alpha": 1.0, "ignore_scores": False, "model_name": None, "query_maxlen": 12,
    "attend_to_mask_tokens": False, "interaction": "colbert", "dim": 16, "doc_maxlen": 30, "mask_punctuation": True,
    "checkpoint": "bert-base-uncased", "triples": "/t.json", "collection": "/c.tsv", "queries": "/q.tsv", "index_name": None,
    "overwrite": False, "root": "/experiments", "experiment": "msmarco", "index_root": None, "name": "run", "rank": 0,
    "nranks": 4, "amp": True, "gpus": 4, "avoid_fork_if_possible": False, "meta": {"hostname": "h", "version": "colbert-v0.4"},
}  # fmt: skip
"""artifact.metadata of colbert-ir/colbertv2.0, except for sizes."""


def write_transformer(folder: Path, name: str, family: str, words: list[str], added: list[Config], **config: Any) -> Any:
    """The transformer, and its family's tokenizer with plain words and added tokens more."""
    content, stated = copy.deepcopy(FAMILIES[family][1])
    vocab = content["model"]["vocab"]
    for word in words:
        vocab.append([word, 0.0]) if isinstance(vocab, list) else vocab.update({word: len(vocab)})
    ids = {token["id"] for token in content["added_tokens"]} | set(range(len(vocab)))
    for number, token in enumerate(added, start=max(ids) + 1):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False} | token
        content["added_tokens"].append({"id": number, **flags})
        stated["added_tokens_decoder"][str(number)] = flags
    sizes = SIZES | {"vocab_size": max(ids) + 1 + len(added), "pad_token_id": 0} | config
    model = write_model(folder, name, sizes)
    write_json(folder / "tokenizer.json", content)
    write_json(folder / "tokenizer_config.json", stated)
    return model


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def wrap(folder: Path, prefix: str, **linear: torch.Tensor) -> None:
    """Weights as a larger model has them: a prefix, and the head's weights beside."""
    weights = {prefix + name: tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights | {f"linear.{name}": tensor for name, tensor in linear.items()}, folder / "model.safetensors")


def write_stanford(folder: Path, **metadata: Any) -> None:
    """Write the layout of colbert-ir/colbertv2.0 and answerdotai/answerai-colbert-small-v1."""
    write_transformer(folder, "Bert", "bert", ["[unused0]", "[unused1]"], [])
    wrap(folder, "bert.", weight=draw(1, 16, 48))
    edit_json(folder / "config.json", architectures=["HF_ColBERT"])
    write_json(folder / "artifact.metadata", METADATA | metadata)


def write_mxbai_large(folder: Path) -> None:
    """Write the layout of mixedbread-ai/mxbai-colbert-large-v1, with stale files of the embedding model that it was made from."""
    write_stanford(folder, query_maxlen=20, doc_maxlen=40)
    rows = [("", OLD + "Transformer"), ("1_Pooling", OLD + "Pooling")]
    write_json(folder / "modules.json", [{"idx": i, "name": str(i), "path": p, "type": t} for i, (p, t) in enumerate(rows)])
    write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": 48, "pooling_mode_cls_token": True})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 512, "do_lower_case": False})
    write_json(folder / "config_sentence_transformers.json", {"__version__": {"sentence_transformers": "2.2.2"}})


PYLATE: Config = {
    "__version__": {"sentence_transformers": "4.0.2", "transformers": "4.48.2", "pytorch": "2.6.0"},
    "prompts": {},
    "default_prompt_name": None,
    "similarity_fn_name": "MaxSim",
    "query_prefix": "[Q] ",
    "document_prefix": "[D] ",
    "query_length": 14,
    "document_length": 30,
    "attend_to_expansion_tokens": False,
    "skiplist_words": list(string.punctuation),
    "do_query_expansion": False,
}
"""config_sentence_transformers.json of lightonai/GTE-ModernColBERT-v1, except for sizes."""
MARKERS: list[Config] = [{"content": "[Q] "}, {"content": "[D] "}]


def write_pylate(
    folder: Path,
    widths: tuple[int, ...] = (16,),
    *,
    name: str = "ModernBert",
    window: int = 4,
    residual: bool = False,
    **sentence: Any,
) -> None:
    """Write a model as PyLate saves it, with Dense layers of these widths."""
    family = {"ModernBert": "modernbert", "Bert": "bert", "Lfm2": "lfm2"}[name]
    windows: Config = {"local_attention": 2 * window, "global_attn_every_n_layers": 2} if name == "ModernBert" else {}
    if name == "Lfm2":
        windows = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_key_value_heads": 2}
    write_transformer(folder, name, family, [], MARKERS, **windows)
    edit_json(folder / "tokenizer_config.json", pad_token="<|im_end|>" if name == "Lfm2" else "[MASK]")
    modules: list[Config] = [{"idx": 0, "name": "0", "path": "", "type": OLD + "Transformer"}]
    width = 48
    for number, out in enumerate(widths, start=1):
        path = f"{number}_Dense"
        modules.append({"idx": number, "name": str(number), "path": path, "type": PYLATE_DENSE})
        config = {"in_features": width, "out_features": out, "bias": False, "activation_function": IDENTITY}
        write_json(folder / path / "config.json", config | ({"use_residual": True} if residual else {}))
        weights = {"linear.weight": draw(number, out, width)}
        if residual and out != width:
            weights["residual.weight"] = draw(10 + number, out, width)
        save_file(weights, folder / path / "model.safetensors")
        width = out
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 29, "do_lower_case": False})
    write_json(folder / "config_sentence_transformers.json", {"model_type": "ColBERT"} | PYLATE | sentence)


def write_lfm2(folder: Path) -> None:
    """Write the layout of LiquidAI/LFM2-ColBERT-350M. Queries are filled up with the end of a text."""
    write_pylate(folder, name="Lfm2", do_query_expansion=True)
    edit_json(folder / "config.json", block_dim=48, conv_dim=48, theta=None, tie_embedding=True, use_pos_enc=True)


def write_lfm2_both_ways(folder: Path) -> dict[str, torch.Tensor]:
    """Write the layout of LiquidAI/LFM2.5-ColBERT-350M. Return the weights."""
    write_pylate(folder, name="Lfm2", do_query_expansion=True)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = LFM2 | {"vocab_size": size, "disable_flash_attention": True}
    write_json(folder / "config.json", config)
    weights = draw_weights(lfm2_names(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights | load_file(folder / "1_Dense/model.safetensors")


def write_old_pylate(folder: Path) -> None:
    """Write the layout of PyLate's first versions: pickled weights, without the kind of model and the expansion."""
    write_pylate(folder, name="Bert", query_length=18)
    edit_json(folder / "config_sentence_transformers.json", model_type=None, do_query_expansion=None)
    dense = folder / "1_Dense"
    torch.save(load_file(dense / "model.safetensors"), dense / "pytorch_model.bin")
    (dense / "model.safetensors").unlink()


def write_mxbai_edge(folder: Path) -> None:
    """Write the layout of mixedbread-ai/mxbai-edge-colbert-v0-17m."""
    write_pylate(folder, (96, 96, 12), residual=True, query_length=20)
    edit_json(folder / "sentence_bert_config.json", do_lower_case=True)


def write_sentence_transformers(
    folder: Path, expansion: Config | None = None, mask: Config | None = None, *, markers: bool = True, **lengths: Any
) -> None:
    """Write a MultiVectorEncoder as Sentence Transformers 6 saves it."""
    write_transformer(folder, "Bert", "bert", [], [{**token, "normalized": False, "special": True} for token in MARKERS])
    edit_json(folder / "tokenizer_config.json", model_max_length=40)
    token_level = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    dense = {"in_features": 48, "out_features": 16, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
    rows: list[tuple[str, str, Config | None]] = [
        ("", f"{BASE}transformer.Transformer", None),
        ("1_Dense", f"{BASE}dense.Dense", dense | token_level),
        ("2_MultiVectorMask", MASK, {"skiplist_words": [".", ",", "no such word"], "keep_only_token_ids": None} | (mask or {})),
        ("3_Normalize", f"{BASE}normalize.Normalize", token_level),
        ("4_HierarchicalTokenPooling", POOLING, {"pool_factor": 1.0, "num_protected_tokens": 1, "tasks": ["document"]}),
    ]
    for path, _, config in rows:
        if config is not None:
            write_json(folder / path / "config.json", config)
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind, _) in enumerate(rows)]
    write_json(folder / "modules.json", modules)
    save_file({"linear.weight": draw(1, 16, 48), "linear.bias": draw(2, 16)}, folder / "1_Dense/model.safetensors")
    transformer = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
    }
    stated = {key: value for key, value in (lengths | {"query_expansion": expansion}).items() if value is not None}
    write_json(folder / "sentence_bert_config.json", transformer | stated)
    prompts = {"query": "[Q] ", "document": "[D] "} if markers else {}
    sentence = {"model_type": "MultiVectorEncoder", "prompts": prompts, "default_prompt_name": None, "similarity_fn_name": None}
    write_json(folder / "config_sentence_transformers.json", {"__version__": {"sentence_transformers": "6.2.0"}} | sentence)


JINA: Config = JINA_ROBERTA | {"rotary_emb_base": 10000.0, "hidden_act": "gelu_new", "matryoshka_dimensions": None}


def write_jina(folder: Path, architecture: str) -> dict[str, torch.Tensor]:
    """Write the layout of jinaai/jina-colbert-v2. Return the weights."""
    markers: list[Config] = [{"content": f"[{kind}Marker]"} for kind in ("Query", "Document")]
    write_transformer(folder, "XLMRoberta", "xlm-roberta", ["\u2581!", "\u2581?"], markers, pad_token_id=1)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"][-1][1] = -100.0  # a piece that is never the likeliest
    write_json(folder / "tokenizer.json", content)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = JINA | {"architectures": [architecture], "vocab_size": size}
    write_json(folder / "config.json", {key: value for key, value in config.items() if value is not None})
    weights = draw_weights(jina_roberta_names(config) | {"linear.weight": (16, 48)})
    wrapped = {name if name.startswith("linear") else f"roberta.{name}": tensor for name, tensor in weights.items()}
    save_file(wrapped, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = {"query_token_id": "[QueryMarker]", "doc_token_id": "[DocumentMarker]", "attend_to_mask_tokens": True}
    write_json(folder / "artifact.metadata", METADATA | tokens)
    return weights


JINA_V1: Config = JINA_BERT | {
    "architectures": ["HF_ColBERT"],
    "attn_implementation": None,
    "attention_probs_dropout_prob": 0.1,
}


def write_jina_v1(folder: Path) -> dict[str, torch.Tensor]:
    """Write the layout of jinaai/jina-colbert-v1-en, except for `attend_to_mask_tokens`. Return the weights."""
    write_transformer(folder, "Bert", "bert", ["[unused0]", "[unused1]"], [])
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = JINA_V1 | {"vocab_size": size}
    write_json(folder / "config.json", config)
    weights = draw_weights(jina_bert_names(config) | {"linear.weight": (16, 48)})
    wrapped = {name if name.startswith("linear") else f"bert.{name}": tensor for name, tensor in weights.items()}
    save_file(wrapped, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "artifact.metadata", METADATA | {"attend_to_mask_tokens": True})
    return weights
