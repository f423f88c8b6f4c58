"""Random models in the file layout of real ones, in any size: config, safetensors, and the packaged model's tokenizer.

Their speed is that of the real model of the same size, because looking tokens up costs next to nothing; their vectors mean
nothing. The weights are blocks of one random array, so that files of many GB are written as fast as the disk takes them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import IO, Any, Final

import ml_dtypes
import numpy as np
import orjson

Json = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

SCALE: Final = 0.02
"""Standard deviation of random weights."""
_BLOCK: Final = 2**22
_MODES: Final = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
_CONFIGS: Final[Mapping[str, Json]] = json.loads(files("whimbrel_bench").joinpath("random_models.json").read_text("utf-8"))
"""Configs without the sizes; of ColBERT, its metadata."""


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


def write_header(stream: IO[bytes], shapes: Shapes) -> int:
    """Write the header of a file of bfloat16 tensors. Return the bytes of data that follow.

    Source of the format: github.com/huggingface/safetensors.
    """
    header: Json = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    return offset


def is_norm(name: str) -> bool:
    """Return whether a tensor scales what was normed, so that its values are about 1."""
    return "norm" in name.lower() and name.endswith("weight")


def write_safetensors(path: Path, shapes: Shapes) -> None:
    """Write random bfloat16 weights: norms about 1, others small."""
    noise = (SCALE * np.random.default_rng(0).standard_normal(_BLOCK, np.float32)).astype(ml_dtypes.bfloat16)
    ones = (1.0 + noise[: 2**16].astype(np.float32)).astype(ml_dtypes.bfloat16)
    with path.open("wb") as stream:
        write_header(stream, shapes)
        for name, shape in shapes.items():
            block, left = (ones if is_norm(name) else noise), prod(shape)
            while left:
                count = min(left, block.size)
                stream.write(block[:count].tobytes())
                left -= count


def write_json(path: Path, value: Json | list[Json]) -> None:
    """Write a file of a checkpoint, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def write_tokenizer(folder: Path, *, most: int = 32768) -> int:
    """Write the packaged model's tokenizer without padding and truncation. Return its number of tokens. Raises SetupError."""
    from whimbrel.checkpoint.locate import resolve_checkpoint

    source = resolve_checkpoint(None).folder
    tokenizer: Json = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    config: Json = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(folder / "tokenizer.json", tokenizer | {"padding": None, "truncation": None})
    write_json(folder / "tokenizer_config.json", config | {"model_max_length": most})
    return len(tokenizer["model"]["vocab"])


def write_kinds(folder: Path, kinds: Mapping[str, str], *, most: int) -> None:
    """Write the modules of Sentence Transformers, their types by folder, and the limit of tokens."""
    rows = enumerate(kinds.items())
    modules: list[Json] = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in rows]
    write_json(folder / "modules.json", modules)
    write_limit(folder, most)


def write_limit(folder: Path, most: int) -> None:
    """Write the limit of tokens as Sentence Transformers does."""
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": most, "do_lower_case": False})


def write_modules(folder: Path, mode: str, width: int, *, most: int = 32768) -> None:
    """Write the modules of Sentence Transformers: the transformer, a mode of pooling, and the norm."""
    kind = "sentence_transformers.models."
    write_kinds(folder, {"": f"{kind}Transformer", "1_Pooling": f"{kind}Pooling", "2_Normalize": f"{kind}Normalize"}, most=most)
    pooling = {"word_embedding_dimension": width} | {f"pooling_mode_{each}": each == mode for each in _MODES}
    write_json(folder / "1_Pooling/config.json", pooling)


def _write_sizes(folder: Path, size: Size, kind: str, **others: Any) -> int:
    """Write the tokenizer and the config of a kind of model, with its sizes. Return the rows of the table of tokens."""
    config = _CONFIGS[kind] | others
    rows = max(write_tokenizer(folder, most=config["max_position_embeddings"]), size.vocabulary)
    sizes = {"hidden_size": size.hidden, "intermediate_size": size.inner, "vocab_size": rows}
    write_json(folder / "config.json", config | sizes | {"num_attention_heads": size.heads, "num_hidden_layers": size.layers})
    return rows


def _write_decoder(folder: Path, size: Size, kind: str, *, head_norms: bool, prefix: str, **others: Any) -> None:
    """Write a decoder as Mistral and Qwen3 save it."""
    width, kv_heads = size.head_dim or size.hidden // size.heads, size.kv_heads or size.heads
    rows = _write_sizes(folder, size, kind, num_key_value_heads=kv_heads, head_dim=width, **others)
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (rows, size.hidden)}
    for at in (f"{prefix}layers.{number}." for number in range(size.layers)):
        for name, heads in (("q", size.heads), ("k", kv_heads), ("v", kv_heads)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (heads * width, size.hidden)
        shapes[f"{at}self_attn.o_proj.weight"] = (size.hidden, size.heads * width)
        shapes |= {f"{at}self_attn.{name}_norm.weight": (width,) for name in "qk" if head_norms}
        shapes |= {f"{at}mlp.{name}_proj.weight": (size.inner, size.hidden) for name in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (size.hidden, size.inner)
        shapes |= {f"{at}{name}_layernorm.weight": (size.hidden,) for name in ("input", "post_attention")}
    write_safetensors(folder / "model.safetensors", shapes | {f"{prefix}norm.weight": (size.hidden,)})


def write_gritlm(folder: Path, size: Size) -> None:
    """Write a GritLM in the layout in which vLLM takes it (Mistral's architecture, both directions)."""
    _write_decoder(folder, size, "gritlm", head_norms=False, prefix="model.")


def write_qwen3(folder: Path, size: Size) -> None:
    """Write a model as Qwen/Qwen3-Embedding-0.6B is: a decoder, the last token's state, normalised."""
    _write_decoder(folder, size, "qwen3", head_norms=True, prefix="", max_window_layers=size.layers)
    write_modules(folder, "lasttoken", size.hidden)


def _write_bert(folder: Path, size: Size, shapes: Shapes, *, architecture: str, positions: int, prefix: str) -> None:
    """Write a BERT, and further weights."""
    rows, width = (
        _write_sizes(folder, size, "bert", architectures=[architecture], max_position_embeddings=positions),
        size.hidden,
    )
    found: Shapes = {
        f"{prefix}embeddings.{table}_embeddings.weight": (count, width)
        for table, count in (("word", rows), ("position", positions), ("token_type", 2))
    }
    found |= _pair(f"{prefix}embeddings.LayerNorm", width)
    for at in (f"{prefix}encoder.layer.{number}." for number in range(size.layers)):
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            found |= _pair(f"{at}attention.{part}", width, width)
        found |= _pair(f"{at}intermediate.dense", size.inner, width) | _pair(f"{at}output.dense", width, size.inner)
        found |= _pair(f"{at}attention.output.LayerNorm", width) | _pair(f"{at}output.LayerNorm", width)
    write_safetensors(folder / "model.safetensors", found | _pair(f"{prefix}pooler.dense", width, width) | shapes)


def _pair(name: str, out: int, inputs: int = 0) -> Shapes:
    """Return the weight and the bias of a linear layer or a norm."""
    return {f"{name}.weight": (out, inputs) if inputs else (out,), f"{name}.bias": (out,)}


def write_bert(folder: Path, size: Size, *, mode: str = "mean_tokens") -> None:
    """Write a model as all-MiniLM-L6-v2 and bge are: a BERT, pooling, and a norm."""
    _write_bert(folder, size, {}, architecture="BertModel", positions=512, prefix="")
    write_modules(folder, mode, size.hidden, most=512)


def write_colbert(folder: Path, size: Size, *, query_tokens: int, document_tokens: int) -> None:
    """Write a model as colbert-ir/colbertv2.0 is: a BERT and a projection of each token."""
    linear: Shapes = {"linear.weight": (128, size.hidden)}
    _write_bert(folder, size, linear, architecture="HF_ColBERT", positions=max(512, document_tokens), prefix="bert.")
    metadata = _CONFIGS["colbert"] | {"query_maxlen": query_tokens, "doc_maxlen": document_tokens}
    write_json(folder / "artifact.metadata", metadata)
