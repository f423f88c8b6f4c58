"""The files by which Sentence Transformers knows a model: modules, pooling, heads and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from checkpoints.files import edit_json, write_json

OLD = "sentence_transformers.models."


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
