"""Checkpoints of the comparison with other engines: one for each task and size, in layouts that all of them read.

- `minilm`: the packaged all-MiniLM-L6-v2, its own weights, and a limit of 512 tokens.
- `bge-base`: random weights in the layout and shape of BAAI/bge-base-en-v1.5.
- `cross-encoder`: the packaged model's layers under a random head, as cross-encoder/ms-marco-MiniLM-L6-v2 is laid out.
- `colbert`: the packaged model's layers under a random projection, as colbert-ir/colbertv2.0 is laid out.
- `splade`: the packaged model's layers under a random decoder, as naver/splade-v3 is laid out.
- `modernbert`: random weights in the shape of answerdotai/ModernBERT-base, with mean pooling and the packaged tokenizer.
- `qwen3`, `qwen3-reranker`: random weights in the shape of Qwen3-Embedding-0.6B and of its reranker with one class, of whose 28
  layers there are 8, with the packaged tokenizer.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch
from common import FOLDER
from safetensors.torch import load_file, save_file

from whimbrel_bench import random_models
from whimbrel_bench.random_models import Size

MAX_TOKENS: Final = 512
COLBERT_WIDTH: Final = 128
_CONFIG: Final[dict[str, Any]] = {
    "model_type": "bert", "vocab_size": 30_522, "hidden_act": "gelu", "max_position_embeddings": MAX_TOKENS,
    "type_vocab_size": 2, "pad_token_id": 0, "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "initializer_range": 0.02, "position_embedding_type": "absolute",
}  # fmt: skip
_SMALL: Final = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
_QWEN3: Final[dict[str, Any]] = {
    "vocab_size": 30_522, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 101,
    "eos_token_id": 102, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip


def write_models(root: Path, names: Iterable[str]) -> dict[str, Path]:
    """Write these checkpoints below `root` unless this file has written them, and return the folder of each."""
    source = Path(__file__).read_text()
    folders = {name: root / name for name in names}
    for name in folders:
        stamp = root / name / "written-by"
        if not stamp.exists() or stamp.read_text() != source:
            shutil.rmtree(root / name, ignore_errors=True)
            (root / name).mkdir(parents=True)
            WRITERS[name](root / name)
            stamp.write_text(source)
    return folders


def _write_minilm(folder: Path) -> None:
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    random_models.write_tokenizer(folder, most=MAX_TOKENS)
    random_models.write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": False})


def _write_bge_base(folder: Path) -> None:
    random_models.write_bert(folder, Size(768, 3072, 12, 12), mode="cls_token")
    weights = load_file(folder / "model.safetensors")
    save_file({name: each.float() for name, each in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def _write_cross_encoder(folder: Path) -> None:
    random_models.write_tokenizer(folder, most=MAX_TOKENS)
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    config = _CONFIG | _SMALL | {"architectures": ["BertForSequenceClassification"]} | labels
    random_models.write_json(folder / "config.json", config)
    width, generator = _SMALL["hidden_size"], torch.Generator().manual_seed(0)
    head = {
        "bert.pooler.dense.weight": torch.randn(width, width, generator=generator) / width**0.5,
        "bert.pooler.dense.bias": torch.zeros(width),
        "classifier.weight": 4 * torch.randn(1, width, generator=generator) / width**0.5,  # scores that differ
        "classifier.bias": torch.zeros(1),
    }
    save_file(_packaged_layers() | head, folder / "model.safetensors", {"format": "pt"})


def _write_colbert(folder: Path) -> None:
    random_models.write_tokenizer(folder, most=MAX_TOKENS)
    random_models.write_json(folder / "config.json", _CONFIG | _SMALL | {"architectures": ["HF_ColBERT"]})
    metadata = {
        "query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_token": "[Q]", "doc_token": "[D]",
        "query_maxlen": 32, "doc_maxlen": MAX_TOKENS, "mask_punctuation": True, "attend_to_mask_tokens": False,
        "similarity": "cosine", "dim": COLBERT_WIDTH, "checkpoint": "bert-base-uncased",
    }  # fmt: skip
    random_models.write_json(folder / "artifact.metadata", metadata)
    width, generator = _SMALL["hidden_size"], torch.Generator().manual_seed(0)
    linear = {"linear.weight": torch.randn(COLBERT_WIDTH, width, generator=generator) / width**0.5}
    pooler = {
        f"bert.pooler.dense.{part}": torch.zeros(*shape) for part, shape in (("weight", (width, width)), ("bias", (width,)))
    }
    save_file(_packaged_layers() | pooler | linear, folder / "model.safetensors", {"format": "pt"})


def _write_splade(folder: Path) -> None:
    random_models.write_tokenizer(folder, most=MAX_TOKENS)
    random_models.write_json(
        folder / "config.json", _CONFIG | _SMALL | {"architectures": ["BertForMaskedLM"], "tie_word_embeddings": True}
    )
    width, generator = _SMALL["hidden_size"], torch.Generator().manual_seed(0)
    layers = _packaged_layers()
    words = layers["bert.embeddings.word_embeddings.weight"]
    head = {
        "cls.predictions.transform.dense.weight": torch.randn(width, width, generator=generator) / width**0.5,
        "cls.predictions.transform.dense.bias": torch.zeros(width),
        "cls.predictions.transform.LayerNorm.weight": torch.ones(width),
        "cls.predictions.transform.LayerNorm.bias": torch.zeros(width),
        "cls.predictions.bias": torch.full((len(words),), -0.2),
    }
    save_file(layers | head, folder / "model.safetensors", {"format": "pt"})
    rows = [("", "MLMTransformer"), ("1_SpladePooling", "SpladePooling")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.sparse_encoder.models.{kind}"}
        for i, (path, kind) in enumerate(rows)
    ]
    random_models.write_json(folder / "modules.json", modules)
    random_models.write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": False})
    pooling = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": len(words)}
    random_models.write_json(folder / "1_SpladePooling/config.json", pooling)


def _write_modernbert(folder: Path) -> None:
    from transformers import ModernBertConfig, ModernBertModel

    special = {"pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102, "cls_token_id": 101, "sep_token_id": 102}
    _write_transformers(folder, ModernBertModel(ModernBertConfig(vocab_size=30_522, **special)))
    random_models.write_modules(folder, "mean_tokens", 768, most=MAX_TOKENS)


def _write_qwen3(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3Model

    _write_transformers(folder, Qwen3Model(Qwen3Config(**_QWEN3)))
    random_models.write_modules(folder, "lasttoken", _QWEN3["hidden_size"], most=MAX_TOKENS)


def _write_qwen3_reranker(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    _write_transformers(folder, Qwen3ForSequenceClassification(Qwen3Config(**_QWEN3, num_labels=1)))


def _write_transformers(folder: Path, model: Any) -> None:
    """Write a model of transformers with weights with which the results of different texts differ."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5)
    model.save_pretrained(folder)
    random_models.write_tokenizer(folder, most=MAX_TOKENS)
    random_models.write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": False})


WRITERS: Final[dict[str, Callable[[Path], None]]] = {
    "minilm": _write_minilm,
    "bge-base": _write_bge_base,
    "cross-encoder": _write_cross_encoder,
    "colbert": _write_colbert,
    "splade": _write_splade,
    "modernbert": _write_modernbert,
    "qwen3": _write_qwen3,
    "qwen3-reranker": _write_qwen3_reranker,
}


def _packaged_layers() -> dict[str, torch.Tensor]:
    """Return the packaged model's weights without its pooler, with the prefix of a model with a head."""
    weights = load_file(FOLDER / "model.safetensors")
    return {
        f"bert.{name}": tensor
        for name, tensor in weights.items()
        if not name.startswith("pooler") and tensor.is_floating_point()
    }
