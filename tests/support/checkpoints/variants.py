"""Variants of one small checkpoint: the same files with other weights, as after more training, or with weights that are broken."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from checkpoints.encoders import write_bert
from checkpoints.sentence_layout import sentence_layout


def write_variant(folder: Path, seed: int = 0, *, noise: float = 1.0, width: int = 48) -> Path:
    """Write a BERT with mean pooling. `noise` is how far its weights are from those of the variant 0."""
    folder.mkdir()
    with contextlib.redirect_stderr(io.StringIO()):  # the progress of transformers
        write_bert(folder, hidden_size=width)
    sentence_layout(folder)
    if seed:
        change_weights(folder, seed, noise)
    return folder


def change_weights(folder: Path, seed: int, noise: float) -> None:
    """Add noise to all weights, relative to their size."""
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor + noise * 0.2 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, file, metadata={"format": "pt"})
