"""Small random checkpoints with classes, as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from checkpoints.encoders import SIZES, bert_tokenizer, roberta_tokenizer, xlmr_tokenizer
from checkpoints.files import edit_json
from checkpoints.reference_classes import reference_class
from checkpoints.tokenizer_files import deberta, qwen
from checkpoints.weights import is_norm, randomise

SMALL = SIZES | {"num_hidden_layers": 2, "max_position_embeddings": 66, "pad_token_id": 0}
ROBERTA = SMALL | {"pad_token_id": 1, "type_vocab_size": 1}
DEBERTA = SMALL | {
    "relative_attention": True, "position_buckets": 12, "norm_rel_ebd": "layer_norm", "share_att_key": True,
    "pos_att_type": "p2c|c2p", "position_biased_input": False, "type_vocab_size": 0, "legacy": False,
}  # fmt: skip
DECODER = SMALL | {"num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 3}
DISTILBERT = {"dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 96, "max_position_embeddings": 66}


def qwen_tokenizer() -> Any:
    """Qwen2's tokenizer, without tokens that no text has."""
    content, config = qwen(suffix=False)
    roles = {key: value for key, value in config.items() if key in ("eos_token", "pad_token")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), **roles)


def deberta_tokenizer() -> Any:
    content, config = deberta()
    roles = {key: value for key, value in config.items() if key.endswith("_token")}
    return transformers.DebertaV2Tokenizer(vocab=[tuple(row) for row in content["model"]["vocab"]], **roles)


FAMILIES: dict[str, tuple[str, dict[str, Any], Any, str]] = {
    "bert": ("Bert", SMALL, bert_tokenizer, "BertTokenizer"),
    "roberta": ("Roberta", ROBERTA, roberta_tokenizer, "RobertaTokenizer"),
    "xlm-roberta": ("XLMRoberta", ROBERTA, xlmr_tokenizer, "XLMRobertaTokenizer"),
    "camembert": ("Camembert", ROBERTA, xlmr_tokenizer, "PreTrainedTokenizerFast"),
    "distilbert": ("DistilBert", DISTILBERT, bert_tokenizer, "DistilBertTokenizer"),
    "electra": ("Electra", SMALL | {"embedding_size": 24}, bert_tokenizer, "ElectraTokenizer"),
    "mpnet": ("MPNet", ROBERTA, roberta_tokenizer, "PreTrainedTokenizerFast"),
    "deberta": ("DebertaV2", DEBERTA, deberta_tokenizer, "DebertaV2Tokenizer"),
    "deberta of other parts": (
        "DebertaV2",
        DEBERTA | {"pooler_hidden_act": "tanh", "position_biased_input": True, "type_vocab_size": 2},
        deberta_tokenizer,
        "DebertaV2Tokenizer",
    ),
    "nomic": ("NomicBert", SMALL, bert_tokenizer, "BertTokenizer"),
    "gte": ("Gte", SMALL, xlmr_tokenizer, "XLMRobertaTokenizer"),
    "jina v3": ("JinaEmbeddingsV3", ROBERTA, xlmr_tokenizer, "XLMRobertaTokenizer"),
    "modernbert": ("ModernBert", SMALL | {"local_attention": 8}, bert_tokenizer, "PreTrainedTokenizerFast"),
    "modernbert of means": (
        "ModernBert",
        SMALL | {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True, "classifier_activation": "silu"},
        bert_tokenizer,
        "PreTrainedTokenizerFast",
    ),
    "eurobert": ("EuroBert", DECODER | {"mask_token_id": 4}, bert_tokenizer, "PreTrainedTokenizerFast"),
    "eurobert of means": (
        "EuroBert",
        DECODER | {"mask_token_id": 4, "classifier_pooling": "mean"},
        bert_tokenizer,
        "PreTrainedTokenizerFast",
    ),
    "qwen2": ("Qwen2", DECODER, qwen_tokenizer, "Qwen2Tokenizer"),
    "qwen3": ("Qwen3", DECODER | {"head_dim": 16}, bert_tokenizer, "PreTrainedTokenizerFast"),
    "llama": ("Llama", DECODER, bert_tokenizer, "PreTrainedTokenizerFast"),
    "mistral": ("Mistral", DECODER, bert_tokenizer, "PreTrainedTokenizerFast"),
    "gemma": ("Gemma", DECODER | {"head_dim": 16}, bert_tokenizer, "PreTrainedTokenizerFast"),
    "gemma2": ("Gemma2", DECODER | {"head_dim": 16}, bert_tokenizer, "PreTrainedTokenizerFast"),
    "gemma3": ("Gemma3Text", DECODER | {"head_dim": 16}, bert_tokenizer, "PreTrainedTokenizerFast"),
}


def write_classifier(folder: Path, family: str, form: str = "ForSequenceClassification", **config: Any) -> Any:
    """A random checkpoint as transformers saves it; returns transformers' own model. All weights are large enough to matter."""
    name, sizes, make_tokenizer, tokenizer_class = FAMILIES[family]
    tokenizer = make_tokenizer()
    wanted = {"vocab_size": len(tokenizer)} | sizes | config
    model = reference_class(name + form)(reference_class(f"{name}Config")(**wanted)).eval()
    randomise(model, near_one=lambda key: is_norm(key) and not name.startswith("Gemma"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class=tokenizer_class, model_max_length=40)
    return model


NLI = ("contradiction", "neutral", "entailment")


def write_nli(folder: Path, family: str = "bert", names: tuple[str, ...] = NLI) -> Path:
    """A random model for natural language inference, with these classes."""
    write_classifier(folder, family, id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)})
    return folder


def two_layers(folder: Path, num_labels: int) -> torch.nn.Module:
    """Put Linear, ReLU, Linear instead of the layer "score" into a checkpoint."""
    width = SMALL["hidden_size"]
    head = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, num_labels))
    weights = {key: value for key, value in load_file(folder / "model.safetensors").items() if not key.startswith("score")}
    save_file(weights | {f"score.{key}": value for key, value in head.state_dict().items()}, folder / "model.safetensors")
    return head


QUERIES = ["how far do birds fly in a year?", "a wader", "", "bill"]


DOCUMENTS = [
    "It breeds across much of subarctic North America, Asia and Europe.",
    "The whimbrel is a wader with a long curved bill. " * 9,
    "birds",
    "",
]


PAIRS = [(QUERIES[i], DOCUMENTS[j]) for i, j in ((0, 0), (0, 1), (1, 2), (2, 1), (3, 3), (0, 3), (1, 1), (0, 2))]


SPLIT_PAIRS = [query for query, _ in PAIRS], [document for _, document in PAIRS]


TEXTS = ["The whimbrel is a wader.", "a", "a long curved bill " * 30, "ein großer Vogel!"]


def logits_of(folder: Path, model: Any, inputs: Any) -> np.ndarray:
    """Transformers' logits, of each text or pair alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows: list[np.ndarray] = []
    for each in inputs:
        parts = ([part] for part in each) if isinstance(each, tuple) else ([each],)
        encoded = tokenizer(*parts, truncation="longest_first", return_tensors="pt")
        with torch.no_grad():
            rows.append(model(**encoded).logits.numpy()[0])
    return np.array(rows)
