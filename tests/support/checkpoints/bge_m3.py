"""BGE-M3, small and random, and FlagEmbedding's formula for its three outputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from checkpoints.encoders import write_xlmr
from checkpoints.sentence_layout import sentence_layout
from whimbrel.types.request import OutputName

M3_OUTPUTS: tuple[OutputName, ...] = ("dense", "sparse", "multi_vector")


def write_m3(folder: Path, *, width: int = 48, **config: Any) -> dict[str, torch.Tensor]:
    """An XLM-RoBERTa with the modules and the two files of BAAI/bge-m3; returns the tensors of these."""
    write_xlmr(folder, **config)
    sentence_layout(folder, modes=("cls",))
    generator = torch.Generator().manual_seed(9)
    found: dict[str, torch.Tensor] = {}
    for name, size in (("sparse", 1), ("colbert", width)):
        weight = torch.randn(size, 48, generator=generator).half()
        bias = torch.randn(size, generator=generator).half()
        torch.save({"weight": weight, "bias": bias}, folder / f"{name}_linear.pt")
        found |= {f"{name}.weight": weight.float(), f"{name}.bias": bias.float()}
    return found


def m3_reference(folder: Path, heads: dict[str, torch.Tensor], texts: list[str]) -> Iterator[tuple[Any, dict[int, float], Any]]:
    """(dense, weight of each id, vectors) of each text, as FlagEmbedding's M3Embedder has them."""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    unused = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=40, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**inputs).last_hidden_state[0]
            dense = torch.nn.functional.normalize(hidden[0], dim=-1)
            weights = torch.relu(hidden @ heads["sparse.weight"].T + heads["sparse.bias"])[:, 0]
            vectors = hidden[1:] @ heads["colbert.weight"].T + heads["colbert.bias"]
        lexical: dict[int, float] = {}
        for token, weight in zip(inputs["input_ids"][0].tolist(), weights.tolist(), strict=True):
            if token not in unused and weight > lexical.get(token, 0.0):
                lexical[token] = weight
        yield dense.numpy(), lexical, torch.nn.functional.normalize(vectors, dim=-1).numpy()
