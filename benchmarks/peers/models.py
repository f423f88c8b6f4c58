"""Checkpoints of the comparison with other engines: one for each task and size, in layouts that all of them read.

- `minilm`: the packaged all-MiniLM-L6-v2, its own weights, and a limit of 512 tokens.
- `bge-base`: random weights in the layout and shape of BAAI/bge-base-en-v1.5.
- `cross-encoder`: the packaged model's layers under a random head, as cross-encoder/ms-marco-MiniLM-L6-v2 is laid out.
- `colbert`: random weights in the layout of colbert-ir/colbertv2.0 and the packaged model's shape.
- `splade`: the packaged model's layers under a random decoder, as naver/splade-v3 is laid out.
- `modernbert`: random weights in the shape of answerdotai/ModernBERT-base, with mean pooling and the packaged tokenizer.
- `qwen3`, `qwen3-reranker`: random weights in the shape of Qwen3-Embedding-0.6B and of its reranker with one class, of whose 28
  layers there are 8, with the packaged tokenizer.
- `deberta`: random weights in the shape of DeBERTa-v3-base with one class, as mxbai-rerank-base-v1 is, with the packaged
  tokenizer.
"""

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from common import FOLDER
from safetensors.torch import load_file, save_file

from whimbrel_bench import random_models
from whimbrel_bench.random_models import Size

MAX_TOKENS: Final = 512
WIDTH: Final = 384
VOCABULARY: Final = 30_522
"""Sizes of the packaged model."""
_TABLE: Final = Path(__file__).with_suffix(".toml")
_CONFIGS: Final = tomllib.loads(_TABLE.read_text())


def write_model(root: Path, name: str) -> Path:
    """Write a checkpoint below `root` unless this file and its table have written it, and return its folder."""
    source, folder = Path(__file__).read_text() + _TABLE.read_text(), root / name
    stamp = folder / "written-by"
    if not stamp.exists() or stamp.read_text() != source:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        WRITERS[name](folder)
        stamp.write_text(source)
    return folder


def _write_minilm(folder: Path) -> None:
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    random_models.write_tokenizer(folder, most=MAX_TOKENS)
    random_models.write_limit(folder, MAX_TOKENS)


def _write_bge_base(folder: Path) -> None:
    random_models.write_bert(folder, Size(768, 3072, 12, 12), mode="cls_token")
    _widen(folder)


def _write_colbert(folder: Path) -> None:
    random_models.write_colbert(folder, Size(WIDTH, 1536, 6, 12), query_tokens=32, document_tokens=MAX_TOKENS)
    _widen(folder)


def _widen(folder: Path) -> None:
    """Make float32 of random bfloat16 weights."""
    weights = load_file(folder / "model.safetensors")
    save_file({name: each.float() for name, each in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def _write_cross_encoder(folder: Path) -> None:
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    head = _linear("bert.pooler.dense", WIDTH) | _linear("classifier", 1, scale=4.0)  # scores that differ
    _write_packaged(folder, {"architectures": ["BertForSequenceClassification"]} | labels, head)


def _write_splade(folder: Path) -> None:
    at = "cls.predictions.transform"
    norm = {f"{at}.LayerNorm.weight": torch.ones(WIDTH), f"{at}.LayerNorm.bias": torch.zeros(WIDTH)}
    head = _linear(f"{at}.dense", WIDTH) | norm | {"cls.predictions.bias": torch.full((VOCABULARY,), -0.2)}
    _write_packaged(folder, {"architectures": ["BertForMaskedLM"], "tie_word_embeddings": True}, head)
    kind = "sentence_transformers.sparse_encoder.models."
    random_models.write_kinds(folder, {"": f"{kind}MLMTransformer", "1_SpladePooling": f"{kind}SpladePooling"}, most=MAX_TOKENS)
    pooling = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": VOCABULARY}
    random_models.write_json(folder / "1_SpladePooling/config.json", pooling)


def _write_packaged(folder: Path, config: dict[str, Any], head: dict[str, torch.Tensor]) -> None:
    """Write the packaged model's layers without its pooler under a head."""
    random_models.write_tokenizer(folder, most=MAX_TOKENS)
    random_models.write_json(folder / "config.json", json.loads((FOLDER / "config.json").read_text()) | config)
    layers = {
        f"bert.{name}": tensor
        for name, tensor in load_file(FOLDER / "model.safetensors").items()
        if not name.startswith("pooler") and tensor.is_floating_point()
    }
    save_file(layers | head, folder / "model.safetensors", {"format": "pt"})


def _linear(name: str, rows: int, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Return a random linear layer over the packaged model's hidden states."""
    weight = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    return {f"{name}.weight": scale * weight / WIDTH**0.5, f"{name}.bias": torch.zeros(rows)}


def _write_modernbert(folder: Path) -> None:
    from transformers import ModernBertConfig, ModernBertModel

    _write_transformers(folder, ModernBertModel(ModernBertConfig(**_CONFIGS["modernbert"])))
    random_models.write_modules(folder, "mean_tokens", 768, most=MAX_TOKENS)


def _write_qwen3(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3Model

    _write_transformers(folder, Qwen3Model(Qwen3Config(**_CONFIGS["qwen3"])))
    random_models.write_modules(folder, "lasttoken", _CONFIGS["qwen3"]["hidden_size"], most=MAX_TOKENS)


def _write_qwen3_reranker(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    _write_transformers(folder, Qwen3ForSequenceClassification(Qwen3Config(**_CONFIGS["qwen3"], num_labels=1)))


def _write_deberta(folder: Path) -> None:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    _write_transformers(folder, DebertaV2ForSequenceClassification(DebertaV2Config(**_CONFIGS["deberta"])))


def _write_transformers(folder: Path, model: Any) -> None:
    """Write a model of transformers with weights with which the results of different texts differ."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5)
    model.save_pretrained(folder)
    random_models.write_tokenizer(folder, most=MAX_TOKENS)
    random_models.write_limit(folder, MAX_TOKENS)


WRITERS: Final[dict[str, Callable[[Path], None]]] = {
    "minilm": _write_minilm,
    "bge-base": _write_bge_base,
    "cross-encoder": _write_cross_encoder,
    "colbert": _write_colbert,
    "splade": _write_splade,
    "modernbert": _write_modernbert,
    "qwen3": _write_qwen3,
    "qwen3-reranker": _write_qwen3_reranker,
    "deberta": _write_deberta,
}
