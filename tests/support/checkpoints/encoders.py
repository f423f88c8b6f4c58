"""BERT, RoBERTa and XLM-RoBERTa, small and random, with their tokenizers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

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

from checkpoints.files import edit_json
from checkpoints.weights import randomise

CORPUS = [
    "The whimbrel is a wader with a long curved bill.",
    "It breeds across much of subarctic North America, Asia and Europe.",
    "query: how far do birds fly in a year? passage: some fly ten thousand kilometres.",
    "Der Regenbrachvogel zieht im Herbst nach Afrika; ein großer Vogel!",
    "1234567890 .,;:!?()[]{}<>@#$%&*-_=+/\\|~^`'\"",
]
SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}


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
    """Save them as transformers does; the class of the tokenizer is that of the real models."""
    randomise(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class=tokenizer_class)
