"""LoRA adapters that are refused: settings, other models, names, and broken files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.classifiers import write_classifier
from checkpoints.families import CASES, write_model
from checkpoints.lora import load_with_adapters, write_adapter
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError, SetupError
from whimbrel.model.load import load_model

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "IA3"}, r"adapter_config.json: peft_type"),
    "biases": ({"bias": "lora_only"}, r"adapter_config.json: bias"),
    "DoRA": ({"use_dora": True}, r"adapter_config.json: use_dora"),
    "parameters of experts": ({"target_parameters": ["gate_up_proj"]}, r"adapter_config.json: target_parameters"),
    "whole modules": ({"modules_to_save": ["classifier"]}, r"adapter_config.json: modules_to_save"),
    "turned weights": ({"fan_in_fan_out": True}, r"adapter_config.json: fan_in_fan_out"),
    "no rank": ({"r": 0}, r"adapter_config.json: r: "),
    "another rank": ({"r": 5}, r"has shape \[4, 48\]; the config says \[5, 48\]"),
    "a key that is not known": ({"sparkle": 3}, r"adapter_config.json: sparkle"),
    "a pattern that is none": ({"rank_pattern": {"(": 3}}, r"rank_pattern: \(: is no regular expression"),
    "a rank that is none": ({"rank_pattern": {"query": -3}}, r"rank_pattern: query: must be positive"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_are_not_supported(case: str, tmp_path: Path) -> None:
    """A setting that would change numbers and is not supported is refused with file and key."""
    config, words = WRONG[case]
    model = write_model(tmp_path / "m", *CASES["bert"])
    write_adapter(tmp_path / "a", model)
    stated = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(stated | config))
    with pytest.raises(CheckpointError, match=words):
        load_with_adapters(tmp_path / "m", a=str(tmp_path / "a"))


def test_adapters_of_another_model(tmp_path: Path) -> None:
    """An adapter of a model of another size, or with other layers, is refused with the tensor's name."""
    model = write_model(tmp_path / "m", *CASES["bert"])
    wider = write_model(tmp_path / "wide", "Bert", CASES["bert"][1] | {"hidden_size": 64, "intermediate_size": 80})
    write_adapter(tmp_path / "a", wider)
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors: base_model.model.encoder.* has shape \[4, 64\]"):
        load_with_adapters(tmp_path / "m", a=str(tmp_path / "a"))
    write_adapter(tmp_path / "b", write_model(tmp_path / "q", *CASES["qwen3"]))
    with pytest.raises(CheckpointError, match="not known to Whimbrel"):
        load_with_adapters(tmp_path / "m", a=str(tmp_path / "b"))
    assert model is not None


@pytest.mark.parametrize(
    ("base", "served", "words"),
    [
        ("intfloat/e5-small", "intfloat/e5-small", None), ("intfloat/e5-small", "mirror/E5-Small", None), ("", "intfloat/e5-small", None),
        ("/home/me/e5", "intfloat/e5-small", None), ("./out/e5", "intfloat/e5-small", None), ("e5", "intfloat/e5-small", None),
        ("some/other", "intfloat/e5-small", "the adapter was made for some/other, and the model is intfloat/e5-small"),
        ("some/other", "my-folder", "some/other"),
    ],
)  # fmt: skip
def test_the_name_of_the_model_that_an_adapter_was_made_for(base: str, served: str, words: str | None, tmp_path: Path) -> None:
    """Another hub id is refused, unless the user says that it is the same model. A folder of another name gets a warning."""
    model = write_model(tmp_path / "m", *CASES["bert"])
    write_adapter(tmp_path / "a", model, base_model_name_or_path=base)
    adapters = {"a": str(tmp_path / "a")}

    def other(*accepted: str) -> str:
        return (
            read_card(tmp_path / "m", served, pooling="mean", adapters=adapters, accept_config=accepted)
            .encoder.lora[0]
            .other_base
        )

    if words is None:
        assert other() == ""
    elif "/" not in served:
        assert other() == words
    else:
        with pytest.raises(CheckpointError, match=words) as caught:
            other()
        assert "--accept-config base_model_name_or_path" in str(caught.value.hint)
        assert other("base_model_name_or_path") == base


def test_layers_of_heads_keep_the_models_weights(tmp_path: Path) -> None:
    """An adapter of a layer that only the head uses is refused. Where nothing uses the layer, it does not matter."""
    model = write_classifier(tmp_path / "r", "bert", num_labels=1)
    write_adapter(tmp_path / "a", model, pattern=r".*(query|pooler\.dense)", pooler=True)
    with pytest.raises(CheckpointError, match=r"pooler\.dense: this layer belongs to the model's head"):
        load_model(
            tmp_path / "r",
            read_card(tmp_path / "r", "m", adapters={"a": str(tmp_path / "a")}),
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
    write_model(tmp_path / "m", *CASES["bert"])
    load_with_adapters(tmp_path / "m", a=str(tmp_path / "a"))


def test_files_that_are_broken(tmp_path: Path) -> None:
    """An adapter whose tensors are missing, cut off, half there or no numbers is refused."""
    write_adapter(tmp_path / "a", write_model(tmp_path / "m", *CASES["bert"]))
    file = tmp_path / "a" / "adapter_model.safetensors"
    whole, tensors = file.read_bytes(), load_file(file)
    first = next(iter(tensors))
    for content in ({first: tensors[first]}, tensors | {first: torch.full_like(tensors[first], torch.nan)}):
        save_file(content, file)
        with pytest.raises(CheckpointError, match=r"this tensor is missing|NaN or infinity"):
            load_with_adapters(tmp_path / "m", a=str(tmp_path / "a"))
    file.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        load_with_adapters(tmp_path / "m", a=str(tmp_path / "a"))
    file.unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        load_with_adapters(tmp_path / "m", a=str(tmp_path / "a"))


def test_names_folders_and_models_that_take_none(tmp_path: Path) -> None:
    """Names that cannot be chosen, folders that are not there, and models that take no adapters are refused with the way on."""
    write_adapter(tmp_path / "a", write_model(tmp_path / "m", *CASES["bert"]))
    for name in ("a:b", "", "latest", "a b", "../a"):
        with pytest.raises(SetupError, match="is no name of an adapter"):
            load_with_adapters(tmp_path / "m", **{name: str(tmp_path / "a")})
    with pytest.raises(SetupError, match=r"no folder .* for the adapter 'a'"):
        load_with_adapters(tmp_path / "m", a=str(tmp_path / "x"))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        load_with_adapters(tmp_path / "m", a=str(tmp_path / "m"))
    write_model(tmp_path / "p", "Phi3", CASES["llama"][1])
    with pytest.raises(SetupError, match=r"family 'hf'") as caught:
        load_with_adapters(tmp_path / "p", a=str(tmp_path / "a"))
    assert "merge_and_unload" in str(caught.value.hint)
