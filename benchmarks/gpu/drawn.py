"""Weights that are drawn on the device, in place of many GB on the disk, for files that have a header and a hole for data.

With WHIMBREL_RUNNER=drawn:as_it_is a process draws the weights of each model that it loads: random, as `random_models` writes
them. A tensor's values depend on its name, its shape and the kind of device.
"""

import os
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from whimbrel.model import weights
from whimbrel_bench import random_models

_read_stored = weights.Weights._read


def as_it_is(runner: Any, folder: Path, plan: Any) -> Any:
    """Return the runner. Its module has seen to the weights."""
    return runner


def draw(name: str, shape: list[int], device: str) -> torch.Tensor:
    """Return the values of a tensor."""
    generator = torch.Generator(device).manual_seed(crc32(name.encode()))
    drawn = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return drawn.normal_(float(random_models.is_norm(name)), random_models.SCALE, generator=generator)


def _read(self: Any, full: str) -> torch.Tensor:
    if self._on_meta:
        return _read_stored(self, full)
    shape = self._handle_of[full].get_slice(full).get_shape()
    return draw(full, shape, "cuda" if torch.cuda.is_available() else "cpu")


if os.environ.get("WHIMBREL_RUNNER") == f"{__name__}:{as_it_is.__name__}":  # in an engine's process, before it loads a model
    weights.Weights._read = _read  # type: ignore[method-assign]
