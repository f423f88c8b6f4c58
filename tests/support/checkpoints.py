"""Small random checkpoints, written to disk in the layouts that real models have."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

CORPUS = [
    "The whimbrel is a wader with a long curved bill.",
    "It breeds across much of subarctic North America, Asia and Europe.",
    "query: how far do birds fly in a year? passage: some fly ten thousand kilometres.",
    "Der Regenbrachvogel zieht im Herbst nach Afrika; ein großer Vogel!",
    "1234567890 .,;:!?()[]{}<>@#$%&*-_=+/\\|~^`'\"",
]
SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
OLD = "sentence_transformers.models."


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def edit_json(path: Path, /, **changes: Any) -> None:
    """Change keys of a JSON file, or make one; None removes a key."""
    value = (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}) | changes
    write_json(path, {key: item for key, item in value.items() if item is not None})


@cache  # training is not the same twice
def bert_tokenizer() -> PreTrainedTokenizerFast:
    """WordPiece, as BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]", sep_token="[SEP]", pad_token="[PAD]", cls_token="[CLS]", mask_token="[MASK]",
    )  # fmt: skip


@cache  # training is not the same twice
def roberta_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as RoBERTa's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False)
    return _roberta_like(tokenizer)


@cache  # training is not the same twice
def xlmr_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece unigram, as XLM-RoBERTa's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return _roberta_like(tokenizer)


def _roberta_like(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>", eos_token="</s>", unk_token="<unk>", sep_token="</s>", pad_token="<pad>", cls_token="<s>",
        mask_token="<mask>",
    )  # fmt: skip


def _randomise(model: torch.nn.Module) -> None:
    """Weights large enough that every part of the model matters, biases and norms included."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "LayerNorm.weight" in name else 0.2 * noise)


def write_bert(folder: Path, **config: Any) -> None:
    tokenizer = bert_tokenizer()
    sizes = SIZES | {"max_position_embeddings": 64, "vocab_size": len(tokenizer), "pad_token_id": 0} | config
    _save(folder, BertModel(BertConfig(**sizes)), tokenizer, "BertTokenizer")


def write_roberta(folder: Path, **config: Any) -> None:
    tokenizer = roberta_tokenizer()
    sizes = SIZES | {"max_position_embeddings": 66, "vocab_size": len(tokenizer), "type_vocab_size": 1, "pad_token_id": 1}
    model = RobertaModel(RobertaConfig(**(sizes | {"layer_norm_eps": 1e-5} | config)))
    _save(folder, model, tokenizer, "RobertaTokenizer")


def write_xlmr(folder: Path, **config: Any) -> None:
    tokenizer = xlmr_tokenizer()
    sizes = SIZES | {"max_position_embeddings": 66, "vocab_size": len(tokenizer), "type_vocab_size": 1, "pad_token_id": 1}
    model = XLMRobertaModel(XLMRobertaConfig(**(sizes | {"layer_norm_eps": 1e-5} | config)))
    _save(folder, model, tokenizer, "XLMRobertaTokenizer")


def _save(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast, tokenizer_class: str) -> None:
    """As transformers saves them; the class of the tokenizer is that of the real models."""
    _randomise(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class=tokenizer_class)


def sentence_layout(
    folder: Path,
    *,
    modes: tuple[str, ...] = ("mean",),
    include_prompt: bool = True,
    new: bool = False,
    heads: tuple[Any, ...] = ("Normalize",),
    max_seq_length: int | None = None,
    prompts: dict[str, str] | None = None,
    default_prompt_name: str | None = None,
) -> None:
    """Make a transformers checkpoint a Sentence Transformers one, in the layout before 5.4 or (new) since.

    A head is "Normalize", ("Dense", out_features, activation class path, extra config) or "LayerNorm".
    """
    paths = {
        "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
        "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
        "Dense": "sentence_transformers.base.modules.dense.Dense",
        "LayerNorm": "sentence_transformers.sentence_transformer.modules.layer_norm.LayerNorm",
        "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
    }
    rows = [("Transformer", ""), ("Pooling", "1_Pooling")]
    config = json.loads((folder / "config.json").read_text())
    size = next(config[key] for key in ("hidden_size", "n_embd", "dim", "d_model") if key in config)
    write_json(folder / "1_Pooling/config.json", _pooling_config(modes, size, include_prompt, new=new))
    width = size * len(modes)
    for number, head in enumerate(heads, start=2):
        kind = head if isinstance(head, str) else head[0]
        path = f"{number}_{kind}"
        rows.append((kind, path))
        width = _write_head(folder / path, head, width)
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": paths[kind] if new else OLD + kind}
        for i, (kind, path) in enumerate(rows)
    ]
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", _transformer_config(folder, max_seq_length, new=new))
    st: dict[str, Any] = {"__version__": {"sentence_transformers": "6.2.0" if new else "2.0.0"}}
    if new:
        st |= {"model_type": "SentenceTransformer", "similarity_fn_name": "cosine"}
    if prompts is not None:
        st |= {"prompts": prompts, "default_prompt_name": default_prompt_name}
    write_json(folder / "config_sentence_transformers.json", st)


def _pooling_config(modes: tuple[str, ...], size: int, include_prompt: bool, *, new: bool) -> dict[str, Any]:
    if new:
        mode = modes[0] if len(modes) == 1 else list(modes)
        return {"embedding_dimension": size, "pooling_mode": mode, "include_prompt": include_prompt}
    names = {
        "cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
        "weightedmean": "weightedmean_tokens", "lasttoken": "lasttoken",
    }  # fmt: skip
    flags = {f"pooling_mode_{name}": mode in modes for mode, name in names.items()}
    return {"word_embedding_dimension": size, "include_prompt": include_prompt} | flags


def _transformer_config(folder: Path, max_seq_length: int | None, *, new: bool) -> dict[str, Any]:
    if not new:
        return {"max_seq_length": max_seq_length or 40, "do_lower_case": False}
    edit_json(folder / "tokenizer_config.json", model_max_length=max_seq_length or 40)
    return {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
    }


def _write_head(path: Path, head: Any, width: int) -> int:
    path.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(width)
    if head == "LayerNorm":
        write_json(path / "config.json", {"dimension": width})
        values = {name: torch.randn(width, generator=generator) for name in ("norm.weight", "norm.bias")}
        save_file(values, path / "model.safetensors")
    elif head[0] == "Dense":
        _, out, activation, extra = head
        config = {"in_features": width, "out_features": out, "bias": True, "activation_function": activation}
        write_json(path / "config.json", config | extra)
        values = {"linear.weight": torch.randn(out, width, generator=generator) / width**0.5}
        if (config | extra)["bias"]:
            values["linear.bias"] = torch.randn(out, generator=generator)
        if extra.get("use_residual") and out != width:
            values["residual.weight"] = torch.randn(out, width, generator=generator) / width**0.5
        save_file(values, path / "model.safetensors")
        return out
    return width
