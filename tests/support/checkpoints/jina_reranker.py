"""jina-reranker-v3, small and random."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from checkpoints.files import edit_json
from checkpoints.rerankers import qwen, write_reranker

JSON = dict[str, Any]


MARKERS = ("<|embed_token|>", "<|rerank_token|>")


@cache
def tokenizer() -> tuple[JSON, JSON]:
    """Qwen's with the two markers, and the limit of the real one."""
    content, stated = copy.deepcopy(qwen())
    for name in MARKERS:
        number = max(token["id"] for token in content["added_tokens"]) + 1
        token = dict(content["added_tokens"][0], content=name, special=True, id=number)
        content["added_tokens"].append(token)
        stated["added_tokens_decoder"][str(number)] = {key: value for key, value in token.items() if key != "id"}
    return content, stated | {"model_max_length": 131_072}


def write_jina_reranker(folder: Path, **config: Any) -> tuple[Any, Any]:
    """Write a random checkpoint in the layout of jina-reranker-v3; return transformers' model and the projector."""
    model = write_reranker(folder, "Qwen3", tokenizer(), "Model", **({"max_position_embeddings": 131_072} | config))
    generator = torch.Generator().manual_seed(3)
    width = model.config.hidden_size
    projector = torch.nn.Sequential(
        torch.nn.Linear(width, width // 2, bias=False), torch.nn.ReLU(), torch.nn.Linear(width // 2, 512, bias=False)
    )
    with torch.no_grad():
        for parameter in projector.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    weights = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    weights |= {f"projector.{name}": tensor for name, tensor in projector.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    edit_json(
        folder / "config.json",
        architectures=["JinaForRanking"],
        auto_map={"AutoModel": "modeling.JinaForRanking"},
        tie_word_embeddings=True,
    )
    return model, projector.eval()
