"""Rerankers that are language models, small and random; their tokenizers, and the recipes of their cards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore

from checkpoints import tokenizer_files
from checkpoints.files import edit_json, write_json
from checkpoints.weights import is_norm, randomise

JSON = dict[str, Any]


SIZES = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "head_dim": 16, "vocab_size": 900, "max_position_embeddings": 1024,
}  # fmt: skip


@cache
def qwen() -> tuple[JSON, JSON]:
    """Qwen's, with the words of rerankers in its vocabulary, and <think>, which is not a special token there."""
    content, stated = copy.deepcopy(tokenizer_files.qwen(suffix=False))
    vocab = content["model"]["vocab"]
    shift = ("yes", "no", "Yes")
    for word in shift:
        vocab.setdefault(word, len(vocab))
    added: list[JSON] = content["added_tokens"]
    for name in ("<think>", "</think>"):
        added.append(dict(added[-1], content=name, special=False))
    for number, token in enumerate(added, start=len(vocab)):
        token["id"] = number
    stated["added_tokens_decoder"] = {
        str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added
    }
    return content, stated | {"chat_template": None, "truncation_side": "right"}


@cache
def gemma() -> tuple[JSON, JSON]:
    """Gemma's: <bos> before a text, and a word "Yes"."""
    content, stated = copy.deepcopy(tokenizer_files.gemma())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    for word in ("Y", "Ye", "Yes"):
        vocab.setdefault(word, len(vocab))
    content["model"]["merges"] = [["Y", "e"], ["Ye", "s"], *merges]
    for token in content["added_tokens"]:
        token["id"] = vocab.setdefault(token["content"], len(vocab))
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [vocab["<bos>"]], "tokens": ["<bos>"]}},
    }
    stated["added_tokens_decoder"] = {
        str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in content["added_tokens"]
    }
    return content, stated | {"add_eos_token": False}


@cache
def llama3() -> tuple[JSON, JSON]:
    """Byte-level, as Llama 3's: <|begin_of_text|> before a text."""
    content, stated = copy.deepcopy(qwen())
    begin = content["added_tokens"][0]["content"]
    number = content["added_tokens"][0]["id"]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {begin: {"id": begin, "ids": [number], "tokens": [begin]}},
    }
    return content, stated | {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin}


def write_reranker(folder: Path, kind: str, tokenizer: tuple[JSON, JSON], form: str = "ForCausalLM", **config: Any) -> Any:
    """A random checkpoint, whose model is returned. All weights are large enough to matter."""
    settings = SIZES | {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3} | config
    model = getattr(transformers, kind + form)(getattr(transformers, f"{kind}Config")(**settings)).eval()
    randomise(model, near_one=lambda key: is_norm(key) and kind != "Gemma")
    model.tie_weights()
    model.save_pretrained(folder)
    if kind == "Gemma":
        edit_json(folder / "config.json", hidden_act="gelu")  # as the first configs have it, and mean the other form
    content, stated = tokenizer
    write_json(folder / "tokenizer.json", content)
    write_json(folder / "tokenizer_config.json", {key: value for key, value in stated.items() if value is not None})
    return model


QUERY, LONG_QUERY = "how far do birds fly?", "where does the whimbrel breed? " * 60


PAIRS = [
    (QUERY, "Some fly ten thousand kilometres in a year."),
    (QUERY, "2026 l'été à la plage\n\nI'll  don't"),
    ("", ""),
    ("{query} {0}", "\n{document}\n"),
    ("Regenbrachvogel", " ein großer Vogel! " * 3),
    (QUERY, "it breeds across much of North America. " * 90),
    (LONG_QUERY, "Asia and Europe. " * 20),
    (LONG_QUERY, "Asia and Europe. " * 400),
]


Recipe = Callable[[Any, str, str, "str | None", int], list[int]]
"""Function of tokenizer, query, document, instruction and maximal length. It returns ids."""


def qwen3_recipe(tokenizer: Any, query: str, document: str, instruction: str | None, max_length: int) -> list[int]:
    """README of Qwen/Qwen3-Reranker-0.6B."""
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    first, last = (tokenizer.encode(text, add_special_tokens=False) for text in (before, after))
    instruction = (
        "Given a web search query, retrieve relevant passages that answer the query" if instruction is None else instruction
    )
    body = tokenizer(
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        truncation="longest_first",
        max_length=max_length - len(first) - len(last),
    )["input_ids"]
    return first + body + last


def only_second(first: list[int], second: list[int], max_length: int) -> list[int]:
    """transformers' prepare_for_model with truncation="only_second"."""
    return first + second[: len(second) - max(0, len(first) + len(second) - max_length)]


def mxbai_recipe(tokenizer: Any, query: str, document: str, instruction: str | None, max_length: int) -> list[int]:
    """mxbai_rerank_v2.py; `max_length` is without what it calls the predefined inputs."""

    def ids(text: str, limit: int = 10**6) -> list[int]:
        return tokenizer(text, add_special_tokens=False, max_length=limit, truncation=True)["input_ids"]

    first = ids(
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    )
    task = ids(
        "You are a search relevance expert who evaluates how well documents match search queries. For each query-document "
        "pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment (0 for "
        "not relevant, 1 for relevant).\nRelevance:"
    )
    last, sep = ids("<|im_end|>\n<|im_start|>assistant\n"), ids("\n")
    asked = f"query: {query}" if instruction is None else f"instruction: {instruction}\nquery: {query}"
    body = only_second(ids(asked, max_length * 3 // 4), sep + ids(f"document: {document}", max_length), max_length)
    return first + body + sep + task + last


def bge_recipe(tokenizer: Any, query: str, document: str, _: str | None, max_length: int) -> list[int]:
    """README of BAAI/bge-reranker-v2-gemma (get_inputs)."""

    def ids(text: str, limit: int = 10**6) -> list[int]:
        return tokenizer(text, add_special_tokens=False, max_length=limit, truncation=True)["input_ids"]

    task = ids(
        "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
        "prediction of either 'Yes' or 'No'."
    )
    sep = ids("\n")
    first = [tokenizer.bos_token_id, *ids(f"A: {query}", max_length * 3 // 4)]
    return only_second(first, sep + ids(f"B: {document}", max_length), max_length) + sep + task


def zerank_recipe(tokenizer: Any, query: str, document: str, _: str | None, max_length: int) -> list[int]:
    """modeling_zeranker.py of zeroentropy/zerank-1-small, with Qwen3's chat template; the cut of long texts is ours."""
    query, document = query[:2000].strip(), document[:10_000].strip()
    text = f"<|im_start|>system\n{query}<|im_end|>\n<|im_start|>user\n{document}<|im_end|>\n<|im_start|>assistant\n"
    last = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    ids = tokenizer.encode(text)
    return ids if len(ids) <= max_length else ids[: max_length - len(last)] + last


CAUSAL: dict[str, tuple[str, JSON, Callable[[], tuple[JSON, JSON]], Recipe, tuple[str, str | None], float]] = {
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}, qwen, qwen3_recipe, ("yes", "no"), 1.0),
    "mxbai-v2": ("Qwen2", {"tie_word_embeddings": False}, qwen, mxbai_recipe, ("1", "0"), 1.0),
    "bge-gemma": ("Gemma", {}, gemma, bge_recipe, ("Yes", None), 1.0),
    "zerank": ("Qwen3", {"tie_word_embeddings": True}, qwen, zerank_recipe, ("Yes", None), 5.0),
}


def reference_score(model: Any, tokenizer: Any, ids: list[int], tokens: tuple[str, str | None], divisor: float) -> float:
    """The logit of the first token after `ids`, less that of the second."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -1].double()
    true, false = (None if token is None else tokenizer.convert_tokens_to_ids(token) for token in tokens)
    return float(logits[true] - (0 if false is None else logits[false])) / divisor


CHAT = (
    '{%- set instruction = messages | selectattr("role", "eq", "system") | map(attribute="content") | first | default("Given a '
    'web search query, retrieve relevant passages that answer the query") -%}\n'
    '{%- set query_text = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}\n'
    '{%- set document_text = messages | selectattr("role", "eq", "document") | map(attribute="content") | first -%}\n'
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
    'that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {{ instruction }}\n<Query>: '
    "{{ query_text }}\n<Document>: {{ document_text }}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n\n"
)
"""The chat template of Qwen/Qwen3-Reranker-0.6B."""


def write_sentence_layout(folder: Path, chat: str, *, form: str, false: bool = True, **options: Any) -> CrossEncoder:
    """A random checkpoint of Qwen3, as Sentence Transformers itself saves it."""
    content, stated = qwen()
    base = folder / "base"
    pad_id = next(token["id"] for token in content["added_tokens"] if token["content"] == stated["pad_token"])
    tied = form == "ForCausalLM"
    files = (content, stated | {"chat_template": chat})
    write_reranker(base, "Qwen3", files, form, num_labels=1, pad_token_id=pad_id, tie_word_embeddings=tied)
    task = "text-generation" if form == "ForCausalLM" else "sequence-classification"
    transformer = Transformer(
        str(base), transformer_task=task, max_seq_length=300, processing_kwargs=options.pop("processing_kwargs", None)
    )
    vocab = content["model"]["vocab"]
    scores = [LogitScore(vocab["yes"], vocab["no"] if false else None)] if form == "ForCausalLM" else []
    model = CrossEncoder(modules=[transformer, *scores], **options)
    model.save(str(folder / "saved"))
    return CrossEncoder(str(folder / "saved"), device="cpu")
