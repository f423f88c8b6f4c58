"""Random LoRA adapters, as PEFT saves them."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from whimbrel.checkpoint.reader import read_card
from whimbrel.model.load import load_model

ALL = r".*"


PREFIX = "base_model.model."


def linear_layers(model: Any, pattern: str = ALL, *, pooler: bool = False) -> dict[str, torch.nn.Linear]:
    layers = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    return {name: each for name, each in layers.items() if re.fullmatch(pattern, name) and (pooler or "pooler" not in name)}


def write_adapter(
    folder: Path,
    model: Any,
    *,
    pattern: str = ALL,
    rank: int = 4,
    seed: int = 1,
    prefix: str = "",
    pooler: bool = False,
    **config: Any,
) -> Any:
    """Write a random adapter as PEFT saves it; the model with the adapter merged."""
    folder.mkdir(parents=True, exist_ok=True)
    stated = {
        "peft_type": "LORA", "base_model_name_or_path": "some/model", "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "lora_alpha": 8, "lora_dropout": 0.1, "modules_to_save": None, "r": rank, "task_type": "FEATURE_EXTRACTION",
        "target_modules": ["query", "value"], "use_dora": False, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {},
        "layers_to_transform": None, "layers_pattern": None, "target_parameters": [], "auto_mapping": None, "revision": None, "peft_version": "0.21.2",
    } | config  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    generator, merged, tensors = torch.Generator().manual_seed(seed), copy.deepcopy(model), dict[str, torch.Tensor]()
    for name, layer in linear_layers(merged, pattern, pooler=pooler).items():
        r = next((value for key, value in stated["rank_pattern"].items() if re.match(rf"(.*\.)?({key})$", name)), rank)
        alpha = next(
            (value for key, value in stated["alpha_pattern"].items() if re.match(rf"(.*\.)?({key})$", name)),
            stated["lora_alpha"],
        )
        a, b = (0.2 * torch.randn(shape, generator=generator) for shape in ((r, layer.in_features), (layer.out_features, r)))
        tensors |= {f"{PREFIX}{prefix}{name}.lora_A.weight": a, f"{PREFIX}{prefix}{name}.lora_B.weight": b}
        with torch.no_grad():
            layer.weight += alpha / (r**0.5 if stated["use_rslora"] else r) * b @ a
    assert tensors
    save_file(tensors, folder / "adapter_model.safetensors")
    return merged


def load_with_adapters(folder: Path, **adapters: str) -> None:
    card = read_card(folder, "m", pooling="mean", adapters=adapters)
    load_model(folder, card, device=torch.device("cpu"), dtype=torch.float32)
