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

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch
from common import FOLDER
from safetensors.torch import load_file, save_file

MAX_TOKENS: Final = 512
COLBERT_WIDTH: Final = 128
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
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
_BASE: Final = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}


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
    _copy_tokenizer(folder)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": False})


def _write_bge_base(folder: Path) -> None:
    _copy_tokenizer(folder)
    _write_json(folder / "config.json", _CONFIG | _BASE | {"architectures": ["BertModel"]})
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": True})
    _write_json(folder / "config_sentence_transformers.json", {"__version__": {"sentence_transformers": "2.2.2"}})
    _write_modules(folder, "cls_token", _BASE["hidden_size"])
    save_file(_random_bert(**_BASE), folder / "model.safetensors", {"format": "pt"})


def _write_cross_encoder(folder: Path) -> None:
    _copy_tokenizer(folder)
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    config = _CONFIG | _SMALL | {"architectures": ["BertForSequenceClassification"]} | labels
    _write_json(folder / "config.json", config)
    width, generator = _SMALL["hidden_size"], torch.Generator().manual_seed(0)
    head = {
        "bert.pooler.dense.weight": torch.randn(width, width, generator=generator) / width**0.5,
        "bert.pooler.dense.bias": torch.zeros(width),
        "classifier.weight": 4 * torch.randn(1, width, generator=generator) / width**0.5,  # scores that differ
        "classifier.bias": torch.zeros(1),
    }
    save_file(_packaged_layers() | head, folder / "model.safetensors", {"format": "pt"})


def _write_colbert(folder: Path) -> None:
    _copy_tokenizer(folder)
    _write_json(folder / "config.json", _CONFIG | _SMALL | {"architectures": ["HF_ColBERT"]})
    metadata = {
        "query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_token": "[Q]", "doc_token": "[D]",
        "query_maxlen": 32, "doc_maxlen": MAX_TOKENS, "mask_punctuation": True, "attend_to_mask_tokens": False,
        "similarity": "cosine", "dim": COLBERT_WIDTH, "checkpoint": "bert-base-uncased",
    }  # fmt: skip
    _write_json(folder / "artifact.metadata", metadata)
    width, generator = _SMALL["hidden_size"], torch.Generator().manual_seed(0)
    linear = {"linear.weight": torch.randn(COLBERT_WIDTH, width, generator=generator) / width**0.5}
    pooler = {
        f"bert.pooler.dense.{part}": torch.zeros(*shape) for part, shape in (("weight", (width, width)), ("bias", (width,)))
    }
    save_file(_packaged_layers() | pooler | linear, folder / "model.safetensors", {"format": "pt"})


def _write_splade(folder: Path) -> None:
    _copy_tokenizer(folder)
    _write_json(folder / "config.json", _CONFIG | _SMALL | {"architectures": ["BertForMaskedLM"], "tie_word_embeddings": True})
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
    _write_json(folder / "modules.json", modules)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": False})
    pooling = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": len(words)}
    _write_json(folder / "1_SpladePooling/config.json", pooling)


def _write_modernbert(folder: Path) -> None:
    from transformers import ModernBertConfig, ModernBertModel

    special = {"pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102, "cls_token_id": 101, "sep_token_id": 102}
    _write_transformers(folder, ModernBertModel(ModernBertConfig(vocab_size=30_522, **special)))
    _write_modules(folder, "mean_tokens", 768)


def _write_qwen3(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3Model

    _write_transformers(folder, Qwen3Model(Qwen3Config(**_QWEN3)))
    _write_modules(folder, "lasttoken", _QWEN3["hidden_size"])


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
    _copy_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    _write_json(folder / "tokenizer_config.json", settings | {"model_max_length": MAX_TOKENS})
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": False})


def _write_modules(folder: Path, mode: str, width: int) -> None:
    rows = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(rows)
    ]
    _write_json(folder / "modules.json", modules)
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    pooling = {"word_embedding_dimension": width} | {f"pooling_mode_{each}": each == mode for each in modes}
    _write_json(folder / "1_Pooling/config.json", pooling)
    (folder / "2_Normalize").mkdir()


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


def _random_bert(*, hidden_size: int, num_hidden_layers: int, intermediate_size: int, **_: int) -> dict[str, torch.Tensor]:
    """Return weights with which the vectors of different texts differ."""
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        weights[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) / columns**0.5
        weights[f"{name}.bias"] = 0.1 * torch.randn(rows, generator=generator)

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = 1 + 0.1 * torch.randn(hidden_size, generator=generator)
        weights[f"{name}.bias"] = 0.1 * torch.randn(hidden_size, generator=generator)

    for table, rows, scale in (("word", 30_522, 1.0), ("position", MAX_TOKENS, 0.5), ("token_type", 2, 0.1)):
        weights[f"embeddings.{table}_embeddings.weight"] = scale * torch.randn(rows, hidden_size, generator=generator)
    norm("embeddings.LayerNorm")
    for at in (f"encoder.layer.{i}." for i in range(num_hidden_layers)):
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{at}attention.{part}", hidden_size, hidden_size)
        linear(f"{at}intermediate.dense", intermediate_size, hidden_size)
        linear(f"{at}output.dense", hidden_size, intermediate_size)
        norm(f"{at}attention.output.LayerNorm")
        norm(f"{at}output.LayerNorm")
    linear("pooler.dense", hidden_size, hidden_size)
    return weights


def _copy_tokenizer(folder: Path) -> None:
    """Copy the tokenizer without its padding to 128 tokens, which some peers would obey and others not."""
    for name in _TOKENIZER_FILES:
        shutil.copy(FOLDER / name, folder / name)
    tokenizer = json.loads((FOLDER / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"padding": None, "truncation": None}))


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2))
