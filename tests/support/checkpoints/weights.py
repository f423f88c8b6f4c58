"""Random weights for a model of transformers."""

from __future__ import annotations

from collections.abc import Callable

import torch


def is_norm(name: str) -> bool:
    """Return True for the weight of a norm, which is near 1."""
    return "norm" in name.lower() and name.endswith("weight")


def randomise(model: torch.nn.Module, *, near_one: Callable[[str], bool] = is_norm) -> torch.Generator:
    """Draw weights large enough that every part of the model matters, biases and norms included. Return the generator.

    The weights of Gemma's norms are differences from 1, so `near_one` is false for them.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if near_one(name) else 0.2 * noise)
    return generator
