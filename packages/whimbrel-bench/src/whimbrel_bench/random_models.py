"""Random models in the file layout of real ones, in any size: config, tokenizer and safetensors.

Their speed is that of the real model of the same size; their vectors mean nothing. The weights are blocks of one random array,
so that files of many GB are written as fast as the disk takes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import orjson

from whimbrel_bench import random_tokenizers
from whimbrel_bench.random_tokenizers import Json

Shapes = dict[str, tuple[int, ...]]

_BLOCK: Final = 2**22
_ST: Final = "sentence_transformers.models."


@dataclass(frozen=True)
class Size:
    """Sizes of a transformer."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    vocabulary: int = 0
    """Rows of the table of tokens; 0: as many as the tokenizer has."""
    output: int = 128
    """Width of a token's vector, for late interaction."""


def write_safetensors(path: Path, shapes: Shapes, *, seed: int = 0) -> None:
    """Write random bfloat16 weights: norms about 1, others small. Source of the format: github.com/huggingface/safetensors."""
    header: Json = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    noise = (0.02 * np.random.default_rng(seed).standard_normal(_BLOCK, np.float32)).astype(ml_dtypes.bfloat16)
    ones = (1.0 + noise[: 2**16].astype(np.float32)).astype(ml_dtypes.bfloat16)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            block, left = (ones if "norm" in name and name.endswith("weight") else noise), prod(shape)
            while left:
                count = min(left, block.size)
                stream.write(block[:count].tobytes())
                left -= count


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def _write_tokenizer(folder: Path, files: tuple[Json, Json]) -> int:
    _write_json(folder / "tokenizer.json", files[0])
    if files[1]:
        _write_json(folder / "tokenizer_config.json", files[1])
    return random_tokenizers.vocabulary_size(files[0])


def _decoder_shapes(size: Size, rows: int, *, head_norms: bool, prefix: str) -> Shapes:
    """Return the shapes of a decoder as Mistral and Qwen3 save it."""
    width = size.head_dim or size.hidden // size.heads
    queries, keys = size.heads * width, (size.kv_heads or size.heads) * width
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (rows, size.hidden)}
    for number in range(size.layers):
        at = f"{prefix}layers.{number}."
        for name, shape in (("q", (queries, size.hidden)), ("k", (keys, size.hidden)), ("v", (keys, size.hidden))):
            shapes[f"{at}self_attn.{name}_proj.weight"] = shape
        shapes[f"{at}self_attn.o_proj.weight"] = (size.hidden, queries)
        if head_norms:
            shapes |= {f"{at}self_attn.{name}_norm.weight": (width,) for name in "qk"}
        shapes |= {f"{at}mlp.{name}_proj.weight": (size.inner, size.hidden) for name in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (size.hidden, size.inner)
        shapes |= {f"{at}{name}_layernorm.weight": (size.hidden,) for name in ("input", "post_attention")}
    return shapes | {f"{prefix}norm.weight": (size.hidden,)}


def write_gritlm(folder: Path, size: Size, words: Sequence[str]) -> None:
    """Write a GritLM in the layout in which vLLM takes it (Mistral's architecture, both directions)."""
    rows = max(_write_tokenizer(folder, random_tokenizers.llama(words)), size.vocabulary)
    config = {
        "architectures": ["GritLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": size.hidden, "initializer_range": 0.02, "intermediate_size": size.inner,
        "max_position_embeddings": 32768,
        "model_type": "mistral", "num_attention_heads": size.heads, "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads or size.heads, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.38.2", "use_cache": True,
        "vocab_size": rows,
    }  # fmt: skip
    _write_json(folder / "config.json", config)
    shapes = _decoder_shapes(size, rows, head_norms=False, prefix="model.") | {"lm_head.weight": (rows, size.hidden)}
    write_safetensors(folder / "model.safetensors", shapes)


def write_qwen3(folder: Path, size: Size, words: Sequence[str]) -> None:
    """Write a model as Qwen/Qwen3-Embedding-0.6B is: a decoder, the last token's state, normalised."""
    rows = max(_write_tokenizer(folder, random_tokenizers.qwen3(words)), size.vocabulary)
    width = size.head_dim or size.hidden // size.heads
    config = {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
        "eos_token_id": 0, "head_dim": width, "hidden_act": "silu", "hidden_size": size.hidden, "initializer_range": 0.02,
        "intermediate_size": size.inner, "max_position_embeddings": 32768, "max_window_layers": size.layers,
        "model_type": "qwen3",
        "num_attention_heads": size.heads, "num_hidden_layers": size.layers, "num_key_value_heads": size.kv_heads or size.heads,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.3", "use_cache": True, "use_sliding_window": False,
        "vocab_size": rows,
    }  # fmt: skip
    _write_json(folder / "config.json", config)
    kinds = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    modules = [{"idx": i, "name": str(i), "path": path, "type": _ST + kind} for i, (kind, path) in enumerate(kinds)]
    _write_json(folder / "modules.json", modules)
    modes = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    pooling = {f"pooling_mode_{mode}": mode == "lasttoken" for mode in modes}
    _write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": size.hidden, "include_prompt": True} | pooling)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": 32768, "do_lower_case": False})
    write_safetensors(folder / "model.safetensors", _decoder_shapes(size, rows, head_norms=True, prefix=""))


def write_jina_colbert(folder: Path, size: Size, words: Sequence[str], *, query_tokens: int, document_tokens: int) -> None:
    """Write a model as jinaai/jina-colbert-v2 is: XLM-RoBERTa with rotary positions, and a projection of each token."""
    markers = ("[QueryMarker]", "[DocumentMarker]")
    rows = max(_write_tokenizer(folder, random_tokenizers.xlm_roberta(words, markers)), size.vocabulary)
    code = "jinaai/xlm-roberta-flash-implementation--"
    classes = {
        "AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig",
        "AutoModel": "modeling_xlm_roberta.XLMRobertaModel",
    }
    config = {
        "architectures": ["HF_ColBERT"], "attention_probs_dropout_prob": 0.1,
        "auto_map": {name: code + value for name, value in classes.items()}, "bos_token_id": 0, "classifier_dropout": None,
        "emb_pooler": None, "eos_token_id": 2, "hidden_act": "gelu_new", "hidden_dropout_prob": 0.1, "hidden_size": size.hidden,
        "initializer_range": 0.02, "intermediate_size": size.inner, "layer_norm_eps": 1e-05, "load_trained_adapters": False,
        "lora_adaptations": None, "lora_alpha": 1, "lora_dropout_p": 0.0, "lora_main_params_trainable": False, "lora_rank": 4,
        "max_position_embeddings": 8194, "model_type": "xlm-roberta", "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers, "output_past": True, "pad_token_id": 1, "position_embedding_type": "rotary",
        "rotary_emb_base": 10000.0, "torch_dtype": "bfloat16", "transformers_version": "4.43.4", "truncate_dim": None,
        "type_vocab_size": 1, "use_cache": True, "use_flash_attn": True, "use_reentrant": False, "vocab_size": rows,
    }  # fmt: skip
    _write_json(folder / "config.json", config)
    _write_json(folder / "artifact.metadata", _metadata(query_tokens, document_tokens, size.output))
    write_safetensors(folder / "model.safetensors", _jina_shapes(size, rows))


def _jina_shapes(size: Size, rows: int) -> Shapes:
    width, at = size.hidden, "roberta.embeddings."
    shapes: Shapes = {f"{at}word_embeddings.weight": (rows, width), f"{at}token_type_embeddings.weight": (1, width)}
    shapes |= _pair("roberta.emb_ln", width)
    for number in range(size.layers):
        at = f"roberta.encoder.layers.{number}."
        shapes |= _pair(f"{at}mixer.Wqkv", 3 * width, width) | _pair(f"{at}mixer.out_proj", width, width)
        shapes |= _pair(f"{at}mlp.fc1", size.inner, width) | _pair(f"{at}mlp.fc2", width, size.inner)
        shapes |= _pair(f"{at}norm1", width) | _pair(f"{at}norm2", width)
    return shapes | {"linear.weight": (size.output, width)}


def _pair(name: str, out: int, inputs: int = 0) -> Shapes:
    """Return the weight and the bias of a linear layer or a norm."""
    return {f"{name}.weight": (out, inputs) if inputs else (out,), f"{name}.bias": (out,)}


def _metadata(query_tokens: int, document_tokens: int, width: int) -> Mapping[str, Any]:
    """Return artifact.metadata, which ColBERT's own library writes."""
    return {
        "query_token_id": "[QueryMarker]", "doc_token_id": "[DocumentMarker]", "query_token": "[Q]", "doc_token": "[D]",
        "similarity": "cosine", "query_maxlen": query_tokens, "doc_maxlen": document_tokens, "attend_to_mask_tokens": True,
        "interaction": "colbert", "dim": width, "mask_punctuation": True, "model_name": None, "checkpoint": "random",
    }  # fmt: skip


def write_table(folder: Path, width: int, words: Sequence[str]) -> None:
    """Write a table of token vectors (StaticEmbedding): a model whose arithmetic costs next to nothing."""
    rows = _write_tokenizer(folder, random_tokenizers.wordpiece(words))
    kind = "sentence_transformers.models.StaticEmbedding"
    _write_json(folder / "modules.json", [{"idx": 0, "name": "0", "path": "0_StaticEmbedding", "type": kind}])
    (folder / "0_StaticEmbedding").mkdir()
    (folder / "tokenizer.json").rename(folder / "0_StaticEmbedding/tokenizer.json")
    write_safetensors(folder / "0_StaticEmbedding/model.safetensors", {"embedding.weight": (rows, width)})
